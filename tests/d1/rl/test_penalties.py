"""KL penalties against loops over tokens, and against TRL's KL where TRL has it."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from d1.rl.objectives import PENALTIES
from d1.rl.rows import MEANS
from tests.losses import divisor, gradient, micro_batches, random_inputs, settings, trl_loss, trl_trainer

EXACT = {"rtol": 1e-12, "atol": 1e-14}


@pytest.fixture(scope="module")
def trainer(tiny_model_dir, tmp_path_factory):
    return trl_trainer(tiny_model_dir, tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("loss_type", MEANS)
@pytest.mark.parametrize(("name", "of"), [("k3", "view_reference"), ("k3_to_old", "view_old")])
def test_k3_is_d_minus_log_d_minus_one_of_every_token_in_every_view(name, of, loss_type):
    inputs, run = random_inputs(), settings(loss_type=loss_type)
    expected, slope = 0.0, torch.zeros_like(inputs.weights)
    for i, v, k in itertools.product(range(6), range(3), range(5)):
        weight = inputs.weights[i, v, k].item() / divisor(inputs, i, run)
        d = math.exp(getattr(inputs, of)[i, v, k].item() - inputs.view_logps[i, v, k].item())
        expected += weight * (d - math.log(d) - 1)
        slope[i, v, k] = weight * (1 - d)
    penalty = PENALTIES[name](inputs, run)
    torch.testing.assert_close(penalty.item(), expected, **EXACT)
    torch.testing.assert_close(gradient(penalty, inputs), slope, **EXACT)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_k3_in_one_view_of_weight_one_is_trls_kl(trainer, loss_type):
    inputs = random_inputs(views=1, weights="one")
    (with_kl, _), (without, _) = (trl_loss(trainer, inputs, loss_type=loss_type, beta=beta) for beta in (0.3, 0.0))
    ours, theirs = 0.3 * PENALTIES["k3"](inputs, settings(loss_type=loss_type)), with_kl - without
    torch.testing.assert_close(ours, theirs, **EXACT)
    torch.testing.assert_close(gradient(ours, inputs), gradient(theirs, inputs), **EXACT)


def test_k2_sequence_is_half_the_square_of_a_completions_log_ratio_over_its_length():
    """(ELBO - reference's)^2 / 2 / L, a mean over rows (arXiv 2512.03759)."""
    inputs = random_inputs()
    expected, slope = 0.0, torch.zeros_like(inputs.weights)
    for i in range(6):
        change, length = 0.0, max(int(inputs.mask[i].sum()), 1)
        for v, k in itertools.product(range(3), range(5)):
            log_ratio = inputs.view_logps[i, v, k].item() - inputs.view_reference[i, v, k].item()
            change += inputs.weights[i, v, k].item() * log_ratio
        expected += change**2 / 2 / length / 6
        slope[i] = change * inputs.weights[i] / length / 6
    penalty = PENALTIES["k2_sequence"](inputs, settings())
    torch.testing.assert_close(penalty.item(), expected, **EXACT)
    torch.testing.assert_close(gradient(penalty, inputs), slope, **EXACT)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_is_zero_between_equals_and_the_same_in_micro_batches(name):
    inputs = random_inputs()
    same = inputs.view_logps.detach()
    equal = replace(inputs, view_old=same, view_reference=same)
    for loss_type in ("sum", "grpo", "dr_grpo", "dapo"):
        run = settings(loss_type=loss_type)
        assert PENALTIES[name](equal, run) == 0
        assert gradient(PENALTIES[name](equal, run), inputs).abs().sum() == 0
        whole = PENALTIES[name](inputs, run)
        assert whole > 0
        for rows in (3, 2, 1):
            parts = micro_batches(inputs, rows)
            penalty = sum(PENALTIES[name](part, run) for part in parts) / len(parts)
            torch.testing.assert_close(penalty, whole, **EXACT)
            torch.testing.assert_close(gradient(penalty, inputs), gradient(whole, inputs), **EXACT)
