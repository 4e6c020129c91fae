"""The loss and its gradient are the formula's, for every way of splitting a global batch.

Run under torchrun, this file is also the process that takes the one optimizer step: see `step_in_processes`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from sft_trainer import IGNORED, dLLMDataCollator, dLLMSFTDataset, dLLMTrainer
from torch import Tensor
from transformers import TrainingArguments

from d1.models import load_model, load_tokenizer
from d1.runs.entry import leave

ROOT = Path(__file__).parents[2]
ROWS = 8
SPLITS_ALONE = [(8, 1), (4, 2), (2, 4), (1, 8)]  # (batch, accumulation)
SPLITS_OF_TWO = [(4, 1), (2, 2)]
EOS_PADDINGS: list[int | str] = [1, "batch"]  # rows of 2 to 38 tokens with padding between them, and without
SHORT_EPOCH = [(4, 1), (2, 2), (1, 4)]  # of 4 rows a step: the second step has 2 rows and 2 empty slots
DEEPSPEED = ["accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--zero_stage"]
LAUNCHERS = {
    "MULTI_CPU": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "ZERO2": [*DEEPSPEED, "2"],
    "ZERO3": [*DEEPSPEED, "3", "--zero3_save_16bit_model", "true"],
}


def rows_of_all_lengths(count: int = ROWS) -> Dataset:
    rows = []
    for i in range(count):
        prompt, answer = 1 + i % 3, 1 + (i * i) % 37
        rows.append(
            {
                "input_ids": [8 + (7 * i + k) % 40 for k in range(prompt + answer - 1)] + [2],
                "answer": [False] * prompt + [True] * answer,
                "length": prompt + answer,
                "start": prompt,
                "status": "ok",
            }
        )
    return Dataset.from_list(rows)


def test_a_block_causal_model_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    model: Any = load_model(tiny_model_dir)
    model.config.block_size = 4
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="has blocks of 4 tokens: it must learn from a noised block beside the clean text"
    ):
        dLLMTrainer(model=load_model(tmp_path), args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


def make_trainer(model_dir: Path, folder: Path, batch: int, accumulation: int, **options: Any) -> dLLMTrainer:
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    rows = options.pop("rows", None) or rows_of_all_lengths()
    tokenizer = load_tokenizer(str(model_dir))
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        max_steps=options.pop("max_steps", -1),
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        use_cpu=not deepspeed,  # asked for the CPU, Accelerate would leave DeepSpeed out
        ddp_backend="gloo" if deepspeed else None,
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )
    return dLLMTrainer(
        model=load_model(str(model_dir), dtype=torch.float32 if deepspeed else torch.float64),
        args=args,
        data_collator=dLLMDataCollator(tokenizer),
        train_dataset=dLLMSFTDataset(rows, tokenizer, 64, eos_padding=options.pop("eos_padding", "batch")),
        processing_class=tokenizer,
        **options,
    )


def one_step(model_dir: Path, folder: Path, batch: int, accumulation: int, **options: Any) -> None:
    """An epoch of plain SGD at rate 1: of one step, unless `rows` has more than the global batch."""
    trainer = make_trainer(model_dir, folder, batch, accumulation, **options)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()


def found(model_dir: Path, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The step's loss, and its gradient: what the weights lost."""
    before = load_model(str(model_dir)).state_dict()
    after = load_model(str(folder), dtype=torch.float64).state_dict()
    loss = json.loads((folder / "trainer_state.json").read_text())["log_history"][0]["loss"]
    return loss, {name: before[name] - after[name] for name in before}


def brute_force(model_dir: Path, folder: Path, eos_padding: int | str) -> tuple[float, dict[str, Tensor]]:
    """The formula, row by row without padding: sum of cross-entropy / t' over hidden tokens, over all answer tokens."""
    model = load_model(str(model_dir), dtype=torch.float64)
    trainer = make_trainer(model_dir, folder, ROWS, 1, eos_padding=eos_padding)
    (batch,) = trainer.get_train_dataloader()
    answers = sum(label != IGNORED for row in batch["labels"].tolist() for label in row)
    total, naive = 0.0, torch.zeros((), dtype=torch.float64)
    for ids, labels, visible, t in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"], batch["t"], strict=True
    ):
        length = int(visible.sum())
        logits = model(input_ids=ids[None, :length]).logits[0]
        probability = (1 - 1e-3) * float(t) + 1e-3
        for noised, clean, scores in zip(ids[:length].tolist(), labels[:length].tolist(), logits, strict=True):
            if clean == IGNORED or noised == clean:
                continue
            assert noised == 3
            exponentials = [math.exp(score) for score in scores.tolist()]
            total += -math.log(exponentials[clean] / sum(exponentials)) / probability / answers
            naive = naive - scores.log_softmax(-1)[clean] / probability / answers
    naive.backward()
    return total, {name: cast(Tensor, weight.grad) for name, weight in model.named_parameters()}


def assert_same(
    result: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], atol: float = 1e-7
) -> None:
    assert result[0] == pytest.approx(expected[0], rel=1e-6)
    assert result[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(result[1][name].to(gradient.dtype), gradient, rtol=1e-6, atol=atol)


def step_in_processes(kind: str, model_dir: Path, folder: Path) -> None:
    """Two processes of this very file take the step for each kind of EOS padding and split, and save what they find."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "SFT")])
    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[kind], __file__, kind, str(model_dir), str(folder)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def process(kind: str, model_dir: Path, folder: Path) -> None:
    for eos_padding, (batch, accumulation) in itertools.product(EOS_PADDINGS, SPLITS_OF_TWO):
        target = folder / f"{eos_padding}-{batch}"
        one_step(model_dir, target, batch, accumulation, eos_padding=eos_padding)
    if kind == "MULTI_CPU":
        one_step(model_dir, folder / "short", 2, 1, rows=rows_of_all_lengths(6))
    trainer = make_trainer(model_dir, folder, 1, 1)
    assert trainer.args.world_size == 2
    state = trainer.accelerator.state
    assert state.distributed_type.value == ("MULTI_CPU" if kind == "MULTI_CPU" else "DEEPSPEED")
    assert kind == "MULTI_CPU" or state.deepspeed_plugin.zero_stage == int(kind[-1])
    trainer.end()


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int | str, Any]:
    folder = tmp_path_factory.mktemp("brute_force")
    return {eos_padding: brute_force(tiny_model_dir, folder, eos_padding) for eos_padding in EOS_PADDINGS}


@pytest.mark.parametrize("eos_padding", EOS_PADDINGS)
@pytest.mark.parametrize("split", SPLITS_ALONE)
def test_one_process(
    tiny_model_dir: Path, tmp_path: Path, expected: Any, split: tuple[int, int], eos_padding: int | str
) -> None:
    one_step(tiny_model_dir, tmp_path, *split, eos_padding=eos_padding)
    assert_same(found(tiny_model_dir, tmp_path), expected[eos_padding])


def test_two_processes(tiny_model_dir: Path, tmp_path: Path, expected: Any) -> None:
    step_in_processes("MULTI_CPU", tiny_model_dir, tmp_path)
    for eos_padding, (batch, _) in itertools.product(EOS_PADDINGS, SPLITS_OF_TWO):
        assert_same(found(tiny_model_dir, tmp_path / f"{eos_padding}-{batch}"), expected[eos_padding])
    for split in SHORT_EPOCH:
        one_step(tiny_model_dir, tmp_path / "alone", *split, rows=rows_of_all_lengths(6))
        assert_same(found(tiny_model_dir, tmp_path / "short"), found(tiny_model_dir, tmp_path / "alone"))


@pytest.mark.parametrize("kind", ["ZERO2", "ZERO3"])
def test_two_processes_of_deepspeed(tiny_model_dir: Path, tmp_path: Path, expected: Any, kind: str) -> None:
    pytest.importorskip("deepspeed")
    step_in_processes(kind, tiny_model_dir, tmp_path)
    for eos_padding, (batch, _) in itertools.product(EOS_PADDINGS, SPLITS_OF_TWO):
        result = found(tiny_model_dir, tmp_path / f"{eos_padding}-{batch}")
        assert_same(result, expected[eos_padding], atol=1e-6)  # weights and gradients in fp32


if __name__ == "__main__":
    torch.set_num_threads(1)
    process(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    leave()
