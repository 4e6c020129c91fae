"""Preference training: `d1.preference.train`, from this folder.

accelerate launch --config_file ../launch/ddp.yaml --num_processes 8 prefer_train.py --train_data pairs.jsonl
"""

from d1.preference.train import cli, main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    cli("prefer_train.py")
