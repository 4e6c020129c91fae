"""The random numbers of a rollout: each uniform, together spread evenly. On several processes: `test_estimators.py`."""

from itertools import permutations

import pytest
import torch

from d1.scoring.inputs import rotation, strata
from tests.d1.scoring.enumeration import randomness

GRID = (torch.arange(60, dtype=torch.float64) + 0.5) / 60  # of u, fine enough to tell 60 parts of [0, 1) apart


def assert_uniform(numbers):
    """Checks that each of 60 equal parts of [0, 1) has equally many of the numbers (n, ...), for each index of the
    other dimensions."""
    assert ((numbers >= 0) & (numbers < 1)).all()
    for values in numbers.flatten(1).unbind(1):
        counts = (values * 60).long().bincount(minlength=60)
        assert (counts == len(values) // 60).all()


def test_the_rows_of_a_rotation_follow_each_other():
    u = torch.tensor(0.1, dtype=torch.float64)
    expected = torch.tensor([[0.1, 0.6], [0.35, 0.85]], dtype=torch.float64)
    torch.testing.assert_close(rotation(2, 2, u), expected)


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


def test_numbers_that_are_drawn_are_those_of_the_pure_functions():
    spread = randomness(5).evenly_spread(3).flatten()
    order = (spread * 15).long()
    assert torch.equal(order.sort().values, torch.arange(15))
    torch.testing.assert_close(spread, strata(order, (spread * 15 % 1)[0]))
    turned = randomness(5).rotated(3)
    torch.testing.assert_close(turned, rotation(5, 3, turned[0, 0]))
    # The order, the positions within the strata and the rotation are all drawn anew.
    others = [randomness(5, seed=seed) for seed in range(200)]
    assert len({tuple((other.evenly_spread(3) * 15).long().flatten().tolist()) for other in others}) == 200
    mean = torch.stack([other.rotated(1)[0] for other in others]).mean()
    assert abs(mean - 0.5) < 4 * (1 / 12 / 200) ** 0.5


def test_old_names_of_random_numbers_still_work():
    random = randomness(2, total=4)
    with pytest.warns(FutureWarning, match=r"Randomness\.rows is now generators"):
        assert random.rows is random.generators
    with pytest.warns(FutureWarning, match=r"Randomness\.own is now local_slice"):
        assert torch.equal(random.own(torch.arange(4)), random.local_slice(torch.arange(4)))
