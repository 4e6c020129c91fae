"""Rollouts ahead of updates (`rollout_staleness` N): servers sample the next rollouts while the trainer learns.

Rollout k is sampled with the weights before the updates on rollout max(0, k - N), however fast trainer and servers are.
When rollout k is needed, the first process keeps a copy of the weights and asks for rollout k + N with it. One thread
does what was asked in that order, so that all rows of a rollout have the same weights. It samples the rows of all
processes; they wait for rollout k together. A checkpoint holds the copies that later rollouts need, and a resumed run
asks for these rollouts again: they depend on weights and keys alone.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list
from torch import Tensor

from d1.rl.bridge import EpochSampler
from d1.rl.servers import ServedRollout
from d1.rl.weights_folder import WeightsFolder
from d1.runs.checkpoints import reading
from d1.serve.client import Prompts, Weights

FOLDER = "rollouts_ahead"  # of a checkpoint


class Asked(NamedTuple):
    """A rollout that was asked for: the ids of its prompts, the step of its weights, and its result."""

    prompt_ids: list[list[int]]
    step: int
    result: Future[ServedRollout]


class Ahead:
    """The rollouts ahead of a trainer. All processes call its methods together.

    Attributes:
        kept: rollout number -> optimizer steps before it, and the folder with the weights from then.
        asked: rollout number -> what was asked for. Both are used in the first process alone.
        behind: optimizer steps since the weights that sampled the last rollout taken were the trainer's.
    """

    def __init__(self, trainer: Any, staleness: int) -> None:
        self.trainer, self.staleness = trainer, staleness
        output_dir = Path(str(trainer.args.output_dir))
        # A run that has lost its servers is saved as of the start of its step, which may have had several rollouts.
        of_a_step = -(-trainer.args.gradient_accumulation_steps // trainer.micro_steps_per_rollout)
        self.folders = [WeightsFolder(output_dir, f"-{slot}") for slot in range(staleness + of_a_step)]
        self.kept: dict[int, tuple[int, Path]] = {}
        self.asked: dict[int, Asked] = {}
        self.thread = ThreadPoolExecutor(1)
        self.at_work, self.behind = False, 0

    def weights_of(self, number: int) -> int:
        """The rollout before whose updates the weights of rollout `number` were those of the trainer."""
        return max(0, number - self.staleness)

    def take(self, ids: Tensor, mask: Tensor) -> ServedRollout:
        """The trainer's current rollout, the rows of this process, whose prompts (rows, prompt) must be these; asks for
        the one that the policy's present weights are to sample.

        Raises:
            NoServer, ValueError: as `PolicyServers.sample`.
        """
        trainer, number, found = self.trainer, self.trainer.rollout_number, None
        self.at_work = True
        with trainer.sampling_model() as model, trainer.servers.together():
            if trainer.accelerator.is_main_process:
                self.keep(number, trainer.state.global_step, model)
                for later in range(number, number + self.staleness + 1):
                    self.ask(model, later)
                asked = self.asked[number]
                found = asked.prompt_ids, asked.step, asked.result.result()
                del self.asked[number]
        prompt_ids, step, sampled = broadcast_object_list([found])[0]
        first = trainer.accelerator.process_index * len(ids)
        own = slice(first, first + len(ids))
        if prompt_ids[own] != [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]:
            raise ValueError("rollout_staleness: the training rows came in another order than the trainer's sampler's")
        trainer.log_metric("sampling/staleness", number - self.weights_of(number))
        self.behind = trainer.state.global_step - step
        trainer.log_metric("sampling/staleness_steps", self.behind)
        columns: dict[str, Any] = {
            name: of[own].to(ids.device) for name, of in vars(sampled).items() if isinstance(of, Tensor)
        }
        return ServedRollout(**columns, sources=sampled.sources[own])

    def keep(self, number: int, step: int, model: Any, copy: Path | None = None) -> None:
        """Keeps the weights of `model`, or those in the folder `copy`, from before the updates on a rollout."""
        servers, folder = self.trainer.servers, self.folders[number % len(self.folders)]
        servers.write(folder, model, f"{servers.run}-{step}", copy)
        self.kept = {one: where for one, where in self.kept.items() if one > number - len(self.folders)}
        self.kept[number] = step, folder.path / f"{servers.run}-{step}"

    def ask(self, model: Any, number: int) -> None:
        """Asks for a rollout, unless that was done or the run ends before it."""
        trainer, servers = self.trainer, self.trainer.servers
        start = number * trainer.micro_steps_per_rollout
        beyond = start // trainer.args.gradient_accumulation_steps >= trainer.state.max_steps
        if number in self.asked or (beyond and number > trainer.rollout_number):
            return
        prompt_ids = trainer.encoded([row["prompt"] for row in rows_of(trainer, number)])
        ids, mask = (part.cpu() for part in trainer.padded(prompt_ids))
        key, ends = trainer.key("rollout", start), trainer.eos_token_ids if trainer.eos_stop else None
        prompts = servers.prompts(model, ids, mask, key, trainer.sampling, ends)
        step, folder = self.kept[self.weights_of(number)]
        weights = Weights(servers.run, f"{servers.run}-{step}", folder)
        self.asked[number] = Asked(prompt_ids, step, self.thread.submit(self.sample, prompts, weights))

    def sample(self, prompts: Prompts, weights: Weights) -> ServedRollout:
        """In the thread: the servers take the weights before they get rows."""
        self.trainer.servers.weights = weights
        return self.trainer.servers.sample(prompts)

    def finish(self) -> None:
        """Waits for what was asked for, before something else is sampled with other weights."""
        if self.at_work:
            wait([one.result for one in self.asked.values()])
            self.trainer.servers.weights = None  # in all processes, so that all of them publish
            self.at_work = False

    def close(self) -> None:
        """Drops what was asked for and removes the weights that were kept."""
        self.thread.shutdown(cancel_futures=True)
        self.thread = ThreadPoolExecutor(1)
        self.asked.clear()
        self.kept.clear()
        for folder in self.folders:
            folder.remove()

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def save(self, checkpoint: Path) -> None:
        """Writes the weights of the rollouts that follow the current one into a checkpoint."""
        trainer = self.trainer
        following = -(-trainer.micro_step // trainer.micro_steps_per_rollout)
        if trainer.accelerator.is_main_process:
            for number in {self.weights_of(later) for later in range(following, following + self.staleness)}:
                step, folder = self.kept[number]
                shutil.copytree(folder, checkpoint / FOLDER / f"{number}-{step}", dirs_exist_ok=True)

    def load(self, checkpoint: Path) -> None:
        """Takes what `save` wrote. Raises ValueError if it is missing."""
        if self.trainer.accelerator.is_main_process:
            for number, step, folder in saved(checkpoint):
                self.keep(number, step, self.trainer.accelerator.unwrap_model(self.trainer.model), folder)


def rows_of(trainer: Any, number: int) -> list[dict[str, Any]]:
    """The rows of the dataset, of all processes, of a training rollout before TRL asks for them."""
    args, dataset, prompts = trainer.args, trainer.train_dataset, trainer.args.generation_batch_size
    groups = prompts // trainer.num_generations
    epoch, place = divmod(number, len(dataset) // groups)
    order = EpochSampler(
        dataset,
        mini_repeat_count=trainer.num_generations,
        batch_size=groups,
        shuffle=trainer.shuffle_dataset,
        seed=args.seed,
        epoch=lambda: epoch,
    )
    return [dataset[index] for index in islice(order, place * prompts, (place + 1) * prompts)]


def saved(checkpoint: Path) -> list[tuple[int, int, Path]]:
    """The weights in a checkpoint: rollout number, optimizer steps, folder. Raises ValueError if there are none."""
    with reading(checkpoint / FOLDER):
        folders = sorted((checkpoint / FOLDER).iterdir())
        return [(*map(int, folder.name.split("-")), folder) for folder in folders]  # type: ignore[misc]


def ahead_of(trainer: Any) -> Ahead | None:
    """The rollouts ahead that `rollout_staleness` asks for."""
    staleness = trainer.args.rollout_staleness
    return Ahead(trainer, staleness) if staleness and trainer.servers is not None else None
