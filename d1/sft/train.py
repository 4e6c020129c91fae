"""Masked supervised fine-tuning of a diffusion language model.

    accelerate launch --config_file SFT/ddp_config.yaml --num_processes 2 -m d1.sft.train \\
        --grad_accum_steps 4 --batch_size 1 --num_epochs 20

The fine-tuned model (or its LoRA adapter), the checkpoints and the logged losses are saved to OUTPUT_DIR/JOB_NAME,
which diffu_grpo_train.py and eval.py accept as a model path.
"""

from __future__ import annotations

from d1.runs.cli import Program
from d1.sft.config import SFTConfig

program = Program(SFTConfig, "d1.sft.stage", __doc__)
make_parser, main, cli = program.make_parser, program.main, program.cli

if __name__ == "__main__":
    cli("d1.sft.train")
