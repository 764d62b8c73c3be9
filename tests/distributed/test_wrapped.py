"""Every wrapping against the stock model in one process: gradients, and what three optimizer steps change.

Each rank has groups, prompts and responses of its own, and in one micro-batch the last rank has none. The world's
gradient is the mean of the ranks' gradients; the reference takes the loss of all ranks, row by row, over the world.
"""

import functools
import itertools

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_dist import LongStrawConfig
from longstraw_dist.config import exact_layers

from ..models import EXPERTS, MODELS, adapted, ragged, tiny, weigh
from ..reference import relative, stock_rows, worst
from .launch import Ranks
from .wrappings import WRAPPINGS, ZERO, or_zeros, trainable, wrap

STEPS = 3
OPTIMIZERS = {  # AdamW's eps is above the noise of the smallest gradients, which it would blow up to whole steps
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4),
}
SHAPES = [  # of one rank's micro-batch: (P, (R_1, R_2, ...)) a group
    [(11, (4, 2)), (1, (3,))],
    [(19, (1, 5, 3))],
    [(3, ()), (7, (2, 2)), (2, (6,))],
    [(5, (3,)), (14, (0, 4))],
]
FROZEN = {
    "none": (),
    "embedding": ("embed_tokens",),
    "a layer": ("layers.1.",),
    "some": ("q_proj", "norm.weight"),
    "lower layers": ("embed_tokens", "layers.0.", "layers.1."),
    "all layers": ("embed_tokens", "layers."),
    "shared layers": (),
    "adapted head": (),
    "saved head": (),
    "saved norm": (),
    "idle adapter": (),
}


def groups_of(rank: int, world: int, step: int, micro: int):
    if rank == world - 1 and step == 1 and micro == 0:
        return []
    return ragged(100 * step + 10 * micro + rank, SHAPES[(rank + step + 2 * micro) % len(SHAPES)])


def loss_of(logps: list[Tensor], entropies: list[Tensor], rank: int, step: int, micro: int, one_term: bool = False):
    """With `one_term`, rank 0's loss knows log-probs alone, and the others' entropies alone."""
    if one_term:
        logps, entropies = (logps, []) if rank == 0 else ([], entropies)
    return 0.05 * weigh(logps, entropies, seed=step + 7 * micro + 31 * rank)


def make(kind: str, tied: bool, frozen: str, experts: str | None = None, wide: bool = False):
    """The model with some parameters frozen; `"adapters"`: in PEFT's, with a LoRA in two of its layers. `wide` gives
    matrices above DeepSpeed's default threshold, below which it keeps parameters gathered."""
    settings: dict = {"experts_implementation": experts} if experts else {}
    model = tiny(kind, tied, **settings, **({"intermediate_size": 4096} if wide else {}))
    if frozen == "shared layers":
        model.model.layers[2].mlp = model.model.layers[0].mlp
    if frozen == "adapted head":
        return adapted(model, target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"])
    if frozen == "saved norm":
        return adapted(model, target_modules=["q_proj"], modules_to_save=["model.norm"])
    if frozen == "idle adapter":
        model = adapted(model, target_modules=["q_proj"])
        model.add_adapter("idle", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)
            if "idle" in name:
                torch.nn.init.ones_(p)
        return model
    if frozen.startswith("adapted experts"):
        model = adapted(model, **EXPERTS)
        for name, p in model.named_parameters():
            if frozen.endswith("trained too") and "experts.base_layer" in name:
                p.requires_grad_()
        return model
    if frozen == "saved head":
        model = adapted(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
        for name, p in model.named_parameters():
            p.requires_grad_("modules_to_save" in name)  # nothing but the head
        return model
    if frozen == "adapters":
        return adapted(model, target_modules=["q_proj", "v_proj", "o_proj"], layers_to_transform=[1, 2])
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in FROZEN[frozen]))
    return model


@functools.cache
def reference(kind, tied, mode, optimizer, accumulation, clip, frozen, one_term, wide, world):
    """Gradients before clipping, of each step, and what the weights changed by."""
    model = make(kind, tied, frozen, wide=wide)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    stepper = OPTIMIZERS[optimizer](trainable(model))
    layers = model.config.num_hidden_layers
    all_gradients = []
    for step in range(STEPS):
        for micro, rank in itertools.product(range(accumulation), range(world)):
            groups = groups_of(rank, world, step, micro)
            rows = stock_rows(model, groups, 0.7, layers - exact_layers(mode, layers))
            loss = loss_of(*rows, rank, step, micro, one_term)
            if isinstance(loss, Tensor):
                (loss / world / accumulation).backward()
        all_gradients.append({n: or_zeros(p.grad, p) for n, p in model.named_parameters() if p.requires_grad})
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > 2 * clip, f"a clip of {clip} does not bite a norm of {norm}"
        stepper.step()
        stepper.zero_grad()
    return all_gradients, {n: p.detach() - before[n] for n, p in model.named_parameters()}


def parity(
    name,
    kind="llama",
    tied=False,
    mode="exact",
    optimizer="SGD",
    accumulation=1,
    clip=None,
    no_sync=False,
    frozen="none",
    one_term=False,
    wide=False,
    score="",
    experts=None,
    config=None,
    **settings,
):
    """Errors against the reference (on rank 0): of the steps' gradients, of one parameter's, and of the update.

    With `score`, calls under `no_grad`, packed and stock, come before or between each forward and backward; packed
    ones alone after them.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    config = LongStrawConfig(**{"prompt_grad": mode, "prompt_chunk_size": 5, "head_chunk_size": 4, **(config or {})})
    wrapped = wrap(
        name,
        lambda: make(kind, tied, frozen, experts, wide),
        config,
        OPTIMIZERS[optimizer],
        accumulation,
        clip,
        **settings,
    )
    wrapped.no_sync = no_sync

    def scores(where: str):
        if where in score:
            with torch.no_grad():
                wrapped(prompt_groups=ragged(rank))
                if where != "after":  # FSDP2 keeps the root gathered after a stock one, over the optimizer step
                    wrapped(input_ids=torch.arange(6)[None])

    before, ours = wrapped.weights(), []
    for step in range(STEPS):
        for micro in range(accumulation):
            scores("before")
            with wrapped.micro_batch_of_step():
                out = wrapped(prompt_groups=groups_of(rank, world, step, micro), temperature=0.7)
                scores("between")
                wrapped.backward(loss_of(out.logps, out.entropies, rank, step, micro, one_term) + out.anchor)
                if micro == accumulation - 1:
                    ours.append(wrapped.gradients())
            scores("after")
        wrapped.step()
    update = {n: w - before[n] for n, w in wrapped.weights().items()}
    if rank > 0:
        return None
    theirs, their_update = reference(kind, tied, mode, optimizer, accumulation, clip, frozen, one_term, wide, world)
    return {
        "gradient": max(relative(g, r) for g, r in zip(ours, theirs, strict=True)),
        "parameter": max(worst(g, r) for g, r in zip(ours, theirs, strict=True)),
        "update": relative(update, their_update),
    }


def check(ranks, record_property, name, **case):
    record_property("kind", case.get("kind", "llama"))
    record_property("wrapping", name)
    errors = ranks.run(parity, name, timeout=120, **case)[0]
    for what, error in errors.items():
        record_property(what, error)
    assert errors["gradient"] <= 1e-5
    assert errors["parameter"][0] <= 3e-4, errors["parameter"][1]
    assert errors["update"] <= 1e-4


LONG = {"accumulation": 4, "clip": 0.5}
SCORED = {"score": "before between"}
DEFAULTS = dict.fromkeys(  # DeepSpeed's own: overlap, prefetch of 5e7 elements, parameters below 1e5 kept gathered
    (
        "overlap_comm",
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_reuse_distance",
    )
)
UNDER_ZERO3 = ("minimax", "falcon_h1", "gpt_oss", "gemma4_text", "recurrent_gemma", "zamba2", "olmo")
OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
CASES = [  # each setting meets each engine somewhere; `test_parity_of_all` takes them all together
    ("ddp", {}),
    ("ddp", {"kind": "qwen3", "tied": True, "mode": "detached", "optimizer": "AdamW", "no_sync": True, **LONG}),
    ("ddp", {"kind": "mistral", "find_unused_parameters": True, "bucket_cap_mb": 0.01, **SCORED}),
    ("ddp", {"static_graph": True, "frozen": "some"}),
    ("zero1", {"kind": "qwen3", "tied": True, "score": "before between after", "accumulation": 2, "clip": 0.5}),
    ("zero2", {"mode": "last:2", "optimizer": "AdamW", "score": "before between after", **LONG}),
    ("zero2", {"kind": "mistral", "frozen": "embedding", "tied": True}),
    ("zero3", {"kind": "mistral", "tied": True}),
    ("zero3", {"kind": "qwen3", "optimizer": "AdamW", "score": "before between after", **LONG}),
    ("zero3", {"mode": "detached", "tied": True, "accumulation": 2, "one_term": True}),
    ("zero3", {"mode": "last:2", "frozen": "some", **SCORED}),
    ("zero3", {"frozen": "embedding", "config": {"offload": "hidden"}}),
    ("zero3", {"overlap_comm": True, "stage3_prefetch_bucket_size": 5000, "stage3_param_persistence_threshold": 40}),
    ("zero3", {"stage3_max_reuse_distance": 10**9, "stage3_prefetch_bucket_size": 10**7}),
    ("zero3", {"reduce_bucket_size": 5000, "accumulation": 2, "offload_optimizer": {"device": "cpu"}}),
    ("zero3", {"wide": True, "optimizer": "AdamW", **SCORED, **LONG, **DEFAULTS}),
    ("zero3", {"wide": True, "tied": True, "optimizer": "AdamW", "clip": 0.5, **DEFAULTS, **OFFLOADED}),
    ("zero3", {"optimizer": "AdamW", "overlap_comm": True, **SCORED, **LONG, **OFFLOADED}),
    ("zero3_init", {"kind": "qwen3", "tied": True, "mode": "last:1"}),
    ("zero3_from_pretrained", {"kind": "qwen3", "tied": True, "clip": 0.5}),
    ("zero3_from_pretrained", {"wide": True, "optimizer": "AdamW", "accumulation": 2, **DEFAULTS, **OFFLOADED}),
    ("fsdp2", {"kind": "qwen3", "tied": True, "optimizer": "AdamW", **SCORED, **LONG}),
    ("fsdp2", {"no_sync": True, "frozen": "embedding", "accumulation": 2, "clip": 0.5, **SCORED}),
    ("fsdp2", {"kind": "mistral", "mode": "detached", "reshard_after_forward": False}),
    ("fsdp2", {"mode": "last:2", "one_term": True, "frozen": "a layer", "config": {"offload": "hidden"}}),
    ("ddp", {"kind": "qwen2", "frozen": "adapters"}),
    ("zero2", {"kind": "gemma3_text", "frozen": "lower layers", "optimizer": "AdamW"}),
    ("zero3", {"kind": "qwen3", "frozen": "adapters", "optimizer": "AdamW", **SCORED, **LONG, "clip": 0.1}),
    ("zero3", {"kind": "gemma2", "frozen": "lower layers", "accumulation": 2}),
    ("zero3", {"kind": "olmo2", "frozen": "all layers"}),
    ("zero3", {"kind": "qwen3_moe", "optimizer": "AdamW", "accumulation": 2}),
    ("zero3", {"kind": "mixtral", "experts": "eager", "tied": True}),
    ("fsdp2", {"kind": "qwen3", "frozen": "adapters", "optimizer": "AdamW", **SCORED, **LONG, "clip": 0.1}),
    ("fsdp2", {"kind": "glm4", "frozen": "lower layers", "accumulation": 2}),
    ("fsdp2", {"kind": "gemma3_text", "frozen": "all layers"}),
    ("fsdp2", {"kind": "qwen3_moe", "experts": "eager", "optimizer": "AdamW"}),
    ("fsdp2", {"kind": "mixtral", "no_sync": True, "accumulation": 2}),
    ("fsdp2_accelerate", {"kind": "gemma2", "frozen": "adapters", "accumulation": 2}),
    ("zero3", {"kind": "qwen3_moe", "frozen": "adapted experts", **SCORED}),
    ("fsdp2", {"kind": "qwen3_moe", "frozen": "adapted experts, trained too", "accumulation": 2, **SCORED}),
    ("zero3", {"kind": "olmo_hybrid", "accumulation": 2}),
    ("zero3", {"kind": "mamba2", "mode": "exact", **SCORED}),
    ("zero3", {"kind": "jamba"}),
    ("zero3", {"kind": "minimax"}),
    ("zero3", {"kind": "recurrent_gemma", "accumulation": 2, **SCORED}),
    ("zero3", {"kind": "falcon_h1"}),
    ("zero3", {"kind": "glm_moe_dsa", "accumulation": 2, **SCORED}),
    ("zero3", {"kind": "gpt_oss"}),
    ("zero3", {"kind": "gemma4_text", **SCORED}),
    ("zero3", {"kind": "zamba2", "tied": True}),
    ("fsdp2", {"kind": "olmo_hybrid", "accumulation": 2}),
    ("fsdp2", {"kind": "nemotron_h", **SCORED}),
    ("fsdp2", {"kind": "falcon_mamba"}),
    ("fsdp2", {"kind": "minimax"}),
    ("fsdp2", {"kind": "recurrent_gemma", "accumulation": 2, **SCORED}),
    ("fsdp2", {"kind": "falcon_h1"}),
    ("fsdp2", {"kind": "glm_moe_dsa", "accumulation": 2, **SCORED}),
    ("fsdp2", {"kind": "gpt_oss"}),
    ("fsdp2", {"kind": "gemma4_text", **SCORED}),
    ("fsdp2", {"kind": "zamba2", "tied": True}),
    ("zero3", {"kind": "olmo", "accumulation": 2}),  # its norms have no parameters
    ("fsdp2", {"kind": "olmo"}),
    ("zero3", {"config": {"activation_budget": 10**9}, "accumulation": 2, **SCORED}),
    ("zero3", {"kind": "olmo_hybrid", "config": {"activation_budget": 300_000}}),
    ("fsdp2", {"kind": "glm_moe_dsa", "config": {"activation_budget": 10**9}, "accumulation": 2}),
    ("fsdp2_one_group", {"config": {"activation_budget": 50_000}}),
    ("ddp", {"frozen": "shared layers"}),
    ("zero2", {"frozen": "shared layers", "accumulation": 2}),
    ("zero3", {"frozen": "shared layers", "accumulation": 2}),
    ("zero3", {"frozen": "adapted head", "accumulation": 2, "config": {"head_chunk_size": 2}}),
    ("zero3", {"frozen": "saved head", "accumulation": 2, "config": {"head_chunk_size": 2}}),
    ("zero3", {"frozen": "saved norm", "accumulation": 2, "config": {"head_chunk_size": 2}}),
    ("fsdp2", {"frozen": "adapted head", "accumulation": 2, "config": {"head_chunk_size": 2}}),
    ("fsdp2", {"frozen": "saved head", "accumulation": 2, "config": {"head_chunk_size": 2}}),
    ("fsdp2", {"frozen": "shared layers", "accumulation": 2}),
    ("fsdp2_one_group", {"frozen": "shared layers", "accumulation": 2}),
    ("fsdp2", {"mesh_shape": (1, 2), "optimizer": "AdamW", "clip": 0.5, "accumulation": 2, **SCORED}),
    ("fsdp2", {"mesh_shape": (2, 1), "kind": "qwen3", "tied": True, "accumulation": 2, "no_sync": True}),
    ("fsdp2_one_group", {"tied": True, "mode": "detached"}),
    ("fsdp2_one_group", {"kind": "mistral", "no_sync": True, **SCORED, **LONG}),
    ("fsdp2_accelerate", {"kind": "qwen3", "optimizer": "AdamW", "accumulation": 2, "clip": 0.5, **SCORED}),
    ("fsdp2_accelerate", {"tied": True, "mode": "last:2", "accumulation": 2, "no_sync": True}),
]


def spell(value) -> str:
    if isinstance(value, str):
        return value
    given = [f"{k}={v}" for k, v in value.items() if v is not None]
    return " ".join(given + ["at DeepSpeed's defaults"] * (len(given) < len(value))) or "default"


SLOW = [  # what a fast case under ZeRO-3, or a smaller one, stands for
    *((name, case) for name, case in CASES if name == "fsdp2" and case.get("kind") in UNDER_ZERO3),
    *((name, case) for name, case in CASES if "after" in case.get("score", "") and name == "zero3"),
    *((name, case) for name, case in CASES if "offload_optimizer" in case and "wide" in case),
    *((name, case) for name, case in CASES if case.get("config", {}).get("activation_budget", 10**9) < 10**9),
]


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each in SLOW else []) for each in CASES],
    ids=spell,
)
def test_parity(two_ranks, record_property, name, case):
    check(two_ranks, record_property, name, **case)


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("ddp", "zero2", "zero3")), "fsdp2"]
)
def test_parity_of_three_ranks(three_ranks, record_property, name):
    check(three_ranks, record_property, name, tied=name == "zero3", clip=0.5, one_term=True)


def test_scoring_with_the_root_inside_of_peft(two_ranks, record_property):
    check(two_ranks, record_property, "fsdp2", score="after", frozen="adapted head", inside=True)


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "fsdp2"])
def test_idle_adapter_that_is_trainable(two_ranks, record_property, name):
    check(two_ranks, record_property, name, frozen="idle adapter")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_one_group"])
def test_parity_of_two_by_two_ranks(record_property, name):
    ranks = Ranks(4)
    try:
        check(ranks, record_property, name, mesh_shape=(2, 2), optimizer="AdamW", accumulation=4, clip=0.2, **SCORED)
    finally:
        ranks.stop()


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_one_group", "fsdp2_accelerate"])
def test_scoring_between_backward_and_step(two_ranks, record_property, name):
    """After a forward without backward FSDP2 keeps the root gathered, which then misses the optimizer step."""
    check(two_ranks, record_property, name, score="after")


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("mode", ["exact", "detached", "last:2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("name", WRAPPINGS)
def test_parity_of_all(two_ranks, record_property, name, kind, tied, mode, long):
    settings = {"optimizer": "AdamW", "no_sync": name not in ZERO, **SCORED, **LONG} if long else {}
    check(two_ranks, record_property, name, kind=kind, tied=tied, mode=mode, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("llama", "mistral", "qwen3")])
@pytest.mark.parametrize(
    ("name", "frozen"),  # zero.Init builds the model from its config alone, which knows no adapters
    [pair for pair in itertools.product(WRAPPINGS, ("none", "adapters")) if pair != ("zero3_init", "adapters")],
)
def test_parity_of_each_type(two_ranks, record_property, name, kind, frozen):
    check(
        two_ranks,
        record_property,
        name,
        kind=kind,
        frozen=frozen,
        optimizer="AdamW",
        **SCORED,
        **{**LONG, "clip": 0.1},
    )
