"""d1's estimator: its views, drawn row by row, and their mean, which is not a bound."""

import pytest
import torch

from d1.masking import draw_mask, keyed_generator
from d1.scoring import ESTIMATORS, Randomness, SampledRows, ViewSettings
from d1.scoring.masks import one_step_views
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    PROMPT,
    SAMPLED,
    any_order_bound,
    assert_same,
    every_model,
    marked,
    merged,
    scores,
    stacked,
    state_logps,
    subsets,
)

SETTINGS = ViewSettings(p_mask_prompt=0.3)


def sampled(maskable: torch.Tensor) -> SampledRows:
    scored = torch.tensor([True] * 4 + [False] * 2).expand(len(maskable), -1)
    zeros = torch.zeros(scored.shape)
    return SampledRows(
        prompt_ids=torch.full(maskable.shape, 7),
        attention_mask=torch.ones(maskable.shape, dtype=torch.long),
        maskable=maskable,
        canvas_ids=torch.full(scored.shape, 8),
        scored=scored,
        reveal_steps=zeros.long(),
        logps=zeros,
        entropies=zeros,
    )


def prompt_noise(maskable: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
    random = Randomness(generators, keyed_generator(9), 0, len(generators))
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
    for update in updates:  # neither the batch nor padding changes a row
        assert torch.equal(prompt_noise(maskable[1:2, 5:], alone), update[1:2, 5:])
    assert not torch.equal(updates[0], updates[1])


def test_one_generator_a_row_is_demanded():
    with pytest.raises(ValueError, match="shorter"):
        prompt_noise(torch.ones(2, 3, dtype=torch.bool), [keyed_generator(0)])


def test_the_mean_over_all_prompt_masks_is_the_sum_of_tokens_each_revealed_alone_and_not_the_any_order_bound():
    p, rows = SETTINGS.p_mask_prompt, []
    masks = [subsets(row.nonzero().flatten().tolist()) for row in SAMPLED.maskable]
    chances = [[p ** len(some) * (1 - p) ** (len(every[-1]) - len(some)) for some in every] for every in masks]
    for row, every in enumerate(masks):
        noise = torch.stack([marked(some, PROMPT) for some in every])
        views = one_step_views(noise, SAMPLED.scored[row].expand(len(every), -1), CANVAS)
        rows.append(merged(torch.tensor(chances[row], dtype=torch.float64), views))
    for model in every_model():
        expected = []
        for row, (every, odds) in enumerate(zip(masks, chances, strict=True)):
            each = [state_logps(model, row, range(CANVAS), prompt=some) for some in every]
            mean = sum(chance * logps for chance, logps in zip(odds, each, strict=True))
            expected.append(mean * marked(range(LENGTHS[row])))
        expected = torch.stack(expected)
        found = scores(model, stacked(rows)).logps
        assert_same(model, found, expected)
        assert (found - any_order_bound(model)).sum(1)[:2].abs().min() > 0.1
