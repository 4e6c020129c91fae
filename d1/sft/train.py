"""Masked supervised fine-tuning of a diffusion language model.

    accelerate launch --config_file SFT/ddp_config.yaml --num_processes 2 -m d1.sft.train \\
        --grad_accum_steps 4 --batch_size 1 --num_epochs 20

The fine-tuned model (or its LoRA adapter), the checkpoints and the logged losses are saved to OUTPUT_DIR/JOB_NAME,
which diffu_grpo_train.py and eval.py accept as a model path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from d1.runs.cli import ConfigParser, quick_imports, run_script
from d1.sft.config import SFTConfig

if TYPE_CHECKING:
    from d1.sft.trainer import dLLMTrainer


def make_parser(prog: str | None = None) -> ConfigParser:
    return ConfigParser(SFTConfig, prog, __doc__)


def main(args: SFTConfig) -> dLLMTrainer | None:
    """Train, and save the model and the Trainer's state.

    Returns the trainer, or None if the run was already finished.

    Raises:
        ValueError, OSError: a setting, a file or a row is wrong; raised before the model is loaded where possible.
    """
    with quick_imports():  # only now: they take seconds, and `--help` does not need them
        from d1.runs.stage import run
        from d1.sft.stage import stage

    return run(stage(args))


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run SFT as the command `prog`, and exit. Default of `arguments`: those of the command line."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))


if __name__ == "__main__":
    cli("d1.sft.train")
