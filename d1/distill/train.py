"""Distillation of a masked diffusion language model, so that it needs fewer steps: dParallel, T3D, d-OPSD.

    accelerate launch --config_file launch/ddp.yaml --num_processes 8 -m d1.distill.train \\
        --method dparallel --train_data gsm8k

The model (or its LoRA adapter) is saved to OUTPUT_DIR/JOB_NAME, which eval.py and the other stages take as a model
path; so are the checkpoints, the sampled traces and everything that is logged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from d1.distill.config import DistillConfig
from d1.distill.methods import METHODS
from d1.runs.entry import quick_imports, run_script
from d1.runs.output_dir import check_output_dir
from d1.runs.settings import ConfigParser

if TYPE_CHECKING:
    from d1.distill.trainer import DistillTrainer


def make_parser(prog: str | None = None) -> ConfigParser:
    as_written = argparse.RawDescriptionHelpFormatter
    return ConfigParser(DistillConfig, prog, METHODS, description=__doc__, formatter_class=as_written)


def main(args: DistillConfig) -> DistillTrainer | None:
    """Trains, and saves the model and the Trainer's state.

    Returns the trainer, or None where the run was finished already.

    Raises:
        ValueError, OSError: a file or a row makes no sense; wherever possible, before the model is loaded.
    """
    check_output_dir(Path(args.output_dir) / args.job_name)
    with quick_imports():  # only now: they take seconds, and `--help` needs none of them
        from d1.distill.setup import stage
        from d1.runs.skeleton import run

    return run(stage(args))


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs distillation as the command `prog`, with `arguments` in place of those of the command line; exits."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))


if __name__ == "__main__":
    cli("d1.distill.train")
