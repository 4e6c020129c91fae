"""Trains a tiny model by each method in a process of its own, which is killed in mid-cycle, as if the power had gone.

    python kill_methods.py MODEL OUTPUT METHOD...

Each run leaves what it saved in OUTPUT/METHOD. The processes are forks of this one, which takes seconds to start, and
has trained nothing itself.
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
