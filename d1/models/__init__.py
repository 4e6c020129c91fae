"""Masked diffusion language models on Transformers' own classes."""

from d1.models.load import attach_hooks as attach_hooks
from d1.models.load import load_model as load_model
from d1.models.tokenizer import load_tokenizer as load_tokenizer
