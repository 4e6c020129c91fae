"""The report of `make smollm`: accuracies, curves of SFT and RL, and problems before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console

from d1.eval.files import read_setups
from d1.eval.scores import Row, compare, score_setup
from d1.runs.tables import markdown_table
from d1.show.report import draw

ARMS = {"base": "as released (autoregressive)", "sft": "+ SFT", "rl": "+ SFT + RL"}
PAIRS = (("base", "sft"), ("sft", "rl"))
SHOWN = 6  # problems with their completions

Scored = tuple[Row, list[dict[str, Any]]]


def scores_of(folder: Path) -> dict[str, Scored]:
    """For each arm its row, and its problems with score and text; ValueError if an evaluation is not complete."""
    found: dict[str, Scored] = {}
    for setup in read_setups(folder / "generations"):
        arm = next(arm for arm in ARMS if setup.model.split("_")[0] == arm)
        row, details = score_setup(setup, "strict", {})
        if not row.complete:
            raise ValueError(
                f"{folder}: {row.setup} is not complete: {'; '.join(row.errors) or 'problems are missing'}"
            )
        texts = {completion.question: completion.text for completion in setup.completions}
        found[arm] = row, [{**one, "text": texts[one["question"]]} for one in details]
    return {arm: found[arm] for arm in ARMS if arm in found}


def result_lines(scored: dict[str, Scored], name: str) -> list[dict[str, Any]]:
    """For each model the problems that it solves: `right` has a digit per problem, 1 if it is solved."""
    lines = []
    for arm, (row, problems) in scored.items():
        right = "".join("1" if problem["accuracy"] else "0" for problem in problems)
        lines.append({"task": name, "model": ARMS[arm], "right": right, "passes": row.forward_passes})
    return lines


def sft_curve(folder: Path, output: Path) -> None:
    """A picture of SFT's losses by step: of training rows, and of held-out rows."""
    lines = [json.loads(line) for line in (folder / "sft" / "metrics.jsonl").read_text().splitlines()]
    figure, axis = plt.subplots(figsize=(6, 3))
    for name, label in (("loss", "training rows"), ("eval_loss", "held-out rows")):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axis.plot(*zip(*points, strict=True), marker="." if len(points) < 20 else "", label=label)
    axis.set(xlabel="step", ylabel="loss, nats per answer token", ylim=(0, None))
    axis.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    plt.close(figure)


def shown_problems(scored: dict[str, Scored]) -> str:
    """The first problems whose score changes from arm to arm, and then the first others, with all completions."""
    details = {arm: of for arm, (_, of) in scored.items()}
    numbers = range(len(next(iter(details.values()))))
    changed = [number for number in numbers if len({of[number]["accuracy"] for of in details.values()}) > 1]
    chosen = [*changed, *(number for number in numbers if number not in changed)][:SHOWN]
    parts = []
    for number in chosen:
        first = next(iter(details.values()))[number]
        parts.append(f"**{first['question'].strip()}**\n")
        for arm, of in details.items():
            mark = "right" if of[number]["accuracy"] else "wrong"
            parts.append(f"{ARMS[arm]}, {mark}:\n\n```text\n{of[number]['text'].strip()}\n```\n")
    return "\n".join(parts)


def write_report(folder: Path, name: str, seconds: dict[str, float], console: Console) -> Path:
    """Writes results.jsonl, sft.png, curves.png and report.md into `folder` and shows the table; returns the report's
    path."""
    scored = scores_of(folder)
    rows = [row for row, _ in scored.values()]
    cells = [
        [ARMS[arm], f"{row.accuracy:.1f} [{row.ci_low:.1f}, {row.ci_high:.1f}]", f"{row.forward_passes:.1f}"]
        for arm, (row, _) in scored.items()
    ]
    table = markdown_table(["model", "solved, % [95% interval]", "passes per completion"], cells)
    console.print(table, markup=False)
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in result_lines(scored, name)))
    differences = []
    for a, b in PAIRS:
        if {a, b} <= {*scored}:
            (first, of_first), (second, of_second) = scored[a], scored[b]
            found = compare(first.setup, of_first, second.setup, of_second)
            better = f"{found['b_better']} / {found['a_better']}"
            differences.append([f"{b} - {a}", f"{found['difference']:+.1f}", better, f"{found['p_value']:.2g}"])
    sft_curve(folder, folder / "sft.png")
    draw([folder / "rl"], [ARMS["rl"]], folder / "curves.png")
    times = markdown_table(["stage", "seconds"], [[stage, f"{value:.0f}"] for stage, value in seconds.items()])
    path = folder / "report.md"
    path.write_text(f"""# SmolLM2-135M on {name}

Percent of {rows[0].n} test problems solved, greedy, without examples in the prompt, with 95% intervals.

{table}
## Differences, paired by problem

{markdown_table(["", "points", "problems better / worse", "exact sign test p"], differences)}
## SFT

![Losses by step](sft.png)

## RL

![Reward, accuracy, KL and length against rollouts](curves.png)

[What RL did](rl/report.html), with the same problems before and after.

## Problems

{shown_problems(scored)}
## Seconds per stage

{times}""")
    return path
