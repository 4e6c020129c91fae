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
from typing import Any, NamedTuple, NoReturn

from d1.commands import chat, convert, fill, fit, methods, sandbox, serve, task, watch
from d1.runs.cli import OneLineParser, add_flags, run_script

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
    flags: type  # a dataclass of `d1.ranges.setting` fields
    run: Callable[[Any], None]  # gets an instance of it
    about: str | None = None  # the text of the command's own help, as it is written; `help` if there is none
    epilog: str | None = None  # the end of that help


COMMANDS = {
    "a2d": Command("convert an autoregressive Llama, Qwen or Gemma to masked diffusion", convert.A2DFlags, convert.a2d),
    "merge": Command("merge LoRA adapters into the weights", convert.MergeFlags, convert.merge),
    "export": Command(
        "write a model in a released format, for that format's code", convert.ExportFlags, convert.export
    ),
    "fit": Command("the memory that a stage needs, and the largest batch per card", fit.FitFlags, fit.run),
    "methods": Command("list the RL methods for --method, or all values of one", methods.MethodsFlags, methods.run),
    "task": Command("task new FILE: write a task file that evaluation and RL run", task.TaskFlags, task.run),
    "sandbox": Command("check that programs can be judged safely here", sandbox.SandboxFlags, sandbox.run),
    "chat": Command(
        "talk to a model and watch its answers come into focus", chat.ChatFlags, chat.run, epilog=chat.HELP
    ),
    "serve": Command("serve the samplers over HTTP: to RL, OpenAI's clients, a browser", serve.ServeFlags, serve.run),
    "watch": Command(
        "watch a completion come into focus, here or as a page", watch.WatchFlags, watch.run, about=watch.__doc__
    ),
    "fill": Command('fill the masks in a text, "The [MASK:3] of a text"', fill.FillFlags, fill.run),
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


class CommandsParser(OneLineParser):
    """The parser of all commands; `parse_args` returns the flags of one, an instance of its `Command.flags`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        values = vars(super().parse_args(args, namespace))
        command = COMMANDS[values.pop("command")]
        return command.flags(**values)


def make_parser() -> CommandsParser:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = CommandsParser(prog="python -m d1", description=__doc__, formatter_class=as_written)
    parser.add_argument("--version", action="version", version=versions(), help="show the versions, and exit")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    for name in STAGES:  # known names; `cli` runs them with parsers of their own
        commands.add_parser(name)
    for name, command in COMMANDS.items():
        one = commands.add_parser(
            name, help=command.help, description=command.about or command.help, epilog=command.epilog
        )
        if command.about is not None:
            one.formatter_class = as_written
        add_flags(one, command.flags)
    return parser


def main(args: Any) -> None:
    """Run the command whose flags these are."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runs = {command.flags: command.run for command in COMMANDS.values()}
    runs[type(args)](args)


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
