"""`--report true` of RL: the same problems before and after training, and the report that shows them."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from d1.files import write_atomically
from d1.models.tokenizer import end_ids
from d1.rl.batch import evaluating, record_and_costs
from d1.rl.trainer import DiffuGRPOTrainer
from d1.show.film import Film, judge_of, piece
from d1.show.report import SHOWN_FILE, report_page
from d1.tools.trainer import EpisodeTrainer

logger = logging.getLogger(__name__)

PROBLEMS = 8  # the first ones
SHOWN = ("canvas_ids", "reveal_steps", "rollout_logps", "rollout_entropies")


class ShowProblems(TrainerCallback):
    """With `--report true`, writes the films of a few problems before and after training into the run's folder.

    Both times the random numbers are the same, so that only the weights differ. They are those of evaluations, so a run
    with the report takes the same steps as one without it. A resumed run keeps the films from before training.
    """

    def __init__(self, trainer: DiffuGRPOTrainer, task: ModuleType, rows: Dataset) -> None:
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
        path = Path(str(self.trainer.args.output_dir)) / SHOWN_FILE
        if self.trainer.accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(kept | {when: [asdict(film) for film in films]}))

    def films(self, when: str) -> list[Film]:
        """One film per problem, sampled as in an evaluation during training."""
        trainer, tokenizer, of_training = self.trainer, self.trainer.text_tokenizer, self.trainer.computed_tokens
        trainer.evaluation_rollouts = 0
        prompts = trainer.encoded(list(self.rows["prompt"]))
        if isinstance(trainer, EpisodeTrainer):
            return self.films_of_episodes(when, trainer, prompts)
        with evaluating(trainer.model):
            sampled = trainer.sample(*trainer.left_pad(prompts))
        trainer.computed_tokens = of_training
        record: dict[str, Any] = {**record_and_costs(sampled)[0]}
        films = []
        columns = (record[name].tolist() for name in SHOWN)
        for prompt, row, ids, *numbers in zip(prompts, self.rows, *columns, strict=True):
            film = Film(when, tokenizer.decode(prompt), "", [piece(tokenizer, token) for token in ids], *numbers)
            judge_of(self.task, row, tokenizer, end_ids(tokenizer))(film, ids)
            films.append(film)
        return films

    def films_of_episodes(self, when: str, trainer: EpisodeTrainer, prompts: list[list[int]]) -> list[Film]:
        """One film per problem, of its turns one after the other."""
        tokenizer, of_training = trainer.text_tokenizer, trainer.computed_tokens
        with evaluating(trainer.model):
            record: dict[str, Any] = {**trainer.run_episodes(prompts)[0]}
        episodes, trainer.episodes, trainer.computed_tokens = trainer.episodes, [], of_training
        columns = [record[name].unflatten(0, (-1, trainer.rows_per_completion)).tolist() for name in SHOWN[1:]]
        films = []
        for row, (problem, episode) in enumerate(zip(self.rows, episodes, strict=True)):
            film = Film(when, tokenizer.decode(prompts[row]), "", [], [], [], [])
            for number, turn in enumerate(episode.turns):
                count = len(turn.kept)
                following = episode.turns[number + 1].prompt_ids if number + 1 < len(episode.turns) else []
                tokens = [piece(tokenizer, token) for token in turn.kept]
                given = [piece(tokenizer, token) for token in following[len(turn.prompt_ids) + count :]]
                film = film.followed(Film("", "", "", tokens, *(of[row][number] for of in columns)), count, given)
            text = episode.messages[-1]["content"]
            film.solved = next(iter(self.task.score(text, problem).values())) == 1
            films.append(film)
        return films


def write_report(folder: Path) -> None:
    """Writes report.html into the folder of a finished run."""
    write_atomically(folder / "report.html", report_page([folder], [folder.name]))
    logger.info("Report: %s", folder / "report.html")
