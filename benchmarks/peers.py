"""What others do with a group's prompt, in plain steps that ours stands beside. Every one has the exact gradient.

    stock rows                response by response, each with the whole prompt
    batched                   all rows in one batch: TRL with per_device_train_batch_size = G
    shared prompt, one mask   prompt and responses as one row with a 4D mask: a response sees the prompt and itself,
                              its positions count on from the prompt. On a CPU sdpa computes what a mask hides, too
    prefix-grouper            the same row with the attention of the package prefix-grouper (arXiv 2506.05433): causal
                              over the prompt, then all responses over copies of it. `pip install prefix-grouper`

Each also with transformers' activation checkpointing, layer by layer.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from longstraw_dist import PromptGroup

from . import flops, models


def one_mask(group: PromptGroup) -> Tensor:
    """`[1, 1, n, n]` over the n tokens of prompt and responses: True where a token (row) sees another."""
    lengths = torch.tensor([len(group.prompt_ids), *map(len, group.response_ids)], device=group.prompt_ids.device)
    part = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)  # 0 is the prompt
    return ((part == 0) | (part == part[:, None])).tril()[None, None]


def step_shared(model: nn.Module, group: PromptGroup, w: list[Tensor], **attention: Any) -> float:
    """Forward and backward of prompt and responses as one row. Returns the loss."""
    prompt, lengths = len(group.prompt_ids), [len(r) for r in group.response_ids]
    device = group.prompt_ids.device
    positions, kept, end = [torch.arange(prompt, device=device)], [], prompt
    for n in lengths:
        positions.append(torch.arange(prompt, prompt + n, device=device))
        kept.append(torch.tensor([prompt - 1, *range(end, end + n)], device=device))  # n + 1 logits, as of stock rows
        end += n
    row = torch.cat([group.prompt_ids, *group.response_ids])[None]
    logits = model(
        input_ids=row,
        position_ids=torch.cat(positions)[None],
        use_cache=False,
        logits_to_keep=torch.cat(kept),
        **attention,
    ).logits[0]
    each = zip(w, logits.split([n + 1 for n in lengths]), group.response_ids, strict=True)
    loss = torch.stack([(w_ * models.target_logps(logits_, r)).sum() for w_, logits_, r in each]).sum()
    del logits
    loss.backward()
    return float(loss.detach())


def step_one_mask(model: nn.Module, group: PromptGroup, w: list[Tensor]) -> float:
    return step_shared(model, group, w, attention_mask=one_mask(group))


def step_prefix_grouper(model: Any, group: PromptGroup, w: list[Tensor]) -> float:
    from prefix_grouper import PrefixGrouper

    model.set_attn_implementation("prefix_grouper")
    lengths = [len(group.prompt_ids), *map(len, group.response_ids)]
    return step_shared(model, group, w, prefix_grouper=PrefixGrouper([lengths], device=group.prompt_ids.device))


def prefix_grouper_attention(module, query, key, value, attention_mask, *, prefix_grouper, scaling, **_):
    return prefix_grouper.forward(attend, query, key, value, scaling), None


def attend(query: Tensor, key: Tensor, value: Tensor, padding: Tensor, scaling: float) -> Tensor:
    """The package ships an adapter for flash-attention 2 alone, which is causal from the lower right; this is its like
    with torch's own attention, for groups without padding."""
    n, m = query.shape[2], key.shape[2]
    mask = None if n == m else torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
    out = scaled_dot_product_attention(query, key, value, mask, is_causal=n == m, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


AttentionInterface.register("prefix_grouper", prefix_grouper_attention)


@dataclass(frozen=True)
class Peer:
    step: models.Step
    flops: Callable[[flops.Shape, bool], float]  # of a shape; whether checkpointed
    checkpointed: bool = False


PEERS = {
    name + ", checkpointed" * checkpointed: Peer(step, counted, checkpointed)
    for name, step, counted in (
        ("stock rows", models.step_rows, flops.stock),
        ("batched", models.step_together, flops.stock),
        ("shared prompt, one mask", step_one_mask, flops.one_mask),
        ("prefix-grouper", step_prefix_grouper, flops.prefix_grouper),
    )
    for checkpointed in (False, True)
}


def missing(case: str, model: str) -> str | None:
    """Why a peer cannot run here, if it cannot."""
    shared = case.startswith(("shared prompt", "prefix-grouper"))
    if shared and model != "qwen3":
        return "a recurrence has no mask: in one row it would carry one response's state into the next"
    if case.startswith("prefix-grouper") and importlib.util.find_spec("prefix_grouper") is None:
        return "pip install prefix-grouper"
    return None
