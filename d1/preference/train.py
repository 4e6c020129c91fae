"""Preference training of a masked diffusion language model: VRPO (pairs) or ELBO-KTO (labels).

    accelerate launch --config_file launch/ddp.yaml --num_processes 8 -m d1.preference.train \\
        --method vrpo --train_data pairs.jsonl

The model (or its LoRA adapter) is saved to OUTPUT_DIR/JOB_NAME, which eval.py and the other stages take as a model
path; so are the checkpoints and everything that is logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from d1.preference.config import PreferenceConfig
from d1.preference.methods import METHODS
from d1.runs.cli import ConfigParser, quick_imports, run_script

if TYPE_CHECKING:
    from d1.preference.trainer import PreferenceTrainer


def make_parser(prog: str | None = None) -> ConfigParser:
    return ConfigParser(PreferenceConfig, prog, __doc__, METHODS)


def main(args: PreferenceConfig) -> PreferenceTrainer | None:
    """Train, and save the model and the Trainer's state.

    Returns the trainer, or None if the run was already finished.

    Raises:
        ValueError, OSError: a setting, a file or a row is wrong; raised before the model is loaded where possible.
    """
    with quick_imports():  # only now: they take seconds, and `--help` does not need them
        from d1.preference.stage import stage
        from d1.runs.stage import run

    return run(stage(args))


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run preference training as the command `prog`, and exit. Default of `arguments`: those of the command line."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))


if __name__ == "__main__":
    cli("d1.preference.train")
