"""Draw the curves of one or several diffu-GRPO runs, from the trainer's own logs.

    python plot_curves.py ../runs/gsm8k ../runs/countdown --output curves.png

Four panels, as in d1's figure of training: reward, accuracy (training and, dashed, validation), distance to the
reference, completion length; each against the rollouts made.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from d1.runs.entry import run_script
from d1.show.curves import panels, running_mean, save_figure

PANELS = {
    "reward": "reward",
    "rewards/accuracy/mean": "accuracy (strict)",
    "kl": "KL to the reference",
    "completions/mean_length": "tokens to the first EOS",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="output folders of diffu_grpo_train.py")
    parser.add_argument("--labels", nargs="+", help="one a run; the folders' names if left out")
    parser.add_argument("--output", default="curves.png", help="the PNG to write")
    parser.add_argument("--smooth", type=int, default=5, help="points averaged (training curves only)")
    return parser


def read_run(folder: Path) -> tuple[list[dict[str, Any]], float]:
    """The log entries of a run, and how many optimizer steps it takes on each rollout.

    Raises:
        FileNotFoundError: the folder is no run, or one that has not saved a checkpoint yet.
    """
    states = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    states = [state for state in states if state.exists()]
    if not states or not (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder} holds no run of diffu_grpo_train.py with a checkpoint")
    history = max((json.loads(state.read_text())["log_history"] for state in states), key=len)
    settings = json.loads((folder / "run.json").read_text())["settings"]
    micro_steps = settings["steps_per_generation"] * settings["num_iterations"]
    return history, micro_steps / settings["gradient_accumulation_steps"]


def series(history: list[dict[str, Any]], name: str, steps_a_rollout: float) -> tuple[list[float], list[float]]:
    """(rollouts made, value) of every log entry that has a value for `name`."""
    points = [(entry["step"] / steps_a_rollout, float(entry[name])) for entry in history if entry.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]


def draw(runs: list[Path], labels: list[str], output: Path, smooth: int) -> None:
    figure, axes = panels(2, 2, size=(11, 7))
    for run, label in zip(runs, labels, strict=True):
        history, steps_a_rollout = read_run(run)
        for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
            x, y = series(history, name, steps_a_rollout)
            (line,) = axis.plot(x, running_mean(y, smooth), label=label)
            if name != "kl":
                axis.plot(*series(history, f"eval_{name}", steps_a_rollout), "--", color=line.get_color(), alpha=0.7)
            axis.set(title=title, xlabel="rollouts")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 4))
    save_figure(figure, output)


def main(args: argparse.Namespace) -> None:
    runs = [Path(run) for run in args.runs]
    labels = args.labels or [run.name for run in runs]
    if len(labels) != len(runs):
        raise ValueError(f"{len(labels)} labels for {len(runs)} runs")
    draw(runs, labels, Path(args.output), args.smooth)


if __name__ == "__main__":
    run_script("plot_curves.py", lambda: main(make_parser().parse_args()))
