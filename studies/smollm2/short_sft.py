"""A short SFT of four arms on a CPU: PROTOCOL.md, section 5. A line per arm in data/short_sft.jsonl.

    D1_FILES=FOLDER python -m studies.smollm2.short_sft --model SmolLM2-135M-Instruct.Q4_1.gguf    # hours
    python -m smollm.model tiny runs/tiny
    D1_FILES=FOLDER python -m studies.smollm2.short_sft --model runs/tiny --tiny

A stopped run continues: arms with a line are skipped, and SFT resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from studies.json_lines import append_line, read_lines
from studies.smollm2.steps import (
    ARMS,
    CO_LOSS,
    Arm,
    Study,
    bits_per_byte,
    convert,
    convert_source,
    judge,
    losses_of,
    sft_flags,
    write_rows,
)

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data" / "short_sft.jsonl"
STEPS = 128  # of 32 rows
LEFT_TO_RIGHT = ("--masked_weight", "0", "--causal_weight", "1")

# Arm -> the conversion that it starts from; the block of its sampler; the losses of its stages, of equally many steps
SHORT_ARMS: dict[str, tuple[str, int, Sequence[tuple[str, ...]]]] = {
    "shift": ("shift", ARMS["shift"].block, [CO_LOSS]),
    "in_place": ("in_place", ARMS["in_place"].block, [CO_LOSS]),
    "ar_first": ("shift", ARMS["shift"].block, [LEFT_TO_RIGHT, CO_LOSS]),
    "ar": ("shift", 1, [LEFT_TO_RIGHT]),  # in blocks of one token, it is the autoregressive model
}

logger = logging.getLogger(__name__)


def train_short(study: Study, name: str) -> dict[str, Any]:
    """SFT of an arm in one or two stages, then its judgement on the validation problems."""
    conversion, block, losses = SHORT_ARMS[name]
    start = study.path(f"{conversion}-base")
    line: dict[str, Any] = {"settings": [], "losses": [], "seconds": 0.0}
    for stage in range(len(losses)):
        words = stage_flags(study, name, stage, start)
        start = study.path(f"short-{name}-{stage}")
        train_stage(words)
        trained = training_line(study, words, start)
        line["settings"].append(trained["settings"])
        line["losses"].append(trained["losses"])
        line["seconds"] += trained["seconds"]
    arm = Arm(convert=None, streams=2, block=block)
    return line | judge(study, start, arm, ["validation"]) | {"bits": bits_per_byte(study, start, arm)}


def stage_flags(study: Study, name: str, stage: int, start: Path, out: str | None = None) -> list[str]:
    """The flags of an arm's SFT in a stage, of the model in `start`. The stage's number is its seed."""
    losses = SHORT_ARMS[name][2]
    out = out or f"short-{name}-{stage}"
    flags: list[object] = [*sft_flags(study, losses[stage], stage, out, rate=3e-4)]
    flags += ["--model_name", start, "--train_data", study.path("sft.jsonl"), "--resume"]
    # In place of the same flags of the full study
    flags += ["--packing", "--batch_size", 16, "--grad_accum_steps", 2, "--eos_padding", 16]
    steps = (8 if study.tiny else STEPS) // len(losses)
    flags += ["--max_steps", steps, "--logging_steps", 1 if study.tiny else 4, "--eval_steps", 32]
    return [*map(str, flags)]


def training_line(study: Study, words: list[str], out: Path) -> dict[str, Any]:
    """What a line says of SFT that had these flags and wrote to the folder `out`."""
    return {"settings": without_folder(study, words), "losses": losses_of(out), "seconds": seconds_of(out)}


def train_stage(words: list[str]) -> None:
    from d1.sft import train

    train.main(train.make_parser().parse_args(words))


def without_folder(study: Study, words: list[str]) -> list[str]:
    """Flags as the lines of results have them, without folders of this machine."""
    return [word.replace(str(study.folder), "OUTPUT_DIR").removeprefix(f"{ROOT}/") for word in words]


def seconds_of(run: Path) -> float:
    """Seconds of training that the log of a run has."""
    return float(sum(log.get("train_runtime", 0.0) for log in read_lines(run / "metrics.jsonl")))


def write_files(study: Study, conversion: str) -> None:
    """Write the rows, and the converted model, if they are not there yet."""
    if not study.path("ar/tokenizer_config.json").exists():  # the last file that these steps write
        write_rows(study)
        convert_source(study)
    if not study.path(f"{conversion}-base").exists():
        convert(study, conversion)


def main(args: argparse.Namespace) -> None:
    def write_and_train(study: Study, name: str) -> dict[str, Any]:
        write_files(study, SHORT_ARMS[name][0])
        return train_short(study, name)

    do_missing(study_of(args, DATA), SHORT_ARMS, write_and_train)


def do_missing(study: Study, names: Iterable[str], do: Callable[[Study, str], dict[str, Any]]) -> None:
    """Append what `do` returns as the line of each job that has none."""
    for name in names:
        if name not in study.lines():
            logger.info("%s: %s starts", time.strftime("%H:%M:%S"), name)
            append_line(study.data, {"job": name, **do(study, name), **run_record()})


def study_of(args: argparse.Namespace, data: Path) -> Study:
    """The study of parsed arguments, with its folder; the lines of a tiny one go there, too."""
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return Study(args.model, folder, folder / data.name if args.tiny else data, args.tiny)


def make_parser(about: str | None = __doc__) -> argparse.ArgumentParser:
    parser = OneLineParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the .gguf file, or a folder of a Llama")
    parser.add_argument("--output_dir", default="runs/smollm2-short", help="of the models (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a few rows and steps, with the lines in OUTPUT_DIR")
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.smollm2.short_sft", lambda: main(make_parser().parse_args()))
