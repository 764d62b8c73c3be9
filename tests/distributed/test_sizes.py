"""Measured sizes on several ranks: the same on all, at no collective more."""

import pytest
import torch
import torch.distributed as dist

from longstraw_dist import LongStrawConfig
from longstraw_dist.attach import attachment_of
from longstraw_dist.groups import Sizes
from longstraw_dist.meter import count_collectives

from ..models import ragged, tiny, weigh
from .test_collectives import started
from .test_wrapped import check
from .wrappings import wrap

AUTO = {"prompt_chunk_size": "auto", "responses_per_replay": "auto"}
SHAPES = [  # of each call: the ranks' groups. Rank 1 has none in the first one, nobody in the second
    ([(300, (5, 70, 9))], []),
    ([], []),
    ([(40, (3,))], [(500, (20, 3)), (2, (4,))]),
    ([], [(700, (2, 2))]),
    ([(30, (8, 8))], [(1, (1,))]),
]


def sizes(name: str, kind: str, first: int, config: dict) -> list[tuple]:
    """Of each call: the sizes that this rank used, what it has measured, and its collectives. `first` turns the ranks
    around."""
    wrapped = wrap(name, lambda: tiny(kind), LongStrawConfig(**config))
    automatic, found = attachment_of(wrapped.model).automatic, []
    for step, shapes in enumerate(SHAPES):
        data, before = ragged(step, shapes[(dist.get_rank() + first) % 2]), started()
        with count_collectives() as counts, wrapped.micro_batch_of_step():
            with torch.no_grad():
                wrapped(prompt_groups=data)
            out = wrapped(prompt_groups=data)
            used = automatic.sizes
            wrapped.backward(weigh(out.logps, out.entropies) + out.anchor)
        found.append((used, automatic.measured, dict(counts), started() - before))
        wrapped.step()
    return found


MORE = [("zero3", "llama", 0), ("fsdp2", "llama", 1), ("zero3", "glm_moe_dsa", 0)]


@pytest.mark.parametrize(
    ("name", "kind", "first"),
    [("zero3", "llama", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_every_rank_uses_the_same(two_ranks, name, kind, first):
    ranks = two_ranks.run(sizes, name, kind, first, {**AUTO, "segment_budget": 400_000})
    used = [[call[0] for call in calls] for calls in ranks]
    assert used[0] == used[1]
    assert used[0][0] == Sizes() != used[0][1]
    measured = [calls[0][1] for calls in ranks]
    assert any(measured[first]), "what the rank with responses has found"
    assert not any(measured[1 - first]), "a rank without responses measures nothing"
    assert used[0][1] == Sizes(*measured[first])
    if kind == "llama":
        assert len(set(used[0][1:])) == 1, "they stay"
    else:
        assert used[0][4].chunk < used[0][1].chunk, "the other rank had longer prompts"


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_no_collective_more(two_ranks, name):
    plain = two_ranks.run(sizes, name, "llama", 0, {"prompt_chunk_size": 256})
    auto = two_ranks.run(sizes, name, "llama", 0, {**AUTO, "segment_budget": 400_000})
    assert [[call[2:] for call in calls] for calls in auto] == [[call[2:] for call in calls] for calls in plain]


@pytest.mark.parametrize("name", ["zero3", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_parity(two_ranks, record_property, name):
    """Over three steps: the first measures, and then a layer runs five or six tokens at once."""
    check(two_ranks, record_property, name, score="before between", config={**AUTO, "segment_budget": 14_000})
