"""KL penalties, compared with loops over tokens, and with TRL's KL if TRL has it."""

import math
from dataclasses import replace

import pytest
import torch

from d1.rl.losses import MEANS, PENALTIES
from tests import losses
from tests.losses import gradient, in_parts, micro_batches, random_inputs, settings, summed, trl_loss, trl_trainer

EXACT = {"rtol": 1e-12, "atol": 1e-14}
EACH_MEAN = [(name, loss_type) for name in PENALTIES for loss_type in (MEANS if name == "k3" else ["sum"])]
IN_A_MICRO_BATCH = [("k3", "bnpo"), ("k3_likely", "sum")]


@pytest.fixture(scope="module")
def trainer(tiny_model_dir, tmp_path_factory):
    return trl_trainer(tiny_model_dir, tmp_path_factory.mktemp("trl"))


def k3(terms, to="view_reference"):
    """d - log d - 1 of each term, d the other model's probability over the policy's."""

    def of(log_ratio, row):
        return math.exp(-log_ratio) + log_ratio - 1, 1 - math.exp(-log_ratio)

    return lambda inputs, run: summed(inputs, terms(inputs, run), of, getattr(inputs, to))


def k2(terms):
    """Half the square of each term's log-ratio, over the completion's length."""

    def written_out(inputs, run):
        def of(log_ratio, row):
            length = int(inputs.mask[row].sum())
            return log_ratio**2 / 2 / length, log_ratio / length

        return summed(inputs, terms(inputs, run, per_token=False), of, inputs.view_reference)

    return written_out


def sums_over_tokens(inputs, run):
    """A term for each token: their sum in a view, whatever the weights, and the mean over views."""
    for row, tokens, share in losses.steps(inputs, run):
        for place in tokens:
            yield losses.Term(row, {place: 1.0}, share * len(tokens))


WRITTEN_OUT = {
    "k3": k3(losses.tokens_in_views),
    "k3_to_old": k3(sums_over_tokens, "view_old"),
    "k3_steps": k3(losses.steps),
    "k3_likely": k3(losses.likely_tokens),
    "k2_sequence": k2(losses.completions),
    "k2_draws": k2(losses.draws),
}


@pytest.mark.parametrize("views_per_draw", [1, 2, 0])
@pytest.mark.parametrize(("name", "loss_type"), EACH_MEAN)
def test_a_penalty_is_its_formula(name, loss_type, views_per_draw):
    inputs, run = random_inputs(views=4), settings(loss_type=loss_type)
    likelier = (0.3 * inputs.view_logps).detach().requires_grad_()
    inputs = replace(inputs, view_logps=likelier, views_per_draw=views_per_draw)
    expected, slope = WRITTEN_OUT[name](inputs, run)
    penalty = PENALTIES[name](inputs, run)
    torch.testing.assert_close(penalty.item(), expected, **EXACT)
    torch.testing.assert_close(gradient(penalty, inputs), slope, **EXACT)
    assert slope.abs().sum() > 0


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_k3_in_one_view_of_weight_one_is_trls_kl(trainer, loss_type):
    inputs = random_inputs(views=1, weights="one")
    (with_kl, _), (without, _) = (trl_loss(trainer, inputs, loss_type=loss_type, beta=beta) for beta in (0.3, 0.0))
    ours, theirs = 0.3 * PENALTIES["k3"](inputs, settings(loss_type=loss_type)), with_kl - without
    torch.testing.assert_close(ours, theirs, **EXACT)
    torch.testing.assert_close(gradient(ours, inputs), gradient(theirs, inputs), **EXACT)


@pytest.mark.parametrize(("name", "loss_type"), EACH_MEAN)
def test_a_penalty_is_zero_between_equals_and_the_same_in_micro_batches(name, loss_type):
    """Except for means over the tokens of a micro-batch, which are then averaged."""
    inputs, run = random_inputs(), settings(loss_type=loss_type)
    same = inputs.view_logps.detach()
    equal = replace(inputs, view_old=same, view_reference=same)
    assert PENALTIES[name](equal, run) == 0
    assert gradient(PENALTIES[name](equal, run), inputs).abs().sum() == 0
    whole = PENALTIES[name](inputs, run)
    assert whole > 0
    for rows in (3, 2, 1):
        penalty = in_parts(PENALTIES[name], inputs, run, rows)
        if (name, loss_type) in IN_A_MICRO_BATCH:
            parts = [WRITTEN_OUT[name](part, run)[0] for part in micro_batches(inputs, rows)]
            torch.testing.assert_close(penalty.item(), sum(parts) / len(parts), **EXACT)
            assert (penalty - whole).abs() > 1e-4
            continue
        torch.testing.assert_close(penalty, whole, **EXACT)
        torch.testing.assert_close(gradient(penalty, inputs), gradient(whole, inputs), **EXACT)
