"""python -m d1 fill MODEL "The capital of [MASK:3] is Paris": fill in placeholders, here with three tokens."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from typing import Any

from d1.commands.model import model_argument, model_of
from d1.files import harmless
from d1.models.kinds import check_room
from d1.ranges import setting
from d1.sampling.settings import BLOCK_LENGTH, ModelFlags, SamplingFlags, sampling_flag

PLACEHOLDER = re.compile(r"\[MASK(?::([^\]]*))?\]")


@dataclass(frozen=True, kw_only=True)
class FillModelFlags(ModelFlags):
    model_path: str = model_argument()
    plain_chat_template: bool = False  # nothing is put into a chat template
    text: str = setting(
        help="[MASK:3] is three tokens, [MASK] one; the rest does not change", positional=True, metavar="TEXT"
    )


@dataclass(frozen=True, kw_only=True)
class FillFlags(SamplingFlags, FillModelFlags):
    gen_length: int | None = None  # the text gives the number of tokens
    block_length: int | None = sampling_flag(
        "block_length",
        help=f"masks per block, left to right (default: the model's own, or {BLOCK_LENGTH})",
        group="sampling",
    )
    diffusion_steps: int | None = sampling_flag(
        "steps", help="forward passes (default: one per mask)", aliases=["--steps"]
    )
    sampler: str = sampling_flag("sampler", help="exact or parallel: there is no cache here (default: %(default)s)")
    kv_cache: str | None = None


def run(args: FillFlags) -> None:
    """Prints the text with its placeholders filled in."""
    pieces = pieces_of(args.text)
    import torch

    from d1.masking import keyed_generator
    from d1.models.tokenizer import decode_text
    from d1.sampling import infill
    from d1.sampling.graphs import check_compile
    from d1.sampling.infilling import infill_settings

    tokenizer = args.load_tokenizer()
    ids, hidden, before, after = encoded(tokenizer, pieces)
    options: dict[str, Any] = {"steps": args.diffusion_steps}
    for flag in fields(SamplingFlags):
        if flag.name not in ("gen_length", "kv_cache", "diffusion_steps", "seed"):
            options[flag.name] = getattr(args, flag.name)
    folder = args.read_folder()
    check_compile(args.compile, folder.config, kernel=args.attn_implementation)
    infill_settings(folder.config, sum(hidden), **options)
    check_room(folder.config, len(ids) - sum(hidden), sum(hidden))
    model = model_of(args, folder)
    options |= {
        "mask_token_id": tokenizer.mask_token_id,
        "generator": [keyed_generator(args.seed, device=model.device)],
    }
    given, masked = (torch.tensor([row], device=model.device) for row in (ids, hidden))
    filled = infill(model, given, masked, **options).ids[0]
    text = decode_text(tokenizer, filled[before : len(ids) - after].tolist())
    sys.stdout.write(f"{harmless(text)}\n")


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


def encode_piece(tokenizer: Any, piece: str, before: list[int]) -> list[int]:
    """The ids of a piece of text after the ids `before`, which end with a placeholder or are none.

    They are the first of `encodings_after`, with the mask token as an anchor, too, that neither adds nor loses a space;
    ValueError if all do. A tokenizer that decodes with a space between any two tokens is not checked.
    """
    from d1.models.tokenizer import ANCHORS, decode_text, encode_text, encodings_after

    plain = encode_text(tokenizer, piece)
    mask = tokenizer.mask_token
    if not before or decode_text(tokenizer, [tokenizer.mask_token_id] * 2) != mask * 2:
        return plain
    # Only spaces are compared: a tokenizer may change accents, capitals or signs of any text.
    text = decode_text(tokenizer, before) + piece.replace(piece.strip(), decode_text(tokenizer, plain).strip())
    for ids in encodings_after(tokenizer, piece, (mask, *ANCHORS)):
        if decode_text(tokenizer, before + ids) == text:
            return ids
    decoded = decode_text(tokenizer, before + plain).removeprefix(decode_text(tokenizer, before))
    raise ValueError(
        f"{tokenizer.name_or_path} would write the text {piece!r} after a placeholder as {decoded!r}: change the text, "
        "or move the placeholder to its end"
    )


def encoded(tokenizer: Any, pieces: list[str | int]) -> tuple[list[int], list[bool], int, int]:
    """The ids, which of them are hidden, and the number of special tokens that the tokenizer adds before and after.

    Pieces are tokenised one by one, so that a placeholder always has its number of tokens, whatever its neighbours are.
    """
    special = list(tokenizer("")["input_ids"])  # [BOS], or [CLS] and [SEP]
    before = (len(special) + 1) // 2
    ids, hidden, after = special[:before], [False] * before, special[before:]
    for piece in pieces:
        if isinstance(piece, int):
            piece_ids = [tokenizer.mask_token_id] * piece
        else:
            piece_ids = encode_piece(tokenizer, piece, ids[before:])
            if tokenizer.mask_token_id in piece_ids:
                raise ValueError(
                    f"the text {piece!r} has {tokenizer.mask_token}, the model's own mask token, which would not be "
                    "filled in: write [MASK] where a token is missing"
                )
        ids += piece_ids
        hidden += [isinstance(piece, int)] * len(piece_ids)
    return ids + after, hidden + [False] * len(after), before, len(after)
