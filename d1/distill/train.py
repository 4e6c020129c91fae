"""Distillation of a masked diffusion language model, so that it needs fewer steps: dParallel.

    accelerate launch --config_file launch/ddp.yaml --num_processes 8 -m d1.distill.train \\
        --method dparallel --train_data gsm8k

The model (or its LoRA adapter) is saved to OUTPUT_DIR/JOB_NAME, which eval.py and the other stages take as a model
path; so are the checkpoints, the sampled traces and everything that is logged.
"""

from __future__ import annotations

from d1.distill.config import DistillConfig
from d1.distill.methods import METHODS
from d1.runs.cli import Program

program = Program(DistillConfig, "d1.distill.stage", __doc__, METHODS)
make_parser, main, cli = program.make_parser, program.main, program.cli

if __name__ == "__main__":
    cli("d1.distill.train")
