"""Preference training of a masked diffusion language model: VRPO (pairs) or ELBO-KTO (labels).

    accelerate launch --config_file launch/ddp.yaml --num_processes 8 -m d1.preference.train \\
        --method vrpo --train_data pairs.jsonl

The model (or its LoRA adapter) is saved to OUTPUT_DIR/JOB_NAME, which eval.py and the other stages take as a model
path; so are the checkpoints and everything that is logged.
"""

from __future__ import annotations

from d1.preference.config import PreferenceConfig
from d1.preference.methods import METHODS
from d1.runs.cli import Program

program = Program(PreferenceConfig, "d1.preference.stage", __doc__, METHODS)
make_parser, main, cli = program.make_parser, program.main, program.cli

if __name__ == "__main__":
    cli("d1.preference.train")
