"""Masked SFT: `d1.sft.train` under d1's name.

    accelerate launch --config_file ddp_config.yaml --num_processes 2 sft_train.py \\
        --grad_accum_steps 4 --batch_size 1 --num_epochs 20
"""

from d1.sft.train import cli, main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    cli("sft_train.py")
