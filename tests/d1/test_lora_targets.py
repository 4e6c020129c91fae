"""`--lora_target_modules` in both stages: one step of SFT and one of RL train adapters on the same modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from d1.models import load_tokenizer
from d1.rl import train as rl
from d1.sft import train as sft
from tests.d1.conftest import write_kind

SFT = {"job_name": "job", "max_length": 64, "test_split": 0, "batch_size": 2}
RL: dict[str, Any] = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4}
RL |= {"diffusion_steps": 2, "block_length": 4, "report_to": "none", "use_peft": True}
RL |= {"task": Path(__file__).parent / "rl" / "letters_task.py"}


def words_of(flags: dict[str, Any]) -> list[str]:
    return [str(word) for name, value in flags.items() for word in (f"--{name}", *([value] if value != "" else []))]


def adapted(folder: Path) -> set[str]:
    """The modules for which an adapter's file has weights."""
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        return {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in list(file.keys())}


ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}


@pytest.mark.parametrize(
    ("asked", "endings"),
    [
        ("all-linear", ATTENTION | {"mlp.experts", "mlp.experts.base_layer"}),
        ("attention", ATTENTION),
        ("q_proj", {"self_attn.q_proj"}),
        ("layers.1.self_attn.q_proj", {"self_attn.q_proj"}),
    ],
)
def test_both_stages_put_adapters_on_the_same_modules(tiny_model_dir, tmp_path, asked, endings):
    """PEFT's own "all-linear" would add the routers of a mixture."""
    model = write_kind(tmp_path / "lladamoe", "lladamoe")
    load_tokenizer(tiny_model_dir).save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "completion": "2"}) + "\n")
    lora = {"max_steps": 1, "lora_r": 2, "lora_dropout": 0, "lora_target_modules": asked}
    flags = {**SFT, **lora, "model_name": model, "train_data": tmp_path / "rows.jsonl", "output_dir": tmp_path}
    sft.main(sft.make_parser().parse_args(words_of({**flags, "debugging": ""})))
    flags = {**RL, **lora, "model_path": model, "output_dir": tmp_path / "rl"}
    rl.main(*rl.make_parser().parse_args_and_config(words_of(flags)))
    layers = (1,) if "layers" in asked else range(3)
    assert adapted(tmp_path / "job") == {f"model.layers.{layer}.{ending}" for layer in layers for ending in endings}
    assert adapted(tmp_path / "rl") == adapted(tmp_path / "job")
