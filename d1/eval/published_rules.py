"""The rules of d1's released parser, for `--scoring published` alone: its published figures can be checked by them.

Its faults are kept on purpose: a comma ends a number; a text without a box is its own answer even if it has answer
tags; a problem without a ground truth counts as an error; Sudoku counts cells, not puzzles; mathematical answers are
compared as normalised strings. One difference: in Countdown, the released parser also evaluates **, //, a plus before a
number and "30.", which are refused here.
"""

from __future__ import annotations

import re
from typing import Any

from d1.tasks.countdown import evaluate

END_MARKS = ("<|eot_id|>", "<|endoftext|>")
Score = tuple[int, int]  # right, out of: problems, or cells for Sudoku


def score_published(task: str, text: str, row: dict[str, Any]) -> Score:
    """Points and maximum of one completion under d1's released rules; `row` has `question` and `ground_truth`."""
    if task not in SCORERS:
        raise ValueError(f"published scoring supports {', '.join(SCORERS)}, not {task!r}: use --scoring strict")
    return SCORERS[task](text, row["question"], row["ground_truth"])


def between(text: str, opening: str, *closings: str) -> str | None:
    """The text after the first `opening` up to the nearest of `closings`; None if there is no such pair."""
    _, opened, rest = text.partition(opening)
    ends = [rest.find(closing) for closing in closings if closing in rest]
    if not opened or not ends:
        return None
    return rest[: min(ends)]


def tagged_answer(text: str) -> str | None:
    answer = between(text, "<answer>", "</answer>")
    return None if answer is None else answer.strip()


def boxed_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`; all of `text` when it has no box; None when the braces never close."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed") if "\\boxed" in text else text.rfind("\\fbox")
    if start < 0:
        return text
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                box = text[start : position + 1]
                if box.startswith("\\boxed{"):
                    return box.removeprefix("\\boxed{")[:-1]
                return box
    return None


def read_float(text: str, index: int) -> float | None:
    """`text` as a number, or else the number with this index in it (a comma ends a number)."""
    try:
        return float(text)
    except ValueError:
        numbers = re.findall(r"-?\d+\.?\d*", text)
        return float(numbers[index]) if numbers else None


def score_gsm8k(text: str, question: str, truth: Any) -> Score:
    # Each search continues after what it has read, closed or not, so that the time is linear in the text.
    answer = None
    for box in re.finditer(r"\\boxed\{([^}\n]*)(\})?", text):
        content = box[1].strip()
        if box[2] and content.strip("."):
            answer = read_float(content, 0)
        if answer is not None:
            break
    if answer is None:
        tagged = tagged_answer(text)
        if tagged:
            answer = read_float(tagged, -1)
    return int(answer is not None and answer == truth), 1


def braced_arguments(text: str) -> str:
    r"""Add braces to arguments of one character: `\frac12` -> `\frac{1}{2}` and `\sqrt3` -> `\sqrt{3}`."""
    head, *pieces = text.split("\\sqrt")
    if "" in pieces:
        raise ValueError("nothing under the root")
    text = head
    for piece in pieces:
        if piece[0] != "{":
            piece = f"{{{piece[0]}}}{piece[1:]}"
        text += "\\sqrt" + piece

    head, *pieces = text.replace(" ", "").split("\\frac")
    if "" in pieces:
        raise ValueError("nothing in the fraction")
    for piece in pieces:
        if piece[0] != "{" and len(piece) < 2:
            return text.replace(" ", "")
        if piece[0] != "{":
            top, bottom, rest = piece[0], piece[1], piece[2:]
            if bottom == "{":
                piece = f"{{{top}}}{piece[1:]}"
            else:
                piece = f"{{{top}}}{{{bottom}}}{rest}"
        head += "\\frac" + piece
    return head


def normalise(text: str) -> str:
    """Normalise a LaTeX answer like Hendrycks et al. (MATH, arXiv 2103.03874), who compare these; or ValueError."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for noise in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(noise, "")
    if text.count("\\text{ ") > 1:
        raise ValueError("two units")
    text = text.partition("\\text{ ")[0]  # a unit on the right
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:  # "k = 3"
        text = right
    text = braced_arguments(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    if text.count("/") == 1:  # ValueError unless it is between integers
        top, bottom = map(int, text.split("/"))
        return f"\\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text
    return text


def score_math(text: str, question: str, truth: Any) -> Score:
    answer = boxed_answer(text) or tagged_answer(text)
    if answer is None or truth is None:
        return 0, 1
    try:
        return int(normalise(answer) == normalise(truth)), 1
    except ValueError:
        return int(answer == truth), 1


def left_of_equals(text: str) -> str:
    """The arithmetic before the first `=` that follows arithmetic and precedes a number; else all of `text`."""
    for match in re.finditer(r"=[0-9. ]", text):
        before = text[: match.start()]
        arithmetic = before[len(before.rstrip("0123456789+-*/() ")) :]
        if arithmetic:
            return arithmetic.strip()
    return text


def score_countdown(text: str, question: str, truth: Any) -> Score:
    numbers, target = truth
    equation = boxed_answer(text)
    if equation is None:
        equation = tagged_answer(text)
    if equation is None:
        equation = text
    for latex, sign in (("\\div", "/"), ("\\times", "*"), ("\\cdot", "*")):
        equation = equation.replace(latex, sign)
    return int(evaluate(left_of_equals(equation), numbers) == target), 1


def sudoku_answer(text: str) -> str:
    """The solution as the released parser finds it: the first of four candidates that has any text."""
    # Digits in a fence of the answer.
    fenced = ""
    for fence in text.partition("<answer>")[2].split("```")[1:-1]:
        if re.fullmatch(r"[\d\s]+", fence):
            fenced = fence
            break

    # The text after the answer.
    after = ""
    if "</answer>" in text:
        after = text.partition("</answer>")[2].lstrip()
        ends = [after.find(mark) for mark in END_MARKS if mark in after]
        if ends:
            after = after[: min(ends)]

    # 16 digits anywhere.
    bare = ""
    match = re.search(r"(\d{16})\s*</answer>", text) or re.search(r"\b(\d{16})\b", text)
    if match:
        bare = match[1]

    tagged = between(text, "<answer>", "</answer>", *END_MARKS) or ""
    for candidate in (fenced, tagged, after, bare):
        if candidate.strip():
            return candidate.strip()
    return ""


def score_sudoku(text: str, question: str, truth: Any) -> Score:
    puzzle = re.match(r"\d{16}", question) or re.search(r"(?<=Sudoku puzzle: )[0-9]{16}", question)
    if puzzle is None:
        raise ValueError(f"no 16 puzzle digits in the question {question[:80]!r}")
    answer = re.sub(r"\s", "", sudoku_answer(text))
    empty = [cell for cell, digit in enumerate(puzzle[0]) if digit == "0"]
    return sum(answer[cell : cell + 1] == truth[cell] for cell in empty), len(empty)


SCORERS = {"gsm8k": score_gsm8k, "math": score_math, "countdown": score_countdown, "sudoku": score_sudoku}
