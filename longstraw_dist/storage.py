"""Where kept tensors live: the device, or host memory."""

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

# Storages that hold offloaded tensors. On a CPU machine they are told apart from the device tier by this alone.
HOST: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


@contextlib.contextmanager
def offload_to_host(hidden: list[Tensor]) -> Iterator[None]:
    """
    Saved-tensor hooks that keep `hidden` in host memory, and everything else where it is. The copy is pinned when the
    tensor is on an accelerator; it leaves on the stream that computes, and comes back when backward asks for it.
    """
    moved = {t.untyped_storage()._cdata for t in hidden}

    def pack(t: Tensor) -> tuple[torch.device, Tensor]:
        if t.untyped_storage()._cdata not in moved:
            return t.device, t
        kept = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=t.device.type != "cpu")
        HOST.add(kept.untyped_storage())
        return t.device, kept.copy_(t, non_blocking=True)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, t = packed
        if t.untyped_storage() not in HOST:
            return t
        return torch.empty_like(t, device=device, pin_memory=False).copy_(t, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
