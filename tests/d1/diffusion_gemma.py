"""Tiny random DiffusionGemmas, for tests; skipped before Transformers 5.24."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

VOCAB, CANVAS, WINDOW = 32, 4, 6
HAS_CLASS = Version(transformers.__version__) >= Version("5.24")
needs_class = pytest.mark.skipif(not HAS_CLASS, reason="diffusion_gemma needs Transformers 5.24")


def tiny(vocab: int = VOCAB, canvas: int = CANVAS, **text: Any) -> Any:
    """A model of Transformers' class whose weights, norms and scales are random, so that a lost one changes results."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    fields = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW, "num_experts": 4}
    fields |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "top_k_experts": 2, "moe_intermediate_size": 8}
    fields |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "initializer_range": 0.2}
    fields |= {"use_bidirectional_attention": "vision", "max_position_embeddings": 128, "eos_token_id": 1} | text
    vision = {"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    ids = {"image_token_id": vocab - 1, "boi_token_id": vocab - 1, "eoi_token_id": vocab - 1}
    config = DiffusionGemmaConfig(text_config=fields, vision_config=vision, canvas_length=canvas, **ids)
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.4 * torch.rand_like(buffer))
    return model


def write_tiny(folder: Path, **fields: Any) -> Path:
    tiny(**fields).save_pretrained(folder)
    return folder


def write_with_tokenizer(folder: Path, source: Path, **fields: Any) -> Path:
    """A tiny model with the tokenizer in `source`, without its mask token."""
    from d1.models import load_tokenizer

    tokenizer = load_tokenizer(source)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(folder)
    eos = tokenizer.eos_token_id
    return write_tiny(folder, vocab=len(tokenizer), eos_token_id=eos, pad_token_id=tokenizer.pad_token_id, **fields)
