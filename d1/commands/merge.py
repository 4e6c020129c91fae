"""python -m d1 merge BASE ADAPTER [ADAPTER ...] OUT: LoRA adapters become part of the weights."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("adapters", metavar="ADAPTER", nargs="+", help="in order of training")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--dtype", default="auto", help="of the merged weights (default: that of BASE)")
    parser.add_argument("--device", help="where to compute, e.g. cuda")


def run(args: argparse.Namespace) -> None:
    from d1.models.convert import merge

    merge(args.base, args.adapters, args.out, args.dtype, args.device)
