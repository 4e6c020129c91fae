"""SFT and RL on a simulated device without visible data: real trainers, from constructor to last optimizer step."""

import pytest
import torch
from accelerate.test_utils.testing import AccelerateTestCase
from datasets import Dataset
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TrainingArguments

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.rl.bridge import rollout_buffer
from d1.rl.losses import OBJECTIVES, PENALTIES, LossInputs
from d1.sft import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer
from tests.losses import settings
from tests.rehearsal.device import DEVICE, rehearsal
from tests.rehearsal.waits import LOADING, LOSSES, RL, SFT, TRANSFORMERS, TRL, expected, places
from tests.tiny_grpo import SETTINGS, TWO_BATCHES_A_STEP, logged, make_trainer, method_settings, weights

# The fused optimizer is a kernel of real devices.
OPTIMIZER = {"optim": "adamw_torch", "learning_rate": 1e-2}


@pytest.fixture
def on(monkeypatch):
    """`on(device)` puts trainers created afterwards on the device."""

    def choose(device):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
        AccelerateTestCase().tearDown()  # Accelerate keeps the device for the process

    yield choose
    AccelerateTestCase().tearDown()


def rehearse(on, allowed, make):
    """A trainer from `make`, trained on the device and on a CPU to the same weights, and the places where it waited."""
    on(DEVICE)
    with rehearsal({LOADING}):
        rehearsed = make("rehearsed")
    with rehearsal(places(allowed)) as waits:
        rehearsed.train()
        found = weights(rehearsed.model)
    on("cpu")
    with sdpa_kernel(SDPBackend.MATH):
        real = make("real")
        before = weights(real.model)
        real.train()
    for name, weight in weights(real.model).items():
        assert not torch.equal(weight, before[name]), name
        assert torch.equal(found[name].numbers, weight), name
    assert [entry["loss"] for entry in logged(rehearsed)] == [entry["loss"] for entry in logged(real)]
    return rehearsed, waits


@pytest.mark.parametrize("block", [None, 4], ids=["full attention", "two streams"])
def test_sft_waits_where_listed_and_trains_as_a_run(block, on, tiny_model_dir, tiny_block_dir, tmp_path):
    folder = tiny_block_dir if block else tiny_model_dir
    tokenizer, rows = load_tokenizer(str(folder)), []
    for length in range(6, 14):  # of a prompt of three tokens and an answer
        answer = {"answer": [False] * 3 + [True] * (length - 3), "length": length, "start": 3, "status": "ok"}
        rows.append({"input_ids": [*range(8, 8 + length)]} | answer)

    def make(name):
        args = TrainingArguments(
            output_dir=str(tmp_path / name),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            logging_steps=1,
            logging_nan_inf_filter=False,  # as in sft_train.py
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            **OPTIMIZER,
        )
        return dLLMTrainer(
            model=load_model(str(folder)),
            args=args,
            data_collator=dLLMDataCollator(tokenizer, block_size=block),
            train_dataset=dLLMSFTDataset(Dataset.from_list(rows), tokenizer, 64, eos_padding=1),
            processing_class=tokenizer,
        )

    allowed = [*SFT, *TRANSFORMERS]
    waits = rehearse(on, allowed, make)[1]
    counts = {"run": 1, "step": 2, "log": 2, "batch": 4, "batch of full attention": 0 if block else 4}
    assert waits == expected(allowed, counts)


@pytest.mark.parametrize(("method", "scorings"), [("d1", 2 * 8 + 6), ("stable-drl", 2 * 4 + 2 + 6)])
def test_rl_waits_where_listed_and_trains_as_a_run(method, scorings, on, tiny_model_dir, tmp_path):
    """Two rollouts of two batches: both updates on the first, one step each, and the first update on the second.

    Scorings: of each rollout's batches old and, with d1, reference log-probs under the views of both updates, then each
    batch's own and, with StableDRL, those with which all rows are compared before each later update.
    """
    base = (SETTINGS if method == "d1" else method_settings(method)) | TWO_BATCHES_A_STEP

    def make(name):
        return make_trainer(tiny_model_dir, tmp_path / name, base=base | OPTIMIZER, save_strategy="no")

    allowed = [*RL, *TRL, *TRANSFORMERS]
    trainer, waits = rehearse(on, allowed, make)
    batch = rollout_buffer(trainer)[0]
    shuffled = [key for key, column in batch.items() if isinstance(column, torch.Tensor) and column.dim()]
    counts = {"run": 1, "rollout": 2, "block": 2, "step": 3, "log": 4, "batch": 6, "batch of a first update": 4}
    counts |= {"scoring": scorings, "column": 2 * 8, "shuffled column": 2 * len({*shuffled} - {"log_ratios"})}
    counts |= {"batch with TRL's loss" if method == "d1" else "batch with a loss of ours": 6}
    assert waits == expected(allowed, counts)


def losses(device):
    """Each objective's and penalty's value and gradient."""
    random = keyed_generator(0)
    drawn = [-torch.rand(4, 3, 6, generator=random) for _ in range(3)] + [torch.rand(4, 3, 6, generator=random)]
    logps, old, reference, weights = (values.to(device, non_blocking=True) for values in drawn)
    mask, advantages = torch.ones(4, 6, dtype=torch.long), torch.tensor([1.0, -1.0, 0.5, -0.5])
    mask[1, 3:] = mask[2] = 0
    parts = (mask.sum(), mask, advantages, torch.arange(6).repeat(4, 1))
    tokens, mask, advantages, steps = (part.to(device, non_blocking=True) for part in parts)
    found = []
    ours = [row for row in OBJECTIVES.values() if row.loss is not None]
    for function in (*ours, *PENALTIES.values()):
        new = logps.clone().requires_grad_()
        given = (new, old, reference, weights * (weights > 0.5), advantages, mask, tokens)
        inputs = LossInputs(*given, reveal_steps=steps)
        loss = function(inputs, settings())
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        found += [loss.detach(), new.grad]
    return found


def test_objectives_and_penalties_wait_for_their_logs_alone():
    with rehearsal(places(LOSSES)) as waits:
        rehearsed = losses(DEVICE)
    for found, wanted in zip(rehearsed, losses("cpu"), strict=True):
        assert torch.equal(found.numbers, wanted)
    assert waits == expected(LOSSES, {"loss with clipping": 5, "loss with a metric": 1})
