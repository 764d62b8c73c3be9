"""Keys and values of one prompt in one layer: one buffer, allocated once, and its gradient beside it in backward.

T captured prompt tokens   N tokens of a segment   K key heads   D head size

k, v    [1, K, T, D]  in the dtype of the layer's keys       written chunk by chunk in forward
dk, dv  [1, K, T, D]  float32                                summed over replays and later chunks in backward
"""

import torch
from torch import Tensor

from ..groups import Segment


class Captured(Exception):
    """A layer has handed in all that is wanted of it."""


class View:
    """
    What a layer takes for its cache while it runs one segment (the part of `transformers.Cache` that attention asks
    for). It never writes in place: what the layer hands in is read off afterwards. With `capture_only` the layer is
    left there and then, by `Captured`: nothing reads what the last layer makes of the prompt.

    Attributes:
        past (`list[tuple[Tensor, Tensor]]`): K and V of the prompt so far, in blocks, oldest first.
        lengths (`tuple[int, ...]`): the sequences of the segment.
        new (`tuple[Tensor, Tensor]`): K and V of the segment itself, once the layer ran.
    """

    def __init__(self, past: list[tuple[Tensor, Tensor]], lengths: tuple[int, ...], capture_only: bool = False):
        self.past, self.lengths, self.capture_only = past, lengths, capture_only
        self.new: tuple[Tensor, ...] = ()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs) -> tuple[Tensor, Tensor]:
        if torch.is_autocast_enabled(key.device.type):  # as the stock attention kernels do under autocast
            dtype = torch.get_autocast_dtype(key.device.type)
            key, value = key.to(dtype), value.to(dtype)
        self.new = (key, value)
        if self.capture_only:
            raise Captured
        return key, value

    @property
    def leaves(self) -> list[Tensor]:
        """The prompt's tensors that a gradient is wanted for."""
        return [t for block in self.past for t in block if t.requires_grad]


class KeyValueState:
    """K and V of one prompt in one layer. A layer with a sliding window reads the last of them only (attention.py)."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.buffers: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def open(self, segment: Segment, differentiable: bool = False, capture_only: bool = False) -> View:
        if not segment.past:
            return View([], segment.lengths, capture_only)
        k, v = (t[:, :, : segment.past].detach().requires_grad_(differentiable) for t in self.buffers)
        return View([(k, v)], segment.lengths, capture_only)

    def write(self, segment: Segment, view: View) -> None:
        """Takes over what a prompt chunk's layer call left in its view."""
        if not self.buffers:
            self.buffers = [t.new_empty(1, t.shape[1], self.tokens, t.shape[3]) for t in view.new]
        for buffer, t in zip(self.buffers, view.new, strict=True):
            buffer[:, :, self._own(segment)] = t

    def cotangents(self, segment: Segment) -> list[Tensor]:
        """Gradient of a chunk's own K and V, from all that read them; complete once these ran."""
        dtype = self.buffers[0].dtype
        return [t[:, :, self._own(segment)].to(dtype) for t in self.gradients]

    def accumulate(self, segment: Segment, gradients: list[Tensor]) -> None:
        """Adds the gradient of what a segment read: of its view's leaves."""
        for into, g in zip(self.gradients if gradients else [], gradients, strict=True):
            into[:, :, : segment.past] += g

    def kept(self) -> list[Tensor]:
        """What backward needs, for `save_for_backward`. The state itself is empty afterwards."""
        kept, self.buffers = self.buffers, []
        return kept

    def load(self, kept: list[Tensor], differentiable: bool) -> None:
        self.buffers = kept
        if differentiable:
            self.gradients = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in kept]

    def clear(self) -> None:
        self.buffers, self.gradients = [], []

    def _own(self, segment: Segment) -> slice:
        return slice(segment.past, segment.past + segment.tokens)
