"""Dream's released format (arXiv 2508.15487): a Qwen2 whose logits predict the next position."""

from __future__ import annotations

from typing import Any

from transformers import (
    Qwen2Config,
)


def qwen2_from_dream(raw: dict[str, Any]) -> Qwen2Config:
    """The Qwen2 config of a Dream `config.json`; `predicts_next_token` records that its logits are one early."""
    dropped = ("model_type", "architectures", "auto_map", "transformers_version")
    kept = {k: v for k, v in raw.items() if k not in dropped}
    return Qwen2Config(**(kept | {"predicts_next_token": True}))
