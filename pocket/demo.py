"""The main demo: all of d1 on a pocket model, base -> SFT -> diffu-GRPO -> evaluation -> report.

    make demo                                 # sets up an environment, then runs the next line
    python -m pocket.demo --seed 0            # five to eight minutes on two cores; results in runs/demo/seed0
    python -m pocket.demo --task countdown    # another task; results in runs/demo/countdown/seed0
    python -m pocket.demo --model block       # the block-causal pocket model; results in runs/demo/block/seed0
    python -m pocket.demo --seed 0 --miniature --output_dir runs/miniature     # one minute; shows that everything works

Every stage is run by its real command. Ctrl-C stops the demo; run the same command to continue.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from d1.ranges import COUNT, SEED
from d1.runs.cli import OneLineParser
from pocket.phases import Phase, PhaseError, run_phases
from pocket.recipes import RECIPES, ROOT
from pocket.report import ARMS, FOUR_ARMS, demo_folder, write_report

BLOCK_BASE = "block_base"  # folder in pocket/, for Sudoku

# With pocket.yaml's learning rate, 3e-4, Countdown and arithmetic end below their start.
LOWER = ("--learning_rate", 1e-4)
OWN = {"countdown": LOWER, "arithmetic": LOWER, "programs": ("--max_steps", 120)}
# Flags of RL in addition to pocket.yaml.
GRPO = {
    task: (
        *("--dataset", recipe.task, "--max_prompt_length", recipe.prompt_tokens, *OWN.get(task, ())),
        *("--max_completion_length", recipe.lengths[0], "--diffusion_steps", recipe.lengths[0] // 2),
    )
    for task, recipe in RECIPES.items()
}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*RECIPES], default="sudoku")
    parser.add_argument("--model", choices=["full", "block"], default="full", help="attention; block: only for Sudoku")
    parser.add_argument("--seed", type=SEED, default=0, help="seed of SFT and RL; the base model stays the same")
    parser.add_argument("--output_dir", help="results go to its folder seedN; default: runs/demo, or runs/demo/TASK")
    jobs = "commands run at the same time (default: the three RL runs, on one core one command)"
    parser.add_argument("--jobs", type=COUNT, default=3 if (os.cpu_count() or 1) > 1 else 1, help=jobs)
    parser.add_argument("--miniature", action="store_true", help="run every stage with a few steps and problems")
    return parser


def arms_of(task: str) -> tuple[str, ...]:
    """The four arms, and for Sudoku the control."""
    return tuple(ARMS) if task == "sudoku" else FOUR_ARMS


def base_of(task: str, model: str = "full") -> Path:
    return ROOT / "pocket" / (BLOCK_BASE if model == "block" else RECIPES[task].base)


def sft(folder: Path, seed: int, miniature: bool, task: str = "sudoku", model: str = "full") -> Phase:
    """Light SFT on 1,000 curated traces: one epoch, all weights."""
    recipe = RECIPES[task]
    flags = ["--train_data", ROOT / "dataset" / recipe.sft_file, "--full_finetuning", "--debugging", "--resume"]
    flags += ["--num_epochs", 1, "--batch_size", 32, "--grad_accum_steps", 1, "--learning_rate", 2e-4]
    flags += ["--eos_padding", recipe.lengths[-1], "--max_length", 128, "--logging_steps", 4, "--eval_steps", 10]
    flags += ["--num_proc", 1, "--model_name", base_of(task, model), "--output_dir", folder, "--job_name", "sft"]
    flags += ["--seed", seed, *(["--max_steps", 4] if miniature else [])]
    return Phase("sft", [sys.executable, "sft_train.py", *map(str, flags)], ROOT / "SFT", weight=15)


def phases_of(folder: Path, seed: int, miniature: bool, task: str = "sudoku", model: str = "full") -> list[Phase]:
    base, arms, recipe = base_of(task, model), arms_of(task), RECIPES[task]

    def grpo(name: str, start: Path, needs: tuple[str, ...] = ()) -> Phase:
        """diffu-GRPO with pocket.yaml: 120 rollouts, or 30 for programs."""
        flags = ["--config", "pocket.yaml", "--model_path", start, "--output_dir", folder / name, "--seed", seed]
        flags += ["--resume_from_checkpoint", "true", "--report", "true", *GRPO[task]]
        flags += ["--task", ROOT / "pocket" / "shuffled_sudoku.py"] if name == "shuffled" else []
        flags += ["--max_steps", 8, "--eval_strategy", "no", "--save_steps", 4] if miniature else []
        command = [sys.executable, "diffu_grpo_train.py", *map(str, flags)]
        return Phase(name, command, ROOT / "diffu-grpo", weight=120, needs=needs)

    def evaluation(arm: str) -> Phase:
        """Greedy completions of the test problems at each length."""
        # Relative, so that the generation files contain no absolute paths.
        path = os.path.relpath(base if arm == "base" else folder / arm, ROOT / "eval")
        flags = ["--model_path", path, "--dataset", recipe.task, "--gen_length", *recipe.lengths, "--block_length", 8]
        flags += ["--batch_size", 128, "--output_dir", folder / "generations", *(["--limit", 16] if miniature else [])]
        command = [sys.executable, "eval.py", *map(str, flags)]
        return Phase(f"{arm}_evaluated", command, ROOT / "eval", weight=20, needs=() if arm == "base" else (arm,))

    # The control takes longest: nearly none of its completions end early. All RL runs start as soon as they can, and
    # share the cores, so that two cores are both busy to the end.
    train = [grpo("shuffled", base)] if "shuffled" in arms else []
    train += [sft(folder, seed, miniature, task, model), grpo("grpo", base)]
    train += [grpo("sft_grpo", folder / "sft", needs=("sft",))]
    return [*train, *map(evaluation, arms)]


def main(args: argparse.Namespace) -> None:
    if args.model == "block" and args.task != "sudoku":
        raise ValueError("--model block exists only for Sudoku: leave out --task")
    console = Console()
    output_dir = Path(args.output_dir) if args.output_dir else demo_folder(args.task)
    folder = output_dir.resolve() / ("" if args.model == "full" else args.model) / f"seed{args.seed}"
    console.print(f"d1 on the pocket model, {args.task}, seed {args.seed}: results in {folder}")
    started = time.monotonic()
    phases = phases_of(folder, args.seed, args.miniature, args.task, args.model)
    seconds = run_phases(phases, folder, args.jobs, console)
    report = write_report(folder, seconds, console)
    console.print(f"{time.monotonic() - started:.0f} s. Report: {report}")


if __name__ == "__main__":
    try:
        main(make_parser().parse_args())
    except (PhaseError, ValueError, OSError) as error:
        sys.exit(f"demo.py: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped. Run the same command to continue.")
