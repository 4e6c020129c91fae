"""The losses: closed forms, and TRL's on the same log-probabilities."""

from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from d1.models import load_model, load_tokenizer
from d1.preference import METHODS
from d1.preference.trainer import LOSSES

BETA, TOKENS = 0.3, 5
SIGNS = torch.tensor([1, -1, 1, -1, 1, 1])


def random_logps(seed):
    """(rows, tokens) of six completions of different lengths, fp64; tokens after an end are 0."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.tensor([5, 3, 1, 4, 2, 5])
    values = -3 * torch.rand(6, TOKENS, generator=generator, dtype=torch.float64)
    return values.where(torch.arange(TOKENS) < length.unsqueeze(1), 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_the_start_is_neutral_and_gradients_have_closed_forms(name):
    """Ratios of 0: DPO's loss is log 2 and KTO's 1/2. Elsewhere the derivative is beta sigmoid(...) by hand."""
    zero = LOSSES[name](torch.zeros(6), SIGNS, BETA)
    torch.testing.assert_close(zero, torch.full_like(zero, log(2) if name == "dpo" else 0.5))
    ratios = torch.linspace(-3, 4, 6, dtype=torch.float64).requires_grad_()
    (found,) = torch.autograd.grad(LOSSES[name](ratios, SIGNS, BETA).sum(), ratios)
    if name == "dpo":
        chosen = -BETA / (1 + (BETA * (ratios[:3] - ratios[3:])).exp())
        expected = torch.cat([chosen, -chosen])
    else:
        good = 1 / (1 + (-BETA * SIGNS * ratios).exp())
        expected = -BETA * SIGNS * good * (1 - good)
    torch.testing.assert_close(found, expected.detach())


def stand_in(*answers):
    """In place of a model: gives these log-probabilities, one call after the other."""
    waiting = list(answers)

    def call(**given):
        logps = waiting.pop(0)
        nothing = torch.zeros(logps.shape)
        return SimpleNamespace(log_probs=logps, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    return call


def trl_loss(kind, model_dir, folder, logps, reference):
    """TRL's loss of sums over tokens; of KTO with the rows themselves as those that estimate the KL."""
    texts = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}
    if kind == "kto":
        texts = {"prompt": ["a", "b"], "completion": ["b", "c"], "label": [True, False]}
    config, trainer_of = (DPOConfig, DPOTrainer) if kind == "dpo" else (KTOConfig, KTOTrainer)
    options: dict[str, Any] = {"beta": BETA, "report_to": "none", "use_cpu": True, "bf16": False}
    trainer: Any = trainer_of(
        model=load_model(str(model_dir)),
        ref_model=load_model(str(model_dir)),
        args=config(output_dir=str(folder), per_device_train_batch_size=2, **options),
        train_dataset=Dataset.from_dict(texts),
        processing_class=load_tokenizer(str(model_dir)),
    )
    trainer.precompute_ref_logps = True
    ids = torch.ones(6, TOKENS + 1, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "completion_mask": ids}
    if kind == "dpo":
        chosen, rejected = reference.sum(1).chunk(2)
        return trainer.compute_loss(
            stand_in(logps), batch | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        )
    batch |= {f"KL_{name}": value for name, value in batch.items()}
    batch |= {"label": SIGNS > 0, "ref_logps": reference.sum(1), "ref_KL_logps": reference.sum(1)}
    return trainer.compute_loss(stand_in(logps.detach(), logps), batch)


@pytest.mark.parametrize("kind", LOSSES)
def test_trls_loss_of_the_same_log_probabilities(kind, tiny_model_dir, tmp_path):
    """Value and gradient. KTO's rows have a mean ratio above 0, where TRL's KL would be clamped."""
    logps, reference = random_logps(1).requires_grad_(), random_logps(2) - 0.2
    ratios = logps.sum(1) - reference.sum(1)
    assert ratios.mean() > 0
    theirs = trl_loss(kind, tiny_model_dir, tmp_path, logps, reference)
    method = METHODS["vrpo" if kind == "dpo" else "elbo-kto"]
    centre = ratios.detach().mean() if method.centred else 0.0
    ours = LOSSES[method.loss](ratios - centre, SIGNS, BETA).mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logps)[0] for loss in (ours, theirs)))
