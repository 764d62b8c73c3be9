"""Precision, order and the corners of one call: what a number depends on, and what it must not."""

import gc
import statistics

import pytest
import torch

from longstraw_dist import LongStrawConfig, PromptGroup, attach, attention
from longstraw_dist.attach import attachment_of

from .models import MODELS, ragged, tiny, weigh
from .reference import gradients, relative, stock_rows, worst
from .test_parity import check


@pytest.mark.parametrize("mode", ["exact", "detached", "last:1"])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gemma2"])  # its stock softmax is float32
def test_float64(kind, mode):
    """In float64 nothing is left but rounding: the operation is the same function as the stock rows. (Norms and rotary
    embeddings compute in float32 in the stock model too.)"""
    eager = {"experts_implementation": "eager"} if kind in ("qwen3_moe", "mixtral") else {}  # grouped has no float64
    model = tiny(kind, dtype=torch.float64, **eager)
    check(model, ragged(), LongStrawConfig(prompt_grad=mode, prompt_chunk_size=5), bar=2e-6)


@pytest.mark.parametrize("window", [1, 2, 5, 24, 500])
def test_windows(window):
    """The token itself, shorter than prompt and chunk, about the prompt, longer than every row. In float64: with a
    window of 1 the gradient of q and k is zero, and in float32 it would be compared with noise."""
    model = tiny("mistral", sliding_window=window, dtype=torch.float64)
    check(model, ragged(), LongStrawConfig(prompt_chunk_size=9), bar=2e-6)


def test_qwen3_with_windows_in_some_layers():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    check(tiny("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=6), ragged(), LongStrawConfig())


@pytest.mark.parametrize("config", [{"responses_per_replay": 1}, {"responses_per_replay": 2}, {"head_chunk_size": 1}])
def test_replay_and_head_chunks(config):
    check(tiny("llama"), ragged(), LongStrawConfig(prompt_chunk_size=8, **config))


@pytest.mark.parametrize("offload", ["hidden", "state", "all"])
@pytest.mark.parametrize("kind", ["qwen3", "olmo_hybrid", "glm_moe_dsa"])
def test_offload(kind, offload):
    """What comes back from the host is what left."""
    scores = []
    for setting in (None, offload):
        model = attach(tiny(kind), LongStrawConfig(prompt_chunk_size=8, offload=setting))
        out = model(prompt_groups=ragged())
        weigh(out.logps, out.entropies).backward()
        scores.append({"scores": out.scores.detach(), **gradients(model)})
    assert all(torch.equal(t, scores[1][n]) for n, t in scores[0].items() if t is not None)


def test_plain_kernels(monkeypatch):
    monkeypatch.setattr(attention, "FORCE", attention.Plain)
    check(tiny("llama"), ragged(), LongStrawConfig(prompt_chunk_size=8))


def test_eager_model_is_the_same_function():
    model = tiny("llama")
    model.set_attn_implementation("eager")
    check(model, ragged(), LongStrawConfig())
    assert model.config._attn_implementation == "eager"


def test_a_run_repeats_bit_for_bit():
    runs = []
    for _ in range(2):
        model = attach(tiny("llama"), LongStrawConfig(prompt_chunk_size=8))
        out = model(prompt_groups=ragged())
        weigh(out.logps, out.entropies).backward()
        runs.append(gradients(model))
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


def test_scoring_equals_the_graph_carrying_call():
    model = attach(tiny("qwen3"))
    out = model(prompt_groups=ragged(), temperature=0.7)
    with torch.no_grad():
        scored = model(prompt_groups=ragged(), temperature=0.7)
    for a, b in zip([*out.logps, *out.entropies], [*scored.logps, *scored.entropies], strict=True):
        assert torch.equal(a, b)
        assert a.dtype == torch.float32
        assert not b.requires_grad


def test_outputs_are_tensors_of_their_own():
    out = attach(tiny("llama"))(prompt_groups=ragged())
    tensors = [*out.logps, *out.entropies, out.anchor]
    assert len({t.untyped_storage()._cdata for t in tensors}) == len(tensors)
    assert all(t._base is None and t.requires_grad for t in tensors)


def test_no_groups_and_no_responses():
    model = attach(tiny("llama"))
    for groups in (
        [],
        [PromptGroup(torch.tensor([1, 2]), [])],
        [PromptGroup(torch.tensor([1]), [torch.tensor([]).long()])],
    ):
        out = model(prompt_groups=groups)
        (out.anchor + weigh(out.logps, out.entropies)).backward()
        assert all(g is not None and not g.any() for g in gradients(model).values())


def test_only_entropies_or_only_one_response_in_the_loss():
    for pick in (lambda lp, en: en[0].sum(), lambda lp, en: lp[3].sum()):
        model = tiny("llama")
        pick(*stock_rows(model, ragged())).backward()
        reference = gradients(model)
        model.zero_grad()
        out = attach(model)(prompt_groups=ragged())
        pick(out.logps, out.entropies).backward()
        assert relative(gradients(model), reference) <= 1e-5


def test_accumulation_clipping_and_adamw():
    """Three optimizer steps of two micro-batches: the same updates as stock rows."""
    updates = []
    for ours in (False, True):
        model = tiny("llama")
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        if ours:
            attach(model, LongStrawConfig(prompt_chunk_size=8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            for micro in range(2):
                groups = ragged(seed=10 * step + micro)
                if ours:
                    out = model(prompt_groups=groups)
                    loss = weigh(out.logps, out.entropies, seed=micro)
                else:
                    loss = weigh(*stock_rows(model, groups), seed=micro)
                (loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        updates.append({n: p.detach() - start[n] for n, p in model.named_parameters()})
    stock, ours = updates
    assert relative(ours, stock) <= 1e-4
    assert worst(ours, stock)[0] <= 1e-3


def test_frozen_parameters():
    """Frozen ones get no gradient, the others the stock one; also when the embedding is among the frozen."""
    embedding, layers = "model.embed_tokens", [f"model.layers.{i}." for i in range(3)]
    for frozen in (
        [embedding],
        [layers[0], layers[2] + "mlp"],
        ["lm_head", "model.norm"],
        [embedding, *layers[:2]],
        [embedding, *layers],
        [embedding, *layers, "model.norm"],
    ):
        model = tiny("llama")
        for n, p in model.named_parameters():
            p.requires_grad_(not any(n.startswith(f) for f in frozen))
        weigh(*stock_rows(model, ragged())).backward()
        reference = gradients(model)
        model.zero_grad()
        out = attach(model)(prompt_groups=ragged())
        weigh(out.logps, out.entropies).backward()
        ours = gradients(model)
        assert [n for n, g in ours.items() if g is None] == [n for n, g in reference.items() if g is None]
        trained = [n for n, g in reference.items() if g is not None]
        assert relative({n: ours[n] for n in trained}, {n: reference[n] for n in trained}) <= 1e-5


@pytest.mark.parametrize(("trained", "expected"), [(["layers.1.", "layers.2."], [0, 1, 1]), (["lm_head"], [0, 0, 0])])
def test_no_work_below_the_first_trained_layer(trained, expected):
    """Counted: a frozen layer below it is not run again, and nothing is kept for it."""
    model = tiny("llama")
    for n, p in model.named_parameters():
        p.requires_grad_(any(part in n for part in trained))
    attach(model)
    runs = [0] * 3
    for i, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
    out = model(prompt_groups=ragged(shapes=((9, (2, 3)),)))
    forward = list(runs)
    kept = attachment_of(model).meter.kept_bytes
    weigh(out.logps, out.entropies).backward()
    again = [after - before for before, after in zip(forward, runs, strict=True)]
    assert [bool(n) for n in again] == [bool(n) for n in expected]
    token = 32 * 4
    layers = sum(expected)
    assert kept["hidden"] == (layers * (8 + 5) + 2 * 5 - (5 if layers == 0 else 0)) * token
    assert kept.get("state", 0) == layers * 8 * 2 * 2 * 8 * 4
    gc.collect()
    assert attachment_of(model).progress.ended
    model.zero_grad()
    weigh(*(lambda o: (o.logps, o.entropies))(model(prompt_groups=ragged()))).backward()  # and the next call runs


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_parameters_shared_between_layers(kind):
    model = tiny(kind)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    model.model.layers[1].self_attn.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight
    check(model, ragged(), LongStrawConfig(prompt_chunk_size=8))


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_that_no_token_reaches(kind, experts):
    many = {"num_experts": 24} if kind == "qwen3_moe" else {"num_local_experts": 24}
    model = tiny(kind, experts_implementation=experts, **many)
    check(model, ragged(shapes=((3, (1, 2)), (1, (1,)))), LongStrawConfig(prompt_chunk_size=8))
    gradient = model.model.layers[1].mlp.experts.down_proj.grad
    idle = [not g.any() for g in gradient]
    assert any(idle)
    assert not all(idle)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_padding_idx_row_gets_no_gradient_as_in_stock(kind):
    model = tiny(kind, pad_token_id=5)
    groups = [PromptGroup(torch.tensor([5, 1, 5, 2, 3]), [torch.tensor([5, 4]), torch.tensor([6])])]
    check(model, groups, LongStrawConfig(prompt_chunk_size=2))
    assert not model.model.embed_tokens.weight.grad[5].any()


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside):
    """bf16 autocast, with backward outside and inside of the context: autocast's weight cache must not lose a
    gradient. Error against float32 at most 1.1 times that of stock rows under autocast, median of five seeds."""
    ratios = []
    for seed in range(5):
        model = tiny("qwen3", seed=seed)
        weigh(*stock_rows(model, ragged(seed))).backward()
        reference = gradients(model)
        errors = []
        for ours in (False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                if ours:
                    out = attach(model, LongStrawConfig(prompt_chunk_size=8))(prompt_groups=ragged(seed))
                    loss = weigh(out.logps, out.entropies)
                else:
                    loss = weigh(*stock_rows(model, ragged(seed)))
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            errors.append(relative(gradients(model), reference))
        ratios.append(errors[1] / errors[0])
    print("autocast: ours over stock", ratios)
    assert statistics.median(ratios) <= 1.1


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_bfloat16(kind):
    """Parameters in bf16, sums in float32: error against float32 at most 1.1 times stock's, median of five seeds."""
    ratios = []
    for seed in range(5):
        exact, model = tiny(kind, seed=seed), tiny(kind, seed=seed, dtype=torch.bfloat16)
        with torch.no_grad():
            for p, q in zip(exact.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        weigh(*stock_rows(exact, ragged(seed))).backward()
        reference = gradients(exact)
        weigh(*stock_rows(model, ragged(seed))).backward()
        stock = relative(gradients(model), reference)
        model.zero_grad()
        out = attach(model, LongStrawConfig(prompt_chunk_size=8))(prompt_groups=ragged(seed))
        assert all(t.dtype == torch.float32 for t in (*out.logps, *out.entropies))
        weigh(out.logps, out.entropies).backward()
        ratios.append(relative(gradients(model), reference) / stock)
    print("bf16: ours over stock", ratios)
    assert statistics.median(ratios) <= 1.1


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_outputs_first_looked_at_by_a_metric_stay_differentiable(context):
    model = tiny("llama")
    weigh(*stock_rows(model, ragged())).backward()
    reference = gradients(model)
    model.zero_grad()
    out = attach(model)(prompt_groups=ragged())
    with context():
        assert torch.isfinite(sum(t.sum() for t in (*out.logps, *out.entropies, out.anchor)))
    (weigh(out.logps, out.entropies) + out.anchor).backward()
    assert relative(gradients(model), reference) <= 1e-5


def test_hooks_on_parameters_see_the_whole_gradient_once():
    grads = []
    for ours in (False, True):
        model, calls = tiny("llama"), []
        for p in model.parameters():
            p.register_hook(lambda g, calls=calls: calls.append(1) or 2 * g.clamp(-0.1, 0.1))
        if ours:
            out = attach(model, LongStrawConfig(prompt_chunk_size=8))(prompt_groups=ragged())
            weigh(out.logps, out.entropies).backward()
        else:
            weigh(*stock_rows(model, ragged())).backward()
        assert len(calls) == len(list(model.parameters()))
        grads.append(gradients(model))
    assert relative(grads[1], grads[0]) <= 1e-5


def test_a_window_that_the_model_does_not_use():
    check(tiny("llama", sliding_window=6), ragged(), LongStrawConfig(prompt_chunk_size=8))
