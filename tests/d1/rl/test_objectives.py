"""Objectives against loops over tokens with their gradients in closed form, and against TRL where TRL has the loss."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from d1.rl.objectives import OBJECTIVES, evidence_bounds, sequence_log_ratios
from d1.rl.rows import MEANS, LossInputs
from tests.losses import divisor, gradient, micro_batches, random_inputs, settings, trl_loss, trl_trainer

EXACT = {"rtol": 1e-12, "atol": 1e-14}
OURS = [name for name, row in OBJECTIVES.items() if row.loss is not None]
SINGLE = {"rtol": 1e-7, "atol": 1e-7}  # shares of hidden tokens are in fp32


@pytest.fixture(scope="module")
def trainer(tiny_model_dir, tmp_path_factory):
    return trl_trainer(tiny_model_dir, tmp_path_factory.mktemp("trl"))


def clipped(ratio: float, advantage: float, run) -> tuple[float, float]:
    """min(r A, clip(r) A), and its derivative by r."""
    high = run.epsilon if run.epsilon_high is None else run.epsilon_high
    inside = min(max(ratio, 1 - run.epsilon), 1 + high)
    if ratio * advantage <= inside * advantage:
        return ratio * advantage, advantage
    return inside * advantage, 0.0


@pytest.mark.parametrize("epsilon_high", [None, 0.35])
@pytest.mark.parametrize("loss_type", MEANS)
def test_clipped_views_is_ppos_loss_of_every_token_in_every_view(loss_type, epsilon_high):
    inputs, run = random_inputs(), settings(loss_type=loss_type, epsilon_high=epsilon_high)
    expected, slope, held, scored = 0.0, torch.zeros_like(inputs.weights), {-1: 0, 1: 0}, 0
    for i, v, k in itertools.product(range(6), range(3), range(5)):
        weight, advantage = inputs.weights[i, v, k].item(), inputs.advantages[i].item()
        if not weight:
            continue
        ratio = math.exp(inputs.view_logps[i, v, k].item() - inputs.view_old[i, v, k].item())
        gain, derivative = clipped(ratio, advantage, run)
        expected -= weight * gain / divisor(inputs, i, run)
        slope[i, v, k] = -weight * derivative * ratio / divisor(inputs, i, run)
        scored += 1
        if advantage and not derivative:
            held[1 if advantage > 0 else -1] += 1
    loss, metrics = OBJECTIVES["clipped_views"](inputs, run)
    torch.testing.assert_close(loss.item(), expected, **EXACT)
    torch.testing.assert_close(gradient(loss, inputs), slope, **EXACT)
    assert min(held.values()) > 0  # the clip holds on both sides
    assert metrics["clip_ratio/region_mean"] == pytest.approx(sum(held.values()) / scored, rel=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_one_view_of_weight_one_is_trls_loss(trainer, loss_type):
    inputs = random_inputs(views=1, weights="one")
    theirs, logged = trl_loss(trainer, inputs, loss_type=loss_type)
    ours, metrics = OBJECTIVES["clipped_views"](inputs, settings(loss_type=loss_type))
    torch.testing.assert_close(ours, theirs, **EXACT)
    torch.testing.assert_close(gradient(ours, inputs), gradient(theirs, inputs), **EXACT)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(logged["clip_ratio/region_mean"], rel=1e-6)
    assert 0 < logged["clip_ratio/low_mean"] != logged["clip_ratio/high_mean"] > 0


def test_espo_is_trls_ratio_of_sequences_of_the_weighted_sum_over_views(trainer):
    """exp((ELBO - old) / L), clipped, a mean over rows (arXiv 2512.03759)."""
    inputs, run = random_inputs(), settings()
    expected, slope = 0.0, torch.zeros_like(inputs.weights)
    for i in range(6):
        length, advantage = max(int(inputs.mask[i].sum()), 1), inputs.advantages[i].item()
        places = list(itertools.product(range(3), range(5)))
        change = sum(
            inputs.weights[i, v, k].item() * (inputs.view_logps[i, v, k].item() - inputs.view_old[i, v, k].item())
            for v, k in places
        )
        ratio = math.exp(change / length)
        gain, derivative = clipped(ratio, advantage, run)
        expected -= gain / 6 if inputs.mask[i].any() else 0.0
        slope[i] = -derivative * ratio * inputs.weights[i] / length / 6
    loss, _ = trl_loss(trainer, inputs, loss_type="grpo", importance_sampling_level="sequence")
    torch.testing.assert_close(loss.item(), expected, **EXACT)
    torch.testing.assert_close(gradient(loss, inputs), slope, **EXACT)


@pytest.mark.parametrize("loss_type", MEANS)
def test_reinforce_is_a_weighted_sum_of_log_probabilities(loss_type):
    inputs, run = random_inputs(), settings(loss_type=loss_type)
    slope = torch.stack([-inputs.advantages[i] * inputs.weights[i] / divisor(inputs, i, run) for i in range(6)])
    loss, _ = OBJECTIVES["reinforce"](inputs, run)
    torch.testing.assert_close(loss, (slope * inputs.view_logps).sum(), **EXACT)
    torch.testing.assert_close(gradient(loss, inputs), slope, **EXACT)


def test_reinforces_gradient_over_all_completions_is_that_of_the_expected_reward():
    """All 9 completions of two tokens of a vocabulary of three, each as often as it is sampled."""
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    rows = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    logps = logits.log_softmax(-1)[torch.arange(2), rows]
    reward = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chance = logps.sum(-1).exp()
    ones = torch.ones(9, 1, 2, dtype=torch.float64)
    inputs = LossInputs(
        view_logps=logps.unsqueeze(1),
        view_old=logps.detach().unsqueeze(1),
        view_reference=None,
        weights=ones,
        advantages=9 * chance.detach() * reward,
        mask=ones[:, 0].long(),
        tokens=torch.tensor(18),
    )
    (found,) = torch.autograd.grad(
        OBJECTIVES["reinforce"](inputs, settings(loss_type="sum"))[0], logits, retain_graph=True
    )
    (expected,) = torch.autograd.grad(-(chance * reward).sum(), logits)
    torch.testing.assert_close(found, expected, **EXACT)


def test_bgpo_is_a_clipped_ratio_of_every_draws_bound():
    """1 + d where A > 0 and exp(d) elsewhere; d = (bound - old) / L of a draw (arXiv 2510.11683, section 3)."""
    inputs, run = random_inputs(), settings()
    expected, slope, held = 0.0, torch.zeros_like(inputs.weights), {-1: 0, 1: 0}
    for i, v in itertools.product(range(6), range(3)):
        length, advantage = int(inputs.mask[i].sum()), inputs.advantages[i].item()
        if not length:
            continue
        # A draw's own estimate: the weights are those of a mean over the three.
        bound = sum(
            3 * inputs.weights[i, v, k].item() * (inputs.view_logps[i, v, k].item() - inputs.view_old[i, v, k].item())
            for k in range(5)
        )
        d = bound / length
        ratio, growth = (1 + d, 1.0) if advantage > 0 else (math.exp(d), math.exp(d))
        gain, derivative = clipped(ratio, advantage, run)
        expected -= gain / 18
        slope[i, v] = -derivative * growth * 3 * inputs.weights[i, v] / length / 18
        if advantage and not derivative:
            held[1 if advantage > 0 else -1] += 1
    loss, metrics = OBJECTIVES["bgpo"](inputs, run)
    torch.testing.assert_close(loss.item(), expected, **EXACT)
    torch.testing.assert_close(gradient(loss, inputs), slope, **EXACT)
    assert min(held.values()) > 0
    assert metrics["clip_ratio/region_mean"] == pytest.approx(sum(held.values()) / 15, rel=1e-6)


def test_bgpo_goes_on_where_a_bound_has_fallen_by_more_than_one_a_token():
    inputs = random_inputs(views=1, weights="one")
    fallen = replace(inputs, view_logps=(inputs.view_old - 3).detach().requires_grad_())
    loss, _ = OBJECTIVES["bgpo"](fallen, settings())
    # d = -3: the ratio of a good row is -2 and its slope 1, that of a bad one is held back.
    terms = [-2.0 * 1.0, -0.8 * 0.5, -2.0 * 2.0, -0.8 * 1.5, 0.0, 0.0]
    torch.testing.assert_close(loss.item(), -sum(terms) / 6, **EXACT)
    lengths = inputs.mask.sum(-1, keepdim=True).clamp(min=1)
    expected = -torch.tensor([1.0, 0, 2, 0, 0, 0], dtype=torch.float64).view(6, 1, 1) / 6 / lengths.unsqueeze(1)
    torch.testing.assert_close(gradient(loss, fallen), expected * inputs.weights, **EXACT)


def bounds_written_out(inputs: LossInputs, beta: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """SPG's two forms of each row, by loops; differentiable (arXiv 2510.09541, section 3)."""
    found = []
    rows, views, tokens = inputs.weights.shape
    for i in range(rows):
        length = max(int(inputs.mask[i].sum()), 1)
        scored = [[k for k in range(tokens) if inputs.weights[i, v, k]] for v in range(views)]
        lower = sum((inputs.weights[i, v, k] * inputs.view_logps[i, v, k] for v in range(views) for k in scored[v]), 0)
        logs = []
        for k in range(tokens):
            hiding = [v for v in range(views) if k in scored[v]]
            if hiding:
                powers = [inputs.view_logps[i, v, k].exp() ** beta / (len(scored[v]) / length) for v in hiding]
                logs.append((sum(powers) / views).log() / beta)
        zero = inputs.view_logps.new_zeros(())
        found.append((lower + zero, sum(logs) / len(logs) if logs else zero))
    return found


@pytest.mark.parametrize("loss_type", MEANS)
def test_spg_is_the_lower_form_of_good_rows_and_a_mixture_of_both_for_bad_ones(loss_type):
    inputs, run = random_inputs(), settings(loss_type=loss_type)
    written = bounds_written_out(inputs, run.eubo_beta)
    for found, expected in zip(evidence_bounds(inputs, run.eubo_beta), zip(*written, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected), **SINGLE)
    expected = 0.0
    for i, (lower, upper) in enumerate(written):
        advantage, length = inputs.advantages[i], max(int(inputs.mask[i].sum()), 1)
        bound = lower if advantage > 0 else 0.3 * upper + 0.7 * lower
        expected -= advantage * bound * length / divisor(inputs, i, run)
    loss, _ = OBJECTIVES["spg"](inputs, run)
    torch.testing.assert_close(loss, expected, **SINGLE)
    torch.testing.assert_close(gradient(loss, inputs), gradient(expected, inputs), **SINGLE)


def test_spgs_upper_form_is_above_the_lower_one_and_equal_to_it_where_nothing_varies():
    """In one view that hides everything both are the mean log-probability."""
    inputs = random_inputs(views=1, weights="one")
    inputs = replace(inputs, weights=inputs.weights / inputs.lengths[:, None, None])
    lower, upper = evidence_bounds(inputs, 1.5)
    torch.testing.assert_close(lower, upper, **EXACT)
    several = random_inputs(views=3, weights="one")
    several = replace(several, weights=several.weights / 3 / several.lengths[:, None, None])
    lower, upper = evidence_bounds(several, 1.5)
    taking_part = several.mask.any(1)
    assert (upper > lower)[taking_part].all()


def stable_weights(inputs: LossInputs, cap: float) -> list[float]:
    """The softmax of capped log-ratios over all rows, by loops."""
    changes = (inputs.weights * (inputs.view_logps - inputs.view_old)).sum((1, 2)).tolist()
    ratios = [min(math.exp(change), cap) for change in changes]
    assert max(math.exp(change) for change in changes) > cap > min(ratios)
    return [ratio / sum(ratios) for ratio in ratios]


@pytest.mark.parametrize("rows", [6, 3, 1])
def test_stable_drl_weighs_each_row_against_the_whole_rollout(rows):
    inputs, run = random_inputs(), settings()
    weights = stable_weights(inputs, run.ratio_cap)
    written = bounds_written_out(inputs, run.eubo_beta)
    rows_of = zip(inputs.advantages, written, strict=True)
    bounds = [lower if a > 0 else 0.3 * upper + 0.7 * lower for a, (lower, upper) in rows_of]
    expected = -sum(w * a * bound for w, a, bound in zip(weights, inputs.advantages, bounds, strict=True))
    everyone = replace(inputs, log_ratios=sequence_log_ratios(inputs))
    found = [OBJECTIVES["stable_drl"](part, run) for part in micro_batches(everyone, rows)]
    loss = sum(loss for loss, _ in found) / len(found)
    torch.testing.assert_close(loss, expected, **SINGLE)
    torch.testing.assert_close(gradient(loss, inputs), gradient(expected, inputs), **SINGLE)
    assert max(metrics["weight_max"] for _, metrics in found) == pytest.approx(6 * max(weights), rel=1e-12)


def test_stable_drls_weights_sum_to_one():
    """Rows with one advantage and one bound: the loss is their product, whatever the ratios."""
    inputs = random_inputs(views=1, weights="one")
    inputs = replace(
        inputs, advantages=torch.ones(6).double(), mask=torch.ones(6, 5), weights=torch.full((6, 1, 5), 0.2)
    )
    same = inputs.view_logps.detach()[:1].expand(6, 1, 5)
    inputs = replace(inputs, view_logps=same, view_old=inputs.view_old)
    for part in (inputs, replace(inputs, log_ratios=sequence_log_ratios(inputs))):
        loss, _ = OBJECTIVES["stable_drl"](part, settings())
        torch.testing.assert_close(loss, -same[0].mean(), **SINGLE)


@pytest.mark.parametrize("loss_type", ["sum", "grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("objective", OURS)
def test_a_steps_loss_does_not_depend_on_its_micro_batches(objective, loss_type):
    inputs, run = random_inputs(), settings(loss_type=loss_type)
    if OBJECTIVES[objective].over_all_rows:
        inputs = replace(inputs, log_ratios=sequence_log_ratios(inputs))
    whole, _ = OBJECTIVES[objective](inputs, run)
    assert gradient(whole, inputs).abs().sum() > 0
    for rows in (3, 2, 1):
        parts = micro_batches(inputs, rows)
        loss = sum(OBJECTIVES[objective](part, run)[0] for part in parts) / len(parts)
        torch.testing.assert_close(loss, whole, **EXACT)
        torch.testing.assert_close(gradient(loss, inputs), gradient(whole, inputs), **EXACT)


@pytest.mark.parametrize("objective", OURS)
def test_a_row_that_is_out_of_the_loss_moves_nothing(objective):
    inputs = random_inputs(weights="one")
    loss, _ = OBJECTIVES[objective](inputs, settings())
    other = replace(inputs, advantages=inputs.advantages + 5 * (inputs.mask.sum(-1) == 0))
    torch.testing.assert_close(OBJECTIVES[objective](other, settings())[0], loss, **EXACT)
    assert gradient(loss, inputs)[inputs.mask.sum(-1) == 0].abs().sum() == 0
