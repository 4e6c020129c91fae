"""SLIM-RL's views and loss, against the numbers of its formula and against chances computed by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from d1.masking import keyed_generator
from d1.rl.losses import OBJECTIVES, PENALTIES, LossInputs
from d1.rl.methods import METHODS
from d1.rl.methods.slim_rl import hiding_probabilities
from d1.scoring import ESTIMATORS, Randomness, SampledRows, ViewSettings
from tests.tiny_grpo import make_method

NODES = (0.5 - math.sqrt(0.15), 0.5, 0.5 + math.sqrt(0.15))
PARTS = (5 / 18, 4 / 9, 5 / 18)
SETTINGS = SimpleNamespace(epsilon=0.1, epsilon_high=None, delta=None, max_completion_length=4)


def test_the_first_block_is_hidden_most():
    blocks = torch.arange(4).repeat_interleave(2).unsqueeze(0)
    found = hiding_probabilities(torch.tensor(NODES, dtype=torch.float64), blocks)[0, :, ::2]
    expected = [[0.2127, 0.1627, 0.0627, 0.0127], [0.6, 0.55, 0.45, 0.4], [0.9873, 0.9373, 0.8373, 0.7873]]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=5e-5)
    alone = hiding_probabilities(torch.tensor(NODES, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.long))
    assert torch.allclose(alone[0, :, 0], torch.tensor(NODES, dtype=torch.float64), atol=1e-12)


def sampled(rows, scored, blocks, prompt=2):
    canvas = len(scored)
    empty = torch.zeros(rows, canvas)
    return SampledRows(
        prompt_ids=torch.ones(rows, prompt, dtype=torch.long),
        attention_mask=torch.ones(rows, prompt, dtype=torch.long),
        maskable=torch.ones(rows, prompt, dtype=torch.bool),
        canvas_ids=torch.ones(rows, canvas, dtype=torch.long),
        scored=torch.tensor(scored).bool().expand(rows, -1),
        reveal_steps=empty.long(),
        logps=empty,
        entropies=empty,
        blocks=None if blocks is None else torch.tensor(blocks).expand(rows, -1),
    )


def drawn(rows, settings, seed=0):
    count = len(rows.canvas_ids)
    random = Randomness([keyed_generator(seed, row) for row in range(count)], keyed_generator(seed), 0, count)
    return ESTIMATORS["block_gauss"](rows, random, settings)


@pytest.mark.parametrize("blocks", [[3, 3, 4, 4, 4, 4, 5, 5], None], ids=["the model's", "the sampler's"])
def test_tokens_are_hidden_with_the_probability_of_their_block(blocks):
    """Of a model with blocks, the first one of the canvas may begin in the prompt."""
    count, scored = 20_000, [1, 1, 1, 1, 1, 1, 0, 0]
    settings = ViewSettings(gen_length=8, block_length=4)
    views = drawn(sampled(count, scored, blocks), settings)
    hidden, numbers = views.noise[:, :, 2:], blocks or [0, 0, 0, 0, 1, 1, 1, 1]
    last = numbers[-1] - numbers[0]
    assert views.noise[:, :, :2].sum() == 0
    assert hidden[:, :, 6:].all()  # what follows the end is hidden and not scored
    for view, (t, weight) in enumerate(zip(NODES, PARTS, strict=True)):
        s = min(0.2, 2 * min(t, 1 - t))
        p = [t - s * math.cos(math.pi * (last - number + numbers[0]) / last) / 2 for number in numbers[:6]]
        none = math.prod(1 - chance for chance in p)
        # Where no scored token is hidden, one of them is, each with the same chance.
        expected = torch.tensor([chance + none / 6 for chance in p])
        found = hidden[:, view, :6].float().mean(0)
        assert (found - expected).abs().max() < 5 * math.sqrt(0.25 / count)
        weights = views.weights[:, view]
        assert torch.equal(weights[:, :6] != 0, hidden[:, view, :6])
        assert weights[weights != 0].unique().tolist() == pytest.approx([weight])
        assert (weights != 0).any(1).all()


def test_a_row_that_takes_no_part_scores_nothing():
    views = drawn(sampled(3, [0] * 8, None), ViewSettings(gen_length=8, block_length=4))
    assert views.weights.sum() == 0


def inputs_of(differences, advantage):
    """Inputs of a row whose views score tokens with these log-ratios; weights are those of the nodes."""
    logps, weights = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    for view, (values, weight) in enumerate(zip(differences, PARTS, strict=True)):
        logps[0, view, : len(values)] = torch.tensor(values) - 1
        weights[0, view, : len(values)] = weight
    return LossInputs(
        view_logps=logps.requires_grad_(),
        view_old=torch.where(weights != 0, -1.0, 0.0),
        view_reference=None,
        weights=weights,
        advantages=torch.tensor([advantage]),
        mask=torch.ones(1, 4, dtype=torch.long),
        tokens=torch.tensor(4.0),
    )


def test_the_loss_is_that_of_the_formula():
    """One ratio per view: 1.2214, 1.1052 and 0.9048, of which clipping at .1 leaves 1.1, 1.1 and 0.9048."""
    inputs = inputs_of([[0.1, 0.3], [0.05, -0.05, 0.3], [-0.2, 0.0, 0.1, -0.3]], 0.5)
    loss, metrics = OBJECTIVES["clipped_view_means"](inputs, SETTINGS)
    assert loss.item() == pytest.approx(-0.174298, abs=1e-6)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(2 / 3)
    penalty = PENALTIES["k3_per_canvas"](inputs, SETTINGS)
    assert 0.01 * penalty.item() == pytest.approx(0.0000442, abs=1e-7)


def test_the_mean_of_the_log_ratios_is_clamped_and_not_each_of_them():
    inputs = inputs_of([[30.0, -29.0], [0.0], [0.0]], -1.0)
    loss, _ = OBJECTIVES["clipped_view_means"](inputs, SETTINGS)
    expected = (5 / 18 * math.exp(0.5) + 4 / 9 + 5 / 18) / 3
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    far = inputs_of([[30.0, 20.0], [0.0], [0.0]], -1.0)
    loss, _ = OBJECTIVES["clipped_view_means"](far, SETTINGS)
    assert loss.item() == pytest.approx((5 / 18 * math.exp(10) + 4 / 9 + 5 / 18) / 3, rel=1e-5)


def test_views_that_score_nothing_do_not_count():
    inputs = inputs_of([[0.1], [0.05], [0.2]], 0.5)
    without = replace(inputs, weights=inputs.weights * torch.tensor([1.0, 0.0, 1.0]).view(1, 3, 1))
    loss, _ = OBJECTIVES["clipped_view_means"](without, SETTINGS)
    expected = -0.5 * 5 / 18 * (1.1 + 1.1) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_name_alone_makes_several_optimizer_steps_and_samples_by_the_risk(tiny_block_dir, tmp_path):
    trainer = make_method(
        tiny_block_dir,
        tmp_path,
        "slim-rl",
        num_iterations=1,
        num_mini_batches=METHODS["slim-rl"].values["num_mini_batches"],
    )
    assert (trainer.args.steps_per_generation, trainer.num_iterations) == (4, 1)
    assert (trainer.sampling.rule, trainer.sampling.level) == ("risk_budget", 0.9)
    assert trainer.args.needs_old_logps
    assert not trainer.args.needs_reference
