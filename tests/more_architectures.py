"""Tiny models of further types: what a config needs beside `tiny`'s, by type, or by type and setting.

The settings exercise what a type can do with its released ones: windows shorter than a prompt, scales, caps, experts.
"""

from .architectures import ALTERNATING, EXPERTS, GROUPED_EXPERTS, INDEXED, LATENT, LOCAL_EXPERTS, WINDOWS

NARROW = {"head_dim": 8}
SLIDING = {"sliding_window": 6, "layer_types": WINDOWS}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SCALED = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16}
ROUTED = {k: v for k, v in GROUPED_EXPERTS.items() if k != "first_k_dense_replace"}
LATENT_ALONE = {**LATENT, "q_lora_rank": None}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512, "rotary_dim": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}  # where the config takes no None


def rope(**settings) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **settings}}


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

FURTHER: dict[str, dict] = {
    # keys and values
    **{kind: {} for kind in ("apertus", "apertus1p5_text", "arcee", "bitnet", "exaone", "jais2", "persimmon")},
    **{kind: NARROW for kind in ("gemma", "glm", "helium", "hunyuan_v1_dense", "iquestcoder")},
    "codegen": GPT,
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "ernie4_5": {**NARROW, "use_bias": True},
    "gpt_neox": {"use_parallel_residual": True, **rope(partial_rotary_factor=0.5)},
    "gpt_neox serial": {"use_parallel_residual": False},
    "gptj": GPT,
    "granite": SCALED,
    "hyperclovax": {**SCALED, "use_post_norm": True},
    "internlm3": {**NARROW, "attention_bias": True, "mlp_bias": True},
    "ministral3": {**NARROW, **rope(**YARN, max_position_embeddings=32, llama_4_scaling_beta=0.1)},
    "nanochat": {"final_logit_softcapping": 3.0},
    "nemotron": rope(partial_rotary_factor=0.5),
    "olmo": {"clip_qkv": 1.0},
    "phi": {"qk_layernorm": True},
    "seed_oss": {**NARROW, "residual_dropout": 0.0, "attention_dropout": 0.0},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "stablelm serial": {},
    "starcoder2": {},
    # of a window
    "cohere2": {**NARROW, **SLIDING, "logit_scale": 0.5},
    "cohere_compass_text": {
        **SLIDING,
        "logit_scale": 0.5,
        "rope_parameters": {
            "full_attention": rope()["rope_parameters"],
            "sliding_attention": rope()["rope_parameters"],
        },
    },
    "cwm": {**NARROW, **SLIDING, **TOKENS},
    "exaone4": SLIDING,
    "granite_swa": {**SCALED, **SLIDING, "layer_rope_theta": [10000.0, 0.0, 500.0]},
    "ministral3 window": {**NARROW, "sliding_window": 6},
    "phi3": {"sliding_window": 6, **rope(partial_rotary_factor=0.5)},
    "smollm3": {**SLIDING, "use_sliding_window": True, "no_rope_layers": [1, 0, 1]},
    "starcoder2 window": {"sliding_window": 6},
    "vaultgemma": {
        **NARROW,
        **SLIDING,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    # and experts
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 512,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {**SCALED, **LOCAL_EXPERTS},
    "granitemoeshared": {**SCALED, **LOCAL_EXPERTS, "shared_intermediate_size": 16},
    "hunyuan_v1_moe": {**NARROW, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {**NARROW, **EXPERTS, **SPARSE, "num_shared_experts": 1},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0},
    "qwen2_moe": {**SHARED_EXPERT, "mlp_only_layers": [0]},
    "sarvam_moe": {**NARROW, **GROUPED_EXPERTS},
    "solar_open": {**NARROW, **ROUTED},
    # and both
    "afmoe": {
        **NARROW,
        **SLIDING,
        **EXPERTS,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "beam": {**NARROW, **SLIDING, **EXPERTS, **SPARSE, "n_group": 2, "topk_group": 1, "final_logit_softcapping": 3.0},
    "cohere2_moe": {**NARROW, **SLIDING, **EXPERTS, **SPARSE, "logit_scale": 0.5, "num_shared_experts": 1},
    "dots1": {**SLIDING, **GROUPED_EXPERTS, "n_shared_experts": 1, "routed_scaling_factor": 1.5},
    "exaone_moe": {**SLIDING, **EXPERTS, **SPARSE},
    "flint": {**NARROW, **SLIDING, **SHARED_EXPERT},
    "granitemoe_swa": {
        **SCALED,
        **SLIDING,
        **LOCAL_EXPERTS,
        "shared_intermediate_size": 16,
        "layer_rope_theta": [10000.0, 0.0, 500.0],
    },
    "kolibri1": {**NARROW, **SLIDING, **SHARED_EXPERT},
    "laguna": {
        **NARROW,
        **SLIDING,
        **SHARED_EXPERT,
        **SPARSE,
        "num_attention_heads_per_layer": [4, 8, 4],
        "moe_routed_scaling_factor": 1.5,
        "moe_router_logit_softcapping": 3.0,
    },
    "mellum": {**NARROW, **SLIDING, **EXPERTS, **SPARSE},
    "mimo_v2_flash": {**ROUTED, **SLIDING, **SPARSE, "head_dim": 12, "v_head_dim": 8},
    "qwen2_moe window": {**SHARED_EXPERT, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    # latents
    "axk1": {**LATENT, **ROUTED, **SPARSE, "n_group": 2},
    "minicpm3": {**LATENT, "v_head_dim": 8, "scale_emb": 2, "dim_model_base": 16},
    "sarvam_mla": {**LATENT_ALONE, **GROUPED_EXPERTS},
    "youtu": LATENT,
    # latents and index keys
    "axk2": {**LATENT, **ROUTED, **SPARSE, **INDEXED, "n_group": None, "topk_group": None, "gated_norm_rank": 4},
    # convolution and delta rule
    "bailing_hybrid": {
        **NARROW,
        **LATENT_ALONE,
        **GROUPED_EXPERTS,
        "num_local_experts": 4,
        "layer_types": ALTERNATING,
        "num_mtp_layers": 0,
    },
    "lara_mini": {
        **NARROW,
        **SHARED_EXPERT,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
    },
    # convolution
    "lfm3": {**NARROW, "layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 6},
}
