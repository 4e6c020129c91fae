"""python -m benchmarks.batching --model_path runs/demo/seed0/sft [--gen_length 40] [--problems 1000] [--batch 64]

An evaluation of fresh Sudoku puzzles, greedy, in fixed batches and in one that takes the next puzzle as soon as a row
is done (`d1.sampling.rollout_stream`): forward passes, the share of the batch that is in use in them, tokens fed
through the model with the padding, processor seconds. Completions must be the same, or it stops. Writes `batching.json`
and `.md` to --output_dir. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fresh_problems import FRESH
from benchmarks.machine import check_counts, describe, race
from benchmarks.reports import write_report
from benchmarks.samplers import prompts_of
from d1.models import load_model, load_tokenizer
from d1.runs.entry import run_script
from d1.sampling import SamplingSettings, rollout, rollout_stream

FIXED, FULL = "fixed batches", "kept full"
# Name in the table -> block length, how the tokens end that end a completion, and the sampler. All solutions are of one
# length, so that the end of text stops all rows in one block; the first 4 in a solution can stand anywhere.
WAYS: dict[str, tuple[int, str, str]] = {
    "exact, EOS stop": (8, "<eos>", "exact"),
    "exact, stop at the first 4": (4, "4", "exact"),
    "parallel, EOS stop": (8, "<eos>", "parallel"),
}


def in_fixed_batches(
    model: Any, prompts: Tensor, settings: SamplingSettings, batch: int, mask: int, ends: list[int]
) -> list[list[int]]:
    """The completion of each prompt, by `rollout`."""
    options: dict[str, Any] = {"mask_token_id": mask, "eos_token_ids": ends}
    parts = [rollout(model, rows, torch.ones_like(rows), settings, **options) for rows in prompts.split(batch)]
    return [row for part in parts for row in part.ids[:, prompts.shape[1] :].tolist()]


def kept_full(
    model: Any, prompts: Tensor, settings: SamplingSettings, batch: int, mask: int, ends: list[int]
) -> list[list[int]]:
    """The same, by `rollout_stream`."""
    found: dict[int, list[int]] = {}
    asked = ((ids, None) for ids in prompts.tolist())
    stream = rollout_stream(model, asked, settings, batch_size=batch, mask_token_id=mask, eos_token_ids=ends)
    for numbers, part in stream:
        found |= dict(zip(numbers, part.ids[:, -settings.gen_length :].tolist(), strict=True))
    return [found[number] for number in range(len(prompts))]


RUNS = {FIXED: in_fixed_batches, FULL: kept_full}


class Counted:
    """A call that keeps what it `found`, and rows and columns of each forward pass that it `fed`."""

    def __init__(self, model: Any, run: Callable[[], list[list[int]]]) -> None:
        self.model, self.run = model, run
        self.found: list[list[int]] = []
        self.fed: list[tuple[int, int]] = []

    def go(self) -> None:
        self.fed.clear()
        hook = self.model.base_model.register_forward_pre_hook(
            lambda body, given, named: self.fed.append(tuple(named["input_ids"].shape)), with_kwargs=True
        )
        self.found = self.run()
        hook.remove()


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(args.model_path, device=device), load_tokenizer(args.model_path)
    rows = FRESH["sudoku"](args.problems, args.seed)
    prompts = prompts_of(rows, tokenizer, device)
    results: dict[str, dict[str, float]] = {}
    for way, (block, word, sampler) in WAYS.items():
        settings = SamplingSettings(args.gen_length, block, args.gen_length // 2, sampler=sampler)
        ends = [number for token, number in tokenizer.get_vocab().items() if token.endswith(word)]
        given = model, prompts, settings, args.batch, tokenizer.mask_token_id, ends
        runs = {name: Counted(model, partial(run, *given)) for name, run in RUNS.items()}
        times = race({name: run.go for name, run in runs.items()}, args.repeats, base=FIXED, warm=True)
        if runs[FIXED].found != runs[FULL].found:
            raise RuntimeError(f"{way}: completions differ between fixed batches and one that is kept full")
        for name, run in runs.items():
            results[f"{way}: {name}"] = {
                "forward passes": len(run.fed),
                "batch in use, %": 100 * sum(rows for rows, _ in run.fed) / (args.batch * len(run.fed)),
                "tokens fed": sum(rows * columns for rows, columns in run.fed),
                **times[name],
            }
    return results


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", "--model_name", required=True, help="a pocket model, e.g. of `make demo`")
    parser.add_argument("--gen_length", type=int, default=40)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64, help="problems sampled at once")
    parser.add_argument("--repeats", type=int, default=1, help="timed rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the puzzles")
    parser.add_argument("--output_dir", default="benchmark_results")
    return parser


def main(args: argparse.Namespace) -> None:
    if args.gen_length < 8 or args.gen_length % 8:
        raise ValueError(f"need a gen_length in blocks of 8, got {args.gen_length}")
    check_counts(args, "problems", "batch", "repeats")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    named = {key: value for key, value in vars(args).items() if key != "output_dir"}
    write_report({"machine": describe(), "settings": named, "results": measure(args)}, args.output_dir, "batching")


if __name__ == "__main__":
    run_script("batching.py", lambda: main(make_parser().parse_args()))
