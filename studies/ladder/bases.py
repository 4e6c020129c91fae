"""The ladder's problems, and its bases: models of three widths that learned to solve the same share of problems, and
then to show the same smaller share.

The problems are word problems of eight steps. Sentences and steps are numbered (`numbered_arithmetic` in
`pocket/tokenizer.py`), because a small model cannot tell from rotary positions alone which of eight sentences is next.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from d1.runs.record import run_record
from dataset.make_problems import arithmetic_problems, splits_of, write_rows
from pocket import arithmetic_traces
from pocket.make_base import WARMUP_STEPS, build_model, optimized, solve_rate, widened
from pocket.recipes import RECIPES, Recipe
from pocket.tokenizer import ORDINALS, build_tokenizer
from studies.json_lines import complete, read_lines
from studies.leaderboard.run import commit

logger = logging.getLogger(__name__)

DATA = Path(__file__).parent / "data"
WIDTHS, BASES = (64, 120, 240), (0, 1)
STEPS = 8  # of a problem
SEED = 12  # of the problems
PROBLEMS = {"train": 4000, "validation": 256, "test": 400}
PEAKS = (3e-3, 1e-3)  # rates of careful and of mixed answers at the first width, 1 / width times as large at the others
INITIAL = 0.8  # standard deviation of initial weights, times the root of the width


def prompt_tokens(steps: int) -> int:
    return 4 * steps + 12


def answer_tokens(steps: int) -> int:
    """Of a right answer with its EOS."""
    return 8 * steps + 8


PROMPT, CANVAS = prompt_tokens(STEPS), answer_tokens(STEPS)


def trace(style: str, *problem: Any) -> tuple[str, str]:
    """`arithmetic_traces.trace` with numbered steps: "careful one 27 + 8 = 35 two 35 * 2 = 70"."""
    told, attempt = arithmetic_traces.trace(style, *problem)
    word, _, steps = told.partition(" ")
    numbered = zip(ORDINALS, steps.split(" ; "), strict=False)
    return " ".join([word, *(f"{ordinal} {step}" for ordinal, step in numbered)]), attempt


TRACES = SimpleNamespace(trace=trace, question=arithmetic_traces.question, HUMS=arithmetic_traces.HUMS)


@dataclass(frozen=True)
class Stage:
    """A stage of pretraining: a warm-up, then a rate that falls to 0 in `most` steps; it ends earlier with its share.

    Attributes:
        rows: of a batch.
        mixed: answers are mixed, not careful.
        block: tokens per block of block-causal attention, where one pass trains all blocks; None: full attention.
        every: optimizer steps between two judgements on validation problems.
        least, highest: the stage ends when the share solved is at least `least` and at most `highest`.
        needed: without such a share, there is no base.
    """

    rows: int
    mixed: bool
    block: int | None
    every: int
    most: int
    least: float = 0.0
    highest: float = 1.0
    needed: bool = True


SHORT = (2, 16, 1500)  # before the stages, with blocks: steps of a problem, rows, optimizer steps
STAGES = (
    Stage(rows=16, mixed=False, block=8, every=500, most=6000, least=0.6, needed=False),
    Stage(rows=32, mixed=False, block=None, every=200, most=3000, least=0.6),
    Stage(rows=32, mixed=True, block=None, every=5, most=400, highest=0.35),
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOWEST = 0.2  # of the share that a base shows at the start
Ended = tuple[LlamaForCausalLM, int, float, bool]  # a stage: its model, steps, share solved, and whether that is wanted


def problem_files(folder: Path) -> dict[str, Path]:
    """Split -> its file in `folder`, which is written if it is not there. No two problems have the same numbers."""
    files = {split: folder / f"problems_{split}.jsonl" for split in PROBLEMS}
    if not all(file.exists() for file in files.values()):
        folder.mkdir(parents=True, exist_ok=True)
        for split, rows in splits_of(arithmetic_problems(SEED, STEPS), PROBLEMS).items():
            part = files[split].with_suffix(f".{os.getpid()}")  # another process may write the same
            write_rows(part, rows)
            part.rename(files[split])
    return files


def recipe_of(width: int, steps: int, rows: int) -> Recipe:
    recipe = replace(
        RECIPES["arithmetic"], traces=TRACES, hidden_size=WIDTHS[0], peak_lr=PEAKS, batch_size=rows,
        prompt_tokens=prompt_tokens(steps), completion_tokens=(answer_tokens(steps),),
    )  # fmt: skip
    return widened(recipe, width)


def pretrained(
    width: int, number: int, files: Mapping[str, Path], stages: Sequence[Stage], short: tuple[int, int, int]
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase, dict[str, Any]]:
    """A base, its tokenizer, and each stage's optimizer steps and share of validation problems solved.

    Raises:
        ValueError: a stage that is needed did not reach its share.
    """
    torch.set_num_threads(1)
    tokenizer, seed = build_tokenizer("numbered_arithmetic"), 100 * width + 10 * number

    def losses(model: LlamaForCausalLM, part: int, steps: int, stage: Stage) -> Iterator[float]:
        """Trains the model; each part has its own data and noise."""
        recipe = recipe_of(width, steps, stage.rows)
        peak, most = recipe.peak_lr[stage.mixed], stage.most
        rates = (peak * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / most) for step in range(most))
        draw = arithmetic_traces.problems(files["train"], steps)
        return optimized(model, tokenizer, recipe, draw, (seed + part, int(stage.mixed)), rates)

    def trained(part: int, stage: Stage, weights: Mapping[str, Any], every: int, above: int = 0) -> Ended:
        """The model after a stage from these weights, judged after each `every`th step beyond step `above`."""
        model: Any = build_model(tokenizer, seed, width, stage.block)
        model.to(DEVICE).load_state_dict(weights)
        step, share = 0, 0.0
        for step, _ in enumerate(losses(model, part, STEPS, stage), 1):
            if step > above and step % every == 0:
                share = solve_rate(model, tokenizer, "arithmetic", CANVAS, str(files["validation"]))
                logger.info("width %d, base %d, stage %d, step %d: solves %.3f", width, number, part, step, share)
                if stage.least <= share <= stage.highest:
                    return model, step, share, True
        return model, step, share, False

    model: Any = build_model(tokenizer, seed, width, stages[0].block, initializer_range=INITIAL / width**0.5)
    model.to(DEVICE)
    steps, rows, count = short
    deque(losses(model, 0, steps, replace(stages[0], rows=rows, most=count)), maxlen=0)
    found: dict[str, Any] = {"parameters": model.num_parameters(), "steps": [count], "solved": []}
    for part, stage in enumerate(stages, 1):
        weights = model.state_dict()
        model, step, share, there = trained(part, stage, weights, stage.every)
        if stage.mixed and share < LOWEST and stage.every > 1:  # again, with each of the last steps judged
            model, step, share, there = trained(part, stage, weights, 1, step - stage.every)
        if stage.needed and not there:
            wanted = f"{stage.least} to {stage.highest} wanted"
            raise ValueError(f"width {width}, base {number}: {share:.3f} solved after {step} steps, {wanted}")
        found["steps"].append(step)
        found["solved"].append(share)
    return model, tokenizer, found


def folder_of(width: int, number: int, folder: Path) -> Path:
    return folder / f"base-{width}-{number}"


def make(base: Mapping[str, int], folder: Path) -> dict[str, Any]:
    """Makes a base in its folder; returns the rest of its line. The same seed gives the same weights."""
    began, own = time.process_time(), folder_of(base["width"], base["base"], folder)
    *parts, found = pretrained(base["width"], base["base"], problem_files(folder), STAGES, SHORT)
    if found["solved"][-1] < LOWEST:
        raise ValueError(f"{own.name} solves {found['solved'][-1]:.3f} at the start, at least {LOWEST} wanted")
    made = own.with_name(f"{own.name}.part")
    shutil.rmtree(made, ignore_errors=True)  # left by a killed run
    shutil.rmtree(own, ignore_errors=True)
    for part in parts:
        part.save_pretrained(made)
    made.rename(own)
    found |= {"weights": digest(own), "processor_seconds": round(time.process_time() - began, 1)}
    return found | {"commit": commit(), **run_record()}


def digest(base: Path) -> str:
    return hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()[:16]


def base_model(width: int, number: int, folder: Path) -> Path:
    """The folder of a base. One that has a line but is not there is made again.

    Raises:
        ValueError: its weights are not those of its line.
    """
    own = folder_of(width, number, folder)
    lines = [line for line in read_lines(DATA / "bases.jsonl") if (line["width"], line["base"]) == (width, number)]
    with folder.joinpath(f"{own.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not own.exists():
            make({"width": width, "base": number}, folder)
    if lines and digest(own) != lines[-1]["weights"]:
        raise ValueError(
            f"{own} has other weights than its line in {DATA}/bases.jsonl: runs of both cannot be compared"
        )
    return own


def make_bases(width: int, folder: Path) -> None:
    """Makes the bases of a width that have no line."""
    bases = [{"width": width, "base": number} for number in BASES]
    complete(DATA / "bases.jsonl", bases, folder, lambda base: make(base, folder))
