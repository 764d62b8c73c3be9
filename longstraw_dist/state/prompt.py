"""What one layer remembers of one prompt: a set of pages for each tensor that the layer hands to its cache."""

from collections.abc import Iterator

from torch import Tensor

from ..groups import Segment
from .pages import Carry, Grow, Pages
from .view import View

ATTENTION = frozenset({"keys", "values"})
ALONG = {"keys": 2, "values": 2, "index": 1}  # the dimension along which each grows


class PromptState:
    """
    Args:
        tokens (`int`): captured tokens of the prompt.
        attends (`bool`): the layer's state is keys and values and nothing else.
        joined (`bool`): it makes them of latents, which are the state.
    """

    def __init__(self, tokens: int, attends: bool, joined: bool):
        self.tokens, self.attends, self.joined = tokens, attends, joined
        self.pages: dict[str, Pages] = {}
        self.counts: dict[str, int] = {}

    def open(self, segment: Segment, differentiable: bool = False, capture_only: bool = False) -> View:
        """With `capture_only` the layer is left as soon as its state is known, where that is known to be all."""
        past = {}
        for name, pages in self.pages.items():
            if (t := pages.read(segment)) is not None:
                past[name] = t.detach().requires_grad_(differentiable and name != "index")  # chosen by, not learned
        return View(past, segment, ATTENTION if capture_only and self.attends else frozenset(), self.joined)

    def write(self, segment: Segment, view: View) -> None:
        """Takes over what a prompt chunk's layer call left in its view."""
        for name, t in view.new.items():
            if name not in self.pages:
                self.pages[name] = Grow(self.tokens, ALONG[name]) if name in ALONG else Carry()
            self.pages[name].write(segment, t)

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

    def kept(self) -> list[Tensor]:
        """What backward needs, for `save_for_backward`. The state itself is empty afterwards."""
        kept = {name: pages.kept() for name, pages in self.pages.items()}
        self.counts = {name: len(tensors) for name, tensors in kept.items()}
        return [t for tensors in kept.values() for t in tensors]

    def load(self, kept: Iterator[Tensor]) -> None:
        for name, pages in self.pages.items():
            pages.load([next(kept) for _ in range(self.counts[name])])

    def clear(self) -> None:
        self.pages = {}
