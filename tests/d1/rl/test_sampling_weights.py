"""Truncated importance weights, compared with loops and with TRL's, and what a run logs about them."""

import math
from dataclasses import replace

import pytest
import torch

from d1.rl.batch import sampling_gap, truncated_weights
from d1.rl.losses import MEANS, OBJECTIVES
from tests.losses import gradient, random_inputs, settings, trl_loss, trl_trainer
from tests.rounding import LOGITS, TOKENS, assert_near, rounding
from tests.tiny_grpo import logged, make_method, weights

EXACT = {"rtol": 1e-12, "atol": 1e-14}
CAP = 1.3


def sampled_logps(inputs):
    """What a sampler may have noted: some tokens are more likely than by the estimator, some less likely."""
    noise = torch.randn(inputs.mask.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return inputs.view_old.mean(1) + 0.5 * noise


def weighted(inputs, cap=CAP):
    return replace(inputs, sampling_weights=truncated_weights(sampled_logps(inputs), inputs.old, inputs, cap))


@pytest.fixture(scope="module")
def trainer(tiny_model_dir, tmp_path_factory):
    return trl_trainer(tiny_model_dir, tmp_path_factory.mktemp("trl"))


def test_a_weight_is_the_capped_ratio_of_trained_to_sampling_policy():
    """A token's log-prob is the mean over the views that score it; if no view does, its weight is 1."""
    inputs = random_inputs()
    found, sampled, capped = weighted(inputs).sampling_weights, sampled_logps(inputs), 0
    for row in range(6):
        for k in range(5):
            view_weights = [inputs.weights[row, v, k].item() for v in range(3)]
            expected = 1.0
            if sum(view_weights):
                olds = [inputs.view_old[row, v, k].item() for v in range(3)]
                old = sum(w * one for w, one in zip(view_weights, olds, strict=True)) / sum(view_weights)
                ratio = math.exp(old - sampled[row, k].item())
                capped += ratio > CAP
                expected = min(ratio, CAP)
            assert found[row, k].item() == pytest.approx(expected, rel=1e-12)
    assert 0 < capped < (inputs.weights.sum(1) > 0).sum()
    assert not found.requires_grad


def test_their_logged_mean_and_the_share_of_capped_ones_are_over_scored_tokens():
    """Tokens that no view scores, whose weight is 1, count in neither. Two processes with these rows change nothing."""
    inputs = weighted(random_inputs())
    scored = [(row, k) for row in range(6) for k in range(5) if inputs.weights[row, :, k].any()]
    assert len(scored) < inputs.mask.numel()
    values = [inputs.sampling_weights[row, k].item() for row, k in scored]
    for processes in (1, 2):
        found = sampling_gap(sampled_logps(inputs), inputs, lambda own, count=processes: own.repeat(count), CAP)
        assert found["sampling/weight_mean"] == pytest.approx(sum(values) / len(values), rel=1e-12)
        assert found["sampling/weight_capped"] == pytest.approx(sum(value == CAP for value in values) / len(values))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo"])
def test_trls_loss_takes_them_as_its_own_token_truncate_and_leaves_its_kl_alone(trainer, loss_type, level):
    """TRL multiplies each token's loss before it adds the KL, if rollouts come from vLLM."""
    inputs = random_inputs(views=1, weights="one")
    options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.3}
    with_weights = weighted(inputs)
    try:
        of_vllm = {"use_vllm": True, "importance_sampling_ratio": with_weights.sampling_weights}
        theirs, _ = trl_loss(trainer, inputs, **options, **of_vllm)
    finally:
        trainer.use_vllm = False
    ours, _ = trl_loss(trainer, with_weights, **options)
    without, _ = trl_loss(trainer, inputs, **options)
    torch.testing.assert_close(ours, theirs, **EXACT)
    torch.testing.assert_close(gradient(ours, inputs), gradient(theirs, inputs), **EXACT)
    assert (ours - without).abs() > 1e-3


@pytest.mark.parametrize("loss_type", MEANS)
def test_they_weigh_the_gradient_of_each_token_of_the_objectives_that_are_sums_over_tokens(loss_type):
    inputs, run = random_inputs(), settings(loss_type=loss_type)
    with_weights = weighted(inputs)
    for name in ("reinforce", "clipped_views"):
        loss, plain = (OBJECTIVES[name](one, run)[0] for one in (with_weights, inputs))
        expected = gradient(plain, inputs) * with_weights.sampling_weights.unsqueeze(1)
        torch.testing.assert_close(gradient(loss, inputs), expected, **EXACT)


def test_one_view_of_weight_one_is_trls_loss_with_weights_too(trainer):
    inputs = weighted(random_inputs(views=1, weights="one"))
    theirs, _ = trl_loss(trainer, inputs, loss_type="dapo")
    torch.testing.assert_close(OBJECTIVES["clipped_views"](inputs, settings(loss_type="dapo"))[0], theirs, **EXACT)


def weighing(model_dir, folder, rows=8, method="cj-grpo", **changes):
    cut = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows, "max_steps": 2}
    return make_method(model_dir, folder, method, **(cut | {"sampling_weight_cap": 1.02} | changes))


def test_a_cached_samplers_weights_do_not_depend_on_micro_batches_or_padding(tiny_model_dir, tmp_path):
    """Replay computes the tokens' probabilities without a cache; the cache made them higher or lower."""
    options = {"sampler": "cached", "beta": 0.04, "learning_rate": 0.01}
    whole = weighing(tiny_model_dir, tmp_path, **options)
    start = weights(whole.model)
    whole.train()
    first = logged(whole)[0]
    assert math.isfinite(first["sampling/weight_mean"])
    assert first["sampling/weight_mean"] != pytest.approx(1.0, abs=1e-4)
    assert 0 < first["sampling/weight_capped"] < 1
    expected = weights(whole.model)
    assert max((value - start[name]).abs().max() for name, value in expected.items()) > 1e-3
    parts = weighing(tiny_model_dir, tmp_path, rows=2, pad_to_multiple_of=16, **options)
    parts.train()
    for name, value in weights(parts.model).items():
        assert_near(value, expected[name], terms=TOKENS)
    assert logged(parts)[0]["sampling/weight_mean"] == pytest.approx(first["sampling/weight_mean"], abs=0.05)


def test_replay_of_an_exact_rollout_weighs_nothing(tiny_model_dir, tmp_path):
    trainer = weighing(tiny_model_dir, tmp_path, learning_rate=0.0)
    trainer.train()
    for entry in logged(trainer):
        assert entry.get("sampling/weight_mean", 1.0) == pytest.approx(1.0, abs=rounding(LOGITS))
        assert entry.get("sampling/weight_capped", 0.0) == 0.0
    assert sum("sampling/weight_mean" in entry for entry in logged(trainer)) == 1  # of a rollout's two updates
