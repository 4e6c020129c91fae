"""`d1 a2d`, `d1 merge` and `d1 export`: make a model folder from another one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from d1.models.kinds import KINDS
from d1.ranges import COUNT

FORMATS = [name for name, kind in KINDS.items() if kind.release_config is not None]


def add_a2d(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="model folder or hub name, or GGUF file")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--mask_token", default="<|mask|>", help="a spare token of the tokenizer, or a new name")
    parser.add_argument("--keep_shift", action="store_true", help="still predict the next position, as Dream does")
    parser.add_argument("--block_size", type=COUNT, help="attend only to a token's own block and earlier blocks")
    parser.add_argument(
        "--causal_context",
        action="store_true",
        help="with --block_size: finished text stays causal, and a block is read in both directions while it is filled",
    )
    parser.add_argument("--plain_chat_template", action="store_true", help="for a tokenizer without chat template")


def a2d(args: argparse.Namespace) -> None:
    from d1.models.convert import a2d
    from d1.models.formats.gguf import gguf_file, gguf_types

    names = ("source", "out", "mask_token", "keep_shift", "plain_chat_template", "block_size", "causal_context")
    a2d(**{name: getattr(args, name) for name in names})
    file = gguf_file(args.source)
    source = args.source if file is None else f"{file}, unpacked from {gguf_types(file)}"
    attention = "full attention" if args.block_size is None else f"blocks of {args.block_size}"
    if args.causal_context:
        attention += " after a causal context"
    if args.keep_shift:
        attention += ", each token predicted by the one before it"
    say_written(args.out, f"{source}, with {attention}. Next, train it: d1 sft --model_name {args.out}")


def add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("adapters", metavar="ADAPTER", nargs="+", help="in order of training")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--dtype", default="auto", help="dtype of the merged weights (default: that of BASE)")
    parser.add_argument("--device", help="where to compute, e.g. cuda")


def merge(args: argparse.Namespace) -> None:
    from d1.models.convert import merge

    merge(args.base, args.adapters, args.out, args.dtype, args.device)
    say_written(args.out, f"{args.base} with {' and '.join(args.adapters)} merged into it")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--format", choices=FORMATS, required=True, help="the model_type of its config.json")


def export(args: argparse.Namespace) -> None:
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
