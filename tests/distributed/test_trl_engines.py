"""GRPOTrainer in ONE process against ours in two, started with `accelerate launch`: ZeRO-3, FSDP2 and DDP.

Each rank trains on half of the rows; the completions depend on a row's place in the global batch alone. The gradients
before each optimizer step, the update and the metrics are those of the whole batch. One start serves all cases.
"""

import functools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from ..reference import relative, worst
from ..trl_comparison import compare, rows
from ..trl_training import norm, save_models, scripted_rollouts, train
from .trl_launch import KINDS, SHARDED, launch

# name -> (kind, tied, options). The covering set; `slow` holds the rest.
FAST = {
    "two iterations": ("qwen3", False, {"beta": 0.04, "gradient_checkpointing": True}),
    "dapo": ("llama", True, {"beta": 0.04, "loss_type": "dapo", "steps_per_generation": 1}),
    "sequences": ("mistral", False, {"importance_sampling_level": "sequence", "gradient_accumulation_steps": 3}),
    "truncated": (
        "llama",
        False,
        {"mask_truncated_completions": True, "loss_type": "dapo", "beta": 0.04, "off_policy_mask_threshold": 0.05},
    ),
    "a group on both ranks": ("qwen3", True, {"num_generations": 8, "gradient_accumulation_steps": 1}),
}
ENGINES = [*SHARDED, pytest.param("ddp", marks=pytest.mark.slow)]
SLOW = {
    f"{kind}, tied {tied}, beta {beta}, checkpointing {checkpointing}": (
        kind,
        tied,
        {"beta": beta, "gradient_checkpointing": checkpointing},
    )
    for kind in ("llama", "mistral", "qwen3")
    for tied in (False, True)
    for beta in (0.0, 0.04)
    for checkpointing in (False, True)
}
OLD = {"prompt_grad": "detached", "num_iterations": 3, "capture_max_age": 2, "capture_max_drift": 10.0}
OWN_ROLLOUTS = {  # in two processes, with the model's own generation
    "GRPOTrainer": ("qwen3", False, {"beta": 0.04}),
    "LongStrawGRPOTrainer": ("qwen3", False, {"beta": 0.04}),
    "without captures": ("qwen3", False, {"beta": 0.04, "rollout_from_capture": False}),
    "old captures": ("qwen3", False, OLD),
    "of a scan": ("nemotron_h", False, {}),
    "of a scan, without captures": ("nemotron_h", False, {"rollout_from_capture": False}),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """`launched(engine, cases) -> (folder, results)`, started once."""
    tables = {"fast": FAST, "slow": SLOW, "own": OWN_ROLLOUTS}

    @functools.cache
    def start(engine: str, table: str):
        folder, cases = tmp_path_factory.mktemp(engine), []
        for name, (kind, tied, options) in tables[table].items():
            models = folder / f"{kind}-{tied}"
            if not models.exists():
                save_models(models, kind, tied)
            cases.append({"name": name, "models": models.name, "options": options, "after": table == "fast"})
            if table == "own":
                trainer = name if name == "GRPOTrainer" else "LongStrawGRPOTrainer"
                cases[-1] |= {"trainer": trainer, "rollouts": None}
        return folder, *launch(engine, folder, cases, timeout=120 + 10 * len(cases))

    def results(engine: str, table: str):
        folder, found, fault = start(engine, table)
        assert fault is None, fault
        return folder, found

    return results


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """The reference: stock GRPOTrainer in one process on the rows of both ranks."""

    @functools.cache
    def run(table: str, name: str):
        kind, tied, options = {"fast": FAST, "slow": SLOW}[table][name]
        folder = save_models(tmp_path_factory.mktemp("stock"), kind, tied)
        arguments = {"rollout_func": scripted_rollouts()}
        options = {**options, "gradient_checkpointing": False, "per_device_train_batch_size": 8}
        return train(GRPOTrainer, folder, arguments=arguments, **options)

    return run


def check(engine, found, theirs, options, record) -> None:
    assert found["world"] == (2, 2, 2), "the processes train apart"
    assert found["kind"] == KINDS[engine]
    sharded = engine in SHARDED
    assert all(found["partitioned"]) == found["partitioned_everywhere"] == sharded
    if options.get("beta"):
        assert found["reference_attached"]
        assert all(found["reference_partitioned"]) == sharded
    ours = found["run"]
    completions = [
        sorted(tuple(row) for batch in run.batches for row in rows(batch, "completion")) for run in (ours, theirs)
    ]
    assert completions[0] == completions[1]
    assert len(ours.gradients) == len(theirs.gradients) == 3
    errors = [relative(g, r) for g, r in zip(ours.gradients, theirs.gradients, strict=True)]
    update, moved = relative(ours.update, theirs.update), norm(theirs.update)
    print(
        f"{engine} {options}: gradients {errors[0]:.1e}, later {max(errors):.1e}, update {update:.1e} of {moved:.2g}"
    )
    record("gradient_error", f"{errors[0]:.2e}, later {max(errors):.2e}")
    record("update_error", f"{update:.2e} of {moved:.3g}")
    assert errors[0] <= 1e-5
    assert max(errors) <= 1e-4, "AdamW makes a step of 1e-3 of a gradient of rounding errors: later weights differ"
    error, name = worst(ours.gradients[0], theirs.gradients[0])
    assert error <= 1e-4, name
    assert moved > 0.1
    assert update <= 1e-3
    for log, reference in zip(ours.log[:-1], theirs.log[:-1], strict=True):
        for name in (
            "loss",
            "grad_norm",
            "reward",
            "num_tokens",
            "completions/mean_length",
        ):  # no means of micro-batches
            assert math.isclose(log.get(name, 0), reference.get(name, 0), rel_tol=1e-4, abs_tol=1e-4), name
        assert log["longstraw/reduce_scatters" if sharded else "longstraw/all_reduces"] > 0


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("engine", ENGINES)
def test_parity(launched, stock, record_property, engine, name):
    _, results = launched(engine, "fast")
    check(engine, results[name], stock("fast", name), FAST[name][2], record_property)


@pytest.mark.parametrize("engine", ENGINES)
def test_after_training(launched, engine):
    """Generation and evaluation went on as before, and the saved folder is an ordinary one with the new weights."""
    folder, results = launched(engine, "fast")
    name = "two iterations"
    assert math.isfinite(results[name]["evaluation"]["eval_loss"])
    assert results[name]["evaluation"]["eval_completions/mean_length"] > 1
    start, saved = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (folder / "qwen3-False" / "policy", folder / name / "saved")
    )
    for n, change in results[name]["run"].update.items():
        torch.testing.assert_close(saved[n], start[n] + change, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("engine", SHARDED)
def test_parity_all(launched, stock, record_property, engine, name):
    _, results = launched(engine, "slow")
    check(engine, results[name], stock("slow", name), SLOW[name][2], record_property)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_rollouts_are_those_of_stock(launched, engine):
    """Both in two processes, with TRL's generation: the same completions, the same update."""
    _, results = launched(engine, "own")
    compare(*(results[name]["run"] for name in ("LongStrawGRPOTrainer", "GRPOTrainer")), adamw=True)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_captures_change_nothing(launched, engine):
    """The rollout's are used by the updates that follow at the same weights, and not a bit differs."""
    _, results = launched(engine, "own")
    for name, other in (
        ("LongStrawGRPOTrainer", "without captures"),
        ("of a scan", "of a scan, without captures"),
    ):
        ours, without = results[name]["run"], results[other]["run"]
        assert max(log.get("longstraw/prompt_tokens_reused", 0) for log in ours.log) > 0
        assert max(log.get("longstraw/prompt_tokens_reused", 0) for log in without.log) == 0
        assert all(torch.equal(ours.update[n], w) for n, w in without.update.items()), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_old_captures(launched, engine):
    _, results = launched(engine, "own")
    drift = [log.get("longstraw/capture_drift") for log in results["old captures"]["run"].log if "loss" in log]
    assert drift[0] is None, "the first iteration has new ones"
    assert min(drift[1:]) > 0
    assert len(drift) == 3
