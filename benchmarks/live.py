"""Live tensor storages, counted: what a step holds at its peak, kind by kind, the device and the host tier apart.

A dispatch mode sees every tensor that an operation returns, and a weak reference to its storage tells when that is
freed. It counts bytes of storages, each once, however many tensors share it: a slice that keeps a large storage alive
counts as the large storage. A kernel's own scratch memory is not seen (resident memory is: memory.py). While a mode is
open, autograd adds gradients that meet out of place where it does it in place otherwise: a tied embedding's gradient
counts three times at the end of a backward that holds two.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longstraw_dist.storage import HOST

Kind = Callable[[Tensor], str]


class LiveStorages(TorchDispatchMode):
    """
    While it is open: `live` bytes by tier, `peak` bytes by tier; and of the moment when the device tier was at its
    peak, `peak_kinds`, bytes by (tier, kind), and `peak_shapes`, how many storages of the device tier by (kind, shape,
    bytes). Storages of `ignored` tensors (parameters, inputs) count nothing.

    Args:
        kind: names a storage after the first tensor that was seen on it.
        ignored: tensors that existed before.
        watch: is called with each tensor that an operation returns.
    """

    def __init__(
        self,
        kind: Kind = lambda t: "any",
        ignored: Iterable[Tensor] = (),
        watch: Callable[[Tensor], None] | None = None,
    ):
        super().__init__()
        self.kind, self.watch = kind, watch
        self.references: dict[int, weakref.ref] = {}
        self.tiers: dict[int, tuple[str, str, int]] = {}  # (tier, kind, bytes) of each live storage
        self.shapes: dict[int, tuple[int, ...]] = {}  # of the first tensor seen on each
        self.live: Counter = Counter()
        self.kinds: Counter = Counter()
        self.peak: Counter = Counter()
        self.peak_kinds: dict[tuple[str, str], int] = {}
        self.peak_shapes: Counter = Counter()
        self.ignored = {t.untyped_storage()._cdata for t in ignored}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._see(t)
                if self.watch is not None:
                    self.watch(t)
        return out

    def _see(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self.ignored:
            return
        tier = "host" if storage in HOST else "device"
        if key in self.references:
            before, kind, size = self.tiers[key]
            if before == tier and size == storage.nbytes():
                return
            self._forget(key)  # it has become part of the host tier, or was resized
        else:
            kind = self.kind(t)
            self.shapes[key] = tuple(t.shape)
        self.references[key] = weakref.ref(storage, functools.partial(self._forget, key))
        self.tiers[key] = (tier, kind, storage.nbytes())
        self._add(key, 1)
        if self.live[tier] > self.peak[tier]:
            self.peak[tier] = self.live[tier]
            if tier == "device":
                self.peak_kinds = {k: v for k, v in self.kinds.items() if v}
                self.peak_shapes = Counter(
                    (kind, self.shapes[k], size) for k, (where, kind, size) in self.tiers.items() if where == tier
                )

    def _forget(self, key: int, _: weakref.ref | None = None) -> None:
        if self.references.pop(key, None) is not None:
            self._add(key, -1)
            del self.tiers[key]

    def _add(self, key: int, sign: int) -> None:
        tier, kind, size = self.tiers[key]
        self.live[tier] += sign * size
        self.kinds[tier, kind] += sign * size
