"""RL with a calculator, and its controls, on products that a pocket model cannot compute; PROTOCOL.md says why.

    python -m studies.tools.run                   # what is missing of both kinds of attention and five seeds
    python -m studies.tools.run --seeds 0 --attention full

A run appends a line to data/runs.jsonl: right answers to sealed problems, turns and calls, and both over training.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import time
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from d1.eval.run import evaluate
from d1.ranges import SEED
from d1.rl import train as rl_train
from d1.runs.cli import OneLineParser, run_script
from d1.sft import train as sft_train
from dataset.make_problems import PRODUCTS, product_calls, product_problems, write_rows
from pocket.make_base import build_model
from pocket.recipes import ROOT
from pocket.tokenizer import build_tokenizer
from studies.json_lines import append_line, read_lines
from studies.training import accuracy

logger = logging.getLogger(__name__)

RUNS = Path(__file__).resolve().parent / "data" / "runs.jsonl"
RANDOM = Path(__file__).with_name("random_calculator.py")
BLOCKS = {"full": None, "block-causal": 4}  # attention -> tokens per block of the model
ARMS: dict[str, list[str]] = {  # arm -> its tools
    "sft": ["calculator"],
    "without": [],
    "random": [str(RANDOM)],
    "tool": ["calculator"],
}
SEEDS = (0, 1, 2, 3, 4)
LENGTH, BLOCK, PROMPT = 12, 4, 9  # tokens of the canvas, of a block and of a prompt
SFT_SEED, SFT_STEPS, BUDGET = 0, 3000, 1_000_000  # BUDGET: compute tokens of RL, over rollouts, scoring and updates
PROBLEMS = 512


def make_start(folder: Path, attention: str) -> Path:
    """The SFT model: from random weights, on conversations for the training problems, a quarter of them with a call."""
    start = folder / "sft"
    if (start / "config.json").exists():
        return start
    shutil.rmtree(start, ignore_errors=True)
    base, rows = folder / "base", folder / "sft.jsonl"
    tokenizer = build_tokenizer("products")
    build_model(tokenizer, SFT_SEED, block_size=BLOCKS[attention]).save_pretrained(base)
    tokenizer.save_pretrained(base)
    train = [json.loads(line) for line in (ROOT / "dataset" / "products_train.jsonl").read_text().splitlines()]
    rows.write_text("".join(json.dumps(row) + "\n" for row in product_calls(train)))
    flags: list[object] = ["--model_name", base, "--train_data", rows, "--full_finetuning", "--output_dir", folder]
    flags += ["--job_name", "sft", "--batch_size", 64, "--grad_accum_steps", 1, "--learning_rate", 2e-3]
    flags += ["--max_steps", SFT_STEPS, "--warmup_steps", 50, "--eos_padding", LENGTH, "--max_length", 64]
    flags += ["--keep_last", "--seed", SFT_SEED, "--eval_steps", SFT_STEPS, "--num_proc", 1, "--report_to", "none"]
    sft_train.main(sft_train.make_parser().parse_args([*map(str, flags)]))
    return start


def reinforce(start: Path, folder: Path, arm: str, seed: int) -> list[dict[str, Any]]:
    """Trains an arm; returns what was logged."""
    flags: list[object] = ["--config", ROOT / "diffu-grpo" / "pocket.yaml", "--model_path", start]
    flags += ["--dataset", "products", "--output_dir", folder, "--seed", seed, "--max_prompt_length", PROMPT]
    flags += ["--max_completion_length", LENGTH, "--block_length", BLOCK, "--diffusion_steps", LENGTH]
    flags += ["--num_iterations", 2, "--loss_type", "dapo", "--max_steps", BUDGET, "--max_compute_tokens", BUDGET]
    flags += ["--eval_strategy", "no", "--save_strategy", "no", "--logging_steps", 1]
    flags += ["--tools", *ARMS[arm], "--max_turns", 2] if ARMS[arm] else []
    trainer = rl_train.main(*rl_train.make_parser().parse_args_and_config([*map(str, flags)]))
    assert trainer is not None
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def judged(model: Path, folder: Path, tools: Sequence[str]) -> dict[str, Any]:
    """Greedy answers to the sealed problems: those that the dataset's generator gives after all of its splits."""
    settings: dict[str, Any] = {"tools": [*tools], "max_turns": 2} if tools else {}
    settings |= {"block_length": BLOCK, "diffusion_steps": LENGTH, "batch_size": 64}
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings["data_file"], used = folder.with_name("sealed.jsonl"), sum(PRODUCTS.values())
    write_rows(settings["data_file"], [*islice(product_problems(random.Random(0)), used, used + PROBLEMS)])
    evaluate(model, "products", gen_length=[LENGTH], output_dir=str(folder), eos_stop=True, **settings)
    (file,) = folder.glob("*_generations.json")
    items = json.loads(file.read_text())["generations"]
    right = [f"<answer>{item['ground_truth']}</answer>" == item["text"].replace(" ", "") for item in items]
    return {
        "right": "".join(str(int(one)) for one in right),
        "calls": sum(item.get("calls", 0) for item in items) / len(items),
    }


def one(arm: str, attention: str, seed: int, folder: Path) -> dict[str, Any]:
    began = time.process_time()
    start, folder = make_start(folder, attention), folder / f"seed{seed}"
    if arm == "sft":
        return {**judged(start, folder / "judged", ARMS[arm]), "seconds": time.process_time() - began}
    shutil.rmtree(folder / arm, ignore_errors=True)
    logs = reinforce(start, folder / arm, arm, seed)
    found = judged(folder / arm, folder / arm / "judged", ARMS[arm])
    curves = {
        name: [round(entry.get(name, 0.0), 4) for entry in logs[::2]] for name in ("reward", "tools/call_frequency")
    }
    other = judged(folder / arm, folder / arm / "with_tool", ["calculator"])["right"]
    own = {"steps": len(logs), "compute": logs[-1]["compute_tokens"], "curves": curves, "right_with_tool": other}
    return found | own | {"seconds": time.process_time() - began}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=SEED, default=SEEDS)
    parser.add_argument("--attention", nargs="+", choices=BLOCKS, default=[*BLOCKS])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--output_dir", default="runs/tools")
    return parser


def main(args: argparse.Namespace) -> None:
    for seed, attention, arm in product(args.seeds, args.attention, args.arms):
        run = {"arm": arm, "attention": attention, "seed": seed}
        if (arm == "sft" and seed) or run in [{name: line[name] for name in run} for line in read_lines(RUNS)]:
            continue
        line = one(arm, attention, seed, Path(args.output_dir).resolve() / attention)
        append_line(RUNS, run | line)
        logger.info("%s: %.3f, %.2f calls", " ".join(map(str, run.values())), accuracy(line["right"]), line["calls"])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.tools.run", lambda: main(make_parser().parse_args()))
