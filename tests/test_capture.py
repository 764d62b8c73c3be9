"""Captures: a call that takes its prompts from an earlier one is the same to the bit, and does not run them."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch.nn.functional import pad

from longstraw_dist import LongStrawConfig, PromptGroup, attach, rollout
from longstraw_dist.attach import attachment_of

from .architectures import ARCHITECTURES, TIED
from .models import EXPERTS, MODELS, adapted, ragged, tiny, weigh
from .more_architectures import FURTHER
from .reference import gradients

FAST = ("llama", "gemma2", "qwen3_5_text", "glm_moe_dsa", "zamba2")


CANNOT = ("mamba", "mamba2", "falcon_mamba", "minimax", "recurrent_gemma")  # generate from captures


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


def fused(model):
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def by_data(model):
    model.model.layers[0].self_attn.q_proj.weight.data.mul_(1.01)


def assigned(model):
    model.load_state_dict({n: 1.01 * p for n, p in model.state_dict().items()}, assign=True)


def embedding(model):
    with torch.no_grad():
        model.get_input_embeddings().weight[3] += 0.1


def rotary(model):
    model.model.rotary_emb.inv_freq *= 0.9


def config(model):
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 3.0}


@pytest.mark.parametrize("change", [fused, by_data, assigned, embedding, rotary, config])
def test_no_change_goes_unnoticed(change):
    """What autograd does not count, either."""
    model, groups = attach(tiny("llama")), ragged()
    given = captured(model, groups)
    step(model, given)
    change(model)
    refused("other config" if change is config else "other parameters", model, given)


def test_its_prompt_is_its_own():
    model, groups = attach(tiny("llama")), ragged()
    given = captured(model, groups)
    groups[0].prompt_ids[3] += 1
    refused("of another prompt", model, given)
    assert given[0].capture.prompt_ids.untyped_storage().nbytes() == 8 * len(groups[0].prompt_ids)


@pytest.mark.parametrize("kind", ["llama", "glm_moe_dsa"])
def test_it_keeps_what_it_says_and_nothing_else(kind):
    model, groups = attach(tiny(kind), LongStrawConfig(prompt_chunk_size=7)), ragged(shapes=[(23, (5,))])
    (group,) = captured(model, groups)
    tensors = [t for layer in group.capture.layers for t in (layer.hidden, *layer.kept) if t is not None]
    tensors += [t for layer in group.capture.layers for relay in layer.relays for t in relay.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(storages.values()) == group.capture.nbytes
    parameters = [weakref.ref(p) for p in model.parameters()]
    del model, tensors
    gc.collect()
    assert all(p() is None for p in parameters)


def test_filled_cache_refuses():
    model, groups = attach(tiny("llama")), ragged()
    captures = [g.capture for g in captured(model, groups)]
    with pytest.raises(ValueError, match="more than width=7"):
        rollout.filled_cache(model, captures, [0], 7)
    with pytest.raises(ValueError, match="of another model"):
        rollout.filled_cache(copy.deepcopy(model), captures, [0], 40)
    by_data(model)
    with pytest.raises(ValueError, match="other parameters"):
        rollout.filled_cache(model, captures, [0], 40)


def generated(model, groups, **kwargs):
    """Greedy tokens of a ragged batch, by the stock model and from captures."""
    prompts = [g.prompt_ids for g in groups]
    rows, width = [0, 0, 1, 2, 2, 3], 2 + max(map(len, prompts))
    ids = torch.stack([pad(prompts[row], (width - len(prompts[row]), 0)) for row in rows])
    mask = torch.stack([pad(torch.ones_like(prompts[row]), (width - len(prompts[row]), 0)) for row in rows])
    settings = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    settings["repetition_penalty"] = 2.0  # some types would say one thing
    stock = model.generate(ids, attention_mask=mask, **settings)
    captures = [g.capture for g in captured(model, groups)]
    cache = rollout.filled_cache(model, captures, rows, width)
    return stock, model.generate(ids, attention_mask=mask, cache=cache, **settings)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in FAST else [pytest.mark.slow]) for k in MODELS | ARCHITECTURES | FURTHER]
)
def test_generation_goes_on_from_them(kind):
    model = attach(tiny(kind, kind in TIED).eval(), LongStrawConfig(prompt_chunk_size=5))
    if kind in CANNOT:
        assert rollout.find_fault(model) is not None
        return
    assert rollout.find_fault(model) is None
    stock, ours = generated(model, ragged())
    assert torch.equal(stock, ours)
    assert len(ours[:, -12:].unique()) > 3, "the model says one thing"


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
    with torch.inference_mode():
        refused("inference mode", model, groups, capture=True)


def test_adapters():
    model, groups = adapted(tiny("llama")), ragged()
    attach(model)
    expected, given = step(model, groups), captured(model, groups)
    same(step(model, given), expected)
    with model.disable_adapter(), torch.no_grad():
        refused("other adapters", model, given)


def test_adapted_experts():
    """PEFT registers them anew in each forward: after the first they have another place among the parameters."""
    model, groups = attach(adapted(tiny("qwen3_moe"), **EXPERTS)), ragged()
    given = captured(model, groups)
    same(step(model, given), step(model, groups))
