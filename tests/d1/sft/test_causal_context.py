"""SFT with a causal context: the formulas in plain tensors, however a global batch is split, padded or packed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import TrainingArguments

from d1.models import load_model, load_tokenizer
from d1.models.packing import take_packed_rows
from d1.runs.data import IGNORED
from d1.sft import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer
from d1.sft.config import CausalLoss
from d1.sft.editing import EditNoise
from tests.d1.models.test_causal_context import Stock
from tests.d1.released import CAUSAL
from tests.d1.sft.test_loss import ROWS, SPLITS_ALONE, assert_same, rows_of_all_lengths

SIZE = 4
OURS, AUTOMODEL = CausalLoss(0.5), CausalLoss(row_noise=True)
WAYS: dict[str, dict[str, Any]] = {
    "ours": {"causal": OURS},
    "complementary": {"causal": OURS, "complementary": True},
    "Automodel": {"causal": AUTOMODEL},
}


def make_trainer(folder: Path, source: Path, tokenizer: Any, batch: int, accumulation: int, **ways: Any) -> dLLMTrainer:
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
        data_collator=dLLMDataCollator(tokenizer, block_size=SIZE, **ways),
        train_dataset=dLLMSFTDataset(rows_of_all_lengths(), tokenizer, 64, eos_padding=1),
        processing_class=tokenizer,
    )


def hybrid_loss(logits: Tensor, causal_logits: Tensor, clean: Tensor, noise: Tensor, p: Tensor, answer: Tensor) -> Any:
    """The sums of `HybridDiffusionLLMLoss` (NVIDIA-NeMo/Automodel, components/loss/dllm_loss.py) before its divisions:
    cross-entropy / p of what is hidden, and the next token's cross-entropy where it belongs to the answer."""
    picked = logits.log_softmax(-1).gather(-1, clean[:, None])[:, 0]
    following = causal_logits[:-1].log_softmax(-1).gather(-1, clean[1:, None])[:, 0]
    return -(picked / p)[noise].sum(), -following[answer[1:]].sum()


def by_hand(folder: Path, source: Path, tokenizer: Any, **way: Any) -> tuple[float, dict[str, Tensor]]:
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
        assert t.dim() == (0 if way["causal"].row_noise else 1)
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
    loss = way["causal"].masked_weight * torch.stack(masks).sum() / divisor + torch.stack(causal).sum() / answers
    loss.backward()
    return loss.item(), {name: cast(Tensor, weight.grad) for name, weight in stock.model.named_parameters()}


@pytest.fixture(scope="module")
def source(kind_dirs: dict[str, Path]) -> Path:
    return kind_dirs[CAUSAL]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(str(tiny_model_dir))


@pytest.fixture(scope="module")
def expected(source, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_hand")
    return {name: by_hand(folder, source, tokenizer, **way) for name, way in WAYS.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split", SPLITS_ALONE)
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradient_are_those_of_the_formula(source, tokenizer, tmp_path, expected, way, split, packed):
    trainer = make_trainer(tmp_path, source, tokenizer, *split, packed=packed, **WAYS[way])
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    moved = {name: before[name] - weight.detach() for name, weight in trainer.model.named_parameters()}
    assert_same((loss, moved), expected[way])


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
    take_packed_rows(trainer.model)
    torch.testing.assert_close(trainer.row_losses(trainer.model, packed), losses, rtol=1e-9, atol=1e-9)


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
