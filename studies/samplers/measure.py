"""What a sampler does with problems that no training uses: fresh problems, greedy completions of them with counts of
work, accuracy, and the area under accuracy against tokens per pass."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from d1.sampling import Rollout, eos_cut, rollout
from d1.tasks import load_task
from d1.tasks.sudoku import solution_grids
from dataset.make_problems import arithmetic_row, sudoku_puzzles, write_rows
from pocket.arithmetic_traces import training_numbers
from pocket.recipes import RECIPES

BATCH = 128
NUMBERS = Path(__file__).resolve().parents[2] / "dataset" / "arithmetic_test.jsonl"
PENALTY, ALLOWED = 3.0, 5.0  # AUP's alpha, and points of accuracy below the slowest point


def puzzles(count: int, seed: int) -> list[dict[str, str]]:
    """`count` new puzzles on the test split's solution grids."""
    solutions = sorted(set(load_task("sudoku").load_rows("test")["ground_truth"]))
    return sudoku_puzzles(solutions, count, solution_grids(), random.Random(seed))


def word_problems(count: int, seed: int) -> list[dict[str, str]]:
    """`count` new word problems on the test split's numbers, which are used equally often, up to one."""
    numbers, rng = training_numbers(NUMBERS), np.random.default_rng(seed)
    return [arithmetic_row(*numbers[i % len(numbers)], rng=rng) for i in range(count)]


NEW: dict[str, Callable[[int, int], list[dict[str, str]]]] = {"sudoku": puzzles, "arithmetic": word_problems}


def sudoku(count: int, seed: int) -> Any:
    """Rows of `count` new puzzles."""
    return rows_of("sudoku", puzzles(count, seed))


def arithmetic(count: int, seed: int) -> Any:
    """Rows of `count` new word problems."""
    return rows_of("arithmetic", word_problems(count, seed))


def countdown(count: int, seed: int) -> Any:
    """Rows of the test split, which has every problem of its numbers: `count` of them, or all if there are fewer."""
    rows = load_task("pocket_countdown").load_rows("test")
    return rows.select(sorted(random.Random(seed).sample(range(len(rows)), min(count, len(rows)))))


FRESH = {"sudoku": sudoku, "countdown": countdown, "arithmetic": arithmetic}


def rows_of(task: str, problems: list[dict[str, str]]) -> Any:
    """The rows that a task reads from a file with these problems."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problems.jsonl"
        write_rows(path, problems)
        return load_task(task).load_rows("test", str(path))


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Tensor,
    length: int,
    *,
    block: int = 8,
    steps: int | None = None,
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
            eos_token_ids=[tokenizer.eos_token_id],
            sampler=sampler,
            **options,
        )
        for rows in prompts.split(BATCH)
    ]


def solved(rollouts: list[Rollout], tokenizer: Any, width: int, rows: Any, task: str = "sudoku") -> list[float]:
    """1 for each problem whose completion, up to its end, solves it."""
    texts = [
        tokenizer.decode(ids).split(tokenizer.eos_token)[0] for part in rollouts for ids in part.ids[:, width:].tolist()
    ]
    return [load_task(RECIPES[task].task).score(text, row)["accuracy"] for text, row in zip(texts, rows, strict=True)]


def work_of(parts: list[Rollout]) -> tuple[float, float]:
    """Forward passes and tokens processed by the model, per problem."""
    counts = torch.cat([torch.stack([part.passes, part.forward_tokens]) for part in parts], dim=1).double().mean(1)
    return counts[0].item(), counts[1].item()


def prompts_of(rows: Any, tokenizer: Any, device: str) -> Tensor:
    """(rows, prompt) ids: all prompts of a pocket task have the same length."""
    ids = tokenizer.apply_chat_template(list(rows["prompt"]), add_generation_prompt=True, return_dict=False)
    return torch.tensor(ids, device=device)


@torch.no_grad()
def measured(
    model: Any, tokenizer: Any, rows: Any, task: str, length: int, samplers: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """For each sampler (name -> options of `sample`): whether each problem was solved, as a text of 0 and 1, and per
    problem forward passes, tokens of the completion up to its EOS, tokens that the model computed, and seconds of
    processor time."""
    prompts, found = prompts_of(rows, tokenizer, model.device), {}
    width = prompts.shape[1]
    for name, options in samplers.items():
        began = time.process_time()
        parts = sample(model, tokenizer, prompts, length, **options)
        seconds = time.process_time() - began
        own = sum(int(eos_cut(part.ids[:, width:], [tokenizer.eos_token_id]).sum()) for part in parts)
        passes, computed = work_of(parts)
        right = solved(parts, tokenizer, width, rows, task)
        found[name] = {
            "solved": "".join(str(int(one)) for one in right),
            "passes": round(passes, 4),
            "tokens": round(own / len(rows), 4),
            "computed": round(computed, 2),
            "seconds": round(seconds / len(rows), 6),
        }
    return found


def accuracy(found: Mapping[str, Any]) -> float:
    """In percent, of one sampler's outcomes."""
    return 100 * found["solved"].count("1") / len(found["solved"])


def mean_over(found: Iterable[Mapping[str, Any]], value: str) -> float:
    """The mean over what one sampler did with several seeds: of its accuracy in percent, or of a count per problem
    (passes, tokens, computed tokens, seconds)."""
    return fmean(accuracy(one) if value == "accuracy" else one[value] for one in found)


def outcomes(found: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """(seeds, problems), 1 where a problem is solved."""
    return np.array([[*map(int, one["solved"])] for one in found], dtype=float)


def points(samplers: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(tokens per pass, accuracy in percent) of each sampler."""
    return [(found["tokens"] / found["passes"], accuracy(found)) for found in samplers.values()]


def area(pairs: Sequence[tuple[float, float]], highest: float) -> float:
    """AUP (arXiv 2601.07568) of (tokens per pass, accuracy in percent); `highest` is the best accuracy of the task."""
    pairs = sorted(pairs)
    pairs = [pair for pair in pairs if pair[1] >= pairs[0][1] - ALLOWED]
    weighed = [y * min(math.exp(-PENALTY * (1 - y / highest)), 1.0) for _, y in pairs]
    total = pairs[0][0] * pairs[0][1]
    for i in range(1, len(pairs)):
        total += (pairs[i][0] - pairs[i - 1][0]) * (weighed[i] + weighed[i - 1]) / 2
    return total


def aup(samplers: Mapping[str, Any], highest: float | None = None) -> float:
    """AUP of a model over its samplers; `highest` None: its own best accuracy."""
    found = points(samplers)
    return area(found, max(y for _, y in found) if highest is None else highest)
