"""Tools and environments: multi-turn rollouts of TRL's own loop, whose answers are masked out of the loss."""

import string

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

from longstraw_dist.integrations.trl import LongStrawGRPOTrainer

from .models import inside_of_another
from .trl_comparison import SGD, compare, rows, train_both
from .trl_training import norm, save_models, train

PLACES = ["a town", "a hill", "a river", "the sea", "a road", "a mill"]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and Qwen3's chat template."""
    special = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    characters = [*special, *string.printable]
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(special)
    tok = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>", padding_side="left"
    )
    tok.chat_template = qwen3_chat_template
    return tok


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tok, folder = chat_tokenizer(), tmp_path_factory.mktemp("tools")
    return save_models(folder, "qwen3", tok=tok, num_hidden_layers=2, max_position_embeddings=2048)


def speak(trainer) -> None:
    """Scripted turns: of each group one row calls no tool, one calls it with a wrong name, and two call it well."""
    tok, calls = trainer._tokenizer, []

    def turn(prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        calls.append(len(prompt_ids))
        completions = []
        for i in range(len(prompt_ids)):
            generator = torch.Generator().manual_seed(1000 * len(calls) + i)
            text = "".join(chr(97 + c) for c in torch.randint(0, 26, (5 + i % 4,), generator=generator).tolist())
            if num_generations > 1 and i % 4 < 3:
                name = "look" if i % 4 else "seek"
                text += f'<tool_call>\n{{"name": "{name}", "arguments": {{"n": {i}}}}}\n</tool_call>'
            completions.append(tok(text + "<|im_end|>")["input_ids"])
        return completions, None

    trainer._generate_single_turn = turn


def score(completions, **kwargs):
    text = ["".join(message["content"] or "" for message in turns) for turns in completions]
    return [sum(ord(c) * (i + 1) for i, c in enumerate(t)) % 101 / 101 for t in text]


def look(n: int) -> str:
    """Looks.

    Args:
        n: How far.
    """
    return "z" * (n % 7) + "!"


class Place:
    """An environment whose prompts, tools and reward are its own."""

    def reset(self, **kwargs) -> str:
        self.looks = []
        return f" You are at {PLACES[len(kwargs['prompt'][0]['content']) % len(PLACES)]}."

    def look(self, n: int) -> str:
        """Looks.

        Args:
            n: How far.
        """
        self.looks.append(n)
        return "z" * (n % 7) + "?"

    def get_reward(self) -> float:
        return sum(self.looks) % 11 / 11


def conversations(n: int = 8) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": "Go" + "o" * i}] for i in range(n)]})


CASES = {  # name -> (arguments, options, rows of four that a tool answered, rows that are masked as truncated)
    "tools": ({"tools": [look]}, {}, 3, 0),
    "an environment": ({"environment_factory": Place}, {"importance_sampling_level": "sequence"}, 3, 0),
    "truncated": ({"tools": [look]}, {"max_completion_length": 160, "mask_truncated_completions": True}, 2, 1),
}


@pytest.mark.parametrize("case", [*list(CASES)[:2], pytest.param("truncated", marks=pytest.mark.slow)])
def test_tools(folder, record_property, case):
    """What a tool answers is read by the model, and weighs nothing."""
    given, options, answered, truncated = CASES[case]
    common = {"rollout_func": None, "processing_class": chat_tokenizer(), "reward_funcs": score}
    options = {"max_completion_length": 300, "max_steps": 2, "beta": 0.04, **options}
    ours, theirs = train_both(folder, lambda: common | given, dataset=conversations(), prepare=speak, **options)
    compare(ours, theirs, record_property)
    log = ours.log[0]
    assert log["tools/call_frequency"] == pytest.approx(0.75)
    assert log["tools/failure_frequency"] == pytest.approx(1 / 3)
    for batch in ours.batches:
        answers = (batch["completion_mask"] * (1 - batch["tool_mask"])).sum(1)
        assert (answers > 0).sum() == answered
        assert (batch["completion_mask"].sum(1) == 0).sum() == truncated
        assert len({tuple(ids) for ids in rows(batch, "prompt")}) == 1
    assert any(
        "You are at" in text for text in ours.trainer._tokenizer.batch_decode(ours.batches[0]["prompt_ids"])
    ) == (case == "an environment")


@pytest.mark.slow
def test_tools_of_a_text_model_inside_of_another(tmp_path):
    """Named by its path, as released: the longest context is the text model's."""
    tok = chat_tokenizer()
    inside_of_another(vocab_size=len(tok), max_position_embeddings=2048).save_pretrained(tmp_path / "policy")
    tok.save_pretrained(tmp_path / "policy")
    given = {"rollout_func": None, "processing_class": tok, "reward_funcs": score, "tools": [look]}
    options = {**SGD, "max_completion_length": 300, "max_steps": 2}
    model = str(tmp_path / "policy")
    ours = train(
        LongStrawGRPOTrainer, tmp_path, model=model, dataset=conversations(), prepare=speak, arguments=given, **options
    )
    assert ours.log[0]["tools/call_frequency"] == pytest.approx(0.75)
    assert min(norm(g) for g in ours.gradients) > 1e-2
