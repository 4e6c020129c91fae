"""Samplers with fewer passes, for models of the short SFT: PROTOCOL.md, section 9.

    python -m studies.smollm2.samplers --output_dir FOLDER    # the folder of short_sft.py; minutes on a CPU

A line per model and sampler goes to data/samplers.jsonl. A stopped run continues.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d1.runs.cli import OneLineParser, run_script
from studies.smollm2 import short_sft
from studies.smollm2.steps import BLOCK, LENGTH, Arm, Study, judge

DATA = short_sft.DATA.with_name("samplers.jsonl")
MODELS = {"shift": "short-shift-0", "more": "short-more"}  # of sections 5 and 8 -> their folders
THRESHOLD = ("--sampler", "parallel", "--reveal", "threshold", "--reveal_level")
SAMPLERS: dict[str, Sequence[str]] = {
    "exact": (),
    "threshold 0.9": (*THRESHOLD, "0.9"),
    "threshold 0.7": (*THRESHOLD, "0.7"),
    "two per pass": ("--diffusion_steps", str(LENGTH // 2)),
}


def judge_samplers(study: Study) -> None:
    """Judge each model with each sampler on the validation problems."""
    cases = {f"{model}, {sampler}": (MODELS[model], SAMPLERS[sampler]) for model in MODELS for sampler in SAMPLERS}
    arm = Arm(convert=None, streams=2, block=BLOCK)

    def judge_case(study: Study, name: str) -> dict[str, Any]:
        folder, flags = cases[name]
        return judge(study, study.path(folder), arm, ["validation"], flags)

    short_sft.do_missing(study, cases, judge_case)


def main(args: argparse.Namespace) -> None:
    judge_samplers(Study("", Path(args.output_dir).resolve(), DATA))


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/smollm2-short", help="of short_rl.py (default: %(default)s)")
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.smollm2.samplers", lambda: main(make_parser().parse_args()))
