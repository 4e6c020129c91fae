"""SFT with a causal context: the formulas in plain tensors, however a global batch is split, padded or packed."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor
from transformers import LlamaConfig, TrainingArguments

from d1.masking import noise_level
from d1.models import load_model, load_tokenizer
from d1.models.packing import enable_packed_rows
from d1.runs.data import IGNORED, BatchRow
from d1.sft import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer
from d1.sft.config import CausalLoss, SFTConfig
from d1.sft.editing import EditNoise
from d1.sft.stage import check_noise
from tests import forks
from tests.d1.models.test_causal_context import Stock
from tests.d1.released import write_shifted
from tests.d1.sft.test_loss import ROWS, assert_same, rows_of_all_lengths

SIZE = 4
SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # (batch, accumulation)
Moved = tuple[float, dict[str, Tensor]]  # a step's loss, and its gradient by the name of a weight
OURS, AUTOMODEL = CausalLoss(0.5), CausalLoss(row_noise=True)
WEIGHED = CausalLoss(masked_weight=1.0, causal_weight=0.3)
WAYS: dict[str, dict[str, Any]] = {
    "ours": {"causal": OURS},
    "complementary": {"causal": OURS, "complementary": True},
    "weighed": {"causal": WEIGHED},
    "Automodel": {"causal": AUTOMODEL},
    "Automodel, exact counts": {"causal": AUTOMODEL, "exact": True},
}
CPU = {"ACCELERATE_USE_CPU": "true"}
# Of two processes: the way, the split, and whether rows are packed
SPLITS_OF_TWO, PACKED_OF_TWO = [(4, 1), (2, 2), (4, 1), (2, 2), (4, 1)], [False, False, True, True, True]
CASES_OF_TWO = [*zip(WAYS, SPLITS_OF_TWO, PACKED_OF_TWO, strict=True)]


def exact_counts(maskable: Tensor, generator: Generator, **options: Any) -> tuple[Tensor, Tensor]:
    """Times and mask of a row by Automodel's `corrupt_blockwise` (components/datasets/dllm/corruption.py): in each
    block, exactly round(m x size) tokens, the later ones more often if m is small; those of the answer are hidden."""
    times, hidden = torch.zeros(len(maskable)), torch.zeros(len(maskable), dtype=torch.bool)
    for start in range(0, len(maskable), SIZE):
        answer = maskable[start : start + SIZE]
        if answer.any():
            time, noise = torch.rand((), generator=generator), torch.rand(SIZE, generator=generator)
            m = noise_level(time)
            slope = math.log(2) / (0.25 * SIZE) * (1 - m)
            best = (slope * torch.arange(SIZE) - (-noise.log()).log()).argsort(descending=True)
            chosen = torch.zeros(SIZE, dtype=torch.bool).index_fill(0, best[: int((m * SIZE).round())], True)
            hidden[start : start + SIZE] = chosen[: len(answer)] & answer
            times[start : start + SIZE] = time
    return times, hidden


class ExactCounts(dLLMDataCollator):
    """With `exact_counts` for noise."""

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        with patch("d1.sft.data.draw_noise", exact_counts):
            return super().__call__(features, return_tensors)


def make_trainer(
    folder: Path, source: Path, tokenizer: Any, batch: int, accumulation: int, exact: bool = False, **ways: Any
) -> dLLMTrainer:
    options: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    options |= {"save_strategy": "no", "disable_tqdm": True, "report_to": "none", "remove_unused_columns": False}
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0,
        use_cpu=True,
        num_train_epochs=1,
        logging_steps=1,
        **options,
    )
    return dLLMTrainer(
        model=load_model(source, torch.float64),
        args=args,
        data_collator=(ExactCounts if exact else dLLMDataCollator)(tokenizer, block_size=SIZE, **ways),
        train_dataset=dLLMSFTDataset(rows_of_all_lengths(), tokenizer, 64, eos_padding=1),
        processing_class=tokenizer,
    )


def hybrid_loss(logits: Tensor, causal_logits: Tensor, clean: Tensor, noise: Tensor, p: Tensor, answer: Tensor) -> Any:
    """The sums of `HybridDiffusionLLMLoss` (NVIDIA-NeMo/Automodel, components/loss/dllm_loss.py) before its divisions:
    cross-entropy / p of what is hidden, and the next token's cross-entropy where it belongs to the answer."""
    picked = logits.log_softmax(-1).gather(-1, clean[:, None])[:, 0]
    following = causal_logits[:-1].log_softmax(-1).gather(-1, clean[1:, None])[:, 0]
    return -(picked / p)[noise].sum(), -following[answer[1:]].sum()


def one_step(trainer: dLLMTrainer) -> Moved:
    """Loss and gradient of an epoch of plain SGD at rate 1, which is one step."""
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, {name: before[name] - weight.detach() for name, weight in trainer.model.named_parameters()}


def by_hand(folder: Path, source: Path, tokenizer: Any, **way: Any) -> Moved:
    """Loss and gradient, all rows alone, without padding and through Transformers' own class."""
    trainer = make_trainer(folder, source, tokenizer, ROWS, 1, **way)
    (batch,) = trainer.get_train_dataloader()
    stock, masks, causal = Stock(source), [], []
    stock.model.double()
    columns = [batch[name] for name in ("input_ids", "labels", "attention_mask", "t")]
    for ids, labels, visible, t in zip(*columns, strict=True):
        length, answer = int(visible.sum()), labels != IGNORED
        noised, clean = ids[:length], torch.where(answer, labels, ids)[:length]
        start = 0 if way["causal"].row_noise else int(answer.int().argmax())
        edges = [*range(start % SIZE - SIZE, length, SIZE), length]
        spans = [(max(a, 0), b) for a, b in pairwise(edges) if b > 0]
        assert t.dim() == (0 if way["causal"].row_noise and "exact" not in way else 1)
        for a, b in spans if t.dim() else ():
            assert len({*t[a:b][answer[a:b]].tolist()}) <= 1, "a block has one t"
        found = torch.cat([stock.block(clean, noised, a, b) for a, b in spans])
        p = (1 - 1e-3) * t.double().expand(len(ids))[:length] + 1e-3
        hidden = noised != clean
        one, other = hybrid_loss(found, stock.logits(clean[None])[0], clean, hidden, p, answer[:length])
        masks.append(one)
        causal.append(other)
    answers, hidden = (batch["labels"] != IGNORED).sum(), batch["masked"].sum()
    divisor = hidden if way["causal"].row_noise else answers
    of_clean = way["causal"].causal_weight * torch.stack(causal).sum() / answers
    loss = way["causal"].masked_weight * torch.stack(masks).sum() / divisor + of_clean
    loss.backward()
    return loss.item(), {name: cast(Tensor, weight.grad) for name, weight in stock.model.named_parameters()}


@pytest.fixture(scope="module", params=[False, True], ids=["in place", "shift"])
def source(request, tiny_causal_dir: Path, tmp_path_factory) -> Path:
    if not request.param:
        return tiny_causal_dir
    folder = write_shifted(tmp_path_factory.mktemp("shifted") / "model", tiny_causal_dir)
    load_tokenizer(str(tiny_causal_dir)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(str(tiny_model_dir))


@pytest.fixture(scope="module")
def expected(source, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_hand")
    return {name: by_hand(folder, source, tokenizer, **way) for name, way in WAYS.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradient_are_those_of_the_formula(source, tokenizer, tmp_path, expected, way, split, packed):
    assert_same(one_step(make_trainer(tmp_path, source, tokenizer, *split, packed=packed, **WAYS[way])), expected[way])


def steps_of_two(source: Path, folder: Path) -> None:
    """What each of two processes runs: the step of all cases, whose results the first process saves."""
    for way, split, packed in CASES_OF_TWO:
        trainer = make_trainer(folder, source, load_tokenizer(str(source)), *split, packed=packed, **WAYS[way])
        assert trainer.args.world_size == 2
        loss, moved = one_step(trainer)
        if trainer.accelerator.is_main_process:
            save_file(moved, folder / f"{way}.safetensors")
            (folder / f"{way}.json").write_text(json.dumps(loss))


def test_two_processes_take_the_step_of_the_formula(source, tmp_path, expected):
    """Hidden and answer tokens are counted over both."""
    log = tmp_path / "log"
    started = forks.start(steps_of_two, source, tmp_path, log=log, folder=tmp_path, processes=2, **CPU)
    forks.finish(started, log)
    for way, *_ in CASES_OF_TWO:
        loss = json.loads((tmp_path / f"{way}.json").read_text())
        assert_same((loss, load_file(tmp_path / f"{way}.safetensors")), expected[way])


def test_the_first_token_of_a_text_has_no_state_before_it(source, tokenizer, tmp_path):
    """A row without a prompt: its first token counts as an answer token, and only its mask is scored."""
    trainer = make_trainer(tmp_path, source, tokenizer, 2, 1, causal=OURS)
    row = {"input_ids": [9, 10, 11, 2], "answer": [True] * 4, "key": (1,), "t": None}
    packer = dLLMDataCollator(tokenizer, block_size=SIZE, causal=OURS, packed=True)
    plain, packed = (collate([row, row]) for collate in (trainer.data_collator, packer))
    losses = trainer.row_losses(trainer.model, plain)
    stock = Stock(source)
    stock.model.double()
    following = stock.logits(torch.tensor([[9, 10, 11]])).log_softmax(-1)[0, range(3), [10, 11, 2]].sum()
    nothing_hidden = dict(plain, masked=torch.zeros_like(plain["masked"]), input_ids=plain["labels"])
    torch.testing.assert_close(
        trainer.row_losses(trainer.model, nothing_hidden), -following.expand(2), rtol=1e-9, atol=0
    )
    trainer.data_collator = packer
    enable_packed_rows(trainer.model)
    torch.testing.assert_close(trainer.row_losses(trainer.model, packed), losses, rtol=1e-9, atol=1e-9)


def test_a_batch_of_empty_rows_has_no_loss_and_is_not_changed(source, tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, source, tokenizer, 2, 1, causal=OURS)
    empty = trainer.train_dataset[BatchRow(-1)]
    inputs = trainer.data_collator([empty, empty])
    assert trainer.row_losses(trainer.model, inputs).tolist() == [0.0, 0.0]
    assert not inputs["masked"].any()


def test_what_does_not_belong_together_is_refused(source, tokenizer, tmp_path, tiny_model_dir):
    given: dict[str, Any] = {"args": TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])}
    for model, ways, message in (
        (load_model(source), {"block_size": SIZE}, "has a causal context: use dLLMDataCollator"),
        (load_model(tiny_model_dir), {"causal": OURS}, "has no causal context: leave out causal="),
        (
            load_model(source),
            {"block_size": SIZE, "causal": OURS, "edits": EditNoise("draft", 0.5, 0.5, 0.7, 2)},
            "--edit_noise trains edits",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dLLMTrainer(model=model, data_collator=dLLMDataCollator(tokenizer, **ways), **given)


@pytest.mark.parametrize("flags", [{"masked_weight": 0.5}, {"row_noise": True}])
def test_settings_of_a_causal_context_are_refused_for_a_model_without_one(flags):
    with pytest.raises(ValueError, match="--masked_weight and --row_noise would do nothing: this model has no causal"):
        check_noise(SFTConfig(**flags), LlamaConfig())
    check_noise(SFTConfig(), LlamaConfig())


def test_a_causal_context_with_no_weight_has_nothing_to_train_on():
    config = LlamaConfig(attention_pattern="causal-context", block_size=4)
    with pytest.raises(ValueError, match="--masked_weight 0 and --causal_weight 0 leave nothing to train on"):
        check_noise(SFTConfig(masked_weight=0.0, causal_weight=0.0), config)
    check_noise(SFTConfig(masked_weight=0.0, causal_weight=1.0), config)


def test_blocks_that_begin_with_the_first_answer_do_not_fit_those_of_later_turns():
    config = LlamaConfig(attention_pattern="causal-context", block_size=4)
    with pytest.raises(ValueError, match="--assistant_only_loss: with a causal context, blocks begin with the first"):
        check_noise(SFTConfig(assistant_only_loss=True), config)
    for other in ({"row_noise": True}, {"masked_weight": 0.0}):
        check_noise(SFTConfig(assistant_only_loss=True, **other), config)
