"""Compare the speed of this library, the published code (`benchmarks/published.py`) and the transformer alone.

    python -m benchmarks.bench sampler --size goal
    python -m benchmarks.bench all

The first command prints one table. The second, which is `make bench`, runs all commands in `RESULTS.md` and takes 13
minutes on two idle cores. The benchmarks are

    sampler   one rollout: published, ours, and the transformer's forward passes alone
    blocks    one rollout of a block-causal model: with its cache, and with everything recomputed in each step
    scoring   old log-probs under mu masks; one update (loss and gradients)
    memory    peak bytes of published and ours, without the weights
    rl        one rollout of the real RL trainer with its mu optimizer steps, on the pocket task; `--size pocket` uses
              the pocket model

Set OMP_NUM_THREADS=1 to measure one thread.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PrinterCallback

from benchmarks import published
from benchmarks.machine import as_markdown, describe, multiply_adds, peak_bytes, race
from benchmarks.random_models import MASK, SIZES, random_model, random_prompts, ways
from d1.models import load_model, load_tokenizer
from d1.models.head import body_and_head
from d1.ranges import COUNT
from d1.rl import batch
from d1.rl import trainer as rl_module
from d1.rl.config import DiffuGRPOConfig
from d1.runs.cli import OneLineParser, run_script
from d1.sampling import Rollout, rollout
from d1.sampling.settings import SamplingSettings
from d1.scoring import Scores, Views, score
from d1.tasks import load_task

BASE = str(Path(__file__).resolve().parents[1] / "pocket" / "base")
Results = dict[str, dict[str, float]]


def race_samplers(args: argparse.Namespace) -> Results:
    """One greedy rollout each, compared with the transformer's forward passes alone."""
    model = random_model(args.size)
    ids, _ = random_prompts(model, args.rows, args.prompt)
    body, _ = body_and_head(model)
    canvas = torch.cat([ids, torch.full((args.rows, args.length), MASK, device=ids.device)], dim=1)

    @torch.no_grad()
    def bare() -> None:
        for _ in range(args.steps):
            body(canvas, None)

    rollouts = ways(model, args)["rollout"]
    contestants = {"bare body": bare, "exact": rollouts["ours"], "published": rollouts["published"]}
    results = race(contestants, args.repeats, base="bare body")
    work = {name: multiply_adds(run) for name, run in contestants.items()}
    for name, row in results.items():
        row["multiply-adds / bare"] = work[name] / work["bare body"]
    return results


def race_blocks(args: argparse.Namespace) -> Results:
    """A model with own blocks of `block` tokens: time, tokens processed by the transformer, and multiplications."""
    model = random_model(args.size, block_size=args.block)
    ids, mask = random_prompts(model, args.rows, args.prompt)
    lengths = {"gen_length": args.length, "block_length": args.block, "steps": args.steps}
    sample = functools.partial(rollout, model, ids, mask, mask_token_id=MASK, **lengths)
    contestants = {"recomputed": functools.partial(sample, recompute=True), "cached": sample}
    results = race(contestants, args.repeats, base="recomputed")
    tokens = {name: run().forward_tokens.double().mean().item() for name, run in contestants.items()}
    work = {name: multiply_adds(run) for name, run in contestants.items()}
    for name, row in results.items():
        row |= {"tokens per row": tokens[name], "tokens / recomputed": tokens[name] / tokens["recomputed"]}
        row["multiply-adds / recomputed"] = work[name] / work["recomputed"]
    return results


def race_scoring(args: argparse.Namespace) -> Results:
    """Old log-probs under mu masks without gradients, then one inner update's log-probs with them."""
    tasks = ways(random_model(args.size), args)
    results: Results = {}
    for task, title in (("scoring", "mu masks"), ("update", "update")):
        runs = {f"{way}, {title}": run for way, run in tasks[task].items()}
        results |= race(runs, args.repeats, base=f"published, {title}")
    return results


def measure_memory(args: argparse.Namespace) -> Results:
    """Peak bytes of sampling (greedy and at a temperature) and of scoring under mu masks, published and ours."""
    model = random_model(args.size)
    results: Results = {}
    blocks = -(-args.length // args.block)
    tasks = {
        "sampler": ways(model, args, steps=blocks)["rollout"],
        "sampler, drawing": ways(model, args, steps=blocks, temperature=0.9)["rollout"],
        "scoring": ways(model, args)["scoring"],
    }
    for task, runs in tasks.items():
        theirs, ours = map(peak_bytes, runs.values())
        results[task] = {"published": theirs, "ours": ours, "published / ours": theirs / ours}
    return results


def published_rollout(
    model: Any, prompt_ids: Tensor, attention_mask: Tensor, settings: SamplingSettings, *, mask_token_id: int, **_: Any
) -> Rollout:
    """The published sampler in place of `d1.sampling.rollout`. The record, which d1 does not keep, is zeros."""
    names = ("gen_length", "block_length", "steps", "temperature", "cfg_scale", "remasking")
    options = {name: getattr(settings, name) for name in names}
    ids = published.generate(model, prompt_ids, attention_mask, mask_token_id=mask_token_id, **options)
    zeros = torch.zeros(len(ids), settings.gen_length, device=ids.device)
    steps = torch.full_like(ids[:, 0], settings.steps)
    return Rollout(ids, zeros, zeros.long(), zeros, steps, steps * ids.shape[1])


def published_score(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    completion_ids: Tensor,
    views: Views,
    with_entropies: bool = False,
    views_at_once: int = 1,
    **options: Any,
) -> Scores:
    """Full logits of all positions in place of `d1.scoring.score`. Entropies, which d1 does not compute, are 0."""
    noise = views.noise[:, :, : prompt_ids.shape[1]]  # after the prompt everything is hidden
    options.pop("distribution", None)  # the model's own
    logps = published.score(model, prompt_ids, attention_mask, completion_ids, noise, **options)
    summed = (views.weights * logps).sum(1)
    return Scores(summed, logps, torch.tensor(0), torch.zeros_like(summed) if with_entropies else None)


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "published": (published_rollout, published_score),
    "ours": (rollout, score),
}


def rl_trainer(args: Any, folder: str) -> Any:
    """A trainer that makes one rollout with its mu updates in each `train()`."""
    task, tokenizer = load_task("sudoku"), load_tokenizer(BASE)
    config = DiffuGRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=args.rows,
        num_generations=args.rows // max(1, args.rows // 8),  # all rows, or groups of about 8
        max_prompt_length=18,
        max_completion_length=args.length,
        block_length=args.block,
        diffusion_steps=args.steps,
        num_iterations=args.mu,
        max_steps=args.mu,
        logging_steps=args.mu,
        learning_rate=1e-6,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = load_model(BASE) if args.size == "pocket" else random_model(args.size)
    trainer: Any = rl_module.DiffuGRPOTrainer(model, task.REWARDS, config, task.load_rows("train"), tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train_rl(trainer: Any, way: str) -> None:
    """One rollout and its updates, sampled and scored as `WAYS[way]`."""
    sample, log_probs = WAYS[way]
    with patch.object(rl_module, "rollout", sample), patch.object(batch, "score", log_probs):
        trainer.train()


def race_rl(args: argparse.Namespace) -> Results:
    """One rollout of the real trainer with its mu optimizer steps, with the published functions and with ours."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {way: functools.partial(train_rl, rl_trainer(args, folder), way) for way in WAYS}
        return race(runs, args.repeats, base="published")


BENCHMARKS: dict[str, Callable[[argparse.Namespace], Results]] = {
    "sampler": race_samplers,
    "blocks": race_blocks,
    "scoring": race_scoring,
    "memory": measure_memory,
    "rl": race_rl,
}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", *BENCHMARKS])
    parser.add_argument("--size", choices=["pocket", *SIZES], default="tiny", help="pocket is only for rl")
    parser.add_argument("--repeats", type=COUNT, default=5)
    parser.add_argument("--rows", type=COUNT, default=2)
    parser.add_argument("--prompt", type=COUNT, default=64, help="length of the prompt in tokens, except for rl")
    parser.add_argument("--length", type=COUNT, default=64, help="length of the canvas in tokens")
    parser.add_argument("--block", type=COUNT, default=32)
    parser.add_argument("--steps", type=COUNT, default=32)
    parser.add_argument("--mu", type=COUNT, default=4, help="number of masks, and of updates per rollout")
    return parser


def commands() -> list[str]:
    """The command lines of `RESULTS.md` that can run here: those at LLaDA's size need a GPU."""
    lines = Path(__file__).with_name("RESULTS.md").read_text().splitlines()
    found = [line for line in lines if line.startswith("python -m benchmarks.bench ")]
    return [line for line in found if "--size llada" not in line or torch.cuda.is_available()]


def main(args: argparse.Namespace) -> None:
    if args.what == "all":
        for line in commands():
            sys.stdout.write(f"{line}\n\n")
            main(make_parser().parse_args(line.split()[3:]))
        return
    if args.size == "pocket" and args.what != "rl":
        raise ValueError(f"--size pocket is only for rl; for {args.what} use one of {', '.join(SIZES)}")
    results = BENCHMARKS[args.what](args)
    sys.stdout.write(as_markdown({"machine": describe(), "results": results}) + "\n")


if __name__ == "__main__":
    run_script("bench.py", lambda: main(make_parser().parse_args()))
