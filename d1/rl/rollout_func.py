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

from d1.models.kinds import block_size
from d1.rl.objectives import OBJECTIVES
from d1.rl.penalties import PENALTIES
from d1.rl.record import log_rollout
from d1.rl.rescored import check_engine
from d1.rl.scored import SCORED
from d1.rl.updates import Batch, texts_of
from d1.sampling.checks import Expected, check_ids, check_row
from d1.scoring import ESTIMATORS

TOKENS = ("prompt_ids", "completion_ids")
RECORD = {"steps": "reveal_steps", "logprobs": "rollout_logps", "entropies": "rollout_entropies"}
READ = {"reveal_steps": "steps", "logps": "logprobs", "entropies": "entropies"}  # of `SampledRows`
COLUMNS = {"completion_ids": "canvas_ids", **RECORD}


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
    if {"steps", "logprobs"} <= given.keys() and not trainer.weights_are_split:
        check_engine(trainer, given, trainer.record)
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
    args, config, ends = trainer.args, trainer.model.config, trainer.eos_token_ids
    behind = ESTIMATORS[args.estimator].replays or SCORED[args.scored_tokens].behind_the_end
    whole = f"--method {args.method} reads what follows the EOS" if behind else ""
    aligned = block_size(config) is not None
    expected = Expected(config.vocab_size, trainer.mask_token_id, ends, trainer.sampling, aligned, by_our_rules=False)
    shape = len(given["completion_ids"]), int(args.max_completion_length)
    record = {"canvas_ids": torch.full(shape, ends[0]), "reveal_steps": torch.full(shape, -1)}
    record |= {column: torch.zeros(shape) for name, column in RECORD.items() if name in given and name != "steps"}
    for number, prompt in enumerate(given["prompt_ids"]):
        where = f"rollout_func, row {number}: "
        check_ids(prompt, f"{where}prompt_ids", config.vocab_size, args.max_prompt_length, "max_prompt_length")
        row = {name: rows[number] for name, rows in given.items() if name != "prompt_ids"}
        for name, values in check_row(where, row, len(prompt), expected, whole).items():
            column = record[COLUMNS[name]]
            column[number, : len(values)] = values.to(column.dtype)
    return record
