"""Graphs that are kept instead of recomputed: the same bits, fewer forwards, never more bytes than allowed."""

import weakref

import pytest
import torch

from benchmarks.live import LiveStorages
from longstraw_dist import LongStrawConfig, attach
from longstraw_dist.attach import attachment_of

from .architectures import TIED
from .models import ragged, tiny, weigh
from .reference import gradients
from .test_memory import inputs, no_collector

ALL = 10**9
NUMBERS = 6376  # bytes of rotary embeddings, ids, positions and scores in test_bytes, with and without graphs
KINDS = [
    *("llama", "glm_moe_dsa", "olmo_hybrid", "zamba2"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mistral", "gpt_oss", "jamba", "minimax", "falcon_h1")),
]


def step(kind: str, budget: int, routed: bool = False, **config):
    """Outputs, gradients, and what was kept."""
    config = {"prompt_chunk_size": 7, "responses_per_replay": 2, **config}
    model = attach(tiny(kind, tied=kind in TIED), LongStrawConfig(activation_budget=budget, **config))
    out = model(prompt_groups=ragged(), output_router_logits=routed)
    loss = weigh(out.logps, out.entropies)
    (loss + out.aux_loss if routed else loss).backward()
    found = {n: g for n, g in gradients(model).items() if g is not None}
    return {"scores": out.scores.detach(), **found}, attachment_of(model).meter.kept_bytes.get("graphs", 0)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


@pytest.mark.parametrize("mode", ["exact", "detached", "last:2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind, mode):
    plain, none = step(kind, 0, prompt_grad=mode)
    whole, kept = step(kind, ALL, prompt_grad=mode)
    some, part = step(kind, kept // 2, prompt_grad=mode)
    assert none == 0 < part <= kept // 2
    assert same(whole, plain)
    assert same(some, plain)


def test_beside_the_auxiliary_loss():
    plain, _ = step("qwen3_moe", 0, routed=True)
    kept, _ = step("qwen3_moe", ALL, routed=True)
    assert same(kept, plain)


def test_beside_offload_it_is_refused():
    with pytest.raises(ValueError, match="offload='all' beside activation_budget=1: a kept graph holds"):
        LongStrawConfig(offload="all", activation_budget=1)


@pytest.mark.parametrize("mode", ["exact", "detached", "last:2"])
def test_backward_runs_what_was_not_kept(mode):
    whole, runs = step("llama", ALL, prompt_grad=mode, responses_per_replay=None)[1], []
    for budget in (0, whole // 3, whole // 3 * 2, ALL):
        model = attach(tiny("llama"), LongStrawConfig(mode, prompt_chunk_size=7, activation_budget=budget))
        calls = []
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        out = model(prompt_groups=ragged())
        forward = len(calls)
        weigh(out.logps, out.entropies).backward()
        runs.append(len(calls) - forward)
    assert runs[0] > runs[1] > runs[2] > runs[3] == 0


@pytest.mark.parametrize("mode", ["exact", "detached"])
@pytest.mark.parametrize("offload", [None, "all"])
def test_the_first_backward_of_the_last_layer_runs_no_forward(mode, offload):
    """Of five segments a layer, in the last one the first replay's is kept without a budget: unless all is to lie in
    host memory."""
    model = attach(tiny("llama"), LongStrawConfig(mode, prompt_chunk_size=8, responses_per_replay=1, offload=offload))
    segments = 5 if mode == "exact" else 2
    calls = {i: 0 for i in range(len(model.model.layers))}
    out = model(prompt_groups=ragged(shapes=((23, (4, 5)),)))
    for i, layer in enumerate(model.model.layers):

        def count(*_, i=i):
            calls[i] += 1

        layer.input_layernorm.register_forward_hook(count)
    weigh(out.logps, out.entropies).backward()
    assert list(calls.values()) == [segments, segments, segments - (offload is None)]


@pytest.mark.parametrize("budget", [0, 60_000, 150_000, ALL])
def test_bytes(budget):
    """Between forward and backward the graphs are all that is added, and they are counted to the byte."""
    model, groups = tiny("llama"), ragged(shapes=((23, (12, 12)), (12, (7,))))
    attach(model, LongStrawConfig(prompt_chunk_size=8, activation_budget=budget))
    with no_collector(), LiveStorages(ignored=inputs(model, groups)) as live:
        out = model(prompt_groups=groups)
        kept = attachment_of(model).meter.kept_bytes
        rest = live.live["device"] - sum(kept.values())
        assert kept.get("graphs", 0) <= budget
        assert rest == NUMBERS
        loss = weigh(out.logps, out.entropies)
        loss.backward()
        left = live.live["device"] - sum(p.grad.nbytes for p in model.parameters())
        assert left <= NUMBERS
        del out, loss


@pytest.mark.parametrize("config", [{}, {"activation_budget": ALL}, {"offload": "all"}], ids=str)
@pytest.mark.parametrize("mode", ["exact", "detached", "last:2"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "glm_moe_dsa", "qwen3_5_text"])
def test_two_backwards_of_one_graph(kind, mode, config):
    model = attach(tiny(kind), LongStrawConfig(mode, prompt_chunk_size=7, **config))
    out = model(prompt_groups=ragged())
    loss, found = weigh(out.logps, out.entropies), []
    for again in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=again)
        found.append({n: g for n, g in gradients(model).items() if g is not None})
    assert same(*found)


def test_weights_are_not_kept_alive():
    """An engine frees what it gathered for the forward, and gathers anew."""
    plain, _ = step("llama", 0)
    model = attach(tiny("llama"), LongStrawConfig(prompt_chunk_size=7, responses_per_replay=2, activation_budget=ALL))
    out = model(prompt_groups=ragged())
    before = [weakref.ref(p.untyped_storage()) for layer in model.model.layers for p in layer.parameters()]
    for p in model.parameters():
        p.data = p.data.clone()
    assert not any(storage() is not None for storage in before)
    weigh(out.logps, out.entropies).backward()
    assert same({"scores": out.scores.detach(), **gradients(model)}, plain)


@pytest.mark.parametrize("value", [-1, 1.5, "all", True])
def test_bad_values(value):
    with pytest.raises(ValueError, match="activation_budget"):
        LongStrawConfig(activation_budget=value)


@pytest.mark.parametrize("budget", [0, ALL])
def test_an_activation_changed_in_place_is_refused_as_by_autograd(budget):
    model = attach(tiny("llama"), LongStrawConfig(activation_budget=budget))
    model.model.layers[-1].mlp.act_fn = torch.nn.Sigmoid()  # saves its output
    model.model.layers[-1].mlp.act_fn.register_forward_hook(lambda module, args, output: output.mul_(2))
    out = model(prompt_groups=ragged(shapes=((9, (3, 4)),)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weigh(out.logps, out.entropies).backward()


@pytest.mark.parametrize("budget", [0, ALL])
def test_a_weight_laid_out_anew_is_refused(budget):
    model = attach(tiny("llama"), LongStrawConfig(activation_budget=budget))
    out = model(prompt_groups=ragged(shapes=((9, (3, 4)),)))
    weight = model.model.layers[-1].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    with pytest.raises(RuntimeError, match="changed its strides between forward and backward"):
        weigh(out.logps, out.entropies).backward()


def test_a_layer_frozen_before_backward_is_refused():
    model = attach(tiny("llama"))
    out = model(prompt_groups=ragged())
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"requires_grad of mlp\.up_proj\.weight of layer 0 changed"):
        weigh(out.logps, out.entropies).backward()


def test_under_autocast_no_cast_weights_are_kept():
    model = attach(tiny("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(prompt_groups=ragged())
    assert "last_layer" not in attachment_of(model).meter.kept_bytes


def test_bytes_of_windows():
    """A segment's past is a copy there, which the graph alone holds."""
    model, groups = tiny("mistral"), ragged(shapes=((23, (5, 5)),))
    attach(model, LongStrawConfig(prompt_chunk_size=8, activation_budget=ALL))
    with no_collector(), LiveStorages(ignored=inputs(model, groups)) as live:
        out = model(prompt_groups=groups)
        kept = sum(attachment_of(model).meter.kept_bytes.values())
        assert 0 <= live.live["device"] - kept <= NUMBERS
        del out
