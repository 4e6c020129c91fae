"""Functions as tools: those that come with d1, those of a user's file, and a call within limits.

A tool is a function with type hints and a docstring whose `Args:` describes each parameter, as TRL and Transformers
want it. It returns what the model gets to read, as text.
"""

from __future__ import annotations

import ast
import asyncio
import ctypes
import inspect
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from d1.files import valid_unicode
from d1.hub import closest
from d1.lazy import functions_in
from d1.sandbox import Limits, output_of, working_python

END_SECONDS = 0.1  # for a function that took too long to end, before the state of the process is restored
ADDRESS = re.compile(r"<.* at 0x[0-9a-f]+>", re.DOTALL)  # Python's text of an object: it differs from run to run
MAX_TEXT = 10_000  # characters of a result that are read; `TurnSettings.result_length` is in tokens

# --- The calculator and Python ----------------------------------------------------------------------------------------

MAX_EXPRESSION = 200  # characters
MAX_BITS = 4096  # of a numerator or denominator
DIGITS = 12  # of a result that is no whole number
SIGNS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator > 1:
        raise ValueError("an exponent must be a whole number")
    if abs(base) in (0, 1):
        return Fraction(base**exponent)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS:
        raise ValueError("the result is too large")
    return Fraction(base**exponent)


def value_of(node: ast.expr) -> Fraction:
    """The exact value of a syntax tree of numbers and signs; ValueError for anything else."""
    match node:
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            value = power(value_of(left), value_of(right))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in SIGNS:
            value = SIGNS[type(op)](value_of(left), value_of(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
            value = SIGNS[type(op)](value_of(operand))
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and number < math.inf:
            value = Fraction(str(number))
        case _:
            raise ValueError("use numbers, + - * / // % ** and parentheses")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the result is too large")
    return value


def calculator(expression: str) -> str:
    """The value of an arithmetic expression: numbers, + - * / // % ** and parentheses.

    Args:
        expression: The expression, for example (37 * 46) / 2.
    """
    # Nothing is executed: the syntax tree is walked. Short expressions and bounded numbers keep it quick.
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"an expression has at most {MAX_EXPRESSION} characters")
    try:
        value = value_of(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError, OverflowError):
        raise ValueError("not an expression") from None
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{DIGITS}g}"
    except OverflowError:
        raise ValueError("the result is too large") from None


PYTHON = Limits(seconds=8.0, cpu_seconds=4)  # less than `TurnSettings.tool_seconds`, which would drop what it prints


def python(program: str) -> str:
    """Run a Python program, without network and files of its own, and return what it prints.

    Args:
        program: The program. It has only the standard library, and must print its results.
    """
    return output_of(program, MAX_TEXT, PYTHON)


python.concurrent = True  # type: ignore[attr-defined]  # each program has a process of its own

TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}


def load_tools(names: Sequence[str]) -> list[Callable[..., Any]]:
    """The functions of `TOOLS` with these names, and all public functions of `.py` files.

    Raises:
        ValueError: there is no such tool, a file has no function, two have the same name, or one has no type hints or
            docstring.
        FileNotFoundError: there is no such file.
        SandboxError: the tool `python` has no sandbox here.
    """
    tools: list[Callable[..., Any]] = []
    for name in names:
        if name in TOOLS:
            if TOOLS[name] is python:
                working_python()
            tools.append(TOOLS[name])
            continue
        path = Path(name).resolve()
        if path.suffix != ".py":
            tool_names = ", ".join(TOOLS)
            raise ValueError(f"--tools {name}: expected {tool_names}, or the path of a .py file{closest(name, TOOLS)}")
        if not path.is_file():
            raise FileNotFoundError(f"no file of tools {path}")
        file_functions = functions_in(path, f"d1_user_tools_{path.stem}")
        if not file_functions:
            raise ValueError(f"the file of tools {path} defines no function")
        tools += file_functions
    check_tools(tools)
    return tools


def check_tools(functions: Sequence[Callable[..., Any]]) -> None:
    """Raises ValueError unless a model can be told about each function, and all names differ."""
    from transformers.utils import get_json_schema

    names = [function.__name__ for function in functions]
    for name, function in zip(names, functions, strict=True):
        if names.count(name) > 1:
            raise ValueError(f"two tools are called {name}: rename one of them")
        try:
            get_json_schema(function)
        except Exception as error:  # of several classes
            raise ValueError(
                f"tool {name}: {error}. A tool needs type hints and a docstring with `Args:` and a line for each "
                "parameter (docs/tools.md)"
            ) from error


# --- A call within limits ---------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The result of a call: the text for the model, and whether the call failed or hung."""

    text: str
    failed: bool = False
    hung: bool = False


@dataclass
class ToolCall:
    """One call in a thread of its own."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    outcome: Outcome | None = None

    def run(self) -> None:
        from d1.tools.state import preserve_thread_count

        try:
            with preserve_thread_count():
                inspect.signature(self.function).bind(**self.arguments)
                value = self.function(**self.arguments)
                if inspect.isawaitable(value):
                    value = asyncio.run(await_value(value))
                self.outcome = Outcome(text_of(value))
        except BaseException as error:  # a tool may call exit(), too
            self.outcome = Outcome(f"error: {describe_error(error)}", failed=True)


async def await_value(value: Any) -> Any:
    return await value


def describe_error(error: BaseException) -> str:
    """What a model reads of an error: the text of a ValueError, else the name of the class and the text."""
    name = type(error).__name__
    try:
        text = text_of(error)
    except BaseException as text_error:  # of the error's own __str__
        return f"{name}: its text cannot be read ({type(text_error).__name__})"
    return text if isinstance(error, ValueError) and text else f"{name}: {text}"


def text_of(value: Any) -> str:
    """The beginning of a value as text that UTF-8 can write.

    Raises:
        TypeError: the value has no text of its own but its address, such as a generator.
    """
    text = value if isinstance(value, str) else str(value)
    if ADDRESS.fullmatch(text) and not isinstance(value, str):
        raise TypeError(f"the tool returned an object of class {type(value).__name__}, which has no text: return text")
    return valid_unicode(text[:MAX_TEXT])


def call(
    function: Callable[..., Any], arguments: dict[str, Any], seconds: float, key: Sequence[int] | None = None
) -> Outcome:
    """Calls a function, `async` or not, for at most `seconds`. An error, or a function that takes too long, is a text
    for the model that begins with "error:". The global state of the process is afterwards as before (`d1.tools.state`).

    A function that hangs is asked to end: a loop of Python does, a call of C keeps its thread until the program ends.

    Args:
        key: of the function's random numbers, where it draws them from the global generators; see `preserve_state`.
    """
    from d1.tools.state import preserve_state  # the flags of commands need no torch

    tool_call = ToolCall(function, arguments)
    thread = Thread(target=tool_call.run, name=f"tool {function.__name__}", daemon=True)
    with preserve_state(key):
        thread.start()
        thread.join(seconds)
        is_hung = tool_call.outcome is None and thread.is_alive()
        if is_hung:
            assert thread.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
            thread.join(END_SECONDS)
    if is_hung:
        return Outcome(f"error: {function.__name__} took longer than {seconds:g} seconds", failed=True, hung=True)
    return tool_call.outcome or Outcome(f"error: {function.__name__} ended without a result", failed=True)
