"""Collectives of one micro-batch, counted: they depend on the number of layers and on nothing that a rank is given."""

import pytest
import torch.distributed as dist

from longstraw_dist import LongStrawConfig
from longstraw_dist.meter import count_collectives

from ..models import ragged, tiny, weigh
from .wrappings import wrap

LAYERS = 5
CHUNK = 4
SETTINGS = [  # (responses of a group, chunks of a prompt, groups)
    *[(2, 1, 1)] * 3,  # ZeRO-3 records its trace in the first two
    (4, 1, 1),
    (16, 1, 1),
    (4, 3, 1),
    (4, 7, 1),
    (4, 3, 3),
    (16, 7, 3),
]


def started() -> int:
    """Collectives that gloo started on this rank so far, by its own count: those that C++ starts are in it too."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def count(name: str, tied: bool, kind: str = "llama", layers: int = LAYERS, **engine) -> list[tuple[dict, int]]:
    """For each of `SETTINGS`, what is counted by kind, and what gloo counts. The last rank has fewer, and in the end
    nothing."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = LongStrawConfig(prompt_chunk_size=CHUNK, responses_per_replay=1)
    wrapped = wrap(name, lambda: tiny(kind, tied, num_hidden_layers=layers), config, **engine)
    found = []
    for step, (responses, chunks, groups) in enumerate(SETTINGS):
        shapes = [(1 + CHUNK * chunks, tuple(range(1, 1 + responses)))] * groups
        if rank == world - 1:
            shapes = [(2, (1,))] if step < len(SETTINGS) - 1 else []
        data, before = ragged(step, shapes), started()
        with count_collectives() as counts, wrapped.micro_batch_of_step():
            out = wrapped(prompt_groups=data)
            wrapped.backward(weigh(out.logps, out.entropies) + out.anchor)
        found.append((dict(counts), started() - before))
        wrapped.step()
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["zero3", "fsdp2", "fsdp2_one_group", "fsdp2_accelerate"])
def test_collectives_of_a_micro_batch(two_ranks, record_property, name, tied):
    for found in two_ranks.run(count, name, tied):
        steady = found[2:]
        record_property("collectives", steady[0][0])
        assert all(kinds == steady[0][0] for kinds, _ in steady), steady
        assert all(sum(kinds.values()) == total for kinds, total in found), f"some are not seen: {found}"
        kinds = steady[0][0]
        assert 1 <= kinds["all_gather"] <= 2 * LAYERS + 6
        assert 1 <= kinds["reduce_scatter"] <= LAYERS + 3
        assert kinds["all_reduce"] == 1, "the one that lets all ranks raise what one finds wrong"
        assert kinds.keys() == {"all_gather", "reduce_scatter", "all_reduce"}


@pytest.mark.parametrize(
    "kind",
    [
        "olmo_hybrid",  # convolution and delta rule
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("gpt_oss", "deepseek_v3", "glm_moe_dsa", "minimax", "lfm2", "jamba", "falcon_h1", "qwen3_moe")
        ),
    ],
)
@pytest.mark.parametrize("name", ["zero3", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_collectives_of_each_kind_of_state(two_ranks, name, kind):
    """Free of groups, responses and chunks too, at the numbers of a model of keys and values."""
    plain = two_ranks.run(count, name, False, layers=3)
    for found, expected in zip(two_ranks.run(count, name, False, kind, layers=3), plain, strict=True):
        assert [kinds for kinds, _ in found[2:]] == [kinds for kinds, _ in expected[2:]]
        assert all(sum(kinds.values()) == total for kinds, total in found), f"some are not seen: {found}"


FEATURES = [  # with the all-reduces of a micro-batch
    pytest.param("zero3", {"offload_optimizer": {"device": "cpu"}}, 1, marks=pytest.mark.slow),
    pytest.param("zero3", {"overlap_comm": True, "contiguous_gradients": False}, 1, marks=pytest.mark.slow),
    pytest.param("zero3_from_pretrained", {}, 1, marks=pytest.mark.slow),
    pytest.param("fsdp2", {"mesh_shape": (1, 2)}, 1 + LAYERS + 1),  # each unit's gradient, among the replicas
]


@pytest.mark.parametrize(("name", "engine", "all_reduces"), FEATURES, ids=str)
def test_collectives_are_those_of_the_plain_engine(two_ranks, name, engine, all_reduces):
    plain = two_ranks.run(count, name.partition("_")[0], False)
    for found, expected in zip(two_ranks.run(count, name, False, **engine), plain, strict=True):
        assert [kinds for kinds, _ in found[2:]] == [{**kinds, "all_reduce": all_reduces} for kinds, _ in expected[2:]]


def test_collectives_of_ddp_are_not_seen_in_python(two_ranks):
    """DDP reduces in C++: the meter sees the flag alone. Nobody should read its count as DDP's."""
    for found in two_ranks.run(count, "ddp", False):
        assert all(kinds == {"all_reduce": 1} and total > 1 for kinds, total in found)
