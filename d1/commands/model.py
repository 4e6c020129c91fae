"""Load the model and the tokenizer that the flags of `chat`, `watch` and `fill` name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def tokenizer_of(args: argparse.Namespace) -> Any:
    """The adapter's tokenizer if there is an adapter, else the model's."""
    from d1.models import load_tokenizer

    return load_tokenizer(
        args.checkpoint_path or args.model_path,
        plain_chat_template=args.plain_chat_template,
    )


def model_of(args: argparse.Namespace, load: Callable[..., Any] | None = None) -> Any:
    """The model with its adapter, loaded by `load` (default: `load_on_device`)."""
    from d1.models.fit import check_memory
    from d1.models.load import load_on_device

    check_memory(args.model_path, args.dtype, args.checkpoint_path)
    return (load or load_on_device)(
        args.model_path,
        args.dtype,
        adapter=args.checkpoint_path,
        attn_implementation=args.attn_implementation,
    )
