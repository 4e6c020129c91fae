"""Load masked diffusion language models: decoders turned bidirectional, whose logits score the token AT a position."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def fill_position_ids(model, args, kwargs):
    """Forward pre-hook: positions count real tokens only, so that left padding cannot move a row."""
    mask = kwargs.get("attention_mask")
    if mask is not None and kwargs.get("position_ids") is None:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return args, kwargs


def load_model(
    path: str, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or torch.float32, is_causal=False)
    model.register_forward_pre_hook(fill_position_ids, with_kwargs=True)
    return model.to(device or "cpu").eval()


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path, padding_side="left")
