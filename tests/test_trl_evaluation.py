"""What is evaluated, logged and called back while and after training: the same as with stock."""

import math
from pathlib import Path

import pandas
import pytest
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.extras.profiling import ProfilingContext

from longstraw_dist.integrations.trl import LongStrawGRPOTrainer

from .trl_comparison import compare, compare_logs, train_both
from .trl_fixtures import prompts, reward
from .trl_training import make, save_models, scripted_rollouts

EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "beta": 0.04}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("evaluation"), "qwen3", num_hidden_layers=2)


def test_metrics_while_training(folder, record_property):
    """Every number that stock logs, and longstraw/*. Clipping is on: the norm is that before it."""
    ours, theirs = train_both(folder, beta=0.04, max_grad_norm=0.5, entropy_coef=0.01)
    compare(ours, theirs, record_property)
    logs = ours.log[:-1]
    for log in logs:
        assert log["grad_norm"] > 0.5
        for name in ("prompt_tokens_captured", "prompt_tokens_saved", "hidden_bytes", "state_bytes", "peak_bytes"):
            assert log[f"longstraw/{name}"] > 0
        assert log["longstraw/prompt_grad_layers"] == 2
        assert log["longstraw/all_gathers"] == 0
        assert all(log[f"longstraw/seconds/{phase}"] > 0 for phase in ("rollout", "forward", "backward"))
    captured = [log["longstraw/prompt_tokens_captured"] for log in logs]
    saved = [log["longstraw/prompt_tokens_saved"] for log in logs]
    assert saved[1] == 3 * captured[1], "groups of four that stay together: three of four prompts saved"


def test_profiled_methods(folder, monkeypatch):
    """What TRL times for wandb and the like, it times in ours too."""
    names = []
    monkeypatch.setattr(ProfilingContext, "_log_metrics", lambda context, _: names.append(context.name.split(".", 1)))
    train_both(folder, max_steps=1)
    times = [[method for cls, method in names if ("LongStraw" in cls) == ours] for ours in (True, False)]
    assert times[0] == times[1]
    assert {"_prepare_inputs", "_get_per_token_logps_and_entropies", "reward"} <= set(times[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_generations_eval": 2, "loss_type": "dapo"},
        {"num_generations_eval": 1, "per_device_eval_batch_size": 3, "loss_type": "bnpo", "entropy_coef": 0.05},
        {"eval_steps": 2, "steps_per_generation": 4, "eval_on_start": True},  # within a generation
    ],
    ids=str,
)
def test_evaluation_while_training(folder, record_property, options):
    """Every eval_* number is stock's, and so is the training around it."""
    ours, theirs = train_both(
        folder, arguments=lambda: {"eval_dataset": prompts(5)}, **{**EVALUATION, "max_steps": 4, **options}
    )
    compare(ours, theirs, record_property)
    evaluations = [log for log in ours.log if "eval_loss" in log]
    assert len(evaluations) == 4 // options.get("eval_steps", 1) + options.get("eval_on_start", False)
    for log in evaluations:
        assert math.isfinite(log["eval_loss"])
        assert {"eval_kl", "eval_entropy", "eval_rewards/reward/mean"} <= set(log)
        assert log["eval_kl"] > 1e-3


@pytest.mark.parametrize(
    "dataset",
    [{"few": prompts(3), "more": prompts(5)}, prompts(5).to_iterable_dataset()],
    ids=["a dictionary", "a stream"],
)
def test_evaluation_of(folder, dataset):
    found = []
    for cls in (LongStrawGRPOTrainer, GRPOTrainer):
        arguments = {"eval_dataset": dataset, "rollout_func": scripted_rollouts()}
        trainer = make(cls, folder, arguments=arguments, **EVALUATION)
        metrics = trainer.evaluate()
        assert any(name.endswith("rewards/reward/std") for name in metrics)
        found.append([metrics, *trainer.state.log_history])
    compare_logs(*found)
    if isinstance(dataset, dict):
        assert {"eval_few_loss", "eval_more_loss"} <= set(found[0][0])


def test_completions_are_logged(folder):
    """The same tables, with the reward function's own columns and metrics."""

    def talkative(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(text) for text in completions])
        log_metric("longest", max(map(len, completions)))
        return reward(completions)

    ours, theirs = train_both(
        folder,
        arguments=lambda: {"reward_funcs": [talkative, reward], "eval_dataset": prompts(4)},
        reward_weights=[0.3, 0.7],
        log_completions=True,
        num_completions_to_print=0,
        **{**EVALUATION, "eval_steps": 2},  # whose table takes the place of the step's
    )
    compare(ours, theirs)
    assert {"longest", "eval_longest"} <= {name for log in ours.log for name in log}
    tables = [sorted(Path(run.trainer.args.output_dir, "completions").glob("*.parquet")) for run in (ours, theirs)]
    assert [path.name for path in tables[0]] == [path.name for path in tables[1]] != []
    for paths in zip(*tables, strict=True):
        table, reference = map(pandas.read_parquet, paths)
        pandas.testing.assert_frame_equal(table, reference)
        assert {"prompt", "completion", "talkative", "reward", "length", "advantage"} <= set(table)


class Events(TrainerCallback):
    """Notes each event, what the control says, and the names of the numbers that come with it."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args, state, control, **kwargs):
            flags = {flag: value for flag, value in vars(control).items() if flag.startswith("should")}
            numbers = sorted({**(kwargs.get("logs") or {}), **(kwargs.get("metrics") or {})})
            numbers = [number for number in numbers if "longstraw/" not in number]
            self.seen.append((name, state.global_step, flags, numbers, kwargs["model"].training))

        return note


def test_callbacks(folder):
    events = []

    def arguments():
        events.append(Events())
        return {"callbacks": [events[-1]], "eval_dataset": prompts(4)}

    runs = train_both(folder, arguments=arguments, **EVALUATION, save_strategy="steps", save_steps=2)
    compare(*runs)
    assert events[0].seen == events[1].seen
    names = [name for name, *_ in events[0].seen]
    assert {"on_train_begin", "on_pre_optimizer_step", "on_evaluate", "on_save", "on_log", "on_train_end"} <= set(
        names
    )
