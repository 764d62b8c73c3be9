"""Which checkpoint a run resumes from: the last one that was written to its end, never one that a kill cut off."""

import json
import os

import pytest
from accelerate import PartialState

from longstraw_dist.integrations.trl import LongStrawGRPOTrainer
from longstraw_dist.integrations.trl.checkpoints import finished_checkpoint, is_finished

from .trl_training import make, save_models, scripted_rollouts

STATES = {"finished": json.dumps({"global_step": 2}), "half": '{"global_', "none": None}


def save(folder, number: int, state: str) -> str:
    path = folder / f"checkpoint-{number}"
    path.mkdir()
    if STATES[state] is not None:
        (path / "trainer_state.json").write_text(STATES[state])
    os.utime(path, (number, number))
    return str(path)


@pytest.mark.parametrize("state", ["half", "none"])
def test_last_finished_one_is_taken(tmp_path, caplog, state):
    PartialState(cpu=True)  # the logger's
    save(tmp_path, 8, "finished")
    finished = save(tmp_path, 10, "finished")
    cut_off = save(tmp_path, 12, state)
    assert finished_checkpoint(True, str(tmp_path)) == finished
    assert f"{cut_off} was not written to its end: resuming from {finished}." in caplog.text
    assert finished_checkpoint(finished, str(tmp_path)) == finished
    with pytest.raises(ValueError, match=f"{cut_off} was not written to its end.*: resume from {finished}"):
        finished_checkpoint(cut_off, str(tmp_path))


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint: start without resume_from_checkpoint"):
        finished_checkpoint(True, str(tmp_path))
    cut_off = save(tmp_path, 2, "none")
    with pytest.raises(ValueError, match="holds 1 checkpoints, and none was written to its end"):
        finished_checkpoint(True, str(tmp_path))
    with pytest.raises(ValueError, match="start without resume_from_checkpoint"):
        finished_checkpoint(cut_off, str(tmp_path))
    assert finished_checkpoint("a model of the hub", str(tmp_path)) == "a model of the hub"


def test_checkpoint_that_is_cut_off_while_it_is_written_over(tmp_path, monkeypatch):
    """Of a run that goes on from an earlier checkpoint, or that starts again in the same folder."""
    folder = save_models(tmp_path)
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}

    def run():
        make(LongStrawGRPOTrainer, folder, arguments={"rollout_func": scripted_rollouts()}, **options).train()

    run()
    first, second = (tmp_path / "LongStrawGRPOTrainer" / f"checkpoint-{step}" for step in (1, 2))
    assert is_finished(first)
    assert is_finished(second)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(LongStrawGRPOTrainer, "_save_optimizer_and_scheduler", killed)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not is_finished(first)
    assert is_finished(second)
