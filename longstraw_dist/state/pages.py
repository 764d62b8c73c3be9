"""Pages: what one tensor of a layer's state is for each chunk of a prompt, and the gradient of each in backward.

    Grow     append-only along a dimension (keys, values, latents): one buffer, a chunk's page is a slice of it
    Window   the same, of which only the last tokens are read: a page is the end of its chunk
    Carry    replaced by each chunk (convolution, recurrence): a page is the state at the chunk's end

Gradients are float32, summed over all that read a page; that of a chunk's own page is complete once these ran.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

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

    def kept(self, exact: bool) -> list[Tensor]:
        """What backward needs, of the chunks too where the prompt's gradient is `exact`; empty afterwards."""

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
        # by `data`: a graph that reads the rows before these may be kept, and does not mind
        self.buffer.data.narrow(self.dim, segment.past, segment.tokens).copy_(t)

    def read(self, segment: Segment) -> Tensor | None:
        return self.buffer.narrow(self.dim, 0, segment.past) if self.buffer is not None and segment.past else None

    def accumulate(self, segment: Segment, g: Tensor) -> None:
        assert self.buffer is not None
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.buffer, dtype=high(g))
        self.gradient.narrow(self.dim, 0, segment.past).add_(g)

    def cotangent(self, segment: Segment) -> Tensor | None:
        return None if self.gradient is None else self.gradient.narrow(self.dim, segment.past, segment.tokens)

    def kept(self, exact: bool) -> list[Tensor]:
        assert self.buffer is not None
        kept, self.buffer = [self.buffer], None
        return kept

    def load(self, kept: list[Tensor]) -> None:
        (self.buffer,), self.gradient = kept, None


class Window:
    """The same, of which a segment reads the last `size` tokens: of each chunk only its last ones are kept."""

    def __init__(self, size: int, dim: int):
        self.size, self.dim = size, dim
        self.pages: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}

    def write(self, segment: Segment, t: Tensor) -> None:
        assert len(self.pages) == segment.number, "chunks run in order"
        kept = min(self.size, segment.tokens)
        self.pages.append(t.narrow(self.dim, segment.tokens - kept, kept).clone())

    def _seen(self, segment: Segment) -> list[tuple[int, int]]:
        """Of each page that the segment reads, oldest first, its number and how many of its last tokens."""
        seen, left = [], self.size
        for i in reversed(range(segment.number)):
            if (n := min(left, self.pages[i].shape[self.dim])) == 0:
                break
            seen.append((i, n))
            left -= n
        return seen[::-1]

    def read(self, segment: Segment) -> Tensor | None:
        ends = [self.pages[i].narrow(self.dim, self.pages[i].shape[self.dim] - n, n) for i, n in self._seen(segment)]
        return torch.cat(ends, self.dim) if ends else None

    def accumulate(self, segment: Segment, g: Tensor) -> None:
        begin = 0
        for i, n in self._seen(segment):
            page = self.pages[i]
            if i not in self.gradients:
                self.gradients[i] = torch.zeros_like(page, dtype=high(g))
            self.gradients[i].narrow(self.dim, page.shape[self.dim] - n, n).add_(g.narrow(self.dim, begin, n))
            begin += n

    def cotangent(self, segment: Segment) -> Tensor | None:
        g = self.gradients.pop(segment.number, None)
        if g is None:
            return None
        return pad(g.transpose(self.dim, -1), (segment.tokens - g.shape[self.dim], 0)).transpose(self.dim, -1)

    def kept(self, exact: bool) -> list[Tensor]:
        kept, self.pages = self.pages, []
        if not exact:  # only the replays will read it
            left = self.size
            for i in reversed(range(len(kept))):
                n = min(left, kept[i].shape[self.dim])
                kept[i] = kept[i].narrow(self.dim, kept[i].shape[self.dim] - n, n).clone()
                left -= n
        return kept

    def load(self, kept: list[Tensor]) -> None:
        self.pages, self.gradients = kept, {}


class Carry:
    """Page i is the state at the end of chunk i. Where it is large, only every so manieth is kept for backward, which
    runs the chunks between again (`PromptState.missing`)."""

    def __init__(self) -> None:
        self.pages: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}

    def write(self, segment: Segment, t: Tensor) -> None:
        self.pages[segment.number] = t.clone()  # a slice would keep all of its storage

    def read(self, segment: Segment) -> Tensor | None:
        return self.pages[segment.number - 1] if segment.number else None

    def accumulate(self, segment: Segment, g: Tensor) -> None:
        i = segment.number - 1
        if i in self.gradients:
            self.gradients[i] += g
        else:
            self.gradients[i] = g.to(high(g), copy=True)

    def cotangent(self, segment: Segment) -> Tensor | None:
        self.pages.pop(segment.number, None)  # nothing reads it any more
        return self.gradients.pop(segment.number, None)

    def thin(self, interval: int) -> None:
        last = max(self.pages)
        self.pages = {i: t for i, t in self.pages.items() if i == last or (i + 1) % interval == 0}

    def kept(self, exact: bool) -> list[Tensor]:
        if not exact:
            self.thin(len(self.pages) + 1)
        kept, self.numbers, self.pages = list(self.pages.values()), list(self.pages), {}
        return kept

    def load(self, kept: list[Tensor]) -> None:
        self.pages, self.gradients = dict(zip(self.numbers, kept, strict=True)), {}


def high(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
