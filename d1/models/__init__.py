"""Masked diffusion language models on Transformers' own classes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d1.models.load import attach_hooks as attach_hooks
    from d1.models.load import load_model as load_model
    from d1.models.load import prepare as prepare
    from d1.models.tokenizer import load_tokenizer as load_tokenizer

HOMES = {  # imported on first use, as what lies there imports torch
    "attach_hooks": "d1.models.load",
    "load_model": "d1.models.load",
    "load_tokenizer": "d1.models.tokenizer",
    "prepare": "d1.models.load",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
