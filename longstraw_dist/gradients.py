"""One gradient for each parameter of a layer, norm or head, from those of its segments."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .graphs import address
from .wrapping import wants_zeros


class Gradients:
    """Sums the parameters' gradients over segments, in float32 and in the order of the calls; frozen ones cost
    nothing. One gradient a parameter leaves it, rounded once."""

    def __init__(self, parameters: Iterator[nn.Parameter]):
        self.parameters = list(parameters)
        self.trainable = [p for p in self.parameters if p.requires_grad]
        self.partial: list[Tensor | None] = [None] * len(self.trainable)
        self.closed = False  # whether what takes part is known to be these

    def vjp(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Gradient with respect to `inputs`; the parameters' is added to the sums."""
        cotangents = [c.to(o.dtype) for o, c in zip(outputs, cotangents, strict=True)]
        if not self.closed:  # segments are alike: the first one's graph is looked at
            refuse_outsiders(outputs, [*inputs, *self.trainable])
            self.closed = True
        with no_hooks(self.trainable):
            grads = torch.autograd.grad(outputs, [*inputs, *self.trainable], cotangents, allow_unused=True)
        holders = Counter(address(t) for t in (*cotangents, *grads) if t is not None)
        for i, g in enumerate(grads[len(inputs) :]):
            if g is None:
                continue
            partial = self.partial[i]
            if partial is None:  # a copy, unless it is a matrix in a storage of its own
                alone = g.dim() > 1 and g.nbytes == g.untyped_storage().nbytes() and holders[address(g)] == 1
                self.partial[i] = g.to(torch.promote_types(g.dtype, torch.float32), copy=not alone)
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


def refuse_outsiders(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Raises if the outputs depend on a parameter that is not `known`, as by a closure: its gradient would be lost."""
    ids = {id(t) for t in known}
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad" and id(node.variable) not in ids:
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
