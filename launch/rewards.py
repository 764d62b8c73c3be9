"""Rewards of the quickstart, in TRL's signature. A recipe names them by import path, as it would yours:

    reward_funcs: [launch.rewards.short_answer, launch.rewards.answer_alone]

Both take conversational `completions` and the data set's column `answer`, and return one float a completion.
"""

import re


def short_answer(completions: list[list[dict]], answer: list[str], **kwargs) -> list[float]:
    """0 without the answer; with it 1/2 + 1/(2n) for n words in all: 1 alone, less with each further word."""
    return [
        0.5 + 0.5 / len(_words(completion)) if expected in _words(completion) else 0.0
        for completion, expected in zip(completions, answer, strict=True)
    ]


def answer_alone(completions: list[list[dict]], answer: list[str], **kwargs) -> list[float]:
    """1 where the completion is the answer and nothing else, else 0: the strict score, to watch with weight 0."""
    return [float(_words(completion) == [expected]) for completion, expected in zip(completions, answer, strict=True)]


def _words(completion: list[dict]) -> list[str]:
    return re.findall(r"\w+", completion[0]["content"])
