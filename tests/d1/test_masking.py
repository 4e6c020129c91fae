"""The forward process: probabilities, independence of rows and padding, times and complements of SFT; and no trace in
the global random state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from d1.masking import NOISE_EPS, draw_mask, draw_noise, keyed_generator, noise_level


def test_noise_level_is_linear_and_never_zero():
    t = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    assert noise_level(t).tolist() == pytest.approx([1e-3, 0.5005, 1.0], rel=0, abs=1e-15)


def test_a_generator_is_a_function_of_its_key():
    first, again, swapped = (torch.rand(8, generator=keyed_generator(*key)) for key in [(3, 5), (3, 5), (5, 3)])
    assert torch.equal(first, again)
    assert not torch.equal(first, swapped)
    with pytest.raises(ValueError, match=">= 0"):
        keyed_generator(1, -1)


def test_keys_that_differ_by_zeros_at_their_end_give_one_generator():
    """numpy's `SeedSequence` fills short keys with zeros: what `keyed_generator` warns of."""
    assert keyed_generator(5, 6).initial_seed() == keyed_generator(5, 6, 0).initial_seed()
    assert keyed_generator(5, 6).initial_seed() != keyed_generator(5, 6, 1).initial_seed()


def test_draw_mask_matches_a_loop_that_draws_one_number_a_maskable_token():
    maskable = torch.tensor([False, True, True, False, True])
    numbers = iter(torch.rand(3, generator=keyed_generator(7)).tolist())
    expected = [bool(m) and next(numbers) < 0.6 for m in maskable]
    assert draw_mask(maskable, 0.6, keyed_generator(7)).tolist() == expected


def test_masking_leaves_every_global_random_state_alone():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    draw_mask(torch.ones(2, 30, dtype=torch.bool), 0.3, keyed_generator(0))
    draw_noise(ANSWER, keyed_generator(5), mirror=True)
    assert random.getstate() == states[0]
    assert all(np.array_equal(now, then) for now, then in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])


ANSWER = torch.tensor([False] * 5 + [True] * 4000)


def test_only_answer_tokens_are_hidden_with_probability_of_their_time() -> None:
    for row in range(20):
        t, mask = draw_noise(ANSWER, keyed_generator(0, row))
        assert not mask[:5].any()
        p = float(noise_level(t))
        assert float(mask[5:].float().mean()) == pytest.approx(p, abs=4 * (p * (1 - p) / 4000) ** 0.5 + 1e-9)


def test_times_are_uniform_in_their_stratum() -> None:
    times = torch.stack([draw_noise(ANSWER[:6], keyed_generator(1, i), low=0.25, high=0.5)[0] for i in range(4000)])
    assert times.min() >= 0.25
    assert times.max() < 0.5
    assert float(times.mean()) == pytest.approx(0.375, abs=4 * 0.25 / (12 * 4000) ** 0.5)
    assert float(times.var()) == pytest.approx(0.25**2 / 12, rel=0.1)


def test_neither_padding_nor_a_block_of_all_tokens_moves_the_draw() -> None:
    t, mask = draw_noise(ANSWER, keyed_generator(2))
    padded_t, padded = draw_noise(torch.cat([ANSWER, torch.zeros(7, dtype=torch.bool)]), keyed_generator(2))
    assert torch.equal(padded_t, t)
    assert torch.equal(padded[: len(mask)], mask)
    of_blocks, blocks = draw_noise(ANSWER, keyed_generator(2), block_size=len(ANSWER))
    assert torch.equal(of_blocks, t.expand(len(ANSWER)))
    assert torch.equal(blocks, mask)


@pytest.mark.parametrize("mirror", [False, True])
def test_each_block_has_a_time_of_its_own(mirror: bool) -> None:
    """Blocks of 1000; the first 5 tokens are a prompt. After another prompt of whole blocks everything is the same."""
    behind = torch.cat([torch.zeros(3000, dtype=torch.bool), ANSWER])
    t, mask = draw_noise(ANSWER, keyed_generator(6), mirror=mirror, block_size=1000)
    later_t, later = draw_noise(behind, keyed_generator(6), mirror=mirror, block_size=1000)
    assert torch.equal(later_t[3000:], t)
    assert torch.equal(later[3000:], mask)
    assert t.unique().numel() == 5
    for block in range(4):
        place = slice(max(5, 1000 * block), 1000 * (block + 1))
        assert t[place].unique().numel() == 1
        p = float(noise_level(t[place][0]))
        assert float(mask[place].float().mean()) == pytest.approx(p, abs=4 * (p * (1 - p) / 990) ** 0.5 + 1e-9)


def test_twins_cover_every_answer_token_and_share_next_to_none() -> None:
    for row in range(20):
        t, mask = draw_noise(ANSWER, keyed_generator(3, row))
        twin_t, twin = draw_noise(ANSWER, keyed_generator(3, row), mirror=True)
        assert float(t + twin_t) == pytest.approx(1)
        assert torch.equal(mask | twin, ANSWER)
        assert float((mask & twin).sum()) <= 4000 * NOISE_EPS + 4 * (4000 * NOISE_EPS) ** 0.5
