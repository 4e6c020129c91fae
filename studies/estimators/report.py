"""The report of the study of estimators: a figure, one table per model, and whether it predicts the leaderboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d1.show.curves import LINES, legend, panels, save_figure
from d1.show.tables import markdown_table
from studies.estimators.measures import CHOICES
from studies.leaderboard.statistics import correlation
from studies.pages import reading

Line = dict[str, Any]
COLUMNS = {  # of the figure: title -> the value of a result
    "deviation of a value, nats a token": lambda line: line["deviation"],
    "signal to noise, for a rollout's tokens": lambda line: signal_to_noise(line),
    "cosine to the bound's gradient": lambda line: line["cosine_to_bound"],
    "cosine to the trajectory's gradient": lambda line: line["cosine_to_trajectory"],
}
PREDICTORS = {  # of a method's rank on the leaderboard: title -> the value of a result
    "cosine to bound": lambda line: line["cosine_to_bound"],
    "cosine to trajectory": lambda line: line["cosine_to_trajectory"],
    "deviation": lambda line: line["deviation"],
    "update / rollout": lambda line: line["tokens_of_update"] / line["tokens_of_rollout"],
}
# Method -> the choice that is its estimator. Left out are just-grpo, which samples left to right and so has another
# trajectory, and methods that score a few chosen states.
CHOICE_OF = {
    "d1": ("one step, prompt hidden by .15", 1),
    "wd1": ("one step, prompt hidden by .15", 1),
    "coupled-grpo": ("coupled", 3),
    "espo": ("espo, opposite, stratified", 4),
    "spg": ("spg", 2),
    "agrpo": ("replay, drawn evenly", 24),
    "agrpo-entropy": ("replay, drawn by entropy", 24),
    "cj-grpo": ("replay, every step", 16),
    "d2": ("segments, prompt hidden by .15", 16),
    "tracerl": ("replay, merged", 2),
    "unigrpo": ("random mask", 35),
    "bgpo": ("counts, stratified", 16),
    "stable-drl": ("spg", 2),
    "gdpo": ("gauss", 3),
    "gdsd": ("complements", 4),
    "dipo": ("replay, every step", 16),
    "ebpo": ("counts, stratified", 16),
    "trajectory": ("replay, drawn by entropy", 24),
    "reinforce": ("elbo, opposite, stratified", 8),
}


def signal_to_noise(line: Line) -> float | None:
    """Signal to noise of the gradient on the given completions: its square over the variance from drawing views, for as
    many draws as the tokens of one rollout pay for. None if nothing is drawn."""
    if not line["within"]:
        return None
    draws = line["tokens_of_rollout"] / line["tokens_of_update"]
    return max(0.0, line["signal"]) / (line["within"] / line["of"]["groups"]) * draws


def share_of_views(line: Line) -> float:
    """The share of the variance that comes from drawing views."""
    return line["within"] / (line["between"] + line["within"])


def table(lines: list[Line]) -> str:
    """One row per choice."""
    rows = [
        [
            line["name"],
            str(line["views"]),
            f"{line['tokens_of_update'] / line['tokens_of_rollout']:.2f}",
            f"{line['bias_to_bound']:+.3f}",
            f"{line['bias_to_trajectory']:+.3f}",
            f"{line['deviation']:.3f}",
            two_digits(signal_to_noise(line)),
            f"{100 * share_of_views(line):.0f}%",
            *(two_digits(line[f"{kind}cosine_to_{to}"]) for to in ("bound", "trajectory") for kind in ("", "long_")),
        ]
        for line in lines
    ]
    header = ["estimator", "views", "update / rollout", "bias to bound", "to trajectory", "deviation", "SNR"]
    header += ["of views", "cosine to bound", "in the mean", "to trajectory", "in the mean"]
    return markdown_table(header, rows)


def two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(by_model: dict[str, list[Line]], path: Path) -> None:
    """Plots one row per model, one column for each of `COLUMNS`, against views; a line or a point per estimator."""
    figure, axes = panels(len(by_model), len(COLUMNS), size=(4 * len(COLUMNS), 3.4 * len(by_model)))
    places = iter(axes)
    names = [*dict.fromkeys(choice.name for choice in CHOICES)]
    for model, lines in by_model.items():
        for title, value in COLUMNS.items():
            axis = next(places)
            for number, name in enumerate(names):
                found = ((line["views"], value(line)) for line in lines if line["name"] == name)
                own = sorted(pair for pair in found if pair[1] is not None)
                marker = "os^Dv<>Pp*Xh"[number % 12]
                axis.plot(
                    *zip(*own, strict=True), marker=marker, label=name, **LINES[number % len(LINES)]
                ) if own else None
            axis.set(title=f"{model}\n{title}", xlabel="views", xscale="log")
            axis.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    legend(figure, columns=6)
    save_figure(figure, path)


def write_report(lines: list[Line], path: Path, accuracies: Mapping[str, Mapping[str, float]]) -> str:
    """Writes the page and its figure; `accuracies` are the leaderboard's, task -> method -> share solved."""
    order = {(choice.name, choice.views): place for place, choice in enumerate(CHOICES)}
    by_model: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: order[line["name"], line["views"]]):
        by_model.setdefault(line["of"]["model"], []).append(line)
    if not by_model:
        return "Nothing has been measured yet."
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = path.with_suffix(".png")
    draw(by_model, figure)
    text = PAGE.format(figure=figure.name, reading=reading(path))
    for model, own in sorted(by_model.items()):
        text += heading(model, own) + table(own) + "\n"
    text += prediction(by_model, accuracies)
    path.write_text(text.rstrip() + "\n")
    return f"Tables: {path}"


def heading(model: str, lines: list[Line]) -> str:
    first, of = lines[0], lines[0]["of"]
    partial = "" if len(lines) == len(CHOICES) else f" **Partial: {len(lines)} of {len(CHOICES)} rows.**"
    errors = f"relative error {100 * first['bound_error']:.2f}%, of its gradient {100 * first['gradient_error']:.1f}%"
    return (
        f"## {model}\n\n{of['groups']} training problems with {of['group']} completions each.{partial} The any-order "
        f"bound is {first['bound']:.3f} nats per token ({errors}), the sampler's own trajectory "
        f"{first['trajectory']:.3f}; a rollout processes {first['tokens_of_rollout']:.0f} tokens per completion.\n\n"
    )


def prediction(by_model: dict[str, list[Line]], accuracies: Mapping[str, Mapping[str, float]]) -> str:
    """One table per task: each method's estimator on the SFT model, its accuracy on the leaderboard, and rank
    correlations of the two; empty if either is missing."""
    text = ""
    for task, ends in accuracies.items():
        lines = {(line["name"], line["views"]): line for line in by_model.get(f"{task}: SFT", [])}
        found = {method: lines[choice] for method, choice in CHOICE_OF.items() if method in ends and choice in lines}
        if found:
            text += f"### {task}\n\n{prediction_table(found, ends)}\n"
    return text and PREDICTION + text


def prediction_table(found: Mapping[str, Line], ends: Mapping[str, float]) -> str:
    """One row per method, the best first, and a last row of correlations."""
    values = {title: {method: of(line) for method, line in found.items()} for title, of in PREDICTORS.items()}
    rows = [
        [method, "{}, {}".format(*CHOICE_OF[method]), f"{100 * ends[method]:.1f}"]
        + [two_digits(column[method]) for column in values.values()]
        for method in sorted(found, key=lambda method: -ends[method])
    ]
    rows.append(["rank correlation", "", "", *(correlation(ends, column) for column in values.values())])
    return markdown_table(["method", "estimator, views", "leaderboard, %", *PREDICTORS], rows)


PAGE = """# Which estimator of log-probabilities, with how many views?

Written by `python -m studies.estimators.run`. For completions that a pocket model sampled as in RL, every estimator of
`d1/scoring/` is compared with two values of log p: the any-order bound, estimated from many draws, and the sampler's
own trajectory, which replay of every step gives exactly.

{reading}

![Deviation, signal to noise and cosines against views]({figure})

- update / rollout: tokens of one update (backward passes count twice) divided by those of its rollout.
- bias: mean value minus the bound's, and minus the trajectory's, in nats per token. `coupled` is divided by the
  sum of its weights, 1.5.
- deviation: standard deviation of a completion's value between draws, in nats per token.
- SNR: square of the policy gradient on these completions, divided by its variance from drawing views, for as many draws
  as the tokens of one rollout pay for. Empty if nothing is drawn, because then there is only bias.
- of views: the share of the variance of a group's gradient that comes from drawing views; the rest is between groups.
- cosine: between the gradient on these completions (from one draw; and from all draws, corrected for noise) and that of
  the bound or the trajectory. Left empty where the estimate is mostly noise.

"""

PREDICTION = """## Does it predict the leaderboard?

Each method's estimator on the SFT model, the method's final accuracy in [leaderboard.md](leaderboard.md), and
Spearman's rank correlation of the two over the methods.

"""
