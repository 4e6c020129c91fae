"""Properties of every estimator: what its views depend on, what they may show, and what scoring them costs."""

from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter

import pytest
import torch

from d1.masking import keyed_generator
from d1.rl.tables import ESTIMATORS
from d1.scoring import Randomness, Views
from tests.d1.scoring.enumeration import (
    LENGTHS,
    PROMPT,
    SAMPLED,
    after_end,
    assert_same,
    gradient,
    scores,
    settings,
    some_rows,
    tiny,
)

CHOSEN = {  # estimator and settings: those of methods, and all ways to draw
    "one_step": ("one_step", {"p_mask_prompt": 0.5}),
    "coupled": ("coupled", {"p_mask_prompt": 0.5}),
    "elbo": ("elbo", {"p_mask_prompt": 0.5, "num_views": 3, "antithetic": True}),
    "elbo stratified": ("elbo", {"num_views": 3, "stratified": True}),
    "espo": ("espo", {"p_mask_prompt": 0.5, "num_views": 2, "antithetic": True, "stratified": True}),
    "espo independent": ("espo", {"num_views": 3}),
    "bgpo": ("counts", {"p_mask_prompt": 0.5, "num_views": 3, "stratified": True}),
    "counts independent": ("counts", {"num_views": 2}),
    "gdpo": ("gauss", {"p_mask_prompt": 0.5}),
    "slim-rl": ("block_gauss", {"p_mask_prompt": 0.5}),
    "gdsd": ("complements", {"num_views": 2, "stratified": True}),
    "unigrpo": ("random_masks", {"p_mask_prompt": 0.5, "num_views": 3}),
    "dmpo": ("opposite_masks", {"p_mask_prompt": 0.5, "num_views": 2}),
    "spg": ("spg", {"p_mask_prompt": 0.5, "num_views": 3}),
    "replay": ("replay", {}),
    "agrpo": ("replay", {"num_views": 3}),
    "agrpo by entropy": ("replay", {"num_views": 3, "draw_steps": "entropy"}),
    "agrpo, the mean": ("replay", {"num_views": 3, "draw_steps": "entropy", "mean_step": True}),
    "egspo": ("replay", {"num_views": 2, "draw_steps": "top"}),
    "d2": ("segments", {"p_mask_prompt": 0.5, "segments": 3}),
    "rldf": ("states", {"num_views": 2}),
    "tracerl": ("replay", {"segment_steps": 2}),
    "left_to_right": ("left_to_right", {}),
    "just-grpo-fast": ("left_to_right", {"num_views": 2}),
    "one edge": ("edges", {}),  # of a tree: tests/d1/rl/test_tree.py
}
SIX = some_rows(SAMPLED, [0, 1, 2, 3, 0, 1])
each = pytest.mark.parametrize("name", CHOSEN)
OF_MASKS = {name for name, entry in ESTIMATORS.items() if not entry.uniform_noise}  # others: test_accepted.py
assert {estimator for estimator, _ in CHOSEN.values()} == OF_MASKS, "every estimator is among them"


def updates_of(name, sampled, first=0, total=6, updates=3, seed=4):
    """The views of three updates on `sampled`, whose first row is row `first` of a rollout of `total`."""
    estimator, chosen = CHOSEN[name]
    rows = [keyed_generator(seed, row) for row in range(first, first + len(sampled.prompt_ids))]
    random = Randomness(rows, keyed_generator(seed), first, total)
    return [ESTIMATORS[estimator](sampled, random, settings(**chosen)) for _ in range(updates)]


def scoring(views, row):
    """A row's views that score something: (noise, weights). The others are padding, because another row has more."""
    some = views.weights[row].any(-1)
    return views.noise[row, some], views.weights[row, some]


@each
def test_a_rows_views_depend_neither_on_its_batch_nor_on_the_number_of_processes(name):
    together = updates_of(name, SIX)
    parts = [(range(3), 0), (range(3, 6), 3)], [(range(1), 0), (range(1, 5), 1), (range(5, 6), 5)]
    for split in parts:
        for rows, first in split:
            apart = updates_of(name, some_rows(SIX, list(rows)), first)
            for whole, some in zip(together, apart, strict=True):
                for row in rows:
                    for found, expected in zip(scoring(some, row - first), scoring(whole, row), strict=True):
                        assert torch.equal(found, expected)


@each
def test_views_that_cover_score_every_token_that_counts(name):
    """And in some draw, the others leave one out."""
    estimator, chosen = CHOSEN[name]
    covers, met = ESTIMATORS[estimator].covers(settings(**chosen)), []
    for seed in range(30):
        for views in updates_of(name, SIX, seed=seed):
            met.append(torch.equal(views.weights.sum(1) > 0, SIX.scored))
    if name == "one edge":  # without a tree, the only edge is the whole completion
        assert all(met)
    else:
        assert all(met) == covers


@each
def test_padding_moves_no_view(name):
    wide = 2
    padded = replace(
        SIX,
        prompt_ids=torch.cat([torch.zeros(6, wide, dtype=torch.long), SIX.prompt_ids], dim=1),
        attention_mask=torch.cat([torch.zeros(6, wide, dtype=torch.long), SIX.attention_mask], dim=1),
        maskable=torch.cat([torch.zeros(6, wide, dtype=torch.bool), SIX.maskable], dim=1),
    )
    for found, expected in zip(updates_of(name, padded), updates_of(name, SIX), strict=True):
        assert torch.equal(found.noise[..., wide:], expected.noise)
        assert not found.noise[..., :wide].any()
        assert torch.equal(found.weights, expected.weights)


@each
def test_successive_draws_differ_unless_nothing_is_random(name):
    one, two, three = updates_of(name, SIX)
    fixed = name in ("replay", "egspo", "tracerl", "left_to_right", "just-grpo-fast", "one edge")
    for a, b in ((one, two), (two, three), (one, three)):
        assert (torch.equal(a.noise, b.noise) and torch.equal(a.weights, b.weights)) == fixed
    other = updates_of(name, SIX, seed=5)[0]
    assert (torch.equal(one.noise, other.noise) and torch.equal(one.weights, other.weights)) == fixed


@each
def test_views_are_as_many_as_planned_and_show_nothing_that_tells_the_length(name):
    """Only replay shows the canvas after a completion's end, if the sampler had revealed it (`test_replay.py`)."""
    estimator, chosen = CHOSEN[name]
    most = ESTIMATORS[estimator].views(settings(**chosen))
    for views in updates_of(name, SAMPLED, total=4):
        assert views.noise.dtype == torch.bool
        assert views.weights.dtype == torch.float32
        assert views.noise.shape[:2] == views.weights.shape[:2]
        assert views.noise.shape[1] <= most
        assert not (views.noise[..., :PROMPT] & ~SAMPLED.maskable.unsqueeze(1)).any()
        assert (views.weights >= 0).all()
        hidden = views.noise[..., PROMPT:]
        assert not (views.weights[~hidden]).any()  # visible tokens are not predicted
        assert not views.weights[~SAMPLED.scored.unsqueeze(1).expand_as(hidden)].any()
        if not ESTIMATORS[estimator].replays:
            for row in range(len(LENGTHS)):
                assert hidden[row][views.weights[row].any(-1)][:, list(after_end(row))].all()


@each
def test_an_eos_alone_is_scored_and_a_row_that_takes_no_part_is_not(name):
    """Row 2 is only an EOS; row 3 has no scored token, and neither has a whole batch of such rows."""
    model = tiny(2)
    seen = torch.zeros(())
    for seed in range(20):
        for views in updates_of(name, SAMPLED, total=4, seed=seed):
            assert torch.isfinite(views.weights).all()
            assert not views.weights[3].any()
            seen = seen + views.weights[2, :, 0].sum()
    assert seen > 0
    found = scores(model, views)
    assert not found.logps[3].any()
    assert not found.logps[2, 1:].any()
    nothing = replace(SAMPLED, scored=torch.zeros_like(SAMPLED.scored))
    for views in updates_of(name, nothing, total=4):
        assert not views.weights.any()
        found = scores(model, views).logps
        assert not found.any()
        assert not gradient(model, found).any()


@each
def test_attention_sees_the_whole_canvas_so_that_other_tokens_after_the_end_change_nothing(name):
    """Replay hides them here, too, because none of them was revealed before the others."""
    if name == "rldf":
        pytest.skip("shows them, as published (`test_replay.py`)")
    late = SAMPLED.reveal_steps.masked_fill(~SAMPLED.scored, 9)
    sampled = replace(SAMPLED, reveal_steps=late)
    views = updates_of(name, sampled, total=4)[0]
    other = replace(sampled, canvas_ids=sampled.canvas_ids.where(sampled.scored, 2))
    model = tiny(2)
    expected = scores(model, views, sampled).logps
    torch.testing.assert_close(scores(model, views, other).logps, expected, rtol=0, atol=0)
    # A canvas that ended with the completion would be another state: attention covers the rest of the canvas, too.
    row = some_rows(sampled, [1])
    short = Views(views.noise[1:2, :, : PROMPT + LENGTHS[1]], views.weights[1:2, :, : LENGTHS[1]])
    cut = replace(row, canvas_ids=row.canvas_ids[:, : LENGTHS[1]])
    if short.weights.any():
        assert (scores(model, short, cut).logps - expected[1, : LENGTHS[1]]).abs().max() > 1e-4


# --- What scoring costs ----------------------------------------------------------------------------------------------


@contextmanager
def forward_passes(model):
    """Rows of each forward pass through the transformer."""
    rows = []
    handle = model.base_model.register_forward_pre_hook(
        lambda backbone, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    yield rows
    handle.remove()


@each
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_forward_passes_are_as_few_as_pairs_of_rows_and_views_that_score_something(name, at_once):
    model, views = tiny(2), updates_of(name, SIX)[0]
    pairs = int(views.scoring.sum())
    with forward_passes(model) as rows, torch.no_grad():
        scores(model, views, SIX, views_at_once=at_once)
    assert len(rows) == -(-pairs // (6 * at_once))
    assert sum(rows) == pairs
    assert max(rows) <= 6 * at_once
    with forward_passes(model) as rows:
        scores(model, views, SIX, views_at_once=at_once).logps.sum().backward()
    passes = -(-pairs // (6 * at_once))
    assert len(rows) == passes * (2 if passes > 1 else 1)  # of several, each is computed again for its gradient
    model.zero_grad()


@each
def test_neither_views_at_once_nor_micro_batches_change_values_or_gradients(name):
    model, views = tiny(2), updates_of(name, SIX)[0]
    expected = scores(model, views, SIX, views_at_once=views.weights.shape[1]).logps
    for at_once in (1, 2, 5):
        assert_same(model, scores(model, views, SIX, views_at_once=at_once).logps, expected)
    for size in (1, 4):
        parts = []
        for start in range(0, 6, size):
            some = slice(start, start + size)
            parts.append(scores(model, views.each(itemgetter(some)), some_rows(SIX, some), 1).logps)
        assert_same(model, torch.cat(parts), expected)
