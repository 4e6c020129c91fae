"""Advantages, compared with each row's formula, however the rows of a group are spread over batches and processes."""

import math
from dataclasses import replace

import pytest
import torch

from d1.rl.batch import Everyone, keep_prompts, reshaped
from d1.rl.bridge import rollout_buffer
from d1.rl.losses import ADVANTAGES, OBJECTIVES
from tests.losses import random_inputs, settings
from tests.tiny_grpo import make_trainer

# The second group has no spread, and the last has less than a hundredth.
REWARDS = [[0.0, 1.0, 0.25, 2.0], [1.0, 1.0, 1.0, 1.0], [-3.0, 0.5, 0.5, 0.0], [0.5, 0.5, 0.5, 0.504]]
# What TRL passes with scale_rewards none: rewards minus their group's mean.
CENTRED = torch.tensor(REWARDS, dtype=torch.float64)
CENTRED = CENTRED - CENTRED.mean(1, keepdim=True)


def mean(values):
    return sum(values) / len(values)


def leave_one_out(rewards):
    return [reward - mean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]


def signed_softmax(rewards):
    """wd1's weights of one group, softmax(A) - softmax(-A), for rows that are averaged (arXiv 2507.08838)."""
    centred = [reward - mean(rewards) for reward in rewards]
    up, down = ([math.exp(sign * a) for a in centred] for sign in (1, -1))
    return [len(rewards) * (u / sum(up) - d / sum(down)) for u, d in zip(up, down, strict=True)]


def standardised(rewards):
    """(r - m) / s, s the root of the mean square; 0 if all are right or all are wrong (arXiv 2509.06949)."""
    square = mean([(reward - mean(rewards)) ** 2 for reward in rewards])
    return [(reward - mean(rewards)) / math.sqrt(square) if square else 0.0 for reward in rewards]


def floored(rewards):
    """(r - m) / max(s, 0.01), s of n - 1."""
    square = sum((reward - mean(rewards)) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean(rewards)) / max(math.sqrt(square), 0.01) for reward in rewards]


WRITTEN_OUT = {
    "leave_one_out": leave_one_out,
    "signed_softmax": signed_softmax,
    "standardised": standardised,
    "floored": floored,
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_advantages_are_those_of_the_formula(name):
    expected = [WRITTEN_OUT[name](rewards) for rewards in REWARDS]
    torch.testing.assert_close(
        ADVANTAGES[name](CENTRED), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_a_group_of_equal_rewards_has_standardised_advantages_of_zero(size):
    """In fp32, where equal rewards minus their mean may differ from 0."""
    rewards = torch.tensor([0.1, 0.7, 1 / 3, -2.2, 1e6]).unsqueeze(1).expand(-1, size)
    assert not ADVANTAGES["standardised"](rewards - rewards.mean(1, keepdim=True)).any()
    assert not ADVANTAGES["standardised"](rewards / 3 - rewards.mean(1, keepdim=True) / 3 - 1e-8).any()


@pytest.mark.parametrize("rows", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["trl", *WRITTEN_OUT])
def test_a_group_is_one_whole_on_processes_with_half_of_it_or_with_several(name, rows):
    """A softmax over the rows of a process, in place of those of the group, gives other weights: a fault of released
    code."""
    everything = CENTRED.flatten()
    expected = everything if name == "trl" else ADVANTAGES[name](CENTRED).flatten()
    for first in range(0, 16, rows):
        everyone = Everyone(gather=lambda here: everything, first=first)
        found = reshaped(everything[first : first + rows], name, 4, everyone)
        torch.testing.assert_close(found, expected[first : first + rows], rtol=0, atol=0)


def test_an_evaluation_of_one_completion_a_prompt_has_no_group():
    alone = torch.zeros(3)
    assert reshaped(alone, "leave_one_out", 1, Everyone(lambda here: here, 0)) is alone


def test_wd1_is_a_mean_over_groups_of_weighted_sums_of_log_probabilities():
    """-sum softmax(A)_i S_i + sum softmax(-A)_i S_i, S_i the sum of a completion's log-probs (arXiv 2507.08838)."""
    inputs = random_inputs(views=1, weights="one")
    sums = inputs.view_logps.sum((1, 2)).tolist()
    groups = [[0.0, 1.0, 0.5], [2.0, -1.0, 0.25]]
    expected = 0.0
    for number, rewards in enumerate(groups):
        up, down = ([math.exp(sign * (r - mean(rewards))) for r in rewards] for sign in (1, -1))
        for i in range(3):
            expected += (down[i] / sum(down) - up[i] / sum(up)) * sums[3 * number + i] / len(groups)
    centred = torch.tensor(groups).double() - torch.tensor(groups).double().mean(1, keepdim=True)
    advantages = ADVANTAGES["signed_softmax"](centred).flatten()
    loss, _ = OBJECTIVES["reinforce"](replace(inputs, advantages=advantages), settings(loss_type="sum"))
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("advantage", "scale", "formula"),
    [
        ("trl", "none", lambda r, i: r[i] - mean(r)),
        (
            "trl",
            "group",
            lambda r, i: (r[i] - mean(r)) / (math.sqrt(sum((x - mean(r)) ** 2 for x in r) / (len(r) - 1)) + 1e-4),
        ),
        ("leave_one_out", "none", lambda r, i: leave_one_out(r)[i]),
    ],
)
def test_a_rollouts_advantages_are_made_of_its_rewards(tiny_model_dir, tmp_path, advantage, scale, formula):
    expected = {}

    def by_order(completions, completion_ids, **columns):
        rewards = [float((7 * i) % 5) for i in range(8)]
        for i, ids in enumerate(completion_ids):
            expected[tuple(ids)] = formula(rewards[:4] if i < 4 else rewards[4:], i % 4)
        return rewards

    options = {"per_device_train_batch_size": 8, "num_iterations": 1, "max_steps": 1}
    options |= {"advantage": advantage, "scale_rewards": scale}
    trainer = make_trainer(tiny_model_dir, tmp_path, reward=by_order, **options)
    trainer.train()
    (batch,) = rollout_buffer(trainer)
    assert len(expected) == 8  # no two completions are the same
    for ids, mask, found in zip(batch["completion_ids"], batch["completion_mask"], batch["advantages"], strict=True):
        assert found.item() == pytest.approx(expected[tuple(ids[mask.bool()].tolist())], rel=1e-5, abs=1e-6)


def test_prompts_that_are_too_easy_or_too_hard_leave_the_loss():
    right = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, torch.nan, 1, 0])
    batch = {
        "completion_is_right": right,
        "advantages": torch.ones(16),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]] * 8),
    }
    kept = keep_prompts(batch, (0.2, 0.7), 4, Everyone(lambda here: here, 0))
    assert kept == 0.5  # shares 0, 1/4, 1 and 2/3 (of the three that could be judged)
    expected = torch.tensor([0, 1, 0, 1]).repeat_interleave(4)
    assert torch.equal(batch["completion_mask"].any(1).long(), expected)
    assert batch["num_items_in_batch"] == 2 * (2 + 3 + 2 + 3)
