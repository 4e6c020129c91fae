"""Prove that a change of structure changed no result: seeded jobs in two checkouts, compared to the bit.

    python -m benchmarks.same_results --other ../before --output_dir runs/same --jobs 2
    python -m benchmarks.same_results --other ../before --output_dir runs/same --only rl_d1 sft
    python -m benchmarks.same_results --folders runs/demo/seed0 ../before/runs/demo/seed0

Each checkout runs the jobs with its own code, on the pocket models: SFT, two rollouts of every RL method with their
updates, every preference method and every distillation method, each for all weights and for LoRA, in one process and in
two; and evaluations with all samplers. A job takes 5 to 20 s on one core, all jobs 45 minutes. Jobs named `accumulated`
accumulate gradients; jobs named `blocks` take a block-causal model. Then every saved weight and every completion of an
evaluation is compared. The exit status is 1 if anything differs.

Results are kept in DIR/this and DIR/other. Finished jobs are skipped: remove a job's folder to run it again.
`--folders` compares two finished folders instead, such as those of `make demo` in both checkouts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from d1.distill.methods import METHODS as DISTILLATIONS
from d1.preference.methods import METHODS as PREFERENCES
from d1.rl.methods import METHODS
from d1.runs.cli import run_script
from d1.runs.tables import markdown_table
from d1.sampling.reveal import RULES
from pocket.phases import ENVIRONMENT as ONE_THREAD

ROOT = Path(__file__).resolve().parents[1]
SETTING = ONE_THREAD | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
SETTING |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
PAIRS = "pairs.jsonl"  # in the folder of both sides' results
LAUNCHER = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
SFT = (
    "sft_train.py --model_name ../pocket/base --train_data ../dataset/sudoku_sft.jsonl --debugging --resume --seed 0 "
    "--batch_size 8 --grad_accum_steps 1 --max_steps 10 --eval_steps 10 --learning_rate 2e-4 --eos_padding 40 "
    "--max_length 128 --num_proc 1 --job_name sft"
)
FULL = "--full_finetuning"
SFT_WEIGHTS = {"full": FULL, "lora": "--lora_r 4 --lora_alpha 8"}
RL = (
    "diffu_grpo_train.py --config pocket.yaml --model_path ../pocket/base --seed 0 --per_device_train_batch_size 8 "
    "--num_generations 4 --max_completion_length 32 --eval_strategy no --save_strategy no --logging_steps 1"
)
RL_WEIGHTS = {
    "full": "",
    "lora": "--use_peft true --lora_r 4 --lora_alpha 8 --lora_dropout 0.05 --lora_target_modules q_proj v_proj",
}
TRAINING = (
    "--model_name pocket/base --debugging --seed 0 --batch_size 8 --grad_accum_steps 1 --max_steps 4 "
    "--learning_rate 1e-3 --warmup_steps 0 --num_proc 1 --max_completion_length 32"
)
PREFER = f"-m d1 prefer {TRAINING} --train_data {{pairs}} --max_prompt_length 40 --num_views 2"
DISTILL = (
    f"-m d1 distill {TRAINING} --train_data sudoku --num_prompts 64 --max_prompt_length 18 --diffusion_steps 16 "
    "--block_length 8 --sampling_batch_size 32"
)
EVAL = "-m d1 eval --model_path pocket/base --dataset sudoku --gen_length 32 --limit 24 --batch_size 8"
BLOCKS = EVAL.replace("pocket/base", "pocket/block_base")
SAMPLERS = {
    "exact": f"{EVAL} --block_length 8",
    "random": f"{EVAL} --block_length 16 --temperature 0.9 --remasking random --num_samples 2",
    "leftmost": f"{EVAL} --block_length 16 --remasking leftmost",
    "entropy": f"{EVAL} --block_length 32 --temperature 0.5 --remasking entropy --eos_stop",
    "guided": f"{EVAL} --block_length 32 --cfg_scale 0.5",
    **{f"parallel_{rule}": f"{EVAL} --sampler parallel --reveal {rule}" for rule in RULES},
    **{
        f"{cache}_{sampler}": f"{EVAL} --block_length 8 --sampler {sampler} --kv_cache {cache} --temperature 0.5"
        for cache, sampler in product(("prefix", "dual", "delayed", "lasting"), ("cached", "cached+parallel"))
    },
    "edits": f"{EVAL} --block_length 16 --sampler parallel --edit_threshold 0.9",
    "blocks_exact": f"{BLOCKS} --temperature 0.9",
    "blocks_parallel": f"{BLOCKS} --sampler parallel --edit_threshold 0.9",
}


class Job(NamedTuple):
    """A command line of a stage, which is run in `folder` with `--output_dir` added. `{pairs}` stands for the file of
    preference pairs."""

    folder: str
    command: str
    processes: int = 1


def in_every_setting(name: str, folder: str, command: str, weights: dict[str, str]) -> dict[str, Job]:
    """A command for all weights and for LoRA, in one process and in two."""
    return {
        f"{name}_{kind}_on_{processes}": Job(folder, f"{command} {flags}", processes)
        for (kind, flags), processes in product(weights.items(), (1, 2))
    }


def rl(method: str, flags: str = "") -> str:
    """Two rollouts of a method, with two updates each if the method makes several."""
    updates = min(2, METHODS[method].values["num_iterations"])
    steps = "" if "diffusion_steps" in METHODS[method].values else "--diffusion_steps 8"
    if "branches" in METHODS[method].values:
        flags += " --branches 2 2"  # four completions
    return f"{RL} --method {method} --num_iterations {updates} --max_steps {2 * updates} {steps} {flags}"


JOBS = in_every_setting("sft", "SFT", SFT, SFT_WEIGHTS)
for each in METHODS:
    JOBS |= in_every_setting(f"rl_{each}", "diffu-grpo", rl(each), RL_WEIGHTS)
for each in PREFERENCES:
    JOBS |= in_every_setting(f"prefer_{each}", ".", f"{PREFER} --method {each}", SFT_WEIGHTS)
for each in DISTILLATIONS:
    JOBS |= in_every_setting(f"distill_{each}", ".", f"{DISTILL} --method {each}", SFT_WEIGHTS)
JOBS |= {
    "sft_accumulated": Job("SFT", f"{SFT} {FULL} --grad_accum_steps 2"),
    "rl_no_kl": Job("diffu-grpo", rl("d1", "--beta 0")),
    "rl_parallel": Job("diffu-grpo", rl("d1", "--sampler parallel")),
    "rl_cached": Job("diffu-grpo", rl("d1", "--sampler cached+parallel --kv_cache delayed")),
    "rl_blocks": Job("diffu-grpo", rl("cj-grpo", "--model_path ../pocket/block_base")),
    "rl_accumulated": Job("diffu-grpo", rl("d1", "--gradient_accumulation_steps 3 --num_generations 8")),
    "prefer_antithetic": Job(".", f"{PREFER} {FULL} --estimator espo --antithetic"),
    "prefer_accumulated": Job(".", f"{PREFER} {FULL} --grad_accum_steps 2 --views_at_once 2"),
    "prefer_blocks": Job(".", f"{PREFER} {FULL} --model_name pocket/block_base"),
    "distill_accumulated": Job(".", f"{DISTILL} {FULL} --grad_accum_steps 2"),
    "distill_blocks": Job(".", f"{DISTILL} {FULL} --method dparallel --model_name pocket/block_base"),
    **{f"eval_{name}": Job(".", command) for name, command in SAMPLERS.items()},
    **{f"eval_{name}_on_2": Job(".", SAMPLERS[name], 2) for name in ("random", "dual_cached", "blocks_parallel")},
}


def write_pairs(file: Path) -> None:
    """Pairs of the SFT data's Sudoku answers: a puzzle's own is chosen, that of the next puzzle rejected."""
    with (ROOT / "dataset" / "sudoku_sft.jsonl").open() as rows:
        puzzles = [json.loads(row) for row in islice(rows, 65)]  # for 64 pairs
    pairs = []
    for puzzle, next_puzzle in pairwise(puzzles):
        pair = {"prompt": [{"role": "user", "content": puzzle["question"].strip()}]}
        for name, answered in (("chosen", puzzle), ("rejected", next_puzzle)):
            pair[name] = [{"role": "assistant", "content": answered["attempt"]}]
        pairs.append(pair)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def run(name: str, checkout: Path, results: Path) -> Path:
    """Runs a job unless it has finished; returns its folder of results.

    Raises:
        RuntimeError: the job failed; the message has the end of its log.
    """
    job, folder = JOBS[name], results / name
    finished, log = results / f"{name}.finished", results / f"{name}.log"
    if finished.exists() and folder.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    words = [word.format(pairs=results.parent / PAIRS) for word in job.command.split()]
    command = [sys.executable, *(LAUNCHER if job.processes == 2 else []), *words, "--output_dir", str(folder)]
    where: dict[str, Any] = {"cwd": checkout / job.folder, "env": os.environ | SETTING | {"PYTHONPATH": str(checkout)}}
    with open(log, "w") as file:
        done = subprocess.run(command, **where, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed in {checkout}:\n{log.read_text()[-3000:]}")
    finished.write_text(" ".join(command))
    return folder


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights saved below a folder, including checkpoints, by file and name. A checkpoint's rollout is left out,
    because its format may differ; its content affects the weights of the updates on it."""
    return {
        f"{path.relative_to(folder)}:{name}": tensor
        for path in sorted(folder.rglob("*model*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def completions(folder: Path) -> dict[str, str]:
    """All completions in the generation files below a folder, by file and position."""
    return {
        f"{path.relative_to(folder)}:{index}": problem["generations"]
        for path in sorted(folder.rglob("*_generations.json"))
        for index, problem in enumerate(json.loads(path.read_text())["generations"])
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit, NaN included."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def compare(name: str, this: Path, other: Path) -> tuple[list[str], bool]:
    """A row of the table, and whether the job's results agree.

    Raises:
        ValueError: one side saved something that the other did not, or neither saved anything.
    """
    (tensors, others), (texts, other_texts) = map(saved_tensors, (this, other)), map(completions, (this, other))
    unmatched = sorted((tensors.keys() ^ others.keys()) | (texts.keys() ^ other_texts.keys()))
    if unmatched or not (tensors or texts):
        raise ValueError(f"{name}: {this} and {other} do not have the same results, e.g. {unmatched[:3] or 'none'}")
    pairs = [(tensors[key], others[key]) for key in tensors]
    distances = ((a.double() - b.double()).abs().max().item() if a.shape == b.shape else math.inf for a, b in pairs)
    largest = max(distances, default=0.0)
    differ = sum(not same_bits(a, b) for a, b in pairs)
    wrong = sum(texts[key] != other_texts[key] for key in texts)
    row = [name, str(len(tensors)), str(differ), f"{largest:.3g}", str(len(texts)), str(wrong)]
    return row, not differ and not wrong


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="the checkout to compare this one with")
    parser.add_argument("--output_dir", type=Path, help="where the results of both are kept")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="run jobs with these prefixes")
    parser.add_argument("--jobs", type=int, default=1, help="jobs run at the same time")
    parser.add_argument("--folders", type=Path, nargs=2, metavar=("THIS", "OTHER"), help="compare these; run nothing")
    return parser


def run_and_compare(args: argparse.Namespace) -> list[tuple[list[str], bool]]:
    """Runs the chosen jobs in both checkouts, and compares each.

    Raises:
        ValueError: a flag is missing, no job has such a name, or `--other` is not a checkout.
    """
    if args.other is None or args.output_dir is None:
        raise ValueError("give --other and --output_dir, or --folders")
    names = [name for name in JOBS if name.startswith(tuple(args.only))]
    if not names:
        raise ValueError(f"--only {' '.join(args.only)}: no job has this prefix; the jobs are {', '.join(JOBS)}")
    results, other = args.output_dir.resolve(), args.other.resolve()
    if not (other / "d1" / "__init__.py").exists():
        raise ValueError(f"{other} is not a checkout of d1")
    write_pairs(results / PAIRS)

    def both(name: str) -> tuple[list[str], bool]:
        row, agrees = compare(name, run(name, ROOT, results / "this"), run(name, other, results / "other"))
        sys.stderr.write(f"{name}: {'equal' if agrees else 'DIFFERENT'}\n")
        return row, agrees

    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(both, names))


def main(args: argparse.Namespace) -> int:
    found = [compare("folders", *args.folders)] if args.folders else run_and_compare(args)
    header = ["job", "tensors", "that differ", "largest difference", "completions", "that differ"]
    sys.stdout.write(markdown_table(header, [row for row, _ in found]))
    return 0 if all(agrees for _, agrees in found) else 1


if __name__ == "__main__":
    run_script("same_results.py", lambda: main(make_parser().parse_args()))
