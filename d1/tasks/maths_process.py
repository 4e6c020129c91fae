"""The process in which math-verify compares answers: `d1.tasks.maths` starts this file as a script.

It reads one request per line, a pair [gold, answer] as JSON, and replies with one byte: "1" if they are the same, "0"
if not, "?" if a limit ended the comparison. Where Python cannot interrupt a comparison, the kernel ends the process by
its processor time.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from dataclasses import replace

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, Expr, Float, N, Rational, floor, log, solve

_MEMORY = 4 << 30  # bytes
# Without the library's units, for which "2t" is 2. Its other config passes text to Python's eval.
_SPELLING = replace(LatexExtractionConfig().normalization_config, units=False)
_CONFIG = [LatexExtractionConfig(normalization_config=_SPELLING)]
# Relative differences from which on two expressions differ
_EXACT = 1e-12
_ROUNDED = 1e-5  # if one of them has a decimal
_POINTS = ((3, 7), (11, 5), (2, 9))  # fractions from which the values of variables are made


class _OutOfTime(BaseException):
    """Not an Exception, so that no handler within sympy swallows it."""


def _stop(*_: object) -> None:
    raise _OutOfTime


def _parse(latex: str) -> list[object]:
    return parse(rf"\boxed{{{latex}}}", _CONFIG, fallback_mode="no_fallback", parsing_timeout=0)


def _same(gold: str, answer: str) -> bool:
    expressions = _parse(gold), _parse(answer)
    if not all(expressions):
        return False
    gold_value, answer_value = expressions[0][0], expressions[1][0]
    # math-verify takes differences below 1e-15 for zero, at any size of the two: 1/2006! would be 1/2004!.
    tolerance = _ROUNDED if "." in gold + answer else _EXACT
    if isinstance(gold_value, Expr) and isinstance(answer_value, Expr) and _differ(gold_value, answer_value, tolerance):
        return False
    if isinstance(gold_value, Eq) and isinstance(answer_value, Eq):
        return _same_equation(gold_value, answer_value)
    if isinstance(gold_value, Expr) and isinstance(answer_value, Expr) and _is_rounded(gold_value, answer_value):
        return True
    return verify(gold_value, answer_value, timeout_seconds=None)


def _differ(a: Expr, b: Expr, tolerance: float) -> bool:
    """Whether the values of two expressions differ, relative to their size, at one of a few points."""
    for point in _POINTS:
        x, y = _value(a, point), _value(b, point)
        if x is not None and y is not None and abs(x - y) > tolerance * max(abs(x), abs(y)):
            return True
    return False


def _is_rounded(a: Expr, b: Expr) -> bool:
    """Whether one of two numbers is a decimal and the other one, which is irrational, has the same first six digits.
    math-verify compares digits after the point, whatever the size of the numbers."""
    exact = [number for number in (a, b) if not number.has(Float)]
    if len(exact) != 1 or exact[0].is_rational or a.free_symbols or b.free_symbols:
        return False
    x, y = (_value(number, _POINTS[0]) for number in (a, b))
    if x is None or y is None or not (x.is_real and y.is_real):
        return False
    largest = max(abs(x), abs(y))
    if not largest:
        return False
    sixth_digit = Rational(10) ** (floor(log(largest, 10)) - 5)
    return bool(abs(x - y) <= 0.5000001 * sixth_digit)


def _value(expression: Expr, point: tuple[int, int]) -> Expr | None:
    """The number that an expression is at a point, with 30 digits; None if it is none there."""
    # By name: the same letter has other assumptions where there is an i.
    values = {}
    for symbol in sorted(expression.free_symbols, key=str):
        values[symbol] = Rational(point[0] + len(str(symbol)), point[1]) + _place(str(symbol))
    try:
        value = N(expression.doit().subs(values), 30)
    except Exception:  # sympy raises many classes; the point then says nothing
        return None
    return value if value.is_number and value.is_finite else None


def _place(name: str) -> Rational:
    """A fraction of its own for each name."""
    return Rational(sum(ord(letter) * 31**position for position, letter in enumerate(name[:8])), 97)


def _same_equation(gold: Eq, answer: Eq) -> bool:
    """Whether one equation is a multiple of the other, or math-verify finds the same solutions of both."""
    gold_difference = gold.lhs - gold.rhs
    answer_difference = answer.lhs - answer.rhs
    ratios = []
    for point in _POINTS:
        x, y = _value(gold_difference, point), _value(answer_difference, point)
        if x and y:
            ratios.append(x / y)
    if len(ratios) == len(_POINTS) and all(abs(ratio - ratios[0]) <= _EXACT * abs(ratio) for ratio in ratios):
        return True
    # math-verify takes two equations without a solution for the same.
    return bool(solve(gold, gold.free_symbols)) and verify(gold, answer, timeout_seconds=None)


def _limit_processor_time(seconds: float) -> None:
    """Ends this process after `seconds` more of processor time, rounded up to whole seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    end = int(used.ru_utime + used.ru_stime + seconds) + 1
    if hard_limit != resource.RLIM_INFINITY:
        end = min(end, hard_limit)
    resource.setrlimit(resource.RLIMIT_CPU, (end, hard_limit))


def _reply(request: bytes, time_limit: float) -> bytes:
    _limit_processor_time(2 * time_limit)
    try:
        signal.setitimer(signal.ITIMER_PROF, time_limit)
        same = _same(*json.loads(request))
    except (_OutOfTime, MemoryError):
        return b"?"
    except Exception:  # math-verify cannot read one of the two
        return b"0"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return b"1" if same else b"0"


def main(time_limit: float) -> None:
    """Replies to each line until the input ends; `time_limit` is in seconds of processor time per line."""
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _stop)
    # The parser's tables and late imports are made now, so that the time of the first answer does not include them.
    _same("(x+1)^2", "x^2+2x+1")
    sys.stdout.buffer.write(b"!")
    sys.stdout.buffer.flush()
    for request in sys.stdin.buffer:
        sys.stdout.buffer.write(_reply(request, time_limit))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
