"""The ladder's problems, and its bases: models of three widths that learned to solve the same share of problems, and
then to show the same smaller share.

The problems are word problems of eight steps. Sentences and steps are numbered (`numbered_arithmetic` in
`pocket/tokenizer.py`), because a small model cannot tell from rotary positions alone which of eight sentences is next.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
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
BLOCK = 8  # tokens, of the first stage
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
class Stages:
    """How a base is pretrained. All stages warm up and then have a constant rate.

    Attributes:
        blocks: (steps of a problem, rows, optimizer steps) of each part of the first stage: careful answers,
            block-causal attention, where one pass trains all blocks of a text.
        rows: of the later stages, with full attention: careful answers until the model solves `least`, then mixed ones
            until it solves `highest` or less, which must be `lowest` or more.
        every, most: optimizer steps between two judgements, and in all, of either later stage.
    """

    blocks: tuple[tuple[int, int, int], ...] = ((2, 16, 1500), (STEPS, 32, 500))
    rows: int = 32
    least: float = 0.6
    highest: float = 0.35
    lowest: float = 0.2
    every: tuple[int, int] = (200, 20)
    most: tuple[int, int] = (4000, 400)


STAGES = Stages()


def problem_files(folder: Path) -> dict[str, Path]:
    """Split -> its file in `folder`, which is written if it is not there. No two problems have the same numbers."""
    files = {split: folder / f"problems_{split}.jsonl" for split in PROBLEMS}
    if not all(file.exists() for file in files.values()):
        folder.mkdir(parents=True, exist_ok=True)
        for split, rows in splits_of(arithmetic_problems(SEED, STEPS), PROBLEMS).items():
            write_rows(files[split], rows)
    return files


def recipe_of(width: int, steps: int, rows: int) -> Recipe:
    recipe = replace(
        RECIPES["arithmetic"], traces=TRACES, hidden_size=WIDTHS[0], peak_lr=PEAKS, batch_size=rows,
        prompt_tokens=prompt_tokens(steps), completion_tokens=(answer_tokens(steps),),
    )  # fmt: skip
    return widened(recipe, width)


def share_solved(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: Path) -> float:
    return solve_rate(model, tokenizer, "arithmetic", CANVAS, str(problems))


def pretrained(
    width: int, number: int, files: Mapping[str, Path], stages: Stages
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase, dict[str, Any]]:
    """A base, its tokenizer, and its optimizer steps and shares of validation problems solved.

    Raises:
        ValueError: a later stage did not reach its share.
    """
    torch.set_num_threads(1)
    tokenizer, seed, deviation = build_tokenizer("numbered_arithmetic"), 100 * width + 10 * number, INITIAL / width**0.5
    model = build_model(tokenizer, seed, width, BLOCK, deviation)

    def losses(part: int, steps: int, rows: int, stage: int, count: int) -> Iterator[float]:
        """Trains the model; each part has its own data and noise."""
        recipe = recipe_of(width, steps, rows)
        rates = (recipe.peak_lr[stage] * min(1.0, (step + 1) / WARMUP_STEPS) for step in range(count))
        draw = arithmetic_traces.problems(files["train"], steps)
        return optimized(model, tokenizer, recipe, draw, (seed + part, stage), rates)

    for part, (steps, rows, count) in enumerate(stages.blocks):
        deque(losses(part, steps, rows, 0, count), maxlen=0)
    weights, model = model.state_dict(), build_model(tokenizer, seed, width)
    model.load_state_dict(weights)
    found: dict[str, Any] = {"parameters": model.num_parameters(), "steps": [sum(of[-1] for of in stages.blocks)]}
    found["solved"] = []
    for stage, (most, every) in enumerate(zip(stages.most, stages.every, strict=True)):
        step, share = 0, 1.0
        for step, _ in enumerate(losses(len(stages.blocks), STEPS, stages.rows, stage, most), 1):
            if step % every == 0:
                share = share_solved(model, tokenizer, files["validation"])
                logger.info("width %d, base %d, stage %d, step %d: solves %.3f", width, number, stage, step, share)
                if share >= stages.least if stage == 0 else share <= stages.highest:
                    break
        else:
            wanted = f"at least {stages.least}" if stage == 0 else f"at most {stages.highest}"
            raise ValueError(f"width {width}, base {number}: {share:.3f} solved after {most} steps, {wanted} wanted")
        found["steps"].append(step)
        found["solved"].append(share)
    if share < stages.lowest:
        raise ValueError(
            f"width {width}, base {number}: {share:.3f} solved at the start, at least {stages.lowest} wanted"
        )
    return model, tokenizer, found


def folder_of(width: int, number: int, folder: Path) -> Path:
    return folder / f"base-{width}-{number}"


def make(base: Mapping[str, int], folder: Path) -> dict[str, Any]:
    """Makes a base in its folder; returns the rest of its line. The same seed gives the same weights."""
    began, own = time.process_time(), folder_of(base["width"], base["base"], folder)
    *parts, found = pretrained(base["width"], base["base"], problem_files(folder), STAGES)
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
