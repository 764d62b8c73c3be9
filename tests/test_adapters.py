"""PEFT adapters: gradients against the stock PEFT model, response by response, and what is refused by name."""

import copy
import statistics

import peft
import pytest
import torch
from peft.tuners.lora.config import MontecloraConfig, VeloraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longstraw_dist import LongStrawConfig, attach
from longstraw_dist.attach import attachment_of

from .models import EXPERTS, adapted, drift, ragged, spread, tiny, weigh
from .reference import gradients, relative, stock_rows, worst

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "lora": ("qwen3", {"target_modules": ATTENTION}),
    "all-linear": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "dora": ("gemma2", {"target_modules": [*ATTENTION, "down_proj"], "use_dora": True}),
    "top layer": ("qwen3", {"target_modules": ATTENTION, "layers_to_transform": [2]}),
    "head and embedding saved": (
        "llama",
        {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "embedding and head adapted": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "bias": ("qwen2", {"target_modules": ATTENTION, "bias": "all"}),
    "delta rule": ("olmo_hybrid", {"target_modules": "all-linear"}),
    "state space": ("nemotron_h", {"target_modules": ["in_proj", "q_proj", "up_proj"]}),
    "selective scan": ("jamba", {"target_modules": ["in_proj", "q_proj", "gate_proj"]}),
    "state space beside attention": ("falcon_h1", {"target_modules": ["in_proj", "q_proj", "down_proj"]}),
    "convolution": ("lfm2", {"target_modules": ["in_proj", "out_proj", "w1"]}),
    "latents": ("deepseek_v3", {"target_modules": "all-linear"}),
    "chosen keys": ("glm_moe_dsa", {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}),
    "experts": ("qwen3_moe", EXPERTS),
}


def check(model, config=None, groups=None):
    """Ours against the stock rows of a copy, which has run before; only trainable parameters have a gradient."""
    config, groups = config or LongStrawConfig(prompt_chunk_size=8), groups or ragged()
    layers, stock = model.config.num_hidden_layers, copy.deepcopy(model)
    logps, entropies = stock_rows(stock, groups, detached={"exact": 0, "detached": layers}[config.prompt_grad])
    weigh(logps, entropies).backward()
    reference = {n: g for n, g in gradients(stock).items() if g is not None}
    assert attach(model, config) is model
    out = model(prompt_groups=groups)
    weigh(out.logps, out.entropies).backward()
    ours = {n: g for n, g in gradients(model).items() if g is not None}
    for a, b in zip([*out.logps, *out.entropies], [*logps, *entropies], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert ours.keys() == reference.keys()
    assert relative(ours, reference) <= 1e-5
    error, name = worst(ours, reference)
    assert error <= 1e-4, name
    return reference


@pytest.mark.parametrize("mode", ["exact", "detached"])
@pytest.mark.parametrize("case", ADAPTERS)
def test_lora(case, mode):
    kind, settings = ADAPTERS[case]
    reference = check(adapted(tiny(kind), **settings), LongStrawConfig(prompt_grad=mode, prompt_chunk_size=8))
    assert all(g.any() for n, g in reference.items()), "an adapter that takes no part"


@pytest.mark.parametrize("config", [peft.IA3Config, peft.VeraConfig])
def test_other_adapters(config):
    targets = {"target_modules": ["q_proj", "v_proj"]}
    if config is peft.IA3Config:
        targets = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    model = peft.get_peft_model(tiny("llama"), config(task_type="CAUSAL_LM", **targets))
    drift(model)
    check(model.train())


@pytest.mark.parametrize("budget", [0, 10**9])
@pytest.mark.parametrize(("kind", "trained"), [("qwen3_moe", ("down_proj", "gate_up_proj")), ("gpt_oss", ("_bias",))])
def test_adapted_experts_that_are_trained_themselves(kind, trained, budget):
    """PEFT registers them anew in each forward: their place among the parameters changes, and their graph's end."""
    model = adapted(tiny(kind), **EXPERTS)
    for name, p in model.named_parameters():
        if "experts.base_layer" in name and name.endswith(trained):
            p.requires_grad_()
    reference = check(model, LongStrawConfig(prompt_chunk_size=8, activation_budget=budget))
    assert sum("experts.base_layer" in n for n in reference) == 6


def test_adapters_injected_into_the_model():
    """Nothing is wrapped around the model."""
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=ATTENTION), tiny("llama"))
    drift(model)
    check(model)


def test_reference_is_the_model_without_its_adapter():
    model = attach(adapted(tiny("qwen3"), target_modules=ATTENTION))
    out = model(prompt_groups=ragged())
    with torch.no_grad():
        with model.disable_adapter():
            reference = model(prompt_groups=ragged())
            expected, _ = stock_rows(model, ragged())
        again = model(prompt_groups=ragged())
    for a, b, c, d in zip(reference.logps, expected, out.logps, again.logps, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        assert torch.equal(c, d)
    assert any((a - b).abs().max() > 0.1 for a, b in zip(out.logps, reference.logps, strict=True) if len(a))
    weigh(out.logps, out.entropies).backward()
    ours = gradients(model)
    model.zero_grad()
    weigh(*stock_rows(model, ragged())).backward()
    trained = [n for n, g in ours.items() if g is not None]
    assert relative({n: ours[n] for n in trained}, {n: gradients(model)[n] for n in trained}) <= 1e-5


def test_two_adapters_one_active():
    model = adapted(tiny("llama"), target_modules=ATTENTION)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=ATTENTION))
    reference = check(model)
    assert not any("other" in n for n in reference)


def test_idle_adapter_that_is_trainable():
    """As `load_adapter(..., is_trainable=True)` leaves one: it has no gradient."""
    model = adapted(tiny("llama"), target_modules=ATTENTION)
    model.add_adapter("idle", peft.LoraConfig(r=2, target_modules=["v_proj", "down_proj"]))
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    reference = check(model)
    assert not any("idle" in n for n in reference)


def test_a_copy_is_a_model_of_its_own():
    model = attach(adapted(tiny("llama"), target_modules=ATTENTION))
    twin = copy.deepcopy(model)
    spread(twin, 5)
    expected, _ = stock_rows(twin, ragged())
    for a, b in zip(twin(prompt_groups=ragged()).logps, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert attachment_of(twin).root is twin


def test_merge_and_unload():
    model = attach(adapted(tiny("llama"), target_modules=ATTENTION))
    with torch.no_grad():
        before = model(prompt_groups=ragged()).logps
        merged = model.merge_and_unload()
        after = merged(prompt_groups=ragged()).logps
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_adapters_changed_before_backward():
    """The recompute would run with others."""
    model = attach(adapted(tiny("llama"), target_modules=ATTENTION))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=ATTENTION))
    out = model(prompt_groups=ragged())
    model.set_adapter("other")
    with pytest.raises(ValueError, match="the active adapters changed"):
        weigh(out.logps, out.entropies).backward()


def test_scale_changed_before_backward():
    model = attach(adapted(tiny("llama"), target_modules=ATTENTION))
    out = model(prompt_groups=ragged())
    model.base_model.model.model.layers[1].self_attn.q_proj.scale_layer(2.0)
    with pytest.raises(ValueError, match="the active adapters changed"):
        weigh(out.logps, out.entropies).backward()


def refused(model, message):
    with pytest.raises(ValueError, match=message):
        attach(model)


def test_refused_by_name():
    def wrapped(config):
        return peft.get_peft_model(tiny("llama"), config)

    causal = {"task_type": "CAUSAL_LM"}
    refused(wrapped(peft.PromptTuningConfig(num_virtual_tokens=2, **causal)), "prompt learning")
    refused(wrapped(peft.PrefixTuningConfig(num_virtual_tokens=2, **causal)), "prompt learning")
    refused(wrapped(peft.LoHaConfig(r=2, target_modules=ATTENTION, module_dropout=0.1)), "LOHA")
    refused(wrapped(peft.LoraConfig(target_modules=ATTENTION, lora_dropout=0.05)), "dropout 0.05")
    refused(wrapped(peft.LoraConfig(target_modules=ATTENTION, alora_invocation_tokens=[1], **causal)), "alora")
    for name, kind in {"monteclora_config": MontecloraConfig, "velora_config": VeloraConfig}.items():
        refused(wrapped(peft.LoraConfig(target_modules=ATTENTION, **{name: kind()})), f"LORA with {name}")
    mixed = peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=ATTENTION), mixed=True)
    refused(mixed, "mixed adapters")


def test_wrapped_by_peft_after_attach():
    model = attach(tiny("llama"))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=ATTENTION))
    with pytest.raises(ValueError, match="attach the model that get_peft_model returns"):
        wrapped(prompt_groups=ragged())


def test_refused_adapter_that_is_added_after_attach():
    model = attach(adapted(tiny("llama"), target_modules=ATTENTION, task_type="CAUSAL_LM"))
    late = peft.LoraConfig(target_modules=ATTENTION, alora_invocation_tokens=[1], task_type="CAUSAL_LM")
    model.add_adapter("late", late)
    with pytest.raises(ValueError, match='"late" is of type LORA with alora_invocation_tokens'):
        model(prompt_groups=ragged())


def test_adapter_names_of_a_mixed_batch():
    model = attach(adapted(tiny("llama"), target_modules=ATTENTION)).eval()
    with pytest.raises(ValueError, match="adapter_names"):
        model(prompt_groups=ragged(), adapter_names=["default"])


def test_float32_adapters_in_a_bfloat16_model():
    """PEFT's default: error against float32 at most 1.1 times that of stock rows, median of five seeds."""
    ratios = []
    for seed in range(5):
        settings = {"target_modules": ATTENTION, "lora_alpha": 4}
        exact = adapted(tiny("qwen3", seed=seed), seed, **settings)
        model = adapted(tiny("qwen3", seed=seed, dtype=torch.bfloat16), seed, **settings)
        with torch.no_grad():
            for p, q in zip(exact.parameters(), model.parameters(), strict=True):
                assert q.dtype == (torch.float32 if q.requires_grad else torch.bfloat16)
                p.copy_(q)
        found = []
        for m, ours in ((exact, False), (model, False), (model, True)):
            m.zero_grad()
            if ours:
                out = attach(m, LongStrawConfig(prompt_chunk_size=8))(prompt_groups=ragged(seed))
                weigh(out.logps, out.entropies).backward()
            else:
                weigh(*stock_rows(m, ragged(seed))).backward()
            found.append({n: g for n, g in gradients(m).items() if g is not None})
        ratios.append(relative(found[2], found[0]) / relative(found[1], found[0]))
    print("bf16 with float32 adapters: ours over stock", ratios)
    assert statistics.median(ratios) <= 1.1


def test_frozen_experts_cost_no_gradient():
    """No tensor of their size is made in backward: neither a gradient nor a buffer for its sum."""
    model = attach(adapted(tiny("glm_moe_dsa", n_routed_experts=32), target_modules=["q_b_proj", "o_proj"]))
    sizes = {p.numel() for n, p in model.named_parameters() if "mlp.experts" in n}
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend((func, t.shape) for t in tree_leaves(out) if isinstance(t, torch.Tensor) if is_new(t))
            return out

    experts = {p.untyped_storage().data_ptr() for n, p in model.named_parameters() if "mlp.experts" in n}
    is_new = lambda t: t.numel() in sizes and t.untyped_storage().data_ptr() not in experts  # noqa: E731
    out = model(prompt_groups=ragged())
    with Made():
        weigh(out.logps, out.entropies).backward()
    assert not made
    for p in model.parameters():
        p.requires_grad_()
    out = model(prompt_groups=ragged())
    with Made():
        weigh(out.logps, out.entropies).backward()
    assert made, "trained ones cost one"
