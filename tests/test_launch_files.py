"""The files that users launch, d1's names in them, and the launch configurations, which Accelerate itself reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests import forks
from tests.commands import ROOT

# Scripts written for d1's repository, in the folder that they run in. Of SFT, the lines of d1's `sft_train.py` that use
# its `sft_trainer.py`; only the model is loaded by this library, and Transformers 5 renamed `evaluation_strategy`.
OLD_SCRIPTS = {
    "SFT": """
import sys
from datasets import load_dataset
from sft_trainer import *
from transformers import AutoTokenizer, TrainingArguments
from d1.models import load_model
model_name, train_data, output_dir = sys.argv[1:]
max_length = 256
tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="right", trust_remote_code=True, use_fast=True)
model = load_model(model_name)
data = load_dataset("json", data_files=train_data, split="train")
train_data, eval_data = preprocess_dataset(data, tokenizer, max_length)
print("Train data length: ", len(train_data))
print("Eval data length: ", len(eval_data))
train_dataset = dLLMSFTDataset(train_data, tokenizer, max_length)
eval_dataset = dLLMSFTDataset(eval_data, tokenizer, max_length, eval=True)
training_args = TrainingArguments(
    output_dir=output_dir, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=2,
    eval_strategy="steps", eval_steps=2, logging_steps=2, save_total_limit=20, learning_rate=1e-3, weight_decay=0.1,
    max_grad_norm=1.0, load_best_model_at_end=True, report_to="none", remove_unused_columns=False, use_cpu=True,
)
trainer = dLLMTrainer(
    model=model,
    args=training_args,
    data_collator=dLLMDataCollator(tokenizer=tokenizer, mask_token_id=3, max_length=max_length),
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
)
trainer.train()
asked = tokenizer.decode(tokenizer(SYSTEM_PROMPT, add_special_tokens=False)["input_ids"])
assert asked in tokenizer.decode(train_data[0]["input_ids"])
print("trained", dLLMTrainer.__module__)
""",
    "diffu-grpo": """
from diffu_grpo_config import *
from diffu_grpo_trainer import *
print("found", DiffuGRPOTrainer.__module__, DiffuGRPOConfig)
""",
}


@pytest.mark.parametrize(("folder", "says"), [("SFT", "trained d1.sft.trainer"), ("diffu-grpo", "found d1.rl.trainer")])
def test_scripts_written_for_d1s_repository_work(folder, says, tiny_model_dir, tmp_path):
    for file in (ROOT / folder).glob("*.py"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "old.py").write_text(OLD_SCRIPTS[folder])
    rows = [{"question": f"{i}+{i}=?", "thinking_trajectories": ["add"], "attempt": str(2 * i)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(tiny_model_dir), str(tmp_path / "rows.jsonl"), str(tmp_path / "out")]
    started = forks.start(forks.script, "old.py", *words, log=tmp_path / "log", folder=tmp_path)
    assert says in forks.finish(started, tmp_path / "log")


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
