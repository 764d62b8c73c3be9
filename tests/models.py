"""Tiny random models whose weights are spread, so that the prompt's state matters, and ragged prompt groups."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longstraw_dist import PromptGroup

from .architectures import ARCHITECTURES
from .more_architectures import FURTHER

VOCABULARY = 97
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {}),
    "olmo2": ("Olmo2", {}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 6,
            "layer_types": ALTERNATING,
        },
    ),
    "gemma3_text": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 3.0,
            "sliding_window": 6,
            "layer_types": ALTERNATING,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
}


def tiny(kind: str, tied: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides):
    """A causal LM of 3 layers of 32, in training mode. `overrides` go into its config."""
    if kind in FURTHER:
        name = kind.split()[0]
        configuration, model_class, extra = (
            CONFIG_MAPPING[name],
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name],
            FURTHER[kind],
        )
    else:
        name, extra = (MODELS | ARCHITECTURES)[kind]
        configuration = getattr(transformers, f"{name}TextConfig" if kind.endswith("_text") else f"{name}Config")
        model_class = f"{name}ForCausalLM"
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **extra,
        **overrides,
    }
    model = getattr(transformers, model_class)(configuration(**settings))
    spread(model, seed)
    if kind not in MODELS:
        moderate(model)
    if kind in FURTHER:
        center(model)
    return model.to(dtype).train()


IMAGES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
QWEN_IMAGES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
GEMMA_IMAGES = {**IMAGES, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
PLACEHOLDERS = {"image_token_id": 5, "video_token_id": 6, "audio_token_id": 7}  # which `ragged` draws, too
AROUND = {  # what released checkpoints are -> the text model inside, and what is around it
    "Qwen3_5": ("qwen3_5_text", {"vision_config": QWEN_IMAGES}),
    "Qwen3_5Moe": ("qwen3_5_moe_text", {"vision_config": QWEN_IMAGES}),
    "Gemma3": ("gemma3_text", {"vision_config": IMAGES}),
    "Gemma4": ("gemma4_text", {"vision_config": GEMMA_IMAGES, **PLACEHOLDERS}),
    "Gemma4Unified": ("gemma4_unified_text", PLACEHOLDERS),
}


def inside_of_another(name: str = "Qwen3_5", **overrides):
    """A text model beside another for images."""
    kind, around = AROUND[name]
    config = getattr(transformers, f"{name}Config")(text_config=tiny(kind, **overrides).config.to_dict(), **around)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    spread(model, 0)
    moderate(model)
    return model.train()


@torch.no_grad()
def spread(model: nn.Module, seed: int) -> None:
    """Matrices of singular values around 1, norms around 1: attention looks far, and every parameter counts."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + 0.3 * noise)


@torch.no_grad()
def moderate(model: nn.Module) -> None:
    """Smaller matrices: recurrences in float32 are ill-conditioned at large weights, the stock ones too. And an RG-LRU
    that remembers: around 1, its parameter would leave 1 % of a state to the next token."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.mul_(0.5)
        elif name.endswith("recurrent_param"):
            p.sub_(4)


@torch.no_grad()
def center(model: nn.Module) -> None:
    """Biases around 0: where all queries and keys have one of 1, the prompt hardly matters."""
    for name, p in model.named_parameters():
        if name.endswith("bias") and p.dim() == 1:
            p.sub_(1)


# PEFT registers the adapted parameter anew in each forward, which changes its place among the others.
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}


def adapted(model: nn.Module, seed: int = 1, **settings) -> Any:
    """The model in PEFT's, with a LoRA that is not at its initial zero."""
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **settings)).train()
    drift(model, seed)
    return model


@torch.no_grad()
def drift(model: nn.Module, seed: int = 1) -> None:
    """Moves what is trained away from its initial values, those that PEFT draws at random included."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.requires_grad:
            if "lora_" in name and p.dim() > 1:
                p.zero_()
            p.add_(0.5 * torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)


def tokens(n: int, generator: torch.Generator, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (n,), generator=generator)


def ragged(seed: int = 0, shapes=((23, (5, 5, 0, 9)), (1, (3, 1)), (2, (4,)), (40, ())), vocabulary=VOCABULARY):
    """Prompt groups of the given (P, (R_1, R_2, ...)); the default has P=1, R=1, R=0 and a group without responses."""
    generator = torch.Generator().manual_seed(seed)
    return [
        PromptGroup(tokens(p, generator, vocabulary), [tokens(r, generator, vocabulary) for r in responses])
        for p, responses in shapes
    ]


def weigh(logps: list[Tensor], entropies: list[Tensor], seed: int = 0) -> Tensor:
    """A loss that weighs every log-prob and every entropy differently: sum_i w_i logp_i + v_i entropy_i."""
    generator = torch.Generator().manual_seed(seed)
    loss = 0.0
    for t in (*logps, *entropies):
        loss = loss + (torch.randn(t.shape, generator=generator).to(t) * t).sum()
    return loss
