"""bfloat16: the gradient's error against the float32 reference is at most 1.1 times that of the stock rows.

Stock and ours run in the same engine, at the same precision: the stock rows as one micro-batch each.
"""

import functools
import statistics

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_dist import LongStrawConfig, attach

from ..models import ragged, tiny
from ..reference import gradients, relative, stock_rows
from .wrappings import Wrapped, wrap, wrap_engine

SHAPES = [(33, (6, 9)), (12, (8, 5))]
ROWS = 4
SEEDS = range(15)
FROZEN = functools.partial(torch.optim.SGD, lr=0.0)  # a step ends the accumulation, and changes nothing


def model():
    return tiny("llama").bfloat16().float()  # DeepSpeed rounds the weights once: the reference starts from the same


def loss(logps: list[Tensor], entropies: list[Tensor], seed: int) -> list[Tensor]:
    """Of each row."""
    generator = torch.Generator().manual_seed(seed)
    rows = zip(logps, entropies, strict=True)
    return [torch.cat(row) @ torch.randn(2 * len(row[0]), generator=generator) * 0.1 for row in rows]


def data(seed: int, rank: int):
    return ragged(10 * seed + rank, SHAPES)


def single_rows(groups):
    return [type(g)(g.prompt_ids, [r]) for g in groups for r in g.response_ids]


def packed(wrapped: Wrapped, seed: int) -> dict[str, Tensor]:
    rank = dist.get_rank()
    with wrapped.micro_batch_of_step():
        out = wrapped(prompt_groups=data(seed, rank))
        wrapped.backward(sum(loss(out.logps, out.entropies, seed + rank)))
        return wrapped.gradients()


def rows(wrapped: Wrapped, seed: int) -> dict[str, Tensor]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed + rank)
    for i, group in enumerate(single_rows(data(seed, rank)), 1):
        with wrapped.micro_batch_of_step():
            (logp,), (entropy,) = stock_rows(wrapped, [group])
            coefficients = torch.randn(2 * len(logp), generator=generator)
            wrapped.backward(torch.cat([logp, entropy]) @ coefficients * 0.1 * ROWS)
            found = wrapped.gradients() if i == ROWS else {}
    return found


def reference(seed: int, world: int) -> dict[str, Tensor]:
    plain = model()
    for rank in range(world):
        (sum(loss(*stock_rows(plain, data(seed, rank)), seed + rank)) / world).backward()
    return gradients(plain)


def errors(name: str) -> tuple[list[float], list[float]]:
    """Ours and stock's, for each seed."""
    config = LongStrawConfig(prompt_chunk_size=16, head_chunk_size=8)
    ours = wrap(name, model, config, FROZEN, bf16=True)
    stock = wrap(name, model, None, FROZEN, bf16=True, accumulation=ROWS)
    found: tuple[list[float], list[float]] = ([], [])
    for seed in SEEDS:
        truth = reference(seed, dist.get_world_size())
        for wrapped, run, into in zip((ours, stock), (packed, rows), found, strict=True):
            into.append(relative({n: g.float() for n, g in run(wrapped, seed).items()}, truth))
            wrapped.step()
    return found


def policies() -> tuple[str, list[torch.dtype], str]:
    """What accelerate's own bf16 policy is refused with; the dtypes under the one that the refusal names."""
    wrapped = wrap_engine("fsdp2_accelerate", attach(model()), bf16=True, mp_policy=None)
    try:
        wrapped(prompt_groups=data(0, dist.get_rank()))
        refusal = "nothing was raised"
    except ValueError as error:
        refusal = str(error)
    wrapped = wrap("fsdp2_accelerate", model, bf16=True)
    out = wrapped(prompt_groups=data(0, dist.get_rank()))
    wrapped.backward(sum(loss(out.logps, out.entropies, 0)))
    return refusal, [t.dtype for t in (*out.logps, *out.entropies)], str(wrapped.accelerator.mixed_precision)


def test_log_probs_stay_float32_under_the_bf16_policy_of_accelerate(two_ranks):
    for refusal, dtypes, precision in two_ranks.run(policies):
        assert "MixedPrecisionPolicy(output_dtype=torch.bfloat16) would round the log-probs" in refusal
        assert precision == "bf16"
        assert set(dtypes) == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp2", "fsdp2_accelerate"])
def test_bf16_error(two_ranks, record_property, name):
    ours, stock = two_ranks.run(errors, name, timeout=120)[0]
    record_property("bf16", (statistics.median(ours), statistics.median(stock)))
    print(name, ours, stock)
    assert 1e-4 < statistics.median(ours) <= 1.1 * statistics.median(stock)
