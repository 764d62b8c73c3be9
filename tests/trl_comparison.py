"""What a run of ours has in common with stock's: inputs, gradients before each step, update, every logged number."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from longstraw_dist.integrations.trl import LongStrawGRPOTrainer

from .reference import relative, worst
from .trl_training import Run, norm, scripted_rollouts, train

TIMES = ("step_time", "runtime", "_per_second")  # how the names of what a clock measured end


def train_both(folder: Path, arguments: Callable[[], dict[str, Any]] | None = None, **options) -> tuple[Run, Run]:
    """Ours and stock's, on the same scripted rollouts unless `arguments()` brings others."""
    runs = []
    for cls in (LongStrawGRPOTrainer, GRPOTrainer):
        given = {"rollout_func": scripted_rollouts(), **(arguments() if arguments else {})}
        runs.append(train(cls, folder, arguments=given, **options))
    return runs[0], runs[1]


def compare(ours: Run, theirs: Run, record=None, moved: float = 0.1) -> None:
    """
    Args:
        moved (`float`): the least norm of the update, so that it is known to be one.
    """
    compare_inputs(ours, theirs)
    compare_gradients(ours, theirs, record, moved)
    compare_logs(ours.trainer.state.log_history, theirs.trainer.state.log_history)


def compare_inputs(ours: Run, theirs: Run) -> None:
    """The same micro-batches: what was sampled and rewarded bit for bit, what a model scored within rounding."""
    assert len(ours.batches) == len(theirs.batches) > 0
    assert ours.windows == theirs.windows
    for batch, reference in zip(ours.batches, theirs.batches, strict=True):
        assert batch.keys() == reference.keys()
        for name, value in reference.items():
            exact = not ("logps" in name or "ratio" in name)
            torch.testing.assert_close(batch[name], value, rtol=0, atol=0 if exact else 1e-3, equal_nan=True, msg=name)


def compare_gradients(ours: Run, theirs: Run, record=None, moved: float = 0.1) -> None:
    assert len(ours.gradients) == len(theirs.gradients) > 0
    pairs = list(zip(ours.gradients, theirs.gradients, strict=True))
    errors, sizes = [relative(g, r) for g, r in pairs], [norm(g) for g in theirs.gradients]
    update, moved_by = relative(ours.update, theirs.update), norm(theirs.update)
    text = f"gradients {errors[0]:.1e}, later {max(errors):.1e}, norms {min(sizes):.2g} to {max(sizes):.2g}"
    print(f"{text}; update {update:.1e} of {moved_by:.2g}")
    if record is not None:
        record("gradient_error", text)
        record("update_error", f"{update:.2e} of {moved_by:.3g}")
    assert min(sizes) > 1e-2
    assert errors[0] <= 1e-5
    assert max(errors) <= 1e-4, "AdamW makes a step of 1e-3 of a gradient of rounding errors: later weights differ"
    error, name = worst(*pairs[0])
    assert error <= 1e-4, name
    assert moved_by > moved
    assert update <= 1e-3


def compare_logs(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """All of stock's names, no other but longstraw/*, and the same numbers but for those of a clock."""
    assert len(ours) == len(theirs) > 1
    for log, reference in zip(ours, theirs, strict=True):
        assert {name for name in log if "longstraw/" not in name} == set(reference)
        for name, value in reference.items():
            if name.endswith(TIMES):
                continue
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert math.isclose(log[name], value, rel_tol=1e-4, abs_tol=1e-4), (name, log[name], value)
            else:
                assert log[name] == value, name


def differs(run: Run, other: Run) -> float:
    """How far apart two updates are, in units of the second: that an option does something at all."""
    return relative(run.update, other.update)


def rows(batch: dict[str, Tensor], name: str) -> list[list[int]]:
    """The unpadded ids of `prompt` or `completion`, row by row."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(batch[f"{name}_ids"], batch[f"{name}_mask"], strict=True)]
