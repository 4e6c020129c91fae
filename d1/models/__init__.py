"""Masked diffusion language models on Transformers' own classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.lazy import lazily

if TYPE_CHECKING:
    from d1.models.load import load_model as load_model
    from d1.models.load import prepare as prepare
    from d1.models.tokenizer import load_tokenizer as load_tokenizer

HOMES = {"load_model": "load", "load_tokenizer": "tokenizer", "prepare": "load"}
__getattr__ = lazily(__name__, HOMES)
