"""What a backward that computes a forward again needs of it: the same weights, the same autocast, all of its code."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def versions(module: nn.Module) -> list[tuple[int, bool]]:
    """Of each parameter and buffer, how often it was changed in place, as autograd counts, and whether it trains."""
    return [(t._version, t.requires_grad) for _, t in named_tensors(module)]


def refuse_changed(name: str, module: nn.Module, before: list[tuple[int, bool]]) -> None:
    """Raises as autograd itself does in a stock backward: the recompute would run with other weights than forward."""
    for (tensor, t), (version, trained) in zip(named_tensors(module), before, strict=True):
        if t.requires_grad != trained:
            raise RuntimeError(
                f"requires_grad of {tensor} of {name} changed between forward and backward, from {trained} to "
                f"{t.requires_grad}: set it before the forward."
            )
        if t._version != version:
            raise RuntimeError(
                f"{tensor} of {name} was modified in place between forward and backward (it is at version "
                f"{t._version}, expected {version}), and backward computes the forward again: run backward before "
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
