"""What a layer is like, beside a chain of attention and MLP: found by the blueprint, read by operation and state."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Traits:
    """
    Args:
        attends (`bool`): its state is keys and values and nothing else.
        joined (`bool`): it makes keys and values of latents, those of the past included; latents are the state.
        indexed (`bool`): it chooses the keys that it attends to, and takes a mask for it.
        stacked (`bool`): it has a recurrence, so that the responses of a replay must lie side by side.
        router (`tuple[nn.Module, int]`, *optional*): its router, and where in its output the logits are.
        scan (`dict`, *optional*): where its code looks up the scan that stands to be replaced: scan.py.
        embedded (`tuple[int, ...]`): arguments, counted behind its hidden states, that are the embeddings.
        relay (`dict[str, int]`): arguments that it takes from what the layer before returned behind its hidden states,
            and at which place of the tuple.
        cache (`str`): the argument that its cache is.
    """

    attends: bool
    joined: bool = False
    indexed: bool = False
    stacked: bool = False
    router: tuple[nn.Module, int] | None = None
    scan: dict[str, Any] | None = None
    embedded: tuple[int, ...] = ()
    relay: dict[str, int] = field(default_factory=dict)
    cache: str = "cache"
