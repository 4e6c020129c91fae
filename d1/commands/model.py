"""Load the model and the tokenizer that the flags of `chat`, `watch`, `fill` and `serve` name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def tokenizer_of(args: argparse.Namespace) -> Any:
    """The adapter's tokenizer if there is an adapter, else the model's."""
    from d1.models import load_tokenizer

    return load_tokenizer(args.checkpoint_path or args.model_path, plain_chat_template=args.plain_chat_template)


def resolve_canvas(args: argparse.Namespace, masks_for: str = "") -> None:
    """Set `gen_length` where it is not given, to the model's own (`default_gen_length`) or 128.

    Raise ValueError, before the weights are read, if a completion leaves no room for a prompt, other flags of sampling
    do not suit the model, or it lacks the mask token that `masks_for` needs."""
    from d1.models.folder import ModelFolder
    from d1.models.kinds import check_room, require_masks
    from d1.sampling.graphs import check_compile
    from d1.sampling.settings import GEN_LENGTH, sampling_settings

    folder = ModelFolder.read(args.model_path, args.checkpoint_path)
    config = folder.config
    check_compile(args.compile, config, kernel=args.attn_implementation)
    if masks_for:
        require_masks(config, masks_for)
    if args.gen_length is None:
        args.gen_length = folder.gen_length or GEN_LENGTH
    check_room(config, 1, sampling_settings(vars(args), config).gen_length, ": lower --gen_length")


def model_of(args: argparse.Namespace, load: Callable[..., Any] | None = None) -> Any:
    """The model with its adapter, loaded by `load` (default: `load_on_device`)."""
    from d1.models.folder import ModelFolder
    from d1.models.load import load_on_device
    from d1.models.memory import check_memory
    from d1.sampling.graphs import set_compile

    check_memory(ModelFolder.read(args.model_path, args.checkpoint_path), args.dtype)
    options = {"adapter": args.checkpoint_path, "attn_implementation": args.attn_implementation}
    return set_compile((load or load_on_device)(args.model_path, args.dtype, **options), args.compile)
