"""Turns the problems of a setup into one row of the results table, and pairs two setups problem by problem."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from d1.eval.files import GeneratedProblem, GeneratedSetup
from d1.show.uncertainty import sign_test, wilson_interval
from d1.tasks import MAX_TEXT, TASKS, load_task
from d1.tasks.protocols import under_protocol


@dataclass
class Row:
    """One setup's results; `accuracy`, its 95% interval, `metrics`, `pass_at_k` and `majority` are in percent,
    `tokens` (generated before the end) and `forward_passes` means over completions."""

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
    num_samples: int = 0
    pass_at_k: float | None = None
    majority: float | None = None
    tokens: float | None = None
    forward_passes: float | None = None
    duplicates: int = 0
    missing_ranks: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False


def score_setup(
    setup: GeneratedSetup, scoring: str, own_tasks: Mapping[str, ModuleType]
) -> tuple[Row, list[dict[str, Any]]]:
    """The row of a setup and what was made of each of its problems.

    Args:
        scoring: "strict" (`d1.tasks`; each problem once) or "published" (d1's released rules; repeats count again).
        own_tasks: task modules beyond d1's own, by the task's name in the files.
    """
    row = Row(setup.name, setup.task, setup.model, setup.gen_length, scoring, expected=setup.expected)
    row.duplicates, row.missing_ranks = setup.duplicates, setup.missing_ranks
    row.errors, row.notes = list(setup.errors), list(setup.notes)
    if setup.errors and not setup.problems:
        return row, []
    task = None
    try:
        if scoring == "strict":
            if setup.task not in {**TASKS, **own_tasks}:  # a file must not name code to run
                raise ValueError(f"unknown task {setup.task!r}: name its file with --task_file")
            task = under_protocol(own_tasks.get(setup.task) or load_task(setup.task), setup.protocol)
        elif setup.protocol != "d1":
            raise ValueError(f"the published rules are for d1's prompts, and these are {setup.protocol}'s")
    except ValueError as error:
        row.errors.append(f"{setup.name}: {error}")
        return row, []
    details, seen = [], set()
    for problem in setup.problems:
        if problem.key in seen and task is not None:
            continue
        seen.add(problem.key)
        asked = {"question": problem.question, "ground_truth": problem.ground_truth}
        if any(len(sample.raw) > MAX_TEXT for sample in problem.samples):
            row.notes.append(f"{problem.where}: only the last {MAX_TEXT} characters of a long completion were read")
        try:
            if task is not None:
                detail = strict_detail(problem, task, asked)
            else:
                from d1.eval.published_scoring import score_published  # it imports datasets, which --help does without

                right, total = score_published(setup.task, problem.samples[0].raw[-MAX_TEXT:], asked)
                detail = {"right": right, "total": total, "accuracy": right / total}
        except Exception as error:  # whatever one item makes a task raise, the others are still scored
            row.errors.append(f"{problem.where}: {type(error).__name__}: {str(error)[:200]}")
            continue
        details.append({"setup": setup.name, "where": problem.where, **asked, **detail})
    if details:
        summarise(row, setup, details)
    if row.expected is not None and len(seen) > row.expected:
        row.errors.append(
            f"{setup.name}: {len(seen)} problems where {row.expected} are expected: another run's are mixed in"
        )
    row.complete = not row.errors and not row.missing_ranks and len(details) > 0 and len(seen) >= (row.expected or 0)
    return row, details


def user_tasks(*names_or_paths: str) -> dict[str, ModuleType]:
    """The tasks among these that are files, by their names in generation files."""
    return {Path(path).stem: load_task(path) for path in names_or_paths if path not in TASKS}


def strict_detail(problem: GeneratedProblem, task: ModuleType, row: dict[str, Any]) -> dict[str, Any]:
    """Strict scores of one problem: means over its samples, whether any is right, and the majority's score."""
    if problem.ground_truth is None:
        raise ValueError("no ground truth")
    texts = [sample.text[-MAX_TEXT:] for sample in problem.samples]
    answers = [task.extract(text) for text in texts]
    scores = [task.score(text, row) for text in texts]
    accuracy, *others = scores[0]
    if any(not 0 <= value <= 1 for score in scores for value in score.values()):
        raise ValueError(f"scores must lie in [0, 1], got {scores}")
    votes = Counter(str(answer) for answer in answers if answer is not None)
    elected = [str(answer) for answer in answers].index(votes.most_common(1)[0][0]) if votes else 0
    return {
        "answers": [None if answer is None else str(answer) for answer in answers],
        "accuracy": fmean(score[accuracy] for score in scores),
        "metrics": {name: fmean(score[name] for score in scores) for name in others},
        "any_right": max(score[accuracy] for score in scores),
        "majority": scores[elected][accuracy],
    }


def summarise(row: Row, setup: GeneratedSetup, details: list[dict[str, Any]]) -> None:
    """Fills in the figures of a row from its scored problems."""
    row.n = len(details)
    row.num_samples = max(len(problem.samples) for problem in setup.problems)
    if row.scoring == "published":
        share = math.fsum(detail["right"] for detail in details) / sum(detail["total"] for detail in details)
        row.num_samples = 1
    else:
        share = fmean(detail["accuracy"] for detail in details)
        row.metrics = {
            name: 100 * fmean(detail["metrics"][name] for detail in details) for name in details[0]["metrics"]
        }
        if row.num_samples > 1:
            row.pass_at_k = 100 * fmean(detail["any_right"] for detail in details)
            row.majority = 100 * fmean(detail["majority"] for detail in details)
    row.accuracy = 100 * share
    row.ci_low, row.ci_high = (100 * end for end in wilson_interval(share, row.n))
    samples = [sample for problem in setup.problems for sample in problem.samples]
    for name in ("tokens", "forward_passes"):
        counts = [count for sample in samples if (count := getattr(sample, name)) is not None]
        setattr(row, name, fmean(counts) if counts else None)


def compare(name_a: str, details_a: list[dict[str, Any]], name_b: str, details_b: list[dict[str, Any]]) -> dict:
    """Paired difference of two setups over the problems they share (same question), with an exact sign test.

    Raises:
        ValueError: they share no problem.
    """
    a, b = ({detail["question"]: detail["accuracy"] for detail in details} for details in (details_a, details_b))
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
