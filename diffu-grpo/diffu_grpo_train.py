"""diffu-GRPO: `d1.rl.train` under d1's name.

python diffu_grpo_train.py --config pocket.yaml --output_dir ../runs/grpo
"""

from d1.rl.train import cli, main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    cli("diffu_grpo_train.py")
