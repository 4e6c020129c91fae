"""Trainers called as TRL documents its own: a path as the model, no tokenizer, no collator; or one line says what to
write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DataCollatorForLanguageModeling, TrainingArguments
from trl import DPOConfig, GRPOConfig
from trl import SFTConfig as TrlSFTConfig

from d1.models import load_model, load_tokenizer
from d1.preference import METHODS, PreferenceTrainer
from d1.rl import DiffuGRPOConfig, DiffuGRPOTrainer
from d1.sft import SFTConfig, dLLMDataCollator, dLLMSFTDataset, dLLMTrainer, preprocess_dataset

CHATS = [{"prompt": [{"role": "user", "content": "1+1="}]}] * 4
QUIET: dict[str, Any] = {"max_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False}


def length(completions, **columns):
    return [float(len(str(completion))) for completion in completions]


def rl_config(folder, **fields):
    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4}
    steps = {"block_length": 4, "diffusion_steps": 4}
    return DiffuGRPOConfig(str(folder), **QUIET, **sizes, **steps, **fields)


def trained(trainer):
    """The weights after training."""
    trainer.train()
    assert trainer.state.global_step == 1
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def test_rl_from_a_path_equals_rl_from_its_parts(tiny_model_dir, tmp_path):
    rows = Dataset.from_list(CHATS)
    path = str(tiny_model_dir)
    given = {"reward_funcs": length, "args": rl_config(tmp_path), "train_dataset": rows}
    expected = trained(DiffuGRPOTrainer(load_model(path), processing_class=load_tokenizer(path), **given))
    for model in (path, tiny_model_dir, load_model(path)):
        found = trained(DiffuGRPOTrainer(model, **given))
        assert all(map(torch.equal, found, expected))


def test_rl_takes_texts_as_prompts_and_has_default_settings(tiny_model_dir, tmp_path, monkeypatch):
    rows = Dataset.from_list([{"prompt": "1+1="}] * 4)
    trained(DiffuGRPOTrainer(str(tiny_model_dir), length, rl_config(tmp_path), rows))
    monkeypatch.chdir(tmp_path)
    assert isinstance(DiffuGRPOTrainer(str(tiny_model_dir), length, train_dataset=rows).args, DiffuGRPOConfig)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"args": GRPOConfig("out", **ON_CPU)}, r"args is trl's GRPOConfig.*: use d1\.rl\.DiffuGRPOConfig"),
        (
            {"train_dataset": Dataset.from_list([{"q": "a", "b": 1}])},
            "train_dataset has the columns q, b: name",
        ),
        ({"eval_dataset": Dataset.from_list([{"q": "a"}])}, "eval_dataset has the columns q: name the one"),
        ({"eval_dataset": {"hard": Dataset.from_list([{"q": "a"}])}}, "hard has the columns q: name the one"),
        ({"train_dataset": CHATS}, r"train_dataset is list, not datasets\.Dataset"),
        (
            {"train_dataset": IterableDataset.from_generator(lambda: iter(CHATS))},
            "is IterableDataset, not",
        ),
        ({"train_dataset": None}, "`train_dataset` is required"),
        (
            {"train_dataset": DatasetDict({"train": Dataset.from_list(CHATS)})},
            "train_dataset is a DatasetDict: choose one of its splits, train",
        ),
        (
            {"processing_class": "tokenizer"},
            r"processing_class is str, not a tokenizer: use d1\.models\.",
        ),
    ],
)
def test_arguments_that_rl_cannot_use_are_refused(tiny_model_dir, tmp_path, change, problem):
    given = {"args": rl_config(tmp_path), "train_dataset": Dataset.from_list(CHATS)} | change
    with pytest.raises(ValueError, match=problem):
        DiffuGRPOTrainer(str(tiny_model_dir), length, **given)


def test_a_config_for_two_models_has_the_blocks_of_each(tiny_model_dir, tiny_block_dir):
    settings = DiffuGRPOConfig("out", max_completion_length=16, diffusion_steps=16, **QUIET, **ON_CPU)
    blocks = [
        settings.sampling_settings(load_model(path).config).block_length for path in (tiny_block_dir, tiny_model_dir)
    ]
    assert blocks == [4, 16]
    settings.block_length = 8
    assert settings.sampling_settings(load_model(tiny_model_dir).config).block_length == 8


def test_rewards_may_be_a_tuple(tiny_model_dir, tmp_path):
    trained(DiffuGRPOTrainer(str(tiny_model_dir), (length, length), rl_config(tmp_path), Dataset.from_list(CHATS)))


def test_a_new_adapter_of_rl_depends_on_the_seed_alone(tiny_model_dir, tmp_path):
    adapters = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = LoraConfig(target_modules=["q_proj"])
        given = {"args": rl_config(tmp_path), "train_dataset": Dataset.from_list(CHATS), "peft_config": config}
        trainer = DiffuGRPOTrainer(str(tiny_model_dir), length, **given)
        adapters.append([weight for name, weight in trainer.model.named_parameters() if "lora_A" in name])
    assert all(map(torch.equal, *adapters))


def test_a_second_trainer_of_one_adapter_says_how_to_remove_the_reference(tiny_model_dir, tmp_path):
    model = get_peft_model(load_model(tiny_model_dir), LoraConfig(target_modules=["q_proj"]))
    given = {"args": rl_config(tmp_path, beta=0.1), "train_dataset": Dataset.from_list(CHATS)}
    DiffuGRPOTrainer(model, length, processing_class=load_tokenizer(tiny_model_dir), **given)
    with pytest.raises(ValueError, match=r"has the adapter ref, .*: model\.delete_adapter\('ref'\)"):
        DiffuGRPOTrainer(model, length, processing_class=load_tokenizer(tiny_model_dir), **given)
    model.delete_adapter("ref")
    trained(DiffuGRPOTrainer(model, length, processing_class=load_tokenizer(tiny_model_dir), **given))


@pytest.fixture
def rows(tiny_model_dir):
    data = Dataset.from_list([{"prompt": "1+1=", "completion": "2"}] * 4)
    prepared, _ = preprocess_dataset(data, load_tokenizer(tiny_model_dir), max_length=32, test_split=0, num_proc=1)
    return dLLMSFTDataset(prepared, load_tokenizer(tiny_model_dir), 32)


@pytest.mark.parametrize("model", ["tiny_model_dir", "tiny_block_dir", "tiny_causal_dir"])
def test_sft_from_a_path_equals_sft_from_its_parts(model, rows, tmp_path, request):
    """The collator follows the model's blocks and context."""
    from d1.sft.config import CausalLoss

    path = str(request.getfixturevalue(model))
    options = {"tiny_model_dir": {}, "tiny_block_dir": {"block_size": 4}}.get(model)
    if options is None:
        options = {"block_size": 4, "causal": CausalLoss()}

    def arguments(**fields):
        return TrainingArguments(str(tmp_path), use_cpu=True, **QUIET, **fields)

    collator = dLLMDataCollator(load_tokenizer(path), **options)
    expected = trained(
        dLLMTrainer(
            model=load_model(path),
            args=arguments(remove_unused_columns=False),
            train_dataset=rows,
            data_collator=collator,
            processing_class=load_tokenizer(path),
        )
    )
    for given in (path, load_model(path)):
        found = trained(dLLMTrainer(given, arguments(), train_dataset=rows))
        assert all(map(torch.equal, found, expected))


def test_sft_of_a_new_adapter(tiny_model_dir, rows, tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **QUIET)
    config = LoraConfig(target_modules=["q_proj"])
    trainer = dLLMTrainer(str(tiny_model_dir), arguments, train_dataset=rows, peft_config=config)
    trained(trainer)
    assert isinstance(trainer.model, PeftModel)


def test_a_new_adapter_of_sft_depends_on_the_seed_alone(tiny_model_dir, rows, tmp_path):
    adapters = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, **QUIET)
        config = LoraConfig(target_modules=["q_proj"])
        trainer = dLLMTrainer(str(tiny_model_dir), arguments, train_dataset=rows, peft_config=config)
        adapters.append([weight for name, weight in trainer.model.named_parameters() if "lora_A" in name])
    assert all(map(torch.equal, *adapters))


def test_sft_has_default_arguments(tiny_model_dir, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = dLLMTrainer(load_model(tiny_model_dir).float(), train_dataset=rows)
    trainer.args.max_steps, trainer.args.report_to = 1, []
    trained(trainer)


def test_an_adapter_is_not_put_on_another_one(tiny_model_dir, rows):
    config = LoraConfig(target_modules=["q_proj"])
    model = get_peft_model(load_model(tiny_model_dir), config)
    with pytest.raises(ValueError, match="has an adapter already, so a new one would not be saved with it"):
        dLLMTrainer(model, train_dataset=rows, peft_config=config)


def test_rows_of_training_are_refused_in_each_evaluation(tiny_model_dir, rows, tmp_path):
    trainer = dLLMTrainer(str(tiny_model_dir), TrainingArguments(str(tmp_path), **QUIET, **ON_CPU), train_dataset=rows)
    for evaluate in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="one random time per row, as in training"):
            evaluate(rows)
        with pytest.raises(ValueError, match="is Dataset, not dLLMSFTDataset"):
            evaluate(Dataset.from_list(CHATS))


def test_sft_again_after_a_resume_begins_anew(tiny_model_dir, rows, tmp_path):
    def trainer(folder):
        steps = QUIET | {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
        return dLLMTrainer(str(tiny_model_dir), TrainingArguments(str(folder), **steps, **ON_CPU), train_dataset=rows)

    unbroken = trainer(tmp_path)
    unbroken.train()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for run in (unbroken, resumed):
        run.train()
    losses = [[log["loss"] for log in run.state.log_history if "loss" in log] for run in (resumed, unbroken)]
    means = [run.state.log_history[-1]["train_loss"] for run in (resumed, unbroken)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert means[0] == means[1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"args": TrlSFTConfig("out", **ON_CPU)}, r"args is trl's SFTConfig.*: use transformers\.TrainingArguments"),
        ({"args": SFTConfig()}, r"args is d1's SFTConfig.*: use transformers\.TrainingArguments"),
        (
            {"train_dataset": Dataset.from_list(CHATS)},
            "train_dataset is Dataset, not dLLMSFTDataset: call rows",
        ),
        ({"eval_dataset": {"hard": CHATS}}, "eval_dataset is list, not dLLMSFTDataset"),
        ({"data_collator": DataCollatorForLanguageModeling}, "data_collator is type: leave it out, or use"),
        *(
            ({"args": TrainingArguments("out", use_cpu=True, **{name: value})}, f"{name}={value!r} would do nothing: ")
            for name, value in {
                "label_smoothing_factor": 0.1,
                "data_seed": 3,
                "train_sampling_strategy": "group_by_length",
                "length_column_name": "size",
                "batch_eval_metrics": True,
                "eval_do_concat_batches": False,
            }.items()
        ),
        ({"compute_loss_func": length}, "compute_loss_func is not an argument of this trainer: the loss is"),
        ({"model_init": length}, "model_init is not an argument of this trainer: give model"),
        ({"compute_metrics": length}, "compute_metrics is not an argument of this trainer: .* `d1 eval`"),
        ({"preprocess_logits_for_metrics": length}, "preprocess_logits_for_metrics is not an argument"),
    ],
)
def test_arguments_that_sft_cannot_use_are_refused(tiny_model_dir, rows, change, problem):
    with pytest.raises(ValueError, match=problem):
        dLLMTrainer(str(tiny_model_dir), **({"train_dataset": rows} | change))


def test_a_model_without_a_path_needs_a_tokenizer(tiny_model_dir, rows):
    model = load_model(tiny_model_dir)
    model.name_or_path = ""
    with pytest.raises(ValueError, match="processing_class is missing, and the model has no path"):
        dLLMTrainer(model, train_dataset=rows)


def test_a_config_of_trls_dpo_is_refused(tiny_model_dir):
    with pytest.raises(ValueError, match="args is trl's DPOConfig"):
        PreferenceTrainer(METHODS["vrpo"], 0.1, 3, model=load_model(tiny_model_dir), args=DPOConfig("out", **ON_CPU))


def test_preference_training_has_no_evaluation(tiny_model_dir, rows):
    options = {"model": load_model(tiny_model_dir), "args": TrainingArguments("out", **ON_CPU)}
    with pytest.raises(ValueError, match="PreferenceTrainer has no evaluation loss: leave eval_dataset out"):
        PreferenceTrainer(METHODS["vrpo"], 0.1, 3, train_dataset=rows, eval_dataset=rows, **options)
    options["model"] = get_peft_model(options["model"], LoraConfig(target_modules=["q_proj"]))
    trainer = PreferenceTrainer(METHODS["vrpo"], 0.1, 3, train_dataset=rows, **options)
    with pytest.raises(ValueError, match="has no evaluation loss, and nothing to predict"):
        trainer.predict(rows)
    with pytest.raises(ValueError, match="compute_loss_func is not an argument of this trainer"):
        PreferenceTrainer(METHODS["vrpo"], 0.1, 3, train_dataset=rows, compute_loss_func=length, **options)
