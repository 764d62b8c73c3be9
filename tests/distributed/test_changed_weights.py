"""Weights that change in place between forward and backward are refused wherever stock autograd refuses them.

Stock cannot see it where an engine gathers the weights anew for backward (FSDP2's layers): there both go on.
"""

import pytest
import torch

from longstraw_dist import LongStrawConfig

from ..models import ragged, tiny
from .wrappings import ZERO, Wrapped, wrap

PARAMETERS = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight")


def change(wrapped: Wrapped, name: str, parameter: str) -> None:
    p = dict(wrapped.model.named_parameters())[parameter]
    if ZERO.get(name) == 3:
        import deepspeed

        with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            p.mul_(1.5)
    else:
        with torch.no_grad():
            p.mul_(1.5)


def raised(name: str, packed: bool, parameter: str) -> str:
    wrapped = wrap(name, lambda: tiny("llama"), LongStrawConfig(prompt_chunk_size=5) if packed else None)
    if packed:
        loss = wrapped(prompt_groups=ragged()).scores.sum()
    else:
        loss = wrapped(input_ids=torch.arange(9)[None]).logits.logsumexp(-1).sum()
    change(wrapped, name, parameter)
    try:
        wrapped.backward(loss)
        return ""
    except RuntimeError as error:
        return str(error)


def both(name: str) -> dict[str, tuple[str, str]]:
    return {p: (raised(name, False, p), raised(name, True, p)) for p in PARAMETERS}


REFUSED = "was modified in place between forward and backward"
SLOW = ("ddp", "zero2", "fsdp2_one_group", "fsdp2_accelerate")
NAMES = ["zero3", "fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("name", NAMES)
def test_refused_where_stock_refuses(two_ranks, name):
    for found in two_ranks.run(both, name, timeout=90):
        unseen = [p for p, (stock, _) in found.items() if not stock]
        assert unseen == ([PARAMETERS[0]] if name in ("fsdp2", "fsdp2_accelerate") else [])
        for stock, ours in found.values():
            assert ("modified by an inplace operation" in stock) == (REFUSED in ours)
            assert bool(stock) == bool(ours)
