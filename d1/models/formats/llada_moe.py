"""LLaDA-MoE's released format (arXiv 2509.24389): Qwen3's mixture of experts under other fields."""

from __future__ import annotations

from typing import Any

from d1.models.formats.released import SAME_IN_MIXTURES, check_fixed, head_sizes, renamed_fields

LLADA_MOE_FIELDS = {  # LLaDA-MoE's config field -> Qwen3Moe's
    **SAME_IN_MIXTURES,
    "dense_intermediate_size": "intermediate_size",  # no layer is dense, but the class wants a number
    "expert_intermediate_size": "moe_intermediate_size",
    "num_experts": "num_experts",
}
LLADA_MOE_FIXED = {  # the one architecture that was published; -1 and -2 are its code's words for "not set"
    "shared_expert_intermediate_size": (None, 0, -1),
    "num_shared_experts": (None, 0),
    "moe_router_enable_expert_bias": (None, False),
    "moe_router_score_function": (None, "softmax"),
    "routed_scaling_factor": (None, 1),
    "partial_rotary_factor": (None, 1, -1),
    "rope_scaling": (None,),
    "clip_qkv": (None,),
    "attention_bias": (None, False),
    "qk_layernorm": (None, True),
}


def qwen3_moe_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the Qwen3Moe config that a LLaDA-MoE `config.json` describes."""
    check_fixed(raw, LLADA_MOE_FIXED, "LLaDA-MoE")
    if any(frequency != 1 for frequency in raw.get("moe_layer_freq") or ()):
        raise ValueError(f"this LLaDA-MoE config asks for dense layers: moe_layer_freq {raw['moe_layer_freq']}")
    raw = raw | head_sizes(raw)  # Qwen3Moe would take a missing head_dim to be 128
    raw["norm_topk_prob"] = bool(raw.get("norm_topk_prob"))
    raw["dense_intermediate_size"] = raw.get("dense_intermediate_size") or raw.get("expert_intermediate_size")
    if raw.get("rope_theta") is None:
        raise ValueError("this LLaDA-MoE config.json lacks rope_theta")
    fields = renamed_fields(raw, LLADA_MOE_FIELDS, "LLaDA-MoE")
    return fields | {"rope_parameters": {"rope_type": "default", "rope_theta": raw["rope_theta"]}}
