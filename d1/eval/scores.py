"""python parse_and_get_acc.py [FOLDER] [--scoring strict|published] [--format table|json] [--details FILE]

Scores generation files, d1's or ours, and prints one line per setup. Without FOLDER it scores `eval_baselines/`, the
generations of the pocket models. The exit code is 1 if a setup is incomplete, unless `--allow-partial` is given.

    python -m d1 parse results/ --compare sudoku_base_32_16 sudoku_sft_32_16

`strict` scores by the tasks' own rules (`extract` and `score` in `d1.tasks`). `published` scores like d1's released
parser, including its faults, so that its published figures can be checked (`published_rules.py`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NoReturn

from d1 import extensions
from d1.eval.files import D1_TASKS, UNKNOWN, GeneratedCompletion, GeneratedSetup, read_setups
from d1.eval.uncertainty import pass_at_k, sign_test, wilson_interval
from d1.files import check_output_dir
from d1.ranges import setting
from d1.runs.cli import SettingsParser, run_script
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
    setup: GeneratedSetup, scoring: str, user_task_modules: Mapping[str, ModuleType]
) -> tuple[Row, list[dict[str, Any]]]:
    """The row of a setup, and the score of each of its problems.

    Args:
        scoring: "strict" (`d1.tasks`; each problem counts once) or "published" (d1's released rules; repeats count
            again).
        user_task_modules: the user's tasks, by the task's name in the files.
    """
    row = Row(setup.name, setup.task, setup.model, setup.gen_length, scoring, expected=setup.expected)
    row.missing_ranks, row.errors = setup.missing_ranks, list(setup.errors)
    if setup.errors and not setup.completions:
        return row, []
    task = None
    try:
        if scoring == "strict":
            if setup.task == UNKNOWN:
                raise ValueError(
                    f"unknown task: its name begins with none of {', '.join(D1_TASKS)}, and its files do not have the "
                    'task\'s name as "task", next to "generations": write it there'
                )
            if setup.task not in {**TASKS, **user_task_modules}:  # a file must not name code to run
                raise ValueError(f"unknown task {setup.task!r}: name its file with --task_file")
            task = under_protocol(user_task_modules.get(setup.task) or load_task(setup.task), setup.protocol)
        elif setup.protocol != "d1":
            raise ValueError(f"the published rules are for d1's prompts, but these files have {setup.protocol}'s")
    except ValueError as error:
        row.errors.append(f"{setup.name}: {error}")
        return row, []

    # A completion that occurs twice counts once by the tasks' rules, and twice by the published ones.
    by_key: dict[str, GeneratedCompletion] = {}
    for completion in setup.completions:
        by_key.setdefault(completion.key, completion)
    completions = setup.completions if task is None else list(by_key.values())

    details: list[dict[str, Any]] = []
    problems: list[str] = []
    with ThreadPoolExecutor(getattr(task, "CONCURRENT", 1)) as pool:
        parallel_map = pool.map if hasattr(task, "CONCURRENT") else map
        results = parallel_map(partial(score_completion, setup, task), completions)
        for completion, detail in zip(completions, results, strict=True):
            if isinstance(detail, str):
                row.errors.append(f"{completion.where}: {detail}")
                continue
            if details:
                difference = compare_metrics(details[0], detail)
                if difference is not None:
                    row.errors.append(f"{completion.where}: {difference}")
                    continue
            details.append({"setup": setup.name, "where": completion.where, **detail})
            problems.append(completion.problem)

    row.duplicates = len(setup.completions) - len(by_key)
    if details:
        summarise(row, setup, details, problems)
    if row.expected is not None and len(by_key) > row.expected:
        row.errors.append(
            f"{setup.name}: {len(by_key)} completions instead of {row.expected}: those of another run are mixed in"
        )
    has_all = len(details) > 0 and len(by_key) >= (row.expected or 0)
    row.complete = has_all and not row.errors and not row.missing_ranks
    return row, details


def score_completion(
    setup: GeneratedSetup, task: ModuleType | None, completion: GeneratedCompletion
) -> dict[str, Any] | str:
    """The score of a completion by its task or, if that is None, by the published rules; an error as text, whatever the
    task raises, so that the others are still scored. Raises SandboxError if there is no sandbox for programs."""
    row = {"question": completion.question, "ground_truth": completion.ground_truth}
    try:
        if task is None:
            from d1.eval.published_rules import score_published  # imports datasets, which --help does not need

            right, total = score_published(setup.task, completion.raw[-MAX_TEXT:], row)
            return {**row, "right": right, "total": total, "accuracy": right / total}
        scores = score_strict(completion.text[-MAX_TEXT:], task, row)
        if completion.first_text is not None:
            first_scores = scores
            if completion.first_text != completion.text:
                first_scores = score_strict(completion.first_text[-MAX_TEXT:], task, row)
            scores["before_edits"] = first_scores["accuracy"]
        return {**row, **scores}
    except Exception as error:
        if isinstance(error, extensions.SandboxError):  # no verdict, for any completion
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"


def compare_metrics(first: dict[str, Any], detail: dict[str, Any]) -> str | None:
    """The error if a completion's score has other metrics than that of the first completion; None if it has not."""
    names = sorted(detail.get("metrics", {}))
    first_names = sorted(first.get("metrics", {}))
    if names == first_names:
        return None
    return (
        f"score() of the task returns the metrics {names} after its first one, but {first_names} for {first['where']}: "
        "return the same names for every completion"
    )


def user_tasks(*names_or_paths: str) -> dict[str, ModuleType]:
    """The user's tasks (those given as files), by their names in generation files. Raises ValueError for a file with
    the name of a built-in task, by which its completions would be scored later."""
    tasks: dict[str, ModuleType] = {}
    for path in names_or_paths:
        if path in TASKS:
            continue
        name = Path(path).stem
        if name in TASKS:
            raise ValueError(f"task file {path}: {name} is the name of a task of this library; rename the file")
        tasks[name] = load_task(path)
    return tasks


def score_strict(text: str, task: ModuleType, row: dict[str, Any]) -> dict[str, Any]:
    """The answer that a task reads in a text, and its metrics."""
    if row["ground_truth"] is None:
        raise ValueError("no ground truth")
    answer = task.extract(text)
    scores = task.score(text, row)
    if not isinstance(scores, Mapping) or not scores:
        raise ValueError(f"score() of the task must return its metrics, as in {{'accuracy': 1.0}}, got {scores!r:.80}")
    if any(not 0 <= value <= 1 for value in scores.values()):
        raise ValueError(f"scores must lie in [0, 1], got {scores}")
    accuracy, *other_metrics = scores
    return {
        "answer": None if answer is None else str(answer),
        "accuracy": scores[accuracy],
        "metrics": {name: scores[name] for name in other_metrics},
    }


def summarise(row: Row, setup: GeneratedSetup, details: list[dict[str, Any]], problems: list[str]) -> None:
    """Fill in a row's numbers from its scored completions; `problems` says which problem each one answers."""
    row.n = len(details)
    if row.scoring == "published":
        share = math.fsum(detail["right"] for detail in details) / sum(detail["total"] for detail in details)
    else:
        share = fmean(detail["accuracy"] for detail in details)
        for name in details[0]["metrics"]:
            row.metrics[name] = 100 * fmean(detail["metrics"][name] for detail in details)
        gains = [detail["accuracy"] - detail["before_edits"] for detail in details if "before_edits" in detail]
        if gains:
            row.metrics["corrected by edits"] = 100 * fmean(gain > 0 for gain in gains)
            row.metrics["spoiled by edits"] = 100 * fmean(gain < 0 for gain in gains)
    row.accuracy = 100 * share

    # Several completions of one problem are no independent trials: intervals count problems.
    by_problem = group_accuracies(details, problems)
    low, high = wilson_interval(share, len(by_problem))
    row.ci_low, row.ci_high = 100 * low, 100 * high

    # pass@k, if a completion is either right or wrong: accuracies may also be shares.
    is_verdict = all(detail["accuracy"] in (0, 1) for detail in details)
    if row.scoring == "strict" and is_verdict and len(by_problem) < len(details):
        min_samples = min(len(accuracies) for accuracies in by_problem.values())
        for k in sorted({*PASS_AT, min_samples}):
            if k <= min_samples:
                estimates = []
                for accuracies in by_problem.values():
                    estimates.append(pass_at_k(len(accuracies), accuracies.count(1.0), k))
                value = fmean(estimates)
                low, high = wilson_interval(value, len(by_problem))
                row.pass_at[f"pass@{k}"] = (100 * value, 100 * low, 100 * high)

    for name in ("tokens", "forward_passes", "edits"):
        counts = [getattr(completion, name) for completion in setup.completions]
        counts = [count for count in counts if count is not None]
        setattr(row, name, fmean(counts) if counts else None)


def compare(name_a: str, details_a: list[dict[str, Any]], name_b: str, details_b: list[dict[str, Any]]) -> dict:
    """Paired difference of two setups over the problems they share (same question and ground truth), with an exact sign
    test."""
    a = mean_accuracies(details_a)
    b = mean_accuracies(details_b)
    shared = [problem for problem in a if problem in b]
    if not shared:
        raise ValueError(f"{name_a} and {name_b} have no problem in common")
    differences = [b[problem] - a[problem] for problem in shared]
    wins = sum(difference > 0 for difference in differences)
    losses = sum(difference < 0 for difference in differences)
    return {
        "a": name_a,
        "b": name_b,
        "shared": len(shared),
        "only_a": len(a) - len(shared),
        "only_b": len(b) - len(shared),
        "accuracy_a": 100 * fmean(a[problem] for problem in shared),
        "accuracy_b": 100 * fmean(b[problem] for problem in shared),
        "difference": 100 * fmean(differences),
        "b_better": wins,
        "a_better": losses,
        "p_value": sign_test(wins, losses),
    }


def mean_accuracies(details: list[dict[str, Any]]) -> dict[str, float]:
    """The mean accuracy of each problem's completions, by its question and ground truth."""
    problems = [json.dumps([detail["question"], detail["ground_truth"]], default=str) for detail in details]
    by_problem = group_accuracies(details, problems)
    return {problem: fmean(accuracies) for problem, accuracies in by_problem.items()}


def group_accuracies(details: list[dict[str, Any]], keys: list[str]) -> dict[str, list[float]]:
    """The accuracies of the completions of each key."""
    accuracies: dict[str, list[float]] = {}
    for key, detail in zip(keys, details, strict=True):
        accuracies.setdefault(key, []).append(detail["accuracy"])
    return accuracies


# --- The command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ParseFlags:
    folder: str = setting(str(BASELINES), "folder of *_generations.json files", positional=True, nargs="?")
    scoring: str = setting(
        "strict",
        "strict: the tasks' own metrics; published: d1's released rules, including their faults",
        choices=["strict", "published"],
    )
    format: str = setting("table", choices=["table", "json"])
    details: str | None = setting(None, "write each problem's answer and score here, as JSON lines", metavar="FILE")
    compare: list[str] | None = setting(
        None,
        "paired difference of two setups: their names in FOLDER, or OTHER_FOLDER/NAME",
        nargs=2,
        metavar=("A", "B"),
    )
    allow_partial: bool = setting(False, "exit with 0 even if problems are missing", flag="--allow-partial")
    task_file: list[str] = setting([], "a user's task, as given to eval.py --dataset", action="append")


def make_parser(prog: str | None = None) -> SettingsParser[ParseFlags]:
    return SettingsParser(ParseFlags, prog, __doc__)


def main(args: ParseFlags) -> int:
    """Print the table; return the exit code, 1 if a setup is incomplete or has errors."""
    if args.folder == str(BASELINES) and not BASELINES.is_dir():
        raise FileNotFoundError("name a folder of generation files: those of the pocket models come with a checkout")
    if args.details:
        check_output_dir(Path(args.details).parent, "--details: the folder")
    user_task_modules = user_tasks(*args.task_file)
    if args.compare:
        setups = [find_setup(name, args.folder) for name in args.compare]
    else:
        setups = read_setups(args.folder)
    scored = [score_setup(setup, args.scoring, user_task_modules) for setup in setups]
    rows = [row for row, _ in scored]
    if args.details:
        lines = []
        for _, details in scored:
            for detail in details:
                lines.append(json.dumps(detail, default=str) + "\n")
        Path(args.details).parent.mkdir(parents=True, exist_ok=True)
        Path(args.details).write_text("".join(lines), encoding="utf-8")
    if args.compare:
        for row, details in scored:
            if row.errors and not details:
                raise ValueError(row.errors[0])
        (row_a, details_a), (row_b, details_b) = scored
        result: Any = compare(row_a.setup, details_a, row_b.setup, details_b)
        table = "".join(f"{name:<10}  {value}\n" for name, value in result.items())
    else:
        result = [asdict(row) for row in rows]
        table = as_table(rows)
    sys.stdout.write(table if args.format == "table" else json.dumps(result, indent=1) + "\n")
    for row in rows:
        for line in row_reports(row):
            sys.stderr.write(line + "\n")
    return 0 if args.allow_partial or all(row.complete for row in rows) else 1


def find_setup(name: str, folder: str) -> GeneratedSetup:
    """A setup by its name in `folder`, or by `other_folder/name`."""
    other_folder, _, setup_name = name.rpartition("/")
    if other_folder:
        folder = other_folder
    setups = {setup.name: setup for setup in read_setups(folder)}
    if setup_name not in setups:
        raise ValueError(f"no setup {setup_name!r} in {folder}: choose one of {', '.join(setups)}")
    return setups[setup_name]


def row_reports(row: Row) -> list[str]:
    """The errors and notes that belong to a row."""
    lines = [f"ERROR {error}" for error in row.errors]
    if row.missing_ranks:
        line = f"ERROR {row.setup}: no file of rank {row.missing_ranks[0]}"
        if len(row.missing_ranks) > 1:
            line += f" and {len(row.missing_ranks) - 1} others"
        lines.append(line)
    if row.expected is not None and row.n < row.expected:
        lines.append(f"ERROR {row.setup}: {row.n} of {row.expected} completions scored")
    if row.duplicates:
        treatment = "counted again, as d1 does" if row.scoring == "published" else "counted once"
        lines.append(f"note  {row.setup}: {row.duplicates} completions occur more than once, {treatment}")
    return lines


def as_table(rows: list[Row]) -> str:
    """The rows as an aligned table with a header."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    header = ("setup", "accuracy %", "95% interval", "coverage", "tokens", "forward passes", "also %")
    lines = []
    for row in rows:
        expected = "?" if row.expected is None else row.expected
        coverage = f"{row.n}/{expected}"
        if not row.complete:
            coverage += " (!)"
        other_metrics = [f"{name} {value:.2f}" for name, value in row.metrics.items()]
        for name, (value, low, high) in row.pass_at.items():
            other_metrics.append(f"{name} {value:.2f} [{low:.2f}, {high:.2f}]")
        cells = (
            row.setup,
            number(row.accuracy, 2),
            f"[{number(row.ci_low, 2)}, {number(row.ci_high, 2)}]",
            coverage,
            number(row.tokens, 1),
            number(row.forward_passes, 1),
            ", ".join(other_metrics),
        )
        lines.append(cells)
    return aligned_table(header, lines)


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command `prog` with `arguments` (default: those of the command line), then exit."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))
