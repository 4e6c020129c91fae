"""Batches of masked SFT: their rows, their padding, and noise that estimates the loss without bias."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, List, Value
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, TrainingArguments

from d1.models import load_model, prepare
from d1.runs.data import IGNORED, BatchRow, GlobalBatchSampler
from d1.sft.data import dLLMDataCollator, dLLMSFTDataset
from d1.sft.trainer import dLLMTrainer, mean_loss
from tests.rounding import LOGITS, assert_near

# A tokenizer with the vocabulary 0 (mask), 1 and 2 (EOS)
TOKENS: Any = SimpleNamespace(mask_token_id=0, eos_token_id=2, pad_token_id=1)


def make_rows(lengths, ids=None):
    texts = [ids or [1] * (length - 1) + [2] for length in lengths]
    answers = [[False] + [True] * (length - 1) for length in lengths]
    one = [1] * len(lengths)
    columns = {"input_ids": texts, "answer": answers, "length": lengths, "start": one, "status": ["ok"] * len(lengths)}
    return Dataset.from_dict(columns)


@pytest.mark.parametrize("kind", ["uint16", "int16", "int32"])
@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_ids_of_any_integer_type_make_the_same_batch(kind, form):
    """Also with a mask token for which uint16 has no room, and in a data set that gives arrays."""
    tokens = SimpleNamespace(mask_token_id=126336, eos_token_id=2, pad_token_id=1)
    rows = make_rows([4, 6])
    features = rows.features.copy()
    features["input_ids"] = List(Value(kind))
    given = rows.cast(features).with_format(form)
    for padding in (0, 4, 6):  # with a format, + would add the ids of EOS instead of appending them
        whole, narrow = (dLLMSFTDataset(one, tokens, 8, eos_padding=padding) for one in (rows, given))
        expected, found = (dLLMDataCollator(tokens)(one.__getitems__([0, 1])) for one in (whole, narrow))
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    texts = [np.array(row["input_ids"], kind) for row in rows]
    answers = [np.array(row["answer"]) for row in rows]
    arrays = [
        {"input_ids": a, "answer": b, "key": (0, number), "t": None}
        for number, (a, b) in enumerate(zip(texts, answers, strict=True))
    ]
    lists = [row | {"input_ids": row["input_ids"].tolist(), "answer": row["answer"].tolist()} for row in arrays]
    expected, found = (dLLMDataCollator(tokens)(one) for one in (lists, arrays))
    assert expected["input_ids"].tolist() == found["input_ids"].tolist()
    with pytest.raises(ValueError, match=r"token ids must be integers, got torch\.float32"):
        dLLMDataCollator(tokens)([arrays[0] | {"input_ids": [0.5, 1.0, 2.0, 2.0]}])


def sample(lengths, batch_size=8, multiple=2, epoch=0, **options):
    return list(GlobalBatchSampler(lengths, batch_size, multiple, 0, lambda: epoch, **options))


@pytest.mark.parametrize(("block_size", "complementary"), [(None, False), (2, False), (2, True)])
def test_estimate_is_unbiased(tmp_path, block_size, complementary):
    """The mean over many draws, compared with the expectation: masks enumerated, t integrated by quadrature, one block
    at a time after clean text. The prompt of one token shares the first block."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 3, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, initializer_range=1.0, pad_token_id=1)
    config.is_causal, config.block_size = False, block_size
    model = prepare(LlamaForCausalLM(config))
    ids, answers, size = [1, 2, 1, 2], 3, block_size or 4

    nodes, weights = np.polynomial.legendre.leggauss(8)  # exact for these polynomials of t
    p = (1 - 1e-3) * (nodes + 1) / 2 + 1e-3
    exact = 0.0
    for start in range(0, 4, size):
        maskable = range(max(1, start), start + size)
        for hidden in itertools.product((False, True), repeat=len(maskable)):
            places = [place for place, hides in zip(maskable, hidden, strict=True) if hides]
            noised = [0 if place in places else token for place, token in enumerate(ids[: start + size])]
            with torch.no_grad():
                logps = model(input_ids=torch.tensor([noised])).logits[0].log_softmax(-1)
            surprise = -sum(float(logps[place, ids[place]]) for place in places)
            probability = p ** len(places) * (1 - p) ** (len(maskable) - len(places))
            exact += float((weights / 2 * probability / p).sum()) * surprise / answers

    dataset = dLLMSFTDataset(make_rows([4] * 8, ids), TOKENS, 8, eos_padding=0)
    collate = dLLMDataCollator(TOKENS, block_size=block_size, complementary=complementary)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = dLLMTrainer(model=model, args=args, data_collator=collate, train_dataset=dataset)
    means = []
    for epoch in range(600):
        chosen = sample(dataset.lengths, epoch=epoch)
        batch = collate([dataset[one] for one in chosen[:8]])
        with torch.no_grad():
            means.append(float(trainer.compute_loss(model, batch)))
    error = np.std(means) / len(means) ** 0.5
    assert error < 0.05 * exact
    assert np.mean(means) == pytest.approx(exact, abs=4 * error)


@pytest.mark.parametrize("block_size", [None, 16])
def test_noise_of_a_row_depends_on_seed_epoch_and_row_alone(block_size):
    collate = dLLMDataCollator(TOKENS, block_size=block_size)

    def noise(row, epoch, seed=0):
        dataset = dLLMSFTDataset(make_rows([40, 70, 40]), TOKENS, 64, seed=seed)
        return collate([dataset[BatchRow(row, epoch)]])["input_ids"][0]

    dataset = dLLMSFTDataset(make_rows([40, 70, 40]), TOKENS, 64, seed=0)
    together = collate([dataset[BatchRow(2, 5)], dataset[BatchRow(0, 5)], dataset[BatchRow(1)], dataset[BatchRow(-1)]])
    assert torch.equal(together["input_ids"][0, :40], noise(2, 5))
    assert torch.equal(together["input_ids"][1, :40], noise(0, 5))
    for other in (noise(0, 5), noise(2, 6), noise(2, 5, seed=1)):
        assert not torch.equal(noise(2, 5), other)


def test_blocks_have_times_of_their_own_which_the_complement_mirrors():
    """The plain draws come first, then their complements. The draws themselves: `tests/d1/test_masking.py`."""
    dataset = dLLMSFTDataset(make_rows([40, 30]), TOKENS, 64, seed=0)
    rows = [dataset[BatchRow(0)], dataset[BatchRow(1)]]
    plain = dLLMDataCollator(TOKENS, block_size=16)(rows)
    both = dLLMDataCollator(TOKENS, block_size=16, complementary=True)(rows)
    for name, values in plain.items():
        assert torch.equal(both[name][:2], values)
    assert torch.equal(both["labels"][2:], plain["labels"])
    for row, length in enumerate((40, 30)):
        torch.testing.assert_close(both["t"][2 + row, :length], 1 - plain["t"][row, :length])
        opposite = (both["input_ids"][[row, 2 + row], 1:length] == 0).any(0)
        assert opposite.all()
    held_out = dLLMSFTDataset(make_rows([40, 30]), TOKENS, 64, eval=True)
    draws = dLLMDataCollator(TOKENS, block_size=16, complementary=True)([held_out[i] for i in range(8)])
    grid = dLLMDataCollator(TOKENS)([held_out[i] for i in range(8)])["t"]
    assert torch.equal(draws["t"], grid[:, None].expand(-1, 40))


def test_the_draws_of_version_0_1():
    """Order, times and hidden tokens (positions), which a resumed or repeated run must reproduce."""
    chosen = sample([9] * 6, batch_size=4, epoch=1)
    assert [one.row for one in chosen] == [5, 0, 2, 1, 3, 4]
    train = dLLMSFTDataset(make_rows([9] * 6), TOKENS, 64, seed=0)
    held_out = dLLMSFTDataset(make_rows([9] * 6), TOKENS, 64, eval=True, seed=0)
    collate = dLLMDataCollator(TOKENS)
    trained = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 7, 8], [1, 4, 7, 8]]
    evaluated = [[7, 8], [1, 3, 5, 7, 8], [1, 2, 3, 4, 7, 8]]
    for dataset, places, times, hidden in (
        (train, chosen[:3], [0.9107581377029419, 0.9534565806388855, 0.202276349067688], trained),
        (held_out, [0, 1, 2], [0.2291666716337204, 0.4791666567325592, 0.7291666865348816], evaluated),
    ):
        batch = collate([dataset[place] for place in places])
        assert batch["t"].tolist() == times
        assert [row.nonzero().flatten().tolist() for row in batch["input_ids"] == 0] == hidden


@pytest.mark.parametrize("options", [{}, {"fill": True}])
def test_global_batches_are_the_same_for_every_split(options):
    lengths = [3 + (7 * i) % 11 for i in range(20)]
    whole = sample(lengths, multiple=8, **options)
    assert [one for one in sample(lengths, multiple=2, **options) if one.row >= 0] == [s for s in whole if s.row >= 0]
    assert sorted(one.row for one in whole if one.row >= 0) == [*range(20)]
    assert len(whole) % 8 == 0
    assert sample(lengths, epoch=1, **options) != sample(lengths, epoch=0, **options)
    if "fill" in options:
        for start in range(0, 20, 8):
            batch = [one for one in whole[start : start + 8] if one.row >= 0]
            assert {one.length for one in batch} == {max(lengths[one.row] for one in batch)}


def test_evaluation_is_a_fixed_even_grid_of_times():
    rows, options = make_rows([9, 4, 30, 12, 5]), {"eval": True, "eval_draws": 4, "seed": 3}
    dataset, again = (dLLMSFTDataset(rows, TOKENS, 64, **options) for _ in range(2))
    batch, repeated = (dLLMDataCollator(TOKENS)([one[i] for i in range(20)]) for one in (dataset, again))
    assert torch.equal(batch["input_ids"], repeated["input_ids"])
    torch.testing.assert_close(batch["t"].sort().values, (torch.arange(20) + 0.5) / 20)
    assert torch.equal((batch["t"].view(5, 4) * 4).long(), torch.arange(4).expand(5, 4))  # each row in every quarter
    assert batch["attention_mask"].sum(-1).tolist() == sorted(batch["attention_mask"].sum(-1).tolist())


def test_evaluation_loss_is_over_all_draws():
    losses, answers = np.array([6.0, 10.0, 2.0]), np.array([3.0, 1.0, 4.0])
    assert mean_loss(EvalPrediction(losses, answers)) == {"loss": 18 / 8}


@pytest.mark.parametrize(("padding", "length"), [(0, 6), (3, 6), (9, 10), (99, 20), ("batch", 6), ("max", 20)])
def test_eos_padding_of_whole_and_truncated_answers(padding, length):
    """A prompt of 1 and an answer of 5 tokens, at most 20 in total."""
    rows = make_rows([6])
    truncated = rows.remove_columns("status").add_column("status", ["truncated"])
    whole, cut = (dLLMSFTDataset(one, TOKENS, 20, eos_padding=padding) for one in (rows, truncated))
    chosen = BatchRow(0, length=8 if padding == "batch" else 0)
    expected = 8 if padding == "batch" else length
    assert whole[chosen]["input_ids"] == [1] * 5 + [2] * (expected - 5)
    assert whole[chosen]["answer"] == [False] + [True] * (expected - 1)
    assert cut[chosen]["input_ids"] == [1] * 5 + [2]
    assert whole.lengths == [length]


def test_a_mask_token_in_a_text_has_nothing_to_predict():
    """It is hidden like others, but not marked as masked, and so it is not in the loss."""
    ids = [1, 0, 1, 0, 1, 1, 0, 2] * 4
    batch = dLLMDataCollator(TOKENS)([dLLMSFTDataset(make_rows([32], ids), TOKENS, 64)[BatchRow(0, t=0.8)]])
    answer = batch["labels"] != IGNORED
    assert torch.equal(batch["masked"], answer & (batch["input_ids"] != batch["labels"]))
    assert batch["masked"].sum() < (answer & (batch["input_ids"] == 0)).sum()


class HalfSchedule(dLLMDataCollator):
    """Half of all tokens, whatever the time, each with weight 3."""

    def schedule(self, t):
        return torch.full_like(t, 0.5), torch.full_like(t, 3.0)


def test_a_noise_schedule_of_ones_own(tmp_path, tiny_model_dir):
    """It is one method of the collator, which both the masks and the loss follow."""
    rows = [dLLMSFTDataset(make_rows([400] * 2), TOKENS, 512)[BatchRow(row, t=0.05)] for row in range(2)]
    collate, model = HalfSchedule(TOKENS), load_model(str(tiny_model_dir))
    batch, plain = collate(rows), dLLMDataCollator(TOKENS)(rows)
    assert plain["masked"].float().mean() < 0.1 < 0.45 < batch["masked"].float().mean() < 0.55
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = dLLMTrainer(model=model, args=args, data_collator=collate)
    logps = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    logps = logps.gather(-1, batch["labels"].clamp(min=0)[..., None])
    expected = -3 * logps.squeeze(-1)[batch["masked"]].sum() / (batch["labels"] != IGNORED).sum()
    assert_near(trainer.compute_loss(model, batch), expected, least=LOGITS)
