"""The only place that uses TRL's private names, and TRL's losses, which it passes through unchanged."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from d1.rl.bridge import CanvasGRPOTrainer, EpochSampler
from d1.rl.sources import LocalRollouts
from d1.rl.trainer import DiffuGRPOTrainer
from d1.scoring import Scores
from d1.serve.rollouts import ServerRollouts
from d1.transformers_bridge import recomputes_activations
from tests import tiny_grpo

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class Fixed(DiffuGRPOTrainer):
    """Given scores instead of computed ones, for losses on known tensors."""

    given: Scores

    def scores(self, *args: Any, **options: Any) -> Scores:
        return self.given


def make_trainer(model_dir: Any, folder: Any, cls: Any = Fixed, **changes: Any) -> Any:
    trainer = tiny_grpo.make_trainer(model_dir, folder, cls, **{"max_steps": 1, **changes})
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_from_python_warns_of_no_deprecated_name(tiny_model_dir, tmp_path, checkpointing) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = tiny_grpo.make_trainer(tiny_model_dir, tmp_path, max_steps=1, gradient_checkpointing=checkpointing)
        trainer.train()
    assert recomputes_activations(trainer.model) == checkpointing
    assert not [str(one.message) for one in seen if issubclass(one.category, FutureWarning)]


def tensors() -> tuple[Scores, dict[str, Any]]:
    """Log-probabilities that differ enough for clipping, and the other fields of a TRL batch."""
    generator = torch.Generator().manual_seed(0)
    logps = -3 * torch.rand(4, 8, generator=generator)
    old, reference = (logps + 0.8 * torch.randn(4, 2, 8, generator=generator).transpose(0, 1) for _ in range(2))
    mask = (torch.arange(8) < torch.tensor([[8], [5], [1], [3]])).long()
    batch = {
        "prompt_ids": torch.ones(4, 3, dtype=torch.long),
        "prompt_mask": torch.ones(4, 3, dtype=torch.long),
        "completion_ids": torch.ones(4, 8, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 2.0, -1.5]),
        "num_items_in_batch": mask.sum(),
        "old_view_logps": old.transpose(0, 1).unsqueeze(2),
        "ref_view_logps": reference.transpose(0, 1).unsqueeze(2),
        "rollout_logps": logps,
        "reveal_steps": torch.zeros(4, 8, dtype=torch.long),
        "scoring_views": torch.full((4, 2), 4),
        "scored_pairs": torch.full((4, 2), 4),
        "repeated_tokens": torch.full((4, 2), 4),
        "active_rows": torch.full((4,), 4),
        "view_noise": torch.zeros(4, 2, 1, 11, dtype=torch.bool),
        "view_weights": torch.ones(4, 2, 1, 8),
    }
    entropies = torch.rand(4, 8, generator=generator)
    return Scores(logps, logps.unsqueeze(1).requires_grad_(), torch.tensor(0), entropies), batch


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_trls_losses_and_gradients_are_trls_to_the_bit(tiny_model_dir, tmp_path, loss_type, level):
    """TRL's own loss, called through TRL's own hook, on the tensors of the second update."""
    options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.04}
    if loss_type not in ("sapo", "vespo"):  # which do not clip
        options["epsilon"] = 0.2
    trainer = make_trainer(tiny_model_dir, tmp_path, **options)
    found: list[Tensor] = []

    class Theirs(Fixed):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            return self.given.view_logps[:, 0], self.given.entropies, None

    for cls in (Fixed, Theirs):
        trainer.__class__ = cls
        scores, batch = tensors()
        trainer.given, trainer._step = scores, 1
        if cls is Fixed:
            loss = trainer.loss(trainer.model, batch)
        else:
            stored = {f"{name}_per_token_logps": batch[f"{name}_view_logps"][:, 1, 0] for name in ("old", "ref")}
            loss = GRPOTrainer._compute_loss(trainer, trainer.model, batch | stored)
        loss.backward()
        found += [loss.detach(), scores.view_logps.grad]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert found[1].abs().sum() > 0


class Entropies(DiffuGRPOTrainer):
    """Keeps the entropies that TRL's loss gets, next to the scores and weights of the views."""

    def trl_loss(self, inputs: Any, entropies: Any, batch: Any) -> Tensor:
        self.sums, self.inputs = entropies, inputs
        return super().trl_loss(inputs, entropies, batch)

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        self.means, self.mask = entropies, mask.bool()
        self.chosen = super().get_high_entropy_mask(entropies, mask, threshold)
        return self.chosen


def test_trl_gets_the_mean_entropy_of_a_token_over_its_views(tiny_model_dir, tmp_path) -> None:
    options = {"method": "coupled-grpo", "top_entropy_quantile": 0.25, "num_generations": 4, "temperature": 1.0}
    trainer = tiny_grpo.make_trainer(tiny_model_dir, tmp_path, Entropies, **options, max_steps=1, num_iterations=1)
    trainer.train()
    mask, weights = trainer.mask, trainer.inputs.weights.sum(1)
    expected = trainer.sums / weights.where(mask, 1.0)
    assert weights[mask].unique().numel() > 1
    torch.testing.assert_close(trainer.means[mask], expected[mask])
    # The chosen tokens are those of highest mean entropy.
    chosen = trainer.chosen & mask
    assert 0 < chosen.sum() < mask.sum()
    assert expected[chosen].min() >= expected[mask & ~chosen].max()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["entropy"] == pytest.approx(expected[mask].mean().item(), rel=1e-5)


def test_tokens_without_a_view_are_not_in_the_mean_entropy(tiny_model_dir, tmp_path) -> None:
    found = {}
    for objective in ("trl", "clipped_views"):
        options = {"estimator": "elbo", "num_views": 1, "p_mask_prompt": 0.0, "objective": objective, "max_steps": 1}
        trainer = tiny_grpo.make_trainer(tiny_model_dir, tmp_path / objective, **options)
        trainer.train()
        found[objective] = tiny_grpo.logged(trainer)[0]["entropy"]
    assert found["trl"] == pytest.approx(found["clipped_views"], rel=1e-6)


def test_processes_that_share_weights_must_keep_step():
    def in_step(fsdp: bool, zero3: bool, gathered: bool, processes: int = 2, source: Any = LocalRollouts) -> bool:
        trainer: Any = SimpleNamespace(
            _dist=SimpleNamespace(is_fsdp=fsdp, is_zero3=zero3),
            weights_are_split=fsdp or zero3,
            accelerator=SimpleNamespace(num_processes=processes),
            args=SimpleNamespace(ds3_gather_for_generation=gathered),
            source=source,
        )
        return CanvasGRPOTrainer.samples_in_step.fget(trainer)  # type: ignore[attr-defined]

    assert in_step(True, False, True)
    assert in_step(False, True, False)
    assert not in_step(False, True, True)
    assert not in_step(False, False, False)
    assert not in_step(False, True, False, processes=1)
    assert not in_step(True, False, False, source=ServerRollouts)


def test_the_order_of_an_epoch_does_not_depend_on_the_epochs_sampled_before():
    epoch = 0

    def order(sampler: EpochSampler) -> list[int]:
        return list(sampler)

    def sampler() -> EpochSampler:
        return EpochSampler(list(range(10)), 1, seed=3, epoch=lambda: epoch)

    through = sampler()
    first, again = order(through), order(sampler())
    epoch = 1
    assert order(through) == order(sampler()) != first
    assert first == again
