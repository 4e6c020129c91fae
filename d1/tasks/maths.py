"""Whether two mathematical answers are the same: by text, by exact numbers, else by math-verify in its own process.

math-verify's own time limit is a signal: it counts whole seconds, works only in the main thread, and cannot interrupt
one big-integer operation. So math-verify runs in a helper process (this file as a script), which is killed if it does
not stop in time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction
from functools import lru_cache
from multiprocessing.connection import wait

logger = logging.getLogger(__name__)

TIME_LIMIT = 0.4  # seconds of CPU time for one pair; CPU time, so that a busy machine does not change the verdict
MAX_ANSWER = 500  # characters; the longest answer of MATH-500 has fewer than 100
HARD_LIMIT, _START_LIMIT = 0.9, 120.0  # seconds by the clock
_MEMORY = 4 << 30

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


@lru_cache(maxsize=8192)
def equivalent(answer: str, gold: str) -> bool:
    """Whether `answer` is mathematically the same as `gold`, both LaTeX without dollar signs around them.

    Units, percent and dollar signs, degrees and spacing are ignored. Answers longer than `MAX_ANSWER` characters, and
    pairs that math-verify cannot decide within `TIME_LIMIT`, count as different.
    """
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
    global helper_process
    with _lock:
        if helper_process is None or helper_process.poll() is not None:
            command = [sys.executable, "-P", __file__]  # by path: `d1` need not be importable there
            pipe = subprocess.PIPE
            helper = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
            if _reply(helper, _START_LIMIT) is None:
                raise RuntimeError(f"math-verify does not start: try `{sys.executable} -c 'import math_verify'`")
            helper_process = helper
        helper = helper_process
        assert helper.stdin is not None
        try:
            helper.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            reply = _reply(helper, HARD_LIMIT)
        except BrokenPipeError:
            reply = None
        if reply is None:
            logger.warning("math-verify gave up on the answer %.80r (gold %.80r)", answer, gold)
            helper.kill()
            helper.wait()
        return reply == b"1"


def _reply(helper: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The helper's next answer, one byte, or None if the helper ended or takes longer than `seconds`."""
    assert helper.stdout is not None
    return (helper.stdout.read(1) or None) if wait([helper.stdout.fileno()], seconds) else None


class _OutOfTime(BaseException):
    """Not an Exception, so that no handler within sympy swallows it."""


def _serve() -> None:
    """Answer each pair [gold, answer], a line of JSON, with the byte 1 or 0, until the input ends."""
    import resource
    import signal

    from math_verify import LatexExtractionConfig, parse, verify

    def stop(*_: object) -> None:
        raise _OutOfTime

    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGPROF, stop)
    config = [LatexExtractionConfig()]  # its other config passes text to Python's eval
    # Build the parser's tables and make sympy's late imports now, so that the first answer's time does not include it.
    verify(*(parse(rf"\boxed{{{text}}}", config, parsing_timeout=0) for text in ("(x+1)^2", "x^2+2x+1")))
    sys.stdout.buffer.write(b"!")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        try:
            signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
            gold, answer = (
                parse(rf"\boxed{{{text}}}", config, fallback_mode="no_fallback", parsing_timeout=0)
                for text in json.loads(line)
            )
            same = bool(gold and answer) and verify(gold, answer, timeout_seconds=None)
        except (_OutOfTime, Exception):
            same = False
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(b"1" if same else b"0")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
