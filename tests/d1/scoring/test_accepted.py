"""The exact log-probability with uniform noise against all rollouts: value, gradient, draws, flips."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.attention import left_pad
from d1.models.diffusion_gemma import canvas_states
from d1.models.head import backbone_and_head
from d1.rl.checks import noised_rows
from d1.sampling import SamplingSettings, rollout
from d1.scoring import ESTIMATORS, Randomness, SampledRows, ViewSettings, score
from d1.scoring.accepted import accepted_flips
from tests.d1.diffusion_gemma import needs_class, write_tiny
from tests.rounding import LOGITS, assert_near

pytestmark = needs_class
VOCAB, SIZE, PASSES, LEVEL = 3, 2, 2, 1.02
PROMPT = [2, 1, 2, 0, 1, 2, 1]  # beyond the window
HOT, COLD = 1.6, 0.8
STATES = [list(ids) for ids in product(range(VOCAB), repeat=SIZE)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = load_model(write_tiny(tmp_path_factory.mktemp("gemma"), vocab=VOCAB, canvas=SIZE, eos_token_id=0)).double()
    model.set_experts_implementation("eager")  # the grouped kernel has no fp64
    return model


def sampling(canvases=1, **changes):
    fields = {"temperature": HOT, "end_temperature": COLD, "self_conditioning": False, "reveal_level": LEVEL}
    fields |= {"sampler": "parallel", "reveal": "entropy", "output": "draw", "stop_entropy": 0.0}
    return SamplingSettings(canvases * SIZE, SIZE, canvases * PASSES, **fields | changes)


def temperature(number):
    return COLD + (HOT - COLD) * (PASSES - number) / PASSES


def distributions(model):
    """log d of each state and pass, (passes, states, canvas, vocab), and the accepted positions, by a plain loop."""
    text = torch.tensor([PROMPT + [0] * SIZE]).expand(len(STATES), -1)
    logits = backbone_and_head(model)[1](canvas_states(model, text, torch.tensor(STATES), None))
    logps = torch.stack([(logits / temperature(number)).log_softmax(-1) for number in range(PASSES)])
    entropies = -(logps.exp() * logps).sum(-1)
    takes = torch.zeros_like(entropies, dtype=torch.bool)
    for number, state in product(range(PASSES), range(len(STATES))):
        total = 0.0
        for place in sorted(range(SIZE), key=lambda one: entropies[number, state, one].item()):
            if total <= LEVEL:
                takes[number, state, place] = True
            total += entropies[number, state, place].item()
    return logps, takes


def reward(final):
    return float(final[0] == 1) + 0.3 * final[1] - 0.5 * (final[0] == final[1])


def all_rollouts(logps, takes):
    """(states of the passes and the output, log-probability) of every rollout, differentiable."""
    for first in range(len(STATES)):
        for second, last in product(range(len(STATES)), repeat=2):
            total = -SIZE * torch.tensor(float(VOCAB)).log()
            for place in range(SIZE):
                token = STATES[second][place]
                own = logps[0, first, place, token] if takes[0, first, place] else -torch.tensor(float(VOCAB)).log()
                total = total + own + logps[1, second, place, STATES[last][place]]
            yield (first, second, last), total


def rows_of(rollouts, takes):
    """The record of these rollouts, as the sampler writes it."""
    ids = torch.tensor([[STATES[state] for state in states] for states in rollouts]).transpose(1, 2)
    steps = torch.full(ids.shape, -2)
    for row, (first, _, _) in enumerate(rollouts):
        steps[row, takes[0, first], 1] = 0
    steps[..., 2] = 1
    prompt, count = torch.tensor([PROMPT]).expand(len(ids), -1), torch.zeros(len(ids), SIZE)
    true = torch.ones_like(prompt, dtype=torch.bool)
    return SampledRows(
        prompt_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        maskable=true,
        canvas_ids=ids[..., -1],
        scored=torch.ones(len(ids), SIZE, dtype=torch.bool),
        reveal_steps=steps[..., -1],
        logps=count,
        entropies=count,
        write_ids=ids,
        write_steps=steps,
        write_entropies=torch.zeros(ids.shape),
    )


def settings(**changes):
    return replace(ViewSettings(gen_length=SIZE, steps=PASSES, block_length=SIZE, sampling=sampling()), **changes)


def views_of(rows, seed=0, **changes):
    count = len(rows.prompt_ids)
    random = Randomness([keyed_generator(seed, row) for row in range(count)], keyed_generator(seed), 0, count)
    return ESTIMATORS["accepted"](rows, random, settings(**changes))


def scored(model, rows, views, **options):
    given = rows.prompt_ids, rows.attention_mask, rows.canvas_ids, views
    return score(model, *given, mask_token_id=None, gen_length=rows.canvas_ids.shape[1], **options)


def of_enumeration(model):
    """The expected reward, differentiable: A is frozen, as its gradient is zero wherever there is one."""
    logps, takes = distributions(model)
    return sum(total.exp() * reward(STATES[states[-1]]) for states, total in all_rollouts(logps, takes))


def test_values_and_gradient_equal_the_enumerated_expectation(model):
    with torch.no_grad():
        logps, takes = distributions(model)
        rollouts, totals = zip(*all_rollouts(logps, takes), strict=True)
    totals = torch.stack(totals)
    assert totals.exp().sum().item() == pytest.approx(1, abs=1e-6)
    counts = takes[0].sum(-1)
    assert {*counts.tolist()} == {1, 2}, "some states accept one position, some both"

    rows = rows_of(rollouts, takes)
    found = scored(model, rows, views_of(rows), views_at_once=2)
    noise = SIZE + torch.tensor([SIZE - counts[first].item() for first, _, _ in rollouts])
    assert_near(found.logps.sum(1) - noise * torch.tensor(float(VOCAB)).log(), totals, least=LOGITS, check_dtype=False)
    rewards = torch.tensor([reward(STATES[states[-1]]) for states in rollouts], dtype=totals.dtype)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    by_score = torch.autograd.grad((totals.exp() * rewards * found.logps.sum(1)).sum(), weights, allow_unused=True)
    exact = torch.autograd.grad(of_enumeration(model), weights, allow_unused=True)
    largest = max(grad.abs().max() for grad in exact if grad is not None)
    assert largest > 1e-2
    for mine, own in zip(by_score, exact, strict=True):
        if own is not None:
            torch.testing.assert_close(mine, own, atol=1e-6 * largest.item() + 1e-7, rtol=1e-5)


def test_the_enumerated_gradient_equals_finite_differences(model):
    weight = model.model.decoder.layers[1].self_attn.q_proj.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
    slope = (torch.autograd.grad(of_enumeration(model), weight)[0] * direction).sum().item()
    step, values = 1e-4, []
    with torch.no_grad():
        for sign in (1, -2, 1):
            weight += sign * step * direction
            values.append(of_enumeration(model).item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-3)  # norms compute in fp32


def test_the_sampler_has_the_enumerated_expectation(model):
    with torch.no_grad():
        expected = of_enumeration(model).item()
    count = 4000
    ids, mask = left_pad([PROMPT] * count, 0)
    own = [keyed_generator(5, row) for row in range(count)]
    found = rollout(model, ids, mask, sampling(), mask_token_id=None, generator=own)
    rewards = torch.tensor([reward(final) for final in found.ids[:, -SIZE:].tolist()])
    assert rewards.mean().item() == pytest.approx(expected, abs=4 * rewards.std().item() / count**0.5)


def test_drawn_passes_are_unbiased_for_the_sum_over_all(model):
    with torch.no_grad():
        logps, takes = distributions(model)
    rows = rows_of([states for states, _ in all_rollouts(logps, takes)][::31], takes)
    whole = scored(model, rows, views_of(rows)).logps
    draws = [scored(model, rows, views_of(rows, seed, num_views=1)).logps for seed in range(64)]
    spread = torch.stack(draws).std(0)
    error = (torch.stack(draws).mean(0) - whole).abs()
    assert (error <= 4.5 * spread / 8 + 1e-6).all()
    assert (spread > 0.1).any()


@pytest.mark.parametrize("output", ["argmax", "draw"])
def test_a_rollout_scored_anew_has_the_record_of_the_sampler_over_several_canvases(model, output):
    how, prompts = sampling(3, output=output, stop_entropy=9.0), [PROMPT, [1, 2], [2]]
    ids, mask = left_pad(prompts, 0)
    own = [keyed_generator(1, row) for row in range(3)]
    found = rollout(model, ids, mask, how, mask_token_id=None, generator=own, eos_token_ids=[0])
    writes, canvas = found.writes, found.ids[:, -how.gen_length :]
    rows = SampledRows(
        prompt_ids=ids,
        attention_mask=mask,
        maskable=mask.bool(),
        canvas_ids=canvas,
        scored=torch.ones_like(canvas, dtype=torch.bool),
        reveal_steps=found.reveal_steps,
        logps=found.logps,
        entropies=found.entropies,
        write_ids=writes.ids,
        write_steps=writes.steps,
        write_entropies=writes.entropies,
    )
    views = views_of(rows, gen_length=how.gen_length, steps=how.steps)
    again = scored(model, rows, views, with_entropies=True)
    assert_near(again.logps.float(), writes.logps.sum(-1), least=LOGITS)
    flips = accepted_flips(views, again, how, lambda values: values)
    assert flips == {"accepted/flipped_passes": 0.0, "accepted/flipped_positions": 0.0}
    # With another bound, the pass that accepted one position accepts both.
    changed = accepted_flips(views, again, replace(how, reveal_level=9.0), lambda values: values)
    taken = views.accepted.unflatten(-1, (-1, SIZE)).sum(-1)
    share = (taken == 1).sum().item() / (taken > 0).sum().item()
    assert changed["accepted/flipped_passes"] == pytest.approx(share)
    assert changed["accepted/flipped_positions"] == pytest.approx(share / SIZE)


def test_a_row_whose_tokens_were_all_accepted_in_the_first_pass_is_scored_in_that_pass_alone():
    rows = noised_rows()  # pass p accepts position p of each block of four
    scored = torch.zeros_like(rows.scored)
    scored[:, [0, 4]] = True
    for seed in range(10):
        found = views_of(replace(rows, scored=scored), seed, gen_length=8, steps=8, block_length=4, num_views=1)
        assert found.weights[:, 0, [0, 4]].eq(1).all()
        assert found.weights.sum() == 2 * len(scored)
