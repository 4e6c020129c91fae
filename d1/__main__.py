"""Tools, one command each: python -m d1 COMMAND --help says what it takes.

python -m d1 sft --model_name X --train_data FILE   # masked supervised fine-tuning
python -m d1 rl --model_path X --dataset sudoku     # diffu-GRPO, and the other methods
python -m d1 eval --model_path X --dataset sudoku   # completions of a task's problems, and their accuracy
python -m d1 parse results/                         # the accuracies of generation files
python -m d1 a2d SRC OUT                            # autoregressive Llama/Qwen -> masked diffusion model
python -m d1 merge BASE ADAPTER [ADAPTER ...] OUT   # LoRA adapters become part of the weights
python -m d1 export SRC OUT --format llada          # LLaDA's own names, for LLaDA's own code
python -m d1 fit --model_path X --stage rl --gpus 8 # memory of a stage, and the largest batch on each card
python -m d1 methods [NAME]                         # RL methods that --method takes, or the values of one
python -m d1 chat MODEL                             # a chat, the answers coming into focus
python -m d1 watch --model_path X --prompt TEXT     # a completion coming into focus, in the terminal or as a page
python -m d1 fill MODEL "The [MASK:3] of a text"    # masks anywhere in a text, filled in
"""

from __future__ import annotations

import argparse
import logging
import sys
from importlib import import_module
from typing import NoReturn

from d1.commands import a2d, chat, export, fill, fit, merge, methods, watch
from d1.runs.entry import OneLineParser, run_script

STAGES = {  # name -> its module, which has `cli(prog, arguments)`; imported when asked for
    "sft": "d1.sft.train",
    "rl": "d1.rl.train",
    "eval": "d1.eval.run",
    "parse": "d1.eval.accuracy",
}
COMMANDS = {  # name -> its module, which has `add_arguments(parser)` and `run(args)`
    "a2d": a2d,
    "merge": merge,
    "export": export,
    "fit": fit,
    "methods": methods,
    "chat": chat,
    "watch": watch,
    "fill": fill,
}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m d1", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        _, _, what = (module.__doc__ or "").partition("\n")[0].partition(": ")
        module.add_arguments(commands.add_parser(name, help=what.strip(), description=module.__doc__))
    return parser


def main(args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    COMMANDS[args.command].run(args)


def cli() -> NoReturn:
    """The console script `d1`."""
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name in STAGES:
        import_module(STAGES[name]).cli(f"d1 {name}", arguments)
    run_script("d1", lambda: main(make_parser().parse_args()))


if __name__ == "__main__":
    cli()
