"""The `config.json` of the models that recipes train, as far as sizes follow from it, so that `d1 fit` needs no hub."""

from __future__ import annotations

from typing import Any

LLADA = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    **{"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288},
    **{"vocab_size": 126464, "embedding_size": 126464, "max_sequence_length": 4096, "rope_theta": 500000.0},
    **{"rms_norm_eps": 1e-05, "weight_tying": False, "block_type": "llama", "layer_norm_type": "rms"},
    **{"mask_token_id": 126336, "pad_token_id": 126081, "eos_token_id": 126081},
}
QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "attention_dropout": 0.0}
QWEN |= {"bos_token_id": 151643, "eos_token_id": 151643, "pad_token_id": 151643, "use_sliding_window": False}
DREAM = QWEN | {
    "model_type": "Dream",
    "architectures": ["DreamModel"],
    **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 131072},
    **{"mask_token_id": 151666, "tie_word_embeddings": False},
}
SDAR = QWEN | {
    "model_type": "sdar",
    "architectures": ["SDARForCausalLM"],
    **{"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
    **{"intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 32768, "head_dim": 128},
    **{"mask_token_id": 151669, "tie_word_embeddings": True, "attention_bias": False},
}
LLADA2 = {
    "model_type": "llada2_moe",
    "architectures": ["LLaDA2MoeModelLM"],
    **{"hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"intermediate_size": 5120, "moe_intermediate_size": 512, "vocab_size": 157184, "head_dim": 128},
    **{"num_experts": 256, "num_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "hidden_act": "silu"},
    **{"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True},
    **{"rms_norm_eps": 1e-06, "rope_theta": 600000, "partial_rotary_factor": 0.5, "max_position_embeddings": 32768},
    **{"tie_word_embeddings": False, "pad_token_id": 156892, "eos_token_id": 156892, "mask_token_id": None},
}
NEMOTRON = {
    "model_type": "nemotron_labs_diffusion",
    "architectures": ["NemotronLabsDiffusionModel"],
    **{"hidden_size": 3072, "num_hidden_layers": 26, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"intermediate_size": 9216, "vocab_size": 131072, "head_dim": 128, "max_position_embeddings": 262144},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    **{"hidden_act": "silu", "rms_norm_eps": 1e-05, "attention_bias": False, "mlp_bias": False, "sliding_window": None},
    **{"tie_word_embeddings": False, "dlm_paradigm": "bidirectional", "block_size": 32, "mask_token_id": 100},
    **{"bos_token_id": 1, "eos_token_id": 11},
}
SDAR_8B = SDAR | {
    **{"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"intermediate_size": 12288, "tie_word_embeddings": False},
}
LLADA_MOE = {
    "model_type": "lladamoe",
    "architectures": ["LLaDAMoEModelLM"],
    **{"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16},
    **{"num_experts": 64, "num_experts_per_tok": 8, "expert_intermediate_size": 1024, "moe_layer_freq": [1] * 16},
    **{"dense_intermediate_size": 8192, "intermediate_size": 8192, "shared_expert_intermediate_size": None},
    **{"norm_topk_prob": False, "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax"},
    **{"vocab_size": 157184, "max_position_embeddings": 32768, "rope_theta": 50000, "rope_scaling": None},
    **{"partial_rotary_factor": -1, "qk_layernorm": True, "clip_qkv": None, "attention_dropout": 0.0},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-06, "tie_word_embeddings": False},
}
FAST_DLLM = QWEN | {
    "model_type": "Fast_dLLM_Qwen",
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768, "bd_size": 32},
    "tie_word_embeddings": False,
}
DIFFUSION_GEMMA = {
    "model_type": "diffusion_gemma",
    "canvas_length": 256,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "diffusion_gemma_text",
        **{"num_hidden_layers": 30, "hidden_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "intermediate_size": 2112},
        **{"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "vocab_size": 262144},
        **{"max_position_embeddings": 32768, "sliding_window": 1024, "use_bidirectional_attention": "vision"},
        "tie_word_embeddings": True,
    },
    "vision_config": {"model_type": "gemma4_vision"},
}
A2D = {  # Qwen2.5-0.5B after `d1 a2d`
    "model_type": "qwen2",
    **{"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    **{"intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768, "mask_token_id": 151665},
    "tie_word_embeddings": True,
}
SMOLLM2 = {  # SmolLM2-135M after `d1 a2d --block_size 8 --causal_context --keep_shift`
    "model_type": "llama",
    **{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    **{"intermediate_size": 1536, "vocab_size": 49153, "max_position_embeddings": 8192, "mask_token_id": 49152},
    **{"attention_pattern": "causal-context", "block_size": 8, "predicts_next_token": True},
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {  # the path of a model in recipes/ -> its config.json
    **dict.fromkeys(("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"), LLADA),
    "Dream-org/Dream-v0-Instruct-7B": DREAM,
    "inclusionAI/LLaDA-MoE-7B-A1B-Instruct": LLADA_MOE,
    "JetLM/SDAR-1.7B-Chat": SDAR,
    "JetLM/SDAR-8B-Chat": SDAR_8B,
    "inclusionAI/LLaDA2.0-mini": LLADA2,
    "nvidia/Nemotron-Labs-Diffusion-3B": NEMOTRON,
    "google/diffusiongemma-26B-A4B-it": DIFFUSION_GEMMA,
    "Efficient-Large-Model/Fast_dLLM_v2_7B": FAST_DLLM,
    **dict.fromkeys(("runs/qwen2.5-0.5b-a2d", "runs/qwen2.5-0.5b-sft"), A2D),
    **dict.fromkeys(("runs/smollm2-135m-a2d", "runs/smollm2-135m-sft"), SMOLLM2),
}
