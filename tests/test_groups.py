"""Packing, and finding groups in a padded batch."""

import pytest
import torch

from longstraw_dist import LongStrawConfig, PromptGroup
from longstraw_dist.config import exact_layers
from longstraw_dist.groups import find_groups, pack, split_replays

CPU = torch.device("cpu")


def test_pack():
    t = torch.tensor
    groups = [
        PromptGroup(t([1, 2, 3, 4]), [t([5, 6]), t([], dtype=torch.int64), t([7])]),
        PromptGroup(t([8]), [t([9])]),
        PromptGroup(t([10, 11, 12]), []),
    ]
    packed = pack(groups, LongStrawConfig(prompt_chunk_size=2), CPU)
    assert packed.prompt_ids.tolist() == [1, 2, 3]  # the last prompt token opens each response; nobody reads group 2
    assert packed.response_ids.tolist() == [4, 5, 4, 8]
    assert packed.targets.tolist() == [5, 6, 7, 9]
    assert packed.rows == [slice(0, 2), slice(2, 2), slice(2, 3), slice(3, 4)]
    first, second, third = packed.groups
    assert [(s.rows, s.past, s.lengths) for s in first.chunks] == [(slice(0, 2), 0, (2,)), (slice(2, 3), 2, (1,))]
    assert [(s.rows, s.past, s.lengths) for s in first.replays] == [(slice(0, 2), 3, (2,)), (slice(2, 3), 3, (1,))]
    assert (second.chunks, second.captured) == ([], 0)
    assert (third.chunks, third.replays) == ([], [])
    assert first.replays[0].positions(CPU).tolist() == [[3, 4]]
    assert packed.tokens_saved == 3


def test_positions_of_a_replay_of_several_responses():
    packed = pack([PromptGroup(torch.arange(5), [torch.arange(2), torch.arange(3)])], LongStrawConfig(), CPU)
    (replay,) = packed.groups[0].replays
    assert replay.positions(CPU).tolist() == [[4, 5, 4, 5, 6]]


@pytest.mark.parametrize(
    "groups", [[], [PromptGroup(torch.arange(3), [])], [PromptGroup(torch.arange(3), [torch.arange(0)])]]
)
def test_a_rank_without_responses_runs_a_dummy(groups):
    packed = pack(groups, LongStrawConfig(), CPU)
    assert len(packed.response_ids) == 1
    assert packed.rows == [slice(0, 0) for g in groups for _ in g.response_ids]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"prompt_chunk_size": 10}, [(4, 4), (4,), (11,), (3, 7)]),
        ({"responses_per_replay": 1}, [(4,), (4,), (4,), (11,), (3,), (7,)]),
        ({"responses_per_replay": 4}, [(4, 4, 4, 11), (3, 7)]),
    ],
)
def test_replays(config, expected):
    assert list(split_replays([4, 4, 4, 11, 3, 7], LongStrawConfig(**config))) == expected


def test_find_groups():
    prompts = [[1, 2], [3], [1, 2], [2]]
    completions = [[5, 6, 7], [8], [], [9, 9]]
    width = 3
    ids = torch.tensor([[0] * (2 - len(p)) + p + c + [0] * (width - len(c)) for p, c in zip(prompts, completions)])  # noqa: B905
    mask = torch.tensor(
        [[0] * (2 - len(p)) + [1] * (len(p) + len(c)) + [0] * (width - len(c)) for p, c in zip(prompts, completions)]  # noqa: B905
    )
    groups, order = find_groups(ids, mask, width)
    assert [g.prompt_ids.tolist() for g in groups] == [[1, 2], [3], [2]]
    assert [[r.tolist() for r in g.response_ids] for g in groups] == [[[5, 6, 7], []], [[8]], [[9, 9]]]
    assert order == [(0, 3), (2, 0), (1, 1), (3, 2)]


@pytest.mark.parametrize(("text", "layers"), [("exact", 5), ("detached", 0), ("last:3", 3)])
def test_exact_layers(text, layers):
    assert exact_layers(text, 5) == layers


@pytest.mark.parametrize(
    "setting",
    [
        {"prompt_grad": "last:0"},
        {"prompt_grad": "last:-1"},
        {"prompt_grad": "last"},
        {"prompt_grad": None},
        {"prompt_chunk_size": 0},
        {"prompt_chunk_size": 2.5},
        {"responses_per_replay": 0},
        {"head_chunk_size": True},
        {"offload": "disk"},
    ],
)
def test_config_names_the_bad_value(setting):
    (value,) = setting.values()
    with pytest.raises(ValueError, match=str(value)):
        LongStrawConfig(**setting)
