"""What goes wrong on one rank: all ranks raise the same error within seconds, and the next call is exact.

The ranks here are their own: a test that fails leaves them in a state that no other test should see.
"""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from longstraw_dist import LongStrawConfig, PromptGroup, attach
from longstraw_dist.meter import count_collectives

from ..models import VOCABULARY, ragged, tiny, weigh
from ..reference import relative
from .launch import Ranks
from .wrappings import SHARDED, WRAPPINGS, wrap, wrap_engine

SHAPES = [[(11, (4, 2)), (1, (3,))], [(19, (1, 5, 3))]]
FAULTS = {
    f"token id {VOCABULARY}": {"prompt_groups": [PromptGroup(torch.tensor([1, VOCABULARY]), [torch.tensor([1])])]},
    "token id -1": {"prompt_groups": [PromptGroup(torch.tensor([1]), [torch.tensor([2, -1])])]},
    "prompt_ids is empty": {"prompt_groups": [PromptGroup(torch.tensor([]).long(), [torch.tensor([1])])]},
    "temperature=nan": {"prompt_groups": ragged(), "temperature": float("nan")},
    "'attention_mask'": {"prompt_groups": ragged(), "attention_mask": torch.ones(1, 1)},
    "prompt_groups is a str": {"prompt_groups": "no"},
}


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


class Boom(Exception):
    """Injected."""


def train(wrapped, seed: int):
    """Forward and backward of a good micro-batch; its full gradient."""
    rank = dist.get_rank()
    with wrapped.micro_batch_of_step():
        out = wrapped(prompt_groups=ragged(seed + rank, SHAPES[rank]), temperature=0.7)
        wrapped.backward(0.05 * weigh(out.logps, out.entropies, seed) + out.anchor)
        return wrapped.gradients()


def refused_inputs(name: str):
    """Of each of `FAULTS` on rank 1, between backward and step: the error, the collectives, and whether this rank
    still holds its shards alone; then the error of the next step's gradient, against an engine that has seen no fault.
    """
    rank = dist.get_rank()
    wrapped = wrap(name, lambda: tiny("llama"), LongStrawConfig(prompt_chunk_size=5))
    train(wrapped, 0)
    found = []
    for call in FAULTS.values():
        try:
            with count_collectives() as counts:
                wrapped(**(call if rank == 1 else {"prompt_groups": ragged()}))
            found.append(("nothing was raised", counts, False))
        except ValueError as error:
            found.append((str(error), counts, name not in SHARDED or wrapped.is_sharded()))
    try:
        with torch.set_grad_enabled(rank == 0):
            wrapped(prompt_groups=ragged())
        modes = "nothing was raised"
    except ValueError as error:
        modes = str(error)
    wrapped.step()
    ours = train(wrapped, 1)
    other = wrap(name, lambda: tiny("llama"), LongStrawConfig(prompt_chunk_size=5))
    train(other, 0)
    other.step()
    return found, modes, relative(ours, train(other, 1))


@pytest.mark.parametrize("name", WRAPPINGS)
def test_what_one_rank_finds_wrong_all_raise(ranks, name):
    results = ranks.run(refused_inputs, name, timeout=60)
    for found, modes, error in results:
        for named, (message, counts, sharded) in zip(FAULTS, found, strict=True):
            assert message.startswith("rank 1: ")
            assert named in message
            assert sharded, f"something is left gathered after {message!r}"
            # two to exchange the texts; FSDP2 gathers the root's own parameters before the model's forward begins
            assert counts["all_gather"] <= 2 + (name in ("fsdp2", "fsdp2_one_group")), counts
            assert counts["reduce_scatter"] == 0
        assert modes == "ranks [1] call under torch.no_grad(), the others do not."
        assert error <= 1e-6


def second_call(name: str):
    """A second call before the first one's backward, on rank 1 alone."""
    wrapped = wrap(name, lambda: tiny("llama"))
    out = wrapped(prompt_groups=ragged())
    try:
        if dist.get_rank() == 0:
            del out
        wrapped(prompt_groups=ragged())
        return "nothing was raised"
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "fsdp2"])
def test_second_call_before_backward_is_refused_on_all_ranks(ranks, name):
    for message in ranks.run(second_call, name):
        assert message.startswith("rank 1: ")
        assert "before the backward of the last one" in message


def attach_wrapped(name: str):
    """`attach` on what an engine has wrapped."""
    wrapped = wrap(name, lambda: tiny("llama"), None)
    try:
        attach(wrapped.module)
        return "nothing was raised"
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", sorted(set(WRAPPINGS) - {"zero3_init"}))  # zero.Init comes before attach
def test_attach_refuses_a_wrapped_model(ranks, name):
    for message in ranks.run(attach_wrapped, name):
        assert "attach the model first, then wrap it" in message


def attach_before_deepspeed():
    assert "deepspeed" not in sys.modules
    model = attach(tiny("llama"))
    wrapped = wrap_engine("zero3", model)
    try:
        wrapped(prompt_groups=ragged())
        return "nothing was raised", None
    except ValueError as error:
        message = str(error)
    config = {"leaf_module": {"classes": ["LlamaDecoderLayer"]}}  # what the message says
    other = wrap_engine("zero3", attach(tiny("llama")), **config)
    return message, relative(train(other, 1), train(wrap("zero3", lambda: tiny("llama")), 1))


def sharded_without_root(inside: bool):
    """The error of a model whose layers are units and that is none itself, alone or inside of a unit."""
    model = attach(tiny("llama"))
    for layer in model.model.layers:
        fully_shard(layer)
    if inside:
        fully_shard(torch.nn.Sequential(model))
    try:
        model(prompt_groups=ragged())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("inside", [False, True])
def test_model_that_is_not_the_root_of_fsdp2(ranks, inside):
    for error in ranks.run(sharded_without_root, inside):
        assert "but not the model: fully_shard it too, last" in error


def test_attach_before_deepspeed_is_named():
    ranks = Ranks(2)
    try:
        for message, error in ranks.run(attach_before_deepspeed):
            assert "layer 0 is no ZeRO-3 leaf module" in message
            assert '"leaf_module": {"classes": ["LlamaDecoderLayer"]}' in message
            assert error <= 1e-6
    finally:
        ranks.stop()
