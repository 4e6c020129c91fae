"""What a checkpoint folder holds: the kinds of `config.json` and the names of the weights, as tables.

LLaDA (arXiv 2502.09992) is a Llama, and Dream (arXiv 2508.15487) a Qwen2, with attention in both directions. Their own
code does not run on Transformers 5, so their configs and weight names are translated to the classes in Transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig, Qwen2Config, modeling_utils

DECODERS = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
ENCODERS = ("modernbert", "bert", "roberta")

REFUSED = {  # model_type -> why this project cannot train or sample it
    "diffusion_gemma": "it diffuses with uniform noise and has no mask token",
    "diffusion_gemma_text": "it diffuses with uniform noise and has no mask token",
    "llada_moe": "its mixture-of-experts layers have no counterpart here",
    "llada2_moe": "its mixture-of-experts layers and its block-causal attention have no counterpart here",
    "gemma3": "it is the image and text model: take a text-only checkpoint (model_type gemma3_text)",
    "t5": "an encoder-decoder cannot score all positions of one sequence",
}

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

# Fields that speak of files and code; an export writes its own.
ABOUT_FILES = ("model_type", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype")

LLADA_FIXED = {  # the one architecture every published LLaDA has; another value would need other layers
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


def key_mapping(table: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The table as {regular expression: replacement}, the form that `from_pretrained` and `rename` take."""
    return {
        "^" + re.escape(old).replace(r"\{\}", r"(\d+)") + r"\.": new.replace("{}", r"\1") + "." for old, new in table
    }


FROM_LLADA = key_mapping(LLADA_KEYS)
TO_LLADA = key_mapping(tuple((new, old) for old, new in LLADA_KEYS))


def rename(name: str, mapping: dict[str, str]) -> str:
    """`name` after the one rule of `mapping` that matches its start; unchanged where none does."""
    for pattern, replacement in mapping.items():
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name


def llama_from_llada(raw: dict[str, Any]) -> LlamaConfig:
    """The Llama config of a LLaDA `config.json`.

    Raises:
        ValueError: the file lacks a field, or asks for a layer no LLaDA-8B has.
    """
    if any("MoE" in name for name in raw.get("architectures") or ()):  # published under the same model_type
        raise ValueError(f"{raw['architectures'][0]} is not supported: {REFUSED['llada_moe']}")
    rest = {k: v for k, v in raw.items() if k not in (*LLADA_FIELDS, *LLADA_FIXED, *ABOUT_FILES, "rope_theta")}
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
    fields["llada_fields"] = rest  # what a Llama has no use for, kept for the way back
    rope = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    return LlamaConfig(**fields, rope_parameters=rope, bos_token_id=raw.get("bos_token_id"))


def llada_from_llama(config: PreTrainedConfig) -> dict[str, Any]:
    """The LLaDA `config.json` of a Llama config; the code it points to is LLaDA's own repository.

    Raises:
        ValueError: LLaDA's code has no layer for something this config asks for.
    """
    if config.model_type != "llama":
        raise ValueError(f"only a Llama can be written as LLaDA; this is a {config.model_type!r}")
    rope = config.rope_parameters
    if config.attention_bias or config.mlp_bias or rope["rope_type"] != "default":
        raise ValueError(
            f"only a Llama without biases or scaled rotary positions can be written as LLaDA; this one has "
            f"attention_bias={config.attention_bias}, mlp_bias={config.mlp_bias}, rope_parameters={rope}"
        )
    if config.head_dim * config.num_attention_heads != config.hidden_size or config.hidden_act != "silu":
        raise ValueError("LLaDA's heads divide hidden_size evenly and its activation is silu; this Llama differs")
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


def qwen2_from_dream(raw: dict[str, Any]) -> Qwen2Config:
    """The Qwen2 config of a Dream `config.json`; `predicts_next_token` records that its logits are one early."""
    dropped = ("model_type", "architectures", "auto_map", "transformers_version")
    kept = {k: v for k, v in raw.items() if k not in dropped}
    return Qwen2Config(**(kept | {"predicts_next_token": True}))


def native_config(path: str) -> tuple[PreTrainedConfig, dict[str, str] | None]:
    """The Transformers config of the checkpoint at `path` (folder or hub name), attention turned both ways.

    Returns:
        The config, and the renaming of weights that its checkpoint needs (None: the names are native).

    Raises:
        ValueError: the kind is not supported; the message says why.
        OSError: there is no `config.json`.
    """
    raw, _ = PreTrainedConfig.get_config_dict(path)
    if not raw:
        raise FileNotFoundError(f"{path} holds no config.json: it is no model folder")
    kind = raw.get("model_type", "")
    mapping = None
    config: PreTrainedConfig
    if kind == "llada":
        config, mapping = llama_from_llada(raw), FROM_LLADA
    elif kind == "Dream":
        config = qwen2_from_dream(raw)
    elif kind in DECODERS + ENCODERS:
        config = CONFIG_MAPPING[kind].from_dict(raw)
    else:
        known = ", ".join(("llada", "Dream", *DECODERS, *ENCODERS))
        raise ValueError(f"{path}: model_type {kind!r} is not supported: {REFUSED.get(kind, f'known are {known}')}")
    windowed = getattr(config, "layer_types", None) or []
    if windowed and "full_attention" not in windowed:
        raise ValueError(f"{path}: every layer attends to a window only, so no position could see the whole text")
    if kind in ENCODERS:
        config.is_decoder = False
    else:
        config.is_causal = False
        config.use_cache = False
    config._name_or_path = path
    return config, mapping


STORED = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}  # as safetensors names them


def needs_copy(path: str, dtype: Any, device: Any) -> bool:
    """Whether weights loaded as `dtype` on `device` are copies, not the mapped file of a local folder itself."""
    files = sorted(Path(path).glob("*.safetensors"))
    if dtype == "auto" or not files:
        return False
    with safe_open(files[0], framework="pt") as file:
        stored = file.get_slice(next(iter(file.keys()))).get_dtype()
    return device is not None or STORED.get(f"torch.{str(dtype).removeprefix('torch.')}") != stored


@contextmanager
def reading(copies: bool) -> Iterator[None]:
    """Where weights are copied, have Transformers 5.23 read its files piece by piece rather than map them.

    A mapping stays resident in whole, next to the weights that were converted from it or moved to a device. Without a
    copy the mapping is the model, shared by all processes of a machine. To delete once `from_pretrained` takes
    safetensors' `backend` as an argument.
    """
    library: Any = modeling_utils
    mapped = library.safe_open
    if copies:
        library.safe_open = lambda *args, **kwargs: mapped(*args, **(kwargs | {"backend": "pread"}))
    try:
        yield
    finally:
        library.safe_open = mapped
