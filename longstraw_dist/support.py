"""Which models run exactly, and which of their settings would not: refused by name when a model is attached.

A new type is a name in `SUPPORTED` and a row in tests/more_architectures.py, once the parity test holds for it.
"""

from torch import nn
from transformers import PreTrainedModel

from .refused import REFUSED

SUPPORTED = (
    "afmoe",
    "apertus",
    "apertus1p5_text",
    "arcee",
    "aria_text",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "bamba",
    "beam",
    "bitnet",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cohere_compass_text",
    "cwm",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "falcon_mamba",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "jamba",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "llama",
    "mamba",
    "mamba2",
    "mellum",
    "mimo_v2_flash",
    "minicpm3",
    "minimax",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "recurrent_gemma",
    "sarvam_mla",
    "sarvam_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "youtu",
    "zamba2",
)
COUPLED = {  # settings under which layers are coupled beside their hidden states
    "num_kv_shared_layers": "the last layers read keys and values of an earlier layer, whose gradient would end "
    "between two layer operations",
    "hidden_size_per_layer_input": "each layer reads a second embedding, whose gradient would be lost",
}
ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
EXPERTS = (None, "eager", "grouped_mm")


def find_dropout(model: nn.Module) -> str | None:
    """Names an active dropout: a recompute would draw another mask. Every model type keeps its rates in these."""
    for name, module in model.named_modules():
        rates = vars(module) | ({"dropout": module.p} if isinstance(module, nn.Dropout) else {})
        for kind, rate in rates.items():
            if ("drop" in kind or "jitter" in kind) and isinstance(rate, float) and rate > 0:
                return (
                    f"{name} has {kind} {rate}: backward recomputes, and would draw anew. Set it to 0 "
                    "(attention_dropout=0.0, router_jitter_noise=0.0 in the model's config; LoRA's lora_dropout=0.0)."
                )
    return None


def refuse_inexact(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a type, or a setting, under which a run in segments differs from the stock one."""
    kind = model.config.model_type
    if kind in REFUSED:
        raise ValueError(f'model type "{kind}" is not supported: {REFUSED[kind]}.')
    if kind not in SUPPORTED:
        raise ValueError(f'model type "{kind}" is not supported yet: {", ".join(SUPPORTED)} are.')
    if (fault := find_dropout(model)) is not None:
        raise ValueError(fault)
    config = model.config.get_text_config()
    settings = config.to_dict()
    rope = settings.get("rope_parameters") or {}
    for rope_type in (rope.get("rope_type"), *(r.get("rope_type") for r in rope.values() if isinstance(r, dict))):
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"rope_type={rope_type!r} depends on the length of each call, so a prompt in chunks would differ: "
                'use "default", "linear", "llama3" or "yarn".'
            )
    for name, reason in COUPLED.items():
        if settings.get(name):
            raise ValueError(f"{name}={settings[name]}: {reason}. Only 0 is exact.")
    if (bidirectional := settings.get("use_bidirectional_attention")) not in (None, False, "vision"):  # images alone
        raise ValueError(
            f"use_bidirectional_attention={bidirectional!r}: a prompt chunk would have to see those behind it."
        )
    if config._experts_implementation not in EXPERTS:
        raise ValueError(
            f"experts_implementation={config._experts_implementation!r} was not tested: choose eager or grouped_mm."
        )
    if config._attn_implementation not in ATTENTIONS:
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} may be another function than the softmax "
            f"attention that runs in its place: choose one of {', '.join(ATTENTIONS)}."
        )
    composed = [m for m in model.get_decoder().modules() if any(True for _ in m.parameters())]
    if any(vars(m).get("config", config) is not config for m in composed):
        raise ValueError(
            "model.config is not the object that its layers read: set its fields instead of replacing it."
        )
    decoder = model.get_decoder()
    called = {"the decoder": decoder, "the LM head": model.get_output_embeddings()}
    lists = [c for c in decoder.children() if isinstance(c, nn.ModuleList)]
    called |= {f"layer {i}": layer for layers in lists for i, layer in enumerate(layers)}
    for name, module in called.items():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(not getattr(h, "__module__", "").startswith("transformers.") for h in hooks):  # whose own only watch
            raise ValueError(f"a forward hook on {name} would see packed tokens: remove it, or hook a module inside.")
    if getattr(model.get_input_embeddings(), "scale_grad_by_freq", False):
        raise ValueError(
            "scale_grad_by_freq=True of the input embedding divides a gradient by how often its token is in a call, "
            "where a shared prompt is once: set it to False."
        )
    if "forward" in vars(decoder):
        raise ValueError("the decoder's forward is patched, and would not run: patch a module inside of it.")
    if getattr(model, "is_quantized", False):
        raise ValueError("a quantized model is not supported: load it in float32, bfloat16 or float16.")
