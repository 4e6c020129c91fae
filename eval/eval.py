"""Evaluation: `d1.eval.run` under d1's name.

python eval.py --model_path ../pocket/base --dataset sudoku --gen_length 32 --block_length 8
"""

from d1.eval.run import cli, main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    cli("eval.py")
