"""An exception in the middle of a forward or a backward, on every rank at once (a bug, an out-of-memory all share).

After one in forward nothing is left gathered, and the next step is exact. After one in backward the engines keep half
a reduction: the exception and the next call say so, no step is silently wrong, and `recover` mends FSDP2.
"""

import pytest
import torch
import torch.distributed as dist

from longstraw_dist import LongStrawConfig, recover

from ..models import ragged, tiny, weigh
from ..reference import relative
from .launch import Ranks
from .wrappings import SHARDED, WRAPPINGS, ZERO, Wrapped, wrap

SHAPES = [[(11, (4, 2)), (1, (3,))], [(19, (1, 5, 3))]]


@pytest.fixture
def ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


class Injected(Exception):
    """Raised by a layer."""


def forward(wrapped: Wrapped, seed: int) -> torch.Tensor:
    rank = dist.get_rank()
    out = wrapped(prompt_groups=ragged(seed + rank, SHAPES[rank]), temperature=0.7)
    return 0.05 * weigh(out.logps, out.entropies, seed) + out.anchor


def train(wrapped: Wrapped, seed: int) -> None:
    with wrapped.micro_batch_of_step():
        wrapped.backward(forward(wrapped, seed))


def break_layer(wrapped: Wrapped, calls: int):
    """The MLP of layer 1 raises at its call number `calls`."""
    mlp = wrapped.model.get_decoder().layers[1].mlp
    left = [calls]

    def broken(x):
        left[0] -= 1
        if left[0] <= 0:
            raise Injected
        return type(mlp).forward(mlp, x)

    mlp.forward = broken
    return mlp


def build(name: str, accumulation: int = 1, no_sync: bool = False) -> Wrapped:
    """Which has run one micro-batch, and stepped if that was a whole step."""
    wrapped = wrap(name, lambda: tiny("llama"), LongStrawConfig(prompt_chunk_size=5), accumulation=accumulation)
    wrapped.no_sync = no_sync
    train(wrapped, 0)
    if accumulation == 1:
        wrapped.step()
    return wrapped


def stock_logits(wrapped: Wrapped) -> torch.Tensor:
    with torch.no_grad():
        return wrapped(input_ids=torch.arange(9)[None]).logits


def in_forward(name: str, then: str):
    """The engine's next step after a forward that failed, against one in which none did; whether it held on to its
    shards; and whether a stock forward differs."""
    accumulation = 1 if then == "next step" else 2
    wrapped, other = (build(name, accumulation, no_sync=then == "retry" and name not in ZERO) for _ in range(2))
    mlp = break_layer(wrapped, 2)
    try:
        forward(wrapped, 1)
        return "nothing was raised", False, 1.0, 1.0
    except Injected:
        del mlp.forward
    sharded = name not in SHARDED or wrapped.is_sharded()
    recover(wrapped.model)
    if then == "step":  # without the micro-batch that failed
        wrapped.step()
        other.step()
    stock = float((stock_logits(wrapped) - stock_logits(other)).norm())
    for w in (wrapped, other):
        train(w, 1)
        w.step()
    return "", sharded, stock, relative(wrapped.weights(), other.weights())


# "step" goes on without the micro-batch that failed; DeepSpeed counts them, and steps after as many as it was told.
THEN = [(n, then) for n in WRAPPINGS for then in ("next step", "retry", "step") if then != "step" or n not in ZERO]


@pytest.mark.parametrize(("name", "then"), THEN)
def test_exception_in_forward(two_ranks, name, then):
    for message, sharded, stock, step in two_ranks.run(in_forward, name, then):
        assert not message
        assert stock <= 1e-5
        assert step <= 1e-6
        assert sharded, "a layer is left gathered"


def in_backward(name: str, score: bool):
    """What the next call says; after `recover`, the next step against an engine in which nothing failed."""
    wrapped, other = build(name), build(name)
    loss = forward(wrapped, 1)
    mlp = break_layer(wrapped, 2)
    try:
        with wrapped.micro_batch_of_step():
            wrapped.backward(loss)
        return "nothing was raised", "", 1.0
    except Injected as error:
        note = "".join(getattr(error, "__notes__", []))
        del mlp.forward
    if name not in ZERO:  # DeepSpeed's own fails here on a CPU
        wrapped.optimizer.zero_grad()
    try:
        forward(wrapped, 2)
        return "the next call went on", note, 1.0
    except (ValueError, RuntimeError) as error:
        message = str(error)
    if score:
        stock_logits(wrapped)
    try:
        recover(wrapped.model)
    except ValueError as error:
        return message, note, str(error)
    for w in (wrapped, other):
        train(w, 3)
        w.step()
    return message, note, relative(wrapped.weights(), other.weights())


@pytest.mark.parametrize(
    "name", ["ddp", "zero3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("zero1", "zero2"))]
)
def test_exception_in_backward_is_named(ranks, name):
    for message, note, refusal in ranks.run(in_backward, name, False, timeout=90):
        assert ("finished reduction in the prior iteration" if name == "ddp" else "ended in the middle") in message
        for text in (note, refusal):
            assert ("wrap the model again" if name == "ddp" else "Rebuild the engine") in text


@pytest.mark.parametrize("score", [False, True])
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_one_group", "fsdp2_accelerate"])
def test_recover_from_an_exception_in_backward(two_ranks, name, score):
    for message, note, step in two_ranks.run(in_backward, name, score):
        assert "ended in the middle" in message
        assert "recover(model)" in note
        assert step <= 1e-6
