"""`d1 a2d`, `d1 merge` and `d1 export`: make a model folder from another one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from d1.models.kinds import KINDS
from d1.ranges import COUNT, setting

FORMATS = [name for name, kind in KINDS.items() if kind.release_config is not None]


@dataclass(frozen=True, kw_only=True)
class A2DFlags:
    source: str = setting(help="model folder or hub name, or GGUF file", positional=True, metavar="SRC")
    out: str = setting(positional=True, metavar="OUT")
    mask_token: str = setting("<|mask|>", "a spare token of the tokenizer, or a new name")
    keep_shift: bool = setting(False, "still predict the next position, as Dream does")
    block_size: Annotated[int | None, COUNT] = setting(None, "attend only to a token's own block and earlier blocks")
    causal_context: bool = setting(
        False,
        "with --block_size: finished text stays causal, and a block is read in both directions while it is filled",
    )
    plain_chat_template: bool = setting(False, "for a tokenizer without chat template")


def a2d(args: A2DFlags) -> None:
    from d1.models.convert import a2d
    from d1.models.formats.gguf import gguf_file, gguf_types

    a2d(
        args.source,
        args.out,
        mask_token=args.mask_token,
        keep_shift=args.keep_shift,
        plain_chat_template=args.plain_chat_template,
        block_size=args.block_size,
        causal_context=args.causal_context,
    )
    file = gguf_file(args.source)
    source = args.source if file is None else f"{file}, unpacked from {gguf_types(file)}"
    attention = "full attention" if args.block_size is None else f"blocks of {args.block_size}"
    if args.causal_context:
        attention += " after a causal context"
    if args.keep_shift:
        attention += ", each token predicted by the one before it"
    # Of all weights: the embedding of the new mask token has to be trained, too.
    next_command = f"d1 sft --model_name {args.out} --full_finetuning"
    say_written(args.out, f"{source}, with {attention}. Next, train it: {next_command}")


@dataclass(frozen=True, kw_only=True)
class MergeFlags:
    base: str = setting(positional=True, metavar="BASE")
    adapters: list[str] = setting(help="in order of training", positional=True, metavar="ADAPTER", nargs="+")
    out: str = setting(positional=True, metavar="OUT")
    dtype: str = setting("auto", "dtype of the merged weights (default: that of BASE)")
    device: str | None = setting(None, "where to compute, e.g. cuda")


def merge(args: MergeFlags) -> None:
    from d1.models.convert import merge

    merge(args.base, args.adapters, args.out, args.dtype, args.device)
    say_written(args.out, f"{args.base} with {' and '.join(args.adapters)} merged into it")


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    source: str = setting(positional=True, metavar="SRC")
    out: str = setting(positional=True, metavar="OUT")
    format: str = setting(help="the model_type of its config.json", choices=FORMATS)


def export(args: ExportFlags) -> None:
    from d1.models.convert import export

    export(args.source, args.out, args.format)
    say_written(args.out, f"{args.source}, for the code of {args.format}")


def say_written(out: str, what: str) -> None:
    """Writes a line about the model folder `out` to stderr."""
    from d1.models.kinds import raw_config
    from d1.transformers_bridge import checkpoint_dtype, stored_weights

    count = sum(elements for *_, elements, _ in stored_weights(out))
    kind = raw_config(out)["model_type"] if Path(out, "config.json").is_file() else "an adapter"
    dtype = str(checkpoint_dtype(out)).removeprefix("torch.")
    sys.stderr.write(f"Written: {out} ({kind}, {count:,} parameters in {dtype}): {what}\n")
