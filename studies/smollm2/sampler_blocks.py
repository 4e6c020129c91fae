"""The block length of the sampler, for models of the short SFT: PROTOCOL.md, section 7.

    python -m studies.smollm2.sampler_blocks --output_dir FOLDER    # the folder of short_sft.py; minutes on a CPU

A line per model and block length goes to data/sampler_blocks.jsonl. A stopped run continues.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from d1.runs.cli import OneLineParser, run_script
from studies.smollm2 import short_sft
from studies.smollm2.steps import Arm, Study, judge

DATA = short_sft.DATA.with_name("sampler_blocks.jsonl")
MODELS = {"shift": "short-shift-0", "ar_first": "short-ar_first-1"}  # arm -> its last stage
BLOCKS = (1, 2, 4)  # tokens; the models were trained, and judged before, with blocks of 8


def judge_with_blocks(study: Study) -> None:
    """Judge each model with each block length on the validation problems."""
    cases = {f"{arm}-{block}": (folder, block) for block in BLOCKS for arm, folder in MODELS.items()}

    def judge_case(study: Study, name: str) -> dict[str, Any]:
        folder, block = cases[name]
        return judge(study, study.path(folder), Arm(convert=None, streams=2, block=block), ["validation"])

    short_sft.do_missing(study, cases, judge_case)


def main(args: argparse.Namespace) -> None:
    judge_with_blocks(Study("", Path(args.output_dir).resolve(), DATA))


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/smollm2-short", help="of short_sft.py (default: %(default)s)")
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.smollm2.sampler_blocks", lambda: main(make_parser().parse_args()))
