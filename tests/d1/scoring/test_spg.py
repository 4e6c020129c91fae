"""SPG's masks, compared with their definition, and its two forms, compared with the likelihood of a process that
reveals in any order.

Numbers are log-probabilities of the completion of four tokens: a form's value per token times four.
"""

from collections import Counter
from itertools import pairwise, permutations, product
from math import comb, exp, fsum, log, prod
from typing import NamedTuple

import pytest
import torch

from d1.masking import keyed_generator
from d1.rl.losses import LossInputs
from d1.rl.methods.spg import evidence_bounds, hidden_of_row, spg_views
from d1.rl.tables import ESTIMATORS
from d1.scoring import Randomness
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    PROMPT,
    SAMPLED,
    all_states,
    any_order_bound,
    assert_frequencies,
    assert_same,
    every_model,
    marked,
    merged,
    repeated,
    scores,
    settings,
    stacked,
    subsets,
    tiny,
)

P_MASK = 0.3


def all_views(row, size, p=P_MASK):
    """(probability, (canvas,) hidden) of every draw of a view of one row, by the module's own function."""
    length = LENGTHS[row]
    blocks = -(-length // size)
    for block in range(blocks):
        tokens = min((block + 1) * size, length) - block * size
        earlier = range(block * size)
        for hide, order, some in product(range(1, tokens + 1), permutations(range(tokens)), subsets(earlier)):
            chance = p ** len(some) * (1 - p) ** (len(earlier) - len(some))
            hidden = hidden_of_row(length, block, hide, torch.tensor(order), size, marked(some))
            yield block, chance / (tokens * len(list(permutations(range(tokens))))), hidden


def blocks_drawn(length, size, views):
    """{the blocks of a row's views: probability}: over all orders of the canvas's blocks, modulo the number of those
    that contain tokens of the completion."""
    orders = list(permutations(range(-(-CANVAS // size))))
    reached = -(-length // size)
    return Counter(
        {
            key: n / len(orders)
            for key, n in Counter(
                tuple(order[view % len(order)] % reached for view in range(views)) for order in orders
            ).items()
        }
    )


def all_draws(row, size, views):
    """Every draw of one or of two views."""
    if not LENGTHS[row]:
        cases = [(1.0, torch.ones(views, CANVAS, dtype=torch.bool))]
    else:
        each = [
            [(chance, hidden) for of, chance, hidden in all_views(row, size) if of == block]
            for block in range(-(-LENGTHS[row] // size))
        ]
        cases = [
            (odds * prod(chance for chance, _ in some), torch.stack([hidden for _, hidden in some]))
            for blocks, odds in blocks_drawn(LENGTHS[row], size, views).items()
            for some in product(*(each[block] for block in blocks))
        ]
    chances, hidden = zip(*cases, strict=True)
    noise, scored = torch.zeros(len(cases), 1, PROMPT, dtype=torch.bool), SAMPLED.scored[row].expand(len(cases), -1)
    return torch.tensor(chances, dtype=torch.float64), spg_views(noise, torch.stack(hidden), scored)


def definition(model, size):
    """The mean log-prob of all hidden tokens, averaged over blocks, over the number of a block's hidden tokens, over
    the sets of this size, and over the sets of earlier tokens that are also hidden. The blocks that contain tokens of
    the completion replace the canvas's other blocks in turn."""
    rows = []
    for row, length in enumerate(LENGTHS):
        states, total = all_states(model, row), torch.zeros(CANVAS, dtype=torch.float64)
        firsts = range(0, length, size)
        for first in [firsts[n % len(firsts)] for n in range(-(-CANVAS // size)) if firsts]:
            own = range(first, min(first + size, length))
            for some, perturbed in product(subsets(own)[1:], subsets(range(first))):
                hidden = perturbed + some + tuple(range(own.stop, length))
                chance = 1 / (-(-CANVAS // size) * len(own) * comb(len(own), len(some)))
                chance *= P_MASK ** len(perturbed) * (1 - P_MASK) ** (first - len(perturbed))
                total = total + chance * marked(hidden) * states[hidden] / len(hidden)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(("size", "views"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)])
def test_the_mean_over_all_draws_is_the_definition(size, views):
    drawn = stacked([merged(*all_draws(row, size, views)) for row in range(len(LENGTHS))])
    for model in every_model():
        found = scores(model, drawn).logps
        assert_same(model, found, definition(model, size))
        if size == CANVAS:  # one block: the any-order bound, per token
            lengths = torch.tensor(LENGTHS).clamp(min=1).unsqueeze(1)
            assert_same(model, found, any_order_bound(model) / lengths)


def draw(row, count, **chosen):
    """The hidden tokens of a row's views in `count` rollouts, (count, views, prompt + canvas), and their weights."""
    generator = keyed_generator(5)
    random = Randomness([generator] * count, generator, 0, count)
    views = ESTIMATORS["spg"](repeated(row, count), random, settings(**chosen))
    assert views.noise[..., PROMPT + LENGTHS[row] :].all()
    torch.testing.assert_close(views.weights.sum((1, 2)), torch.ones(count))
    return views.noise


@pytest.mark.parametrize(("row", "size", "views"), [(1, 1, 2), (1, 1, 5), (0, 1, 2), (1, 2, 5)])
def test_a_views_block_is_a_random_order_of_all_blocks_modulo_those_reached(row, size, views):
    """If a completion reaches three of four blocks, the order has the first block twice: a view draws it with
    probability 1/2."""
    hidden = draw(row, 600, num_views=views, block_length=size)[..., PROMPT:]
    blocks = hidden.long().argmax(-1) // size  # nothing is perturbed: the first hidden token is in the block
    found = Counter(map(tuple, blocks.tolist()))
    expected = blocks_drawn(LENGTHS[row], size, views)
    assert set(found) <= set(expected)
    keys = list(expected)
    assert_frequencies(torch.tensor([found[key] for key in keys]), torch.tensor([expected[key] for key in keys]))


def test_draws_have_the_chances_assumed_above():
    count, row, size = 1500, 1, 2  # three tokens: a block of two, and one of one
    noise = draw(row, count, num_views=3, block_length=size, p_mask_prompt=P_MASK)
    sets = (noise[..., PROMPT:-1] * 2 ** torch.arange(3)).sum(-1)
    chances = torch.zeros(8, dtype=torch.float64)
    for _, chance, some in all_views(row, size):
        chances[(some[:3] * 2 ** torch.arange(3)).sum()] += chance / 2
    for view in sets.unbind(1):
        assert_frequencies(view.bincount(minlength=8), chances)
    prompts = (noise[:, 0, :PROMPT] * 2 ** torch.arange(PROMPT)).sum(-1)
    independent = [P_MASK ** bin(x).count("1") * (1 - P_MASK) ** (3 - bin(x).count("1")) for x in range(8)]
    assert_frequencies(prompts.bincount(minlength=8), torch.tensor(independent))


# --- What its two forms bound ----------------------------------------------------------------------------------------


class Forms(NamedTuple):
    """For one model and completion, in nats: log p of the process that fills blocks in order and each block in any
    order, its evidence lower bound, and SPG's two forms over all views at once."""

    logp: float
    elbo: float
    lower: float
    upper: float


def forms(states, size, beta):
    """`evidence_bounds` of all views, weighted by their probabilities: its limit for many draws."""
    values = {some: (logps * marked(some)).tolist() for some, logps in states.items()}
    orders = [o for o in permutations(range(CANVAS)) if all(a // size <= b // size for a, b in pairwise(o))]
    each = [fsum(values[tuple(sorted(order[k:]))][order[k]] for k in range(CANVAS)) for order in orders]
    hidden = torch.stack([some for _, _, some in all_views(0, size, p=0.0)]).unsqueeze(0)
    likely = torch.tensor([chance for _, chance, _ in all_views(0, size, p=0.0)])
    hidden = hidden[:, likely > 0]
    views = spg_views(torch.zeros(1, 1, PROMPT, dtype=torch.bool), hidden, torch.ones(1, CANVAS, dtype=torch.bool))
    lower, upper = evidence_bounds(loss_inputs(states, views), beta)
    return Forms(log(fsum(map(exp, each)) / len(each)), fsum(each) / len(each), 4 * lower.item(), 4 * upper.item())


def loss_inputs(states, views):
    sets = [tuple(noise[PROMPT:].nonzero().flatten().tolist()) for noise in views.noise[0]]
    logps = torch.stack([states[some] * marked(some) for some in sets]).unsqueeze(0)
    ones = torch.ones(1, CANVAS)
    return LossInputs(logps, logps, None, views.weights.double(), ones[:, 0], ones, torch.tensor(4.0))


@pytest.fixture(scope="module")
def models():
    """The states of a completion for ten random models."""
    with torch.no_grad():
        return [all_states(tiny(layers, seed), 0) for layers in (1, 2) for seed in range(4, 9)]


def test_the_upper_form_is_a_bound_for_beta_of_the_length_and_not_for_the_published_one(models):
    """With a single block and many draws it is the sum over tokens of log E[p_k^beta] / beta, over orders. By Hölder's
    inequality this is above log E[product of p_k] for beta >= L. For smaller beta, only its position above the lower
    bound is known (Jensen)."""
    for states in models:
        assert forms(states, size=4, beta=4.0).upper > forms(states, size=4, beta=4.0).logp
    published = [forms(states, size=4, beta=1.5) for states in models]
    assert all(one.upper > one.lower for one in published)
    below = [one.logp - one.upper for one in published if one.upper < one.logp]
    assert len(below) == 4  # of ten models
    assert max(below) == pytest.approx(0.411, abs=1e-3)


def test_with_several_blocks_neither_form_is_a_bound_nor_lies_on_its_side_of_the_other(models):
    """Each token of later blocks is scored in the states of all earlier blocks, and blocks are averaged, whereas a
    likelihood would add them."""
    several = [forms(states, size=2, beta=1.5) for states in models]
    assert all(one.elbo < one.logp for one in several)  # of the process itself it is one
    above = [one.lower - one.logp for one in several if one.lower > one.logp]
    below = [one.logp - one.upper for one in several if one.upper < one.logp]
    crossed = [one.lower - one.upper for one in several if one.lower > one.upper]
    assert (len(above), len(below), len(crossed)) == (5, 7, 5)  # of ten models
    assert (max(above), max(below), max(crossed)) == pytest.approx((1.239, 1.027, 1.814), abs=1e-3)
