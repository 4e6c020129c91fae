"""Rollouts of a user's own function, TRL's `rollout_func`.

`rollout_func(prompts, trainer)` gets the chats of this process's rows. It returns a dict of lists, one element per row;
docs/serve.md describes them. `logprobs` and `entropies` are of the distribution that `Rollout` documents. A key of
`RECORD` may be missing, or None, if no entry of the run reads it. Other keys go to the rewards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from d1.masking import token_ids
from d1.models.kinds import block_size, require_masks, vocabulary
from d1.rl.batch import LOSS_MASKS, RolloutRecord, completion_ids_of
from d1.rl.checks import SPEED_SETTINGS
from d1.rl.config import DiffuGRPOConfig
from d1.rl.losses import OBJECTIVES, PENALTIES
from d1.rl.sources import LocalRollouts
from d1.scoring import ESTIMATORS
from d1.serve.client import Expected, check_ids, check_numbers, check_row, reveal_steps
from d1.serve.rescoring import Rescoring

if TYPE_CHECKING:
    from d1.rl.trainer import DiffuGRPOTrainer

UserRollout = Callable[[list, Any], dict[str, Any]]
TOKENS = ("prompt_ids", "completion_ids")
RECORD = {"steps": "reveal_steps", "logprobs": "rollout_logps", "entropies": "rollout_entropies"}
# `steps` under its other name; and as a server's answer has them, from 1 in each block
STEP_ALIASES = ("reveal_steps", "step_maps")
ROW_FIELDS = {"reveal_steps": "steps", "logps": "logprobs", "entropies": "entropies"}  # fields of `SampledRows`
BATCH_KEYS = {"completion_ids": "canvas_ids", **RECORD}


def readers_of_keys(args: DiffuGRPOConfig) -> dict[str, list[str]]:
    """For each key of `RECORD`, the settings of the run whose entries read it."""
    readers: dict[str, list[str]] = {key: [] for key in RECORD}
    estimator = ESTIMATORS[args.estimator]
    fields = {*estimator.reads(args.view_settings())}
    if estimator.replays:
        fields.add("reveal_steps")
    for field, key in ROW_FIELDS.items():
        if field in fields:
            readers[key].append(f"estimator {args.estimator}")
    if args.sampling_weight_cap is not None:
        readers["logprobs"].append("sampling_weight_cap")
    if OBJECTIVES[args.objective].reads_steps:
        readers["steps"].append(f"objective {args.objective}")
    if PENALTIES[args.kl].reads_steps and args.beta and not args.has_trls_kl:
        readers["steps"].append(f"kl {args.kl}")
    if LOSS_MASKS[args.scored_tokens].reads_steps:
        readers["steps"].append(f"scored_tokens {args.scored_tokens}")
    return readers


def check_rollout_func(args: DiffuGRPOConfig) -> None:
    """Raises ValueError for settings that no `rollout_func` can serve."""
    if args.rollout_mode == "server":
        raise ValueError("rollout_func samples the rollouts, and so would rollout_mode server: choose one of them")
    if args.sampling_settings().edits is not None:
        raise ValueError("edit_threshold: a rollout_func does not return what edits replaced: leave it out")
    for name in SPEED_SETTINGS:
        if getattr(args, name):
            raise ValueError(
                f"{name} needs the forward passes of a row, which a rollout_func does not tell: leave it out"
            )
    if args.max_compute_tokens is not None:
        raise ValueError("max_compute_tokens counts the tokens of rollouts, which a rollout_func does not tell")


def split_result(result: Any, rows: int, args: DiffuGRPOConfig) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    """Splits what a `rollout_func` returned for `rows` rows: the keys of a rollout, and the others. Raises ValueError
    if it is no dictionary of lists, or lacks a key that the run reads."""
    if not isinstance(result, dict):
        raise ValueError(f"rollout_func returned {type(result).__name__}: expected a dictionary of lists")
    if result.get("env_mask") is not None:
        raise ValueError("rollout_func returned env_mask: every token of a canvas is the model's, so leave it out")
    rollout_keys = (*TOKENS, *RECORD, *STEP_ALIASES)
    columns = {name: result[name] for name in rollout_keys if result.get(name) is not None}
    for name, values in columns.items():
        if not isinstance(values, Sequence) or len(values) != rows:
            actual = len(values) if isinstance(values, Sequence) else type(values).__name__
            raise ValueError(f"rollout_func got {rows} prompts: expected a list of as many {name}, got {actual}")

    step_keys = [name for name in ("steps", *STEP_ALIASES) if name in columns]
    if len(step_keys) > 1:
        raise ValueError(f"rollout_func returned {' and '.join(step_keys)}: return one of them")
    if "reveal_steps" in columns:
        columns["steps"] = columns.pop("reveal_steps")
    missing = {*TOKENS}.difference(columns)
    if missing:
        raise ValueError(f"rollout_func returned no {min(missing)}: every method needs them")
    for name, readers in readers_of_keys(args).items():
        if readers and name not in columns and not (name == "steps" and step_keys):
            raise ValueError(
                f"rollout_func returned no {name}, which --method {args.method} reads ({', '.join(readers)}): "
                "return them, or choose a method that reads tokens alone, such as d1 or espo"
            )
    others = {name: value for name, value in result.items() if name not in (*rollout_keys, "env_mask")}
    return columns, others


def make_record(
    columns: dict[str, Sequence[Any]], args: DiffuGRPOConfig, expected: Expected, device: torch.device
) -> RolloutRecord:
    """The record of the rows, checked: `canvas_ids`, `reveal_steps`, and those of `RECORD` that `columns` has."""
    beyond_end = ESTIMATORS[args.estimator].replays or LOSS_MASKS[args.scored_tokens].after_the_end
    whole = f"--method {args.method} reads what follows the EOS" if beyond_end else ""
    shape = (len(columns["completion_ids"]), int(args.max_completion_length or 0))
    # A canvas that is cut is filled with EOS, as under the EOS stop.
    record = {"canvas_ids": torch.full(shape, expected.ends[0]), "reveal_steps": torch.full(shape, -1)}
    for name, key in RECORD.items():
        if name in columns and name != "steps":
            record[key] = torch.zeros(shape)
    for number, prompt in enumerate(columns["prompt_ids"]):
        where = f"rollout_func, row {number}: "
        check_ids(prompt, f"{where}prompt_ids", expected.vocabulary, args.max_prompt_length, "max_prompt_length")
        row = {name: values[number] for name, values in columns.items() if name != "prompt_ids"}
        if "step_maps" in row:
            completion_ids = check_numbers(row["completion_ids"], f"{where}completion_ids")
            steps = check_numbers(row.pop("step_maps"), f"{where}step_maps", len(completion_ids))
            row["steps"] = reveal_steps(steps.tolist(), expected.schedule(len(prompt)))
        for name, values in check_row(where, row, len(prompt), expected, whole).items():
            rows = record[BATCH_KEYS[name]]
            rows[number, : len(values)] = values.to(rows.dtype)
    return cast("RolloutRecord", {name: rows.to(device) for name, rows in record.items()})


class UserRollouts(LocalRollouts):
    """Training rollouts of a user's function, which also tokenises the prompts; TRL calls it."""

    name = "a rollout_func"
    can_continue = False

    def __init__(self, function: UserRollout, args: DiffuGRPOConfig, config: Any) -> None:
        """ValueError for a model, by its config, or for settings that no function can serve."""
        require_masks(config, "a rollout_func")
        check_rollout_func(args)
        self.function = function
        self.rollout_func = self.checked_rollout

    def connect(self, trainer: DiffuGRPOTrainer) -> None:
        super().connect(trainer)
        self.rescoring = Rescoring(trainer)

    def checked_rollout(self, prompts: list, trainer: DiffuGRPOTrainer) -> dict[str, Any]:
        """What TRL expects of a `rollout_func`; the record of the canvases joins the batch. Raises ValueError if the
        function returned something else, or not what the method reads."""
        start_time = time.perf_counter()
        args = trainer.args
        columns, others = split_result(self.function(prompts, trainer), len(prompts), args)
        config = trainer.model.config
        ends = trainer.eos_token_ids
        expected = Expected(
            vocabulary(config),
            trainer.mask_token_id,
            ends,
            trainer.sampling,
            aligned=block_size(config) is not None,
            by_our_rules=False,
        )
        trainer.rollout_fields = {}
        trainer.record = make_record(columns, args, expected, trainer.accelerator.device)
        completions = completion_ids_of(trainer.record["canvas_ids"], ends)
        prompt_ids = [token_ids(ids).tolist() for ids in columns["prompt_ids"]]  # arrays of uint16 stay so in TRL
        trainer.log_rollout(start_time, trainer.record, {})
        has_states = "logprobs" in columns and {"steps", "step_maps"} & columns.keys()
        if has_states and not trainer.weights_are_split:
            # A canvas that is cut is left out: its states are not known.
            length = args.max_completion_length
            whole_rows = [row for row, ids in enumerate(columns["completion_ids"]) if len(ids) == length]
            ids, mask = trainer.left_pad(prompt_ids)
            batch = {"prompt_ids": ids, "prompt_mask": mask, **trainer.record}
            self.rescoring.check(batch, whole_rows, lambda row: f"rollout_func, row {row}: ", exact=False, certain=True)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None} | others
