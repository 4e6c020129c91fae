"""The bounds that the loss is made of: their expectation over all masks, and what shared and opposite masks are for.

A tiny model has four tokens and a mask token, so all sets of hidden tokens of a completion are scored once, and any
number of draws of the collator is a sum over these.
"""

import copy
from dataclasses import replace
from math import comb
from typing import Any

import pytest
import torch

from d1.preference.data import PreferenceCollator
from d1.preference.trainer import dpo
from d1.scoring import ESTIMATORS, ViewSettings
from tests.d1.scoring.enumeration import (
    CANVAS,
    EOS,
    LENGTHS,
    SAMPLED,
    VISIBLE,
    any_order_bound,
    state_logps,
    subsets,
    tiny,
)

PAIR = (0, 1)  # rows of SAMPLED, of full length and shorter; here the chosen and the rejected completion
EPOCHS = 400
BETA = 0.8


class Tokenizer:
    pad_token_id = eos_token_id = EOS


def draws(estimator, first=0, **settings):
    """What the collator draws for the pair in each of many epochs."""
    collator = PreferenceCollator(Tokenizer(), ESTIMATORS[estimator], ViewSettings(gen_length=CANVAS, **settings))  # type: ignore[arg-type]
    ids = [SAMPLED.canvas_ids[row, : LENGTHS[row]].tolist() for row in PAIR]
    item: dict[str, Any] = {"prompt_ids": prompt_of(0), "completions": ids, "label": 1}
    return [collator([item | {"key": (7, 5, epoch, 0)}]) for epoch in range(first, first + EPOCHS)]


def prompt_of(row):
    return SAMPLED.prompt_ids[row][VISIBLE[row].bool()].tolist()


def states(model, row):
    """Hidden tokens of a row's completion -> (canvas,) log-probs, after the prompt of the first row."""
    prompt, visible = (of[[0]].expand(4, -1) for of in (SAMPLED.prompt_ids, VISIBLE))
    sampled = replace(SAMPLED, prompt_ids=prompt, attention_mask=visible)
    tail = tuple(range(LENGTHS[row], CANVAS))
    return {some: state_logps(model, row, some + tail, sampled) for some in subsets(range(LENGTHS[row]))[1:]}


def coefficients(batches, side):
    """(epochs, sets of hidden tokens, canvas): how much the bound of a side weighs each token in each state."""
    row = PAIR[side]
    known = {some: index for index, some in enumerate(subsets(range(LENGTHS[row]))[1:])}
    found = torch.zeros(len(batches), len(known), CANVAS, dtype=torch.float64)
    for batch, table in zip(batches, found, strict=True):
        for noise, weights in zip(batch["noise"][side], batch["weights"][side].double(), strict=True):
            assert not noise[:-CANVAS].any()  # the prompt is never hidden
            hidden = noise[-CANVAS:].nonzero().flatten().tolist()
            assert hidden[len(hidden) - (CANVAS - LENGTHS[row]) :] == [*range(LENGTHS[row], CANVAS)]
            if some := tuple(place for place in hidden if place < LENGTHS[row]):
                table[known[some]] += weights
    return found


SETTINGS = [
    ("counts", {"num_views": 3, "stratified": True}),
    ("counts", {"num_views": 2}),
    ("espo", {"num_views": 2, "antithetic": True}),
    ("elbo", {"num_views": 2, "antithetic": True, "stratified": True}),
]


@pytest.mark.parametrize(("estimator", "settings"), SETTINGS)
def test_the_mean_over_draws_is_the_bound_that_all_masks_give(estimator, settings):
    """Within five standard errors; the enumeration is the sum over counts x of the mean over sets of x tokens, / x."""
    model, batches = tiny(2), draws(estimator, **settings)
    for side, row in enumerate(PAIR):
        table = torch.stack([logps for logps in states(model, row).values()]).detach()
        bounds = (coefficients(batches, side) * table).sum((1, 2))
        exact = (table * torch.stack([chance_weight(row, some) for some in subsets(range(LENGTHS[row]))[1:]])).sum()
        if side == 0:  # the prompt of the first row is its own
            torch.testing.assert_close(exact, any_order_bound(model)[0].sum().detach())
        error = float(bounds.std() / len(bounds) ** 0.5)
        assert abs(float(bounds.mean() - exact)) < 5 * error < 0.25 * abs(float(exact))


def chance_weight(row, some):
    """(canvas,) of hidden tokens: 1 / (x times the number of sets of x tokens)."""
    mask = torch.tensor([float(place in some) for place in range(CANVAS)], dtype=torch.float64)
    return mask / (len(some) * comb(LENGTHS[row], len(some)))


def tables(policy, reference):
    """For each side log-probs under both models, (sets of hidden tokens x canvas,), and their gradients under the
    policy, (the same, weights of the model)."""
    found = []
    for row in PAIR:
        weights, own = list(policy.parameters()), states(policy, row)
        values = [value for some, logps in own.items() for place, value in enumerate(logps) if place in some]
        slopes = iter([torch.autograd.grad(value, weights, retain_graph=True) for value in values])
        nothing = [torch.zeros_like(weight) for weight in weights]
        of_all = [next(slopes) if place in some else nothing for some in own for place in range(CANVAS)]
        jacobian = torch.stack([torch.cat([slope.flatten() for slope in of_one]) for of_one in of_all])
        both = [torch.cat([*states(model, row).values()]).detach() for model in (policy, reference)]
        found.append((*both, jacobian))
    return found


def variance(of_pair, batches, of_reference=None):
    """Sum over all weights of the variance, over epochs, of the gradient of DPO's loss."""
    ratios, slopes = [], []
    for side, (policy, reference, jacobian) in enumerate(of_pair):
        own = coefficients(batches, side).flatten(1)
        theirs = own if of_reference is None else coefficients(of_reference, side).flatten(1)
        ratios.append(own @ policy - theirs @ reference)
        slopes.append(own @ jacobian)
    leaf = torch.cat(ratios).requires_grad_()  # all chosen completions, then all rejected ones
    chosen, rejected = torch.autograd.grad(dpo(leaf, torch.ones(EPOCHS), BETA).sum(), leaf)[0].chunk(2)
    return float((chosen[:, None] * slopes[0] + rejected[:, None] * slopes[1]).var(0).sum())


def near(model):
    """A model not far from another, as a policy is from its reference."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.03 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return other


def test_shared_and_opposite_masks_each_lower_the_variance_of_the_gradient():
    """Shared: policy and reference are scored in the same views. Opposite: half as many draws, each with the mask that
    hides the other tokens, against as many independent ones: the same number of forward passes."""
    reference = tiny(2, spread=0.3)
    of_pair, first = tables(near(reference), reference), draws("espo", num_views=4)
    shared, apart = variance(of_pair, first), variance(of_pair, first, draws("espo", EPOCHS, num_views=4))
    opposite = variance(of_pair, draws("espo", num_views=2, antithetic=True))
    assert shared < 0.7 * apart
    assert opposite < 0.9 * shared
