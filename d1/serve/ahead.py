"""Rollouts ahead of updates: with `rollout_staleness` N, servers sample the next rollouts while the trainer learns.

Rollout k is sampled with the weights before the updates on rollout max(0, k - N), however fast trainer and servers are.
When rollout k is needed, the first process keeps a copy of the weights and requests rollout k + N with it. One thread
works on the requests in order, so that all rows of a rollout have the same weights. It samples the rows of all
processes; they wait for rollout k together. A checkpoint holds the copies that later rollouts need, and a resumed run
requests these rollouts again: they depend on weights and keys alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d1.rl.batch import strip_padding
from d1.rl.sources import RolloutRequest
from d1.runs.cli import raise_together
from d1.sampling import Rollout
from d1.serve.client import Prompts, Weights
from d1.serve.rollouts import PolicyServers, ServedRollout, ServerRollouts
from d1.serve.weights import WeightsFolder, WholeWeights, result_of, with_weights

if TYPE_CHECKING:
    from d1.rl.trainer import DiffuGRPOTrainer

FOLDER = "rollouts_ahead"  # of a checkpoint


class PrefetchResult(NamedTuple):
    """A rollout that was requested: the rows of all processes, and the step of its weights."""

    prompts: Prompts
    rollout: ServedRollout
    step: int


class RolloutPrefetcher:
    """The rollouts ahead of a trainer.

    Args:
        prompts_of: from the number of a rollout, its rows of all processes; None if the run ends before it.

    Attributes:
        copies: rollout number -> optimizer steps before its updates, the folder with the weights of that time, and that
            with those that no version changes (`WeightsFolder.frozen`).
        requests: rollout number -> its request. Only the first process uses `copies` and `requests`.
        has_requests: whether a request may be under way; all processes have the same value.
        stale_steps: optimizer steps that the trainer is ahead of the weights that sampled the last rollout taken.
    """

    def __init__(self, servers: PolicyServers, staleness: int, prompts_of: Callable[[int], Prompts | None]) -> None:
        self.servers = servers
        self.staleness = staleness
        self.prompts_of = prompts_of
        self.folders = [WeightsFolder(servers.folder.output_dir, f"-{index}") for index in range(staleness + 1)]
        self.copies: dict[int, tuple[int, Path, Path | None]] = {}
        self.requests: dict[int, Future[PrefetchResult]] = {}
        self.thread = ThreadPoolExecutor(1)
        self.has_requests = False
        self.stale_steps = 0

    def weights_number(self, number: int) -> int:
        """The number of the rollout before whose updates the trainer had the weights that sample rollout `number`."""
        return max(0, number - self.staleness)

    def get(self, model: Any, number: int, step: int) -> tuple[Prompts, ServedRollout]:
        """Rollout `number` of all processes and its rows, due after `step` optimizer steps; requests those up to the
        one that the present weights of `model` sample. All processes call it together. Raises as `sample`."""

        def in_first_process(weights: WholeWeights) -> None:
            self.copy_weights(number, step, model, weights)
            for later in range(number, number + self.staleness + 1):
                if later in self.requests:
                    continue
                prompts = self.prompts_of(later)
                if prompts is None:  # the run ends before it
                    continue
                weights_step, folder, frozen = self.copies[self.weights_number(later)]
                base = self.servers.base_of(model, weights)
                copied_weights = Weights(self.servers.run, folder.name, folder, base, frozen)
                self.requests[later] = self.thread.submit(self.sample, prompts, copied_weights, weights_step)

        with_weights(model, in_first_process)
        self.has_requests = True
        prompts, rollout, weights_step = result_of(self.requests.pop(number, None))
        self.stale_steps = step - weights_step
        return prompts, rollout

    def copy_weights(self, number: int, step: int, model: Any, weights: WholeWeights | Path) -> None:
        """Keeps the weights of `model`, or those in a folder, from before the updates on a rollout."""
        # The folders are reused in turn: the copies of rollouts up to `number - count` end.
        count = len(self.folders)
        self.copies = {earlier: entry for earlier, entry in self.copies.items() if earlier > number - count}
        folder = self.folders[number % count]
        path = folder.write(model, f"{self.servers.run}-{step}", self.servers.servers, weights)
        self.copies[number] = step, path, folder.frozen

    def sample(self, prompts: Prompts, weights: Weights, step: int) -> PrefetchResult:
        """In the thread: the rollout of `prompts` by servers that take `weights`, those of a `step`, first."""
        self.servers.weights = weights
        return PrefetchResult(prompts, self.servers.sample([prompts])[0], step)

    def finish(self) -> None:
        """Waits for all requests, so that something else can be sampled with other weights."""
        if self.has_requests:
            wait(self.requests.values())
            self.servers.weights = None  # in all processes, so that all of them publish
            self.has_requests = False

    def close(self) -> None:
        """Drops all requests and removes the copies of the weights."""
        self.thread.shutdown(cancel_futures=True)
        self.thread = ThreadPoolExecutor(1)
        self.requests.clear()
        self.copies.clear()
        for folder in self.folders:
            folder.remove()

    def save(self, checkpoint: Path, following: int) -> None:
        """Writes the weights of the rollouts from number `following` on into a checkpoint; in the first process."""
        for number in {self.weights_number(later) for later in range(following, following + self.staleness)}:
            step, folder, _ = self.copies[number]
            shutil.copytree(folder, checkpoint / FOLDER / f"{number}-{step}", dirs_exist_ok=True)

    def load(self, checkpoint: Path, model: Any) -> None:
        """Takes what `save` wrote, weights of `model`; in the first process."""
        for folder in (checkpoint / FOLDER).iterdir():
            number, step = map(int, folder.name.split("-"))
            self.copy_weights(number, step, model, folder)


class PrefetchedRollouts(ServerRollouts):
    """Rollouts by servers, with the weights of `rollout_staleness` rollouts ago in training, and with the present ones
    in evaluation."""

    def connect(self, trainer: DiffuGRPOTrainer) -> None:
        super().connect(trainer)
        self.prefetch = RolloutPrefetcher(self.servers, trainer.args.rollout_staleness, self.prompts_of)

    @property
    def is_stale(self) -> bool:
        return self.trainer.mode == "train" and bool(self.prefetch.stale_steps)

    def sample(self, request: RolloutRequest) -> Rollout:
        if self.trainer.mode == "train":
            return self.sample_prefetched(request)
        self.prefetch.finish()
        return super().sample(request)

    def sample_prefetched(self, request: RolloutRequest) -> ServedRollout:
        """The current rollout, which servers sampled during earlier updates."""
        trainer = self.trainer
        number = trainer.rollout_number
        model = trainer.accelerator.unwrap_model(trainer.model)
        prompts, sampled = self.prefetch.get(model, number, trainer.state.global_step)

        # The rows of this process
        rows = len(request.prompt_ids)
        first = trainer.first_row(rows)
        local = slice(first, first + rows)
        requested_ids = strip_padding(request.prompt_ids, request.prompt_mask)
        with raise_together():
            if strip_padding(prompts.ids[local], prompts.mask[local]) != requested_ids:
                raise ValueError(
                    "rollout_staleness: the training rows came in another order than the trainer's sampler's"
                )

        trainer.log_metric("sampling/staleness", number - self.prefetch.weights_number(number))
        trainer.log_metric("sampling/staleness_steps", self.prefetch.stale_steps)
        return sampled.rows(local, request.prompt_ids.device)

    def prompts_of(self, number: int) -> Prompts | None:
        """The rows of all processes of training rollout `number`; None if the run ends before it."""
        trainer = self.trainer
        start = number * trainer.micro_steps_per_rollout
        is_after_end = start // trainer.args.gradient_accumulation_steps >= trainer.state.max_steps
        if is_after_end and number > trainer.rollout_number:
            return None
        ids, mask = trainer.left_pad(trainer.encoded([row["prompt"] for row in trainer.rows_of(number)]))
        key = trainer.key("rollout", start)
        return self.prompts(RolloutRequest(ids, mask, [(*key, row) for row in range(len(ids))]))

    def close(self) -> None:
        self.prefetch.close()
        super().close()

    def save(self, folder: Path) -> None:
        trainer = self.trainer
        if trainer.accelerator.is_main_process:
            self.prefetch.save(folder, -(-trainer.micro_step // trainer.micro_steps_per_rollout))

    def load(self, folder: Path) -> None:
        if self.trainer.accelerator.is_main_process:
            self.prefetch.load(folder, self.trainer.accelerator.unwrap_model(self.trainer.model))
