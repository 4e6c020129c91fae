"""Distillation: `d1.distill.train`, from this folder.

accelerate launch --config_file ../launch/ddp.yaml --num_processes 8 distill_train.py --train_data gsm8k
"""

from d1.distill.train import cli, main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    cli("distill_train.py")
