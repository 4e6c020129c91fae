"""One command per tool; python -m d1 COMMAND --help lists its options.

python -m d1 sft --model_name X --train_data FILE   # masked supervised fine-tuning
python -m d1 rl --model_path X --dataset sudoku --max_steps 600   # diffu-GRPO, and the other methods
python -m d1 prefer --model_name X --train_data FILE   # VRPO and ELBO-KTO: pairs or labels
python -m d1 distill --model_name X --train_data TASK   # dParallel: fewer sampling steps
python -m d1 eval --model_path X --dataset sudoku   # completions of a task's problems, and their accuracy
python -m d1 parse results/                         # the accuracies of generation files
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, NoReturn

from d1.commands import chat, convert, fill, fit, methods, sandbox, serve, task, watch
from d1.runs.cli import OneLineParser, run_script

STAGES = {  # name -> its module, which has `cli(prog, arguments)`; imported only when used
    "sft": "d1.sft.train",
    "rl": "d1.rl.train",
    "prefer": "d1.preference.train",
    "distill": "d1.distill.train",
    "eval": "d1.eval.run",
    "parse": "d1.eval.scores",
}


class Command(NamedTuple):
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


COMMANDS = {
    "a2d": Command("convert an autoregressive Llama, Qwen or Gemma to masked diffusion", convert.add_a2d, convert.a2d),
    "merge": Command("merge LoRA adapters into the weights", convert.add_merge, convert.merge),
    "export": Command("write a model in a released format, for that format's code", convert.add_export, convert.export),
    "fit": Command("the memory that a stage needs, and the largest batch per card", fit.add_arguments, fit.run),
    "methods": Command("list the RL methods for --method, or all values of one", methods.add_arguments, methods.run),
    "task": Command("task new FILE: write a task file that evaluation and RL run", task.add_arguments, task.run),
    "sandbox": Command("check that programs can be judged safely here", sandbox.add_arguments, sandbox.run),
    "chat": Command("talk to a model and watch its answers come into focus", chat.add_arguments, chat.run),
    "serve": Command(
        "serve the samplers over HTTP: to RL, OpenAI's clients, a browser", serve.add_arguments, serve.run
    ),
    "watch": Command("watch a completion come into focus, here or as a page", watch.add_arguments, watch.run),
    "fill": Command('fill the masks in a text, "The [MASK:3] of a text"', fill.add_arguments, fill.run),
}


def versions() -> str:
    """The versions of the library and of those that compute and train, on one line."""
    found = []
    for library in ("d1", "torch", "transformers", "trl"):
        try:
            found.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            found.append(f"{library} (not installed)")
    return ", ".join(found)


def make_parser() -> argparse.ArgumentParser:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="python -m d1", description=__doc__, formatter_class=as_written)
    parser.add_argument("--version", action="version", version=versions(), help="show the versions, and exit")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in STAGES:  # known names; `cli` runs them with parsers of their own
        commands.add_parser(name)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help, description=command.help))
    return parser


def main(args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    COMMANDS[args.command].run(args)


def cli() -> NoReturn:
    """The console script `d1`. Without a command it prints the help, with status 0."""
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name in STAGES:
        import_module(STAGES[name]).cli(f"d1 {name}", arguments)
    if not name:
        run_script("d1", make_parser().print_help)
    run_script("d1", lambda: main(make_parser().parse_args()))


if __name__ == "__main__":
    cli()
