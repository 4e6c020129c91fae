"""Second halves of a short SFT, from the same autoregressive first half, on a CPU: PROTOCOL.md, section 6.

    D1_FILES=FOLDER python -m studies.smollm2.second_half --model SmolLM2-135M-Instruct.Q4_1.gguf    # hours
    python -m smollm.model tiny runs/tiny
    D1_FILES=FOLDER python -m studies.smollm2.second_half --model runs/tiny --tiny

A line per second half goes to data/second_half.jsonl. A stopped run continues, as that of `short_sft.py`, whose arm
`ar_first` has the first half, and the second half that the others are compared with.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from d1.runs.cli import run_script
from studies.smollm2 import short_sft
from studies.smollm2.steps import Arm, Study, answer_bits, judge

DATA = short_sft.DATA.with_name("second_half.jsonl")
FIRST = "ar_first"  # the arm whose first half all have
HALVES = (FIRST, "forward_kl", "blocks_of_4", "annealed", "aligned")
SMALL_BLOCK = 4


def train_first_half(study: Study) -> Path:
    """The model after the autoregressive half."""
    conversion = short_sft.SHORT_ARMS[FIRST][0]
    short_sft.write_files(study, conversion)
    short_sft.train_stage(short_sft.stage_flags(study, FIRST, 0, study.path(f"{conversion}-base")))
    return study.path(f"short-{FIRST}-0")


def train_second_half(study: Study, name: str) -> dict[str, Any]:
    """SFT of a second half, then its judgement on the validation problems."""
    from d1.sft import stage as sft
    from d1.sft import train

    start = first = train_first_half(study)
    block = short_sft.SHORT_ARMS[FIRST][1]
    if name == "blocks_of_4":
        block = SMALL_BLOCK
        start = with_blocks(first, study.path(f"first-{name}"), block)
    out = f"short-{FIRST}-1" if name == FIRST else f"second-{name}"
    words = short_sft.stage_flags(study, FIRST, 1, start, out)
    stage = sft.stage(train.make_parser().parse_args(words))

    def prepare() -> tuple[Any, Callable[[], Any]]:
        facts, make_trainer = stage.prepare()
        return facts, lambda: trainer_of(name, make_trainer(), first)

    replace(stage, prepare=prepare).run()
    trained = study.path(out)
    line = short_sft.training_line(study, words, trained)
    arm = Arm(convert=None, streams=2, block=block)
    bits, sizes = zip(*answer_bits(study, trained, arm), strict=True)
    line |= judge(study, trained, arm, ["validation"])
    return line | {"bits": [round(one, 3) for one in bits], "bytes": list(sizes)}


def with_blocks(model: Path, out: Path, size: int) -> Path:
    """A copy of a model with a causal context, whose blocks have another size: no weight depends on it."""
    shutil.copytree(model, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoint-*"))
    config = json.loads((out / "config.json").read_text())
    config["block_size"] = size
    (out / "config.json").write_text(json.dumps(config))
    return out


def trainer_of(name: str, trainer: Any, first: Path) -> Any:
    """The trainer of a second half, with the model, rows and settings of the `trainer` of `d1 sft`."""
    from d1.models import load_model
    from studies.smollm2.trainers import AlignedTrainer, AnnealedTrainer, ForwardKLTrainer, parts_of

    if name == "annealed":
        steps = trainer.args.max_steps // 2
        return AnnealedTrainer(steps, **parts_of(trainer))
    if name in ("forward_kl", "aligned"):
        trainer_class = ForwardKLTrainer if name == "forward_kl" else AlignedTrainer
        return trainer_class(load_model(str(first), "float32"), **parts_of(trainer))
    return trainer


def main(args: argparse.Namespace) -> None:
    short_sft.do_missing(short_sft.study_of(args, DATA), HALVES, train_second_half)


def make_parser() -> argparse.ArgumentParser:
    return short_sft.make_parser(__doc__)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.smollm2.second_half", lambda: main(make_parser().parse_args()))
