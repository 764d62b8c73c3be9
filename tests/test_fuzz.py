"""Ragged batches drawn at random, each held to the plain reference: `-m slow` runs 300, `--draws 5000` as many."""

import random

import pytest
import torch
from torch import Tensor

from longstraw_dist import LongStrawConfig, PromptGroup, attach
from longstraw_dist.config import exact_layers

from .models import MODELS, adapted, tiny, tokens
from .reference import gradients, relative, stock_rows, worst

LAYERS = 3
ZERO = 1e-12  # what is left of a query's gradient where one key alone is seen
PARTS = ["embed_tokens", "layers.0.", "layers.1.", "layers.2.", "norm.weight", "self_attn", "mlp", "lm_head"]


def pytest_generate_tests(metafunc):
    if "draw" in metafunc.fixturenames:
        metafunc.parametrize("draw", range(metafunc.config.getoption("draws")))


def draw_model(dice: random.Random, dtype: torch.dtype = torch.float64):
    kind, tied, seed = dice.choice(list(MODELS)), dice.random() < 0.3, dice.randrange(100)
    settings = {"sliding_window": dice.randint(1, 30)} if "sliding_window" in MODELS[kind][1] else {}
    if kind in ("qwen3_moe", "mixtral"):
        settings["experts_implementation"] = "eager"  # grouped has no float64
    model = tiny(kind, tied, seed, num_hidden_layers=LAYERS, **settings)
    if dice.random() < 0.2:
        some = dice.sample(["q_proj", "k_proj", "v_proj", "o_proj"], dice.randint(1, 3))
        return adapted(model, seed, target_modules=some, layers_to_transform=[dice.randrange(LAYERS)]).to(dtype)
    if dice.random() < 0.3:
        frozen = dice.sample(PARTS, dice.randint(1, 6))
        for name, p in model.named_parameters():
            p.requires_grad_(not any(part in name for part in frozen))
        if not any(p.requires_grad for p in model.parameters()):
            model.requires_grad_(True)
    return model.to(dtype)


def draw_config(dice: random.Random) -> LongStrawConfig:
    return LongStrawConfig(
        prompt_grad=dice.choice(["exact", "exact", "detached", f"last:{dice.randint(1, LAYERS)}"]),
        prompt_chunk_size=dice.choice([1, 2, 3, 7, 16, 1024]),
        responses_per_replay=dice.choice([None, None, 1, 2, 3, 8]),
        head_chunk_size=dice.choice([1, 2, 5, 128]),
        offload=dice.choice([None, "hidden"]),
    )


def draw_groups(dice: random.Random) -> list[PromptGroup]:
    generator = torch.Generator().manual_seed(dice.randrange(10**6))
    groups: list[PromptGroup] = []
    for _ in range(dice.choice([0, 1, 1, 2, 3, 5])):
        prompt = tokens(dice.choice([1, 1, 2, 3, 5, 8, 17, 40]), generator)
        if groups and dice.random() < 0.2:  # twice in a batch
            prompt = dice.choice(groups).prompt_ids.clone()
        lengths = [dice.choice([0, 1, 1, 2, 3, 6, 13]) for _ in range(dice.choice([0, 1, 2, 4, 6]))]
        if dice.random() < 0.3:
            lengths = [dice.randint(1, 6)] * dice.randint(1, 5)
        responses = [tokens(n, generator) for n in lengths]
        if len(responses) > 1 and dice.random() < 0.2:
            responses[1] = responses[0].clone()
        groups.append(PromptGroup(prompt, responses))
    return groups


def weigh(logps: list[Tensor], entropies: list[Tensor], dice: random.Random) -> Tensor:
    """A random loss: some tokens masked, some responses left out, entropies in it or not."""
    generator = torch.Generator().manual_seed(dice.randrange(10**6))
    masked, bonus, loss = dice.choice([0.0, 0.3, 0.9]), dice.random() < 0.5, torch.zeros(())
    for logp, entropy in zip(logps, entropies, strict=True):
        weight, other, mask = torch.randn(3, len(logp), generator=generator)
        if dice.random() < 0.2:
            continue
        kept = mask > torch.special.ndtri(torch.tensor(masked))
        loss = loss + (weight * kept * logp.exp() if dice.random() < 0.5 else weight * kept * logp).sum()
        if bonus:
            loss = loss + (other * kept * entropy).sum()
    return loss


@pytest.mark.slow
def test_a_random_batch(draw):
    dice = random.Random(draw)
    model, config, groups = draw_model(dice), draw_config(dice), draw_groups(dice)
    temperature, loss_seed = dice.choice([1.0, 0.7, 1.6]), dice.randrange(10**6)

    logps, entropies = stock_rows(model, groups, temperature, LAYERS - exact_layers(config.prompt_grad, LAYERS))
    loss = weigh(logps, entropies, random.Random(loss_seed))
    if loss.requires_grad:
        loss.backward()
    zero = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    reference = {n: zero[n] if g is None else g for n, g in gradients(model).items() if n in zero}
    model.zero_grad()

    attach(model, config)
    with torch.no_grad():
        scored = model(prompt_groups=groups, temperature=temperature)
    out = model(prompt_groups=groups, temperature=temperature)
    (weigh(out.logps, out.entropies, random.Random(loss_seed)) + out.anchor).backward()
    for ours, again, stock in zip(
        [*out.logps, *out.entropies], [*scored.logps, *scored.entropies], [*logps, *entropies], strict=True
    ):
        assert torch.equal(ours, again)
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=2e-6)  # the stock softmax of gemma2 is float32
    ours = {n: g for n, g in gradients(model).items() if g is not None}
    assert ours.keys() == reference.keys()
    if all(g.abs().max() < ZERO for g in reference.values()):
        assert all(g.abs().max() < ZERO for g in ours.values())
        return
    assert relative(ours, reference) <= 1e-5
    error, name = worst(ours, reference)
    assert error <= 1e-4, name
