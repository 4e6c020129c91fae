"""The loss and its gradient equal the formula, however a global batch is split."""

import copy
import itertools
import json
import os
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, TrainingArguments

from d1.models import load_model, load_tokenizer, prepare
from d1.models.head import target_logps
from d1.runs.data import IGNORED, BatchRow
from d1.sft import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer
from d1.sft.editing import GOLDEN, EditNoise
from tests import forks
from tests.rounding import rounding

ROWS, MASK = 8, 3
SPLITS_OF_TWO = [(4, 1), (2, 2)]  # (batch, accumulation)
EOS_PADDINGS: list[int | str] = [1, "batch"]  # rows of 2 to 38 tokens with padding between them, and without
BLOCKS: dict[str, Any] = {"block_size": 4, "complementary": True}
WAYS: dict[str, dict[str, Any]] = {"full attention": {}, "blocks": {"block_size": 4}, "complementary": BLOCKS}
WAYS |= {"packed": {"packed": True}, "packed blocks": BLOCKS | {"packed": True}}
SAME = {"packed": "full attention", "packed blocks": "complementary"}  # without packing
# A batch is split before its loss is known. Whole it has each way with each padding, in parts each way with each number
# of them and with one padding or the other, between two processes each way once.
ALONE = [(way, padding, (8, 1)) for way in WAYS for padding in EOS_PADDINGS]
ALONE += [
    (way, EOS_PADDINGS[number % 2], split)
    for number, (way, split) in enumerate(itertools.product(WAYS, [(4, 2), (2, 4), (1, 8)]))
]
PADDINGS_AND_SPLITS = itertools.cycle(itertools.product(EOS_PADDINGS, SPLITS_OF_TWO))
CASES_OF_TWO = [(way, *next(PADDINGS_AND_SPLITS)) for way in WAYS]
DRAFTS = BLOCKS | {"edits": EditNoise("draft", 0.5, 0.5, 0.7, 2)}  # its loss in one process: `test_editing.py`
SHORT_EPOCH = [(4, 1), (2, 2), (1, 4)]  # of 4 rows a step: the second step has 2 rows and 2 empty rows
KINDS = {"MULTI_CPU": {"ACCELERATE_USE_CPU": "true"}, "ZERO2": forks.deepspeed(2), "ZERO3": forks.deepspeed(3)}


def rows_of_all_lengths(count=ROWS):
    sizes = [(1 + i % 3, 1 + (i * i) % 37) for i in range(count)]
    columns = {
        "input_ids": [[8 + (7 * i + k) % 40 for k in range(sum(both) - 1)] + [2] for i, both in enumerate(sizes)],
        "answer": [[False] * prompt + [True] * answer for prompt, answer in sizes],
        "length": [*map(sum, sizes)],
        "start": [prompt for prompt, _ in sizes],
        "status": ["ok"] * count,
    }
    return Dataset.from_dict(columns)


def model_of(model_dir, block_size, dtype=None):
    """The model with block-causal attention of that block size, if any."""
    config = LlamaConfig.from_pretrained(model_dir)
    config.block_size = block_size
    return prepare(LlamaForCausalLM.from_pretrained(model_dir, config=config, dtype=dtype))


def test_noise_for_other_blocks_is_refused(tiny_model_dir, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    collate = dLLMDataCollator(load_tokenizer(str(tiny_model_dir)), block_size=8)
    for size in (4, None):
        with pytest.raises(ValueError, match=rf"for blocks of 8 tokens, but this llama has blocks of {size}"):
            dLLMTrainer(model=model_of(tiny_model_dir, size), args=args, data_collator=collate)


def test_rows_to_evaluate_on_have_the_times_of_an_evaluation(tiny_model_dir, tmp_path):
    """One draw per row gave another loss, without a word."""
    tokenizer = load_tokenizer(str(tiny_model_dir))
    training, evaluation = [dLLMSFTDataset(rows_of_all_lengths(), tokenizer, 64, eval) for eval in (False, True)]
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    options = {"model": model_of(tiny_model_dir, None), "args": args, "processing_class": tokenizer}
    options["train_dataset"] = training
    for dataset in (training, {"one": evaluation, "other": training}):
        with pytest.raises(ValueError, match=r"use dLLMSFTDataset\(rows, tokenizer, max_length, eval=True\)"):
            dLLMTrainer(**options, eval_dataset=dataset)
    dLLMTrainer(**options, eval_dataset={"one": evaluation})


def test_the_rate_of_answer_tokens_leaves_out_evaluations_and_checkpoints(tiny_model_dir, tmp_path):
    """Each batch of an evaluation and each checkpoint takes an hour, and other readings of the clock a millisecond."""
    rows, clock = rows_of_all_lengths(3 * ROWS), itertools.count()
    hours = []

    def read_clock():
        return next(clock) / 1000 + 3600 * len(hours)

    trainer = make_trainer(tiny_model_dir, tmp_path, ROWS, 1, rows=rows)
    evaluation = dLLMSFTDataset(rows, trainer.processing_class, 64, eval=True)
    trainer.eval_dataset = {"one": evaluation, "other": evaluation}
    for name, value in {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}.items():
        setattr(trainer.args, name, value)
    evaluate_batch, save_extra = trainer.prediction_step, trainer.save_extra

    def evaluate_slowly(*args, **options):
        hours.append("evaluation")
        return evaluate_batch(*args, **options)

    def save_slowly(folder):
        hours.append("checkpoint")
        save_extra(folder)

    with (
        patch("d1.sft.trainer.time.perf_counter", read_clock),
        patch.multiple(trainer, prediction_step=evaluate_slowly, save_extra=save_slowly),
    ):
        trainer.start_counting()
        trainer.train()
    assert hours.count("checkpoint") == 3
    assert hours.count("evaluation") >= 6
    rates = [log["answer_tokens_per_second"] for log in trainer.state.log_history if "loss" in log]
    assert len(rates) == 3
    assert min(rates) > 100


def make_trainer(model_dir, folder, batch, accumulation, rows=None, eos_padding="batch", **ways):
    deepspeed, tokenizer = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true", load_tokenizer(str(model_dir))
    sgd = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    quiet = {"save_strategy": "no", "disable_tqdm": True, "report_to": "none", "remove_unused_columns": False}
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        use_cpu=not deepspeed,  # asked for the CPU, Accelerate would leave DeepSpeed out
        ddp_backend="gloo" if deepspeed else None,
        ddp_find_unused_parameters=False,
        num_train_epochs=1,
        logging_steps=1,
        **sgd | quiet,
    )
    return dLLMTrainer(
        model=model_of(model_dir, ways.get("block_size"), dtype=torch.float32 if deepspeed else torch.float64),
        args=args,
        data_collator=dLLMDataCollator(tokenizer, **ways),
        train_dataset=dLLMSFTDataset(rows or rows_of_all_lengths(), tokenizer, 64, eos_padding=eos_padding),
        processing_class=tokenizer,
    )


def one_step(model_dir, folder, batch, accumulation, **options):
    """An epoch of plain SGD at rate 1: one step, unless `rows` has more rows than the global batch."""
    train_and_save(make_trainer(model_dir, folder, batch, accumulation, **options))


def train_and_save(trainer):
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()


def found(model_dir, folder):
    """The step's loss and its gradient, from the change of the weights."""
    before = load_model(str(model_dir)).state_dict()
    after = load_model(str(folder), dtype=torch.float64).state_dict()
    loss = json.loads((folder / "trainer_state.json").read_text())["log_history"][0]["loss"]
    return loss, {name: before[name] - after[name] for name in before}


def logits_of(model, clean, shown, size):
    """(length, vocab) of one row, block by block after the clean text before it."""
    parts = [
        model(input_ids=torch.cat([clean[:start], shown[start : start + size]])[None]).logits[0, start:]
        for start in range(0, len(clean), size)
    ]
    return torch.cat(parts)


def drawn(logits, number):
    """The first id whose probability, with those of the ids before it, exceeds `number`; never the mask token."""
    weights = [0.0 if k == MASK else p for k, p in enumerate(logits.softmax(-1).tolist())]
    sums = [*itertools.accumulate(weights)]
    return next(k for k, total in enumerate(sums) if total > number * sums[-1])


def by_hand(model_dir, folder, noise=None, eos_padding="batch", **way):
    """Loss and gradient of the formula, all rows without padding, token by token: the sum of weight x cross-entropy
    over all answer tokens; the weight is 1 / t' for hidden tokens, and the noise's for visible ones."""
    way.pop("packed", None)
    model = model_of(model_dir, way.get("block_size"), dtype=torch.float64).eval()
    trainer = make_trainer(model_dir, folder, ROWS, 1, edits=noise, eos_padding=eos_padding, **way)
    (batch,) = trainer.get_train_dataloader()
    total, answers = torch.zeros((), dtype=torch.float64), (batch["labels"] != IGNORED).sum()
    nothing = torch.zeros_like(batch["labels"])
    columns = [batch[name] for name in ("input_ids", "labels", "attention_mask", "t")]
    columns += [batch.get(name, nothing) for name in ("edited", "draws")]
    for ids, labels, visible, t, edited, numbers in zip(*columns, strict=True):
        length = int(visible.sum())
        shown, clean = ids[:length].clone(), torch.where(labels == IGNORED, ids, labels)[:length]
        times, size = t.expand(length) if t.dim() == 0 else t, way.get("block_size", length)
        turns = 1 if noise is None else noise.turns
        for turn in range(turns):
            if noise is not None and (turn or noise.kind == "draft"):
                with torch.no_grad():
                    logits = logits_of(model, clean, shown, size)
                for at in edited[:length].nonzero().flatten().tolist():
                    shown[at] = drawn(logits[at], (numbers[at].item() + turn * GOLDEN) % 1)
            logits = logits_of(model, clean, shown, size)
            for at in (labels[:length] != IGNORED).nonzero().flatten().tolist():
                weight = 1 / ((1 - 1e-3) * times[at].double() + 1e-3)
                if noise is not None and edited[at]:
                    assert shown[at] != MASK
                    weight = noise.weight
                elif shown[at] != MASK:
                    assert shown[at] == clean[at]
                    weight = 0.0 if noise is None else noise.keep_weight
                total = total - weight * logits[at].log_softmax(-1)[clean[at]] / turns / answers
    total.backward()
    return total.item(), {name: cast(Tensor, weight.grad) for name, weight in model.named_parameters()}


def assert_same(result, expected, atol=1e-07, rel=1e-6):
    assert result[0] == pytest.approx(expected[0], rel=rel)
    assert result[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(result[1][name].to(gradient.dtype), gradient, rtol=1e-6, atol=atol)


def step_in_processes(kind, model_dir, folder):
    """Two processes take the step in all cases, and save their results."""
    log = folder / "log"
    forks.finish(forks.start(process, kind, model_dir, folder, log=log, folder=folder, processes=2, **KINDS[kind]), log)


def process(kind, model_dir, folder):
    for name, eos_padding, (batch, accumulation) in CASES_OF_TWO:
        target = folder / f"{name}-{eos_padding}-{batch}"
        one_step(model_dir, target, batch, accumulation, eos_padding=eos_padding, **WAYS[name])
    if kind == "MULTI_CPU":
        one_step(model_dir, folder / "short", 2, 1, rows=rows_of_all_lengths(6))
        one_step(model_dir, folder / "drafts", 2, 2, **DRAFTS)
    trainer = make_trainer(model_dir, folder, 1, 1)
    assert trainer.args.world_size == 2
    state = trainer.accelerator.state
    assert state.distributed_type.value == ("MULTI_CPU" if kind == "MULTI_CPU" else "DEEPSPEED")
    assert kind == "MULTI_CPU" or state.deepspeed_plugin.zero_stage == int(kind[-1])
    trainer.args.average_tokens_across_devices = False  # as a user may set it: the count would be that of a process
    with pytest.raises(ValueError, match="average_tokens_across_devices=False: the loss is a mean over"):
        trainer.count_labels_of_step()
    trainer.accelerator.end_training()


@pytest.fixture(scope="module")
def expected(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_hand")
    found = {
        (name, eos_padding): by_hand(tiny_model_dir, folder, eos_padding=eos_padding, **way)
        for (name, way), eos_padding in itertools.product(WAYS.items(), EOS_PADDINGS)
        if name not in SAME
    }
    return found | {(name, padding): found[same, padding] for name, same in SAME.items() for padding in EOS_PADDINGS}


@pytest.mark.parametrize(("way", "eos_padding", "split"), ALONE)
def test_one_process(tiny_model_dir, tmp_path, expected, split, eos_padding, way):
    one_step(tiny_model_dir, tmp_path, *split, eos_padding=eos_padding, **WAYS[way])
    assert_same(found(tiny_model_dir, tmp_path), expected[way, eos_padding])


def batch_in_bf16(model_dir, folder):
    """A process of DeepSpeed in bf16."""
    trainer = make_trainer(model_dir, folder, 4, 1, **DRAFTS)
    assert trainer.accelerator.state.deepspeed_plugin.hf_ds_config.dtype() == torch.bfloat16
    batch = next(iter(trainer.get_train_dataloader()))
    prepared = trainer.on_device(batch)
    for name in ("t", "draws"):
        assert batch[name].dtype == torch.float32
        assert torch.equal(prepared[name], batch[name]), name
    trainer.accelerator.end_training()


def test_deepspeed_in_bf16_rounds_neither_times_nor_draws(tiny_model_dir, tmp_path):
    """Rounded, a weight 1 / t' is off by up to 0.4%, and a draw of .998 is 1: id 0, however unlikely."""
    pytest.importorskip("deepspeed")
    log, bf16 = tmp_path / "log", {**KINDS["ZERO2"], "ACCELERATE_MIXED_PRECISION": "bf16"}
    how = {"log": log, "folder": tmp_path, "processes": 2, **bf16}
    forks.finish(forks.start(batch_in_bf16, tiny_model_dir, tmp_path, **how), log)


def test_a_batch_that_hides_nothing_calls_the_head_for_one_token_of_weight_zero(tiny_model_dir, tmp_path):
    """Where the weights are split over processes, all of them have to call it."""
    trainer = make_trainer(tiny_model_dir, tmp_path, 2, 1)
    inputs = next(iter(trainer.get_train_dataloader()))
    inputs["masked"] = torch.zeros_like(inputs["masked"])
    counts = []

    def count_and_score(model, states, targets):
        counts.append(len(targets))
        return target_logps(model, states, targets)

    with patch("d1.sft.losses.target_logps", count_and_score):
        losses = trainer.row_losses(trainer.model, inputs)
    assert counts == [1]
    assert losses.tolist() == [0.0, 0.0]
    losses.sum().backward()


def test_row_losses_of_a_user_take_a_model_and_a_batch(tiny_model_dir, tmp_path):
    """As `dLLMTrainer`'s own: training gave a third argument, and ended with a TypeError."""

    class TwiceTheLoss(dLLMTrainer):
        def row_losses(self, model, inputs):
            return 2 * super().row_losses(model, inputs)

    plain, twice = make_trainer(tiny_model_dir, tmp_path, ROWS, 1), make_trainer(tiny_model_dir, tmp_path, ROWS, 1)
    twice.__class__ = TwiceTheLoss
    losses = []
    for trainer in (plain, twice):
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-6)


@pytest.mark.parametrize("edits", [None, EditNoise("draft", 0.5, 1.0, 1.0, 3)])
def test_a_batch_of_empty_rows_has_no_loss_and_is_not_changed(tiny_model_dir, tmp_path, edits):
    """Neither in a first pass nor in later turns, which score the same tokens."""
    trainer = make_trainer(tiny_model_dir, tmp_path, 2, 1, edits=edits)
    empty = trainer.train_dataset[BatchRow(-1)]
    inputs = trainer.data_collator([empty, empty])
    losses = trainer.row_losses(trainer.model, inputs)
    assert losses.tolist() == [0.0, 0.0]
    assert not inputs["masked"].any()


def test_a_block_of_the_whole_row_is_full_attention(tiny_model_dir, tmp_path, expected):
    one_step(tiny_model_dir, tmp_path, 4, 2, block_size=64)
    assert_same(found(tiny_model_dir, tmp_path), expected["full attention", "batch"])


@pytest.mark.parametrize("lora", [False, True])
def test_blocks_of_one_token_are_left_to_right(tmp_path, lora):
    """With everything hidden, the loss and gradient of an autoregressive model: the next token's cross-entropy."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, **heads, initializer_range=0.2, use_cache=False)
    causal: Any = Qwen2ForCausalLM(config).double()
    blocks = copy.deepcopy(causal)
    blocks.config.update({"block_size": 1, "predicts_next_token": True})
    prepare(blocks)
    if lora:
        adapter = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        blocks, causal = get_peft_model(blocks, adapter), get_peft_model(causal, adapter)
        causal.load_state_dict(blocks.state_dict())
    tokenizer = SimpleNamespace(mask_token_id=3, eos_token_id=2, pad_token_id=0)
    trainer = dLLMTrainer(
        model=blocks,
        args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        data_collator=dLLMDataCollator(cast(Any, tokenizer), block_size=1),
    )
    clean = torch.randint(4, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    labels, visible = clean.clone(), torch.ones_like(clean)
    labels[0, :2] = labels[1, :5] = labels[0, 7:] = IGNORED
    visible[0, 7:] = 0
    masked, times = labels != IGNORED, torch.ones(clean.shape)
    batch = {"input_ids": clean.masked_fill(masked, 3), "labels": labels, "attention_mask": visible}
    loss = trainer.compute_loss(blocks, batch | {"masked": masked, "t": times})
    loss.backward()
    expected = causal(input_ids=clean, attention_mask=visible, labels=labels).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, weight), same in zip(blocks.named_parameters(), causal.parameters(), strict=True):
        if weight.requires_grad and not name.endswith("embed_tokens.weight"):  # blocks read masks as well
            torch.testing.assert_close(weight.grad, same.grad, rtol=1e-6, atol=1e-7)


def test_two_processes(tiny_model_dir, tmp_path, expected):
    step_in_processes("MULTI_CPU", tiny_model_dir, tmp_path)
    for name, eos_padding, (batch, _) in CASES_OF_TWO:
        assert_same(found(tiny_model_dir, tmp_path / f"{name}-{eos_padding}-{batch}"), expected[name, eos_padding])
    one_step(tiny_model_dir, tmp_path / "drafts alone", 8, 1, **DRAFTS)
    drafts, alone = (found(tiny_model_dir, tmp_path / name) for name in ("drafts", "drafts alone"))
    assert_same(drafts, alone)
    for split in SHORT_EPOCH:
        one_step(tiny_model_dir, tmp_path / "alone", *split, rows=rows_of_all_lengths(6))
        assert_same(found(tiny_model_dir, tmp_path / "short"), found(tiny_model_dir, tmp_path / "alone"))


@pytest.mark.parametrize("kind", ["ZERO2", "ZERO3"])
def test_two_processes_of_deepspeed(tiny_model_dir, tmp_path, expected, kind):
    pytest.importorskip("deepspeed")
    step_in_processes(kind, tiny_model_dir, tmp_path)
    for name, eos_padding, (batch, _) in CASES_OF_TWO:
        result = found(tiny_model_dir, tmp_path / f"{name}-{eos_padding}-{batch}")
        # Weights and gradients are in fp32, and gradients are below 1.
        assert_same(result, expected[name, eos_padding], atol=rounding(1.0), rel=rounding(1.0))
