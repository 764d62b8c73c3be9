"""A tiny tokenizer, data set and reward for TRL tests; nothing is downloaded."""

import string

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = ["<pad>", "<eos>", "<unk>", *string.ascii_letters, *string.digits, *" .,:;?!-"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; 72 in all."""
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def prompts(n: int = 16) -> Dataset:
    """Prompts of 5 to 40 characters."""
    text = "the quick brown fox jumps over the lazy dog and runs away"
    return Dataset.from_dict({"prompt": [text[i : i + 5 + 7 * i % 36] for i in range(n)]})


def reward(completions, **kwargs) -> list[float]:
    """Differs between the completions of a group, so that no advantage is zero."""
    return [sum(ord(c) * (i + 1) for i, c in enumerate(text)) % 101 / 101 for text in completions]
