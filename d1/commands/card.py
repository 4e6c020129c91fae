"""python -m d1 card RUN [--results scores.json]: a run's model card again, with the results of its evaluation."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder that SFT or RL wrote")
    parser.add_argument("--results", metavar="FILE", help="what `parse_and_get_acc.py --format json` printed")
    parser.add_argument("--hub_model_id", help="the model's name on the hub (default: the folder's)")


def run(args: argparse.Namespace) -> None:
    import json
    import sys
    from pathlib import Path

    from d1.runs.model_card import write_card

    results = json.loads(Path(args.results).read_text()) if args.results else []
    sys.stdout.write(f"{write_card(args.run, args.hub_model_id, results)}\n")
