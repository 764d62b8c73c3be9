"""Every architecture against its stock model, response by response: log-probs, entropies, every gradient."""

import contextlib
import functools
import sys
from unittest import mock

import pytest
import torch
import transformers

from longstraw_dist import LongStrawConfig, PromptGroup, attach

from .architectures import ARCHITECTURES
from .models import MODELS, moderate, ragged, spread, tiny, weigh
from .more_architectures import FURTHER
from .reference import gradients, relative, stock_rows, worst

DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
TIED = ("zamba2",)  # whose blocks are shared by tying them


def delta_rule_in_chunks(model, size: int):
    """The stock delta rule cut elsewhere: what it differs by then is its own noise."""
    module = sys.modules[type(model.get_decoder()).__module__]
    names = [name for name in DELTA_RULES if name in vars(module)]
    if not names:
        return contextlib.nullcontext()
    (name,) = names
    return mock.patch.object(module, name, functools.partial(vars(module)[name], chunk_size=size))


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


CASES = [(kind, chunk) for kind in ARCHITECTURES for chunk in (1, 7, 1024)] + [
    pytest.param(kind, chunk, marks=() if chunk == 7 else pytest.mark.slow)
    for kind in FURTHER
    for chunk in (1, 7, 1024)
]


@pytest.mark.parametrize(("kind", "chunk"), CASES)
def test_exact(kind, chunk, record_property):
    model, groups = tiny(kind, tied=kind in TIED), ragged()
    stock = run(model, stock_rows(model, groups, 0.7))
    with delta_rule_in_chunks(model, min(max(chunk, 2), 8)):
        recut = errors(run(model, stock_rows(model, groups, 0.7)), stock)
    eager = {"experts_implementation": "eager"}  # the grouped one has no float64
    wide = tiny(kind, tied=kind in TIED, dtype=torch.float64, **eager)
    rounding = errors(stock, run(wide, stock_rows(wide, groups, 0.7)))
    noise = [max(pair) for pair in zip(recut, rounding, strict=True)]
    attach(model, LongStrawConfig(prompt_chunk_size=chunk))
    out = model(prompt_groups=groups, temperature=0.7)
    found = errors(run(model, (out.logps, out.entropies)), stock)
    record_property("errors", found)
    record_property("noise", noise)
    print(f"{kind} chunk {chunk}: log-prob, gradient, parameter {found}; noise of the stock model {noise}")
    for error, own, bar in zip(found, noise, (1e-5, 1e-5, 3e-4), strict=True):
        assert error <= max(bar, 2 * own)


@pytest.mark.parametrize("kind", ARCHITECTURES | FURTHER)
def test_the_state_matters(kind):
    """The same tokens in another order are another prompt."""
    model = attach(tiny(kind))
    groups = ragged(shapes=((23, (5, 3)),))
    turned = [PromptGroup(torch.cat([g.prompt_ids[:-1].flip(0), g.prompt_ids[-1:]]), g.response_ids) for g in groups]
    with torch.no_grad():
        a, b = (torch.cat(model(prompt_groups=g).logps) for g in (groups, turned))
    assert (a - b).abs().max() > 1e-2


INSIDE = {  # another model's settings beside its text model
    "qwen3_5": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32},
    "qwen3_5_moe": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32},
    "gemma3": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}


@pytest.mark.parametrize("kind", INSIDE)
def test_a_text_model_inside_of_another(kind, record_property):
    """As released checkpoints are, with text prompts."""
    name = (MODELS | ARCHITECTURES)[f"{kind}_text"][0]
    text = tiny(f"{kind}_text").config.to_dict()
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=INSIDE[kind])
    model, groups = getattr(transformers, f"{name}ForConditionalGeneration")(config).train(), ragged()
    spread(model, 0)
    moderate(model)
    stock = run(model, stock_rows(model, groups, 0.7))
    with delta_rule_in_chunks(model, 8):
        noise = errors(run(model, stock_rows(model, groups, 0.7)), stock)
    attach(model, LongStrawConfig(prompt_chunk_size=7))
    out = model(prompt_groups=groups, temperature=0.7)
    found = errors(run(model, (out.logps, out.entropies)), stock)
    record_property("errors", found)
    for error, own, bar in zip(found, noise, (1e-5, 1e-5, 3e-4), strict=True):
        assert error <= max(bar, 2 * own)
