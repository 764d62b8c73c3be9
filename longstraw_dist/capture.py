"""Captures: what one call leaves of a prompt, so that later ones do not run it again.

    rollout    the prompt runs once, and its responses are sampled from its state (rollout.py)
    update     forward runs the responses alone; backward is as ever, since it computes a prompt chunk again anyway

Of each layer a capture holds the prompt's state and, where the prompt's gradient is exact, the hidden states that
enter the layer, from which backward starts.
"""

import copy
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import adapters
from .groups import Segment
from .state import PromptState


@dataclass
class CapturedLayer:
    state: PromptState  # without its tensors
    kept: list[Tensor]  # which are these
    hidden: Tensor | None  # [1, P-1, H], what enters the layer, where backward will want it
    relays: list[dict[str, Tensor]]  # of each chunk, what the layer before left for this one


class Capture:
    """
    One prompt as the layers of an attached model left it. `model(prompt_groups=[...], capture=True).captures` has one
    for each group, and `PromptGroup(prompt_ids, response_ids, capture=...)` is run from it, with the same result.

    It keeps the state of the prompt and, for each layer whose prompt gradient is exact, `[P-1, hidden]`, as long as it
    lives. It holds for the parameters, buffers, adapters, config and autocast that it was made with. Changed ones are
    refused, but for parameters where `prompt_grad="detached"`: there a stale state is a choice (LongStraw, arXiv
    2607.14952). To notice, a call that makes or uses captures reads all that this rank holds of the parameters once.

    Attributes:
        prompt_ids (`torch.Tensor`): int64 `[P]`.
        chunks (`list[tuple[int, int]]`): begin and end of each piece in which it ran.
    """

    def __init__(self, owner: Any, prompt_ids: Tensor, chunks: Sequence[Segment], stands_on: dict[str, Any]):
        self.owner, self.prompt_ids, self.stands_on = weakref.ref(owner), prompt_ids.clone(), stands_on
        self.chunks = [(chunk.past, chunk.past + chunk.tokens) for chunk in chunks]
        self.layers: list[CapturedLayer] = []

    @property
    def nbytes(self) -> int:
        tensors = [t for layer in self.layers for t in (layer.hidden, *layer.kept) if t is not None]
        relays = [t for layer in self.layers for relay in layer.relays for t in relay.values()]
        return sum({t.data_ptr(): t.nbytes for t in (*tensors, *relays)}.values())  # layers may share a relay

    def hidden(self, layer: int) -> Tensor | None:
        """What enters a layer; `None` behind the last, or where backward does not ask."""
        return self.layers[layer].hidden if layer < len(self.layers) else None

    def relay(self, layer: int, chunks: Sequence[Segment]) -> None:
        """Hands each chunk what the layer before left for this one."""
        for chunk, relay in zip(chunks, self.layers[layer].relays, strict=True):
            chunk.relay = dict(relay)

    def state(self, layer: int) -> PromptState:
        """The state of the whole prompt, of its own: to be read, and kept for a backward."""
        captured = self.layers[layer]
        state = copy.copy(captured.state)
        state.load(iter(captured.kept))
        return state

    def find_fault(self, owner: Any, prompt_ids: Tensor, now: dict[str, Any], stale: bool) -> str | None:
        """Why this call cannot use it, or `None`. With `stale`, it may be older than the parameters."""
        if self.owner() is not owner:
            return "is of another model: capture the prompt with this one."
        if not torch.equal(self.prompt_ids, prompt_ids):
            return "is of another prompt: pass the one that was captured."
        if (what := self.find_change(now, stale)) is not None:
            instead = ', or set prompt_grad="detached", which may use an old state' if what == "parameters" else ""
            return f"was made with other {what}: capture the prompt again{instead}."
        return None

    def find_change(self, now: dict[str, Any], stale: bool) -> str | None:
        """What is not as it was, of what it stands on; with `stale`, the parameters are not asked for."""
        asked = (what for what in self.stands_on if not (stale and what == "parameters"))
        return next((what for what in asked if self.stands_on[what] != now[what]), None)


def stands_on(model: nn.Module, config: Any, device: torch.device) -> dict[str, Any]:
    """What a capture made now would hold for, besides the parameters."""
    return {
        "adapters": adapters.applied(model),
        "autocast": (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)),
        "config": config.to_dict(),
    }


def checksums(tensors: Iterable[Tensor]) -> list[tuple]:
    """Of each tensor, dtype, shape and the sum of its bits, by which any change of a value shows: an optimizer may not
    count what it changes in place. Reads each once."""
    tensors = [t.detach() for t in tensors]
    sums = torch.stack([bits(t).to(tensors[0].device) for t in tensors]).tolist()  # one wait, wherever they lie
    return [(t.dtype, tuple(t.shape), n) for t, n in zip(tensors, sums, strict=True)]


def bits(t: Tensor) -> Tensor:
    """int64, of all bytes."""
    flat = t.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum()
