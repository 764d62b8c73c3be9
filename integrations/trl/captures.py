"""The prompts that a rollout has run, kept for the updates that follow; and how old they may grow."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from longstraw_dist.capture import Capture
from longstraw_dist.groups import PromptGroup

# Of `generate`'s settings, those under which it would not go on from one cache with one row for each row of the batch.
INCOMPATIBLE = (
    "assistant_early_exit",
    "cache_implementation",
    "num_beams",
    "num_return_sequences",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "use_cache",
)


class Captures:
    """
    Captures of a generation batch's prompts.

    Args:
        max_age (`int`): optimizer steps for which they are used after the one that they were made in.
    """

    def __init__(self, max_age: int):
        self.max_age = max_age
        self.made_at = 0  # optimizer step
        self.by_prompt: dict[tuple[int, ...], Capture] = {}

    @property
    def nbytes(self) -> int:
        return sum(capture.nbytes for capture in self.by_prompt.values())

    def age(self, step: int) -> int:
        return step - self.made_at if self.by_prompt else 0

    def drop(self) -> None:
        self.by_prompt = {}

    def add(self, captures: Iterable[Capture], step: int) -> None:
        """Those of new prompts: of one that it has, the old capture stays, so that its age is what `age` says."""
        if not self.by_prompt:
            self.made_at = step
        self.by_prompt = {tuple(capture.prompt_ids.tolist()): capture for capture in captures} | self.by_prompt

    def given_to(self, groups: Sequence[PromptGroup], now: dict[str, Any], step: int) -> list[PromptGroup]:
        """The groups, with the captures that hold `now`, at this optimizer step; what is too old is dropped."""
        if self.age(step) > self.max_age:
            self.drop()
        return [dataclasses.replace(group, capture=self._of(group, now)) for group in groups]

    def _of(self, group: PromptGroup, now: dict[str, Any]) -> Capture | None:
        capture = self.by_prompt.get(tuple(group.prompt_ids.tolist())) if self.by_prompt else None
        return capture if capture is not None and capture.find_change(now, stale=True) is None else None
