"""Every method of `d1/methods.py` on the pocket Sudoku, from the base model and from SFT: does each learn?

    python pocket/compare_methods.py                       # an hour on two cores; table in runs/methods
    python pocket/compare_methods.py --methods d1 espo --rollouts 20

The same settings for all, of pocket.yaml, but for what makes the method: 60 rollouts of 64 completions, one seed, at
most 4 updates on each. Then greedy completions of the 512 validation puzzles. Nothing is tuned for a method: what this
ranks is mostly how well one learning rate suits each. Killed? The same command continues.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from demo import sft
from phases import Phase, PhaseError, run_phases
from report import accuracies, cell
from rich.console import Console

from d1.methods import METHODS
from d1.show.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
MOST_UPDATES = 4  # on each rollout, as in pocket.yaml: papers that make 8 or 12 train models of eight billion weights
STARTS = ("base", "sft")
LENGTH = 32


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS], metavar="METHOD")
    parser.add_argument("--starts", nargs="+", default=[*STARTS], choices=STARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=60, help="rollouts of 64 completions a run")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--output_dir", default=str(ROOT / "runs" / "methods"))
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs side by side")
    return parser


def run_name(method: str, start: str) -> str:
    return f"{method}_from_{start}"


def training(method: str, start: str, args: argparse.Namespace) -> Phase:
    folder, name = Path(args.output_dir).resolve(), run_name(method, start)
    updates = min(METHODS[method].values["num_iterations"], MOST_UPDATES)
    model = ROOT / "pocket" / "base" if start == "base" else folder / "sft"
    flags: list[object] = ["--config", "pocket.yaml", "--method", method, "--model_path", model, "--seed", args.seed]
    flags += ["--output_dir", folder / name, "--resume_from_checkpoint", "true", "--max_steps", updates * args.rollouts]
    flags += ["--learning_rate", args.learning_rate, "--num_generations", 8, "--logging_steps", updates]
    flags += ["--save_steps", 20 * updates, "--eval_strategy", "no"]
    flags += ["--num_iterations", updates] if updates < METHODS[method].values["num_iterations"] else []
    command = [sys.executable, "diffu_grpo_train.py", *map(str, flags)]
    return Phase(name, command, ROOT / "diffu-grpo", weight=100, needs=() if start == "base" else ("sft",))


def evaluation(name: str, model: Path, folder: Path) -> Phase:
    """Greedy completions of the validation puzzles."""
    flags: list[object] = ["--model_path", os.path.relpath(model, ROOT / "eval"), "--dataset", "sudoku"]
    flags += ["--split", "validation"]
    flags += ["--gen_length", LENGTH, "--block_length", 8, "--batch_size", 128, "--output_dir", folder / "generations"]
    command = [sys.executable, "eval.py", *map(str, flags)]
    return Phase(f"{name}_evaluated", command, ROOT / "eval", weight=10, needs=() if name == "base" else (name,))


def last_entry(folder: Path, key: str) -> float:
    """The last value of a metric that a run logged."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry[key] for entry in entries if key in entry][-1]


def table(args: argparse.Namespace) -> str:
    """Exact solves with their 95% interval, and compute in millions of tokens, of each start."""
    folder = Path(args.output_dir).resolve()
    scores = accuracies(folder)

    def solves(name: str) -> str:
        return cell(scores[f"sudoku_{name}_validation_{LENGTH}_{LENGTH // 2}"])

    rows = [["the start itself", *(text for start in args.starts for text in (solves(start), ""))]]
    for method in args.methods:
        names = [run_name(method, start) for start in args.starts]
        compute = [f"{last_entry(folder / name, 'compute_tokens') / 1e6:.0f} M" for name in names]
        rows.append([method, *(text for name, c in zip(names, compute, strict=True) for text in (solves(name), c))])
    return markdown_table(["method", *(text for start in args.starts for text in (f"from {start}", "compute"))], rows)


def main(args: argparse.Namespace) -> None:
    console = Console()
    folder = Path(args.output_dir).resolve()
    starts = [sft(folder, args.seed, miniature=False)] if "sft" in args.starts else []
    models = {"base": ROOT / "pocket" / "base"} | {phase.name: folder / phase.name for phase in starts}
    runs = [training(method, start, args) for start in args.starts for method in args.methods]
    models |= {phase.name: folder / phase.name for phase in runs}
    phases = [*starts, *runs, *(evaluation(name, model, folder) for name, model in models.items())]
    run_phases(phases, folder, args.jobs, console)
    text = table(args)
    (folder / "methods.md").write_text(text)
    console.print(text, markup=False)


if __name__ == "__main__":
    try:
        main(make_parser().parse_args())
    except (PhaseError, ValueError, OSError) as error:
        sys.exit(f"compare_methods.py: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped. The same command continues from here.")
