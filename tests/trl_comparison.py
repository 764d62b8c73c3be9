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

SGD = {"optim": "sgd", "learning_rate": 0.05}
TIMES = ("step_time", "runtime", "_per_second")  # how the names of what a clock measured end


def train_both(folder: Path, arguments: Callable[[], dict[str, Any]] | None = None, **options) -> tuple[Run, Run]:
    """Ours and stock's, on the same scripted rollouts unless `arguments()` brings others, and with SGD: AdamW makes a
    whole step of a gradient that is nothing but rounding."""
    options, runs = {**SGD, **options}, []
    for cls in (LongStrawGRPOTrainer, GRPOTrainer):
        given = {"rollout_func": scripted_rollouts(), **(arguments() if arguments else {})}
        runs.append(train(cls, folder, arguments=given, **options))
    return runs[0], runs[1]


def compare(ours: Run, theirs: Run, record=None, adamw: bool = False) -> None:
    """`adamw`: the bars of an optimizer that makes a whole step of rounding errors, so that later weights differ."""
    compare_inputs(ours, theirs)
    assert min(ours.gaps, default=1.0) > 1e-4, "choose another top_entropy_quantile: rounding decides on a token"
    compare_gradients(ours, theirs, record, adamw)
    compare_logs(ours.log, theirs.log)


def compare_inputs(ours: Run, theirs: Run) -> None:
    """The same micro-batches: what was sampled and rewarded bit for bit, what a model scored within rounding."""
    assert len(ours.batches) == len(theirs.batches) > 0
    assert ours.windows == theirs.windows
    for batch, reference in zip(ours.batches, theirs.batches, strict=True):
        assert batch.keys() == reference.keys()
        for name, value in reference.items():
            exact = not ("logps" in name or "ratio" in name)
            torch.testing.assert_close(batch[name], value, rtol=0, atol=0 if exact else 1e-3, equal_nan=True, msg=name)


def compare_gradients(ours: Run, theirs: Run, record, adamw: bool) -> None:
    """Before each optimizer step, as a whole and parameter by parameter; and what the steps made of them."""
    assert len(ours.gradients) == len(theirs.gradients) > 0
    pairs = list(zip(ours.gradients, theirs.gradients, strict=True))
    errors, sizes = [relative(g, r) for g, r in pairs], [norm(g) for g in theirs.gradients]
    update, moved = relative(ours.update, theirs.update), norm(theirs.update)
    text = f"{errors[0]:.1e}, later {max(errors):.1e}, norms {min(sizes):.2g} to {max(sizes):.2g}"
    print(f"gradients {text}; update {update:.1e} of {moved:.2g}")
    if record is not None:
        record("gradient_error", text)
        record("update_error", f"{update:.2e} of {moved:.3g}")
    assert min(sizes) > 1e-2
    assert moved > 1e-2
    assert errors[0] <= 1e-5
    assert max(errors) <= (1e-4 if adamw else 1e-5)
    for one in pairs[:1] if adamw else pairs:
        error, name = worst(*one)
        assert error <= 1e-4, name
    assert update <= (1e-3 if adamw else 1e-4)


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
