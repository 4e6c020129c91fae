"""Accelerate itself reads the launch configurations as their names say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

ROOT = Path(__file__).parents[2]
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
