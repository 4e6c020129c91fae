"""python -m d1 methods [NAME]: list the RL methods, or all settings of one method, by its name or its file."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from d1.ranges import setting
from d1.rl.methods import METHODS, Method
from d1.runs.tables import aligned_table, markdown_table

COLUMNS = {  # header -> the setting
    "estimator": "estimator",
    "objective": "objective",
    "loss_type": "loss_type",
    "KL": "kl",
    "beta": "beta",
    "advantage": "advantage",
    "mu": "num_iterations",
}


@dataclass(frozen=True, kw_only=True)
class MethodsFlags:
    name: str | None = setting(
        None,
        f"one of {', '.join(METHODS)}, or the path of your own .py file",
        positional=True,
        metavar="NAME",
        nargs="?",
    )
    markdown: bool = setting(False, "the table of docs/methods.md")


def run(args: MethodsFlags) -> None:
    if args.markdown:
        sys.stdout.write(page_table())
        return
    sys.stdout.write(one_method(args.name) if args.name else all_methods())


def all_methods() -> str:
    """One row per method. The KL is `-` if `beta` is 0; scaling by the group's deviation is shown as an advantage."""
    rows = []
    for name, method in METHODS.items():
        shown = dict(method.values)
        if not shown["beta"]:
            shown["kl"] = "-"
        if shown["advantage"] == "trl":
            shown["advantage"] = {"none": "r - mean", "group": "(r - mean) / std"}[shown["scale_rewards"]]
        rows.append([name, *(str(shown[setting]) for setting in COLUMNS.values()), trained_by(method), method.paper])
    return aligned_table(["method", *COLUMNS, "trained by its authors", "paper"], rows)


def page_table() -> str:
    """The table of docs/methods.md, in Markdown: the methods with a release."""
    head = ["method", "paper", "log-probabilities from; loss; KL", "release", "trained by its authors"]
    rows = []
    for name, method in METHODS.items():
        if method.page is None:
            continue
        page = method.page
        cells = [page.paper, page.scores, page.release, trained_by(method), page.largest_difference, page.differs]
        rows.append([f"`{name}`", *cells])
    return markdown_table([*head, "largest difference", "differs on purpose"], rows)


def trained_by(method: Method) -> str:
    """What a method's authors trained: "LoRA 128 on 4 bits, 16 x 6", prompts x completions per optimizer step."""
    own = method.trained
    return "-" if own is None else f"{own.weights}, {round(own.prompts, 2):g} x {method.scale['num_generations']}"


def one_method(name: str) -> str:
    """The settings of a method, or of the one in a user's file; the last ones are those that a config file overrides.

    Raises:
        ValueError, FileNotFoundError: there is no such method or file, or the file is wrong.
    """
    if name in METHODS:
        method = METHODS[name]
    else:
        from d1.rl.tables import find_method  # imports torch

        method = find_method(name)
    rows = [[f"--{setting}", str(value)] for setting, value in {**method.values, **method.scale}.items()]
    scale = f"Trained by its authors: {trained_by(method)} (prompts x completions per optimizer step)\n"
    return f"{name}: {method.paper}\n{scale if method.trained else ''}\n" + aligned_table(["setting", "value"], rows)
