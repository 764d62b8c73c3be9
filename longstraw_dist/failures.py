"""What an exception in the middle of a call is told: rank, layer and segment; out of memory, the knobs that help."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .config import LongStrawConfig
from .groups import Segment
from .storage import KINDS


@dataclass
class Place:
    """Where a model's call is; whatever runs keeps it up to date."""

    module: str | None = None
    part: Segment | slice | None = None  # a segment of a layer, or response rows of the norm or the head

    def at(self, module: str | None, part: Segment | slice | None = None) -> None:
        self.module, self.part = module, part


def describe(
    error: BaseException,
    place: Place,
    phase: str,
    config: LongStrawConfig,
    device: torch.device,
    recording: bool = True,
) -> str:
    """E.g. "rank 1, backward of layer 3, prompt chunk of 1024 tokens at 2048 of group 0", and a way out of memory.
    A call that is not `recording` keeps no hidden states."""
    rank = f"rank {dist.get_rank()}, " if dist.is_available() and dist.is_initialized() else ""
    part = place.part
    rows = f", response tokens {part.start} to {part.stop - 1}" if isinstance(part, slice) else ""
    text = f"{rank}{phase} of {place.module}{f', {part.name}' if isinstance(part, Segment) else rows}"
    if is_out_of_memory(error):
        host = device.type != "cpu" and is_of_host(error)
        ways = (
            ways_out_of_host_memory(config, recording) if host else ways_out_of_memory(part, config, device, recording)
        )
        return f"{text}: out of {'host ' * host}memory. To go on, {', or '.join(ways)}."
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        return f"{text}: it waited for another rank, which has ended or hangs. The cause is in that one's output."
    return text


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and (is_of_host(error) or "out of memory" in str(error).lower())


def is_of_host(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def ways_out_of_memory(
    part: Segment | slice | None, config: LongStrawConfig, device: torch.device, recording: bool
) -> list[str]:
    """The knobs that make what ran there smaller, or make room for it; and what always helps."""
    ways = []
    if isinstance(part, slice):
        size = part.stop - part.start
        if size > 1 and config.head_chunk_size is None:
            ways.append(f"set head_chunk_size below {size}")
        elif size > 1:
            ways.append(f"lower head_chunk_size={config.head_chunk_size}")
    elif part is not None and part.is_chunk:
        if part.tokens > 1:
            ways.append(lower(config, "prompt_chunk_size"))
    elif part is not None and len(part.lengths) > 1:
        if config.responses_per_replay is None:
            ways += [lower(config, "prompt_chunk_size"), "set responses_per_replay=1"]
        else:
            ways.append(lower(config, "responses_per_replay"))
    if config.activation_budget and recording:
        ways.append(f"lower activation_budget={config.activation_budget}")
    if config.offload is None and not config.activation_budget and device.type != "cpu" and recording:
        ways.append('set offload="all", which keeps hidden states and prompt state in host memory')
    return [*ways, "put fewer tokens into a call"]


def lower(config: LongStrawConfig, size: str) -> str:
    name = "segment_budget" if getattr(config, size) == "auto" else size
    return f"lower {name}={getattr(config, name)}"


def ways_out_of_host_memory(config: LongStrawConfig, recording: bool) -> list[str]:
    ways = []
    if config.offload is not None and recording:
        ways.append(f"set offload=None, since {' and '.join(KINDS[config.offload])} are kept there")
    return [*ways, "put fewer tokens into a call"]
