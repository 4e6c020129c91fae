"""LightningRL: rewards of being right and of speed, the prompts that they drop, and -log p of right completions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trl import ModelConfig

from d1.rl.batch import RankView, filter_groups, loss_inputs, prompt_filter, transform_advantages, views_of
from d1.rl.bridge import rollout_buffer
from d1.rl.checks import check_settings
from d1.rl.config import DiffuGRPOConfig
from d1.rl.losses import ADVANTAGES, OBJECTIVES
from d1.rl.rewards import tokens_per_forward_pass
from d1.rl.stage import stage
from d1.rl.trainer import DiffuGRPOTrainer
from d1.tasks import load_task
from tests.losses import clipped, gradient, random_inputs, settings, summed
from tests.tiny_grpo import logged, make_method

TASK = Path(__file__).with_name("letters_task.py")
HERE = RankView(lambda here: here, 0)
# Two prompts of four completions, and the advantages that the formula gives them
RIGHT, SPEED = [1.0, 1, 0, 0, 1, 1, 1, 0], [2.0, 4, 4, 6, 3, 3, 5, 5]
ADVANTAGE = [-0.45805, 1.10582, -1.10582, 0.45805, -0.46738, -0.46738, 1.74427, -0.80952]


class Kept(DiffuGRPOTrainer):
    """Keeps the batch of its last rollout."""

    def after_rollout(self, batch):
        super().after_rollout(batch)
        self.batch = batch


def of_table(values, watched=False):
    def reward(completions, **columns):
        return values[: len(completions)]

    if watched:
        reward.is_accuracy = True
    return reward


def trained(model_dir, folder, right, speed, **changes):
    """A trainer of the method after one step, whose rewards are these tables."""
    rewards = {"reward": [of_table(speed), of_table(right, watched=True)], "reward_weights": [1.0, 1.0]}
    options = {"per_device_train_batch_size": len(right), "max_steps": 1, "min_speed_spread": 0.0}
    trainer = make_method(model_dir, folder, "lightning-rl", Kept, **(rewards | options | changes))
    trainer.train()
    return trainer


@pytest.mark.parametrize("third", [[], [0.0] * 4], ids=["two prompts", "a third one without a right completion"])
def test_advantages_are_those_of_the_formula_over_the_prompts_that_are_kept(tiny_block_dir, tmp_path, third):
    speed = SPEED + [1.0, 7.0, 7.0, 2.0][: len(third)]
    trainer = trained(tiny_block_dir, tmp_path, RIGHT + third, speed)
    found = trainer.batch["advantages"].tolist()
    # TRL adds 1e-4 to standard deviations of at least 0.5.
    assert found == pytest.approx(ADVANTAGE + third, abs=1e-3)
    kept = trainer.batch["completion_mask"].any(1).tolist()
    assert kept == [True] * 8 + [False] * len(third)
    [entry] = logged(trainer)
    assert entry["prompts_kept"] == pytest.approx(8 / (8 + len(third)))


def test_prompts_of_one_speed_or_without_a_right_completion_are_dropped():
    """All-right prompts stay. The threshold is the smallest spread that is kept."""
    batch = {
        "completion_is_right": torch.tensor([1.0, 1, 0, 1, 0, 0, 1, 0, 1, 1]),
        "tokens_per_forward_pass": torch.tensor([2.0, 2.5, 2, 2, 1, 3, 2, 2.25, 2, 2.125]),
        "completion_reward": torch.ones(10),
        "completion_mask": torch.ones(10, 3, dtype=torch.long),
        "advantages": torch.ones(10),
    }
    kept = prompt_filter(batch, (1e-6, 1.0), 2, HERE, 0.25)
    assert kept.tolist() == [True, False, False, True, False]
    assert prompt_filter(batch, None, 2, HERE, 0.25).tolist() == [True, False, True, True, False]
    assert prompt_filter(batch, (1e-6, 1.0), 2, HERE).tolist() == [True, True, False, True, True]
    assert filter_groups(batch, kept, 2, HERE) == pytest.approx(0.4)
    assert batch["num_items_in_batch"] == 4 * 3
    # The same on each of two processes, which hold five rows: the third prompt is on both.
    for rank in (0, 1):
        of_rank = {name: value[5 * rank :][:5] for name, value in batch.items() if value.dim()}
        both = iter([batch["completion_is_right"], batch["tokens_per_forward_pass"]])
        view = RankView(lambda here, both=both: next(both), 5 * rank)
        assert torch.equal(prompt_filter(of_rank, (1e-6, 1.0), 2, view, 0.25), kept)


def test_an_entry_of_kept_prompts_gets_no_others():
    values = torch.tensor([1.0, 2, 50, 60, 3, 6])
    in_loss = torch.tensor([True, True, False, False, True, False])
    found = transform_advantages(values, "standardised_batch", 2, HERE, in_loss=in_loss)
    mean, deviation = 3.0, (14 / 3) ** 0.5  # of 1, 2, 3, 6
    expected = [(one - mean) / deviation for one in (1, 2)] + [0, 0] + [(one - mean) / deviation for one in (3, 6)]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert not transform_advantages(values, "standardised_batch", 2, HERE, in_loss=torch.zeros(6).bool()).any()
    assert not ADVANTAGES["standardised_batch"](torch.ones(2, 3)).any()


def test_residues_of_rounding_are_no_advantages():
    """The mean of six equal rewards can differ from them by rounding."""
    rewards = torch.tensor([0.3, 0.9, 0.45]).unsqueeze(1).expand(3, 6)
    residues = rewards - rewards.mean(1, keepdim=True)
    assert residues.any()
    assert not ADVANTAGES["standardised_batch"](residues).any()
    # Others are what the formula gives, to the bit, and a completion without a reward still has none.
    small = torch.tensor([[1e-4, -1e-4, torch.nan], [3e-5, 0.0, -3e-5]])
    rewarded = small[~small.isnan()]
    expected = ((small - rewarded.mean()) / rewarded.std()).nan_to_num(0.0)
    assert torch.equal(ADVANTAGES["standardised_batch"](small), expected)
    assert expected.abs().max() > 1


def ppo_and_nll(inputs, run):
    """-min(rho A, clip(rho) A), and -nll_weight log p of right rows, by loops over tokens."""

    def of_ratio(log_ratio, row):
        ratio = torch.tensor(log_ratio).exp().item()
        gain, derivative = clipped(ratio, inputs.advantages[row].item(), run)
        return -gain, -derivative * ratio

    def of_logp(logp, row):
        right = run.nll_weight * bool(inputs.is_right[row])
        return -right * logp, -right

    first, second = (
        summed(inputs, run, of_ratio, inputs.view_old),
        summed(inputs, run, of_logp, torch.zeros_like(inputs.weights)),
    )
    return first[0] + second[0], first[1] + second[1]


@pytest.mark.parametrize("loss_type", ["views", "grpo", "dapo"])
def test_the_loss_adds_the_log_probabilities_of_right_completions(loss_type):
    inputs, run = random_inputs(), settings(loss_type=loss_type)
    loss, metrics = OBJECTIVES["clipped_views_nll"](inputs, run)
    expected, slope = ppo_and_nll(inputs, run)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert (gradient(loss, inputs) - slope).abs().max() < 1e-7
    without = replace(inputs, is_right=torch.zeros(6, dtype=torch.bool))
    plain, _ = OBJECTIVES["clipped_views"](without, run)
    none, none_metrics = OBJECTIVES["clipped_views_nll"](without, run)
    assert none.item() == plain.item()
    assert none_metrics["nll"] == 0.0
    assert metrics["nll"] * run.nll_weight == pytest.approx(loss.item() - plain.item(), rel=1e-6)


def test_right_is_an_accuracy_of_one_and_not_a_reward_of_at_least_zero(tiny_block_dir, tmp_path):
    right = [*RIGHT[:6], 0.5, 0.0]  # a task's accuracy may be a share
    trainer = trained(tiny_block_dir, tmp_path, right, SPEED)
    batches = rollout_buffer(trainer)
    found = []
    for batch in batches:
        with torch.no_grad():
            scores = trainer.scores(trainer.model, batch, views_of(batch, 0))
        found += loss_inputs(batch, scores, 0).is_right.tolist()
    accuracies = torch.cat([batch["completion_is_right"] for batch in batches]).tolist()
    assert sorted(accuracies) == sorted(right)
    assert found == [accuracy == 1 for accuracy in accuracies]
    rewards = torch.cat([batch["advantages"] for batch in batches])
    assert found != (rewards >= 0).tolist()


def run_of(tiny, folder, **changes):
    given = {"output_dir": str(folder), "model_path": str(tiny), "dataset": str(TASK), "method": "lightning-rl"}
    given |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "block_length": 4}
    given |= {"max_steps": 2, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "use_cpu": True}
    return stage(DiffuGRPOConfig(**(given | changes)), ModelConfig(), None).prepare()


def test_the_name_alone_rewards_right_and_fast_completions(tiny_block_dir, tmp_path):
    facts, start = run_of(tiny_block_dir, tmp_path)
    trainer = start()
    assert trainer.reward_func_names == ["tokens_per_forward_pass", "accuracy"]
    assert trainer.args.reward_weights == [1.0, 1.0]
    assert facts["plan"]["completions per rollout"] == 4 * 4
    trainer.train()
    for name in ("rewards/tokens_per_forward_pass/mean", "rewards/accuracy/mean", "nll", "prompts_kept"):
        assert name in logged(trainer)[0]
    mean = logged(trainer)[0]["sampling/tokens_per_forward_pass"]
    assert logged(trainer)[0]["rewards/tokens_per_forward_pass/mean"] == pytest.approx(mean, rel=1e-5)


def test_rewards_of_the_task_stay_unless_the_accuracy_replaces_them(tiny_block_dir, tmp_path):
    own = [reward.__name__ for reward in load_task(str(TASK)).REWARDS]
    trainer = run_of(tiny_block_dir, tmp_path, accuracy_reward=False, speed_reward=0.5)[1]()
    assert trainer.reward_func_names == [*own, "tokens_per_forward_pass", "accuracy"]
    assert trainer.args.reward_weights == [*[1.0] * len(own), 0.5, 0.0]
    trainer = run_of(tiny_block_dir, tmp_path, speed_reward=0.0)[1]()
    assert trainer.reward_func_names == ["accuracy"]
    assert trainer.args.reward_weights == [1.0]
    assert tokens_per_forward_pass([None, None], tokens_per_forward_pass=[1.5, 2.0]) == [1.5, 2.0]


def test_what_needs_the_passes_of_one_canvas_or_the_accuracy_is_refused_without(tiny_block_dir, tmp_path):
    given = {"output_dir": str(tmp_path), "method": "lightning-rl", "num_generations": 8, "use_cpu": True}
    for name, others in (("speed_reward", {"min_speed_spread": 0.0}), ("min_speed_spread", {"speed_reward": 0.0})):
        with pytest.raises(ValueError, match=f"{name} needs the forward passes of a single canvas"):
            DiffuGRPOConfig(**given, **others, tools=["calculator"])
        with pytest.raises(
            ValueError, match=f"{name} needs the forward passes of a row, which a rollout_func does not"
        ):
            make_method(tiny_block_dir, tmp_path, "lightning-rl", rollout_func=lambda prompts, trainer: {}, **others)
    options = {"reward": [of_table(SPEED)], "reward_weights": None, "right_share": None}
    with pytest.raises(ValueError, match="objective clipped_views_nll needs to know which completions are right"):
        make_method(tiny_block_dir, tmp_path, "lightning-rl", **options)
    check_settings(DiffuGRPOConfig(**given))
