"""One gradient for each parameter of a layer, norm or head, from those of its segments."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .wrapping import wants_zeros


def edges_of(parameters: Iterable[nn.Parameter]) -> list[GradientEdge]:
    """Of those that train, where a graph that has just run ends: what runs later may give a parameter another."""
    return [get_gradient_edge(p) for p in parameters if p.requires_grad]


class Gradients:
    """
    Sums the parameters' gradients over segments, in float32 and in the order of the calls; frozen ones cost nothing.
    One gradient a parameter leaves it, rounded once.

    Args:
        module (`nn.Module`): whose parameters they are.
        names (`list[str]`): their names, in the order in which the operation took them.
    """

    def __init__(self, module: nn.Module, names: list[str]):
        self.parameters = [module.get_parameter(name) for name in names]
        self.trainable = [p for p in self.parameters if p.requires_grad]
        self.partial: list[Tensor | None] = [None] * len(self.trainable)
        self.closed = False  # whether what takes part is known to be these

    def vjp(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        inputs: Sequence[Tensor],
        edges: list[GradientEdge] | None = None,
    ) -> list[Tensor]:
        """Gradient with respect to `inputs`; the parameters' is added to the sums. `edges` are those of a kept graph;
        any other has just run."""
        cotangents = [c.to(o.dtype) for o, c in zip(outputs, cotangents, strict=True)]
        known = [*map(get_gradient_edge, inputs), *(edges_of(self.trainable) if edges is None else edges)]
        if not self.closed:  # segments are alike: the first one's graph is looked at
            refuse_outsiders(outputs, known)
            self.closed = True
        with no_hooks(self.trainable):
            grads = torch.autograd.grad(outputs, known, cotangents, allow_unused=True)
        for i, g in enumerate(grads[len(inputs) :]):
            if g is None:
                continue
            partial = self.partial[i]
            if partial is None:  # a copy: whoever made the gradient may hold its storage, or hand it out twice
                self.partial[i] = g.to(torch.promote_types(g.dtype, torch.float32), copy=True)
            else:
                partial.add_(g)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=False)]

    def sums(self) -> list[Tensor | None]:
        """One gradient for each parameter, in the parameter's dtype; `None` for frozen ones."""
        sums = iter(self.partial)
        return [self._round(p, next(sums)) if p.requires_grad else None for p in self.parameters]

    @staticmethod
    def _round(parameter: nn.Parameter, total: Tensor | None) -> Tensor | None:
        if total is None:  # it took no part, as an adapter that is not active: stock's gradient is none either
            return torch.zeros_like(parameter) if wants_zeros(parameter) else None
        return total.to(parameter.dtype)


def refuse_outsiders(outputs: Sequence[Tensor], known: Sequence[GradientEdge]) -> None:
    """Raises if the outputs depend on a parameter that is not `known`, as by a closure: its gradient would be lost."""
    ends = {edge.node for edge in known}
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad" and node not in ends:
            raise RuntimeError(
                f"a parameter of shape {tuple(node.variable.shape)} takes part that is not the module's own (a hook "
                "or a patched forward uses it), so its gradient would be lost: register it on a module inside."
            )
        nodes += [n for n, _ in node.next_functions if n is not None]


@contextlib.contextmanager
def no_hooks(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Hooks that a user registered on parameters wait for the whole gradient, which autograd hands them afterwards."""
    hooked = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in hooked:
            hooks.update(before)
