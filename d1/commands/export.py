"""python -m d1 export SRC OUT --format llada: a model under LLaDA's own names, for LLaDA's own code."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--format", choices=["llada"], required=True)


def run(args: argparse.Namespace) -> None:
    from d1.models.convert import export_llada

    export_llada(args.source, args.out)
