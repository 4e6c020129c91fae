"""Does random prompt masking let mu, the updates on each rollout, grow? The paper's claim (section 5), at pocket size.

    python pocket/mu_sweep.py --seeds 0 1 2      # 18 runs from the base model; figure and table in runs/mu_sweep

mu = 1, 4 and 12 with a fresh prompt mask for each inner update and with one fixed mask, the same rollouts for all.
Killed? The same command continues.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from itertools import product
from pathlib import Path

from phases import Phase, PhaseError, run_phases
from rich.console import Console

from d1.show.curves import panels, running_mean, save_figure
from d1.show.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
MUS = (1, 4, 12)
MASKINGS = {"random": "true", "fixed": "false"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rollouts", type=int, default=60, help="rollouts of 64 completions a run")
    parser.add_argument("--model_path", "--model_name", default=str(ROOT / "pocket" / "base"))
    parser.add_argument("--output_dir", default=str(ROOT / "runs" / "mu_sweep"))
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs side by side")
    return parser


def run_name(mu: int, masking: str, seed: int) -> str:
    return f"mu{mu}_{masking}_seed{seed}"


def training(mu: int, masking: str, seed: int, args: argparse.Namespace) -> Phase:
    name = run_name(mu, masking, seed)
    flags = ["--config", "pocket.yaml", "--model_path", args.model_path, "--seed", seed]
    flags += ["--output_dir", Path(args.output_dir).resolve() / name, "--resume_from_checkpoint", "true"]
    flags += ["--num_iterations", mu, "--random_masking", MASKINGS[masking], "--max_steps", mu * args.rollouts]
    flags += ["--logging_steps", mu, "--save_steps", 10 * mu, "--eval_strategy", "no"]
    flags += ["--learning_rate", 2e-4, "--lr_scheduler_type", "constant"]
    command = [sys.executable, "diffu_grpo_train.py", *flags]
    return Phase(name, command, ROOT / "diffu-grpo", weight=60 + 12 * mu)


def rewards(folder: Path, name: str) -> list[float]:
    """Mean reward of each rollout of a run."""
    history = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return [entry["reward"] for entry in history if "reward" in entry]


def draw(curves: dict[tuple[int, str], list[list[float]]], path: Path) -> None:
    figure, axes = panels(1, len(MUS), size=(13, 4), share_y=True)
    for axis, mu in zip(axes, MUS, strict=True):
        for masking, style in zip(MASKINGS, ("-", "--"), strict=True):
            rollouts = list(zip(*(running_mean(run, 5) for run in curves[mu, masking]), strict=True))
            axis.plot([statistics.mean(values) for values in rollouts], style, label=f"{masking} mask")
            lowest, highest = [min(values) for values in rollouts], [max(values) for values in rollouts]
            axis.fill_between(range(len(rollouts)), lowest, highest, alpha=0.2)
        axis.set(title=f"mu = {mu}", xlabel="rollouts of 64 completions")
    axes[0].set_ylabel("reward: share of empty cells right")
    axes[0].legend()
    save_figure(figure, path)


def table(curves: dict[tuple[int, str], list[list[float]]]) -> str:
    """Reward over all rollouts (speed) and over the last ten (where it ends): mean [range] over seeds."""
    rows = []
    for (mu, masking), runs in curves.items():
        whole = [statistics.mean(run) for run in runs]
        last = [statistics.mean(run[-10:]) for run in runs]
        rows.append(
            [str(mu), masking, *(f"{statistics.mean(v):.3f} [{min(v):.3f}, {max(v):.3f}]" for v in (whole, last))]
        )
    return markdown_table(["mu", "prompt mask", "reward, all rollouts", "reward, last ten"], rows)


def main(args: argparse.Namespace) -> None:
    console = Console()
    folder = Path(args.output_dir).resolve()
    arms = list(product(MUS, MASKINGS))
    run_phases([training(*arm, seed, args) for seed in args.seeds for arm in arms], folder, args.jobs, console)
    curves = {arm: [rewards(folder, run_name(*arm, seed)) for seed in args.seeds] for arm in arms}
    draw(curves, folder / "mu_sweep.png")
    (folder / "mu_sweep.md").write_text(table(curves))
    console.print(table(curves), markup=False)


if __name__ == "__main__":
    try:
        main(make_parser().parse_args())
    except (PhaseError, ValueError, OSError) as error:
        sys.exit(f"mu_sweep.py: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped. The same command continues from here.")
