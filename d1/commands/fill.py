"""python -m d1 fill MODEL "The capital of [MASK:3] is Paris": fill in placeholders, here with three tokens."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from d1.commands.model import model_of, tokenizer_of
from d1.models.kinds import check_room
from d1.sampling.settings import BLOCK_LENGTH, FLAGS, add_model_flags, add_sampling_flags

PLACEHOLDER = re.compile(r"\[MASK(?::([^\]]*))?\]")
LEFT_OUT = ("gen_length", "kv_cache")  # the text gives the number of tokens, and there is no cache here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_path", metavar="MODEL", help="folder or hub name of a model, or an adapter's folder")
    parser.set_defaults(plain_chat_template=False)
    parser.add_argument("text", metavar="TEXT", help="[MASK:3] is three tokens, [MASK] one; the rest does not change")
    add_model_flags(parser, leave_out=("model_path", "plain_chat_template"))
    group = parser.add_argument_group("sampling")
    add_sampling_flags(
        group,
        LEFT_OUT,
        block_length={"help": f"masks per block, left to right (default: the model's own, or {BLOCK_LENGTH})"},
        diffusion_steps={"help": "forward passes (default: one per mask)"},
        sampler={"help": "exact or parallel: there is no cache here (default: %(default)s)"},
    )


def run(args: argparse.Namespace) -> None:
    """Prints the text with its placeholders filled in."""
    pieces = pieces_of(args.text)
    import torch

    from d1.masking import keyed_generator
    from d1.models.folder import ModelFolder
    from d1.sampling import infill
    from d1.sampling.infilling import infill_settings

    tokenizer = tokenizer_of(args)
    ids, hidden, before, after = encoded(tokenizer, pieces)
    names = {name: name for name in FLAGS if name not in (*LEFT_OUT, "seed")} | {"diffusion_steps": "steps"}
    options = {field: getattr(args, name) for name, field in names.items()}
    config = ModelFolder.read(args.model_path, args.checkpoint_path).config
    infill_settings(config, sum(hidden), **options)
    check_room(config, len(ids) - sum(hidden), sum(hidden))
    model = model_of(args)
    options |= {
        "mask_token_id": tokenizer.mask_token_id,
        "generator": [keyed_generator(args.seed, device=model.device)],
    }
    given, masked = (torch.tensor([row], device=model.device) for row in (ids, hidden))
    filled = infill(model, given, masked, **options).ids[0]
    sys.stdout.write(f"{tokenizer.decode(filled[before : len(ids) - after])}\n")


def pieces_of(text: str) -> list[str | int]:
    """The text between placeholders, and for each placeholder its number of tokens."""
    pieces: list[Any] = PLACEHOLDER.split(text)
    for index, count in list(enumerate(pieces))[1::2]:
        if count is not None and (not count.isdecimal() or int(count) < 1):
            raise ValueError(f"[MASK:{count}] has no number of tokens: write [MASK:3] for three, [MASK] for one")
        pieces[index] = int(count or 1)
    # `split` alternates texts and counts, so that one piece means no placeholder.
    if len(pieces) == 1:
        raise ValueError("the text has no placeholder: write [MASK:3] where three tokens are missing, [MASK] for one")
    return [piece for piece in pieces if piece != ""]


def encoded(tokenizer: Any, pieces: list[str | int]) -> tuple[list[int], list[bool], int, int]:
    """The ids, which of them are hidden, and the number of special tokens that the tokenizer adds before and after.

    Pieces are tokenised one by one, so that a placeholder always has its number of tokens, whatever its neighbours are.
    """
    from d1.models.tokenizer import encode_text

    special = list(tokenizer("")["input_ids"])  # [BOS], or [CLS] and [SEP]
    before = (len(special) + 1) // 2
    ids, hidden, after = special[:before], [False] * before, special[before:]
    for piece in pieces:
        own = [tokenizer.mask_token_id] * piece if isinstance(piece, int) else encode_text(tokenizer, piece)
        if isinstance(piece, str) and tokenizer.mask_token_id in own:
            raise ValueError(
                f"the text {piece!r} has {tokenizer.mask_token}, the model's own mask token, which would not be filled "
                "in: write [MASK] where a token is missing"
            )
        ids += own
        hidden += [isinstance(piece, int)] * len(own)
    return ids + after, hidden + [False] * len(after), before, len(after)
