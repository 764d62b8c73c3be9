"""When rows are generated, reused, cut and accumulated: every schedule, through the trainer, against stock."""

import pytest
import torch
from datasets import IterableDataset
from trl import GRPOTrainer

from longstraw_dist.integrations.trl import LongStrawGRPOTrainer

from .trl_comparison import compare, train_both
from .trl_fixtures import prompts
from .trl_training import make, save_models, train, weights_of

SCHEDULES = [  # of the defaults: accumulation 2, num_iterations 2, micro-batches of one group of 4
    {"steps_per_generation": 1, "num_iterations": 1},  # each micro-batch has its own generation
    {"steps_per_generation": 1},
    {"steps_per_generation": 2, "num_iterations": 3},
    {"steps_per_generation": 3},  # neither a multiple nor a divisor of the accumulation
    {"steps_per_generation": 4, "num_iterations": 1},  # more than the accumulation: the old policy is scored
    {"steps_per_generation": 4, "max_steps": 5},
    {"generation_batch_size": 24, "num_iterations": 3},
    {"loss_type": "dapo", "steps_per_generation": 4, "num_iterations": 1},  # normalized over the generation
    {"loss_type": "bnpo", "importance_sampling_level": "sequence", "beta": 0.04, "gradient_accumulation_steps": 3},
    {"num_generations": 8, "steps_per_generation": 4},  # a group spans two micro-batches
    {"num_generations": 2, "loss_type": "dr_grpo"},  # two groups in each
    {"per_device_train_batch_size": 3, "num_generations": 3, "gradient_accumulation_steps": 3},
    {"per_device_train_batch_size": 6, "steps_per_generation": 2},  # one group and a half
]
OPTIONS = [
    {"pad_to_multiple_of": 16},
    {"use_adaptive_entropy": True, "entropy_target": 3.0},
    {"top_entropy_quantile": 0.3, "off_policy_mask_threshold": 0.1},
    {"temperature": 0.6, "scale_rewards": "batch"},
    {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
    {"use_cache": True, "torch_empty_cache_steps": 1, "full_determinism": False},
    {"dataloader_num_workers": 1, "dataloader_pin_memory": False},
    {"cast_lm_head_to_fp32": True, "beta": 0.04},
    {"shuffle_dataset": False, "logging_steps": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("schedules"), "qwen3", num_hidden_layers=2)


@pytest.mark.parametrize(
    "options", [*SCHEDULES, *OPTIONS], ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items())
)
def test_schedules_and_options(folder, record_property, options):
    """The same rows in the same order: the same gradients, update and logs."""
    ours, theirs = train_both(folder, **options)
    assert ours.trainer.state.global_step == theirs.trainer.state.global_step
    compare(ours, theirs, record_property)


@pytest.mark.parametrize("steps_per_generation", [1, 4])
def test_a_short_last_window(folder, record_property, steps_per_generation):
    """16 of 18 prompts are used, in 16 micro-batches an epoch: five steps of three, and one of one."""
    options = {"gradient_accumulation_steps": 3, "num_iterations": 1, "max_steps": -1, "num_train_epochs": 2}
    data = prompts(16 if steps_per_generation == 1 else 18)
    ours, theirs = train_both(folder, dataset=data, steps_per_generation=steps_per_generation, **options)
    assert ours.windows == 2 * (15 * [3] + [1])
    assert len(ours.gradients) == 12
    compare(ours, theirs, record_property)
    if steps_per_generation > 1:  # the old policy is scored, which is counted too
        return
    logs = ours.log[:-1]  # each of one step, although the second epoch begins at the 17th
    batches = iter(ours.batches)
    for log, window in zip(logs, 2 * (5 * [3] + [1]), strict=True):
        tokens = sum(int(next(batches)["prompt_mask"][0].sum()) - 1 for _ in range(window))  # one group in each
        assert log["longstraw/prompt_tokens_captured"] == tokens


def test_a_stream(folder, record_property):
    """Shuffled in a buffer, with generations that outlast a step; it begins anew when it is at its end."""
    options = {"steps_per_generation": 4, "max_steps": 6, "dataset": prompts(9).to_iterable_dataset()}
    ours, theirs = train_both(folder, **options)
    assert len({tuple(ids) for batch in ours.batches for ids in batch["prompt_ids"].tolist()}) > 4
    compare(ours, theirs, record_property)


def test_a_stream_that_ends_within_a_window(folder, record_property):
    stream = IterableDataset.from_generator(lambda: iter(prompts(5)))
    options = {"gradient_accumulation_steps": 3, "steps_per_generation": 1, "num_iterations": 1, "max_steps": 4}
    ours, theirs = train_both(folder, dataset=stream, **options)
    assert ours.windows == 3 * [3, 3, 3, 2, 2] + [3, 3, 3], "transformers lets the two join the next epoch's three"
    compare(ours, theirs, record_property)


@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_sync_ref_model(folder, record_property, alpha):
    """The reference follows the policy, from its own start: kl and the gradients are stock's."""
    options = {"beta": 0.04, "max_steps": 4, "num_iterations": 1, "steps_per_generation": 1}
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": alpha}
    ours, theirs = train_both(folder, **options, **sync)
    compare(ours, theirs, record_property)
    policy, start = weights_of(ours.trainer), make(LongStrawGRPOTrainer, folder, beta=0.04).ref_model
    distances = []
    for name, weight in ours.trainer.ref_model.named_parameters():
        torch.testing.assert_close(weight, dict(theirs.trainer.ref_model.named_parameters())[name], rtol=0, atol=1e-4)
        assert not torch.equal(weight, start.get_parameter(name)), name
        distances.append((weight - policy[name]).abs().max().item())
    assert (max(distances) == 0) == (alpha == 1.0)


@pytest.mark.parametrize(
    "options",
    [{"num_iterations": 1}, {"steps_per_generation": 4, "max_steps": 6}],  # the second: in the middle of a generation
    ids=["at a generation", "within a generation"],
)
def test_resume(folder, tmp_path, record_property, options):
    """As stock goes on from a checkpoint, with TRL's generation; at a generation's end as if there had been none."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "beta": 0.04, **options}
    whole, resumed = [], []
    for cls in (LongStrawGRPOTrainer, GRPOTrainer):
        given = {**options, "output_dir": str(tmp_path / cls.__name__)}
        whole.append(train(cls, folder, **given))
        resumed.append(train(cls, folder, resume=str(tmp_path / cls.__name__ / "checkpoint-2"), **given))
    assert resumed[0].trainer.state.global_step == options["max_steps"]
    assert len(resumed[0].gradients) == options["max_steps"] - 2
    compare(*whole, adamw=True)
    compare(*resumed, record_property, adamw=True)
    if "steps_per_generation" not in options:
        assert all(torch.equal(resumed[0].update[name], change) for name, change in whole[0].update.items())
