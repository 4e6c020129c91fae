"""The kinds of model, by the `model_type` of their `config.json`."""

from __future__ import annotations

from transformers import (
    CONFIG_MAPPING,
    PreTrainedConfig,
)

from d1.models.formats.dream import qwen2_from_dream
from d1.models.formats.llada import FROM_LLADA, NO_MOE, llama_from_llada

DECODERS = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
ENCODERS = ("modernbert", "bert", "roberta")
REFUSED = {  # model_type -> why this project cannot train or sample it
    "diffusion_gemma": "it diffuses with uniform noise and has no mask token",
    "diffusion_gemma_text": "it diffuses with uniform noise and has no mask token",
    "llada_moe": NO_MOE,
    "llada2_moe": "its mixture-of-experts layers and its block-causal attention have no counterpart here",
    "gemma3": "it is the image and text model: take a text-only checkpoint (model_type gemma3_text)",
    "t5": "an encoder-decoder cannot score all positions of one sequence",
}


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
