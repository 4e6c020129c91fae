"""Trains a tiny model with each method in a separate process, which is killed in mid-cycle, as in a power failure.

    python kill_methods.py MODEL OUTPUT METHOD...

Each run leaves its files in OUTPUT/METHOD. The processes are forks of this one, because starting one takes seconds;
this process itself has trained nothing.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from d1.rl.trainer import DiffuGRPOTrainer
from tests.tiny_grpo import TWO_BATCHES_A_STEP, make_method


class Killed(DiffuGRPOTrainer):
    """Ends its process in the middle of a cycle and of a step."""

    def loss(self, model, batch):
        if self.micro_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


if __name__ == "__main__":
    model_dir, output = map(Path, sys.argv[1:3])
    torch.set_num_threads(1)
    for method in sys.argv[3:]:
        child = os.fork()
        if not child:
            make_method(model_dir, output / method, method, Killed, **TWO_BATCHES_A_STEP).train()
            sys.exit("the run ended before it was killed")
        if os.waitpid(child, 0)[1] != signal.SIGKILL:
            sys.exit(f"{method} was not killed")
