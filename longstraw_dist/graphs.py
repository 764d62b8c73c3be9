"""Graphs that are kept from a layer's forward to its backward, within a budget, instead of being computed again.

What a graph saves is counted as autograd saves it, each storage once. A layer's own parameters are not saved but
named, and taken anew in backward: what an engine gathered for the forward is not kept alive.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .state import View


@dataclass
class Graph:
    """One segment's run through one layer, with its graph."""

    x: Tensor
    view: View
    y: Tensor | None
    nbytes: int = 0


class Budget:
    """
    Args:
        nbytes (`int`): what the graphs of one call may hold together.
    """

    def __init__(self, nbytes: int):
        self.left = nbytes

    def take(self, graph: Graph) -> bool:
        """Whether the graph may be kept. The first one that does not fit ends it: a call's segments are alike."""
        if graph.nbytes > self.left:
            self.left = 0
            return False
        self.left -= graph.nbytes
        return True


@contextlib.contextmanager
def counted(module: nn.Module, known: list) -> Iterator[dict[int, int]]:
    """While it is open, notes the bytes of each storage that autograd saves, but for those of the module's parameters
    and of what is `known`. Yields address -> bytes."""
    parameters = [(p.data_ptr(), p.data_ptr() + p.nbytes, p) for p in module.parameters()]  # may share a storage
    sizes = dict.fromkeys((t.untyped_storage().data_ptr() for t in known if isinstance(t, Tensor)), 0)

    def pack(t: Tensor) -> Any:
        for begin, end, p in parameters:
            if begin <= t.data_ptr() < end and t.dtype == p.dtype:
                return p, t.shape, t.stride(), t.storage_offset() - p.storage_offset()
        note(sizes, t)
        return t.detach()  # an operation that saves its own output would hold itself

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        p, shape, stride, offset = packed
        return p.detach().as_strided(shape, stride, p.storage_offset() + offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield sizes


def note(sizes: dict[int, int], t: Tensor) -> None:
    sizes.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
