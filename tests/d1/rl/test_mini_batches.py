"""Several optimizer steps per rollout, each with a part of its rows (`num_mini_batches`)."""

from collections import Counter

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.rl.batch import draw_mini_batches, views_of
from d1.rl.config import DiffuGRPOConfig
from d1.rl.trainer import DiffuGRPOTrainer
from tests.rounding import LOGITS, rounding
from tests.tiny_grpo import SETTINGS, assert_same, logged, make_trainer, weights

# Rollouts of 3 x 2 micro-batches of 4 rows: three optimizer steps of two micro-batches in each of two updates
THREE = {"num_mini_batches": 3, "gradient_accumulation_steps": 2, "optim": "adamw_torch", "max_steps": 8}
THREE |= {"lr_scheduler_type": "constant", "warmup_steps": 0}


class Noting(DiffuGRPOTrainer):
    """Notes the rows of each optimizer step, and scores their old log-probs with the weights that sampled them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps, self.differences, self.sampled_by = [], [], None

    def after_rollout(self, batch):
        batch["uid"] = torch.arange(len(batch["advantages"])) + 1000 * len(self.rollout_seconds)
        super().after_rollout(batch)
        self.sampled_by = load_model(str(self.model.name_or_path)).eval()
        self.sampled_by.load_state_dict(self.model.state_dict())

    def loss(self, model, batch):
        self.steps.append((self.state.global_step, self.update, batch["uid"].tolist(), batch["mini_batch"].tolist()))
        with torch.no_grad():
            scores = super().scores(self.sampled_by, batch, views_of(batch, self.update))
        stored = batch["old_view_logps"][:, self.update]
        self.differences.append((scores.view_logps - stored).abs().max().item())
        return super().loss(model, batch)


def settings(**changes):
    return DiffuGRPOConfig(**SETTINGS | {"output_dir": "unused", "use_cpu": True} | changes)


@pytest.mark.parametrize(
    ("given", "steps", "parts"),
    [
        ({}, 2, 1),
        ({"num_mini_batches": 3}, 6, 3),
        ({"steps_per_generation": 6}, 6, 3),
        ({"steps_per_generation": 6, "num_mini_batches": 3}, 6, 3),
        ({"steps_per_generation": 1}, 1, 1),
    ],
)
def test_mini_batches_are_steps_per_generation_over_the_accumulation(given, steps, parts):
    found = settings(gradient_accumulation_steps=2, **given)
    assert (found.steps_per_generation, found.num_mini_batches) == (steps, parts)


def test_mini_batches_that_contradict_steps_per_generation_are_refused():
    with pytest.raises(ValueError, match="--num_mini_batches 4 x --gradient_accumulation_steps 2 is not --steps_per"):
        settings(gradient_accumulation_steps=2, steps_per_generation=6, num_mini_batches=4)
    with pytest.raises(ValueError, match="num_mini_batches"):
        settings(num_mini_batches=0)


def test_every_share_of_the_rows_is_spread_evenly_over_the_mini_batches():
    chosen = draw_mini_batches(48, 4, keyed_generator(0))
    for processes in (1, 2, 3, 4, 6, 12):
        for own in chosen.split(48 // processes):
            assert Counter(own.tolist()) == dict.fromkeys(range(4), 48 // processes // 4)
    first, second = (draw_mini_batches(4000, 4, keyed_generator(seed))[::4] for seed in (1, 2))
    assert torch.bincount(first).min() > 200  # 250 expected, with a standard deviation of 14
    assert (first != second).float().mean() > 0.6  # 0.75 expected


def test_each_optimizer_step_has_rows_of_its_own_and_the_old_policy_is_the_one_that_sampled(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, Noting, **THREE)
    start = weights(trainer.model)
    trainer.train()
    assert len(trainer.rollout_seconds) == 2
    used: dict[tuple, Counter] = {}
    for step, update, uids, _ in trainer.steps[: 6 * 2]:
        used.setdefault((update, step), Counter()).update(uids)
    assert all(set(parts) == {step % 3} for step, _, _, parts in trainer.steps)  # of both rollouts
    # Each of the two updates has three steps of eight rows, and uses each of the 24 rows once.
    assert list(used) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    for update in (0, 1):
        rows = [counts for (number, _), counts in used.items() if number == update]
        assert [len(counts) for counts in rows] == [8] * 3
        assert sum(rows, Counter()) == dict.fromkeys(range(24), 1)
    assert max(trainer.differences) <= rounding(LOGITS)
    # The ratio leaves 1 with the second optimizer step, within the first update.
    ratios = [entry["ratio_max"] for entry in logged(trainer)]
    assert ratios[0] == pytest.approx(1.0, abs=rounding(LOGITS))
    assert min(ratios[1:6]) > 1 + 1e-4
    # What the sampler and the trained policy differ by is logged only before the weights change.
    gaps = ["sampling/logp_difference_abs" in entry for entry in logged(trainer)]
    assert gaps == [True, *[False] * 5, True, False]
    assert all((value - start[name]).abs().max() > 1e-4 for name, value in weights(trainer.model).items())


def test_the_sampling_policy_is_the_one_before_a_rollouts_first_optimizer_step_in_every_epoch(tiny_model_dir, tmp_path):
    """An epoch of 3 rollouts of 3 micro-batches each, 2 per optimizer step: the last step of an epoch has one."""

    class Watching(DiffuGRPOTrainer):
        def after_rollout(self, batch):
            super().after_rollout(batch)
            self.sampled_at = self.state.global_step

        def loss(self, model, batch):
            seen.append((self.state.global_step == self.sampled_at, self.is_sampling_policy))
            return super().loss(model, batch)

    seen: list[tuple[bool, bool]] = []
    split = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "num_iterations": 1}
    sizes = {"per_device_train_batch_size": 4, "num_generations": 3, "max_steps": -1, "num_train_epochs": 3}
    trainer = make_trainer(tiny_model_dir, tmp_path, Watching, **split, **sizes)
    trainer.train()
    assert len(seen) == 3 * 3 * 3
    assert trainer.state.global_step == 3 * 5
    assert [found for _, found in seen] == [expected for expected, _ in seen]


@pytest.mark.parametrize("stopped_at", [1, 4])
def test_a_run_resumes_between_two_mini_batches_bit_for_bit(tiny_model_dir, tmp_path, stopped_at):
    options = THREE | {"save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(tiny_model_dir, tmp_path / "whole", **options)
    whole.train()
    resumed = make_trainer(tiny_model_dir, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stopped_at}"))
    assert_same(whole, resumed)


def test_the_losses_of_the_mini_batches_have_the_loss_of_one_step_as_their_mean(tiny_model_dir, tmp_path):
    """At rate 0, with objectives of TRL and of this library, whose divisors count over the whole rollout."""
    for objective in ("trl", "reinforce"):
        losses = {}
        for parts in (1, 3):
            trainer = make_trainer(
                tiny_model_dir,
                tmp_path,
                objective=objective,
                loss_type="dapo",
                beta=0.04,
                learning_rate=0.0,
                num_iterations=1,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=6 // parts,
                num_mini_batches=parts,
                max_steps=parts,
            )
            trainer.train()
            losses[parts] = sum(entry["loss"] for entry in logged(trainer)) / parts
        assert losses[1] == pytest.approx(losses[3], abs=1e-6)
