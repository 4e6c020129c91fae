"""The main job: all of d1 on the pocket model, base -> SFT -> diffu-GRPO -> evaluation -> report.

    make demo                                 # sets up an environment, then does what the next line does
    python pocket/demo.py --seed 0            # about five minutes on two cores; results in runs/demo/seed0
    python pocket/demo.py --model block       # the block-causal pocket model; results in runs/demo/block/seed0
    python pocket/demo.py --seed 0 --miniature --output_dir runs/miniature     # a minute; shows that all of it works

Every stage is its real entry point, started as its users do. Ctrl-C and the same command again: it continues.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from phases import Phase, PhaseError, run_phases
from report import ARMS, LENGTHS, write_report
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
BASES = {"full": ROOT / "pocket" / "base", "block": ROOT / "pocket" / "block_base"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of SFT and RL; the base model stays the same")
    parser.add_argument("--model", choices=[*BASES], default="full", help="the base model's attention")
    parser.add_argument("--output_dir", default=str(ROOT / "runs" / "demo"), help="results go to its folder seedN")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="commands run side by side")
    parser.add_argument("--miniature", action="store_true", help="a few steps and problems of everything")
    return parser


def sft(folder: Path, seed: int, miniature: bool, base: Path = BASES["full"]) -> Phase:
    """Light SFT on 1,000 curated traces: one epoch, all weights."""
    flags = ["--train_data", ROOT / "dataset" / "sudoku_sft.jsonl", "--full_finetuning", "--debugging", "--resume"]
    flags += ["--num_epochs", 1, "--batch_size", 32, "--grad_accum_steps", 1, "--learning_rate", 2e-4]
    flags += ["--eos_padding", 40, "--max_length", 128, "--logging_steps", 4, "--eval_steps", 10, "--num_proc", 1]
    flags += ["--model_name", base, "--output_dir", folder, "--job_name", "sft", "--seed", seed]
    flags += ["--max_steps", 4] if miniature else []
    return Phase("sft", [sys.executable, "sft_train.py", *map(str, flags)], ROOT / "SFT", weight=15)


def grpo(name: str, start: Path, folder: Path, seed: int, miniature: bool, needs: tuple[str, ...] = ()) -> Phase:
    """120 rollouts of diffu-GRPO with pocket.yaml."""
    flags = ["--config", "pocket.yaml", "--model_path", start, "--output_dir", folder / name, "--seed", seed]
    flags += ["--resume_from_checkpoint", "true", "--report", "true"]
    flags += ["--task", ROOT / "pocket" / "shuffled_sudoku.py"] if name == "shuffled" else []
    flags += ["--max_steps", 8, "--eval_strategy", "no", "--save_steps", 4] if miniature else []
    command = [sys.executable, "diffu_grpo_train.py", *map(str, flags)]
    return Phase(name, command, ROOT / "diffu-grpo", weight=120, needs=needs)


def evaluation(name: str, model: Path, length: int, folder: Path, miniature: bool) -> Phase:
    """Greedy completions of the test problems at one length."""
    # Relative, so that the generation files name no machine's folders.
    path = os.path.relpath(model, ROOT / "eval")
    flags = ["--model_path", path, "--dataset", "sudoku", "--gen_length", length, "--block_length", 8]
    flags += ["--batch_size", 128, "--output_dir", folder / "generations"]
    flags += ["--limit", 16] if miniature else []
    needs = () if name == "base" else (name,)
    return Phase(
        f"{name}_at_{length}", [sys.executable, "eval.py", *map(str, flags)], ROOT / "eval", weight=20, needs=needs
    )


def phases_of(folder: Path, seed: int, miniature: bool, base: Path = BASES["full"]) -> list[Phase]:
    # Two chains of like length come first, so that two cores are both busy to the end.
    train = [
        sft(folder, seed, miniature, base),
        grpo("grpo", base, folder, seed, miniature),
        grpo("sft_grpo", folder / "sft", folder, seed, miniature, needs=("sft",)),
        grpo("shuffled", base, folder, seed, miniature),
    ]
    models = {arm: base if arm == "base" else folder / arm for arm in ARMS}
    return train + [
        evaluation(arm, model, length, folder, miniature) for arm, model in models.items() for length in LENGTHS
    ]


def main(args: argparse.Namespace) -> None:
    console = Console()
    folder = Path(args.output_dir).resolve() / ("" if args.model == "full" else args.model) / f"seed{args.seed}"
    console.print(f"d1 on the pocket model, seed {args.seed}: results in {folder}")
    started = time.monotonic()
    seconds = run_phases(phases_of(folder, args.seed, args.miniature, BASES[args.model]), folder, args.jobs, console)
    report = write_report(folder, seconds, console)
    console.print(f"{time.monotonic() - started:.0f} s. Report: {report}")


if __name__ == "__main__":
    try:
        main(make_parser().parse_args())
    except (PhaseError, ValueError, OSError) as error:
        sys.exit(f"demo.py: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped. The same command continues from here.")
