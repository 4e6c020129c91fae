"""Objectives, KL penalties and advantages, compared with loops over tokens with gradients in closed form, and with TRL
if TRL has them. The formulas of whole methods are in test_published.py."""

import math
from collections import Counter
from dataclasses import replace
from statistics import fmean, pstdev, stdev

import pytest
import torch

from d1.rl import tables  # noqa: F401  (the parts of the methods' files join the tables)
from d1.rl.batch import RankView, filter_groups, prompt_filter, transform_advantages
from d1.rl.losses import (
    ADVANTAGES,
    MEANS,
    OBJECTIVES,
    PENALTIES,
    TRLS_SETTINGS,
    Advantage,
    AdvantageInputs,
    LossInputs,
    sequence_log_ratios,
)
from d1.rl.methods.rldf import likely
from d1.rl.methods.spg import evidence_bounds
from tests.losses import (
    clipped,
    divisor,
    gradient,
    in_parts,
    micro_batches,
    random_inputs,
    settings,
    summed,
    trl_loss,
    trl_trainer,
)

EXACT = {"rtol": 1e-12, "atol": 1e-14}
OURS = [name for name, row in OBJECTIVES.items() if row.loss is not None]
SINGLE = {"rtol": 1e-7, "atol": 1e-7}  # shares of hidden tokens are in fp32
EACH_MEAN = [
    (name, loss_type)
    for name in OURS
    for loss_type in (OBJECTIVES[name].loss_types if "loss_type" in OBJECTIVES[name].settings else ["sum"])
]
EACH_PENALTY = [(name, loss_type) for name in PENALTIES for loss_type in (MEANS if name == "k3" else ["sum"])]
BOTH = OBJECTIVES | PENALTIES


def in_a_micro_batch(one):
    """Whether it is a mean over the tokens of a micro-batch, as published."""
    name, loss_type = one
    return name in ("rldf", "k3_likely", "igpo", "k3_kept") or (loss_type == "bnpo" and (name == "k3" or name in OURS))


@pytest.fixture(scope="module")
def trainer(tiny_model_dir, tmp_path_factory):
    return trl_trainer(tiny_model_dir, tmp_path_factory.mktemp("trl"))


# --- The formulas, written out ----------------------------------------------------------------------------------------


def ppo(inputs, run, held=None):
    """-min(r A, clip(r) A) of each token in each view."""

    def of(log_ratio, row):
        advantage, ratio = inputs.advantages[row].item(), math.exp(log_ratio)
        gain, derivative = clipped(ratio, advantage, run)
        if held is not None:
            held["all"] += 1
            held["up" if advantage > 0 else "down"] += bool(advantage and not derivative)
        return -gain, -derivative * ratio

    return summed(inputs, run, of, inputs.view_old)


def policy_gradient(inputs, run):
    def of(logp, row):
        return -inputs.advantages[row].item() * logp, -inputs.advantages[row].item()

    return summed(inputs, run, of, torch.zeros_like(inputs.weights))


def k3(inputs, run):
    """d - log d - 1 of each token in each view, d the reference's probability over the policy's."""

    def of(log_ratio, row):
        return math.exp(-log_ratio) + log_ratio - 1, 1 - math.exp(-log_ratio)

    return summed(inputs, run, of, inputs.view_reference)


WRITTEN_OUT = {"reinforce": policy_gradient, "clipped_views": ppo, "k3": k3}


def check(name, inputs, run, **options):
    """The loss or penalty and its gradient are those of the formula; returns the metrics."""
    expected, slope = WRITTEN_OUT[name](inputs, run, **options)
    found = BOTH[name](inputs, run)
    loss, metrics = found if isinstance(found, tuple) else (found, {})
    torch.testing.assert_close(loss.item(), expected, **EXACT)
    torch.testing.assert_close(gradient(loss, inputs), slope, **EXACT)
    assert slope.abs().sum() > 0
    return metrics


def pairs(inputs):
    """The same rows, whose views are draws of two views each."""
    return replace(inputs, views_per_draw=2)


# --- Objectives of our own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon_high", "delta"), [(None, None), (0.35, None), (0.35, 1.5)])
@pytest.mark.parametrize("loss_type", MEANS)
def test_clipped_views_is_ppos_loss_of_every_token_in_every_view(loss_type, epsilon_high, delta):
    inputs, held = random_inputs(), Counter()
    run = settings(loss_type=loss_type, epsilon_high=epsilon_high, delta=delta)
    metrics = check("clipped_views", inputs, run, held=held)
    assert min(held["up"], held["down"]) > 0
    assert metrics["clip_ratio/region_mean"] == pytest.approx((held["up"] + held["down"]) / held["all"], rel=1e-6)


@pytest.mark.parametrize("rows", [6, 2])
def test_a_states_own_advantage_replaces_that_of_its_row(rows):
    """As if each view were a separate rollout; egspo-sa has one advantage for each state."""
    inputs, own = random_inputs(), torch.randn(6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    loss = in_parts(OBJECTIVES["clipped_steps"], replace(inputs, view_advantages=own), settings(), rows)
    expected = torch.zeros_like(loss)
    for view in range(3):
        weights = inputs.weights * (torch.arange(3) == view).unsqueeze(1)
        alone = replace(inputs, advantages=own[:, view], weights=weights)
        expected = expected + OBJECTIVES["clipped_steps"](alone, settings())[0]
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(gradient(loss, inputs), gradient(expected, inputs), **EXACT)


@pytest.mark.parametrize("epsilon", [0.2, 1.5])
def test_a_completions_ratio_cannot_overflow_where_the_clip_holds_it(epsilon):
    inputs = random_inputs(views=1, weights="one")
    run, up = settings(epsilon=epsilon), (inputs.advantages >= 0).view(-1, 1, 1)
    far = replace(inputs, view_logps=(inputs.view_old + 800.0 * up - 800.0 * ~up).detach().requires_grad_())
    loss, _ = OBJECTIVES["clipped_sequences"](far, run)
    lowest = max(1 - epsilon, 0.0)
    torch.testing.assert_close(loss.item(), -(1.35 * (1 + 2) - lowest * (0.5 + 1.5)) / 6, **EXACT)
    assert torch.equal(gradient(loss, far), torch.zeros_like(far.weights))


@pytest.mark.parametrize("loss_type", OBJECTIVES["reinforce"].loss_types)
def test_reinforce_is_a_weighted_sum_of_log_probabilities(loss_type):
    check("reinforce", random_inputs(), settings(loss_type=loss_type))


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


def test_bgpo_keeps_its_gradient_where_a_bound_has_fallen_by_more_than_one_per_token():
    inputs = random_inputs(views=1, weights="one")
    fallen = replace(inputs, view_logps=(inputs.view_old - 3).detach().requires_grad_())
    loss, _ = OBJECTIVES["bgpo"](fallen, settings())
    # d = -3: the ratio of a good row is -2 and its slope 1; that of a bad row is clipped.
    terms = [-2.0 * 1.0, -0.8 * 0.5, -2.0 * 2.0, -0.8 * 1.5, 0.0, 0.0]
    torch.testing.assert_close(loss.item(), -sum(terms) / 6, **EXACT)
    lengths = inputs.mask.sum(-1, keepdim=True).clamp(min=1)
    expected = -torch.tensor([1.0, 0, 2, 0, 0, 0], dtype=torch.float64).view(6, 1, 1) / 6 / lengths.unsqueeze(1)
    torch.testing.assert_close(gradient(loss, fallen), expected * inputs.weights, **EXACT)


@pytest.mark.parametrize(("spread", "inside"), [(1e-6, 1.0), (0.5, 0.0)])
def test_gdsd_as_it_is_written_is_reinforce_inside_its_clamp_and_nothing_outside(spread, inside):
    inputs = pairs(random_inputs(views=4, spread=spread))
    loss, _ = OBJECTIVES["gdsd"](inputs, settings(epsilon=4e-4))
    factors = -20 * inputs.advantages / inputs.lengths / 6  # the mean over draws of a bound, times their number
    expected = inside * 2 * factors[:, None, None] * inputs.weights
    torch.testing.assert_close(gradient(loss, inputs), expected, rtol=1e-5, atol=1e-4 * inside)


def test_likely_tokens_are_those_that_a_state_revealed_and_those_with_a_probability_of_six_tenths():
    inputs = random_inputs()
    inputs = replace(inputs, view_logps=(0.3 * inputs.view_logps).detach().requires_grad_())
    counts, expected = likely(inputs), torch.zeros_like(inputs.scored)
    for row, view in inputs.scored.any(-1).nonzero().tolist():
        tokens = inputs.scored[row, view].nonzero().flatten().tolist()
        first = min(inputs.reveal_steps[row, k] for k in tokens)
        for k in tokens:
            expected[row, view, k] = (
                inputs.reveal_steps[row, k] == first or inputs.view_logps[row, view, k].exp() >= 0.6
            )
    assert torch.equal(counts, expected)
    share = OBJECTIVES["rldf"](inputs, settings())[1]["likely"]
    assert share == pytest.approx(counts.sum().item() / inputs.scored.sum().item(), rel=1e-6)
    assert ((inputs.view_logps[counts].exp() - 0.65).abs() < 0.05).any()


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


@pytest.mark.parametrize("loss_type", OBJECTIVES["spg"].loss_types)
def test_spg_is_the_lower_form_of_good_rows_and_a_mixture_of_both_for_bad_ones(loss_type):
    inputs, run = random_inputs(), settings(loss_type=loss_type)
    written = bounds_written_out(inputs, run.eubo_beta)
    for found, expected in zip(evidence_bounds(inputs, run.eubo_beta), zip(*written, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected), **SINGLE)
    expected = 0.0
    for i, (lower, upper) in enumerate(written):
        advantage, length = inputs.advantages[i], max(int(inputs.mask[i].sum()), 1)
        bound = lower if advantage > 0 else 0.3 * upper + 0.7 * lower
        expected -= advantage * bound * length / divisor(inputs, i, 0, run)
    loss, _ = OBJECTIVES["spg"](inputs, run)
    torch.testing.assert_close(loss, expected, **SINGLE)
    torch.testing.assert_close(gradient(loss, inputs), gradient(expected, inputs), **SINGLE)


def test_spgs_upper_form_is_above_the_lower_one_and_equal_to_it_where_nothing_varies():
    """In one view that hides everything, both forms equal the mean log-probability."""
    inputs = random_inputs(views=1, weights="one")
    inputs = replace(inputs, weights=inputs.weights / inputs.lengths[:, None, None])
    lower, upper = evidence_bounds(inputs, 1.5)
    torch.testing.assert_close(lower, upper, **EXACT)
    several = random_inputs(views=3, weights="one")
    several = replace(several, weights=several.weights / 3 / several.lengths[:, None, None])
    lower, upper = evidence_bounds(several, 1.5)
    taking_part = several.mask.any(1)
    assert (upper > lower)[taking_part].all()


def of_prompts(inputs):
    """With the log-ratios of the three rows of each row's prompt."""
    return replace(inputs, log_ratios=sequence_log_ratios(inputs).view(2, 3).repeat_interleave(3, 0))


@pytest.mark.parametrize("rows", [6, 3, 2, 1])
def test_stable_drl_weighs_each_row_against_those_of_its_prompt(rows):
    """-sum of w A bound over a prompt's rows, w their softmax; the mean over prompts, which micro-batches mix."""
    inputs, run, weights, expected = random_inputs(), settings(), [], 0.0
    changes = (inputs.weights * (inputs.view_logps - inputs.view_old)).sum((1, 2)).tolist()
    ratios = [min(math.exp(change), run.ratio_cap) for change in changes]
    assert max(changes) > math.log(run.ratio_cap) > min(changes)
    for i, (lower, upper) in enumerate(bounds_written_out(inputs, run.eubo_beta)):
        weights.append(ratios[i] / sum(ratios[i // 3 * 3 :][:3]))
        bound = lower if inputs.advantages[i] > 0 else 0.3 * upper + 0.7 * lower
        expected = expected - weights[i] * inputs.advantages[i] * bound / 2
    parts = micro_batches(of_prompts(inputs), rows)
    found = [OBJECTIVES["stable_drl"](part, run) for part in parts]
    loss = sum(loss for loss, _ in found) / len(found)
    torch.testing.assert_close(loss, expected, **SINGLE)
    torch.testing.assert_close(gradient(loss, inputs), gradient(expected, inputs), **SINGLE)
    assert max(metrics["weight_max"] for _, metrics in found) == pytest.approx(3 * max(weights), rel=1e-12)
    if rows == 3:  # so that a softmax over the rows of a micro-batch would be another one
        assert all(0 < (part.log_ratios == parts[0].log_ratios[0]).all(1).sum() < 3 for part in parts)


# --- TRL's ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [None, 1.5, 1.2])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_one_view_of_weight_one_is_trls_loss(trainer, loss_type, delta):
    inputs = random_inputs(views=1, weights="one")
    theirs, logged = trl_loss(trainer, inputs, loss_type=loss_type, delta=delta)
    ours, metrics = OBJECTIVES["clipped_views"](inputs, settings(loss_type=loss_type, delta=delta))
    torch.testing.assert_close(ours, theirs, **EXACT)
    torch.testing.assert_close(gradient(ours, inputs), gradient(theirs, inputs), **EXACT)
    if delta is None:  # TRL's metric does not count what delta limits
        assert metrics["clip_ratio/region_mean"] == pytest.approx(logged["clip_ratio/region_mean"], rel=1e-6)
        assert 0 < logged["clip_ratio/low_mean"] != logged["clip_ratio/high_mean"] > 0


# --- All of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [one for one in EACH_MEAN + EACH_PENALTY if not in_a_micro_batch(one)], ids="-".join)
def test_a_steps_loss_does_not_depend_on_its_micro_batches(one):
    entry, inputs, run = BOTH[one[0]], of_prompts(random_inputs()), settings(loss_type=one[1])
    whole = in_parts(entry, inputs, run, 6)
    assert gradient(whole, inputs).abs().sum() > 0
    for rows in (3, 2, 1):
        loss = in_parts(entry, inputs, run, rows)
        torch.testing.assert_close(loss, whole, **EXACT)
        torch.testing.assert_close(gradient(loss, inputs), gradient(whole, inputs), **EXACT)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_bnpo_is_a_mean_over_micro_batches_of_means_in_them(name):
    inputs, run = random_inputs(), settings(loss_type="bnpo")
    whole = in_parts(BOTH[name], inputs, run, 6)
    for rows in (3, 2, 1):
        parts = [WRITTEN_OUT[name](part, run)[0] for part in micro_batches(inputs, rows)]
        loss = in_parts(BOTH[name], inputs, run, rows)
        torch.testing.assert_close(loss.item(), sum(parts) / len(parts), **EXACT)
        assert (loss - whole).abs() > 1e-4


OTHER = {"epsilon": 0.01, "epsilon_high": 0.02, "delta": 1.1, "ratio_cap": 4.0}


@pytest.mark.parametrize("name", [name for name in OURS if OBJECTIVES[name].idle])
def test_idle_settings_do_nothing_while_the_policy_is_the_one_that_sampled(name):
    found = {}
    for on_policy in (True, False):
        inputs = random_inputs(spread=0.1)
        if on_policy:
            inputs = replace(inputs, view_old=inputs.view_logps.detach())
        inputs = of_prompts(inputs)
        changes = [{}, *({setting: OTHER[setting]} for setting in OBJECTIVES[name].idle)]
        found[on_policy] = [gradient(OBJECTIVES[name](inputs, settings(**one))[0], inputs) for one in changes]
    assert all(torch.equal(one, found[True][0]) for one in found[True])
    assert not all(torch.equal(one, found[False][0]) for one in found[False])
    assert {*OBJECTIVES[name].idle} <= {*OBJECTIVES[name].settings}


@pytest.mark.parametrize("loss_type", OBJECTIVES["trl"].loss_types)
def test_trls_clip_does_nothing_while_the_policy_is_the_one_that_sampled_but_for_cispo(trainer, loss_type):
    inputs = random_inputs(views=1, weights="one")
    inputs = replace(inputs, view_old=inputs.view_logps.detach())
    changes = [{}, {"epsilon_low": 0.01}, {"epsilon_high": 0.02}, {"delta": 1.1}]
    found = [gradient(trl_loss(trainer, inputs, loss_type=loss_type, **one)[0], inputs) for one in changes]
    assert all(torch.equal(one, found[0]) for one in found) == (loss_type != "cispo")


@pytest.mark.parametrize("loss_type", TRLS_SETTINGS)
def test_trls_loss_reads_the_settings_that_are_listed_for_its_type(trainer, loss_type, monkeypatch):
    inputs = random_inputs(views=1, weights="one")
    # The names of TRL's own attributes; `epsilon_high` is `epsilon`, if it is unset.
    other = {"epsilon": {"epsilon_low": 0.9, "epsilon_high": 0.02}, "epsilon_high": {"epsilon_high": 0.02}}
    other["delta"] = {"delta": 1.1}
    for names in (TRLS_SETTINGS["sapo"], TRLS_SETTINGS["vespo"]):
        other.update({name: {} for name in names})
    assert {name for names in TRLS_SETTINGS.values() for name in names} == other.keys()
    plain = gradient(trl_loss(trainer, inputs, loss_type=loss_type)[0], inputs)
    read = set()
    for name, options in other.items():
        with monkeypatch.context() as patch:
            if not options:
                patch.setattr(trainer.args, name, 2 * getattr(trainer.args, name))
            found = gradient(trl_loss(trainer, inputs, loss_type=loss_type, **options)[0], inputs)
        if not torch.equal(found, plain):
            read.add(name)
    assert read == {*TRLS_SETTINGS[loss_type]}
    lower_bound = gradient(trl_loss(trainer, inputs, loss_type=loss_type, epsilon_low=0.9)[0], inputs)
    assert torch.equal(lower_bound, plain) == (loss_type in ("cispo", "sapo", "vespo"))


@pytest.mark.parametrize("objective", OURS)
def test_a_row_that_is_out_of_the_loss_moves_nothing(objective):
    inputs = random_inputs(weights="one")
    loss, _ = OBJECTIVES[objective](inputs, settings())
    other = replace(inputs, advantages=inputs.advantages + 5 * (inputs.mask.sum(-1) == 0))
    torch.testing.assert_close(OBJECTIVES[objective](other, settings())[0], loss, **EXACT)
    assert gradient(loss, inputs)[inputs.mask.sum(-1) == 0].abs().sum() == 0


# --- KL penalties -----------------------------------------------------------------------------------------------------


def with_doubled_view(inputs):
    """The first view of each row with twice its weights."""
    factor = torch.ones(inputs.weights.shape[1], 1, dtype=inputs.weights.dtype)
    factor[0] = 2
    return replace(inputs, weights=inputs.weights * factor)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_says_whether_weights_weigh_its_views(name):
    inputs, run = random_inputs(), settings(loss_type="sum")
    found, doubled = PENALTIES[name](inputs, run), PENALTIES[name](with_doubled_view(inputs), run)
    assert PENALTIES[name].weighs_views == (abs(found.item() - doubled.item()) > 1e-6)


@pytest.mark.parametrize("name", ["clipped_views", "clipped_steps", "rldf", "clipped_view_means", "reinforce"])
def test_an_objective_says_whether_weights_weigh_its_views(name):
    inputs, run = random_inputs(), settings(loss_type="sum")
    found, doubled = OBJECTIVES[name](inputs, run)[0], OBJECTIVES[name](with_doubled_view(inputs), run)[0]
    assert OBJECTIVES[name].weighs_views == (abs(found.item() - doubled.item()) > 1e-6)


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_says_whether_weights_weigh_views(name):
    """Of the gains of `clipped_views`, which are multiplied by the weights."""
    inputs, run = random_inputs(), settings(loss_type=name)
    loss = OBJECTIVES["clipped_views"]
    found, doubled = loss(inputs, run)[0], loss(with_doubled_view(inputs), run)[0]
    assert MEANS[name].weighs_views == (abs(found.item() - doubled.item()) > 1e-6)


@pytest.mark.parametrize("loss_type", MEANS)
def test_k3_is_its_formula(loss_type):
    check("k3", random_inputs(views=4), settings(loss_type=loss_type))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_k3_in_one_view_of_weight_one_is_trls_kl(trainer, loss_type):
    inputs = random_inputs(views=1, weights="one")
    (with_kl, _), (without, _) = (trl_loss(trainer, inputs, loss_type=loss_type, beta=beta) for beta in (0.3, 0.0))
    ours, theirs = 0.3 * PENALTIES["k3"](inputs, settings(loss_type=loss_type)), with_kl - without
    torch.testing.assert_close(ours, theirs, **EXACT)
    torch.testing.assert_close(gradient(ours, inputs), gradient(theirs, inputs), **EXACT)


@pytest.mark.parametrize(("name", "loss_type"), EACH_PENALTY)
def test_a_penalty_is_zero_between_equals(name, loss_type):
    inputs, run = random_inputs(), settings(loss_type=loss_type)
    same = inputs.view_logps.detach()
    equal = replace(inputs, view_old=same, view_reference=same)
    assert PENALTIES[name](equal, run) == 0
    assert gradient(PENALTIES[name](equal, run), inputs).abs().sum() == 0
    assert PENALTIES[name](inputs, run) > 0


# --- Advantages -------------------------------------------------------------------------------------------------------

# The second group has no spread, and the last has less than a hundredth.
REWARDS = [[0.0, 1.0, 0.25, 2.0], [1.0, 1.0, 1.0, 1.0], [-3.0, 0.5, 0.5, 0.0], [0.5, 0.5, 0.5, 0.504]]
# What TRL passes with scale_rewards none: rewards minus their group's mean.
CENTRED = torch.tensor(REWARDS, dtype=torch.float64)
CENTRED = CENTRED - CENTRED.mean(1, keepdim=True)


# Of completion i of a group with rewards r: arXiv 2402.14740, 2507.08838 (of rows that are averaged), 2509.06949, RLDF.
FORMULAS = {
    "leave_one_out": lambda r, i: r[i] - fmean(r[:i] + r[i + 1 :]),
    "signed_softmax": lambda r, i: (
        len(r) * (1 / sum(math.exp(x - r[i]) for x in r) - 1 / sum(math.exp(r[i] - x) for x in r))
    ),
    "standardised": lambda r, i: (r[i] - fmean(r)) / (pstdev(r) or 1.0),
    "floored": lambda r, i: (r[i] - fmean(r)) / max(stdev(r), 0.01),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_advantages_are_those_of_the_formula(name):
    expected = [[FORMULAS[name](rewards, i) for i in range(4)] for rewards in REWARDS]
    torch.testing.assert_close(ADVANTAGES[name](CENTRED), torch.tensor(expected, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_a_group_of_equal_rewards_has_standardised_advantages_of_zero(size):
    """In fp32, where equal rewards minus their mean may differ from 0."""
    rewards = torch.tensor([0.1, 0.7, 1 / 3, -2.2, 1e6]).unsqueeze(1).expand(-1, size)
    assert not ADVANTAGES["standardised"](rewards - rewards.mean(1, keepdim=True)).any()
    assert not ADVANTAGES["standardised"](rewards / 3 - rewards.mean(1, keepdim=True) / 3 - 1e-8).any()


# Bounds of the completions, as far as an advantage reads them: (rows,) each.
LENGTHS_OF_ROWS = torch.tensor([8.0, 8.0, 5.0, 8.0] * 4, dtype=torch.float64)
OLD_BOUNDS = torch.linspace(-2.0, -1.0, 16, dtype=torch.float64)
REFERENCE_BOUNDS = OLD_BOUNDS + torch.tensor([0.1, -0.2, 0.3, 0.0] * 4, dtype=torch.float64)
BOUNDS = {"lengths": LENGTHS_OF_ROWS, "old_bounds": OLD_BOUNDS, "reference_bounds": REFERENCE_BOUNDS}


def test_dmpos_advantages_and_loss_are_those_of_the_worked_example():
    """Rewards (.1, .05, 0) and D (0, .5, -.5), of bounds over four tokens each; w+ and w- from their exponentials."""
    rewards = torch.tensor([[0.1, 0.05, 0.0]], dtype=torch.float64)
    lengths = torch.full_like(rewards, 4.0)
    reference = torch.tensor([[-1.0, -1.5, -2.0]], dtype=torch.float64)
    inputs = AdvantageInputs(
        advantages=rewards - rewards.mean(),
        lengths=lengths,
        old_bounds=reference - torch.tensor([[0.0, 0.5, -0.5]], dtype=torch.float64) / lengths,
        reference_bounds=reference,
    )
    advantages = ADVANTAGES["tilted_softmax"](inputs, settings(reward_temperature=0.04))
    expected = torch.tensor([[0.65696 - 0.07070, 0.31033 - 0.40687, 0.03271 - 0.52243]], dtype=torch.float64)
    torch.testing.assert_close(advantages / 3, expected, rtol=0, atol=2e-5)
    # Cross-entropies of one token in each of two views
    logps = -torch.tensor([[1.0, 2.0], [0.5, 1.0], [3.0, 1.0]], dtype=torch.float64).unsqueeze(-1)
    loss_inputs = LossInputs(
        view_logps=logps.requires_grad_(),
        view_old=None,
        view_reference=None,
        weights=torch.full_like(logps, 0.5),
        advantages=advantages[0],
        mask=torch.ones(3, 1),
        tokens=torch.tensor(3),
    )
    loss, _ = OBJECTIVES["reinforce"](loss_inputs, settings(loss_type="sum"))
    assert loss.item() == pytest.approx(-0.172455, abs=1e-5)


def test_an_advantage_gets_what_its_entry_says_that_it_reads():
    got = []

    def old_alone(inputs, settings):
        got.append((inputs, settings))
        return inputs.advantages + inputs.old_bounds

    entry = Advantage(old_alone, reads=("old",))
    groups = torch.zeros(2, 4)
    inputs = AdvantageInputs(groups, lengths=groups, old_bounds=groups + 1)
    assert torch.equal(entry(inputs, "settings"), groups + 1)
    assert got == [(inputs, "settings")]
    assert torch.equal(Advantage(lambda of_groups: of_groups - 1)(groups), groups - 1)  # of one argument, as before
    for reads in ("old", ("new",)):
        with pytest.raises(ValueError, match="reads bounds of old and reference, in a tuple"):
            Advantage(old_alone, reads=reads)


def test_an_advantage_that_is_not_finite_is_named():
    """Dividing by the deviation of equal rewards: the run ended with "the loss became nan", lower the learning rate."""

    def divided(groups):
        return groups / groups.std(1, keepdim=True)

    entry = Advantage(divided)
    assert entry(torch.tensor([[1.0, -1.0]])).isfinite().all()
    expected = r"^divided \(.*returned \[nan, nan\] for the group \[0.0, 0.0\]: expected finite numbers, also"
    with pytest.raises(ValueError, match=expected):
        entry(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    left_out = Advantage(lambda groups: groups * 2, over_rollout=True)
    assert left_out(torch.tensor([[1.0, torch.nan]])).isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("rows", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_is_one_whole_on_processes_with_half_of_it_or_with_several(name, rows):
    """Released code has the fault of a softmax over the rows of a process instead of the group, which gives other
    weights."""
    everything, run = CENTRED.flatten(), settings(reward_temperature=0.3)
    bounds = BOUNDS if ADVANTAGES[name].reads else {}
    inputs = AdvantageInputs(CENTRED, **{field: values.view(-1, 4) for field, values in bounds.items()})
    expected = everything if name == "trl" else ADVANTAGES[name](inputs, run).flatten()
    for first in range(0, 16, rows):
        some = slice(first, first + rows)
        whole = {tuple(values[some].tolist()): values for values in (everything, *bounds.values())}
        ranks = RankView(all_gather=lambda here, whole=whole: whole[tuple(here.tolist())], rank_offset=first)
        here = {field: values[some] for field, values in bounds.items()}
        found = transform_advantages(everything[some], name, 4, ranks, bounds=here, settings=run)
        torch.testing.assert_close(found, expected[some], rtol=0, atol=0)


def test_an_evaluation_of_one_completion_per_prompt_has_no_group():
    alone = torch.zeros(3)
    assert transform_advantages(alone, "leave_one_out", 1, RankView(lambda here: here, 0)) is alone


def test_prompts_that_are_too_easy_or_too_hard_leave_the_loss():
    right = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, torch.nan, 1, 0])
    batch = {
        "completion_is_right": right,
        "advantages": torch.ones(16),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]] * 8),
    }
    ranks = RankView(lambda here: here, 0)
    kept = filter_groups(batch, prompt_filter(batch, (0.2, 0.7), 4, ranks), 4, ranks)
    assert kept == 0.5  # shares 0, 1/4, 1 and 2/3 (of the three that could be judged)
    expected = torch.tensor([0, 1, 0, 1]).repeat_interleave(4)
    assert torch.equal(batch["completion_mask"].any(1).long(), expected)
    assert batch["num_items_in_batch"] == 2 * (2 + 3 + 2 + 3)
