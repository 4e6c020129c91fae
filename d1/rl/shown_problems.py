"""Sample the same few problems before and after a run, for the report on what RL did (`--report true`).

Both times the random numbers are the same, so that only the weights differ. They are numbers of their own: a run with
the report takes the same steps as one without it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from d1.models.tokenizer import end_ids
from d1.rl.curves import SHOWN_FILE
from d1.rl.record import recorded
from d1.rl.updates import evaluating
from d1.runs.output_dir import write_atomically
from d1.show.film import Film, judge_of, piece

PROBLEMS = 8  # shown: the first ones
COLUMNS = ("canvas_ids", "reveal_steps", "rollout_logps", "rollout_entropies")
WRITES = ("steps", "ids", "logps")  # of a sampler that edits


class ShowProblems(TrainerCallback):
    """Writes the films of problems before and after training into the run's folder. A resumed run keeps those before.

    Args:
        task: judges the completions.
        rows: the task's rows; the first ones are shown.
    """

    def __init__(self, trainer: Any, task: ModuleType, rows: Dataset) -> None:
        self.trainer, self.task = trainer, task
        self.rows = rows.select(range(min(PROBLEMS, len(rows))))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.global_step:
            self.keep("before", {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / SHOWN_FILE
        self.keep("after", json.loads(path.read_text()) if path.exists() else {})

    def keep(self, when: str, kept: dict[str, Any]) -> None:
        films = self.films(when)  # in every process, because the weights may be divided among them
        path = Path(self.trainer.args.output_dir) / SHOWN_FILE
        if self.trainer.accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(kept | {when: [asdict(film) for film in films]}))

    def films(self, when: str) -> list[Film]:
        """One film per problem, sampled as in an evaluation during training."""
        trainer, tokenizer, compute = self.trainer, self.trainer.text_tokenizer, self.trainer.compute
        trainer.evaluation_rollouts = 0
        prompts = trainer.encoded(list(self.rows["prompt"]))
        with evaluating(trainer.model):
            sampled = trainer.sample(*trainer.padded(prompts))
        trainer.compute = compute  # counts training only
        record = {name: part.tolist() for name, part in recorded(sampled)[0].items()}
        films = []
        for place, (prompt, row) in enumerate(zip(prompts, self.rows, strict=True)):
            ids, *numbers = (record[name][place] for name in COLUMNS)
            tokens = [piece(tokenizer, token) for token in ids]
            film = Film(when, tokenizer.decode(prompt), "", tokens, *numbers)
            if "write_ids" in record:
                film.drafts = drafts_of([record[f"write_{name}"][place] for name in WRITES], tokenizer)
            judge_of(self.task, row, tokenizer, end_ids(tokenizer))(film, ids)
            films.append(film)
        return films


def drafts_of(writes: list[list[Any]], tokenizer: Any) -> list[list[list[Any]]]:
    """`Film.drafts` of a completion, from the steps, ids and log-probabilities written at each place."""
    places = [[write for write in zip(*place, strict=True) if write[0] >= 0] for place in zip(*writes, strict=True)]
    return [[[step, piece(tokenizer, token), logp] for step, token, logp in of[:-1]] for of in places]
