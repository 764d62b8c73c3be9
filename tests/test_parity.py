"""Every type against its stock model, response by response: log-probs, entropies and every parameter's gradient."""

import copy
import functools
import itertools
import sys
from unittest import mock

import pytest
import torch

from longstraw_dist import LongStrawConfig, attach
from longstraw_dist.config import exact_layers

from .architectures import ARCHITECTURES, CACHED, TIED
from .models import MODELS, ragged, tiny, weigh
from .more_architectures import FURTHER
from .reference import gradients, relative, stock_rows, worst

DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
IDLE = ("indexer",)  # without a gradient, stock's too


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


def check(model, groups, config, bar: float = 1e-5, parameter_bar: float | None = None, record=None) -> None:
    """Against the stock rows, within `bar`, of one parameter's gradient within ten times that. Where this fails,
    against the rows in float64 too, and within twice the noise of the stock model."""
    layers = model.config.get_text_config().num_hidden_layers
    detached = layers - exact_layers(config.prompt_grad, layers)
    rows = functools.partial(stock_rows, groups=groups, temperature=0.7, detached=detached)
    wide, stock = copy.deepcopy(model).double(), run(model, rows(model))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert stock[1].keys() == {n for n in trained if not any(part in n for part in IDLE)}
    attach(model, config)
    out = model(prompt_groups=groups, temperature=0.7)
    assert [len(t) for t in out.logps] == [len(r) for group in groups for r in group.response_ids]
    ours = run(model, (out.logps, out.entropies))
    found, bars = errors(ours, stock), [bar, bar, parameter_bar or 10 * bar]
    if any(map(float.__gt__, found, bars)):
        wide.config.get_text_config()._experts_implementation = "eager"  # the grouped one has no float64
        right = run(wide, rows(wide))
        noise = [errors(stock, right)]
        for other_way in other_ways(model, min(max(config.prompt_chunk_size, 2), 8), 32):
            with other_way:
                noise.append(errors(run(model, rows(model)), stock))
        own = [max(each) for each in zip(*noise, strict=True)]
        found = tuple(map(min, found, errors(ours, right)))
        bars = [max(each, 2 * noisy) for each, noisy in zip(bars, own, strict=True)]
        print(f"noise of the stock model: {own}")
    print(f"log-prob, gradient, parameter: {found}")
    for name, error, limit in zip(("log_prob", "gradient", "parameter"), found, bars, strict=True):
        if record is not None:
            record(name, error)
        assert error <= limit, name


def cases():
    """The further types are fast in one of their nine cases, those of the mission in five, dense ones in most."""
    modes, chunks = ["exact", "detached", "last:2"], [1, 7, 1024]
    for kind, mode, tied, chunk in itertools.product(MODELS, modes, [False, True], chunks):
        slow = chunk != 7 and (tied or mode != "exact")
        yield pytest.param(kind, mode, tied, chunk, marks=[pytest.mark.slow] if slow else [])
    for kind, mode, chunk in itertools.product(ARCHITECTURES | FURTHER, modes, chunks):
        fast = (mode == "exact") + (chunk == 7) + (kind in ARCHITECTURES) >= 2
        yield pytest.param(kind, mode, kind in TIED, chunk, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize(("kind", "mode", "tied", "chunk"), cases())
def test_parity(kind, mode, tied, chunk, record_property):
    record_property("kind", kind.split()[0])
    record_property("mode", mode)
    model = tiny(kind, tied, **({} if mode == "exact" else CACHED.get(kind, {})))
    config = LongStrawConfig(prompt_grad=mode, prompt_chunk_size=chunk, head_chunk_size=4)
    check(model, ragged(), config, parameter_bar=1e-4 if kind in MODELS else 3e-4, record=record_property)
