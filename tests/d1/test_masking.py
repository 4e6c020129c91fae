"""The forward process: probabilities, independence of rows and padding, and no trace in the global random state."""

import random

import numpy as np
import pytest
import torch

from d1.masking import draw_mask, keyed_generator, noise_level


def rows_of(*keys):
    return [keyed_generator(*key) for key in keys]


def test_noise_level_is_linear_and_never_zero():
    t = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(
        noise_level(t), torch.tensor([1e-3, 0.5005, 1.0], dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_a_generator_is_a_function_of_its_key():
    first, again, swapped = (torch.rand(8, generator=keyed_generator(*key)) for key in [(3, 5), (3, 5), (5, 3)])
    assert torch.equal(first, again)
    assert not torch.equal(first, swapped)
    with pytest.raises(ValueError, match=">= 0"):
        keyed_generator(1, -1)


def test_streams_of_neighbouring_keys_are_unrelated():
    draws = torch.stack([torch.rand(2000, generator=keyed_generator(0, row)) for row in range(20)])
    correlation = torch.corrcoef(draws) - torch.eye(20)
    assert correlation.abs().max() < 5 / 2000**0.5  # five standard errors


@pytest.mark.parametrize("p", [0.0, 0.15, 1.0])
def test_draw_mask_hides_only_maskable_tokens_with_probability_p(p):
    maskable = torch.rand(400, 100, generator=keyed_generator(1)) < 0.5
    mask = draw_mask(maskable, p, keyed_generator(2))
    assert not (mask & ~maskable).any()
    standard_error = (p * (1 - p) / maskable.sum().item()) ** 0.5
    assert abs(mask.sum().item() / maskable.sum().item() - p) <= 4 * standard_error


def test_draw_mask_matches_a_loop_that_draws_one_number_a_maskable_token():
    maskable = torch.tensor([False, True, True, False, True])
    generator = keyed_generator(7)
    numbers = iter(torch.rand(3, generator=generator).tolist())
    expected = [bool(m) and next(numbers) < 0.6 for m in maskable]
    assert draw_mask(maskable, 0.6, keyed_generator(7)).tolist() == expected


def test_masking_leaves_every_global_random_state_alone():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    draw_mask(torch.ones(2, 30, dtype=torch.bool), 0.3, keyed_generator(0))
    assert random.getstate() == states[0]
    assert all(np.array_equal(now, then) for now, then in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])
