"""Pages: what one tensor of a layer's state is for each chunk of a prompt, and the gradient of each in backward.

    Grow     append-only along a dimension (keys, values, latents): one buffer, a chunk's page is a slice of it
    Carry    replaced by each chunk (convolution, recurrence): a page is the state at the chunk's end

Gradients are float32, summed over all that read a page; that of a chunk's own page is complete once these ran.
"""

from typing import Protocol

import torch
from torch import Tensor

from ..groups import Segment


class Pages(Protocol):
    def write(self, segment: Segment, t: Tensor) -> None:
        """Takes over what a chunk's layer call made."""

    def read(self, segment: Segment) -> Tensor | None:
        """What the segment sees of the past; `None` at the beginning."""

    def accumulate(self, segment: Segment, g: Tensor) -> None:
        """Adds the gradient of what the segment read."""

    def cotangent(self, segment: Segment) -> Tensor | None:
        """Gradient of what the chunk wrote; `None` if nothing read it."""

    def kept(self) -> list[Tensor]:
        """What backward needs; the pages are empty afterwards."""

    def load(self, kept: list[Tensor]) -> None:
        """Puts back what was kept, without gradients."""


class Grow:
    def __init__(self, tokens: int, dim: int):
        self.tokens, self.dim = tokens, dim
        self.buffer: Tensor | None = None
        self.gradient: Tensor | None = None

    def write(self, segment: Segment, t: Tensor) -> None:
        if self.buffer is None:
            shape = list(t.shape)
            shape[self.dim] = self.tokens
            self.buffer = t.new_empty(shape)
        self.buffer.narrow(self.dim, segment.past, segment.tokens).copy_(t)

    def read(self, segment: Segment) -> Tensor | None:
        return self.buffer.narrow(self.dim, 0, segment.past) if self.buffer is not None and segment.past else None

    def accumulate(self, segment: Segment, g: Tensor) -> None:
        assert self.buffer is not None
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.buffer, dtype=high(g))
        self.gradient.narrow(self.dim, 0, segment.past).add_(g)

    def cotangent(self, segment: Segment) -> Tensor | None:
        return None if self.gradient is None else self.gradient.narrow(self.dim, segment.past, segment.tokens)

    def kept(self) -> list[Tensor]:
        assert self.buffer is not None
        kept, self.buffer = [self.buffer], None
        return kept

    def load(self, kept: list[Tensor]) -> None:
        (self.buffer,), self.gradient = kept, None


class Carry:
    """Page i is the state at the end of chunk i."""

    def __init__(self) -> None:
        self.pages: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}

    def write(self, segment: Segment, t: Tensor) -> None:
        assert len(self.pages) == segment.number, "chunks run in order"
        self.pages.append(t.clone())  # a slice would keep all of its storage

    def read(self, segment: Segment) -> Tensor | None:
        return self.pages[segment.number - 1] if segment.number else None

    def accumulate(self, segment: Segment, g: Tensor) -> None:
        i = segment.number - 1
        if i in self.gradients:
            self.gradients[i] += g
        else:
            self.gradients[i] = g.to(high(g), copy=True)

    def cotangent(self, segment: Segment) -> Tensor | None:
        return self.gradients.pop(segment.number, None)

    def kept(self) -> list[Tensor]:
        kept, self.pages = self.pages, []
        return kept

    def load(self, kept: list[Tensor]) -> None:
        self.pages, self.gradients = kept, {}


def high(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
