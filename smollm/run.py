"""A real language model through the library: SmolLM2-135M, converted, SFT, RL, evaluation, report.

    make smollm                               # sets up an environment, then runs the next line
    python -m smollm.run                      # hours on a CPU; results in runs/smollm/svamp
    python -m smollm.run --task gsm8k
    python -m smollm.run --tiny --output_dir runs/tiny    # a random model and a few steps: shows that everything works

The model comes from a package registry, the problems from `$D1_FILES` or the hub, else from dataset/. Ctrl-C stops the
run; the same command continues it: finished stages are skipped, and a training stage resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from d1.models.precision import why_not_bf16
from d1.ranges import COUNT, SEED
from d1.runs.cli import OneLineParser
from pocket.phases import Phase, PhaseError, run_phases
from smollm.data import NAMES, PROTOCOL, ROOT, Problems, check_readable, first_readable, problems_of
from smollm.report import ARMS, write_report

BLOCK = 8
CONVERSION = ("--block_size", BLOCK, "--causal_context", "--keep_shift")
PARAMETERS = 134_515_584
EPOCHS, SFT_ROWS = 2, 32  # of SFT: rows per optimizer step
ROLLOUTS, UPDATES, COMPLETIONS = 100, 2, 64  # of RL: updates and completions per rollout
CPU_SFT_BATCH, CPU_RL_BATCH = 16, 8  # rows per forward pass of training on a CPU
# Shares of the speed of large products that a run reaches. On two cores in fp32, SFT reached .75 and RL .57; that of a
# GPU is an assumption.
SHARES = {"cpu": 0.6, "cuda": 0.35}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=NAMES, help="default: the first one whose problems can be read")
    parser.add_argument("--seed", type=SEED, default=0, help="seed of SFT and RL")
    parser.add_argument("--output_dir", help="results go to its folder TASK; default: runs/smollm")
    parser.add_argument("--limit", type=COUNT, help="test problems per evaluation (default: 500, with --tiny 4)")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, and a few steps and problems")
    return parser


def tokens_of(problems: Problems, limit: int) -> dict[str, int]:
    """The tokens of each stage in forward passes; a backward pass counts as two.

    SFT trains on a row and its noised answer, without padding. RL trains on the row and a noised canvas; each update
    also computes old log-probs, one more forward pass. Rollouts and evaluations keep the text before a block in a cache
    and write one token per pass, each of which computes a block.
    """
    row = problems.prompt + 2 * problems.answer
    scored = problems.prompt + 2 * problems.completion
    written = problems.prompt + problems.completion * BLOCK
    as_released = problems.prompt + problems.completion  # blocks of one token
    return {
        "sft": 3 * EPOCHS * problems.rows * row,
        "rl": ROLLOUTS * COMPLETIONS * (written + 4 * UPDATES * scored),
        "evaluated": limit * (as_released + 2 * written),
    }


def speed_of_products() -> float:
    """Floating-point operations per second of large products of matrices on this machine, measured."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    in_bf16 = device == "cuda" or why_not_bf16() is None
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    one = torch.randn(1024, 1024, device=device).to(dtype)
    started, products = time.perf_counter(), 0
    while time.perf_counter() - started < 0.3:
        _ = float((one @ one)[0, 0])
        products += 1
    return 2 * 1024**3 * products / (time.perf_counter() - started)


def hours_of(problems: Problems, limit: int) -> dict[str, float]:
    """An estimate of each stage's hours on this machine."""
    share = SHARES["cuda" if torch.cuda.is_available() else "cpu"]
    each = 2 * PARAMETERS / (speed_of_products() * share * 3600)
    return {stage: tokens * each for stage, tokens in tokens_of(problems, limit).items()}


def phases_of(folder: Path, problems: Problems, name: str, seed: int, limit: int, tiny: bool) -> list[Phase]:
    """The stages of a run, each a command of the library."""
    threads = os.cpu_count() or 1
    source, base, rows = folder / "source", folder / "base", folder / "rows.jsonl"

    def phase(title: str, module: str, *words: object, weight: float = 1.0, needs: tuple[str, ...] = ()) -> Phase:
        command = [sys.executable, "-m", *module.split(), *map(str, words)]
        return Phase(title, command, ROOT, weight=weight, needs=needs, threads=threads)

    sft = ["--config", "recipes/smollm2-135m-sft.yaml", "--model_name", base, "--train_data", rows, "--seed", seed]
    sft += ["--output_dir", folder, "--job_name", "sft", "--debugging", "--resume"]
    sft += ["--max_length", problems.max_length]
    rl = ["--config", "recipes/smollm2-135m-rl.yaml", "--model_path", folder / "sft", "--seed", seed]
    rl += ["--dataset", problems.task, "--prompt_protocol", PROTOCOL, "--few_shot", 0, "--report", "true"]
    rl += ["--max_completion_length", problems.completion, "--diffusion_steps", problems.completion]
    rl += ["--output_dir", folder / "rl", "--resume_from_checkpoint", "true", "--report_to", "none"]
    rl += [] if problems.train_file is None else ["--data_file", problems.train_file]
    # On a CPU: as many rows per optimizer step, but in batches that fit into 16 GB, and without padding
    if not torch.cuda.is_available():
        sft += ["--packing", "--batch_size", CPU_SFT_BATCH, "--grad_accum_steps", SFT_ROWS // CPU_SFT_BATCH]
        rl += ["--use_cpu", "true", "--per_device_train_batch_size", CPU_RL_BATCH]
        rl += ["--gradient_accumulation_steps", COMPLETIONS // CPU_RL_BATCH]
    if tiny:
        sft += ["--max_steps", 4, "--eval_steps", 2, "--batch_size", 4, "--grad_accum_steps", 1]
        sft += ["--test_split", 0.1, "--num_proc", 1]
        sft += ["--max_length", 1024, "--logging_steps", 1]  # a token is a byte
        rl += ["--max_steps", 2, "--save_steps", 1, "--per_device_train_batch_size", 8, "--rollout_batch_size", 8]
        rl += ["--gradient_accumulation_steps", 1]
        rl += ["--num_generations", 4, "--max_prompt_length", 1024, "--logging_steps", 1]

    def evaluation(arm: str, length: int) -> Phase:
        """Greedy completions. The converted model is evaluated with blocks of one token, as the autoregressive model
        that it still is."""
        model = os.path.relpath(base if arm == "base" else folder / arm, ROOT)
        words: list[object] = ["--model_path", model, "--dataset", problems.task, "--prompt_protocol", PROTOCOL]
        words += ["--few_shot", 0, "--gen_length", problems.completion, "--diffusion_steps", problems.completion]
        words += ["--block_length", length, "--batch_size", 32, "--eos_stop", "--limit", limit]
        words += ["--output_dir", folder / "generations"]
        words += [] if problems.test_file is None else ["--data_file", problems.test_file]
        needs = ("base",) if arm == "base" else (arm,)
        return phase(f"{arm}_evaluated", "d1 eval", *words, weight=10, needs=needs)

    return [
        phase("source", "smollm.model", "tiny" if tiny else "fetch", source),
        phase("base", "smollm.model", "convert", source, base, *CONVERSION, needs=("source",)),
        phase("rows", "smollm.data", rows, "--task", name, *(["--limit", 40] if tiny else [])),
        phase("sft", "d1 sft", *sft, weight=60, needs=("base", "rows")),
        phase("rl", "d1 rl", *rl, weight=60, needs=("sft",)),
        *(evaluation(arm, 1 if arm == "base" else BLOCK) for arm in ARMS),
    ]


def main(args: argparse.Namespace) -> Path:
    console = Console()
    # A relative path counts from the user's folder.
    results = Path(args.output_dir or ROOT / "runs" / "smollm").resolve()
    os.chdir(ROOT)
    if args.task:
        check_readable(args.task)
        name, faults = args.task, list[str]()
    else:
        name, faults = first_readable()
    for fault in faults:
        console.print(fault, markup=False)
    problems, limit = problems_of(name), args.limit or (4 if args.tiny else 500)
    folder = results / name
    source = problems.train_file or f"the task {problems.task}"
    console.print(f"SmolLM2-135M, {name}, seed {args.seed}: problems of {source}; results in {folder}", markup=False)
    if not args.tiny:
        parts = hours_of(problems, limit)
        told = ", ".join(f"{stage} {value:.1f}" for stage, value in parts.items())
        console.print(f"About {sum(parts.values()):.1f} hours on this machine ({told}), by the speed of its products.")
    phases = phases_of(folder, problems, name, args.seed, limit, args.tiny)
    seconds = run_phases(phases, folder, 1, console)
    report = write_report(folder, name, seconds, console)
    console.print(f"Report: {report}", markup=False)
    return report


if __name__ == "__main__":
    try:
        main(make_parser().parse_args())
    except (PhaseError, ValueError, OSError) as error:
        sys.exit(f"smollm: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped. Run the same command to continue.")
