"""Generation between steps: it samples from the new weights, leaves nothing gathered, and the next steps are exact.

As a user calls it, as TRL does (`unwrap_model_for_generation`, which takes ZeRO-3's hooks off and puts them back), and
in the middle of an accumulation window.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from longstraw_dist import LongStrawConfig
from longstraw_dist.meter import count_collectives

from ..models import ragged, tiny, weigh
from ..reference import relative
from .wrappings import SHAPES, ZERO, Wrapped, wrap

PROMPT = torch.arange(5, 14)[None]
STEPS = 4


def train(wrapped: Wrapped, seed: int) -> dict[str, int]:
    """The collectives of one micro-batch. Without broadcasts: DeepSpeed compares a trace that it records anew."""
    rank = dist.get_rank()
    with wrapped.micro_batch_of_step(), count_collectives() as counts:
        out = wrapped(prompt_groups=ragged(seed + rank, SHAPES[rank]), temperature=0.7)
        wrapped.backward(0.05 * weigh(out.logps, out.entropies, seed) + out.anchor)
    return {kind: n for kind, n in counts.items() if kind != "broadcast"}


def unwrapped(wrapped: Wrapped, name: str, way: str):
    """The model to call `generate` of, as `way` hands it out."""
    if way == "generate":
        return contextlib.nullcontext(wrapped.model)
    from trl.models import unwrap_model_for_generation

    plugin = SimpleNamespace(zero_stage=ZERO[name]) if name in ZERO else None
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=plugin), unwrap_model=lambda module: wrapped.model
    )
    return unwrap_model_for_generation(wrapped.module, accelerator, gather_deepspeed3_params=way == "TRL, gathered")


def generate(wrapped: Wrapped, name: str, way: str) -> torch.Tensor:
    with unwrapped(wrapped, name, way) as model, torch.no_grad():
        model.eval()
        ids = model.generate(PROMPT, max_new_tokens=2 + dist.get_rank(), do_sample=False, synced_gpus=True)
        model.train()
    return ids


def run(name: str, way: str, accumulation: int, settings: dict):
    """Against an engine that never generates: tokens that differ from a plain model's, the collectives of the last
    micro-batch, the error of the weights, and whether this rank held its shards alone all along."""
    config = LongStrawConfig(prompt_chunk_size=5)
    wrapped, other = (wrap(name, lambda: tiny("llama"), config, accumulation=accumulation, **settings) for _ in "ab")
    plain, wrong, sharded = tiny("llama").eval(), 0, []
    for step in range(STEPS):
        for micro in range(accumulation):
            counts = [train(w, 10 * step + micro) for w in (wrapped, other)]
            if step < STEPS - 1:
                plain.load_state_dict(wrapped.weights(), strict=False)
                expected = plain.generate(PROMPT, max_new_tokens=2 + dist.get_rank(), do_sample=False)
                sharded.append(wrapped.is_sharded())
                wrong += int((generate(wrapped, name, way) != expected).sum())
                sharded.append(not name.startswith("zero") or wrapped.is_sharded())  # FSDP2 keeps its root gathered
        wrapped.step()
        other.step()
    return wrong, sharded, counts, relative(wrapped.weights(), other.weights())


CASES = [
    ("zero3", "TRL, gathered", 2, {"overlap_comm": True}),
    ("zero3_init", "TRL", 1, {}),
    ("fsdp2", "TRL", 1, {"mesh_shape": (1, 2)}),
    ("fsdp2_accelerate", "TRL", 2, {}),
]
SLOW = [
    ("zero3", "generate", 2, {"stage3_prefetch_bucket_size": 5000}),
    ("zero3", "generate", 1, {}),
    ("zero3", "TRL, gathered", 1, {}),
    ("fsdp2", "generate", 2, {}),
    ("fsdp2_one_group", "generate", 1, {}),
]


def spell(value) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(
    ("name", "way", "accumulation", "settings"),
    CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
    ids=spell,
)
def test_generation_between_steps(two_ranks, record_property, name, way, accumulation, settings):
    for wrong, sharded, counts, error in two_ranks.run(run, name, way, accumulation, settings, timeout=90):
        record_property("weights", error)
        assert wrong == 0
        assert all(sharded), "something is left gathered"
        assert counts[0] == counts[1]
        assert error <= 1e-6
