"""What a rollout may bring: masks, log-probs of another engine, prompts that differ or coincide, no reward."""

import math

import pytest
import torch
from datasets import Dataset

from longstraw_dist.groups import find_groups

from .trl_comparison import compare, differs, rows, train_both
from .trl_fixtures import reward
from .trl_rollouts import changed, differ_in_prompt, mask_some_tokens, sample_elsewhere, simulate_vllm
from .trl_training import save_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("rollouts"), "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(folder):
    """Ours, with nothing but the scripted completions."""
    return train_both(folder)[0]


def rollouts(*changes):
    return lambda: {"rollout_func": changed(*changes)}


def groups_of(batch) -> list[int]:
    """Responses of each group that the trainer finds in a micro-batch."""
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    return sorted(len(group.response_ids) for group in find_groups(ids, mask, batch["completion_ids"].shape[1])[0])


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_environment_masks(folder, plain, record_property, loss_type, truncated):
    options = {"loss_type": loss_type, "mask_truncated_completions": truncated, "entropy_coef": 0.05}
    ours, theirs = train_both(folder, rollouts(mask_some_tokens), **options)
    compare(ours, theirs, record_property)
    assert any((batch["tool_mask"] * batch["completion_mask"]).sum(1).min() == 0 for batch in ours.batches)
    assert differs(ours, plain) > 0.05


@pytest.mark.parametrize("options", [{}, {"loss_type": "bnpo", "beta": 0.04, "importance_sampling_level": "sequence"}])
def test_truncated_completions(folder, plain, record_property, options):
    """A row without an end is masked as a whole: its group's other rows stay."""
    ours, theirs = train_both(folder, mask_truncated_completions=True, **options)
    compare(ours, theirs, record_property)
    masked = sum(int((batch["completion_mask"].sum(1) == 0).sum()) for batch in ours.batches)
    assert 0 < masked < 4 * len(ours.batches)
    assert differs(ours, plain) > 0.05


def test_whole_groups_that_are_truncated(folder, record_property):
    """A micro-batch in which nothing counts, beside one that does."""

    def change(out, generator, trainer):
        out["completion_ids"] = [ids if i % 8 > 3 else [5 + i % 40] * 6 for i, ids in enumerate(out["completion_ids"])]

    ours, theirs = train_both(folder, rollouts(change), mask_truncated_completions=True)
    compare(ours, theirs, record_property)
    counts = [int(batch["completion_mask"].sum()) for batch in ours.batches]
    assert 0 in counts
    assert max(counts) > 0


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_simulated_vllm(folder, plain, record_property, mode):
    """TRL corrects for log-probs of another engine. The engine is simulated: it never generates here."""

    options = {"vllm_importance_sampling_mode": mode, "off_policy_mask_threshold": 0.5, "prepare": simulate_vllm}
    options |= {"vllm_importance_sampling_clip_min": 0.2, "vllm_importance_sampling_clip_max": 5.0}
    ours, theirs = train_both(folder, rollouts(sample_elsewhere), **options)
    compare(ours, theirs, record_property)
    assert ours.trainer.vllm_generation.synced == theirs.trainer.vllm_generation.synced > 1
    log = ours.log[0]
    low, high = (log[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "max"))
    assert low == pytest.approx(0.0 if mode.endswith("mask") else 0.2)
    assert 1 < high <= 5
    assert differs(ours, plain) > 0.05


@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_a_group_that_differ_in_prompt(folder, plain, record_property, masked):
    """A rollout_func may rewrite prompts, row by row: each prompt is a group of the engine's, the advantages' stay."""

    ours, theirs = train_both(folder, rollouts(differ_in_prompt, *([mask_some_tokens] if masked else [])))
    compare(ours, theirs, record_property)
    assert all(groups_of(batch) == [2, 2] for batch in ours.batches)
    assert differs(ours, plain) > 0.05


@pytest.mark.parametrize(
    ("options", "found"),  # the groups of each micro-batch
    [
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}, [(8,), (4, 4), (4, 4)]),
        ({"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "beta": 0.04}, [(12,), (4, 4, 4)]),
        ({}, [(4,), (4,), (4,), (4,)]),  # a group of eight, cut into two micro-batches
    ],
    ids=["two rows", "three rows", "two micro-batches"],
)
def test_duplicate_prompts(folder, record_property, options, found):
    """Rows of the data set with one prompt merge into one group, which runs that prompt once; the advantages are those
    of each row of the data set."""
    dataset = Dataset.from_dict(
        {"prompt": [*["a prompt that comes three times"] * 3, "another", "one more", "a last"]}
    )
    options = {"num_iterations": 1, "shuffle_dataset": False, **options}
    ours, theirs = train_both(folder, dataset=dataset, **options)
    compare(ours, theirs, record_property)
    assert [tuple(groups_of(batch)) for batch in ours.batches][: len(found)] == found
    log, prompts = ours.log[0], rows(ours.batches[0], "prompt")
    if "gradient_accumulation_steps" in options:  # one micro-batch a step
        captured, saved = (log[f"longstraw/prompt_tokens_{name}"] for name in ("captured", "saved"))
        assert captured == len(prompts[0]) - 1
        assert saved == captured * (len(prompts) - 1)


def some_without_reward(completions, **kwargs):
    return [None if i % 4 == 1 else value for i, value in enumerate(reward(completions))]


def the_same_in_half_of_the_groups(completions, **kwargs):
    return [0.5 if i % 8 < 4 else value for i, value in enumerate(reward(completions))]


@pytest.mark.parametrize("function", [some_without_reward, the_same_in_half_of_the_groups])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_rewards(folder, record_property, function, beta):
    """Rows without an advantage: they still count in the divisor, and in the KL term."""

    ours, theirs = train_both(folder, lambda: {"reward_funcs": [function]}, beta=beta, max_steps=2)
    compare(ours, theirs, record_property)
    assert (ours.column("advantages") == 0).float().mean() >= 0.25
    assert math.isfinite(ours.log[0]["reward"])
