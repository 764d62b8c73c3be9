"""After a training step nothing of it is left: generate, save and a stock forward work, and so does the next step."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from longstraw_dist import LongStrawConfig

from ..models import ragged, tiny
from ..reference import relative
from .wrappings import SHARDED, WRAPPINGS, Wrapped, train, wrap


def saved(wrapped: Wrapped, name: str) -> dict[str, Tensor]:
    """The full state as the engine's own saving gathers it, on rank 0."""
    if name.startswith("zero3"):
        return wrapped.module._zero3_consolidated_16bit_state_dict() or {}
    if name.startswith("fsdp2"):
        return get_model_state_dict(wrapped.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return wrapped.model.state_dict()


def use(name: str, tied: bool):
    """Errors of what follows a step against an unwrapped model of the same weights; and the shards between."""
    build, config = lambda: tiny("llama", tied), LongStrawConfig(prompt_chunk_size=5)
    wrapped, other = wrap(name, build, config), wrap(name, build, config)
    train(wrapped, 0)
    train(other, 0)
    sharded = [name not in SHARDED or wrapped.is_sharded()]
    plain = build()
    weights = wrapped.weights()
    plain.load_state_dict(weights, strict=False)
    ids = torch.arange(5, 14)[None]
    with torch.no_grad():
        stock = wrapped(input_ids=ids).logits - plain(input_ids=ids).logits
        out = wrapped(prompt_groups=ragged(3))
    wrapped.model.eval()
    generated = wrapped.model.generate(ids, max_new_tokens=4, do_sample=False, synced_gpus=True)
    wrapped.model.train()
    expected = plain.eval().generate(ids, max_new_tokens=4, do_sample=False)
    state = {n: p.clone() for n, p in saved(wrapped, name).items() if n in weights}
    train(wrapped, 1)
    train(other, 1)
    sharded.append(name not in SHARDED or wrapped.is_sharded())
    return {
        "stock forward": float(stock.norm()),
        "generate": float((generated != expected).sum()),
        "save": relative(state, weights) if dist.get_rank() == 0 else 0.0,
        "scored": float(len(out.logps) - sum(len(r) for _, r in [(23, (5, 5, 0, 9)), (1, (3, 1)), (2, (4,))])),
        "next step": relative(wrapped.weights(), other.weights()),
    }, sharded


@pytest.mark.parametrize("name", WRAPPINGS)
def test_use_after_a_step(two_ranks, name):
    for errors, sharded in two_ranks.run(use, name, tied=name != "zero3"):
        assert all(error <= 1e-5 for error in errors.values()), errors
        assert all(sharded), "something is left gathered after a step"
