"""The trainers of the second halves of SFT: their losses in plain tensors, and what each changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from d1.models import load_model, load_tokenizer
from d1.models.attention import ATTENTION, CAUSAL_CONTEXT, Blocks
from d1.models.head import target_logps
from d1.sft import dLLMTrainer
from d1.sft.config import CausalLoss
from studies.smollm2.trainers import (
    AlignedTrainer,
    AnnealedContext,
    AnnealedTrainer,
    ForwardKLTrainer,
    MaskedTokens,
    TeacherTrainer,
    annealed_context,
    parts_of,
)
from tests.d1.models.test_causal_context import Stock
from tests.d1.released import write_shifted
from tests.d1.sft.test_causal_context import SIZE, make_trainer

WEIGHTS = CausalLoss(masked_weight=1.0, causal_weight=0.3)


@pytest.fixture(scope="module")
def sources(tiny_causal_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two models that predict the next token: the student's, and the teacher's with other weights."""
    folder = tmp_path_factory.mktemp("models")
    student = write_shifted(folder / "student", tiny_causal_dir)
    load_tokenizer(str(tiny_causal_dir)).save_pretrained(student)
    teacher = load_model(student)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight))))
    teacher.save_pretrained(folder / "teacher")
    return student, folder / "teacher"


def plain_trainer(folder: Path, source: Path) -> dLLMTrainer:
    """Packed rows, in fp64."""
    tokenizer = load_tokenizer(str(source))
    return make_trainer(folder, source, tokenizer, 8, 1, causal=WEIGHTS, packed=True)


def batch_of(trainer: dLLMTrainer) -> dict[str, Any]:
    return next(iter(trainer.get_train_dataloader()))


def rows_of(batch: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor, Tensor, int]]:
    """Noised ids, clean ids, masks, t' and the first block's start of each packed row."""
    rows = []
    names = ("input_ids", "labels", "masked", "t")
    columns = zip(*(batch[name][0].split(batch["lengths"]) for name in names), strict=True)
    for (noised, labels, masked, t), start in zip(columns, batch["starts"], strict=True):
        clean = torch.where(labels < 0, noised, labels)
        rows.append((noised, clean, masked, 1e-3 + (1 - 1e-3) * t.double(), start))
    return rows


def next_token_losses(stock: Stock, clean: Tensor, labels: Tensor) -> Tensor:
    logps = stock.logits(clean[None])[0, :-1].log_softmax(-1)
    return -(logps.gather(-1, clean[1:, None])[:, 0] * (labels[1:] >= 0)).sum()


def stocks_of(folders: Sequence[Path]) -> list[Stock]:
    stocks = [Stock(folder) for folder in folders]
    for stock in stocks:
        stock.model.double()
    return stocks


def test_forward_kl_is_that_of_the_next_token_after_the_clean_text(sources, tmp_path):
    student, teacher = sources
    plain = plain_trainer(tmp_path, student)
    trainer = ForwardKLTrainer(load_model(teacher, torch.float64), **parts_of(plain))
    batch = batch_of(trainer)
    losses = trainer.row_losses(trainer.model, batch)

    student_stock, teacher_stock = stocks_of(sources)
    all_labels = batch["labels"][0].split(batch["lengths"])
    expected = []
    for (noised, clean, masked, level, start), labels in zip(rows_of(batch), all_labels, strict=True):
        logps = student_stock.blocks(clean, noised, start, SIZE).log_softmax(-1)
        target = teacher_stock.logits(clean[None])[0].log_softmax(-1)
        target = torch.cat([target[:1], target[:-1]])  # of the next token; the first token is never hidden
        divergences = (target.exp() * (target - logps)).sum(-1)
        loss = (divergences / level)[masked].sum() + 0.3 * next_token_losses(student_stock, clean, labels)
        expected.append(loss)
    assert batch["masked"].any()
    # The trainer computes divergences in fp32
    torch.testing.assert_close(losses, torch.stack(expected).to(losses.dtype), rtol=1e-5, atol=1e-5)

    losses.sum().backward()
    assert all(weight.grad is None for weight in trainer.teacher.parameters())
    assert any(weight.grad.abs().sum() > 0 for weight in trainer.model.parameters() if weight.grad is not None)


class Recording(TeacherTrainer):
    """The losses of `dLLMTrainer`, and what the losses of masks are given."""

    def masked_losses(self, model: Any, masks: MaskedTokens) -> Tensor:
        self.masks = masks
        return -target_logps(model, masks.states, masks.targets)[0]


def test_cross_entropy_with_a_teacher_is_the_usual_loss_and_layers_are_those_of_plain_passes(sources, tmp_path):
    student, teacher = sources
    plain = plain_trainer(tmp_path, student)
    trainer = Recording(load_model(teacher, torch.float64), **parts_of(plain))
    batch = batch_of(plain)
    usual = plain.row_losses(plain.model, batch)
    torch.testing.assert_close(trainer.row_losses(trainer.model, batch), usual, rtol=1e-9, atol=1e-9)

    # The states of each mask, by Transformers' own class on one block after the other
    targets, states, layers, teacher_states, teacher_layers = trainer.masks
    student_stock, teacher_stock = stocks_of(sources)
    expected: list[list[Tensor]] = []
    teacher_expected: list[list[Tensor]] = []
    for noised, clean, masked, _, start in rows_of(batch):
        every = teacher_stock.model(input_ids=clean[None], output_hidden_states=True).hidden_states
        for position in masked.nonzero().flatten().tolist():
            begin = max(0, position - (position - start) % SIZE)
            end = min(len(clean), start + ((position - start) // SIZE + 1) * SIZE)
            ids = torch.cat([clean[:begin], noised[begin:end]])
            seen = [[j <= i or (i >= begin and j >= begin) for j in range(end)] for i in range(end)]
            hidden = student_stock.model(
                input_ids=ids[None], attention_mask=torch.tensor(seen)[None, None], output_hidden_states=True
            ).hidden_states
            expected.append([layer[0, position - 1] for layer in hidden[1:]])
            teacher_expected.append([layer[0, position - 1] for layer in every[1:]])
    assert len(expected) == len(targets) > 8
    for found, wanted in (([*layers, states], expected), ([*teacher_layers, teacher_states], teacher_expected)):
        for layer, wanted_layer in zip(found, zip(*wanted, strict=True), strict=True):
            torch.testing.assert_close(layer, torch.stack(wanted_layer), rtol=1e-9, atol=1e-9)


def test_alignment_adds_ten_times_one_minus_the_mean_cosine(sources, tmp_path):
    student, teacher = sources
    plain = plain_trainer(tmp_path, student)
    recording = Recording(load_model(teacher, torch.float64), **parts_of(plain))
    aligned = AlignedTrainer(load_model(teacher, torch.float64), **parts_of(plain))
    batch = batch_of(plain)
    usual = recording.row_losses(recording.model, batch)
    _, states, layers, teacher_states, teacher_layers = recording.masks
    cosines = []
    for own, other in zip([*layers, states], [*teacher_layers, teacher_states], strict=True):
        own, other = own.float(), other.float()
        cosines.append((own * other).sum(-1) / own.norm(dim=-1) / other.norm(dim=-1))
    penalties = 10 * (1 - torch.stack(cosines).mean(0))
    expected = usual.clone()
    first = 0
    for row, (_, _, masked, level, _) in enumerate(rows_of(batch)):
        count = int(masked.sum())
        expected[row] += (penalties[first : first + count] / level[masked]).sum()
        first += count
    torch.testing.assert_close(aligned.row_losses(aligned.model, batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trainer_class", [ForwardKLTrainer, AlignedTrainer])
def test_in_blocks_of_one_token_nothing_is_left_to_learn_from_a_model_itself(sources, tmp_path, trainer_class):
    """Each mask is then scored by the clean text before it, so divergences are 0 and cosines are 1."""
    student, _ = sources
    plain = plain_trainer(tmp_path, student)
    trainer = trainer_class(load_model(student, torch.float64), **parts_of(plain))
    batch = batch_of(plain)
    trainer.model.config.block_size = 1
    losses = trainer.row_losses(trainer.model, batch)
    expected = plain.row_losses(trainer.model, batch)
    if trainer_class is ForwardKLTrainer:
        clean = torch.where(batch["labels"] < 0, batch["input_ids"], batch["labels"])
        nothing_hidden = dict(batch, masked=torch.zeros_like(batch["masked"]), input_ids=clean)
        expected = plain.row_losses(trainer.model, nothing_hidden)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


def test_annealed_blocks_turn_from_causal_to_bidirectional(tiny_causal_dir):
    """Later tokens of the own block are hidden, all, a share of, or none; nothing else changes."""
    config = load_model(tiny_causal_dir).config
    usual = ATTENTION[CAUSAL_CONTEXT]
    visible = torch.ones(1, 64, dtype=torch.long)
    mask = usual.mask(config, visible, noised=64, queries=128, blocks=Blocks(16, 3))
    key = torch.arange(128)
    is_later = key > key[:, None]
    later = mask & is_later
    assert 64 * 5 < later.sum() < 64 * 8

    for share in (0.0, 0.25, 1.0):
        with annealed_context(share):
            assert isinstance(ATTENTION[CAUSAL_CONTEXT], AnnealedContext)
            annealed = ATTENTION[CAUSAL_CONTEXT].mask(config, visible, noised=64, queries=128, blocks=Blocks(16, 3))
        assert torch.equal(annealed & ~is_later, mask & ~is_later)
        assert not (annealed & ~mask).any()
        found = (annealed & later).sum() / later.sum()
        assert found == pytest.approx(share, abs=5 * (share * (1 - share) / later.sum().item()) ** 0.5)
    assert ATTENTION[CAUSAL_CONTEXT] is usual


def test_the_share_of_later_tokens_grows_with_the_steps(sources, tmp_path, monkeypatch):
    student, _ = sources
    plain = plain_trainer(tmp_path, student)
    plain.args.max_steps = 3
    trainer = AnnealedTrainer(2, **parts_of(plain))
    shares = []

    def losses(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        attention: Any = ATTENTION[CAUSAL_CONTEXT]
        shares.append(attention.share)
        return row_losses(self, model, inputs)

    row_losses = dLLMTrainer.row_losses
    monkeypatch.setattr(dLLMTrainer, "row_losses", losses)
    trainer.train()
    assert shares == [0.5, 1.0, 1.0]
