"""Captures: what one call leaves of a prompt, so that later ones do not run it again.

    rollout    the prompt runs once, and its responses are sampled from its state (rollout.py)
    update     forward runs the responses alone; backward is as ever, since it computes a prompt chunk again anyway

Of each layer a capture holds the prompt's state and, where the prompt's gradient is exact, the hidden states that
enter the layer, from which backward starts.
"""

import copy
import weakref
from collections.abc import Sequence
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
    lives. It holds for the parameters, adapters and autocast that it was made with. Changed ones are refused, but for
    parameters where `prompt_grad="detached"`: there a stale state is a choice (LongStraw, arXiv 2607.14952). Under
    DeepSpeed changed parameters are not noticed.

    Attributes:
        prompt_ids (`torch.Tensor`): int64 `[P]`.
        chunks (`list[tuple[int, int]]`): begin and end of each piece in which it ran.
    """

    def __init__(self, owner: Any, prompt_ids: Tensor, chunks: Sequence[Segment], stands_on: dict[str, Any]):
        self.owner, self.prompt_ids, self.stands_on = weakref.ref(owner), prompt_ids, stands_on
        self.chunks = [(chunk.past, chunk.past + chunk.tokens) for chunk in chunks]
        self.layers: list[CapturedLayer] = []

    @property
    def nbytes(self) -> int:
        tensors = [t for layer in self.layers for t in (layer.hidden, *layer.kept) if t is not None]
        return sum(t.nbytes for t in tensors)

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
        """What is not as it was, of what it stands on; with `stale`, the parameters need not be."""
        changed = (what for what, value in self.stands_on.items() if value != now[what])
        return next((what for what in changed if not (stale and what == "parameters")), None)


def stands_on(model: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> dict[str, Any]:
    """What a capture made now would hold for. Parameters are told apart by how often each was changed in place."""
    return {
        "parameters": [p._version for layer in layers for p in layer.parameters()],
        "adapters": adapters.applied(model),
        "autocast": (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)),
    }
