"""What happened: tokens, bytes kept by kind, collectives."""

import contextlib
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Meter:
    """
    Counts of one attached model since `reset()`.

    Attributes:
        prompt_tokens_captured (`int`): prompt tokens that ran, once each.
        prompt_tokens_reused (`int`): prompt tokens that did not run, because an earlier call had captured them.
        prompt_tokens_saved (`int`): prompt tokens that a run response by response would have run again.
        kept_bytes (`dict[str, int]`): largest number of bytes that one call kept for backward, by kind: `"hidden"`
            (hidden states), `"state"` (the prompt's state), `"graphs"` (`activation_budget`) and `"last_layer"` (the
            graph with which backward begins).
    """

    prompt_tokens_captured: int = 0
    prompt_tokens_reused: int = 0
    prompt_tokens_saved: int = 0
    kept_bytes: dict[str, int] = field(default_factory=dict)
    _kept: Counter = field(default_factory=Counter)
    _recording: bool = False

    def begin(self, captured: int, reused: int, saved: int, recording: bool) -> None:
        """A call starts; `recording` if it keeps anything for a backward."""
        self.prompt_tokens_captured += captured
        self.prompt_tokens_reused += reused
        self.prompt_tokens_saved += saved
        self._kept, self._recording = Counter(), recording

    def keeps(self, kind: str, tensors: Iterable[Tensor]) -> None:
        if self._recording:
            self._kept[kind] += sum(t.nbytes for t in tensors)
            self.kept_bytes[kind] = max(self.kept_bytes.get(kind, 0), self._kept[kind])

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


# The process group's methods that stand for each kind of collective, whoever calls them.
COLLECTIVES = {
    "all_gather": ("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "broadcast": ("broadcast",),
}


@contextlib.contextmanager
def count_collectives() -> Iterator[Counter]:
    """Counts, by kind, the collectives that this rank starts on any process group while the context is open."""
    counts: Counter = Counter()
    # from the class's own dict: `getattr` hands out the bare function, which would no longer bind once it is put back
    before = {name: vars(dist.ProcessGroup)[name] for names in COLLECTIVES.values() for name in names}

    def counted(kind: str, method):
        def call(*args, **kwargs):
            counts[kind] += 1
            return method(*args, **kwargs)

        return call

    for kind, names in COLLECTIVES.items():
        for name in names:
            setattr(dist.ProcessGroup, name, counted(kind, getattr(dist.ProcessGroup, name)))
    try:
        yield counts
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


class Phases:
    """Seconds and collectives by phase. Phases nest; each moment counts for the innermost one that is open. Seconds
    are the host's: on an accelerator, work that is queued in one phase may be waited for in the next."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.collectives: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._open: list[str] = []
        self._since = 0.0
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if not self._open:
                self._counts = stack.enter_context(count_collectives())
            self._attribute()
            self._open.append(name)
            try:
                yield
            finally:
                self._attribute()
                self._open.pop()

    def _attribute(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
            self.collectives[self._open[-1]].update(self._counts)
        self._counts.clear()
        self._since = now

    def reset(self) -> None:
        """Forgets what was counted; the phases that are open stay open."""
        self.seconds, self.collectives = defaultdict(float), defaultdict(Counter)


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: of the allocator on CUDA, resident in the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
