"""Whether two mathematical answers are the same: by text, by exact numbers, else by math-verify in its own process.

math-verify's own time limit is a signal: it counts whole seconds, works only in the main thread, and cannot interrupt
one big-integer operation. So math-verify runs in a helper process (`maths_process.py`) with a limit of processor time,
which other programs on the machine do not use up.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction
from functools import lru_cache
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path

logger = logging.getLogger(__name__)

TIME_LIMIT = 1.0  # seconds of processor time for one pair
MAX_ANSWER = 500  # characters; the longest answer of MATH-500 has fewer than 100
STALL_LIMIT = 120.0  # seconds by the clock, only for a helper that does not run at all: a stopped process
_HELPER = Path(__file__).with_name("maths_process.py")

_NOISE = r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[!,;: ()\[\]]|\^\{?\\circ\}?|[°~]|\\?[%$]"
_PLAIN = [
    (re.compile(r"(?<=.)\\(?:text|mbox|mathrm|textrm)\{[^{}]*\}(?:\^\{?[0-9]\}?)?$"), ""),  # units
    (re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|textit)\{([^{}]*)\}"), r"\1"),
    (re.compile(rf"{_NOISE}|(?<![0-9])\s+|\s+(?![0-9])"), ""),
    (re.compile(r"\\[dt]?frac(?:\{([0-9])\}|([0-9]))(?:\{([0-9])\}|([0-9]))"), r"\\frac{\1\2}{\3\4}"),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"^[A-Za-z]="), ""),  # "x = 5"
]
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\})(?=[0-9]{3}(?![0-9]))")
_DECIMAL = r"(-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
_EXACT = re.compile(rf"{_DECIMAL}(?:/{_DECIMAL})?|(-?)\\[dt]?frac\{{{_DECIMAL}\}}\{{{_DECIMAL}\}}")


class Undecided(Exception):
    """math-verify did not decide within `TIME_LIMIT`, or its process ended."""


_undecided_so_far = count(1)  # in this process


def equivalent(answer: str, gold: str) -> bool:
    """Whether `answer` is mathematically the same as `gold`, both LaTeX without dollar signs around them.

    Units, percent and dollar signs, degrees and spacing are ignored. Answers longer than `MAX_ANSWER` characters count
    as different. So do pairs that math-verify cannot decide within `TIME_LIMIT`; each of them is counted in a warning,
    and is tried again when it is asked for again.
    """
    try:
        return _equivalent(answer, gold)
    except Undecided as reason:
        message = "undecided and counted as wrong, number %d so far: %s; answer %.80r, gold %.80r"
        logger.warning(message, next(_undecided_so_far), reason, answer, gold)
        return False


@lru_cache(maxsize=8192)  # an exception is not cached
def _equivalent(answer: str, gold: str) -> bool:
    if len(answer) > MAX_ANSWER:
        return False
    a, b = normalize(answer), normalize(gold)
    if a == b:
        return True
    if not a or not b:
        return False
    # Two exact numbers need no math-verify, except that with a percent sign 50% may also be 0.5.
    x, y = _exact(a), _exact(b)
    if x is not None and y is not None and (x == y or "%" not in answer + gold):
        return x == y
    return _verify(answer, gold)


def normalize(latex: str) -> str:
    """`latex` without parts that do not change its meaning; equal results mean equal answers."""
    text = latex.strip().replace("−", "-").rstrip(".").strip()
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    if re.fullmatch(r"-?[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+(?:\.[0-9]+)?", text):  # never inside a list or a pair
        text = _THOUSANDS.sub("", text)
    return text


def _exact(text: str) -> Fraction | None:
    match = _EXACT.fullmatch(text)
    if not match:
        return None
    top, bottom, sign, frac_top, frac_bottom = match.groups()
    try:
        value = Fraction(top or frac_top) / Fraction(bottom or frac_bottom or 1)
    except (ValueError, ZeroDivisionError):
        return None
    return -value if sign else value


_lock = threading.Lock()
helper_process: subprocess.Popen[bytes] | None = None
# A forked process must not share the pipe: it starts its own helper.
os.register_at_fork(after_in_child=lambda: globals().update(helper_process=None))


def _verify(answer: str, gold: str) -> bool:
    """math-verify's verdict.

    Raises:
        Undecided: a limit ended the comparison, or the helper process ended.
        RuntimeError: the helper process does not start.
    """
    global helper_process
    with _lock:
        if helper_process is None or helper_process.poll() is not None:
            helper_process = _start_helper()
        helper = helper_process
        assert helper.stdin is not None
        try:
            helper.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            reply = _reply(helper)
        except BrokenPipeError:
            reply = None
        if reply is None:
            helper.kill()
            helper.wait()
            raise Undecided(f"math-verify's process ended or stood still (return code {helper.returncode})")
    if reply == b"?":
        raise Undecided(f"math-verify used up {TIME_LIMIT:g} s of processor time, or its memory")
    return reply == b"1"


def _start_helper() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", str(_HELPER), str(TIME_LIMIT)]  # by path: `d1` need not be importable there
    pipe = subprocess.PIPE
    helper = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
    if _reply(helper) is None:
        raise RuntimeError(f"math-verify does not start: try `{sys.executable} -c 'import math_verify'`")
    return helper


def _reply(helper: subprocess.Popen[bytes]) -> bytes | None:
    """The helper's next reply, one byte, or None if the helper ended or stood still for `STALL_LIMIT`."""
    assert helper.stdout is not None
    if not wait([helper.stdout.fileno()], STALL_LIMIT):
        return None
    return helper.stdout.read(1) or None
