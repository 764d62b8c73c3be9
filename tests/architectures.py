"""Tiny models of the architectures that remember more than keys and values: name -> (class, settings)."""

ALTERNATING = ["linear_attention", "full_attention", "linear_attention"]
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
DELTA_RULE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "layer_types": ALTERNATING,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
GROUPED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
WIDE_IN_FULL = {  # gemma4: full attention has wider and fewer keys
    "head_dim": 8,
    "global_head_dim": 12,
    "num_global_key_value_heads": 1,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
}
INDEXED = {"index_topk": 6, "index_n_heads": 32, "index_head_dim": 16, "head_dim": 8}

ARCHITECTURES = {
    # keys and values
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": 6, "layer_types": WINDOWS}),
    "olmo3": ("Olmo3", {"sliding_window": 6, "layer_types": WINDOWS}),
    "gemma4_text": (
        "Gemma4",
        {
            **WIDE_IN_FULL,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "gemma4_unified_text": ("Gemma4Unified", WIDE_IN_FULL),
    "gpt_oss": ("GptOss", {"head_dim": 8, "sliding_window": 6, "layer_types": WINDOWS, **LOCAL_EXPERTS}),
    "glm4_moe": ("Glm4Moe", {"head_dim": 8, **GROUPED_EXPERTS}),
    "minimax_m2": ("MiniMaxM2", {"head_dim": 8, **LOCAL_EXPERTS}),
    # latents
    "deepseek_v2": ("DeepseekV2", {"head_dim": 8, **LATENT, **GROUPED_EXPERTS}),
    "deepseek_v3": ("DeepseekV3", {"head_dim": 8, **LATENT, **GROUPED_EXPERTS}),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **GROUPED_EXPERTS}),
    # latents and index keys
    "deepseek_v32": ("DeepseekV32", {**LATENT, **GROUPED_EXPERTS, **INDEXED}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {**LATENT, **GROUPED_EXPERTS, **INDEXED, "indexer_types": ["full", "shared", "full"]},
    ),
    # convolution and delta rule
    "qwen3_next": ("Qwen3Next", {**DELTA_RULE, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_5_text": ("Qwen3_5", DELTA_RULE),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {**DELTA_RULE, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "olmo_hybrid": ("OlmoHybrid", DELTA_RULE),
    "kimi_linear": (
        "KimiLinear",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": None,
            "layer_types": ALTERNATING,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    # linear attention
    "minimax": ("MiniMax", {"head_dim": 8, "num_local_experts": 4, "block_size": 8, "layer_types": ALTERNATING}),
    # convolution
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}),
    "lfm2_moe": (
        "Lfm2Moe",
        {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, **EXPERTS},
    ),
    # convolution and RG-LRU
    "recurrent_gemma": (
        "RecurrentGemma",
        {
            "lru_width": 48,
            "block_types": ["recurrent", "attention", "recurrent"],
            "attention_window_size": 6,
            "logits_soft_cap": 3.0,
        },
    ),
    # convolution and state space
    "mamba": ("Mamba", {"state_size": 8}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}),
    "jamba": (
        "Jamba",
        {"mamba_d_state": 8, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4},
    ),
    "bamba": ("Bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "head_dim": 8,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA2,
            **LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 32,
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "falcon_h1": ("FalconH1", {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8, "embedding_multiplier": 2.0}),
    "zamba2": (
        "Zamba2",
        {
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "mamba_expand": 2,
            "attention_head_dim": 8,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
}

# What the stock model needs to continue from its own cache: minimax counts the tokens in its first layer's keys,
# recurrent_gemma starts with states of the hidden size.
CACHED = {
    "minimax": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "recurrent_gemma": {"lru_width": 32},
}
TIED = ("zamba2",)  # whose blocks are shared by tying them
