"""d1's estimator: its views, drawn row by row."""

from types import SimpleNamespace

import pytest
import torch

from d1.masking import draw_mask, keyed_generator
from d1.scoring import ESTIMATORS, Randomness, SampledRows
from d1.scoring.one_step import one_step_views

SETTINGS = SimpleNamespace(p_mask_prompt=0.3)


def sampled(maskable: torch.Tensor) -> SampledRows:
    scored = torch.tensor([True] * 4 + [False] * 2).expand(len(maskable), -1)
    zeros = torch.zeros(scored.shape)
    return SampledRows(
        prompt_ids=torch.full(maskable.shape, 7),
        attention_mask=torch.ones(maskable.shape, dtype=torch.long),
        maskable=maskable,
        completion_ids=torch.full(scored.shape, 8),
        scored=scored,
        reveal_steps=zeros.long(),
        logps=zeros,
        entropies=zeros,
    )


def prompt_noise(maskable: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
    random = Randomness(generators, keyed_generator(9), 0, len(generators), torch.zeros(len(generators)))
    return ESTIMATORS["one_step"].draw(sampled(maskable), random, SETTINGS).noise[:, 0, : maskable.shape[1]]


def test_one_view_hides_the_whole_canvas_and_weighs_each_scored_token_by_one():
    scored = torch.tensor([[True, True, False, False], [True, True, True, True]])
    noise = torch.tensor([[True, False, False], [False, False, True]])
    views = one_step_views(noise, scored, gen_length=6)
    assert torch.equal(views.noise, torch.cat([noise, torch.ones(2, 6, dtype=torch.bool)], dim=1).unsqueeze(1))
    assert torch.equal(views.weights, scored.float().unsqueeze(1))


def test_each_update_draws_on_in_its_rows_own_stream():
    maskable = torch.ones(3, 12, dtype=torch.bool)
    maskable[1, :5] = False  # padding, or protected
    keys = [(0, 0), (0, 1), (0, 2)]
    generators = [keyed_generator(*key) for key in keys]
    updates = [prompt_noise(maskable, generators) for _ in range(4)]
    for row, key in enumerate(keys):
        generator = keyed_generator(*key)
        for update in updates:
            assert torch.equal(update[row], draw_mask(maskable[row], 0.3, generator))
    alone = [keyed_generator(*keys[1])]
    for update in updates:  # neither the batch nor padding moves a row
        assert torch.equal(prompt_noise(maskable[1:2, 5:], alone), update[1:2, 5:])
    assert not torch.equal(updates[0], updates[1])


def test_one_generator_a_row_is_demanded():
    with pytest.raises(ValueError, match="shorter"):
        prompt_noise(torch.ones(2, 3, dtype=torch.bool), [keyed_generator(0)])
