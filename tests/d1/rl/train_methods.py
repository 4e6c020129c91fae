"""Trains tiny models with several methods in sequence, in the same processes, because starting them takes seconds.

    accelerate launch --num_processes 2 ... train_methods.py MODEL OUTPUT METHOD...

Writes METHOD.safetensors, the weights, and METHOD.json, what was logged, into OUTPUT.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny_grpo import logged, train_a_little, weights


def train_methods(model_dir, output, *methods):
    torch.set_num_threads(1)
    for method in methods:
        trainer = train_a_little(model_dir, Path(output) / method, method)
        if trainer.accelerator.is_main_process:
            save_file(weights(trainer.model), Path(output) / f"{method}.safetensors")
            state = trainer.args.distributed_state
            record = {"kind": str(state.distributed_type), "processes": state.num_processes, "logged": logged(trainer)}
            record["rollouts"] = trainer.rollouts
            (Path(output) / f"{method}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    train_methods(*sys.argv[1:])
