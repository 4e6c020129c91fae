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
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path

from d1.tasks.latex import Tree, normalize, number_of, read_answer, tree_of

__all__ = ["MAX_ANSWER", "TIME_LIMIT", "Undecided", "equivalent", "normalize"]

logger = logging.getLogger(__name__)

TIME_LIMIT = 1.0  # seconds of processor time for one pair
MAX_ANSWER = 500  # characters; the longest answer of MATH-500 has fewer than 100
STALL_LIMIT = 120.0  # seconds by the clock, only for a helper that does not run at all: a stopped process
_HELPER = Path(__file__).with_name("maths_process.py")

_CHOICE = re.compile(r"\(([A-Z])\)")  # a letter of a multiple-choice question
_CHOSEN = re.compile(r"\(?([A-Za-z])(?:\)?|[).:][^,()]*)")
_SUBSCRIPT_OF_NUMBER = re.compile(r"[0-9]_")
_DOTS = re.compile(r"\\[lc]?dots|\.\.\.|…")
_WORD = re.compile(r"[A-Za-z-]{4,}")
_SHORT_WORD = re.compile(r"\s*\\(?:text|textbf|textit|textrm|textnormal|mbox)\s*\{\s*[A-Za-z]{2,3}\s*\}\s*")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{12,}")  # spaces are removed


class Undecided(Exception):
    """math-verify did not decide within `TIME_LIMIT`, or its process ended."""


_undecided_so_far = count(1)  # in this process


def equivalent(answer: str, gold: str) -> bool:
    """Whether `answer` is mathematically the same as `gold`, both LaTeX or plain text.

    What an answer leaves out is forgiven: a unit, the base of its digits, a.m. or p.m., a name ("x ="). What it says
    must not contradict the gold: another unit, base, half of the day or name is wrong, and so is a set for a tuple. A
    number with a percent sign may also be a hundredth of it. Decimals are equal to irrational numbers if six digits
    agree.

    `i` is a variable like others: i + 3 is 3 + i, but i^2 is not -1, and 2(1 + i) may differ from 2 + 2i.

    Answers longer than `MAX_ANSWER` characters count as different. So do pairs that math-verify cannot decide within
    `TIME_LIMIT`; each of them is counted in a warning, and is tried again when it is asked for again.
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
    parsed_answer = read_answer(answer)
    parsed_gold = read_answer(gold)
    if parsed_answer.unit and parsed_gold.unit and parsed_answer.unit != parsed_gold.unit:
        return False
    if not parsed_answer.text or not parsed_gold.text:
        return parsed_answer.text == parsed_gold.text
    if parsed_answer.text == parsed_gold.text:
        return True
    if _SHORT_WORD.fullmatch(gold):  # math-verify would read a product of the letters, in any order
        return parsed_answer.text.casefold() == parsed_gold.text.casefold()
    choice = _CHOICE.fullmatch(parsed_gold.text)
    if choice:
        chosen = _CHOSEN.fullmatch(parsed_answer.text)
        return chosen is not None and choice[1] == chosen[1].upper()
    if parsed_answer.percent != parsed_gold.percent:
        x, y = _number(parsed_answer.tree), _number(parsed_gold.tree)
        if x is not None and y is not None:
            if x == y:
                return True
            return x == 100 * y if parsed_answer.percent else y == 100 * x
    return _same(parsed_answer.tree, parsed_gold.tree)


def _number(tree: Tree) -> Fraction | None:
    return number_of(tree) if isinstance(tree, str) else None


def _same(answer: Tree, gold: Tree) -> bool:
    """Whether two trees (`d1.tasks.latex`) are the same."""
    if answer == gold:
        return True
    if isinstance(answer, str) and "=" in answer and not _is_equation(gold):
        return _same(tree_of(answer.rpartition("=")[2]), gold)
    if isinstance(answer, str) and isinstance(gold, str):
        return _same_text(answer, gold)
    for kind, rule in _RULES.items():
        if kind in (_kind(answer), _kind(gold)):
            return rule(answer, gold)
    if isinstance(answer, str) or isinstance(gold, str):
        return False
    return answer[0] == gold[0] and _same_in_order(answer[1:], gold[1:])


def _is_equation(tree: Tree) -> bool:
    return _kind(tree) == "=" or (isinstance(tree, str) and "=" in tree)


def _kind(tree: Tree) -> str:
    return str(tree[0]) if isinstance(tree, list) else ""


def _same_named(answer: Tree, gold: Tree) -> bool:
    """x = 5 is 5, but not y = 5; two equations are compared as they are."""
    if _kind(answer) == _kind(gold):
        return answer[1] == gold[1] and _same(answer[2], gold[2])
    if _kind(answer) == "=":
        if not _is_equation(gold):
            return _same(answer[2], gold)
        return isinstance(answer[2], str) and _same_text(f"{answer[1]}={answer[2]}", str(gold))
    if not _is_equation(answer):
        return _same(answer, gold[2])
    return isinstance(gold[2], str) and _same_text(str(answer), f"{gold[1]}={gold[2]}")


def _same_base(answer: Tree, gold: Tree) -> bool:
    """The digits and the base are the same. An answer may leave the base out; a gold without one has base ten."""
    if _kind(gold) != "base":
        return answer[2] == "10" and _same(answer[1], gold)
    if _kind(answer) == "base":
        return answer[1] == gold[1] and answer[2] == gold[2]
    return answer == gold[1]


def _same_time(answer: Tree, gold: Tree) -> bool:
    answer_time, gold_time = _time(answer), _time(gold)
    if answer_time is None or gold_time is None:
        return False
    *answer_clock, answer_half = answer_time
    *gold_clock, gold_half = gold_time
    return answer_clock == gold_clock and (answer_half == gold_half or "" in (answer_half, gold_half))


def _time(tree: Tree) -> tuple[int, int, str] | None:
    """Hour (0 to 11), minute, and "a", "p" or "" of a time, or of numbers that are one: 8, 8:30, 20:30."""
    if _kind(tree) not in ("", ":", "time"):
        return None
    parts = [tree] if isinstance(tree, str) else [str(part) for part in tree[1:]]
    if not all(re.fullmatch("[0-9]{1,2}|[ap]", part) for part in parts):
        return None
    hour = int(parts[0])
    minute = int(parts[1]) if len(parts) > 1 else 0
    half = parts[2] if _kind(tree) == "time" else ""
    if hour > 12 and not half:
        half = "p"
    return hour % 12, minute, half


def _same_values(answer: Tree, gold: Tree) -> bool:
    """Values next to each other have no order; brackets around one of the two give them theirs."""
    kinds = {_kind(answer), _kind(gold)}
    if kinds <= {",", "{}"}:
        return _same_in_any_order(answer[1:], gold[1:])
    if kinds == {",", "()"}:
        return _same_in_order(answer[1:], gold[1:])
    if kinds == {",", "cup"}:  # x < 1 or x > 2
        return _same_in_any_order(answer[1:], gold[1:])
    return False


def _same_set(answer: Tree, gold: Tree) -> bool:
    """Sets are compared in any order; a set of one value may stand without its braces."""
    answer_elements = answer[1:] if _kind(answer) == "{}" else [answer]
    gold_elements = gold[1:] if _kind(gold) == "{}" else [gold]
    return _same_in_any_order(answer_elements, gold_elements)


def _same_union(answer: Tree, gold: Tree) -> bool:
    return _kind(answer) == _kind(gold) and _same_in_any_order(answer[1:], gold[1:])


# The first kind that one of two trees has decides how they are compared; trees of other kinds must have the same kind.
_RULES: dict[str, Callable[[Tree, Tree], bool]] = {
    "=": _same_named,
    "base": _same_base,
    "time": _same_time,
    ",": _same_values,
    "{}": _same_set,
    "cup": _same_union,
}


def _same_in_order(answers: Sequence[Tree], golds: Sequence[Tree]) -> bool:
    return len(answers) == len(golds) and all(map(_same, answers, golds))


def _same_in_any_order(answers: Sequence[Tree], golds: Sequence[Tree]) -> bool:
    if len(answers) != len(golds):
        return False
    remaining = list(answers)
    for gold in golds:
        match = next((index for index, answer in enumerate(remaining) if _same(answer, gold)), None)
        if match is None:
            return False
        del remaining[match]
    return True


def _same_text(answer: str, gold: str) -> bool:
    """Whether two numbers, expressions or words are the same."""
    if answer == gold:
        return True
    if not answer or not gold:
        return False
    x, y = number_of(answer), number_of(gold)
    if x is not None and y is not None:
        return x == y
    if _WORD.fullmatch(gold) or _WORDS.search(answer):  # math-verify would read a product of the letters
        return answer.casefold() == gold.casefold()
    # math-verify leaves out dots, and what stands below a number.
    for text in (answer, gold):
        if _SUBSCRIPT_OF_NUMBER.search(text) or _DOTS.search(text):
            return False
    return _verify(answer, gold)


_lock = threading.Lock()
helper_process: subprocess.Popen[bytes] | None = None
# A forked process must not share the pipe, and another thread may hold the lock: it starts its own helper.
os.register_at_fork(after_in_child=lambda: globals().update(helper_process=None, _lock=threading.Lock()))


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
        reply = None
        try:
            helper.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            reply = _reply(helper)
        except BrokenPipeError:
            pass
        finally:
            if reply is None:  # also after a timeout around a reward, say: a late reply would answer the next question
                helper.kill()
                helper.wait()
        if reply is None:
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
