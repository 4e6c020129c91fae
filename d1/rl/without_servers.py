"""How a run ends that has lost all of its rollout servers: with a checkpoint that continues it to the same bits."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import TrainerCallback

from d1.rl.bridge import restore_trl, rollout_buffer, trl_counters
from d1.rl.servers import NoServer


class Ending(TrainerCallback):
    """Saves the state before the optimizer step that needed a server, and removes the weights written for servers."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.step = trainer, -1
        trainer.add_callback(self)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Keeps what the first micro-batches of a step change, if there are servers."""
        trainer = self.trainer
        if trainer.servers is None:
            return
        self.step, self.compute = trainer.state.global_step, trainer.compute
        self.tokens = trainer.state.num_input_tokens_seen
        self.batches, self.counters = rollout_buffer(trainer), copy.deepcopy(trl_counters(trainer))
        settings = trainer.args
        updates = settings.steps_per_generation * settings.num_iterations
        inside = updates % settings.gradient_accumulation_steps != 0  # rollouts begin in the middle of a step
        self.losses = trainer.loss_sums() if inside else None
        # TRL shuffles a rollout's rows.
        self.random = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around `train`. Raises NoServer with the checkpoint's name."""
        trainer = self.trainer
        try:
            yield
        except NoServer as error:
            step = trainer.state.global_step
            if not step:
                raise
            checkpoint = Path(str(trainer.args.output_dir)) / f"checkpoint-{step}"
            if not checkpoint.exists():
                self.rewind()
                trainer.save_now()
            raise NoServer(f"{error}. The run is saved in {checkpoint}: continue it with --resume") from error
        finally:
            if trainer.ahead is not None:
                trainer.ahead.close()
            if trainer.servers is not None:
                trainer.servers.close()

    def rewind(self) -> None:
        """Goes back to the start of the step, unless the step was done and its evaluation lacked the server."""
        trainer = self.trainer
        if self.step != trainer.state.global_step:
            return
        trainer.compute, trainer.state.num_input_tokens_seen = self.compute, self.tokens
        restore_trl(trainer, self.batches, self.counters)
        if self.losses is not None:
            trainer.set_loss_sums(self.losses)
        own, numpys, torchs = self.random
        random.setstate(own)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)
