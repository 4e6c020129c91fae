"""Rollouts of an engine of the user's own: TRL's `rollout_func(prompts, trainer)`, and the check of what it returns.

It gets the prompts of this process's rows, chat messages, and returns a dictionary of lists, one entry per row:

- `prompt_ids`: ids of the prompt, at most `max_prompt_length`;
- `completion_ids`: ids of the canvas, `max_completion_length` at most. It may be cut anywhere after its first EOS,
  unless the method replays the sampler's states or scores tokens after an EOS;
- `steps` (optional), one per id: the number, from 0, of the row's own forward pass that revealed the token; -1 for
  tokens after the first EOS that were filled in and not revealed;
- `logprobs` and `entropies` (optional), one per id, in nats: of the distribution that `Rollout` documents.

As in TRL, other keys go to the rewards, as columns. Keys are optional or None only if no row of the run reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from d1.models.kinds import block_size
from d1.rl.objectives import OBJECTIVES
from d1.rl.penalties import PENALTIES
from d1.rl.record import log_rollout
from d1.rl.scored import SCORED
from d1.rl.updates import Batch, texts_of
from d1.scoring import ESTIMATORS

TOKENS = ("prompt_ids", "completion_ids")
RECORD = {"steps": "reveal_steps", "logprobs": "rollout_logps", "entropies": "rollout_entropies"}
READ = {"reveal_steps": "steps", "logps": "logprobs", "entropies": "entropies"}  # of `SampledRows`
ROUNDING = 1e-3  # by which a log-probability may be above 0, or an entropy below


def readers(args: Any) -> dict[str, list[str]]:
    """Which of `RECORD` the run's rows read: key -> settings that name these rows."""
    estimator, read = ESTIMATORS[args.estimator], {name: list[str]() for name in RECORD}
    for column in dict.fromkeys((*["reveal_steps"] * estimator.replays, *estimator.reads(args.view_settings()))):
        read[READ[column]].append(f"estimator {args.estimator}")
    if args.sampling_weight_cap is not None:
        read["logprobs"].append("sampling_weight_cap")
    of_steps = {
        f"objective {args.objective}": OBJECTIVES[args.objective].reads_steps,
        f"kl {args.kl}": PENALTIES[args.kl].reads_steps and args.beta and not args.has_trls_kl,
        f"scored_tokens {args.scored_tokens}": SCORED[args.scored_tokens].reads_steps,
    }
    read["steps"] += [name for name, reads in of_steps.items() if reads]
    return {key: names for key, names in read.items() if names}


def check_rollout_func(args: Any) -> None:
    """Raises ValueError for settings that no `rollout_func` can serve."""
    if args.rollout_mode == "server":
        raise ValueError("rollout_func samples the rollouts, and so would rollout_mode server: choose one of them")
    if args.sampling_settings().edits is not None:
        raise ValueError("edit_threshold: a rollout_func does not return what edits replaced: leave it out")
    if args.max_compute_tokens is not None:
        raise ValueError("max_compute_tokens counts the tokens of rollouts, which a rollout_func does not tell")


def user_rollout(function: Callable[[list, Any], dict[str, Any]], prompts: list, trainer: Any) -> dict[str, Any]:
    """What TRL expects of a `rollout_func`; the record of the canvases becomes the trainer's.

    Raises:
        ValueError: the function returned something else, or not what the method reads.
    """
    started = time.perf_counter()
    returned = function(prompts, trainer)
    if not isinstance(returned, dict):
        raise ValueError(f"rollout_func returned {type(returned).__name__}: expected a dictionary of lists")
    if returned.get("env_mask") is not None:
        raise ValueError("rollout_func returned env_mask: every token of a canvas is the model's, so leave it out")
    given = {name: returned[name] for name in (*TOKENS, *RECORD) if returned.get(name) is not None}
    for name, rows in given.items():
        if not isinstance(rows, Sequence) or len(rows) != len(prompts):
            found = len(rows) if isinstance(rows, Sequence) else type(rows).__name__
            raise ValueError(f"rollout_func got {len(prompts)} prompts: expected a list of as many {name}, got {found}")
    check_keys(given, trainer)
    record = record_of(given, trainer)
    completions = texts_of(record["canvas_ids"], trainer.eos_token_ids)
    trainer.record = {name: column.to(trainer.accelerator.device) for name, column in record.items()}
    log_rollout(trainer, started, record["canvas_ids"].numel(), {})
    others = {name: value for name, value in returned.items() if name not in (*TOKENS, *RECORD, "env_mask")}
    return {"prompt_ids": given["prompt_ids"], "completion_ids": completions, "logprobs": None} | others


def check_keys(given: Iterable[str], trainer: Any) -> None:
    """Raises ValueError if a key is missing that the run reads, or that other processes have."""
    if missing := {*TOKENS}.difference(given):
        raise ValueError(f"rollout_func returned no {min(missing)}: every method needs them")
    for name, names in readers(trainer.args).items():
        if name not in given:
            raise ValueError(
                f"rollout_func returned no {name}, which --method {trainer.args.method} reads ({', '.join(names)}): "
                "return them, or choose a method that reads tokens alone, such as d1 or espo"
            )
    own = torch.tensor([[name in given for name in RECORD]], device=trainer.accelerator.device)
    if not (trainer.accelerator.gather(own) == own).all():
        raise ValueError(f"rollout_func returned {', '.join(given)} here, and other keys in another process")


def record_of(given: dict[str, Sequence[Any]], trainer: Any) -> Batch:
    """The columns (rows, canvas) of the rows, checked: `canvas_ids`, `reveal_steps`, and those of `RECORD` given."""
    args, config, block = trainer.args, trainer.model.config, block_size(trainer.model.config)
    length, ends = int(args.max_completion_length), torch.tensor(trainer.eos_token_ids)
    steps = max(trainer.sampling.most_passes(filled) for filled in (range(block) if block else [None]))
    whole = ESTIMATORS[args.estimator].replays or SCORED[args.scored_tokens].behind_the_end
    shape = len(given["completion_ids"]), length
    record = {"canvas_ids": ends[0].repeat(shape), "reveal_steps": torch.full(shape, -1)}
    record |= {column: torch.zeros(shape) for name, column in RECORD.items() if name in given and name != "steps"}
    for row, (prompt, ids) in enumerate(zip(given["prompt_ids"], given["completion_ids"], strict=True)):
        where = f"rollout_func, row {row}: "
        check_ids(prompt, f"{where}prompt_ids", config.vocab_size, args.max_prompt_length, "max_prompt_length")
        canvas = check_ids(ids, f"{where}completion_ids", config.vocab_size, length, "max_completion_length")
        is_end = torch.isin(canvas, ends).int()
        if (canvas == trainer.mask_token_id).any():
            raise ValueError(f"{where}completion_ids hold the mask token, {trainer.mask_token_id}: fill the canvas")
        if len(canvas) < length and (whole or not is_end.any()):
            why = f"--method {args.method} reads what follows the EOS" if is_end.any() else "there is no EOS"
            raise ValueError(f"{where}{len(canvas)} completion_ids, and {why}: return the whole canvas of {length}")
        record["canvas_ids"][row, : len(canvas)] = canvas
        for name in RECORD.keys() & given.keys():
            values = numbers(given[name][row], f"{where}{name}", len(canvas))
            if name == "steps":
                unrevealed = (values < 0) & (is_end.cumsum(0) - is_end == 0)  # a token up to the first EOS
                wrong = (values != values.round()) | (values < -1) | (values >= steps) | unrevealed
                expected = f"0 to {steps - 1} (-1: filled in after the first EOS)"
            else:
                wrong = ~values.isfinite() | ((values if name == "logprobs" else -values) > ROUNDING)
                expected = "a finite log-probability" if name == "logprobs" else "a finite entropy"
            if wrong.any():
                at = int(wrong.nonzero()[0])
                raise ValueError(f"{where}{name}[{at}] is {values[at]:g}: expected {expected}")
            record[RECORD[name]][row, : len(canvas)] = values.to(record[RECORD[name]].dtype)
    return record


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
