"""What a layer is like, beside a chain of attention and MLP: found by the blueprint, read by operation and state."""

from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Traits:
    """
    Args:
        source (`str`): the Python module of its code, noted at attach because engines swap its class: stand_ins.py.
        attends (`bool`): its state is keys and values and nothing else.
        joined (`bool`): it makes keys and values of latents, those of the past included; latents are the state.
        indexed (`bool`): it attends to chosen keys, and takes a mask for it.
        indexer (`nn.Module`, *optional*): its module that chooses them, if it has one of its own.
        stacked (`bool`): it has a recurrence, so that the responses of a replay must lie side by side.
        router (`tuple[nn.Module, int]`, *optional*): its router, and where in its output the logits are.
        embedded (`tuple[str, ...]`): arguments that are the embeddings.
        relay (`dict[str, int]`): arguments that it takes from what the layer before returned behind its hidden states,
            and at which place of the tuple.
        cache (`str`): the argument that its cache is.
    """

    source: str
    attends: bool
    joined: bool = False
    indexed: bool = False
    indexer: nn.Module | None = None
    stacked: bool = False
    router: tuple[nn.Module, int] | None = None
    embedded: tuple[str, ...] = ()
    relay: dict[str, int] = field(default_factory=dict)
    cache: str = "cache"
