"""The short SFT, its twin, RL and more SFT with three seeds, judged on test problems: PROTOCOL.md, section 12.

    D1_FILES=FOLDER python -m studies.smollm2.three_seeds --model SmolLM2-135M-Instruct.Q4_1.gguf    # hours
    python -m smollm.model tiny runs/tiny
    D1_FILES=FOLDER python -m studies.smollm2.three_seeds --model runs/tiny --tiny

A line per arm and seed goes to data/three_seeds.jsonl. A stopped run continues, as that of `short_sft.py`. Models of
seed 0 that `short_sft.py` and `short_rl.py` left in OUTPUT_DIR are not trained again.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from d1.runs.cli import run_script
from studies.smollm2 import short_sft
from studies.smollm2.short_rl import START, train_more, train_rl
from studies.smollm2.short_sft import SHORT_ARMS, stage_flags, train_stage, training_line
from studies.smollm2.steps import BLOCK, Arm, Study, bits_per_byte, judge

DATA = short_sft.DATA.with_name("three_seeds.jsonl")
CONVERSION = SHORT_ARMS[START][0]  # that all arms start from

# In the order of the runs: arm and seed
RUNS = [
    *[("shift", 1), ("ar", 1), ("shift", 2), ("ar", 2)],
    *[("shift", 0), ("ar", 0), ("low_rate", 0), ("more", 0)],
    *[("low_rate", 1), ("more", 1), ("low_rate", 2), ("more", 2)],
]
FOLDERS_OF_SEED_0 = {"shift": "short-shift-0", "ar": "short-ar-0", "low_rate": "short-low_rate", "more": "short-more"}


def folder_of(study: Study, arm: str, seed: int) -> Path:
    """The model of an arm and a seed."""
    return study.path(FOLDERS_OF_SEED_0[arm] if seed == 0 else f"seed-{seed}-{arm}")


def train(study: Study, arm: str, seed: int) -> dict[str, Any]:
    """Train an arm with a seed; a run that is finished is not trained again."""
    out, start = folder_of(study, arm, seed), folder_of(study, START, seed)
    if arm == "low_rate":
        return train_rl(study, start, arm, out, seed)
    if arm == "more":
        return train_more(study, start, out, seed + 1)
    words = stage_flags(study, arm, 0, study.path(f"{CONVERSION}-base"), out.name)
    words += ["--seed", str(seed)]  # the last of two flags counts
    train_stage(words)
    return training_line(study, words, out)


def train_and_judge(study: Study, arm: str, seed: int) -> dict[str, Any]:
    """The line of an arm and a seed."""
    short_sft.write_files(study, CONVERSION)
    line = {"arm": arm, "seed": seed} | train(study, arm, seed)
    model, sampled = folder_of(study, arm, seed), Arm(convert=None, streams=2, block=1 if arm == "ar" else BLOCK)
    return line | judge(study, model, sampled) | {"bits": bits_per_byte(study, model, sampled)}


def main(args: argparse.Namespace) -> None:
    runs = {f"{arm}-{seed}": (arm, seed) for arm, seed in RUNS}
    study = short_sft.study_of(args, DATA)
    short_sft.do_missing(study, runs, lambda study, name: train_and_judge(study, *runs[name]))


def make_parser() -> argparse.ArgumentParser:
    return short_sft.make_parser(__doc__)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.smollm2.three_seeds", lambda: main(make_parser().parse_args()))
