"""Replay of rollouts with edits: every written token in the state that the sampler wrote it in."""

import pytest
import torch

from d1.models.kinds import block_size
from d1.sampling import SamplingSettings, rollout
from d1.scoring import ESTIMATORS, SampledRows, Views
from d1.scoring.rollouts import blocks_of
from tests.d1.scoring.enumeration import settings
from tests.d1.scoring.test_replay import ENDS, LENGTH, MASK, PROMPTS, generators_of, model, randomness, replayed

__all__ = ["model"]  # a fixture

REPLAY = ESTIMATORS["replay"]
EDITORS = [
    {"reveal_level": 0.4, "edit_threshold": 0.5},
    {"reveal_level": 0.3, "edit_threshold": 0.3, "max_post_steps": 4},
    {"reveal_level": 0.4, "edit_threshold": 0.0, "max_post_steps": 2, "temperature": 0.9},
]


def sample(model, eos_stop=False, **options):
    """A rollout of 11 tokens in blocks of 4, with its writes, and what estimators may know of it."""
    visible = (PROMPTS != 0).long()
    chosen = SamplingSettings(LENGTH, 4, LENGTH, sampler="parallel", **options)
    ends = {"generator": generators_of(), "eos_token_ids": ENDS if eos_stop else None}
    taken = rollout(model, PROMPTS, visible, chosen, mask_token_id=MASK, **ends)
    ids = taken.ids[:, PROMPTS.shape[1] :]
    is_end = torch.isin(ids, torch.tensor(ENDS))
    scored = is_end.cumsum(-1) - is_end.long() == 0
    blocks = blocks_of(visible, LENGTH, block_size(model.config))
    record = (taken.reveal_steps, taken.logps, taken.entropies, blocks)
    writes = (taken.writes.ids, taken.writes.steps, taken.writes.entropies)
    return SampledRows(PROMPTS, visible, visible.bool(), ids, scored, *record, *writes), taken


@pytest.mark.parametrize("eos_stop", [False, True])
@pytest.mark.parametrize("editor", EDITORS, ids=str)
def test_the_log_prob_of_a_trajectory_is_the_sum_over_written_tokens(model, editor, eos_stop):
    """The sampler recorded it, so that ratios start at 1; last writes alone would show final tokens for drafts."""
    sampled, taken = sample(model, eos_stop, **editor)
    assert (taken.edits > 0).any()
    expected = taken.writes.logps.sum(-1) * sampled.scored
    views = REPLAY(sampled, randomness(5), settings())
    found = replayed(model, sampled, views)
    torch.testing.assert_close(found.logps, expected, rtol=0, atol=2e-5)
    times = (taken.writes.steps >= 0).sum(-1) * sampled.scored
    assert torch.equal((views.weights != 0).sum(1), times)  # each written token once
    # With last writes alone, views show final tokens where drafts were, and edits that later edits replaced are lost.
    last_only = SampledRows(**{name: None if "write" in name else of for name, of in vars(sampled).items()})
    blind = replayed(model, sampled, REPLAY(last_only, randomness(5), settings()))
    assert (blind.logps - taken.logps * sampled.scored).abs().max() > 0.01


@pytest.mark.parametrize("draw_steps", ["uniform", "entropy", "top"])
def test_drawn_steps_score_what_these_wrote(model, draw_steps):
    sampled, taken = sample(model, **EDITORS[1])
    views = REPLAY(sampled, randomness(5), settings(num_views=3, draw_steps=draw_steps))
    found, seen = replayed(model, sampled, views).view_logps, views.weights != 0
    assert seen.any()
    for row, view, place in seen.nonzero().tolist():
        same = taken.writes.ids[row, place] == views.targets[row, view, place]
        close = (taken.writes.logps[row, place] - found[row, view, place]).abs() < 2e-5
        assert (same & close & (taken.writes.steps[row, place] >= 0)).any()


def slow_states(sampled, taken, row, segment_steps):
    """(hidden, shown, targets) of each segment of a row of full attention: dictionaries by place."""
    writes = [
        (int(step), place, int(token))
        for place in range(LENGTH)
        for step, token in zip(taken.writes.steps[row, place], taken.writes.ids[row, place], strict=True)
        if step >= 0
    ]
    last = max(step // segment_steps for step, place, _ in writes if sampled.scored[row, place])
    for segment in range(last + 1):
        shown = {place: token for step, place, token in sorted(writes) if step < segment * segment_steps}
        own = {place: token for step, place, token in sorted(writes) if step // segment_steps == segment}
        yield shown, {place: token for place, token in own.items() if sampled.scored[row, place]}


@pytest.mark.parametrize("model", [None], indirect=True)
@pytest.mark.parametrize("segment_steps", [1, 2, 3])
def test_views_show_drafts_and_score_what_a_segment_ends_with(model, segment_steps):
    sampled, taken = sample(model, **EDITORS[1])
    views = REPLAY(sampled, randomness(5), settings(segment_steps=segment_steps))
    for row in range(len(PROMPTS)):
        view = -1
        for view, (shown, own) in enumerate(slow_states(sampled, taken, row, segment_steps)):
            canvas = views.noise[row, view, PROMPTS.shape[1] :]
            assert {place for place in range(LENGTH) if not canvas[place]} == {*shown}
            assert {place: views.shown[row, view, place].item() for place in shown} == shown
            scored = views.weights[row, view].nonzero().flatten().tolist()
            assert {place: views.targets[row, view, place].item() for place in scored} == own
        assert not views.weights[row, view + 1 :].any()


def test_estimators_of_final_tokens_are_unchanged_and_states_refuses_edits(model):
    sampled, _ = sample(model, **EDITORS[0])
    plain = SampledRows(**{name: None if "write" in name else of for name, of in vars(sampled).items()})
    chosen = settings(gen_length=LENGTH, num_views=2)
    for name, row in ESTIMATORS.items():
        if row.replays:
            continue
        one, other = (row(rows, randomness(5), chosen) for rows in (sampled, plain))
        assert torch.equal(one.noise, other.noise), name
        assert torch.equal(one.weights, other.weights), name
        assert one.shown is one.targets is None
    with pytest.raises(ValueError, match=r"draw_states.*replays the last write of each position, and these rows have"):
        ESTIMATORS["states"](sampled, randomness(5), chosen)


def test_views_that_show_the_completion_score_like_views_that_do_not_say(model):
    sampled, _ = sample(model, **EDITORS[0])
    plain = SampledRows(**{name: None if "write" in name else of for name, of in vars(sampled).items()})
    views = REPLAY(plain, randomness(5), settings())
    ids = sampled.canvas_ids.unsqueeze(1).expand_as(views.weights)
    said = Views(views.noise, views.weights, ids, ids)
    assert torch.equal(replayed(model, sampled, views).logps, replayed(model, sampled, said).logps)
    for name, wrong in (("shown", ids[..., 1:]), ("targets", ids[:, :1]), ("shown", ids.int())):
        with pytest.raises(ValueError, match=rf"views.{name} must be \(5, {ids.shape[1]}, 11\) int64 ids, got"):
            replayed(model, sampled, views.__class__(**{**vars(views), name: wrong}))
