"""What one layer remembers of one prompt: a set of pages for each tensor that the layer hands to its cache."""

import copy
from collections.abc import Iterator

from torch import Tensor

from ..groups import Segment
from ..traits import Traits
from .pages import Carry, Grow, Pages, Window
from .view import View

ATTENTION = frozenset({"keys", "values"})
ALONG = {"keys": 2, "values": 2, "index": 1}  # the dimension along which each grows


class PromptState:
    """
    Args:
        tokens (`int`): captured tokens of the prompt.
        traits (`Traits`): the layer's.
    """

    def __init__(self, tokens: int, traits: Traits):
        self.tokens, self.traits = tokens, traits
        self.pages: dict[str, Pages] = {}
        self.emptied: dict[str, Pages] = {}  # whose tensors autograd keeps from forward to backward
        self.counts: dict[str, int] = {}

    def open(self, segment: Segment, differentiable: bool = False, capture_only: bool = False) -> View:
        """With `capture_only` the layer is left as soon as its state is known, where that is known to be all."""
        past = {}
        for name, pages in self.pages.items():
            if (t := pages.read(segment)) is not None:
                past[name] = t.detach().requires_grad_(differentiable and name != "index")  # chosen by, not learned
        enough = ATTENTION if capture_only and self.traits.attends else frozenset()
        return View(past, segment, enough, self.traits.joined)

    def write(self, segment: Segment, view: View) -> None:
        """Takes over what a prompt chunk's layer call left in its view."""
        for name, t in view.new.items():
            if name not in self.pages:
                self.pages[name] = self._begin(name, view.window)
            self.pages[name].write(segment, t)

    def _begin(self, name: str, window: int | None) -> Pages:
        if name not in ALONG:
            return Carry()
        return Grow(self.tokens, ALONG[name]) if window is None else Window(window - 1, ALONG[name])

    @property
    def grown(self) -> list[Tensor]:
        """The buffers of what only grows: kept for backward anyway, and what a segment reads of them is no copy."""
        return [p.buffer for p in self.pages.values() if isinstance(p, Grow) and p.buffer is not None]

    def missing(self, chunk: Segment, chunks: list[Segment]) -> list[Segment]:
        """The chunks to run again, in order, for the state before `chunk` to be there."""
        carried = [pages for pages in self.pages.values() if isinstance(pages, Carry)]
        begin = chunk.number
        while begin and any(begin - 1 not in pages.pages for pages in carried):
            begin -= 1
        return chunks[begin : chunk.number]

    def restore(self, chunk: Segment, view: View) -> None:
        """Takes over what a missing chunk, run again, left of what is carried."""
        for name, t in view.new.items():
            if isinstance(pages := self.pages[name], Carry):
                pages.write(chunk, t)

    def cotangents(self, segment: Segment, view: View) -> tuple[list[Tensor], list[Tensor]]:
        """What a chunk handed in again, and the gradient of each from all that read it."""
        outputs, cotangents = [], []
        for name, t in view.new.items():
            if t.requires_grad and (g := self.pages[name].cotangent(segment)) is not None:
                outputs.append(t)
                cotangents.append(g)
        return outputs, cotangents

    def accumulate(self, segment: Segment, view: View, gradients: list[Tensor]) -> None:
        """Adds the gradients of what a segment read, in the order of `view.leaves`."""
        for name, g in zip(view.leaves, gradients, strict=True):
            self.pages[name].accumulate(segment, g)

    def kept(self, exact: bool, hidden_bytes: int) -> list[Tensor]:
        """What backward needs, for `save_for_backward`. The state itself is empty afterwards. Of what is carried so
        few pages are kept that they are no larger than a chunk's hidden states, whose bytes are given."""
        carried = [pages for pages in self.pages.values() if isinstance(pages, Carry)]
        page_bytes = sum(t.nbytes for pages in carried for t in list(pages.pages.values())[-1:])
        for pages in carried:
            pages.thin(-(-page_bytes // max(hidden_bytes, 1)))
        kept = {name: pages.kept(exact) for name, pages in self.pages.items()}
        self.counts = {name: len(tensors) for name, tensors in kept.items()}
        self.emptied, self.pages = self.pages, {}
        return [t for tensors in kept.values() for t in tensors]

    def load(self, kept: Iterator[Tensor]) -> None:
        """Puts back what was kept; once more for another backward of the same graph."""
        self.pages = {name: copy.copy(pages) for name, pages in self.emptied.items()}
        for name, pages in self.pages.items():
            pages.load([next(kept) for _ in range(self.counts[name])])

    def clear(self) -> None:
        self.pages = {}
