"""The MoE auxiliary loss on ranks with different numbers of responses, the last one without any."""

import pytest
import torch
import torch.distributed as dist

from longstraw_dist import LongStrawConfig

from ..models import ragged, tiny, weigh
from ..reference import relative, worst
from ..test_auxiliary_loss import stock
from .wrappings import wrap

SHAPES = {2: [[(11, (4, 2)), (1, (3, 1, 5))], [(6, (2,))]], 3: [[(11, (4, 2)), (1, (3,))], [(6, (2,))], []]}
COEFFICIENT = 0.3


def compare(name: str, kind: str) -> tuple[float, float] | None:
    rank, world = dist.get_rank(), dist.get_world_size()
    config = LongStrawConfig(prompt_chunk_size=5, responses_per_replay=2, head_chunk_size=4)
    wrapped = wrap(name, lambda: tiny(kind), config)
    with wrapped.micro_batch_of_step():
        out = wrapped(prompt_groups=ragged(rank, SHAPES[world][rank]), output_router_logits=True)
        wrapped.backward(weigh(out.logps, []) + COEFFICIENT * out.aux_loss + out.anchor)
        ours = wrapped.gradients()
    if rank > 0:
        return None
    model = tiny(kind)
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for shapes, seed in zip(SHAPES[world], range(world), strict=True):
        if shapes:
            model.zero_grad()
            for n, g in stock(model, ragged(seed, shapes), COEFFICIENT)[1].items():
                total[n] += g / world
    return relative(ours, total), worst(ours, total)[0]


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_as_stock(two_ranks, name, kind):
    whole, one = two_ranks.run(compare, name, kind)[0]
    assert whole <= 1e-5
    assert one <= 3e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_a_rank_without_responses(three_ranks, name):
    whole, one = three_ranks.run(compare, name, "mixtral")[0]
    assert whole <= 1e-5
    assert one <= 3e-4
