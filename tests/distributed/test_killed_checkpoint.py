"""A process is killed while it saves a checkpoint: the previous one is usable, and training goes on from it."""

import functools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .. import trl_training
from ..models import ragged, tiny, weigh
from ..reference import relative
from .endings import endings, fault
from .wrappings import Wrapped, wrap

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
REPO = Path(__file__).parents[2]
ENGINES = {  # what `accelerate launch` puts into the environment, and the options that a CPU takes
    "zero3": (
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(REPO / "configs/deepspeed/zero3_cpu.json"),
        },
        {"ddp_backend": "gloo", "use_cpu": False},
    ),
    "fsdp2": (
        {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        },
        {"accelerator_config": {"use_configured_state": True}},
    ),
}
OPTIONS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "num_iterations": 1}


def rollout(prompts: list[str], trainer) -> dict[str, list]:
    """Completions that depend on the step and a row's place in the global batch, also after a resumption."""
    step, rank = trainer.state.global_step, trainer.accelerator.process_index
    completions = []
    for i in range(len(prompts)):
        generator = torch.Generator().manual_seed(1000 * step + len(prompts) * rank + i)
        completions.append(torch.randint(3, len(trainer.processing_class), (5,), generator=generator).tolist())
    ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def kill_while_saving(folder: Path, which: int, within: str = "checkpoint-4"):
    """The `which`-th file that this process writes into the checkpoint (-1: its RNG state) ends in the middle."""
    save, count = torch.save, [0]

    @functools.wraps(save)
    def half(obj, f, *args, **kwargs):
        save(obj, f, *args, **kwargs)
        if within not in str(f):
            return
        count[0] += 1
        if count[0] == which or (which == -1 and "rng_state" in str(f)):
            kill(folder, Path(f))

    torch.save = half


def kill(folder: Path, half_written: Path) -> None:
    time.sleep(1)  # for the others to write theirs
    os.truncate(half_written, half_written.stat().st_size // 2)
    fault(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while_saving_shards(folder: Path) -> None:
    """The file that this process writes for `torch.distributed.checkpoint` ends in the middle."""
    write = dcp.FileSystemWriter.write_data

    def half(self, *args, **kwargs):
        write(self, *args, **kwargs).wait()
        kill(folder, Path(self.path) / f"__{torch.distributed.get_rank()}_0.distcp")

    dcp.FileSystemWriter.write_data = half


def train(rank: int, engine: str, folder: Path, kill: tuple[int, int] | None, resume: str | bool | None) -> None:
    """Four steps; the weights after them are left in `folder`. `kill` is a rank and one of its files."""
    environment, options = ENGINES[engine]
    os.environ.update(environment)
    if engine == "zero3":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    trainer = trl_training.make(
        trl_training.LongStrawGRPOTrainer,
        folder.parent / "models",
        arguments={"rollout_func": rollout},
        output_dir=str(folder / "run"),
        **OPTIONS,
        **options,
    )
    assert trainer.accelerator.num_processes == 2
    if kill is not None and kill[0] == rank:
        kill_while_saving(folder, kill[1])
    trainer.train(resume_from_checkpoint=resume)
    weights = trl_training.weights_of(trainer)
    if rank == 0:
        torch.save(weights, folder / "weights.pt")


def run(engine: str, folder: Path, kill=None, resume=None):
    (folder / "weights.pt").unlink(missing_ok=True)
    (folder / "rendezvous").unlink(missing_ok=True)
    return endings(train, engine, folder, kill, resume, folder=folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of a run in which nobody was killed."""

    @functools.cache
    def weights(engine: str):
        folder = tmp_path_factory.mktemp(engine)
        trl_training.save_models(folder / "models")
        (folder / "whole").mkdir()
        ended = run(engine, folder / "whole")
        assert [e.code for e in ended] == [0, 0], ended[0].output + ended[1].output
        return folder, torch.load(folder / "whole" / "weights.pt")

    return weights


@pytest.mark.parametrize(
    ("engine", "kill"),
    [
        pytest.param("zero3", (1, -1), marks=pytest.mark.slow),
        pytest.param("fsdp2", (0, 1), marks=pytest.mark.slow),
        pytest.param("zero3", (0, 1), marks=pytest.mark.slow),
        pytest.param("fsdp2", (1, -1), marks=pytest.mark.slow),
    ],
)
def test_previous_checkpoint_is_usable(whole, tmp_path, record_property, engine, kill):
    folder, expected = whole(engine)
    folder = folder / str(kill[0])
    folder.mkdir()
    ended = run(engine, folder, kill)
    assert ended[kill[0]].code == -signal.SIGKILL, ended[kill[0]].output
    assert ended[1 - kill[0]].code == 1, ended[1 - kill[0]].output
    record_property("seconds to end", max(e.seconds for e in ended))
    assert (folder / "run" / "checkpoint-4").is_dir()

    ended = run(engine, folder, resume=True)
    assert [e.code for e in ended] == [0, 0], ended[0].output + ended[1].output
    assert "resuming from" in ended[0].output
    error = relative(torch.load(folder / "weights.pt"), expected)
    record_property("weights", error)
    assert error <= 1e-6


def save(wrapped: Wrapped, name: str, folder: Path) -> None:
    if name == "zero3":
        wrapped.module.save_checkpoint(folder.parent, tag=folder.name)
    else:
        model, optimizer = get_state_dict(wrapped.model, wrapped.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def load(wrapped: Wrapped, name: str, folder: Path) -> None:
    """A user names the one before: DeepSpeed's file `latest` may be ahead of what the other processes wrote."""
    if name == "zero3":
        path, _ = wrapped.module.load_checkpoint(folder.parent, tag=folder.name)
        assert path is not None
        return
    model, optimizer = get_state_dict(wrapped.model, wrapped.optimizer)
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(CheckpointException, match="metadata"):
        dcp.load(state, checkpoint_id=folder.parent / "step2")
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(wrapped.model, wrapped.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def step(wrapped: Wrapped, seed: int) -> None:
    with wrapped.micro_batch_of_step():
        out = wrapped(prompt_groups=ragged(seed + torch.distributed.get_rank(), [(9, (4, 2))]))
        wrapped.backward(0.1 * weigh(out.logps, out.entropies, seed) + out.anchor)
    wrapped.step()


def train_engine(rank: int, name: str, folder: Path, killed: bool) -> None:
    """One step, a checkpoint, one more, and rank 1 is killed while it writes the next checkpoint; or from there on."""
    wrapped = wrap(name, lambda: tiny("llama", seed=0 if killed else 1), optimizer=ADAMW)
    if not killed:
        load(wrapped, name, folder / "step1")
    else:
        step(wrapped, 1)
        save(wrapped, name, folder / "step1")
    step(wrapped, 2)
    weights = wrapped.weights()
    torch.save(weights, folder / f"{'first' if killed else 'second'}{rank}.pt")
    if killed:
        if rank == 1:
            kill_while_saving(folder, 1, within="step2") if name == "zero3" else kill_while_saving_shards(folder)
        save(wrapped, name, folder / "step2")


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_previous_checkpoint_of_the_engine_is_usable(tmp_path, name):
    ended = endings(train_engine, name, tmp_path, True, folder=tmp_path)
    assert ended[1].code == -signal.SIGKILL, ended[1].output
    assert ended[0].code == 1, ended[0].output
    assert (tmp_path / "step2").is_dir()
    (tmp_path / "rendezvous").unlink()
    ended = endings(train_engine, name, tmp_path, False, folder=tmp_path)
    assert [e.code for e in ended] == [0, 0], ended[0].output + ended[1].output
    for rank in range(2):
        first, second = (torch.load(tmp_path / f"{run}{rank}.pt") for run in ("first", "second"))
        assert relative(second, first) <= 1e-6
