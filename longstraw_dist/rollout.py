"""Sampling from captures: what `generate` finds in its cache if the prompts have run already.

    captures = model(prompt_groups=[PromptGroup(ids, []) for ids in prompts], capture=True).captures
    cache = filled_cache(model, captures, rows, input_ids.shape[1])
    model.generate(input_ids, attention_mask=attention_mask, cache=cache)

Each distinct prompt has run once, where `generate` would run it for each row. All else is the stock generation: its
processors, its criteria, its own forward of one token at a time.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from .attach import attachment_of
from .capture import Capture
from .groups import Segment
from .state.prompt import ALONG

ON_MODULES = ("recurrent_gemma",)  # keep their state where no cache is


def find_fault(model: Any) -> str | None:
    """Why the model's own generation cannot go on from a capture, or `None`."""
    kind = type(model).__name__
    if model.config.get_text_config().model_type in ON_MODULES:
        return f"{kind} keeps its state on its modules."
    if not model._supports_default_dynamic_cache():
        return f"{kind} generates from a cache of its own."
    if all(DynamicCache(config=model.config.get_text_config()).is_linear):
        return f"the cache of {kind} does not know how many tokens it has seen."
    return None


def filled_cache(model: PreTrainedModel, captures: Sequence[Capture], rows: Sequence[int], width: int) -> DynamicCache:
    """
    The cache of a batch before the last token of its prompts.

    Args:
        model (`PreTrainedModel`): the attached model, not wrapped.
        captures (`Sequence[Capture]`): of each distinct prompt.
        rows (`Sequence[int]`): for each row of the batch, the place of its capture.
        width (`int`): tokens of the longest prompt of the batch, to which the others are padded on the left.

    Returns:
        `DynamicCache`: with the prompts' state, a copy for each row, as `generate` would have.

    Raises:
        `ValueError`: for a capture that does not hold, or is longer than `width`.
    """
    attachment = attachment_of(model)
    now = attachment.stands_on()
    for i, capture in enumerate(captures):
        if (fault := capture.find_fault(attachment, capture.prompt_ids, now, stale=False)) is not None:
            raise ValueError(f"captures[{i}] {fault}")
        if len(capture.prompt_ids) > width:
            raise ValueError(f"captures[{i}] has {len(capture.prompt_ids)} tokens, more than width={width}.")
    cache, seen = DynamicCache(config=model.config.get_text_config()), width - 1
    ends = [Segment(slice(0), len(c.prompt_ids) - 1, (1,), number=len(c.chunks)) for c in captures]
    for i, layer in enumerate(cache.layers):
        found: dict[str, list[Tensor | None]] = {}
        for place, (capture, end) in enumerate(zip(captures, ends, strict=True)):
            for name, pages in capture.state(i).pages.items():
                found.setdefault(name, [None] * len(captures))[place] = pages.read(end)
        held = min(seen, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else seen
        fill(layer, {name: batched(pages, rows, ALONG.get(name), held) for name, pages in found.items()}, seen)
    return cache


def batched(pages: list[Tensor | None], rows: Sequence[int], dim: int | None, tokens: int) -> Tensor:
    """`[1, ...]` of each prompt -> `[rows, ...]`, along `dim` with zeros before what is shorter than `tokens`: where
    padding is, which attention masks."""
    like = next(t for t in pages if t is not None)
    shape = [len(rows), *like.shape[1:]]
    if dim is not None:
        shape[dim] = tokens
    out = like.new_zeros(shape)
    for row, place in zip(out, rows, strict=True):
        if (t := pages[place]) is not None:
            (row if dim is None else row.narrow(dim - 1, tokens - t.shape[dim], t.shape[dim])).copy_(t[0])
    return out


def fill(layer: Any, tensors: dict[str, Tensor], seen: int) -> None:
    """Puts a layer's cache into the state that it has after `seen` tokens."""
    for name, t in tensors.items():
        kind, _, number = name.partition(" ")
        if kind == "keys":
            layer.lazy_initialization(t, tensors["values"])
            layer.keys, layer.values = t, tensors["values"]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = seen
        elif kind == "index":
            layer.update_indexer(t)
        elif kind == "conv":
            layer.update_conv_state(t, int(number))
        elif kind == "recurrent":
            layer.update_recurrent_state(t, int(number))
        else:
            assert kind == "values", f"a cache has no place for {name}"
