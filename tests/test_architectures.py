"""Every architecture against its stock model, response by response: log-probs, entropies, every gradient."""

import functools
import itertools
import sys
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw_dist import LongStrawConfig, PromptGroup, attach, indexer
from longstraw_dist.config import exact_layers

from .architectures import ARCHITECTURES, CACHED
from .models import AROUND, inside_of_another, ragged, tiny, weigh
from .more_architectures import FURTHER
from .reference import gradients, relative, stock_rows, worst

DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
LAYERS = 3
IDLE = ("indexer",)  # without a gradient, stock's too
TIED = ("zamba2",)  # whose blocks are shared by tying them


def other_ways(model, *sizes: int) -> list:
    """Ways in which the stock model computes the same: with other attention, with the delta rule in other chunks. What
    it differs by then is its own noise."""
    module = sys.modules[type(model.get_decoder()).__module__]
    names = [name for name in DELTA_RULES if name in vars(module)]
    rules = [functools.partial(vars(module)[name], chunk_size=size) for name in names for size in sizes]
    eager = mock.patch.object(model.config.get_text_config(), "_attn_implementation_internal", "eager")
    return [eager, *(mock.patch.object(module, name, rule) for name in names for rule in rules)]


def run(model, rows):
    """Log-probs and entropies as one tensor, and the gradients of a loss of them."""
    model.zero_grad()
    logps, entropies = rows
    weigh(logps, entropies).backward()
    return torch.cat([*logps, *entropies]).detach(), {n: g for n, g in gradients(model).items() if g is not None}


def errors(found, reference) -> tuple[float, float, float]:
    """Of the log-probs, of the whole gradient, and of one parameter's."""
    (scores, grads), (stock_scores, stock_grads) = found, reference
    assert grads.keys() == stock_grads.keys()
    return float((scores - stock_scores).abs().max()), relative(grads, stock_grads), worst(grads, stock_grads)[0]


def check(model, wide, config: LongStrawConfig, record) -> None:
    """Against the stock rows, or what they would be in float64 (`wide`): within 1e-5, or twice the rows' own noise."""
    groups, detached = ragged(), LAYERS - exact_layers(config.prompt_grad, LAYERS)
    rows = functools.partial(stock_rows, groups=groups, temperature=0.7, detached=detached)
    stock, right = run(model, rows(model)), run(wide, rows(wide))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert stock[1].keys() == {n for n in trained if not any(part in n for part in IDLE)}
    noise = [errors(stock, right)]
    for other_way in other_ways(model, min(max(config.prompt_chunk_size, 2), 8), 32):
        with other_way:
            noise.append(errors(run(model, rows(model)), stock))
    attach(model, config)
    out = model(prompt_groups=groups, temperature=0.7)
    ours, own = run(model, (out.logps, out.entropies)), [max(each) for each in zip(*noise, strict=True)]
    found = [min(pair) for pair in zip(errors(ours, stock), errors(ours, right), strict=True)]
    for name, value in zip(("log_prob", "gradient", "parameter"), found, strict=True):
        record(name, value)
    print(f"log-prob, gradient, parameter {found}; noise of the stock model {own}")
    for error, noisy, bar in zip(found, own, (1e-5, 1e-5, 3e-4), strict=True):
        assert error <= max(bar, 2 * noisy)


def cases():
    """The further types are fast in one of their nine cases, the others in five."""
    for kind, mode, chunk in itertools.product(ARCHITECTURES | FURTHER, ["exact", "detached", "last:2"], [1, 7, 1024]):
        fast = (mode == "exact") + (chunk == 7) + (kind in ARCHITECTURES) >= 2
        yield pytest.param(kind, mode, chunk, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize(("kind", "mode", "chunk"), cases())
def test_parity(kind, mode, chunk, record_property):
    record_property("kind", kind.split()[0])
    record_property("mode", mode)
    overrides = {} if mode == "exact" else CACHED.get(kind, {})
    model = tiny(kind, tied=kind in TIED, **overrides)
    eager = {"experts_implementation": "eager"}  # the grouped one has no float64
    wide = tiny(kind, tied=kind in TIED, dtype=torch.float64, **eager, **overrides)
    check(model, wide, LongStrawConfig(prompt_grad=mode, prompt_chunk_size=chunk), record_property)


@pytest.mark.parametrize("kind", ARCHITECTURES | FURTHER)
def test_the_state_matters(kind):
    """The same tokens in another order are another prompt."""
    model = attach(tiny(kind))
    groups = ragged(shapes=((23, (5, 3)),))
    turned = [PromptGroup(torch.cat([g.prompt_ids[:-1].flip(0), g.prompt_ids[-1:]]), g.response_ids) for g in groups]
    with torch.no_grad():
        a, b = (torch.cat(model(prompt_groups=g).logps) for g in (groups, turned))
    assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("name", AROUND)
def test_a_text_model_inside_of_another(name, record_property):
    """As released checkpoints are, with text prompts, in which ids of images may stand."""
    model, wide = inside_of_another(name, pad_token_id=0), inside_of_another(name, pad_token_id=0).double()
    wide.config.get_text_config()._experts_implementation = "eager"  # the grouped one has no float64
    for n, p in model.named_parameters():
        p.requires_grad_("language_model" in n or "lm_head" in n)
    check(model, wide, LongStrawConfig(prompt_chunk_size=7), record_property)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_index_scores_in_blocks(kind, monkeypatch):
    """The scores that are alive at once are bounded, and the choice is that of all of them together."""
    largest = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.relu.default:
                largest.append(out.numel())
            return out

    model, groups = tiny(kind), ragged()
    stock = run(model, stock_rows(model, groups, 0.7))
    monkeypatch.setattr(indexer, "SCORES", 32 * 100)
    attach(model, LongStrawConfig(prompt_chunk_size=16))
    with Largest():
        out = model(prompt_groups=groups, temperature=0.7)
    found = errors(run(model, (out.logps, out.entropies)), stock)
    assert max(largest) <= 32 * 100
    assert all(error <= bar for error, bar in zip(found, (1e-5, 1e-5, 3e-4), strict=True))
