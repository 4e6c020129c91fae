"""Measure the accuracy and the work of each sampler on fresh problems of a pocket task.

    python -m studies.samplers.cost --model_path runs/demo/seed0/sft_grpo --gen_length 32 --problems 1000

All samplers are greedy and are compared problem by problem with the exact one (length / 2 steps, blocks of 8): problems
solved, forward passes and tokens processed per problem, and processor seconds. Writes
`samplers_<task>_<gen_length>.json` and `.md` to --output_dir. Set OMP_NUM_THREADS=1.

The problems are new ones on the grids or numbers of the test split, which no training uses. To search for the best
settings of a model, see `search.py`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe, race, write_report
from d1.models import load_model, load_tokenizer
from d1.ranges import COUNT
from d1.runs.entry import OneLineParser, run_script
from d1.sampling import Rollout, rollout
from d1.tasks import load_task
from pocket.recipes import RECIPES
from studies.samplers.fresh import FRESH

BASE = "exact"


def contestants(length: int) -> dict[str, dict[str, Any]]:
    """Name in the table -> block length (default 8), maximum number of steps (length / 2), sampler and its options,
    EOS stop (on).

    The levels were chosen on validation puzzles; "one block" is the whole canvas.
    """
    whole = {"block": length}
    return {
        BASE: {"stop": False},
        "exact, EOS stop": {},
        "exact, one block": whole,
        "exact, one block, 4 steps": whole | {"steps": 4},
        "cached: prefix": {"sampler": "cached", "kv_cache": "prefix"},
        "cached: dual": {"sampler": "cached", "kv_cache": "dual"},
        "parallel: threshold 0.9": {"sampler": "parallel", "reveal": "threshold", "reveal_level": 0.9},
        "parallel: factor 1": {"sampler": "parallel", "reveal": "factor", "reveal_level": 1.0},
        "parallel: entropy 0.3": {"sampler": "parallel", "reveal": "entropy", "reveal_level": 0.3},
        "parallel: threshold 0.8, one block, at most 2 steps": whole
        | {"steps": 2, "sampler": "parallel", "reveal": "threshold", "reveal_level": 0.8},
        "parallel: threshold 0.8, one block, at most 4 steps": whole
        | {"steps": 4, "sampler": "parallel", "reveal": "threshold", "reveal_level": 0.8},
        "parallel: factor 2, one block, at most 4 steps": whole
        | {"steps": 4, "sampler": "parallel", "reveal": "factor", "reveal_level": 2.0},
        "parallel: entropy 1.75, one block, at most 4 steps": whole
        | {"steps": 4, "sampler": "parallel", "reveal": "entropy", "reveal_level": 1.75},
        "cached+parallel: dual, factor 1.5, two blocks": {"block": length // 2, "sampler": "cached+parallel"}
        | {"kv_cache": "dual", "reveal": "factor", "reveal_level": 1.5},
        "cached+parallel: prefix, factor 1.5, one block": whole
        | {"sampler": "cached+parallel", "kv_cache": "prefix", "reveal": "factor", "reveal_level": 1.5},
    }


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Tensor,
    length: int,
    batch: int,
    *,
    block: int = 8,
    steps: int | None = None,
    stop: bool = True,
    sampler: str = "exact",
    **options: Any,
) -> list[Rollout]:
    return [
        rollout(
            model,
            rows,
            torch.ones_like(rows),
            mask_token_id=tokenizer.mask_token_id,
            gen_length=length,
            block_length=block,
            steps=steps or length // 2,
            eos_token_ids=[tokenizer.eos_token_id] if stop else None,
            sampler=sampler,
            **options,
        )
        for rows in prompts.split(batch)
    ]


def solved(rollouts: list[Rollout], tokenizer: Any, width: int, rows: Any, task: str = "sudoku") -> list[float]:
    """1 for each problem whose completion, up to its end, solves it."""
    texts = [
        tokenizer.decode(ids).split(tokenizer.eos_token)[0] for part in rollouts for ids in part.ids[:, width:].tolist()
    ]
    return [load_task(RECIPES[task].task).score(text, row)["accuracy"] for text, row in zip(texts, rows, strict=True)]


def with_margin(values: list[float]) -> tuple[float, float]:
    """Mean of one value per problem, and half of its 95% interval (normal approximation), in points."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return 100 * statistics.fmean(values), 100 * z * statistics.stdev(values) / math.sqrt(len(values))


def work_of(parts: list[Rollout]) -> tuple[float, float]:
    """Forward passes and tokens processed by the model, per problem."""
    counts = torch.cat([torch.stack([part.passes, part.forward_tokens]) for part in parts], dim=1).double().mean(1)
    return counts[0].item(), counts[1].item()


def prompts_of(rows: Any, tokenizer: Any, device: str) -> Tensor:
    """(rows, prompt) ids: all prompts of a pocket task have the same length."""
    ids = tokenizer.apply_chat_template(list(rows["prompt"]), add_generation_prompt=True, return_dict=False)
    return torch.tensor(ids, device=device)


def measure(
    args: argparse.Namespace, model: Any, tokenizer: Any, settings: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """One row per sampler in `settings` (name -> options of `sample`), which must include `BASE`."""
    rows = FRESH[args.task](args.problems, args.seed)
    prompts = prompts_of(rows, tokenizer, model.device)
    sampled: dict[str, list[Rollout]] = {}

    def contestant(name: str, options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: sampled.update({name: sample(model, tokenizer, prompts, args.gen_length, args.batch, **options)})

    times = race({name: contestant(name, options) for name, options in settings.items()}, args.repeats, base=BASE)
    right = {name: solved(parts, tokenizer, prompts.shape[1], rows, args.task) for name, parts in sampled.items()}
    work = {name: work_of(parts) for name, parts in sampled.items()}
    results = {}
    for name in settings:
        accuracy, margin = with_margin(right[name])
        gain, gain_margin = with_margin([a - b for a, b in zip(right[name], right[BASE], strict=True)])
        passes, tokens = work[name]
        results[name] = {
            "exact solves, %": accuracy,
            "±": margin,
            "minus exact": gain,
            "± of it": gain_margin,
            "forward passes": passes,
            "tokens": tokens,
            "times fewer tokens": work[BASE][1] / tokens,
            "times faster": 1 / times[name]["ratio"],
        }
    return results


def make_parser(description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", "--model_name", required=True, help="a pocket model, e.g. of `make demo`")
    parser.add_argument("--task", choices=[*RECIPES], default="sudoku")
    parser.add_argument("--gen_length", type=int, default=32)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--batch", type=COUNT, default=125, help="problems sampled at once")
    parser.add_argument("--repeats", type=COUNT, default=3, help="timed rounds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems")
    parser.add_argument("--output_dir", default="benchmark_results")
    return parser


def write_comparison(args: argparse.Namespace, name: str, settings: Callable[..., dict[str, dict[str, Any]]]) -> None:
    """Compares the samplers that `settings(args, model, tokenizer)` names and writes the report `name`.

    Raises:
        ValueError: a number is out of its range; raised before a model is loaded.
    """
    if args.problems < 2 or args.gen_length < 8 or args.gen_length % 8:
        raise ValueError(
            f"need at least 2 problems and a gen_length in blocks of 8, got {args.problems} and {args.gen_length}"
        )
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(args.model_path, device=device), load_tokenizer(args.model_path)
    results = measure(args, model, tokenizer, settings(args, model, tokenizer))
    named = {key: value for key, value in vars(args).items() if key != "output_dir"}
    write_report({"machine": describe(), "settings": named, "results": results}, args.output_dir, name)


def main(args: argparse.Namespace) -> None:
    name = f"samplers_{args.task}_{args.gen_length}"
    write_comparison(args, name, lambda args, *_: contestants(args.gen_length))


if __name__ == "__main__":
    run_script("studies.samplers.cost", lambda: main(make_parser().parse_args()))
