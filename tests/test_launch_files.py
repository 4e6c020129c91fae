"""The files that users launch, and d1's names in them."""

import os
import subprocess
import sys

import pytest

from tests import forks
from tests.commands import ROOT

OLD_SCRIPTS = {  # what scripts written for d1's repository import, in the folder that they run in
    "SFT": "from sft_trainer import *; print(dLLMTrainer.__module__, dLLMDataCollator, dLLMSFTDataset)",
    "diffu-grpo": "from diffu_grpo_trainer import *; from diffu_grpo_config import *; "
    "print(DiffuGRPOTrainer.__module__, DiffuGRPOConfig)",
}


@pytest.mark.parametrize("folder", OLD_SCRIPTS)
def test_scripts_written_for_d1s_repository_find_its_names(folder, tmp_path):
    for file in (ROOT / folder).glob("*.py"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "old.py").write_text(OLD_SCRIPTS[folder])
    started = forks.start(forks.script, "old.py", log=tmp_path / "log", folder=tmp_path)
    assert forks.finish(started, tmp_path / "log").startswith(("d1.sft.trainer ", "d1.rl.trainer "))


@pytest.mark.parametrize("words", ["d1 sft", "d1 rl", "d1 eval", "d1 parse", "d1.sft.train"])
def test_stages_are_commands_and_modules(words, tmp_path):
    started = forks.start(forks.module, *words.split(), "--help", log=tmp_path / "log", folder=ROOT)
    assert forks.finish(started, tmp_path / "log").startswith(f"usage: {words} ")


def test_accelerate_launches_a_stage():
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-m", "d1.rl.train", "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("usage: d1.rl.train ")
