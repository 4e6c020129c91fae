"""The released formats of LLaDA and iLLaDA (arXiv 2502.09992), a Llama with other names; of LLaDA-MoE (arXiv
2509.24389), Qwen3's mixture with other config fields; and of LLaDA2 (arXiv 2512.15745), Glm4's mixture with other names
and with fused projections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from d1.models.formats.released import (
    FILE_FIELDS,
    SAME_IN_MIXTURES,
    check_fixed,
    head_sizes,
    key_mapping,
    rename,
    renamed_fields,
    split_experts,
)

if TYPE_CHECKING:
    from torch import Tensor

LLADA_KEYS = (  # LLaDA's module -> Llama's; {} is the number of the block
    ("model.transformer.wte", "model.embed_tokens"),
    ("model.transformer.ln_f", "model.norm"),
    ("model.transformer.ff_out", "lm_head"),
    ("model.transformer.blocks.{}.attn_norm", "model.layers.{}.input_layernorm"),
    ("model.transformer.blocks.{}.q_proj", "model.layers.{}.self_attn.q_proj"),
    ("model.transformer.blocks.{}.k_proj", "model.layers.{}.self_attn.k_proj"),
    ("model.transformer.blocks.{}.v_proj", "model.layers.{}.self_attn.v_proj"),
    ("model.transformer.blocks.{}.attn_out", "model.layers.{}.self_attn.o_proj"),
    ("model.transformer.blocks.{}.ff_norm", "model.layers.{}.post_attention_layernorm"),
    ("model.transformer.blocks.{}.ff_proj", "model.layers.{}.mlp.gate_proj"),
    ("model.transformer.blocks.{}.up_proj", "model.layers.{}.mlp.up_proj"),
    ("model.transformer.blocks.{}.ff_out", "model.layers.{}.mlp.down_proj"),
)
LLADA_FIELDS = {  # LLaDA's config field -> Llama's
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "weight_tying": "tie_word_embeddings",
    "mask_token_id": "mask_token_id",
    "pad_token_id": "pad_token_id",
    "eos_token_id": "eos_token_id",
}
LLADA_FIXED = {  # the architecture of every published LLaDA; another value would need other layers
    "block_type": "llama",
    "block_group_size": 1,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "activation_type": "silu",
    "rope": True,
    "alibi": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "bias_for_layer_norm": False,
    "multi_query_attention": None,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
}
FROM_LLADA = key_mapping(LLADA_KEYS)
TO_LLADA = key_mapping(tuple((new, old) for old, new in LLADA_KEYS))


def llada_weights(name: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The released name and weight for a weight of the class."""
    yield rename(name, TO_LLADA), state[name]


def llama_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the Llama config that a LLaDA `config.json` describes."""
    unsupported = {}
    for name, value in LLADA_FIXED.items():
        if name in raw and (raw[name] or None) != (value or None):
            unsupported[name] = raw[name]
    if unsupported:
        raise ValueError(f"this LLaDA config asks for layers that are not supported: {unsupported}")

    # What a Llama does not use is kept for an export.
    used = (*LLADA_FIELDS, *LLADA_FIXED, *FILE_FIELDS, "torch_dtype", "dtype", "rope_theta")
    unused = {name: value for name, value in raw.items() if name not in used}
    raw = {**raw, "n_kv_heads": raw.get("n_kv_heads") or raw.get("n_heads")}
    raw["embedding_size"] = raw.get("embedding_size") or raw.get("vocab_size")
    raw["mlp_hidden_size"] = raw.get("mlp_hidden_size") or raw.get("mlp_ratio", 4) * raw.get("d_model", 0)
    fields = renamed_fields(raw, LLADA_FIELDS, "LLaDA")
    return fields | {"llada_fields": unused, "bos_token_id": raw.get("bos_token_id")}


def llada_from_llama(config: Any) -> dict[str, Any]:
    """The LLaDA `config.json` of a Llama config; the code it points to is LLaDA's own repository."""
    unsupported = {}
    for name, value in (
        ("model_type", "llama"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
    ):
        if getattr(config, name, None) != value:
            unsupported[name] = getattr(config, name, None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default":
        unsupported["rope_parameters"] = rope
    head_dim = getattr(config, "head_dim", None)
    if head_dim != config.hidden_size / config.num_attention_heads:
        unsupported["head_dim"] = head_dim
    if getattr(config, "predicts_next_token", False):
        unsupported["predicts_next_token"] = True
    attention_pattern = getattr(config, "attention_pattern", None)
    if attention_pattern not in (None, "full"):
        unsupported["attention_pattern"] = attention_pattern
    llada_fields = getattr(config, "llada_fields", {})
    block_size = getattr(config, "block_size", None)
    if block_size and "block_size" not in llada_fields:  # LLaDA's code does not read it
        unsupported["block_size"] = block_size
    if unsupported:
        raise ValueError(
            "only a Llama with full attention and without biases, whose heads divide hidden_size, can be written as "
            f"LLaDA: {unsupported}"
        )

    released: dict[str, Any] = dict(LLADA_FIXED)
    for name, llama_name in LLADA_FIELDS.items():
        released[name] = getattr(config, llama_name, None)
    released.update(
        {
            "model_type": "llada",
            "architectures": ["LLaDAModelLM"],
            "auto_map": {
                "AutoConfig": "configuration_llada.LLaDAConfig",
                "AutoModel": "modeling_llada.LLaDAModelLM",
                "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
            },
            "vocab_size": config.vocab_size,
            "rope_theta": rope["rope_theta"],
            "rope_full_precision": True,
            "mlp_ratio": 4,
            "init_device": "cpu",
            "flash_attention": False,
            "use_cache": False,
        }
    )
    released.update(llada_fields)
    return released


LLADA_MOE_FIELDS = {  # LLaDA-MoE's config field -> Qwen3Moe's
    **SAME_IN_MIXTURES,
    "dense_intermediate_size": "intermediate_size",  # no layer is dense, but the class needs a number
    "expert_intermediate_size": "moe_intermediate_size",
    "num_experts": "num_experts",
}
LLADA_MOE_FIXED = {  # the only published architecture; -1 and -2 mean "not set" in its code
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
    return renamed_fields(raw, LLADA_MOE_FIELDS, "LLaDA-MoE")


LLADA2_KEYS = (  # LLaDA2's name -> Glm4Moe's; {} is the number of the layer
    ("model.word_embeddings", "model.embed_tokens"),
    ("model.layers.{}.attention.query_key_value", "model.layers.{}.self_attn.query_key_value"),  # to be split
    ("model.layers.{}.attention.query_layernorm", "model.layers.{}.self_attn.q_norm"),
    ("model.layers.{}.attention.key_layernorm", "model.layers.{}.self_attn.k_norm"),
    ("model.layers.{}.attention.dense", "model.layers.{}.self_attn.o_proj"),
    ("model.layers.{}.mlp.gate.expert_bias", "model.layers.{}.mlp.gate.e_score_correction_bias"),
)
LLADA2_FIELDS = {  # LLaDA2's config field -> Glm4Moe's
    **SAME_IN_MIXTURES,
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "n_group": "n_group",
    "topk_group": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
    "first_k_dense_replace": "first_k_dense_replace",
}
LLADA2_FIXED = {  # the only published architecture
    "score_function": (None, "sigmoid"),
    "moe_router_enable_expert_bias": (None, True),
    "use_qk_norm": (None, True),
    "use_qkv_bias": (None, False),
    "use_bias": (None, False),
    "norm_head": (None, False),
    "embedding_dropout": (None, 0),
    "output_dropout": (None, 0),
    "rope_scaling": (None,),
    "use_sliding_window": (None, False),
    "num_nextn_predict_layers": (None, 0),
}
LLADA2_DEFAULTS = {  # LLaDA2.0's values, for fields that the file lacks
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rope_theta": 600000,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
}
# Starts of words in fields that ask for more than to fill in
UNSUPPORTED_WORDS = ("edit", "insert", "split", "delet", "capacity")


def glm4_moe_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the Glm4Moe config that a LLaDA2 `config.json` describes."""
    for field, value in raw.items():
        if value not in (None, False, 0) and any(word.startswith(UNSUPPORTED_WORDS) for word in field.split("_")):
            raise ValueError(
                f"this LLaDA2 config has {field} {value}: if its model edits (2.1), remove the field and use "
                "--edit_threshold; if it inserts, deletes or routes by blocks (2.2), its logits would be wrong here"
            )
    check_fixed(raw, LLADA2_FIXED, "LLaDA2")
    raw = LLADA2_DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    if not raw["num_shared_experts"]:
        raise ValueError("this LLaDA2 config asks for layers that are not supported: no shared expert")
    fields = renamed_fields(raw | head_sizes(raw), LLADA2_FIELDS, "LLaDA2")
    fields["rope_parameters"]["partial_rotary_factor"] = raw.get("partial_rotary_factor", 0.5)
    return fields | {"use_qk_norm": True, "num_nextn_predict_layers": 0, "block_size": raw.get("block_size")}


FROM_LLADA2 = key_mapping(LLADA2_KEYS)
TO_LLADA2 = key_mapping((new, old) for old, new in LLADA2_KEYS)
FUSED = ("q_proj", "k_proj", "v_proj")  # the rows of query_key_value, from the top


def split_projections() -> list[Any]:
    """Rows of query_key_value: (heads x head_dim) queries, then (kv heads x head_dim) keys, then as many values."""
    from d1.transformers_bridge import Split, WeightConverter

    split = [f"self_attn.{name}.weight" for name in FUSED]
    return [WeightConverter("self_attn.query_key_value.weight", split, [Split(dim=0)])]


def llada2_weights(name: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The released names and weights for a weight of the class; the fused projection comes with its queries."""
    import torch

    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    if last == FUSED[0]:
        fused = torch.cat([state[f"{prefix}.{part}.weight"] for part in FUSED])
        yield rename(f"{prefix}.query_key_value.weight", TO_LLADA2), fused
    elif last not in FUSED:  # keys and values went with the queries
        for part, weight in split_experts(name, state):
            yield rename(part, TO_LLADA2), weight
