"""python -m d1 export SRC OUT --format llada: a model under LLaDA's own names, for LLaDA's own code."""

from __future__ import annotations

import argparse

FORMATS = {"llada": "export_llada"}  # name -> the function of d1.models.convert that writes it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--format", choices=FORMATS, required=True)


def run(args: argparse.Namespace) -> None:
    from d1.models import convert

    getattr(convert, FORMATS[args.format])(args.source, args.out)
