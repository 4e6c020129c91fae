"""The random numbers of a rollout: each uniform, together spread evenly, and the same on any number of processes."""

from itertools import permutations

import pytest
import torch

from d1.masking import keyed_generator
from d1.scoring import Randomness
from d1.scoring.rollouts import prompt_noise, rotation, strata
from tests.d1.scoring.enumeration import SAMPLED

GRID = (torch.arange(60, dtype=torch.float64) + 0.5) / 60  # of u, fine enough to tell 60 parts of [0, 1) apart


def assert_uniform(numbers):
    """Checks that each of 60 equal parts of [0, 1) has equally many of the numbers (n, ...), for each index of the
    other dimensions."""
    assert ((numbers >= 0) & (numbers < 1)).all()
    for values in numbers.flatten(1).unbind(1):
        counts = (values * 60).long().bincount(minlength=60)
        assert (counts == len(values) // 60).all()


@pytest.mark.parametrize(("rows", "draws"), [(1, 1), (1, 4), (3, 1), (3, 2), (5, 4)])
def test_each_rotated_number_is_uniform_and_all_are_equally_far_apart(rows, draws):
    turned = torch.stack([rotation(rows, draws, u) for u in GRID])
    assert_uniform(turned)
    count = rows * draws
    for numbers in turned:
        everyone = numbers.flatten().sort().values
        torch.testing.assert_close(everyone.diff(), torch.full((count - 1,), 1 / count, dtype=torch.float64))
        gaps = numbers.sort(dim=1).values.diff(dim=1)
        torch.testing.assert_close(gaps, torch.full_like(gaps, 1 / draws))


@pytest.mark.parametrize("total", [1, 2, 3, 4])
def test_over_all_orders_each_spread_number_is_uniform_and_one_lies_in_each_stratum(total):
    found = torch.stack([strata(torch.tensor(order), u) for order in permutations(range(total)) for u in GRID])
    assert_uniform(found)
    parts = (found * total).long().sort(dim=1).values
    assert torch.equal(parts, torch.arange(total).expand_as(parts))


def make(rows, shared=0, first=0, total=6):
    generators = [keyed_generator(7, row) for row in range(first, first + rows)]
    return Randomness(generators, keyed_generator(shared), first, total)


KINDS = ["evenly_spread", "rotated", "uniform"]


@pytest.mark.parametrize("kind", KINDS)
def test_processes_share_a_rollouts_numbers_out_and_go_on(kind):
    together, first, second = make(6), make(3), make(3, first=3)
    before = None
    for _ in range(3):
        numbers = getattr(together, kind)(4)
        assert numbers.shape == (6, 4)
        apart = torch.cat([getattr(first, kind)(4), getattr(second, kind)(4)])
        assert torch.equal(numbers, apart)
        assert before is None or not torch.isclose(numbers, before).any()
        before = numbers


def test_numbers_that_are_drawn_are_those_of_the_pure_functions():
    spread = make(5, total=5).evenly_spread(3).flatten()
    order = (spread * 15).long()
    assert torch.equal(order.sort().values, torch.arange(15))
    torch.testing.assert_close(spread, strata(order, (spread * 15 % 1)[0]))
    turned = make(5, total=5).rotated(3)
    torch.testing.assert_close(turned, rotation(5, 3, turned[0, 0]))
    # The order, the positions within the strata and the rotation are all drawn anew.
    others = [make(5, shared=seed, total=5) for seed in range(200)]
    assert len({tuple((other.evenly_spread(3) * 15).long().flatten().tolist()) for other in others}) == 200
    mean = torch.stack([other.rotated(1)[0] for other in others]).mean()
    assert abs(mean - 0.5) < 4 * (1 / 12 / 200) ** 0.5


def test_prompt_noise_is_drawn_row_by_row_and_never_of_padding():
    def noise(rows, width=3):
        generators = [keyed_generator(0, row) for row in rows]
        random = Randomness(generators, keyed_generator(0), rows[0], 4)
        some = {"maskable": SAMPLED.maskable[rows][:, 3 - width :]}
        return prompt_noise(type(SAMPLED)(**(vars(SAMPLED) | some)), random, 0.6, views=50)

    whole = noise([0, 1, 2, 3])
    assert whole.shape == (4, 50, 3)
    assert not (whole & ~SAMPLED.maskable.unsqueeze(1)).any()
    assert torch.equal(noise([2, 3]), whole[2:])
    assert torch.equal(noise([2], width=1), whole[2:3, :, 2:])  # without its padding
    share = whole[SAMPLED.maskable.unsqueeze(1).expand_as(whole)].float().mean()
    assert abs(share - 0.6) < 0.08
