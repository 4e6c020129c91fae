"""Keep completions of a run's first and latest rollout for the report (`--report true`): the best, the median and the
worst one of the first process, with the step that revealed each token, as films (`d1/show/film.py`)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from d1.rl.bridge import REWARD, rollout_buffer
from d1.rl.curves import SHOWN_FILE
from d1.rl.updates import Batch
from d1.show.film import Film, piece

COLUMNS = ("prompt_ids", "prompt_mask", "canvas_ids", "reveal_steps", "rollout_logps", "rollout_entropies", REWARD)

WRITES = ("steps", "ids", "logps")  # of a sampler that edits


class ShowRollouts(TrainerCallback):
    """Keeps a run's first and latest rollout in the run's folder. A resumed run keeps its first rollout."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.path = trainer, Path(trainer.args.output_dir) / SHOWN_FILE
        self.seen: list[Batch] | None = None
        self.kept: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step and self.path.exists():
            self.kept = json.loads(self.path.read_text())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        batches = rollout_buffer(self.trainer)
        if state.is_world_process_zero and batches is not self.seen and all(REWARD in batch for batch in batches):
            self.seen = batches
            cycle = args.steps_per_generation * args.num_iterations
            number = (self.trainer.micro_step - 1) // cycle + 1
            latest = {"rollout": number, "films": picked(batches, self.trainer.text_tokenizer)}
            self.kept = {"first": self.kept.get("first", latest), "last": latest}
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.kept))
            os.replace(partial, self.path)

    on_step_end = on_substep_end  # called in its place after the last micro-batch of a step


def picked(batches: list[Batch], tokenizer: Any) -> dict[str, dict[str, Any]]:
    """The films of a rollout's best, median and worst completion, each with its reward as a note."""
    columns = {name: torch.cat([batch[name] for batch in batches]) for name in COLUMNS}
    order = columns[REWARD].argsort(stable=True).tolist()

    def film(row: int) -> dict[str, Any]:
        prompt, mask, canvas, *numbers, reward = (column[row] for column in columns.values())
        tokens = [piece(tokenizer, token) for token in canvas.tolist()]
        about = "", tokenizer.decode(prompt[mask.bool()].tolist()), f"reward {reward.item():.3g}"
        film = Film(*about, tokens, *(number.tolist() for number in numbers))
        return asdict(film) | {"drafts": drafts_of(row)}

    def drafts_of(row: int) -> list[list[list[Any]]]:
        if "write_ids" not in batches[0]:
            return []
        kept = [torch.cat([batch[f"write_{name}"] for batch in batches])[row].tolist() for name in WRITES]
        places = [[write for write in zip(*place, strict=True) if write[0] >= 0] for place in zip(*kept, strict=True)]
        return [[[step, piece(tokenizer, token), logp] for step, token, logp in writes[:-1]] for writes in places]

    return {"best": film(order[-1]), "median": film(order[len(order) // 2]), "worst": film(order[0])}
