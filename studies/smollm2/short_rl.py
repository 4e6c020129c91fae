"""RL, or more SFT in the same time, after the short SFT of `shift`, on a CPU: PROTOCOL.md, sections 8, 10 and 11.

    D1_FILES=FOLDER python -m studies.smollm2.short_rl --model SmolLM2-135M-Instruct.Q4_1.gguf    # hours
    python -m smollm.model tiny runs/tiny
    D1_FILES=FOLDER python -m studies.smollm2.short_rl --model runs/tiny --tiny

A line per arm goes to data/short_rl.jsonl. A stopped run continues, as that of `short_sft.py`, whose arm `shift` all
arms start from.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any, NamedTuple

from d1.runs.cli import run_script
from studies.json_lines import read_lines
from studies.smollm2 import short_sft
from studies.smollm2.short_sft import seconds_of, stage_flags, train_stage, training_line, without_folder
from studies.smollm2.steps import BLOCK, TASK, Arm, Study, bits_per_byte, judge

DATA = short_sft.DATA.with_name("short_rl.jsonl")
RECIPE = short_sft.ROOT / "recipes" / "smollm2-135m-rl.yaml"
START = "shift"  # the arm of the short SFT that all arms continue
ROLLOUTS = 40
SFT_STEPS = 290  # which take as long as the rollouts: PROTOCOL.md


class RLArm(NamedTuple):
    """What differs between arms of RL: the rate, the tokens of a block, and the share of hidden prompt tokens."""

    rate: float = 3e-5
    block: int = BLOCK
    p_mask_prompt: float = 0.15


RL_ARMS = {
    "rl": RLArm(),
    "blocks_of_1": RLArm(block=1),
    "low_rate": RLArm(rate=1e-5),
    "shown_blocks_of_1": RLArm(block=1, p_mask_prompt=0.0),
    "shown": RLArm(p_mask_prompt=0.0),
}
SHORT_RL_ARMS = ("rl", "more", "blocks_of_1", "low_rate", "shown_blocks_of_1", "shown")  # in the order of the runs


def block_of(name: str) -> int:
    """Tokens of a block, in RL and in the judgement of an arm."""
    return RL_ARMS[name].block if name in RL_ARMS else BLOCK


def train_start(study: Study) -> Path:
    """The model after the short SFT."""
    conversion = short_sft.SHORT_ARMS[START][0]
    short_sft.write_files(study, conversion)
    train_stage(stage_flags(study, START, 0, study.path(f"{conversion}-base")))
    return study.path(f"short-{START}-0")


def train_rl(study: Study, start: Path, name: str, out: Path, seed: int = 0) -> dict[str, Any]:
    """RL by d1's method, with the recipe of `make smollm`, and the settings of the arm."""
    from d1.rl import train

    arm = RL_ARMS[name]
    flags: list[object] = ["--config", RECIPE, "--model_path", start, "--output_dir", out]
    flags += ["--dataset", TASK, "--data_file", study.path("rl.jsonl"), "--max_prompt_length", study.longest - 64]
    flags += ["--learning_rate", arm.rate, "--block_length", arm.block, "--p_mask_prompt", arm.p_mask_prompt]
    flags += ["--seed", seed, "--max_steps", 4 if study.tiny else 2 * ROLLOUTS]
    flags += ["--per_device_train_batch_size", 32, "--gradient_accumulation_steps", 2]  # half the memory
    flags += ["--use_cpu", "true", "--bf16", "true", "--eval_strategy", "no", "--resume_from_checkpoint", "true"]
    words = [*map(str, flags)]
    train.main(*train.make_parser().parse_args_and_config(words))
    logs = [log for log in read_lines(out / "metrics.jsonl") if "loss" in log]
    return {
        "settings": without_folder(study, words),
        "right": [round(log["rewards/accuracy/mean"], 4) for log in logs],
        "ratio_max": [round(log["ratio_max"], 4) for log in logs],
        "entropy": [round(log["entropy"], 4) for log in logs],  # nats per scored token, in the estimator's states
        "seconds": seconds_of(out),
    }


def train_more(study: Study, start: Path, out: Path, seed: int = 1) -> dict[str, Any]:
    """More SFT: a second stage of the short SFT, with new rows and a rate of its own from 3e-4 to 0."""
    words = stage_flags(study, START, 0, start, out.name)
    words += ["--seed", str(seed), "--max_steps", "8" if study.tiny else str(SFT_STEPS)]  # the last of two flags counts
    train_stage(words)
    return training_line(study, words, out)


def train_and_judge(study: Study, name: str) -> dict[str, Any]:
    """The line of an arm: its training, and its judgement on the validation problems with the blocks that it had. Bits
    per byte are those in the blocks of the short SFT."""
    start = train_start(study)
    model = study.path(f"short-{name}")
    line = train_rl(study, start, name, model) if name in RL_ARMS else train_more(study, start, model)
    judged = judge(study, model, Arm(convert=None, streams=2, block=block_of(name)), ["validation"])
    return line | judged | {"bits": bits_per_byte(study, model, Arm(convert=None, streams=2))}


def main(args: argparse.Namespace) -> None:
    short_sft.do_missing(short_sft.study_of(args, DATA), SHORT_RL_ARMS, train_and_judge)


def make_parser() -> argparse.ArgumentParser:
    return short_sft.make_parser(__doc__)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.smollm2.short_rl", lambda: main(make_parser().parse_args()))
