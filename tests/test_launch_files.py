"""The files that users launch, d1's names in them, and the launch configurations, which Accelerate itself reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
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
train_dataset = dLLMSFTDataset(train_data, tokenizer, max_length)
eval_dataset = dLLMSFTDataset(eval_data, tokenizer, max_length, eval=True)
training_args = TrainingArguments(
    output_dir=output_dir, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=2,
    eval_strategy="steps", eval_steps=2, logging_steps=2, save_total_limit=20, learning_rate=1e-3, weight_decay=0.1,
    max_grad_norm=1.0, load_best_model_at_end=True, report_to="none", remove_unused_columns=False, use_cpu=True,
)
collator = dLLMDataCollator(tokenizer=tokenizer, mask_token_id=3, max_length=max_length)
data = {"data_collator": collator, "train_dataset": train_dataset, "eval_dataset": eval_dataset}
trainer = dLLMTrainer(model=model, args=training_args, **data)
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


def test_accelerate_launches_a_stage():
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-m", "d1.rl.train", "--help"]
    said = subprocess.check_output(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, timeout=120)
    assert said.startswith("usage: d1.rl.train ")


KINDS = {  # distributed type, processes, precision, on the CPU, stage of ZeRO
    "launch/cpu.yaml": ("NO", 1, "no", True, None),
    "launch/single_gpu.yaml": ("NO", 1, "bf16", False, None),
    "launch/ddp.yaml": ("MULTI_GPU", 2, "bf16", False, None),
    "launch/zero3.yaml": ("DEEPSPEED", 8, "bf16", False, 3),
    "launch/fsdp2.yaml": ("FSDP", 8, "bf16", False, None),
    "SFT/ddp_config.yaml": ("DEEPSPEED", 2, "bf16", False, 2),
    "diffu-grpo/accelerate.yaml": ("DEEPSPEED", 8, "bf16", False, 2),
}


def test_every_configuration_is_one_of_accelerate() -> None:
    yamls = [path for room in ("launch", "SFT", "diffu-grpo") for path in (ROOT / room).rglob("*.yaml")]
    found = {}
    for path in (path for path in yamls if "distributed_type" in path.read_text()):
        config = load_config_from_file(str(path))  # refuses keys that it does not know
        kind = (config.distributed_type, config.num_processes, config.mixed_precision, config.use_cpu)
        found[str(path.relative_to(ROOT))] = (*kind, config.deepspeed_config.get("zero_stage"))
    assert found == KINDS
