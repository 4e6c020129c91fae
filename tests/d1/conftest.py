"""Tiny random checkpoints of every kind, in their authors' published formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

from tests.d1 import released

VOCAB, MASK = 64, 3
DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.2,
)
ENCODER = DECODER | {"cls_token_id": 1, "sep_token_id": 2, "type_vocab_size": 2}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
KINDS: dict[str, dict[str, Any]] = {  # kind -> config fields beyond the common ones
    "llada": {},
    "Dream": {},
    "sdar": {},
    "sdar_moe": {},
    "Fast_dLLM_Qwen": {},
    "lladamoe": {},
    "llada2_moe": {},
    "nemotron_labs_diffusion": {},
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
    "bert": {},
    "roberta": {},
}
ENCODERS = ("modernbert", "bert", "roberta")

# What a published LLaDA config.json holds, at toy size.
LLADA_CONFIG = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
    "activation_type": "silu",
    "alibi": False,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_type": "llama",
    "d_model": 32,
    "embedding_dropout": 0.0,
    "embedding_size": VOCAB,
    "eos_token_id": 2,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": MASK,
    "max_sequence_length": 128,
    "mlp_hidden_size": 48,
    "mlp_ratio": 4,
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 3,
    "pad_token_id": 0,
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": VOCAB,
    "weight_tying": False,
}


def llada_weights(config: dict, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random weights with the names used in the published LLaDA files."""
    width, ff, vocab = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    kv = width * config["n_kv_heads"] // config["n_heads"]
    shapes = {"wte": (vocab, width), "ff_out": (vocab, width), "ln_f": (width,)}
    block = {"attn_norm": (width,), "ff_norm": (width,), "q_proj": (width, width), "k_proj": (kv, width)}
    block |= {"v_proj": (kv, width), "attn_out": (width, width), "ff_proj": (ff, width), "up_proj": (ff, width)}
    block |= {"ff_out": (width, ff)}
    for i in range(config["n_layers"]):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return {
        f"model.transformer.{name}.weight": (torch.randn(shape) * 0.2 + (len(shape) == 1)).to(dtype)
        for name, shape in shapes.items()
    }


def write_llada(folder: Path, dtype: torch.dtype = torch.float32, shards: int = 2, **fields: object) -> Path:
    """A sharded checkpoint in LLaDA's original format."""
    config = LLADA_CONFIG | fields
    return released.write_files(folder, config, llada_weights(config, dtype), shards)


def write_dream(folder: Path) -> Path:
    """A checkpoint in Dream's original format: Qwen2's weight names and Dream's own config."""
    write_transformers(folder, "qwen2", {})
    config: dict[str, Any] = {k: v for k, v in DECODER.items() if k not in ("head_dim",)}
    config |= {"model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": MASK, "rope_theta": 1000000.0}
    config |= {"auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"}}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "rope_scaling": None}
    config |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 3, "attention_dropout": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_transformers(folder: Path, kind: str, fields: dict) -> Path:
    """A checkpoint as Transformers saves it; biases and norms are random, too, so that a lost one changes results."""
    common = ENCODER if kind in ENCODERS else DECODER
    config = CONFIG_MAPPING[kind](**(common | fields))
    auto = AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def write_kind(folder: Path, kind: str, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    if kind == "llada":
        return write_llada(folder)
    if kind == "Dream":
        return write_dream(folder)
    if kind in released.CONFIGS:
        return released.write_released(folder, kind)
    return write_transformers(folder, kind, KINDS[kind])


@pytest.fixture(scope="session")
def kind_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny checkpoint per kind, shared by the session: do not write to them."""
    root = tmp_path_factory.mktemp("kinds")
    return {kind: write_kind(root / kind, kind) for kind in KINDS}


@pytest.fixture
def llada_writer():
    """`write_llada(folder, dtype, shards, **config fields)`."""
    return write_llada


@pytest.fixture(params=[kind for kind in KINDS if kind not in ("sdar_moe", "llama")])  # as lladamoe and llada run
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["sdpa", "eager"])
def attention(request: pytest.FixtureRequest, kind: str) -> str:
    if kind == "gemma2" and request.param == "sdpa":
        pytest.skip("Transformers gives Gemma 2, which caps its attention scores, no sdpa")
    return request.param
