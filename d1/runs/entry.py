"""How a script starts and ends: a user's mistake gives one line on stderr and status 1, a bug keeps its traceback."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from d1.ranges import Range, check_ranges, nearest

# Deprecation and other warnings, by their beginnings, that do not help a user. Delete each one with its version.
WARNINGS = (
    "`gradient_checkpointing",  # Transformers 5.23: TRL 1.16 uses the old names
    "`is_gradient_checkpointing",
    "Could not find a config file in",  # PEFT 0.21, after an adapter was merged: no vocabulary grows here
)
MESSAGES = {  # logger -> the beginning of such a message
    "DeepSpeed": "Setting accelerator to CPU",  # 0.19, when it is imported, even if it is not used
    # 5.23, when PEFT 0.21 saves an adapter: it compares the vocabulary with that in the base's config.json, which it
    # reads as the class that runs the model, and a released format has a name of its own.
    "transformers.configuration_utils": "You are using a model of type",
}

# Seconds that a process other than the first waits before it prints: if the first failed, too, a launcher stops it.
PATIENCE = 3.0


class RunError(RuntimeError):
    """Ends a run with a message that needs no traceback: the user has to fix something, such as a reward function."""


# What this library and those it uses raise for wrong settings, files and machines. FloatingPointError: a loss is not
# finite. ImportError: a setting needs an optional package.
MISTAKES = (ValueError, OSError, ImportError, FloatingPointError, RunError)


def silence() -> None:
    """Silence the warnings in the tables, without importing the libraries that raise them."""
    for text in WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(text))
    for logger, text in MESSAGES.items():
        logging.getLogger(logger).addFilter(partial(says_more, text))


def says_more(text: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(text)


def refuse_flags(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Answer a bad command line with one line; argparse itself would print the usage of every flag."""
    parser.exit(2, f"{parser.prog}: {message} (--help lists what there is)\n")


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


def show_defaults(parser: argparse.ArgumentParser) -> None:
    """Add to each flag's help its default, unless the help states it, it is None or empty, or the flag is a switch."""
    for action in parser._actions:
        value = " ".join(map(str, action.default)) if isinstance(action.default, list | tuple) else action.default
        silent = action.required or action.nargs == 0 or value in (None, "", argparse.SUPPRESS)
        if not (silent or action.help == argparse.SUPPRESS or "default" in (action.help or "")):
            action.help = f"{action.help or ''} (default: {str(value).replace('%', '%%')})".lstrip()


class OneLineParser(argparse.ArgumentParser):
    """A parser that refuses abbreviated flags and checks those of type `Range`.

    Its errors are one line long and name the nearest flag, choice or command; its help shows defaults.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def ranges(self) -> dict[str, Range]:
        """The range of each of these flags; None is allowed if it is the default."""
        rows = {}
        for action in self._actions:
            if isinstance(action.type, Range):
                row = replace(action.type, many=action.nargs == "+")
                rows[action.dest] = row if action.default is not None or None in row else row | None
        return rows

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does; ValueError names all flags that are out of range."""
        known, rest = super().parse_known_args(args, namespace)
        check_ranges(vars(known), self.ranges())
        return known, rest

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            parser = self.used(known)
            hints = [nearest(word.partition("=")[0], flags_of(parser)) for word in rest if word.startswith("-")]
            parser.error(f"unrecognized arguments: {' '.join(rest)}{''.join(hints)}")
        return known

    def used(self, known: argparse.Namespace) -> argparse.ArgumentParser:
        """The parser of the command that was given; this one, if it has no commands."""
        commands = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        return commands[0].choices[getattr(known, commands[0].dest)] if commands else self

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, error.message + nearest(value, action.choices or ())) from None

    def format_help(self) -> str:
        show_defaults(self)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        refuse_flags(self, message)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import with the garbage collector off, a quarter faster: imported objects live as long as the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_script(name: str, work: Callable[[], object]) -> NoReturn:
    """Run a script's `work` and exit with the number that it returns, or 0.

    An error in `MISTAKES` becomes the line "NAME: message" and status 1. If all processes fail, the first one prints
    the line; if one fails alone, it prints it. Other errors are not caught.
    """
    silence()
    try:
        status = work()
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        leave(0)
    except MISTAKES as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(PATIENCE)
        sys.stderr.write(f"{name}: {one_line(error)}\n")
        leave(1)
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: stopped\n")
        leave(130)
    leave(status if isinstance(status, int) else 0)


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, or the name of its class if it has no message."""
    if isinstance(error, OSError) and error.strerror and type(error).__module__ == "builtins":
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


def leave(status: int = 0) -> NoReturn:
    """Exit with `status` when all output is written; if several processes ran on the CPU, without a normal shutdown.

    The threads of gloo may outlive the process group and abort the interpreter's shutdown ("terminate called without an
    active exception"), which a launcher takes for a failure. Delete all but `sys.exit` when PyTorch joins them.
    """
    gc.freeze()  # otherwise the shutdown searches all modules for garbage, for about a second
    torch = sys.modules.get("torch")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or torch is None or torch.cuda.is_available():
        sys.exit(status)
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
