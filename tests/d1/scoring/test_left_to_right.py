"""The chain rule: the sum of left-to-right log-probabilities is that of a model that is asked token by token."""

import torch

from d1.masking import keyed_generator
from d1.sampling import rollout
from d1.scoring import ESTIMATORS, Randomness
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    MASK,
    SAMPLED,
    assert_same,
    scores,
    settings,
    state_logps,
    tiny,
)

RANDOM = Randomness([keyed_generator(0)] * 4, keyed_generator(0), 0, 4, torch.zeros(4))


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
    for layers in (1, 2):
        model = tiny(layers)
        assert_same(model, scores(model, views).logps, chain_rule(model))


def test_probabilities_of_all_completions_sum_to_one():
    """Over all texts of three tokens, of which one begins anew wherever an EOS ends a completion."""
    model, total = tiny(2), torch.zeros((), dtype=torch.float64)
    texts = torch.cartesian_prod(*[torch.arange(5)] * 3)
    ended = (texts == 0).cumsum(-1) - (texts == 0).long() > 0
    first = texts.masked_fill(ended, 0).unique(dim=0)  # each completion once
    behind = (first == 0).cumsum(-1) - (first == 0).long() > 0
    rows = [[1] * len(first)][0]
    some = {
        "prompt_ids": SAMPLED.prompt_ids[rows],
        "attention_mask": SAMPLED.attention_mask[rows],
        "maskable": SAMPLED.maskable[rows],
        "completion_ids": first,
        "scored": ~behind,
    }
    sampled = type(SAMPLED)(**(vars(SAMPLED) | some))
    random = Randomness([keyed_generator(0)] * len(first), keyed_generator(0), 0, len(first), torch.zeros(len(first)))
    with torch.no_grad():
        logps = scores(model, ESTIMATORS["left_to_right"].draw(sampled, random, settings()), sampled).logps
    total = logps.sum(-1).exp().sum()
    torch.testing.assert_close(total, torch.ones((), dtype=torch.float64), rtol=0, atol=1e-10)


def test_a_sampler_with_blocks_of_one_token_recorded_the_same_log_probs():
    model = tiny(2)
    options = {"gen_length": CANVAS, "block_length": 1, "steps": CANVAS, "temperature": 1.0, "mask_token_id": MASK}
    generators = [keyed_generator(3, row) for row in range(4)]
    taken = rollout(model, SAMPLED.prompt_ids, SAMPLED.attention_mask, generator=generators, **options)
    some = {"completion_ids": taken.ids[:, 3:], "scored": torch.ones(4, CANVAS, dtype=torch.bool)}
    sampled = type(SAMPLED)(**(vars(SAMPLED) | some))
    with torch.no_grad():
        found = scores(model, ESTIMATORS["left_to_right"].draw(sampled, RANDOM, settings()), sampled).logps
    torch.testing.assert_close(found.float(), taken.logps, rtol=0, atol=1e-5)
