"""What is checked of rows that another program sampled: a server, SGLang, or a user's `rollout_func`.

A row is a dictionary of lists with one entry per token: `completion_ids`, and those of `steps`, `logprobs` and
`entropies` that are known. Whether its log-probabilities are those of the model is checked by scoring it again
(`d1/rl/rescored.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d1.sampling.settings import SamplingSettings

ROUNDING = 1e-3  # nats by which a log-probability may be above 0, or an entropy outside its range


@dataclass(frozen=True)
class Expected:
    """What is known of rows before they are sampled.

    Attributes:
        vocabulary: tokens of the model.
        mask_token_id: the token that no completion holds.
        ends: token ids that end a completion.
        settings: how the rows are sampled; they say how many tokens a canvas has.
        aligned: blocks are counted from a text's first token, as a block-causal model's are.
        by_our_rules: this library's samplers reveal the tokens, so the number of tokens per step is known, and the EOS
            stop fills whole blocks with the first of `ends`. Otherwise the steps need only lie in the right blocks.
    """

    vocabulary: int
    mask_token_id: int
    ends: Sequence[int]
    settings: SamplingSettings
    aligned: bool = False
    by_our_rules: bool = True


def check_row(
    where: str, row: Mapping[str, Any], prompt: int, expected: Expected, whole: str = ""
) -> dict[str, Tensor]:
    """The columns of a row as tensors (tokens,).

    Args:
        where: begins each message: who sampled the row, and its number.
        prompt: number of tokens of its prompt.
        whole: why the canvas must be whole; "": it may be cut after its first EOS.

    Raises:
        ValueError: a token, step, log-probability or entropy that no sampler with the `expected` settings gives.
    """
    length, limit = expected.settings.gen_length, "max_completion_length"
    canvas = check_ids(row["completion_ids"], f"{where}completion_ids", expected.vocabulary, length, limit)
    is_end = torch.isin(canvas, torch.tensor([*expected.ends], dtype=torch.long))
    if (canvas == expected.mask_token_id).any():
        raise ValueError(f"{where}completion_ids hold the mask token, {expected.mask_token_id}: fill the canvas")
    if len(canvas) < length and (whole or not is_end.any()):
        why = whole if is_end.any() else "there is no EOS"
        raise ValueError(f"{where}{len(canvas)} completion_ids, and {why}: return the whole canvas of {length}")
    columns, most = {"completion_ids": canvas}, math.log(expected.vocabulary)
    for name in [name for name in ("steps", "logprobs", "entropies") if name in row]:
        columns[name] = values = numbers(row[name], f"{where}{name}", len(canvas))
        if name == "steps":
            check_steps(where, values, canvas, is_end, prompt, expected)
        elif name == "logprobs":
            refuse(where, name, values, ~values.isfinite() | (values > ROUNDING), "a finite log-probability, <= 0")
        else:
            wrong = ~values.isfinite() | (values < -ROUNDING) | (values > most + ROUNDING)
            refuse(where, name, values, wrong, f"a finite entropy, 0 to log({expected.vocabulary}) = {most:.2f}")
    return columns


def check_steps(where: str, steps: Tensor, canvas: Tensor, is_end: Tensor, prompt: int, expected: Expected) -> None:
    """Raises ValueError for steps (tokens,) that no sampler takes to fill a `canvas` after `prompt` tokens."""
    settings, by_our_rules = expected.settings, expected.by_our_rules
    schedule = settings.schedule(prompt % settings.block_length if expected.aligned else None)
    most = sum(len(counts) + settings.post_steps for counts in schedule)
    behind = is_end.cumsum(0) - is_end.int() > 0  # after the first EOS
    wrong = (steps != steps.round()) | (steps < -1) | (steps >= most) | ((steps < 0) & ~behind)
    refuse(where, "steps", steps, wrong, f"0 to {most - 1} (-1: filled in after the first EOS)")
    places, first, before, ended = torch.arange(len(steps)), 0, 0, False
    for number, counts in enumerate(schedule):
        inside, first = (places >= first) & (places < first + sum(counts)), first + sum(counts)
        revealed, known = (
            inside & (steps >= 0),
            f"block {number} (of {settings.block_length} tokens) is filled after those before it",
        )
        refuse(where, "steps", steps, revealed & (steps < before), f"{before} or more: {known}")
        if by_our_rules and ended:
            why = f"-1 and token {expected.ends[0]}: the EOS stop fills the blocks after the EOS"
            refuse(where, "steps", steps, inside & ((steps >= 0) | (canvas != expected.ends[0])), why)
        elif by_our_rules:
            refuse(where, "steps", steps, inside & (steps < 0), "a step: the block of the first EOS is sampled whole")
            if settings.edits is None:
                taken = torch.bincount(steps[inside].long() - before)
                check_counts(f"{where}steps of block {number}", taken, torch.tensor(counts), settings.rule)
        before = int(steps[revealed].max()) + 1 if revealed.any() else before
        ended |= bool(is_end[inside].any())


def check_counts(what: str, taken: Tensor, due: Tensor, rule: str | None) -> None:
    """Raises ValueError unless a block was filled with `due` tokens per step or, by a `rule`, with at least that many
    until each step, and one or more in it."""
    if rule is None:
        possible = taken.tolist() == due.tolist()
    else:
        possible = len(taken) <= len(due) and bool((taken > 0).all())
        possible = possible and bool((taken.cumsum(0) >= due[: len(taken)].cumsum(0)).all())
    if not possible:
        words = "" if rule is None else f" at least, one or more in each (rule {rule})"
        raise ValueError(f"{what} reveal {taken.tolist()!s:.60} tokens: expected {due.tolist()!s:.60}{words}")


def refuse(where: str, name: str, values: Tensor, wrong: Tensor, expected: str) -> None:
    """Raises ValueError for the first of the `values` that is `wrong`."""
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise ValueError(f"{where}{name}[{at}] is {values[at]:g}: expected {expected}")


def numbers(values: Any, what: str, count: int | None = None) -> Tensor:
    """(count,) numbers. Raises ValueError for anything else."""
    try:
        tensor = torch.as_tensor(values).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what}: expected a list of numbers, got {values!r:.60}") from error
    if tensor.dim() != 1 or tensor.dtype == torch.bool:
        raise ValueError(f"{what}: expected a list of numbers, got {values!r:.60}")
    if count not in (None, len(tensor)):
        raise ValueError(f"{what} has {len(tensor)} entries for {count} completion_ids: expected one per token")
    return tensor


def check_ids(ids: Any, what: str, vocabulary: int, most: int, limit: str) -> Tensor:
    """Token ids as a tensor. Raises ValueError for ids outside of the vocabulary, none, or too many."""
    tensor = numbers(ids, what)
    if not 0 < len(tensor) <= most:
        raise ValueError(f"{what} has {len(tensor)} ids: expected 1 to {limit} ({most})")
    if tensor.is_floating_point() or ((tensor < 0) | (tensor >= vocabulary)).any():
        raise ValueError(f"{what}: the model has {vocabulary} tokens, numbered from 0, got {tensor.tolist()!r:.60}")
    return tensor
