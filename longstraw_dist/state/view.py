"""What a layer takes for its cache while it runs one segment."""

import torch
from torch import Tensor
from torch.nn import functional

from ..groups import Segment


class Captured(Exception):
    """A layer has handed in all that is wanted of it."""


class View:
    """
    The part of `transformers.Cache` that a layer asks for, of one layer and one segment. It never writes in place:
    what the layer hands in is read off afterwards.

    Attributes:
        past (`dict[str, Tensor]`): the prompt's state so far, by name: `"keys"`, `"values"`, ... A batch of one, which
            the responses of a replay share.
        lengths (`tuple[int, ...]`): the sequences of the segment.
        new (`dict[str, Tensor]`): what the layer handed in of the segment itself.
        joined (`bool`): the layer is given the past before its own tokens, since it makes its keys and values of both
            (latents). Else its attention reads the past from here.
        window (`int`, *optional*): tokens that the layer's attention sees, the query's own included.
        routed (`Tensor`, *optional*): `[1, tokens, experts]`, what the layer's router said, where that is wanted.
        enough (`frozenset[str]`): the layer is left, by `Captured`, once it has handed in all of these; empty: never.
    """

    def __init__(
        self, past: dict[str, Tensor], segment: Segment, enough: frozenset[str] = frozenset(), joined: bool = False
    ):
        self.joined = joined
        self.past, self.lengths, self.seen, self.enough = past, segment.lengths, segment.past, enough
        self.new: dict[str, Tensor] = {}
        self.routed: Tensor | None = None
        self.window: int | None = None

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The prompt's tensors that a gradient is wanted for."""
        return {name: t for name, t in self.past.items() if t.requires_grad}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs) -> tuple[Tensor, Tensor]:
        if torch.is_autocast_enabled(key.device.type):  # as the stock attention kernels do under autocast
            dtype = torch.get_autocast_dtype(key.device.type)
            key, value = key.to(dtype), value.to(dtype)
        self._hand_in(keys=key, values=value)
        if self.joined and "keys" in self.past:
            return torch.cat([self.past["keys"], key], 2), torch.cat([self.past["values"], value], 2)
        return key, value

    def update_indexer(self, key: Tensor, layer_idx: int) -> Tensor:
        """Returns the index keys `[1, T, D]` of the past and of the segment so far: it comes in blocks."""
        new = torch.cat([self.new["index"], key], 1) if "index" in self.new else key
        self._hand_in(index=new)
        return torch.cat([self.past["index"], new], 1) if "index" in self.past else new

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._shared(f"conv {state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._shared(f"recurrent {state_idx}")

    def update_conv_state(
        self, t: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs
    ) -> Tensor:
        """Returns the inputs of the convolution, those of the past before the segment's own."""
        name = f"conv {state_idx}"
        width = conv_kernel_size or t.shape[-1]
        past = self._shared(name)
        full = t if past is None else torch.cat([past, t], -1)
        if full.shape[-1] < width:
            full = functional.pad(full, (width - full.shape[-1], 0))
        self._hand_in(**{name: full[..., -width:]})
        return full

    def update_recurrent_state(self, t: Tensor, layer_idx: int, state_idx: int = 0, **kwargs) -> Tensor:
        self._hand_in(**{f"recurrent {state_idx}": t})
        return t

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self._shared("linear")

    def set_linear_cache(self, layer_idx: int, t: Tensor) -> None:
        self._hand_in(linear=t)

    def has_previous_state(self, *args, **kwargs) -> bool:
        return self.seen > 0

    def get_seq_length(self, *args, **kwargs) -> int:
        return self.seen

    def is_recording_past(self, *args, **kwargs) -> bool:
        """`True` keeps a layer from its decode path, which writes in place."""
        return True

    def _shared(self, name: str) -> Tensor | None:
        """One state for all sequences of a replay."""
        t = self.past.get(name)
        return t if t is None or len(self.lengths) == 1 else t.expand(len(self.lengths), *t.shape[1:])

    def _hand_in(self, **tensors: Tensor) -> None:
        self.new.update(tensors)
        if self.enough and self.enough <= self.new.keys():
            raise Captured
