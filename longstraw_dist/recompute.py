"""What a backward that computes a forward again needs of it: the same weights, the same autocast, all of its code."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def versions(module: nn.Module) -> dict[str, tuple[int, bool]]:
    """Of each parameter, how often it was changed in place, as autograd counts, and whether it is trained."""
    return {name: (p._version, p.requires_grad) for name, p in module.named_parameters()}


@contextlib.contextmanager
def watched(ctx: Any, module: nn.Module) -> Iterator[None]:
    """
    Around a forward: notes on `ctx` the parameters' names, in the order of now, which the forward itself may change
    (PEFT registers `target_parameters` anew each time), and the versions of those that it leaves as they are.
    """
    before = versions(module) if any(ctx.needs_input_grad) else {}
    ctx.names = list(before)
    yield
    after = versions(module) if before else {}
    ctx.versions = {name: version for name, version in before.items() if after[name] == version}


def refuse_changed(name: str, module: nn.Module, before: dict[str, tuple[int, bool]]) -> None:
    """Raises as autograd itself does in a stock backward: the recompute would run with other weights than forward."""
    for parameter, (version, trained) in before.items():
        p = module.get_parameter(parameter)
        if p.requires_grad != trained:
            raise RuntimeError(
                f"requires_grad of {parameter} of {name} changed between forward and backward, from {trained} to "
                f"{p.requires_grad}: set it before the forward."
            )
        if p._version != version:
            raise RuntimeError(
                f"{parameter} of {name} was modified in place between forward and backward (it is at version "
                f"{p._version}, expected {version}), and backward computes the forward again: run backward before "
                "anything that changes the weights."
            )


class Autocast:
    """The autocast state of a forward, for its backward: autograd does not restore it. Without autocast's weight
    cache: what it caches while no graph is recorded would be used where one is, and the weight's gradient be lost."""

    def __init__(self, device: str):
        self.device = device
        self.dtype, self.enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def restored(self):
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@contextlib.contextmanager
def no_checkpointing(module: nn.Module) -> Iterator[None]:
    """transformers' own checkpointing, off: it would drop the cache, and the operation recomputes anyway."""
    flagged = [vars(m) for m in module.modules() if vars(m).get("gradient_checkpointing")]
    for attributes in flagged:
        attributes["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for attributes in flagged:
            attributes["gradient_checkpointing"] = True
