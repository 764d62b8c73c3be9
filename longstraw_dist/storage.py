"""Where kept tensors live: the device, or host memory, from which they come back one layer ahead.

    forward    layer i saves          -> a copy leaves for the host, on a stream of its own
    backward   layer i asks for its   -> they are there, or are waited for; those of layer i - 1 set out

So the device holds one layer's working set and one more layer's kept tensors at a time. On a CPU nothing is fetched
ahead, and the two tiers differ by account alone.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

# Storages that hold offloaded tensors. On a CPU machine they are told apart from the device tier by this alone.
HOST: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()
KINDS = {"hidden": ("hidden",), "state": ("state",), "all": ("hidden", "state")}  # what each setting moves


class Moved:
    """One tensor that a graph keeps, in host memory (pinned when it is an accelerator's)."""

    def __init__(self, t: Tensor, stream: "torch.cuda.Stream | None"):
        self.device, self.stream = t.device, stream
        self.back: Tensor | None = None
        self.host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=stream is not None)
        HOST.add(self.host.untyped_storage())
        with behind(stream):
            self.host.copy_(t, non_blocking=True)
        if stream is not None:
            t.record_stream(stream)  # its memory is not used again before the copy is done

    def fetch(self) -> None:
        """Sets out for the device."""
        if self.back is None:
            with behind(self.stream):
                self.back = torch.empty_like(self.host, device=self.device, pin_memory=False)
                self.back.copy_(self.host, non_blocking=True)

    def take(self) -> Tensor:
        """Is there, for the stream that computes."""
        self.fetch()
        back, self.back = self.back, None
        assert back is not None
        if self.stream is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self.stream)
            back.record_stream(now)
        return back


@contextlib.contextmanager
def behind(stream: "torch.cuda.Stream | None") -> Iterator[None]:
    """Work goes onto the stream, behind what was begun before."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


class Host:
    """
    What one call keeps in host memory.

    Args:
        offload (`str`): a key of `KINDS`.
        device (`torch.device`): where the model computes.
    """

    def __init__(self, offload: str, device: torch.device):
        self.kinds = KINDS[offload]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.places: defaultdict[int, list[weakref.ref[Moved]]] = defaultdict(list)

    @contextlib.contextmanager
    def saving(self, place: int, hidden: list[Tensor]) -> Iterator[None]:
        """While it is open, what an operation saves moves if it is of a kind that does: its `hidden` states, or the
        rest. `place` counts operations in the order of the forward."""
        inputs = {t.untyped_storage()._cdata for t in hidden}

        def pack(t: Tensor) -> "Tensor | Moved":
            kind = "hidden" if t.untyped_storage()._cdata in inputs else "state"
            if kind not in self.kinds:
                return t
            moved = Moved(t, self.stream)
            self.places[place].append(weakref.ref(moved))
            return moved

        def unpack(packed: "Tensor | Moved") -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            there = packed.take()
            ahead = self.places.pop(place - 1, ()) if self.stream is not None else ()  # a CPU's copy would not overlap
            for moved in (reference() for reference in ahead):
                if moved is not None:
                    moved.fetch()
            return there

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
