"""The chain rule: the sum of left-to-right log-probabilities equals that of a model called token by token."""

from dataclasses import replace

import torch

from d1.masking import keyed_generator
from d1.sampling import rollout
from d1.scoring import ESTIMATORS, Randomness
from d1.scoring.rollouts import blocks_of
from tests.d1.scoring.enumeration import (
    CANVAS,
    EOS,
    LENGTHS,
    MASK,
    PROMPT,
    SAMPLED,
    assert_same,
    every_model,
    scores,
    settings,
    some_rows,
    state_logps,
    tiny,
)

RANDOM = Randomness([keyed_generator(0)] * 4, keyed_generator(0), 0, 4)


def chain_rule(model):
    rows = []
    for row, length in enumerate(LENGTHS):
        each = [state_logps(model, row, range(k, CANVAS))[k] for k in range(length)]
        rows.append(torch.stack([*each, *[torch.zeros((), dtype=torch.float64)] * (CANVAS - length)]))
    return torch.stack(rows)


def test_the_sum_over_views_is_the_chain_rule_and_nothing_is_random():
    views = ESTIMATORS["left_to_right"].draw(SAMPLED, RANDOM, settings())
    again = ESTIMATORS["left_to_right"].draw(SAMPLED, RANDOM, settings())
    assert torch.equal(views.noise, again.noise)
    assert views.noise.shape[1] == ESTIMATORS["left_to_right"].views(settings())
    for model in every_model():
        assert_same(model, scores(model, views).logps, chain_rule(model))


def test_a_view_of_a_block_causal_model_asks_for_a_token_of_every_block():
    model = tiny(2, block=2)
    sampled = replace(SAMPLED, blocks=blocks_of(SAMPLED.attention_mask, CANVAS, 2))
    views = ESTIMATORS["left_to_right"].draw(sampled, RANDOM, settings())
    assert views.noise.shape[1] == 2
    assert_same(model, scores(model, views).logps, chain_rule(model))


def test_probabilities_of_all_completions_sum_to_one():
    texts = torch.cartesian_prod(*[torch.arange(5)] * 3)
    texts = torch.cat([texts, torch.zeros_like(texts[:, :1])], dim=1)  # four tokens: all end
    behind = (texts == EOS).cumsum(-1) - (texts == EOS).long() > 0
    completions = texts.masked_fill(behind, EOS).unique(dim=0)
    behind = (completions == EOS).cumsum(-1) - (completions == EOS).long() > 0
    behind[:, 3] = True  # three tokens may be scored, so that a completion without an EOS among them counts
    count = len(completions)
    sampled = replace(some_rows(SAMPLED, [1] * count), canvas_ids=completions, scored=~behind)
    random = Randomness([keyed_generator(0)] * count, keyed_generator(0), 0, count)
    with torch.no_grad():
        logps = scores(tiny(2), ESTIMATORS["left_to_right"].draw(sampled, random, settings()), sampled).logps
    torch.testing.assert_close(logps.sum(-1).exp().sum(), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-10)


def test_a_sampler_with_blocks_of_one_token_recorded_the_same_log_probs():
    model = tiny(2)
    options = {"gen_length": CANVAS, "block_length": 1, "steps": CANVAS, "temperature": 1.0, "mask_token_id": MASK}
    generators = [keyed_generator(3, row) for row in range(4)]
    taken = rollout(model, SAMPLED.prompt_ids, SAMPLED.attention_mask, generator=generators, **options)
    scored = torch.ones(4, CANVAS, dtype=torch.bool)
    sampled = replace(SAMPLED, canvas_ids=taken.ids[:, PROMPT:], scored=scored)
    with torch.no_grad():
        found = scores(model, ESTIMATORS["left_to_right"].draw(sampled, RANDOM, settings()), sampled).logps
    torch.testing.assert_close(found.float(), taken.logps, rtol=0, atol=1e-5)
