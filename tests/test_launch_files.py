"""The files that users launch, d1's names in them, and the launch configurations, which Accelerate itself reads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

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


KINDS = {  # distributed type, processes, precision, on the CPU
    "launch/cpu.yaml": ("NO", 1, "no", True),
    "launch/single_gpu.yaml": ("NO", 1, "bf16", False),
    "launch/ddp.yaml": ("MULTI_GPU", 2, "bf16", False),
    "launch/zero3.yaml": ("DEEPSPEED", 8, "bf16", False),
    "launch/fsdp2.yaml": ("FSDP", 8, "bf16", False),
    "SFT/ddp_config.yaml": ("DEEPSPEED", 2, "bf16", False),
    "diffu-grpo/accelerate.yaml": ("DEEPSPEED", 8, "bf16", False),
}


@pytest.mark.parametrize("name", KINDS)
def test_configuration(name: str) -> None:
    config = load_config_from_file(str(ROOT / name))  # refuses keys that it does not know
    kind = (config.distributed_type, config.num_processes, config.mixed_precision, config.use_cpu)
    assert kind == KINDS[name]


def test_every_configuration_is_there_once() -> None:
    texts = {}
    for room in ("launch", "SFT", "diffu-grpo"):
        for path in (ROOT / room).rglob("*.yaml"):
            content = yaml.safe_load(path.read_text())
            if "distributed_type" in content:
                texts[str(path.relative_to(ROOT))] = yaml.safe_dump(content)
    assert texts.keys() == KINDS.keys()
    assert len(set(texts.values())) == len(texts)


def test_strategies() -> None:
    def section(name: str, key: str) -> dict:
        return yaml.safe_load((ROOT / name).read_text())[key]

    sft, rl = (section(f"{name}.yaml", "deepspeed_config") for name in ("SFT/ddp_config", "diffu-grpo/accelerate"))
    assert (sft["zero_stage"], sft["offload_optimizer_device"]) == (2, "cpu")
    assert (rl["zero_stage"], rl["offload_optimizer_device"]) == (2, "none")
    zero3 = section("launch/zero3.yaml", "deepspeed_config")
    assert (zero3["zero_stage"], zero3["zero3_save_16bit_model"]) == (3, True)
    assert section("launch/fsdp2.yaml", "fsdp_config")["fsdp_version"] == 2
