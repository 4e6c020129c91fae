"""Trains a tiny model with a method in a process that is killed in mid-cycle, as in a power failure."""

import os
import signal

import torch

from d1.rl.trainer import DiffuGRPOTrainer
from tests.tiny_grpo import TWO_BATCHES_A_STEP, make_method


class Killed(DiffuGRPOTrainer):
    """Ends its process in the middle of a cycle and of a step."""

    def loss(self, model, batch):
        if self.micro_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def train_and_die(model_dir, folder, method):
    torch.set_num_threads(1)
    make_method(model_dir, folder, method, Killed, **TWO_BATCHES_A_STEP).train()
