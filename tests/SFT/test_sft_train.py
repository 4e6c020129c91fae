"""sft_train.py as users start it: real processes on a small model and local data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from d1.models import load_model

SFT = Path(__file__).parents[2] / "SFT"
PLAIN = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


@pytest.fixture(scope="session")
def s1k_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty rows in s1K's schema."""
    path = tmp_path_factory.mktemp("s1k") / "rows.jsonl"
    with path.open("w") as lines:
        for i in range(40):
            row = {"question": f"{i}+{i}=?", "thinking_trajectories": ["add " * (1 + i % 4)], "attempt": str(2 * i)}
            lines.write(json.dumps(row) + "\n")
    return path


def launch(*flags: object, processes: int = 1, cwd: Path = SFT) -> subprocess.CompletedProcess[str]:
    multi = ["--multi_gpu"] if processes > 1 else ["--cpu"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *multi, "--num_processes", str(processes)]
    return subprocess.run(
        [*command, "sft_train.py", *map(str, flags)],
        cwd=cwd,
        env=os.environ | PLAIN,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_twenty_steps_lower_the_loss(tiny_model_dir: Path, s1k_file: Path, tmp_path: Path) -> None:
    done = launch(
        *("--model_name", tiny_model_dir, "--train_data", s1k_file, "--output_dir", tmp_path, "--job_name", "job"),
        *("--full_finetuning", "--learning_rate", "3e-3", "--batch_size", "8", "--grad_accum_steps", "2"),
        *("--max_steps", "20", "--eval_steps", "10", "--test_split", "0.2", "--eos_padding", "40", "--debugging"),
    )
    assert done.returncode == 0, done.stderr
    history = json.loads((tmp_path / "job/trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    before, after = load_model(str(tiny_model_dir)).state_dict(), load_model(str(tmp_path / "job")).state_dict()
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
