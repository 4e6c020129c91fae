"""The table of accuracies: `d1.eval.scores` under d1's name.

python parse_and_get_acc.py results/
"""

from d1.eval.scores import cli, main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    cli("parse_and_get_acc.py")
