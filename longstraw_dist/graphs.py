"""Graphs that are kept from a layer's forward to its backward, within a budget, instead of being computed again.

What a graph saves is counted as autograd saves it, each storage once. A layer's own parameters are not saved but
named, and taken anew in backward: what an engine gathered for the forward is not kept alive. (What autocast makes of
them is.)
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .state import View


@dataclass
class Graph:
    """One segment's run through one layer, with its graph."""

    x: Tensor
    view: View
    y: Tensor | None
    nbytes: int = 0
    edges: list[GradientEdge] | None = None  # of the parameters, where it is kept


class Budget:
    """
    Args:
        nbytes (`int`): what the graphs of one call may hold together.
    """

    def __init__(self, nbytes: int):
        self.left = nbytes

    def take(self, nbytes: int) -> bool:
        """Whether a graph may be kept. The first one that does not fit ends it: a call's segments are alike."""
        if nbytes > self.left:
            self.left = 0
            return False
        self.left -= nbytes
        return True


def count(graph: Graph, saved: dict[int, int], kept_anyway: list) -> int:
    """Bytes that a graph holds: what was `saved`, the past and its outputs, without what is alive anyway."""
    for t in (graph.y, *graph.view.new.values(), *graph.view.past.values()):
        if t is not None:
            note(saved, t)
    for t in (graph.x, *kept_anyway):
        if isinstance(t, Tensor):
            saved.pop(address(t), None)
    return sum(saved.values())


@contextlib.contextmanager
def saved_once(module: nn.Module) -> Iterator[dict[int, int]]:
    """While it is open, autograd names the module's parameters in place of saving them. Yields, of each storage that
    it saves, address and bytes. What was changed in place since is refused, as by autograd itself."""
    parameters: dict[int, list[Tensor]] = {}  # by storage, which they may share
    for p in module.parameters():
        parameters.setdefault(address(p), []).append(p)
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Any:
        for p in parameters.get(address(t), ()):
            if p.data_ptr() <= t.data_ptr() < p.data_ptr() + p.nbytes and t.dtype == p.dtype:
                return p, p.stride(), t.shape, t.stride(), t.storage_offset() - p.storage_offset()
        note(saved, t)
        return t.detach(), t._version  # an operation that saves its own output would hold itself

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed[0], nn.Parameter):
            p, layout, shape, stride, offset = packed
            if p.stride() != layout:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} changed its strides between forward and backward, from "
                    f"{layout} to {p.stride()}: lay it out before the forward."
                )
            return p.detach().as_strided(shape, stride, p.storage_offset() + offset)
        t, version = packed
        if t._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(t.shape)} is at version {t._version}; expected version {version} instead."
            )
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield saved


def note(saved: dict[int, int], t: Tensor) -> None:
    saved[address(t)] = t.untyped_storage().nbytes()


def address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
