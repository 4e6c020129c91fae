"""The released format of LLaDA and iLLaDA (arXiv 2502.09992): a Llama with other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from d1.models.formats.released import key_mapping, rename

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
# Fields that describe files and code; an export writes its own.
LLADA_ABOUT_FILES = ("model_type", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype")
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
    rest = {k: v for k, v in raw.items() if k not in (*LLADA_FIELDS, *LLADA_FIXED, *LLADA_ABOUT_FILES, "rope_theta")}
    odd = {k: raw[k] for k, v in LLADA_FIXED.items() if k in raw and (raw[k] or None) != (v or None)}
    if odd:
        raise ValueError(f"this LLaDA config asks for layers that are not supported: {odd}")
    raw = {**raw, "n_kv_heads": raw.get("n_kv_heads") or raw.get("n_heads")}
    raw["embedding_size"] = raw.get("embedding_size") or raw.get("vocab_size")
    raw["mlp_hidden_size"] = raw.get("mlp_hidden_size") or raw.get("mlp_ratio", 4) * raw.get("d_model", 0)
    needed = ("d_model", "n_layers", "n_heads", "embedding_size", "rope_theta", "rms_norm_eps")
    if absent := [field for field in needed if raw.get(field) is None]:
        raise ValueError(f"this LLaDA config.json lacks {', '.join(absent)}")
    fields = {new: raw[old] for old, new in LLADA_FIELDS.items() if old in raw}
    fields["llada_fields"] = rest  # what a Llama does not use, kept for an export
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    return fields | {"bos_token_id": raw.get("bos_token_id")}


def llada_from_llama(config: Any) -> dict[str, Any]:
    """The LLaDA `config.json` of a Llama config; the code it points to is LLaDA's own repository."""
    plain = {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    odd = {name: getattr(config, name, None) for name, value in plain.items() if getattr(config, name, None) != value}
    rope, heads = getattr(config, "rope_parameters", None) or {}, getattr(config, "head_dim", None)
    if rope.get("rope_type") != "default":
        odd["rope_parameters"] = rope
    if heads != config.hidden_size / config.num_attention_heads:
        odd["head_dim"] = heads
    if odd:
        raise ValueError(f"only a Llama without biases, whose heads divide hidden_size, can be written as LLaDA: {odd}")
    raw = {old: getattr(config, new, None) for old, new in LLADA_FIELDS.items()}
    code = "GSAI-ML/LLaDA-8B-Base--"
    return {
        **LLADA_FIXED,
        **raw,
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        "auto_map": {
            "AutoConfig": f"{code}configuration_llada.LLaDAConfig",
            "AutoModel": f"{code}modeling_llada.LLaDAModelLM",
            "AutoModelForCausalLM": f"{code}modeling_llada.LLaDAModelLM",
        },
        "vocab_size": config.vocab_size,
        "rope_theta": rope["rope_theta"],
        "rope_full_precision": True,
        "mlp_ratio": 4,
        "init_device": "cpu",
        "flash_attention": False,
        "use_cache": False,
        **getattr(config, "llada_fields", {}),
    }
