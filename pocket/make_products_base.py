"""Train the pocket model that calls a calculator, on one CPU core: python -m pocket.make_products_base OUT

A bidirectional Llama, from random weights, learns conversations for the training problems of `products` by SFT: it asks
the calculator for the product, and answers with the result. The same seed gives the same weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from d1.ranges import COUNT, SEED
from d1.runs.cli import OneLineParser, run_script
from d1.sft import train as sft_train
from d1.tasks import products
from pocket.make_base import build_model
from pocket.recipes import ROOT
from pocket.tokenizer import build_tokenizer

LENGTH = 12  # tokens of a canvas
FILES = ("config.json", "generation_config.json", "model.safetensors")


def conversations() -> list[dict[str, list[products.Message]]]:
    """Two rows per training problem: its call, and the answer after the result."""
    lines = (ROOT / "dataset" / "products_train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = list[list[products.Message]]()
    for problem in map(json.loads, lines):
        rows += products.calls(problem["input"], int(problem["output"]), with_tool=True)
    return [{"messages": messages} for messages in rows]


def make(folder: Path, steps: int, seed: int) -> None:
    """Write the model into `folder`."""
    with tempfile.TemporaryDirectory() as work:
        start, rows = Path(work, "start"), Path(work, "rows.jsonl")
        tokenizer = build_tokenizer("products")
        build_model(tokenizer, seed).save_pretrained(start)
        tokenizer.save_pretrained(start)
        rows.write_text("".join(json.dumps(row) + "\n" for row in conversations()), encoding="utf-8")
        flags: list[object] = ["--model_name", start, "--train_data", rows, "--full_finetuning", "--output_dir", work]
        flags += ["--job_name", "sft", "--batch_size", 64, "--grad_accum_steps", 1, "--learning_rate", 2e-3]
        flags += ["--max_steps", steps, "--warmup_steps", 50, "--eos_padding", LENGTH, "--max_length", 64]
        flags += ["--keep_last", "--seed", seed, "--eval_steps", steps, "--num_proc", 1, "--report_to", "none"]
        sft_train.main(sft_train.make_parser().parse_args([*map(str, flags)]))
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(Path(work, "sft", name), folder / name)
        tokenizer.save_pretrained(folder)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--steps", type=COUNT, default=300)
    parser.add_argument("--seed", type=SEED, default=0)
    return parser


def main(args: argparse.Namespace) -> None:
    make(args.folder, args.steps, args.seed)


if __name__ == "__main__":
    run_script("pocket.make_products_base", lambda: main(make_parser().parse_args()))
