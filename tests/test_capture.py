"""Captures: a call that takes its prompts from an earlier one is the same to the bit, and does not run them."""

import copy
import dataclasses

import pytest
import torch

from longstraw_dist import LongStrawConfig, PromptGroup, attach
from longstraw_dist.attach import attachment_of

from .architectures import ARCHITECTURES, TIED
from .models import MODELS, adapted, ragged, tiny, weigh
from .more_architectures import FURTHER
from .reference import gradients

FAST = ("llama", "gemma2", "qwen3_5_text", "glm_moe_dsa", "zamba2")


def step(model, groups):
    model.zero_grad()
    out = model(prompt_groups=groups, temperature=0.7)
    weigh(out.logps, out.entropies).backward()
    return out.scores.detach(), {n: g for n, g in gradients(model).items() if g is not None}


def captured(model, groups, among=lambda i: True):
    """The groups, some of them with the capture of their prompt, made without responses."""
    with torch.no_grad():
        out = model(prompt_groups=[PromptGroup(g.prompt_ids, []) for g in groups], capture=True)
    assert out.logps == []
    return [
        dataclasses.replace(g, capture=c if among(i) else None)
        for i, (g, c) in enumerate(zip(groups, out.captures, strict=True))
    ]


def same(found, expected) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, g in expected[1].items():
        assert torch.equal(found[1][name], g), name


def cases():
    for kind in MODELS | ARCHITECTURES | FURTHER:
        for mode in ("exact", "detached", "last:2"):
            slow = kind not in FAST or (mode == "last:2" and kind != "glm_moe_dsa")
            yield pytest.param(kind, mode, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("kind", "mode"), cases())
def test_same_to_the_bit(kind, mode):
    model, groups = tiny(kind, kind in TIED), ragged()
    attach(model, LongStrawConfig(prompt_grad=mode, prompt_chunk_size=7, head_chunk_size=4))
    expected, meter = step(model, groups), attachment_of(model).meter
    ran = meter.prompt_tokens_captured
    given = captured(model, groups)
    for few in (given, given[:1], [groups[0], given[1], *groups[2:]], [given[0], *groups[1:]]):
        same(step(model, few), expected if len(few) > 1 else step(model, groups[:1]))
    meter.reset()
    step(model, given)
    assert (meter.prompt_tokens_captured, meter.prompt_tokens_reused) == (0, ran)
    with torch.no_grad():
        assert torch.equal(model(prompt_groups=given, temperature=0.7).scores, expected[0])


def test_a_recording_call_captures_too():
    model, groups = attach(tiny("qwen3_5_text"), LongStrawConfig(prompt_chunk_size=7)), ragged()
    expected = step(model, groups)
    out = model(prompt_groups=groups, temperature=0.7, capture=True)
    weigh(out.logps, out.entropies).backward()
    model.zero_grad()
    given = [dataclasses.replace(g, capture=c) for g, c in zip(groups, out.captures, strict=True)]
    same(step(model, given), expected)
    assert model(prompt_groups=given[:1], capture=True).captures == [given[0].capture]


@pytest.mark.parametrize("settings", [{"offload": "all"}, {"activation_budget": 2**30}], ids=["offload", "budget"])
def test_beside_other_knobs(settings):
    model, groups = attach(tiny("gemma2"), LongStrawConfig(prompt_chunk_size=7, **settings)), ragged()
    expected = step(model, groups)
    same(step(model, captured(model, groups)), expected)


def test_what_it_keeps():
    """[P-1, hidden] of every layer but the first, and keys and values; detached, keys and values alone."""
    groups, sizes = ragged(shapes=[(23, (5,))]), {}
    for mode in ("exact", "last:2", "detached"):
        model = attach(tiny("llama"), LongStrawConfig(prompt_grad=mode))
        sizes[mode] = captured(model, groups)[0].capture.nbytes
    config = model.config
    row = 22 * 4 * config.hidden_size
    state = config.num_hidden_layers * 22 * 4 * 2 * config.num_key_value_heads * config.head_dim
    assert sizes == {
        "exact": state + (config.num_hidden_layers - 1) * row,
        "last:2": state + 2 * row,
        "detached": state,
    }


def test_bfloat16_under_autocast():
    model, groups = attach(tiny("llama"), LongStrawConfig(prompt_chunk_size=7)), ragged()
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, groups)
        given = captured(model, groups)
        same(step(model, given), expected)
    with pytest.raises(ValueError, match="other autocast"):
        model(prompt_groups=given)


def refused(match: str, model, groups, **kwargs) -> None:
    with pytest.raises(ValueError, match=match):
        model(prompt_groups=groups, **kwargs)


def test_changed_parameters_are_refused_where_the_gradient_is_exact():
    for mode in ("exact", "last:1", "detached"):
        model, groups = attach(tiny("llama"), LongStrawConfig(prompt_grad=mode)), ragged()
        given = captured(model, groups)
        before = step(model, given)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        if mode == "detached":  # the state is that of before, the rest is of now
            after, fresh = step(model, given), step(model, groups)
            assert not torch.equal(after[0], before[0])
            assert not torch.equal(after[0], fresh[0])
        else:
            refused("other parameters", model, given)


def test_refusals():
    model, groups = attach(tiny("llama")), ragged()
    given = captured(model, groups)
    refused("of another prompt", model, [dataclasses.replace(groups[0], capture=given[2].capture)])
    refused("of another model", copy.deepcopy(model), given)
    refused("is a int", model, [dataclasses.replace(groups[0], capture=3)])
    with pytest.raises(ValueError, match="without prompt_groups"):
        model(input_ids=groups[0].prompt_ids[None], capture=True)
    experts = attach(tiny("mixtral"))
    refused("router logits", experts, captured(experts, groups), output_router_logits=True)


def test_adapters():
    model, groups = adapted(tiny("llama")), ragged()
    attach(model)
    expected, given = step(model, groups), captured(model, groups)
    same(step(model, given), expected)
    with model.disable_adapter(), torch.no_grad():
        refused("other adapters", model, given)
