"""python -m d1 export SRC OUT --format llada: a model in a released format, for that format's own code."""

from __future__ import annotations

import argparse

from d1.models.kinds import KINDS

FORMATS = [kind for kind, row in KINDS.items() if row.release is not None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--format", choices=FORMATS, required=True, help="the model_type of its config.json")


def run(args: argparse.Namespace) -> None:
    from d1.models.convert import export

    export(args.source, args.out, args.format)
