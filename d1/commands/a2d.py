"""python -m d1 a2d SRC OUT: an autoregressive Llama, Qwen or Gemma becomes a masked diffusion model, ready for SFT."""

from __future__ import annotations

import argparse

from d1.ranges import COUNT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--mask_token", default="<|mask|>", help="a spare token of the tokenizer, or a new name")
    parser.add_argument("--keep_shift", action="store_true", help="go on predicting the next position, as Dream does")
    parser.add_argument("--block_size", type=COUNT, help="attend to the token's own block and those before it alone")
    parser.add_argument("--plain_chat_template", action="store_true", help="for a tokenizer that has none")


def run(args: argparse.Namespace) -> None:
    from d1.models.convert import a2d

    a2d(args.source, args.out, args.mask_token, args.keep_shift, args.plain_chat_template, args.block_size)
