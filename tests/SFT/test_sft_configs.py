"""The shipped launch configurations mean what their names say, to Accelerate itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

SFT = Path(__file__).parents[2] / "SFT"
KINDS = {  # distributed type, processes, precision, on the CPU
    "ddp_config": ("DEEPSPEED", 2, "bf16", False),
    "ddp": ("MULTI_GPU", 2, "bf16", False),
    "zero3": ("DEEPSPEED", 8, "bf16", False),
    "fsdp2": ("FSDP", 8, "bf16", False),
    "single_gpu": ("NO", 1, "bf16", False),
    "cpu": ("NO", 1, "no", True),
}


@pytest.mark.parametrize("name", KINDS)
def test_configuration(name: str) -> None:
    config = load_config_from_file(str(SFT / f"{name}.yaml"))  # refuses keys that it does not know
    kind = (config.distributed_type, config.num_processes, config.mixed_precision, config.use_cpu)
    assert kind == KINDS[name]


def test_every_file_is_covered() -> None:
    assert {path.stem for path in SFT.glob("*.yaml")} == KINDS.keys()


def test_strategies() -> None:
    def section(name: str, key: str) -> dict:
        return yaml.safe_load((SFT / f"{name}.yaml").read_text())[key]

    zero2, zero3 = section("ddp_config", "deepspeed_config"), section("zero3", "deepspeed_config")
    assert (zero2["zero_stage"], zero2["offload_optimizer_device"]) == (2, "cpu")
    assert (zero3["zero_stage"], zero3["zero3_save_16bit_model"]) == (3, True)
    assert section("fsdp2", "fsdp_config")["fsdp_version"] == 2
