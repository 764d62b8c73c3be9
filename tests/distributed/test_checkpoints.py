"""Saving in the middle of a training and loading into another model: the next steps are those of the first one.

The engine's own ways: DeepSpeed's checkpoints and its gathered 16-bit weights, the state dicts of FSDP2, full and
sharded, in memory and on disk, and accelerate's.
"""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from longstraw_dist import LongStrawConfig

from ..models import tiny
from ..reference import relative
from .wrappings import Wrapped, shared_folder, train, wrap

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def make(name: str, seed: int, tied: bool = False, **settings) -> Wrapped:
    return wrap(name, lambda: tiny("llama", tied, seed), LongStrawConfig(prompt_chunk_size=5), ADAMW, **settings)


def deepspeed(saver: Wrapped, loader: Wrapped, folder: str) -> None:
    saver.module.save_checkpoint(folder, client_state={"seen": 17})
    path, client = loader.module.load_checkpoint(folder)
    assert path is not None
    assert client["seen"] == 17


def full(saver: Wrapped, loader: Wrapped, folder: str) -> None:
    """Whole tensors, on rank 0 alone, in a file."""
    model, optimizer = get_state_dict(saver.model, saver.optimizer, options=FULL)
    assert all(not isinstance(t, DTensor) for t in model.values())
    assert bool(model) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        torch.save((model, optimizer), Path(folder) / "state.pt")
        model, optimizer = torch.load(Path(folder) / "state.pt")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(loader.model, model, options=options)  # `set_state_dict` skips it where the dict is empty
    set_optimizer_state_dict(loader.model, loader.optimizer, optimizer, options=options)


def sharded(saver: Wrapped, loader: Wrapped, folder: str) -> None:
    model, optimizer = get_state_dict(saver.model, saver.optimizer)
    assert all(isinstance(t, DTensor) for t in model.values())
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    model, optimizer = get_state_dict(loader.model, loader.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(loader.model, loader.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def weights_alone(saver: Wrapped, loader: Wrapped, folder: str) -> None:
    """Set back into the model that they came from, which has changed meanwhile."""
    for options in (FULL, StateDictOptions()):
        state = get_model_state_dict(saver.model, options=options)
        state = {n: t.clone() for n, t in state.items()}
        before = saver.weights()
        with torch.no_grad():
            for p in saver.model.parameters():
                p.mul_(2)
        back = StateDictOptions(full_state_dict=options is FULL, broadcast_from_rank0=options is FULL)
        set_model_state_dict(saver.model, state, options=back)
        assert relative(saver.weights(), before) == 0
    full(saver, loader, folder)


OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
CASES = [
    ("zero3", deepspeed, {}),
    ("zero3", deepspeed, {**OFFLOADED, "tied": True, "overlap_comm": True}),
    ("fsdp2", weights_alone, {}),
    ("fsdp2", sharded, {"mesh_shape": (1, 2), "tied": True}),
    ("fsdp2_accelerate", full, {}),
]
SLOW = [
    ("zero3_init", deepspeed, {"overlap_comm": True}),
    ("zero2", deepspeed, {"tied": True}),
    ("fsdp2", full, {"tied": True}),
    ("fsdp2", sharded, {}),
    ("fsdp2", full, {"mesh_shape": (2, 1)}),
    ("fsdp2_accelerate", sharded, {"tied": True}),
]


def go_on(name: str, how, settings: dict) -> tuple[float, float]:
    """Error of the loaded model's weights, and of the next two steps."""
    saver = make(name, 0, **settings)
    for step in range(2):
        train(saver, step)
    loader = make(name, 1, **settings)
    train(loader, 5)  # has a state of its own, which loading replaces
    assert relative(loader.weights(), saver.weights()) > 0.1
    with shared_folder() as folder:
        how(saver, loader, folder)
    loaded = relative(loader.weights(), saver.weights())
    for wrapped in (saver, loader):
        for step in range(2, 4):
            train(wrapped, step)
    return loaded, relative(loader.weights(), saver.weights())


def spell(value) -> str:
    return getattr(value, "__name__", None) or str(value).replace("'", "") or "default"


@pytest.mark.parametrize(
    ("name", "how", "settings"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW], ids=spell
)
def test_training_goes_on_from_a_checkpoint(two_ranks, record_property, name, how, settings):
    for loaded, gone_on in two_ranks.run(go_on, name, how, settings, timeout=90):
        record_property("weights after two more steps", gone_on)
        assert loaded == 0
        assert gone_on <= 1e-6


def gathered(bf16: bool, tied: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `save_16bit_model` writes, and the weights themselves; then trains on."""
    settings = {"stage3_gather_16bit_weights_on_model_save": True}
    wrapped, other = (make("zero3", 0, tied=tied, bf16=bf16, **settings) for _ in range(2))
    for w in (wrapped, other):
        train(w, 0)
    with shared_folder() as folder:
        wrapped.module.save_16bit_model(folder, "weights.bin")
        dist.barrier()
        state = torch.load(Path(folder) / "weights.bin")
    weights = wrapped.weights()
    assert wrapped.is_sharded()
    for w in (wrapped, other):
        train(w, 1)
    assert relative(wrapped.weights(), other.weights()) == 0
    return state, weights


@pytest.mark.parametrize(("bf16", "tied"), [(True, False), (False, True)])
def test_gathered_weights_are_the_true_ones(two_ranks, bf16, tied):
    for state, weights in two_ranks.run(gathered, bf16, tied):
        assert state.keys() - weights.keys() == ({"lm_head.weight"} if tied else set())
        for n, w in weights.items():
            assert w.dtype == (torch.bfloat16 if bf16 else torch.float32)
            assert torch.equal(state[n], w), n
