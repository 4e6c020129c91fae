"""The estimator study's figures on models so small that all masks can be enumerated."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest
import torch

from d1.models import load_model, load_tokenizer
from d1.tasks import load_task
from pocket.recipes import ROOT
from studies.estimators import run
from studies.estimators.choices import BY_KEY, Choice
from studies.estimators.completions import divergence, sample_rows, trajectory_logps
from studies.estimators.measures import Case, group_gradients, measure, of_groups, target_of
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    MASK,
    SAMPLED,
    VISIBLE,
    all_states,
    any_order_bound,
    some_rows,
    tiny,
)


@pytest.fixture(scope="module")
def case():
    """Four rows in two groups, the last a second copy of the first with another advantage."""
    rows = [0, 1, 2, 0]
    sampled = replace(some_rows(SAMPLED, rows), reveal_steps=SAMPLED.reveal_steps[rows].clamp(min=0))
    return Case(tiny(2), sampled, torch.tensor([0.5, -0.5, 0.25, -0.25]), group=2, mask_token_id=MASK, tokens=100)


@pytest.fixture(scope="module")
def target(case):
    return target_of(case, bound_draws=48)


def flat(case, total):
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(total, case.weights)])


def test_targets_are_the_enumerated_bound_and_the_replay_of_every_step(case, target):
    lengths = torch.tensor([4.0, 3, 1, 4])
    exact = any_order_bound(case.model)[[0, 1, 2, 0]].sum(-1) / lengths
    assert target.bound.mean().item() == pytest.approx(exact.mean().item(), rel=0.03)
    gradient = flat(case, (case.advantages * exact).mean())
    distance = ((target.bound_gradients.mean(0) - gradient).norm() / gradient.norm()).item()
    assert target.bound_error < 0.1
    assert distance < 3 * target.bound_error

    steps, states = case.sampled.reveal_steps, []
    for row, of in enumerate([0, 1, 2, 0]):
        length = LENGTHS[of]
        visible = [[k for k in range(CANVAS) if steps[row, k] >= steps[row, place]] for place in range(length)]
        states.append(sum(state(case, row, hidden)[place] for place, hidden in enumerate(visible)) / length)
    torch.testing.assert_close(target.trajectory, torch.stack(states).detach(), rtol=0, atol=1e-6)
    expected = flat(case, (case.advantages * torch.stack(states)).mean())
    torch.testing.assert_close(target.trajectory_gradients.mean(0), expected, rtol=1e-5, atol=1e-7)


def state(case, row, hidden):
    """(canvas,) log-probs of a row's tokens with the positions `hidden` masked, from one forward pass."""
    real = case.sampled.attention_mask[row].bool()
    canvas = case.sampled.canvas_ids[row].clone()
    canvas[hidden] = MASK
    ids = torch.cat([case.sampled.prompt_ids[row][real], canvas])
    logits = case.model(input_ids=ids.unsqueeze(0)).logits[0, -CANVAS:]
    return logits.log_softmax(-1).gather(-1, case.sampled.canvas_ids[row].unsqueeze(-1)).squeeze(-1)


def test_bias_and_deviation_are_those_of_all_masks(case, target):
    """ESPO's single draws: a uniform count of 0 to L, then a set of this size with weight (L + 1) / count."""
    means, variances = [], []
    for row in (0, 1, 2, 0):
        length, outcomes = LENGTHS[row], []
        for some, logps in all_states(case.model, row).items():
            value = (length + 1) / len(some) * logps[list(some)].sum().item() / length if some else 0.0
            outcomes.append((1 / (length + 1) / comb(length, len(some)), value))
        mean = sum(chance * value for chance, value in outcomes)
        means.append(mean)
        variances.append(sum(chance * (value - mean) ** 2 for chance, value in outcomes))
    found = measure(case, Choice("", "espo", 1, {"num_views": 1}), target, draws=300)
    error = (sum(variances) / 300) ** 0.5 / 4
    assert found["deviation"] == pytest.approx((sum(variances) / 4) ** 0.5, rel=0.15)
    for name in ("bound", "trajectory"):
        expected = sum(means) / 4 - getattr(target, name).mean().item()
        assert found[f"bias_to_{name}"] == pytest.approx(expected, abs=4 * error)


def test_signal_and_noise_are_unbiased():
    """Over every outcome of three draws with two possible extras: SNR times noise is the true signal on average."""
    signal, extras = torch.tensor([2.0, 1.0]).double(), torch.tensor([[0.5, -1.0], [-0.5, 1.0]]).double()
    signals, noises = [], []
    for picks in torch.cartesian_prod(*[torch.arange(2)] * 3):
        whole = signal + extras[picks]
        flat_rows = torch.cat([whole, signal.expand(2, -1)])
        snr = of_groups((flat_rows @ flat_rows.T).numpy(), np.ones(1), 1.0)["snr"]
        noise = whole.var(0).sum().item()
        if noise:
            signals.append(snr * noise)
        else:
            signals.append(whole.mean(0).square().sum().item())
        noises.append(noise)
    assert sum(noises) / 8 == pytest.approx(extras[0].square().sum().item())
    assert sum(signals) / 8 == pytest.approx(signal.square().sum().item())


def test_rows_without_weight_are_neither_scored_nor_charged(case):
    """Whole groups and single rows; 3 per token of a view with gradients."""
    tokens = [int(VISIBLE[row].sum()) + CANVAS for row in (0, 1, 2, 0)]
    for advantages, paid in (([0.5, -0.5, 0.0, 0.0], (0, 1)), ([0.5, 0.0, 0.25, -0.25], (0, 2, 3))):
        few = replace(case, advantages=torch.tensor(advantages))
        found = group_gradients(few, BY_KEY["one step", 1], 0)
        assert found.tokens == 3 * sum(tokens[row] for row in paid)
        assert found.values.ne(0).nonzero().flatten().tolist() == list(paid)
    both = [group_gradients(of, BY_KEY["elbo", 4], 0).gradients for of in (few, case)]
    torch.testing.assert_close(both[0][1], both[1][1])  # draws do not depend on which rows count


def test_completions_are_those_of_rl():
    """The sampler's recorded log-probs equal those of replay on the model that sampled."""
    base = ROOT / "pocket" / "base"
    found = run.make_case("sudoku", base, groups=2, group=3)
    assert found.advantages.view(2, 3).sum(-1).tolist() == pytest.approx([0, 0], abs=1e-6)
    replayed = trajectory_logps(found.model, found.sampled, found.mask_token_id)
    torch.testing.assert_close(replayed, found.sampled.logps * found.sampled.scored, rtol=0, atol=2e-5)
    model, tokenizer = load_model(str(base)), load_tokenizer(str(base))
    prompts = load_task("sudoku").load_rows("validation")["prompt"][:2]
    assert divergence(model, found.model, tokenizer, prompts, 32) == pytest.approx(0, abs=1e-5)
    whole = sample_rows(model, tokenizer, prompts, 32, seed=0)  # no EOS stop: 16 passes over everything
    assert whole.tokens == 16 * int(whole.rows.attention_mask.sum() + 2 * 32)
    stopped = sample_rows(model, tokenizer, prompts, 16, seed=0, eos_stop=True)
    assert stopped.tokens <= 8 * int(stopped.rows.attention_mask.sum() + 2 * 16)
