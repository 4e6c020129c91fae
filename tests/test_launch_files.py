"""The files that users launch, and d1's names in them."""

import os
import subprocess
import sys

import pytest

from tests.commands import ROOT

OLD_SCRIPTS = {  # what scripts written for d1's repository import, in the folder that they run in
    "SFT": "from sft_trainer import *; print(dLLMTrainer.__module__, dLLMDataCollator, dLLMSFTDataset)",
    "diffu-grpo": "from diffu_grpo_trainer import *; from diffu_grpo_config import *; "
    "print(DiffuGRPOTrainer.__module__, DiffuGRPOConfig)",
}


def run(command: list[str], folder: str = "") -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT / folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("folder", OLD_SCRIPTS)
def test_scripts_written_for_d1s_repository_find_its_names(folder):
    assert run(["-c", OLD_SCRIPTS[folder]], folder).startswith(("d1.sft.trainer ", "d1.rl.trainer "))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["-m", "d1", "sft", "--help"], "usage: d1 sft "),
        (["-m", "d1", "rl", "--help"], "usage: d1 rl "),
        (["-m", "d1", "eval", "--help"], "usage: d1 eval "),
        (["-m", "d1", "parse", "--help"], "usage: d1 parse "),
        (["-m", "accelerate.commands.launch", "--cpu", "-m", "d1.rl.train", "--help"], "usage: d1.rl.train "),
        (["-m", "accelerate.commands.launch", "--cpu", "-m", "d1.sft.train", "--help"], "usage: d1.sft.train "),
    ],
    ids=lambda value: " ".join(value[-4:]) if isinstance(value, list) else "",
)
def test_stages_are_commands_and_modules(command, said):
    assert run(command).startswith(said)
