"""Trained weights are precise enough for small steps, and old and new log-probabilities have no dropout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainingArguments

from d1.models import load_model, load_tokenizer
from d1.preference import METHODS, PreferenceTrainer
from d1.rl import DiffuGRPOConfig, DiffuGRPOTrainer
from d1.sft import dLLMSFTDataset, dLLMTrainer, preprocess_dataset

STEPS = 8
SETTINGS: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
SETTINGS |= {"max_steps": STEPS, "learning_rate": 3e-6, "lr_scheduler_type": "constant", "logging_steps": 1}


def sft_trainer(path: Path, folder: Path, dtype: torch.dtype, bf16: bool, adapter: LoraConfig | None) -> dLLMTrainer:
    data = Dataset.from_list([{"prompt": "1+1=", "completion": "2"}] * 8)
    prepared, _ = preprocess_dataset(data, load_tokenizer(path), max_length=32, test_split=0, num_proc=1)
    rows = dLLMSFTDataset(prepared, load_tokenizer(path), 32)
    arguments = TrainingArguments(str(folder), bf16=bf16, **SETTINGS)
    return dLLMTrainer(load_model(path, dtype), arguments, train_dataset=rows, peft_config=adapter)


def rl_trainer(
    path: Path, folder: Path, dtype: torch.dtype, bf16: bool, adapter: LoraConfig | None, **settings: Any
) -> DiffuGRPOTrainer:
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "num_iterations": 2, "max_completion_length": 8}
    sizes |= {"block_length": 4, "diffusion_steps": 8}
    args = DiffuGRPOConfig(str(folder), bf16=bf16, **SETTINGS, **sizes, **settings)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}]}] * 8)
    return DiffuGRPOTrainer(load_model(path, dtype), length, args, rows, load_tokenizer(path), peft_config=adapter)


def length(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(str(completion))) + number / 8 for number, completion in enumerate(completions)]


TRAINERS = {"sft": sft_trainer, "rl": rl_trainer}


def changed_share(trainer: Any, names: str) -> float:
    """The share of entries of the trained weights with `names` in their name that training changes."""
    weights = {
        name: weight for name, weight in trainer.model.named_parameters() if names in name and weight.requires_grad
    }
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    trainer.train()
    assert trainer.state.global_step == STEPS
    changed = torch.cat([(weight != before[name]).flatten() for name, weight in weights.items()])
    return changed.double().mean().item()


@pytest.mark.parametrize("kind", TRAINERS)
def test_whole_modules_next_to_an_adapter_are_trained_in_fp32(kind, tiny_model_dir, tmp_path, caplog):
    """PEFT leaves them in the model's 16 bits, where steps of 3e-6 change hardly any entry."""
    adapter = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    trainer = TRAINERS[kind](tiny_model_dir, tmp_path, torch.bfloat16, True, adapter)
    assert {weight.dtype for weight in trainer.model.parameters() if weight.requires_grad} == {torch.float32}
    assert {weight.dtype for weight in trainer.model.parameters() if not weight.requires_grad} == {torch.bfloat16}
    assert changed_share(trainer, "lm_head.modules_to_save") > 0.99
    assert "rounded away" not in caplog.text


@pytest.mark.parametrize("kind", TRAINERS)
def test_steps_that_are_rounded_away_are_told(kind, tiny_model_dir, tmp_path, caplog):
    trainer = TRAINERS[kind](tiny_model_dir, tmp_path / "16", torch.bfloat16, True, None)
    told = "Weights are trained in bfloat16, where most steps of a learning rate of 3e-06 are rounded away: load the"
    assert told in caplog.text
    assert changed_share(trainer, "") < 0.5
    caplog.clear()
    trainer = TRAINERS[kind](tiny_model_dir, tmp_path / "32", torch.float32, True, None)
    assert "rounded away" not in caplog.text
    assert changed_share(trainer, "lm_head") > 0.99


@pytest.fixture
def with_dropout(tiny_model_dir, tmp_path):
    """The tiny model with dropout of attention weights, as its config says."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    return folder


@pytest.mark.parametrize("off", [True, False])
def test_the_first_ratio_is_1_for_a_model_with_dropout_of_attention(off, with_dropout, tmp_path):
    trainer = rl_trainer(with_dropout, tmp_path, torch.float32, False, None, disable_dropout=off)
    trainer.train()
    first = next(log["ratio_max"] for log in trainer.state.log_history if "ratio_max" in log)
    assert (first == 1.0) == off


def test_preference_training_has_no_dropout_of_attention(with_dropout, tmp_path):
    arguments = TrainingArguments(str(tmp_path), bf16=False, **SETTINGS)
    model, reference = load_model(with_dropout), load_model(with_dropout)
    ids = torch.arange(5, 25).unsqueeze(0)
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    trainer = PreferenceTrainer(METHODS["vrpo"], 0.1, 3, reference, model=model, args=arguments)
    for made in (trainer.model, trainer.reference_model):
        made.train()
        assert torch.equal(made(ids).logits, made(ids).logits)
