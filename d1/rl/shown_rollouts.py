"""What a run keeps of its first and its latest rollout for people to look at (`--report true`): the best, the median
and the worst completion of the first process, with the pass that revealed each token, as films (`d1/show/film.py`)."""

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
from d1.runs.output_dir import writing
from d1.show.film import Film, piece

COLUMNS = ("reveal_steps", "rollout_logps", "rollout_entropies")


class ShowRollouts(TrainerCallback):
    """Keeps the first rollout of a run and the latest one in the run's folder. A resumed run keeps its first."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.seen: list[Batch] | None = None
        self.kept: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / SHOWN_FILE
        if state.global_step and path.exists():
            self.kept = json.loads(path.read_text())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        batches = rollout_buffer(self.trainer)
        if state.is_world_process_zero and batches is not self.seen and all(REWARD in batch for batch in batches):
            self.seen = batches
            cycle = args.steps_per_generation * args.num_iterations
            number = (self.trainer.micro_step - 1) // cycle + 1
            latest = {"rollout": number, "films": picked(batches, self.trainer.text_tokenizer)}
            self.kept = {"first": self.kept.get("first", latest), "last": latest}
            path = Path(args.output_dir) / SHOWN_FILE
            with writing(path):
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps(self.kept))
                os.replace(partial, path)

    on_step_end = on_substep_end  # which comes in its place after the last micro-batch of a step


def picked(batches: list[Batch], tokenizer: Any) -> dict[str, dict[str, Any]]:
    """The films of a rollout's best, median and worst completion, by reward."""
    rewards = torch.cat([batch[REWARD] for batch in batches])
    order = rewards.argsort(stable=True).tolist()
    rows = [(batch, row) for batch in batches for row in range(len(batch[REWARD]))]
    places = {"best": order[-1], "median": order[len(order) // 2], "worst": order[0]}
    return {name: asdict(film_of(rows[place], tokenizer)) for name, place in places.items()}


def film_of(chosen: tuple[Batch, int], tokenizer: Any) -> Film:
    """One row of a batch, whose note is its reward."""
    batch, row = chosen
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
    tokens = [piece(tokenizer, token) for token in batch["canvas_ids"][row].tolist()]
    numbers = (batch[name][row].tolist() for name in COLUMNS)
    return Film("", tokenizer.decode(prompt), f"reward {batch[REWARD][row].item():.3g}", tokens, *numbers)
