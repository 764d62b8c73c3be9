"""Three steps of GRPOTrainer and of ours, in one process: the same completions, gradients and updates."""

import functools

import pytest
import torch
from trl import GRPOTrainer

from longstraw_dist.integrations.trl import LongStrawGRPOTrainer

from .models import MODELS
from .reference import relative, worst
from .trl_training import norm, save_models, train

CHECKPOINTING = {
    "none": {},
    "plain": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """`stock(kind, tied, **options) -> (folder, run)`: the reference, without checkpointing."""

    @functools.cache
    def folder_of(kind, tied):
        return save_models(tmp_path_factory.mktemp(kind), kind, tied)

    @functools.cache
    def run(kind, tied, options):
        return folder_of(kind, tied), train(GRPOTrainer, folder_of(kind, tied), **dict(options))

    return lambda kind, tied, **options: run(kind, tied, tuple(options.items()))


def compare(ours, theirs, record) -> None:
    assert len(ours.gradients) == len(theirs.gradients) == 3
    assert theirs.column("advantages").abs().min() > 1e-2
    for name in ("prompt_ids", "completion_ids", "advantages"):
        assert torch.equal(ours.column(name), theirs.column(name))
    errors = [relative(g, r) for g, r in zip(ours.gradients, theirs.gradients, strict=True)]
    sizes = [norm(g) for g in theirs.gradients]
    moved, update = norm(theirs.update), relative(ours.update, theirs.update)
    print(f"gradients {max(errors):.1e} of {min(sizes):.2g}..{max(sizes):.2g}, update {update:.1e} of {moved:.2g}")
    record("gradient_error", f"{max(errors):.2e}")
    record("update_error", f"{update:.2e} of {moved:.3g}")
    assert min(sizes) > 0.1
    assert max(errors) <= 1e-5
    for g, r in zip(ours.gradients, theirs.gradients, strict=True):
        error, name = worst(g, r)
        assert error <= 1e-4, name
    assert moved > 0.1, "three steps of 1e-3 move each of 20,000 weights by about that"
    assert update <= 1e-3


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_parity(stock, record_property, kind, tied, beta, checkpointing):
    folder, theirs = stock(kind, tied, beta=beta)
    ours = train(LongStrawGRPOTrainer, folder, beta=beta, **CHECKPOINTING[checkpointing])
    compare(ours, theirs, record_property)
    if beta:
        kls = [log["kl"] for log in ours.trainer.state.log_history if "kl" in log]
        assert min(kls) > 1e-3, "the reference model is the policy"
