"""Types of causal LMs that do not run here, and why: transformers 5.24's that are not in `support.SUPPORTED`."""

REASONS = {
    "it is an encoder, or the decoder of one": (
        "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text "
        "electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta roberta-prelayernorm "
        "roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod"
    ),
    "it reads or writes images or audio": (
        "dots3_note emu3 fuyu git got_ocr2 llama4 mllama moshi moss_transcribe_diarize musicgen musicgen_melody "
        "phi4_multimodal qwen4_exp"
    ),
    "it adds positions to its embeddings": "biogpt ctrl gpt-sw3 gpt2 gpt_bigcode gpt_neo openai-gpt opt",
    "its attention does not go through transformers' interface": (
        "bloom cpmant falcon gpt_neox_japanese mpt reformer xglm"
    ),
    "its scores have a bias by distance": "inkling_text",
    "it attends within chunks of the text": "llama4_text",
    "it attends twice in a layer": "diffllama longcat_flash",
    "it chooses what it attends to, in a mask or in blocks": "doge dots3_note_text minimax_m3_vl_text",
    "it repeats keys and values behind its cache": "jetmoe",
    "its router draws experts at random in training": "phimoe",
    "it runs layers several times": "dory hrm_text inkling2_loop_text",
    "its layers hand on more than their hidden states": "deepseek_v4 hy_v4 inkling2_text qwen4_exp_text zaya",
    "its recurrence cannot be continued from a state with a gradient": "rwkv xlstm zamba",
    "it works on patches of bytes": "blt",
    "its get_decoder() is its LM head": "modernbert-decoder",
    "its layers hand on several hidden states (AltUp), and each reads a second embedding": "gemma3n gemma3n_text",
    "it reads the hidden states and keys of another model": "gemma4_assistant gemma4_unified_assistant",
}
REFUSED = {kind: reason for reason, kinds in REASONS.items() for kind in kinds.split()}
