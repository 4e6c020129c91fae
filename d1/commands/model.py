"""What `chat`, `watch` and `fill` share: the model that their flags name, and flags changed by words."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from d1.runs.entry import OneLineParser


class WordsParser(OneLineParser):
    """A parser of words that are no command line of their own: an error is a ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def changed(
    args: argparse.Namespace, words: Sequence[str], add_arguments: Callable[[argparse.ArgumentParser], object]
) -> argparse.Namespace:
    """The arguments `args`, changed by `words`: each is NAME=VALUE, or the NAME of a switch."""
    parser = WordsParser(add_help=False)
    add_arguments(parser)
    parser.set_defaults(**vars(args))
    return parser.parse_args([f"--{word}" for word in words])


def tokenizer_of(args: argparse.Namespace) -> Any:
    """The tokenizer of the model, or of the adapter on it."""
    from d1.models import load_tokenizer

    return load_tokenizer(
        args.checkpoint_path or args.model_path,
        plain_chat_template=args.plain_chat_template,
    )


def model_of(args: argparse.Namespace, load: Callable[..., Any] | None = None) -> Any:
    """The model with its adapter, by `load_on_device` or by `load` in place of it."""
    from d1.models.load import load_on_device

    return (load or load_on_device)(
        args.model_path,
        args.dtype,
        adapter=args.checkpoint_path,
        attn_implementation=args.attn_implementation,
    )
