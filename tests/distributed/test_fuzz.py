"""Random batches on two ranks, each with its own, under the engines that shard: the draws of tests/test_fuzz.py."""

import random

import pytest
import torch
import torch.distributed as dist

from longstraw_dist.config import exact_layers

from ..reference import relative, stock_rows, worst
from ..test_fuzz import LAYERS, draw_config, draw_groups, draw_model, weigh
from .wrappings import SHARDED, wrap

BATCHES = 3  # of one model


def draw_batch(draw: int, batch: int, rank: int):
    """Groups, temperature and the loss's seed: of any rank, so that the reference knows them all."""
    dice = random.Random(f"{draw} {batch} {rank}")
    return draw_groups(dice), dice.choice([1.0, 0.7, 1.6]), dice.randrange(10**6)


def compare(name: str, draw: int) -> list[tuple[float, float]]:
    """Errors of each batch against the stock rows in float64, of the whole gradient and of the worst parameter: each
    over its bar, or over twice the error of the stock rows in float32 where that is more."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = draw_config(random.Random(draw))
    wrapped = wrap(name, lambda: draw_model(random.Random(draw), torch.float32), config)
    stocks = [draw_model(random.Random(draw), dtype) for dtype in (torch.float32, torch.float64)]
    errors = []
    for batch in range(BATCHES):
        groups, temperature, seed = draw_batch(draw, batch, rank)
        with wrapped.micro_batch_of_step():
            out = wrapped(prompt_groups=groups, temperature=temperature)
            wrapped.backward(weigh(out.logps, out.entropies, random.Random(seed)) + out.anchor)
            ours = wrapped.gradients()
        wrapped.optimizer.zero_grad()
        if rank > 0:
            continue
        theirs, exact = (reference(stock, config, draw, batch, world) for stock in stocks)
        if not any(g.any() for g in exact.values()):
            assert not any(g.any() for g in ours.values())
            continue
        gradient = relative(ours, exact) / max(1e-5, 2 * relative(theirs, exact))
        errors.append((gradient, worst(ours, exact)[0] / max(1e-4, 2 * worst(theirs, exact)[0])))
    return errors


def reference(model, config, draw: int, batch: int, world: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for rank in range(world):
        groups, temperature, seed = draw_batch(draw, batch, rank)
        rows = stock_rows(model, groups, temperature, LAYERS - exact_layers(config.prompt_grad, LAYERS))
        loss = weigh(*rows, random.Random(seed))
        if loss.requires_grad:
            (loss / world).backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(20))
@pytest.mark.parametrize("name", [name for name in SHARDED if name != "zero3_init"])
def test_random_batches(two_ranks, record_property, name, draw):
    errors = two_ranks.run(compare, name, draw, timeout=120)[0]
    record_property("errors", errors)
    for gradient, parameter in errors:
        assert gradient <= 1
        assert parameter <= 1
