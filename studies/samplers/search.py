"""Find the cheapest sampler for a model: settings are searched on validation problems and judged on fresh ones.

    python -m studies.samplers.search --task arithmetic --gen_length 40 --repeats 1 \\
        --model_path runs/demo/arithmetic/seed0/sft_grpo

Tries all settings of the grid (blocks, steps, caches, rules and levels) on a few validation problems, and those near
the frontier on all of them. The choice is the cheapest setting whose accuracy on all of them is at most `SLACK` points
below the exact sampler's. The frontier and the choice are then compared with exact on fresh problems, as in `cost.py`.
Writes `frontier_<task>_<gen_length>.json`, `.md` and `.png` to --output_dir. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from d1.ranges import COUNT
from d1.runs.entry import run_script
from d1.sampling.caches import CACHES
from d1.show.curves import legend, panels, save_figure
from d1.tasks import load_task
from pocket.recipes import RECIPES
from studies.samplers import cost

LEVELS = {
    "threshold": (0.5, 0.7, 0.8, 0.9),
    "factor": (1.5, 2.0, 2.5, 3.0),
    "entropy": (1.0, 1.75, 2.5, 3.0),
}
STEPS = (2, 3, 4, 8)  # maximum number of steps per block
FEW = 128  # problems of the first round
NEAR = 5.0  # settings up to this many points below the frontier are tried on all problems
SLACK = 1.0


class Tried(NamedTuple):
    """Settings, the share of problems solved in percent, and tokens processed per problem."""

    options: dict[str, Any]
    accuracy: float
    tokens: float

    @property
    def name(self) -> str:
        options = self.options
        cache = f"{options['kv_cache']}, " if "kv_cache" in options else ""
        return (
            f"{options['sampler']}: {cache}{options['reveal']} {options['reveal_level']:g}, blocks of "
            f"{options['block']}, at most {options['steps']} steps"
        )


def grid(length: int) -> list[dict[str, Any]]:
    """Blocks, steps, caches, rules and levels, as options of `studies.samplers.cost.sample`."""
    found = []
    for block, steps, cache, (rule, levels) in product(
        (8, length // 2, length), STEPS, (None, *CACHES), LEVELS.items()
    ):
        sampler = {"sampler": "parallel"} if cache is None else {"sampler": "cached+parallel", "kv_cache": cache}
        found += [
            {"block": block, "steps": steps * length // block, **sampler, "reveal": rule, "reveal_level": level}
            for level in levels
        ]
    return found


def frontier(tried: Iterable[Tried]) -> list[Tried]:
    """Settings for which no other has at least the same accuracy with as few tokens, the cheapest first."""
    best: list[Tried] = []
    for one in sorted(tried, key=lambda one: (one.tokens, -one.accuracy)):
        if not best or one.accuracy > best[-1].accuracy:
            best.append(one)
    return best


def near(tried: Sequence[Tried]) -> list[dict[str, Any]]:
    """The settings within `NEAR` points of the frontier at the same number of tokens."""
    best = frontier(tried)
    reached = [max((at.accuracy for at in best if at.tokens <= one.tokens), default=0.0) for one in tried]
    return [one.options for one, top in zip(tried, reached, strict=True) if one.accuracy >= top - NEAR]


def search(judge: Callable[[dict[str, Any], int | None], Tried], length: int) -> list[Tried]:
    """The settings tried on all problems. `judge(options, count)` tries settings on `count` problems, None for all."""
    first = [judge(options, FEW) for options in tqdm(grid(length), desc=f"all settings, {FEW} problems")]
    return [judge(options, None) for options in tqdm(near(first), desc="those near the frontier, all problems")]


def choice(tried: Sequence[Tried], exact: Tried) -> Tried | None:
    """The cheapest settings at most `SLACK` points below exact; None if there are none."""
    good = [one for one in tried if one.accuracy >= exact.accuracy - SLACK]
    return min(good, key=lambda one: one.tokens, default=None)


def plot(tried: Sequence[Tried], exact: Tried, chosen: Tried | None, path: Path) -> None:
    """Plots accuracy against tokens: the settings tried on all problems, the frontier, exact and the choice."""
    figure, (axes,) = panels(1, 1, size=(7, 4.5))
    for cache in (None, *CACHES):
        some = [one for one in tried if one.options.get("kv_cache") == cache]
        label = f"{cache} cache" if cache else "no cache"
        axes.scatter([one.tokens for one in some], [one.accuracy for one in some], s=10, alpha=0.6, label=label)
    best = frontier(tried)
    axes.step([at.tokens for at in best], [at.accuracy for at in best], where="post", color="black", lw=1)
    axes.scatter([exact.tokens], [exact.accuracy], marker="*", s=120, color="black", label="exact")
    if chosen is not None:
        label = f"chosen: {chosen.name}"
        axes.scatter([chosen.tokens], [chosen.accuracy], s=90, facecolors="none", edgecolors="black", label=label)
    axes.set_xscale("log")
    axes.set(xlabel="tokens processed per problem", ylabel="validation problems solved, %")
    legend(figure)
    save_figure(figure, path)


def found(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Exact, the part of the frontier that is at most ten points below it, and the choice, whose name says so. Plots
    the figure."""
    rows = load_task(RECIPES[args.task].task).load_rows("validation")
    rows = rows.select(range(min(args.validation or len(rows), len(rows))))
    prompts = cost.prompts_of(rows, tokenizer, model.device)

    def judge(options: dict[str, Any], count: int | None) -> Tried:
        some = rows.select(range(min(count or len(rows), len(rows))))
        parts = cost.sample(model, tokenizer, prompts[: len(some)], args.gen_length, args.batch, **options)
        right = cost.solved(parts, tokenizer, prompts.shape[1], some, args.task)
        return Tried(options, 100 * statistics.fmean(right), cost.work_of(parts)[1])

    exact = judge({"stop": False}, None)
    tried = search(judge, args.gen_length)
    chosen = choice(tried, exact)
    plot(tried, exact, chosen, Path(args.output_dir) / f"{report_name(args)}.png")
    shown = [one for one in frontier(tried) if one.accuracy >= exact.accuracy - 10]
    shown += [chosen] if chosen is not None and chosen not in shown else []
    return {cost.BASE: {"stop": False}} | {
        f"{'chosen: ' if one is chosen else ''}{one.name}": one.options
        for one in sorted(shown, key=lambda one: one.tokens)
    }


def report_name(args: argparse.Namespace) -> str:
    return f"frontier_{args.task}_{args.gen_length}"


def make_parser() -> argparse.ArgumentParser:
    parser = cost.make_parser(__doc__)
    parser.add_argument("--validation", type=COUNT, help="search on this number of validation problems (default: all)")
    return parser


def main(args: argparse.Namespace) -> None:
    cost.write_comparison(args, report_name(args), found)


if __name__ == "__main__":
    run_script("studies.samplers.search", lambda: main(make_parser().parse_args()))
