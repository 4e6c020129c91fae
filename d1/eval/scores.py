"""python parse_and_get_acc.py [FOLDER] [--scoring strict|published] [--format table|json] [--details FILE]

Scores generation files, d1's or ours, and prints one line per setup. Without FOLDER it scores `eval_baselines/`, the
generations of the pocket models. The exit code is 1 if a setup is incomplete, unless `--allow-partial` is given.

    python -m d1 parse results/ --compare sudoku_base_32_16 sudoku_sft_32_16

`strict` scores by the tasks' own rules (`extract` and `score` in `d1.tasks`). `published` scores like d1's released
parser, including its faults, so that its published figures can be checked.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NoReturn

from d1.eval.files import GeneratedProblem, GeneratedSetup, read_setups
from d1.eval.uncertainty import pass_at_k, sign_test, wilson_interval
from d1.runs.cli import OneLineParser, run_script
from d1.runs.tables import aligned_table
from d1.tasks import MAX_TEXT, TASKS, load_task, under_protocol

BASELINES = Path(__file__).resolve().parents[2] / "eval" / "eval_baselines"  # exists only in a checkout
PASS_AT = (1, 2, 5, 10, 20, 50, 100)


@dataclass
class Row:
    """One setup's results.

    Attributes:
        accuracy, ci_low, ci_high: with its 95% interval, in percent.
        metrics: the task's other metrics, and the shares of completions that edits made better and worse, in percent.
        tokens, forward_passes, edits: means per completion; tokens count up to the end.
        pass_at: estimate and interval of each pass@k, in percent.
    """

    setup: str
    task: str
    model: str
    gen_length: int
    scoring: str
    accuracy: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    n: int = 0
    expected: int | None = None
    tokens: float | None = None
    forward_passes: float | None = None
    edits: float | None = None
    pass_at: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    duplicates: int = 0
    missing_ranks: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    complete: bool = False


def score_setup(
    setup: GeneratedSetup, scoring: str, own_tasks: Mapping[str, ModuleType]
) -> tuple[Row, list[dict[str, Any]]]:
    """The row of a setup, and the score of each of its problems.

    Args:
        scoring: "strict" (`d1.tasks`; each problem counts once) or "published" (d1's released rules; repeats count
            again).
        own_tasks: the user's task modules, by the task's name in the files.
    """
    row = Row(setup.name, setup.task, setup.model, setup.gen_length, scoring, expected=setup.expected)
    row.missing_ranks, row.errors = setup.missing_ranks, list(setup.errors)
    if setup.errors and not setup.problems:
        return row, []
    task = None
    try:
        if scoring == "strict":
            if setup.task not in {**TASKS, **own_tasks}:  # a file must not name code to run
                raise ValueError(f"unknown task {setup.task!r}: name its file with --task_file")
            task = under_protocol(own_tasks.get(setup.task) or load_task(setup.task), setup.protocol)
        elif setup.protocol != "d1":
            raise ValueError(f"the published rules are for d1's prompts, but these files have {setup.protocol}'s")
    except ValueError as error:
        row.errors.append(f"{setup.name}: {error}")
        return row, []
    seen = {problem.key: problem for problem in reversed(setup.problems)}  # the first of equal keys
    once = [problem for problem in setup.problems if task is None or seen[problem.key] is problem]
    details, problems = [], []
    with ThreadPoolExecutor(getattr(task, "CONCURRENT", 1)) as pool:
        side_by_side = pool.map if hasattr(task, "CONCURRENT") else map
        for problem, detail in zip(once, side_by_side(partial(detail_of, setup, task), once), strict=True):
            if isinstance(detail, str):
                row.errors.append(f"{problem.where}: {detail}")
            else:
                details.append({"setup": setup.name, "where": problem.where, **detail})
                problems.append(problem.problem)
    row.duplicates = len(setup.problems) - len(seen)
    if details:
        summarise(row, setup, details, problems)
    if row.expected is not None and len(seen) > row.expected:
        row.errors.append(
            f"{setup.name}: {len(seen)} problems instead of {row.expected}: problems of another run are mixed in"
        )
    row.complete = not row.errors and not row.missing_ranks and len(details) > 0 and len(seen) >= (row.expected or 0)
    return row, details


def detail_of(setup: GeneratedSetup, task: ModuleType | None, problem: GeneratedProblem) -> dict[str, Any] | str:
    """The score of a completion by its task or, if that is None, by the published rules; an error as text, whatever the
    task raises, so that the others are still scored."""
    asked = {"question": problem.question, "ground_truth": problem.ground_truth}
    try:
        if task is not None:
            scored, first = strict_detail(problem.text[-MAX_TEXT:], task, asked), problem.first_text
            if first is not None:
                before = scored if first == problem.text else strict_detail(first[-MAX_TEXT:], task, asked)
                scored["before_edits"] = before["accuracy"]
            return asked | scored
        right, total = score_published(setup.task, problem.raw[-MAX_TEXT:], asked)
        return asked | {"right": right, "total": total, "accuracy": right / total}
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def user_tasks(*names_or_paths: str) -> dict[str, ModuleType]:
    """The user's tasks (those given as files), by their names in generation files."""
    return {Path(path).stem: load_task(path) for path in names_or_paths if path not in TASKS}


def strict_detail(text: str, task: ModuleType, row: dict[str, Any]) -> dict[str, Any]:
    """The answer that a task reads in a text, and its metrics."""
    if row["ground_truth"] is None:
        raise ValueError("no ground truth")
    answer, scores = task.extract(text), task.score(text, row)
    if any(not 0 <= value <= 1 for value in scores.values()):
        raise ValueError(f"scores must lie in [0, 1], got {scores}")
    accuracy, *others = scores
    return {
        "answer": None if answer is None else str(answer),
        "accuracy": scores[accuracy],
        "metrics": {name: scores[name] for name in others},
    }


def summarise(row: Row, setup: GeneratedSetup, details: list[dict[str, Any]], problems: list[str]) -> None:
    """Fill in a row's numbers from its scored completions; `problems` says which problem each one answers."""
    row.n = len(details)
    if row.scoring == "published":
        share = math.fsum(detail["right"] for detail in details) / sum(detail["total"] for detail in details)
    else:
        share = fmean(detail["accuracy"] for detail in details)
        row.metrics = {name: 100 * fmean(one["metrics"][name] for one in details) for name in details[0]["metrics"]}
        gains = [one["accuracy"] - one["before_edits"] for one in details if "before_edits" in one]
        for name, sign in (("corrected by edits", 1), ("spoiled by edits", -1)) if gains else ():
            row.metrics[name] = 100 * fmean(sign * gain > 0 for gain in gains)
    row.accuracy = 100 * share
    by_problem = grouped(details, problems)
    # Several completions of one problem are no independent trials: intervals count problems.
    several = row.scoring == "strict" and len(by_problem) < len(details)
    row.ci_low, row.ci_high = (100 * end for end in wilson_interval(share, len(by_problem) if several else row.n))
    for k in PASS_AT if several else ():
        if k <= min(map(len, by_problem.values())):
            value = fmean(pass_at_k(len(one), one.count(1.0), k) for one in by_problem.values())
            low, high = wilson_interval(value, len(by_problem))
            row.pass_at[f"pass@{k}"] = (100 * value, 100 * low, 100 * high)
    for name in ("tokens", "forward_passes", "edits"):
        counts = [count for problem in setup.problems if (count := getattr(problem, name)) is not None]
        setattr(row, name, fmean(counts) if counts else None)


def compare(name_a: str, details_a: list[dict[str, Any]], name_b: str, details_b: list[dict[str, Any]]) -> dict:
    """Paired difference of two setups over the problems they share (same question), with an exact sign test."""
    a, b = (
        {question: fmean(values) for question, values in grouped(details, [one["question"] for one in details]).items()}
        for details in (details_a, details_b)
    )
    shared = [question for question in a if question in b]
    if not shared:
        raise ValueError(f"{name_a} and {name_b} have no problem in common")
    differences = [b[question] - a[question] for question in shared]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return {
        "a": name_a,
        "b": name_b,
        "shared": len(shared),
        "only_a": len(a) - len(shared),
        "only_b": len(b) - len(shared),
        "accuracy_a": 100 * fmean(a[question] for question in shared),
        "accuracy_b": 100 * fmean(b[question] for question in shared),
        "difference": 100 * fmean(differences),
        "b_better": wins,
        "a_better": losses,
        "p_value": sign_test(wins, losses),
    }


def grouped(details: list[dict[str, Any]], keys: list[str]) -> dict[str, list[float]]:
    """The accuracies of the completions of each key."""
    scores: dict[str, list[float]] = {}
    for key, detail in zip(keys, details, strict=True):
        scores.setdefault(key, []).append(detail["accuracy"])
    return scores


# --- Published scoring ------------------------------------------------------------------------------------------------

# Faults of d1's released parser that are kept on purpose: a comma ends a number; a text without a box is its own answer
# even if it has answer tags; a problem without a ground truth counts as an error; Sudoku counts cells, not puzzles;
# mathematical answers are compared as normalised strings. One difference: the released parser evaluates ** and // in
# Countdown, which are refused here.

END_MARKS = ("<|eot_id|>", "<|endoftext|>")
Score = tuple[int, int]  # right, out of: problems, or cells for Sudoku


def score_published(task: str, text: str, row: dict[str, Any]) -> Score:
    """Points and maximum of one completion under d1's released rules; `row` has `question` and `ground_truth`."""
    if task not in SCORERS:
        raise ValueError(f"published scoring supports {', '.join(SCORERS)}, not {task!r}: use --scoring strict")
    return SCORERS[task](text, row["question"], row["ground_truth"])


def between(text: str, opening: str, *closings: str) -> str | None:
    """The text after the first `opening` up to the nearest of `closings`; None if there is no such pair."""
    _, found, rest = text.partition(opening)
    ends = [end for end in map(rest.find, closings) if end >= 0]
    return rest[: min(ends)] if found and ends else None


def tagged_answer(text: str) -> str | None:
    return None if (answer := between(text, "<answer>", "</answer>")) is None else answer.strip()


def boxed_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`; all of `text` when it has no box; None when the braces never close."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed") if "\\boxed" in text else text.rfind("\\fbox")
    if start < 0:
        return text
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if text[position] == "}" and depth == 0:
            whole = text[start : position + 1]
            return whole.removeprefix("\\boxed{")[:-1] if whole.startswith("\\boxed{") else whole
    return None


def first_float(text: str, which: int) -> float | None:
    """`text` as a number, or else the number with index `which` in it (a comma ends a number)."""
    try:
        return float(text)
    except ValueError:
        numbers = re.findall(r"-?\d+\.?\d*", text)
        return float(numbers[which]) if numbers else None


def score_gsm8k(text: str, question: str, truth: Any) -> Score:
    # Each search continues after what it has read, closed or not, so that the time is linear in the text.
    boxes = (box[1].strip() for box in re.finditer(r"\\boxed\{([^}\n]*)(\})?", text) if box[2])
    numbers = (first_float(box, 0) for box in boxes if box.strip("."))
    answer = next((number for number in numbers if number is not None), None)
    if answer is None and (tagged := tagged_answer(text)):
        answer = first_float(tagged, -1)
    return int(answer is not None and answer == truth), 1


def braced_arguments(text: str) -> str:
    r"""Add braces to arguments of one character: `\frac12` -> `\frac{1}{2}` and `\sqrt3` -> `\sqrt{3}`."""
    head, *pieces = text.split("\\sqrt")
    if "" in pieces:
        raise ValueError("nothing under the root")
    text = head + "".join("\\sqrt" + (p if p[0] == "{" else f"{{{p[0]}}}{p[1:]}") for p in pieces)
    head, *pieces = text.replace(" ", "").split("\\frac")
    if "" in pieces:
        raise ValueError("nothing in the fraction")
    for piece in pieces:
        if piece[0] != "{" and len(piece) < 2:
            return text.replace(" ", "")
        if piece[0] != "{":
            top, bottom, rest = piece[0], piece[1], piece[2:]
            piece = f"{{{top}}}" + (piece[1:] if bottom == "{" else f"{{{bottom}}}{rest}")
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
        if left := before[len(before.rstrip("0123456789+-*/() ")) :]:
            return left.strip()
    return text


def score_countdown(text: str, question: str, truth: Any) -> Score:
    from d1.tasks.countdown import evaluate  # imports datasets, which --help does not need

    numbers, target = truth
    equation = next(found for found in (boxed_answer(text), tagged_answer(text), text) if found is not None)
    for latex, sign in (("\\div", "/"), ("\\times", "*"), ("\\cdot", "*")):
        equation = equation.replace(latex, sign)
    return int(evaluate(left_of_equals(equation), numbers) == target), 1


def sudoku_answer(text: str) -> str:
    """The solution as the released parser finds it: the first of four candidates that has any text."""
    fences = text.partition("<answer>")[2].split("```")[1:-1]
    fenced = next((fence for fence in fences if re.fullmatch(r"[\d\s]+", fence)), None)
    after = None
    if "</answer>" in text:
        rest = text.partition("</answer>")[2].lstrip()
        after = rest[: min((end for end in map(rest.find, END_MARKS) if end >= 0), default=len(rest))]
    bare = re.search(r"(\d{16})\s*</answer>", text) or re.search(r"\b(\d{16})\b", text)
    candidates = (fenced, between(text, "<answer>", "</answer>", *END_MARKS), after, bare and bare[1])
    return next((found for candidate in candidates if (found := (candidate or "").strip())), "")


def score_sudoku(text: str, question: str, truth: Any) -> Score:
    puzzle = re.match(r"\d{16}", question) or re.search(r"(?<=Sudoku puzzle: )[0-9]{16}", question)
    if puzzle is None:
        raise ValueError(f"no 16 puzzle digits in the question {question[:80]!r}")
    answer = re.sub(r"\s", "", sudoku_answer(text))
    empty = [cell for cell, digit in enumerate(puzzle[0]) if digit == "0"]
    return sum(answer[cell : cell + 1] == truth[cell] for cell in empty), len(empty)


SCORERS = {"gsm8k": score_gsm8k, "math": score_math, "countdown": score_countdown, "sudoku": score_sudoku}


# --- The command ------------------------------------------------------------------------------------------------------


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = OneLineParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=str(BASELINES), help="folder of *_generations.json files")
    parser.add_argument(
        "--scoring",
        choices=["strict", "published"],
        default="strict",
        help="strict: the tasks' own metrics; published: d1's released rules, including their faults",
    )
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--details", metavar="FILE", help="write each problem's answer and score here, as JSON lines")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="paired difference of two setups: their names in FOLDER, or OTHER_FOLDER/NAME",
    )
    parser.add_argument("--allow-partial", action="store_true", help="exit with 0 even if problems are missing")
    parser.add_argument("--task_file", action="append", default=[], help="a user's task, as given to eval.py --dataset")
    return parser


def main(args: argparse.Namespace) -> int:
    """Print the table; return the exit code, 1 if a setup is incomplete or has errors."""
    if args.folder == str(BASELINES) and not BASELINES.is_dir():
        raise FileNotFoundError("name a folder of generation files: those of the pocket models come with a checkout")
    own_tasks = user_tasks(*args.task_file)
    setups = [find_setup(name, args.folder) for name in args.compare or ()] or read_setups(args.folder)
    scored = [score_setup(setup, args.scoring, own_tasks) for setup in setups]
    rows = [row for row, _ in scored]
    if args.details:
        lines = (json.dumps(detail, default=str) + "\n" for _, details in scored for detail in details)
        Path(args.details).write_text("".join(lines), encoding="utf-8")
    if args.compare:
        (row_a, details_a), (row_b, details_b) = scored
        result: Any = compare(row_a.setup, details_a, row_b.setup, details_b)
        table = "".join(f"{name:<10}  {value}\n" for name, value in result.items())
    else:
        result, table = [asdict(row) for row in rows], as_table(rows)
    sys.stdout.write(table if args.format == "table" else json.dumps(result, indent=1) + "\n")
    sys.stderr.write("".join(line + "\n" for row in rows for line in row_reports(row)))
    return 0 if args.allow_partial or all(row.complete for row in rows) else 1


def find_setup(name: str, folder: str) -> GeneratedSetup:
    """A setup by its name in `folder`, or by `other_folder/name`."""
    where, _, own = name.rpartition("/")
    setups = {setup.name: setup for setup in read_setups(where or folder)}
    if own not in setups:
        raise ValueError(f"no setup {own!r} in {where or folder}: choose one of {', '.join(setups)}")
    return setups[own]


def row_reports(row: Row) -> list[str]:
    """The errors and notes that belong to a row."""
    lines = [f"ERROR {error}" for error in row.errors]
    if row.missing_ranks:
        first, *others = row.missing_ranks
        lines.append(f"ERROR {row.setup}: no file of rank {first}{f' and {len(others)} others' * bool(others)}")
    if row.expected is not None and row.n < row.expected:
        lines.append(f"ERROR {row.setup}: {row.n} of {row.expected} problems scored")
    if row.duplicates:
        again = "counted again, as d1 does" if row.scoring == "published" else "counted once"
        lines.append(f"note  {row.setup}: {row.duplicates} problems occur more than once, {again}")
    return lines


def as_table(rows: list[Row]) -> str:
    """The rows as an aligned table with a header."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    header = ("setup", "accuracy %", "95% interval", "coverage", "tokens", "forward passes", "also %")
    lines = []
    for row in rows:
        passes = [f"{name} {value:.2f} [{low:.2f}, {high:.2f}]" for name, (value, low, high) in row.pass_at.items()]
        lines.append(
            (
                row.setup,
                number(row.accuracy, 2),
                f"[{number(row.ci_low, 2)}, {number(row.ci_high, 2)}]",
                f"{row.n}/{'?' if row.expected is None else row.expected}{'' if row.complete else ' (!)'}",
                number(row.tokens, 1),
                number(row.forward_passes, 1),
                ", ".join([*(f"{name} {value:.2f}" for name, value in row.metrics.items()), *passes]),
            )
        )
    return aligned_table(header, lines)


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command `prog` with `arguments` (default: those of the command line), then exit."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))
