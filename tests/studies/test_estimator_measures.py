"""The estimator study's figures on models so small that all masks can be enumerated."""

import itertools
from dataclasses import replace
from math import comb

import pytest
import torch

from d1.rl.methods import METHODS
from d1.scoring import ESTIMATORS, ViewSettings
from studies.estimators.measures import (
    CHOICES,
    PAIRS,
    TRAJECTORY,
    Case,
    Choice,
    draw,
    group_gradients,
    long_run,
    measure,
    noise_of,
)
from studies.estimators.report import CHOICE_OF, signal_to_noise, write_report
from studies.estimators.run import advantages_of, make_case
from tests.d1.scoring.enumeration import CANVAS, LENGTHS, MASK, SAMPLED, all_states, any_order_bound, some_rows, tiny


@pytest.fixture(scope="module")
def case():
    """Four rows in two groups, the last a second copy of the first with another advantage."""
    rows = [0, 1, 2, 0]
    sampled = replace(some_rows(SAMPLED, rows), reveal_steps=SAMPLED.reveal_steps[rows].clamp(min=0))
    return Case(tiny(2), sampled, torch.tensor([0.5, -0.5, 0.25, -0.25]), group=2, mask_token_id=MASK)


@pytest.fixture(scope="module")
def target(case):
    return long_run(case, relative_error=0.01, gradient_draws=24)


def flat(case, total):
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(total, case.weights)])


def test_the_long_run_is_the_enumerated_bound_and_every_steps_replay_the_trajectory(case, target):
    lengths = torch.tensor([4.0, 3, 1, 4])
    exact = any_order_bound(case.model)[[0, 1, 2, 0]].sum(-1) / lengths
    assert target.bound_error < 0.01
    assert target.bound.mean().item() == pytest.approx(exact.mean().item(), rel=4 * target.bound_error)
    gradient = flat(case, (case.advantages * exact).mean())
    distance = ((target.bound_gradient - gradient).norm() / gradient.norm()).item()
    assert target.gradient_error < 0.1
    assert distance < 3 * target.gradient_error

    steps, states = case.sampled.reveal_steps, []
    for row, of in enumerate([0, 1, 2, 0]):
        length = LENGTHS[of]
        visible = [[k for k in range(CANVAS) if steps[row, k] >= steps[row, place]] for place in range(length)]
        states.append(sum(state(case, row, hidden)[place] for place, hidden in enumerate(visible)) / length)
    torch.testing.assert_close(target.trajectory, torch.stack(states).detach(), rtol=0, atol=1e-6)
    expected = flat(case, (case.advantages * torch.stack(states)).mean())
    torch.testing.assert_close(target.trajectory_gradient, expected, rtol=1e-5, atol=1e-7)


def state(case, row, hidden):
    """(canvas,) log-probs of a row's tokens with the positions `hidden` masked, from one forward pass."""
    real = case.sampled.attention_mask[row].bool()
    canvas = case.sampled.completion_ids[row].clone()
    canvas[hidden] = MASK
    ids = torch.cat([case.sampled.prompt_ids[row][real], canvas])
    logits = case.model(input_ids=ids.unsqueeze(0)).logits[0, -CANVAS:]
    return logits.log_softmax(-1).gather(-1, case.sampled.completion_ids[row].unsqueeze(-1)).squeeze(-1)


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
    assert found["bias_error"] == pytest.approx((sum(variances) / 300) ** 0.5 / 4, rel=0.15)
    assert abs(found["bias_to_bound"]) < 5 * found["bias_error"]
    assert found["deviation"] == pytest.approx((sum(variances) / 4) ** 0.5, rel=0.15)
    expected = sum(means) / 4 - target.trajectory.mean().item()
    assert found["bias_to_trajectory"] == pytest.approx(expected, abs=5 * found["bias_error"])
    assert found["long_cosine_to_bound"] == pytest.approx(1.0, abs=0.1)


def test_the_trajectory_itself_has_neither_bias_nor_noise(case, target):
    found = measure(case, TRAJECTORY, target, draws=5)
    assert found["draws"] == 1
    for name in ("bias_to_trajectory", "bias_error", "deviation", "within"):
        assert found[name] == 0
    assert found["cosine_to_trajectory"] == pytest.approx(1.0, abs=1e-12)
    assert found["bias_to_bound"] == pytest.approx((target.trajectory - target.bound).mean().item())


def test_cosines_and_tokens_are_those_of_each_draw(case, target):
    choice = Choice("", "elbo", 2, {"num_views": 1, **PAIRS})
    found = measure(case, choice, target, draws=3)
    drawn = [group_gradients(case, choice, draw(case, choice, number)) for number in range(3)]
    whole = [gradients.mean(0) for _, gradients, _ in drawn]
    cosines = [(g @ target.bound_gradient / g.norm() / target.bound_gradient.norm()).item() for g in whole]
    assert found["cosine_to_bound"] == pytest.approx(sum(cosines) / 3, rel=1e-9)
    assert found["tokens_of_update"] == sum(fed for _, _, fed in drawn) / 3 / 4


def test_signal_and_noise_are_unbiased():
    """Over every outcome of two groups with two draws each: a group is one of three, and a draw adds one of two."""
    kinds, extras = torch.tensor([[1.0, 0.0], [3.0, 1.0], [-1.0, 2.0]]), torch.tensor([[0.5, -1.0], [-0.5, 1.0]])
    found = []
    for groups in itertools.product(kinds, repeat=2):
        for picks in itertools.product(range(2), repeat=4):
            draws = extras[list(picks)].view(2, 2, 2)  # draws, groups, weights
            found.append(noise_of(torch.stack(groups) + draws))
    mean = kinds.mean(0)
    between = (kinds - mean).square().sum(-1).mean().item()
    within = extras.square().sum(-1).mean().item()
    # The signal is that of the given groups: the square of their mean, which includes half of the variance between two.
    signal = mean.square().sum().item() + between / 2
    for name, expected in (("signal", signal), ("between", between), ("within", within)):
        assert sum(getattr(one, name) for one in found) / len(found) == pytest.approx(expected, rel=1e-5)


def test_signal_to_noise_is_at_the_compute_of_a_rollout():
    line = {"tokens_of_rollout": 600, "tokens_of_update": 200, "signal": 2.0, "within": 4.0, "of": {"groups": 10}}
    assert signal_to_noise(line) == 2.0 / (4.0 / 10) * 3
    assert signal_to_noise(line | {"within": 0.0}) is None


def test_advantages_are_d1s_and_never_all_zero():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5])
    assert advantages_of(rewards, 2).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert advantages_of(torch.ones(4), 2).tolist() == [0.5, -0.5, 0.5, -0.5]


def test_every_estimator_and_the_settings_of_every_method_are_among_the_choices():
    assert {choice.estimator for choice in CHOICES} == {*ESTIMATORS}
    assert len({(choice.name, choice.views) for choice in CHOICES}) == len(CHOICES)
    assert {method.values["estimator"] for method in METHODS.values()} <= {choice.estimator for choice in CHOICES}


def test_a_methods_estimator_is_a_choice_with_the_methods_own_settings():
    """Except for TraceRL, whose choice divides the 16 steps of these completions, and AGRPO's mean, which is the sum
    divided by the number of a row's steps."""
    assert METHODS.keys() - CHOICE_OF.keys() == {"just-grpo", "egspo", "egspo-sa", "rldf"}
    by_name = {(choice.name, choice.views): choice for choice in CHOICES}
    for method, place in CHOICE_OF.items():
        choice, values = by_name[place], METHODS[method].values
        assert choice.estimator == values["estimator"]
        cut = ("segment_steps", "mean_step")
        expected = {name: values[name] for name in ViewSettings.__annotations__ if name in values and name not in cut}
        settings = {name: value for name, value in choice.settings.items() if name not in cut}
        assert ViewSettings(**settings) == ViewSettings(**expected)
    assert by_name[CHOICE_OF["tracerl"]].settings == {"segment_steps": METHODS["tracerl"].values["segment_steps"]}


def test_the_page_says_how_well_an_estimator_predicts_the_leaderboard(tmp_path):
    cosines = {"d1": 0.1, "espo": 0.2, "agrpo": 0.3, "cj-grpo": 0.4, "d2": 0.5}
    common = {"of": {"model": "sudoku: SFT", "groups": 2, "group": 2}, "tokens_of_rollout": 10, "tokens_of_update": 5}
    names = ("bias_to_bound", "bias_to_trajectory", "deviation", "signal", "between", "bound", "trajectory")
    names += ("long_cosine_to_bound", "long_cosine_to_trajectory", "bound_error", "gradient_error")
    common |= dict.fromkeys(names, 1.0) | {"within": 1.0}
    lines = []
    for method, value in cosines.items():
        name, views = CHOICE_OF[method]
        own = {"name": name, "views": views, "cosine_to_bound": value, "cosine_to_trajectory": -value}
        lines.append({**common, **own})
    page = tmp_path / "estimators.md"
    write_report(lines, page, {"sudoku": dict(zip(cosines, (0.5, 0.7, 0.6, 0.8, 0.9), strict=True)), "countdown": {}})
    text = page.read_text()
    assert "| d2 | segments, prompt hidden by .15, 16 | 90.0 | 0.50 | -0.50 | 1.00 | 0.50 |" in text
    assert "| rank correlation |  |  | +0.90 (p 0.037) | -0.90 (p 0.037) |  |  |" in text
    assert "### countdown" not in text
    write_report(lines, page, {"sudoku": {}})
    assert "Does it predict" not in page.read_text()


def test_completions_are_those_of_rl():
    """The sampler's recorded log-probs equal those of replay on the model that sampled."""
    from d1.models import load_model, load_tokenizer
    from d1.tasks import load_task
    from pocket.demo import ROOT
    from studies.estimators.completions import divergence, texts_of, trajectory_logps

    base = ROOT / "pocket" / "base"
    found = make_case("sudoku", base, groups=2, group=3)
    assert found.advantages.view(2, 3).sum(-1).tolist() == pytest.approx([0, 0], abs=1e-6)
    replayed = trajectory_logps(found.model, found.sampled, found.mask_token_id)
    torch.testing.assert_close(replayed, found.sampled.logps * found.sampled.scored, rtol=0, atol=2e-5)
    tokenizer = load_tokenizer(str(base))
    assert all("<answer>" in text and "<eos>" not in text for text in texts_of(found.sampled, tokenizer)[:1])
    model = load_model(str(base))
    prompts = load_task("sudoku").load_rows("validation")["prompt"][:2]
    assert divergence(model, found.model, tokenizer, prompts, 32) == pytest.approx(0, abs=1e-5)
