"""A task for GRPO whose answer can be checked, and that neither a length nor a format earns: look up one code of four.

A prompt is an excerpt of this repository's LICENSE in which four sentences stand, `Anna has the code 654.`, in an
order that says nothing; it ends with `The code of Anna is`, for one of the four names. The reward is 1 if the first
number of the completion is that name's code, else 0: all four codes one after the other, an empty answer, or another
of the codes earn what a guess does. What the best policy that reads no name earns is counted by `blind_scores`.

Everything is made from a seed. Training and held-out prompts share neither names nor a part of the text.
"""

import random
import re
from itertools import pairwise
from pathlib import Path

FACTS = 4
EXCERPT_WORDS = 20
TRAIN_NAMES = "Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karla Louis Maria Nora Oscar Paula"
HELD_OUT_NAMES = "Alice Bruno Carla Daniel Emma Frank Gina Hugo Isabel James Laura Martin Nina Peter Rosa Simon"
NAMES = {"train": TRAIN_NAMES.split(), "held_out": HELD_OUT_NAMES.split()}
WORDS = (Path(__file__).parents[1] / "LICENSE").read_text().split()
SPLIT = len(WORDS) * 3 // 4
TEXTS = {"train": WORDS[:SPLIT], "held_out": WORDS[SPLIT:]}
FACT = "{} has the code {}."
QUESTION = "The code of {} is"


def examples(split: str, count: int, seed: int) -> list[dict]:
    """`count` rows of `split` ("train" or "held_out"): `prompt`, `answer`, and `codes` as listed.

    The place of the answer goes round, so that each place holds it equally often when `FACTS` divides `count`.
    """
    rng = random.Random(f"{split} {seed}")
    text = TEXTS[split]
    rows = []
    for number in range(count):
        names = rng.sample(NAMES[split], FACTS)
        codes = [str(code) for code in rng.sample(range(100, 1000), FACTS)]
        start = rng.randrange(len(text) - EXCERPT_WORDS)
        words = text[start : start + EXCERPT_WORDS]
        places = [0, *sorted(rng.sample(range(1, EXCERPT_WORDS), FACTS)), EXCERPT_WORDS]
        pieces = [" ".join(words[begin:end]) for begin, end in pairwise(places)]
        facts = [FACT.format(name, code) for name, code in zip(names, codes, strict=True)]
        lines = [part for pair in zip(pieces, [*facts, ""], strict=True) for part in pair]
        prompt = f"{' '.join(lines).strip()}\n\n{QUESTION.format(names[number % FACTS])}"
        rows.append({"prompt": prompt, "answer": codes[number % FACTS], "codes": codes})
    rng.shuffle(rows)
    return rows


def first_number(text: str) -> str | None:
    found = re.search(r"\d+", text)
    return found and found.group()


def correct_code(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """The reward, in TRL's signature: 1 if the first number of a completion is the answer, else 0."""
    return [float(first_number(text) == expected) for text, expected in zip(completions, answer, strict=True)]


def blind_scores(rows: list[dict]) -> dict[str, float]:
    """Mean reward of each policy that answers in perfect form but does not read the name that is asked for."""
    picked = {f"code {place + 1} of {FACTS}": [row["codes"][place] for row in rows] for place in range(FACTS)}
    picked["smallest code"] = [min(row["codes"]) for row in rows]
    picked["largest code"] = [max(row["codes"]) for row in rows]
    answers = [row["answer"] for row in rows]
    return {name: sum(correct_code(codes, answers)) / len(rows) for name, codes in picked.items()}
