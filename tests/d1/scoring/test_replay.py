"""Replay against what the rollout itself recorded, against states rebuilt by hand, and over all draws of segments."""

from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from d1.masking import keyed_generator
from d1.models import prepare
from d1.models.kinds import block_size
from d1.sampling import rollout
from d1.scoring import ESTIMATORS, Randomness, SampledRows
from d1.scoring.replay import chances, drawn, replay_views, segments_of
from d1.scoring.rollouts import blocks_of, strata
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    PROMPT,
    SAMPLED,
    assert_frequencies,
    assert_same,
    every_model,
    merged,
    scores,
    settings,
    some_rows,
    stacked,
    state_logps,
)

REPLAY = ESTIMATORS["replay"].draw


def randomness(rows, seed=0):
    return Randomness([keyed_generator(0)] * rows, keyed_generator(seed), 0, rows)


# --- What the sampler recorded ---------------------------------------------------------------------------------------

VOCAB, MASK, LENGTH = 12, 4, 11
PROMPTS = torch.tensor([[0, 0, 1, 2, 3], [3, 2, 1, 2, 3], [0, 1, 5, 6, 7], [5, 1, 5, 1, 5], [0, 0, 0, 0, 9]])
ENDS = [6, 7]  # of twelve ids: most rows end somewhere within
SAMPLERS = [
    *({"sampler": "exact", "remasking": name} for name in ("low_confidence", "random")),
    {"sampler": "parallel", "reveal": "threshold", "reveal_level": 0.4},
    {"sampler": "parallel", "reveal": "factor", "reveal_level": 1.5},
    {"sampler": "parallel", "reveal": "entropy", "reveal_level": 0.8},
]


@pytest.fixture(scope="module", params=[None, 4], ids=["full", "blocks"])
def model(request):
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return prepare(
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.6, block_size=request.param, **shape))
    ).eval()


def sample(model, eos_stop=False, **options):
    """A rollout of 11 tokens in blocks of 4, 4 and 3, in 7 steps, and what estimators may know of it."""
    options = {"gen_length": LENGTH, "block_length": 4, "steps": 7, "mask_token_id": MASK, "temperature": 0.0} | options
    visible = (PROMPTS != 0).long()
    generators = [keyed_generator(2, row) for row in range(len(PROMPTS))]
    ends = ENDS if eos_stop else None
    taken = rollout(model, PROMPTS, visible, generator=generators, eos_token_ids=ends, **options)
    ids = taken.ids[:, PROMPTS.shape[1] :]
    is_end = torch.isin(ids, torch.tensor(ENDS))
    scored = is_end.cumsum(-1) - is_end.long() == 0
    blocks = blocks_of(visible, LENGTH, block_size(model.config))
    record = (taken.reveal_steps, taken.logps, taken.entropies, blocks)
    return SampledRows(PROMPTS, visible, visible.bool(), ids, scored, *record)


def replayed(model, sampled, views):
    """`score`; this model's mask token is the tiny one's, too."""
    with torch.no_grad():
        return scores(model, views, sampled, views_at_once=4)


@pytest.mark.parametrize("eos_stop", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_replayed_log_probs_are_those_the_sampler_recorded(model, sampler, temperature, eos_stop):
    sampled = sample(model, eos_stop, temperature=temperature, **sampler)
    lengths = sampled.scored.sum(-1)
    assert lengths.min() < LENGTH  # some end early
    expected = sampled.logps * sampled.scored
    views = REPLAY(sampled, randomness(5), settings())
    assert torch.equal((views.weights != 0).sum(1), sampled.scored.long())  # each token once
    most = 4 if block_size(model.config) else LENGTH  # a view shows a step of every block
    assert views.noise.shape[1] <= most
    torch.testing.assert_close(replayed(model, sampled, views).logps, expected, rtol=0, atol=1e-5)
    for draw_steps in ("uniform", "entropy"):  # wherever a drawn view scores a token
        views = REPLAY(sampled, randomness(5), settings(num_views=3, draw_steps=draw_steps))
        found, seen = replayed(model, sampled, views).view_logps, views.weights != 0
        assert seen.any()
        torch.testing.assert_close(found[seen], expected.unsqueeze(1).expand_as(found)[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", [None], indirect=True)
@pytest.mark.parametrize("chosen", [{}, {"segments": 3}, {"segment_steps": 2}, {"segments": 4, "num_views": 2}])
def test_the_eos_stop_changes_no_view(model, chosen):
    """It leaves out steps after a completion's end; numbers of segments and places within them stay as they are."""
    for sampler in SAMPLERS:
        whole, stopped = (sample(model, stop, temperature=0.9, **sampler) for stop in (False, True))
        assert (stopped.reveal_steps < 0).any()
        assert torch.equal(whole.scored, stopped.scored)
        views, fewer = (REPLAY(some, randomness(5), settings(**chosen)) for some in (whole, stopped))
        scoring = fewer.weights.any(-1)
        assert torch.equal(views.noise[scoring], fewer.noise[scoring])
        assert torch.equal(views.weights, fewer.weights)


# --- States rebuilt by hand ------------------------------------------------------------------------------------------

# The first and the last step of each segment, of four steps 0..3.
MERGED = {
    "each step": ({}, [(0, 0), (1, 1), (2, 2), (3, 3)]),
    "two steps": ({"segment_steps": 2}, [(0, 1), (2, 3)]),
    "three steps": ({"segment_steps": 3}, [(0, 2), (3, 3)]),
    "all steps": ({"segment_steps": 8}, [(0, 3)]),
    "two segments": ({"segments": 2}, [(0, 1), (2, 3)]),
    "three segments": ({"segments": 3}, [(0, 1), (2, 2), (3, 3)]),
    "as many as steps": ({"segments": 4}, [(0, 0), (1, 1), (2, 2), (3, 3)]),
    "more than steps": ({"segments": 9}, [(0, 0), (1, 1), (2, 2), (3, 3)]),
}
# The row that ends early was at step 2 when its last scored token appeared: of its three steps are made
SHORT = {"two segments": [(0, 1), (2, 2)], "three segments": [(0, 0), (1, 1), (2, 2)]}
SHORT |= {"as many as steps": [(0, 0), (1, 1), (2, 2)], "more than steps": [(0, 0), (1, 1), (2, 2)]}
ALONE = {kind: [(0, 0), (1, 1)] for kind in SHORT}  # and of the two steps of the EOS alone


def trajectory(model, kind):
    """(rows, canvas) log p of each token in the state at its segment's beginning, state by state. Tokens behind the
    completion's end are shown from their own step on, as they were to the sampler."""
    rows = []
    for row, length in enumerate(LENGTHS):
        total = torch.zeros(CANVAS, dtype=torch.float64)
        steps = SAMPLED.reveal_steps[row].tolist()
        parts = {1: SHORT, 2: ALONE}.get(row, {}).get(kind, MERGED[kind][1])
        for first, last in parts:
            own = [k for k in range(length) if first <= steps[k] <= last]
            hidden = [k for k in range(CANVAS) if steps[k] >= first or steps[k] < 0]
            if own:
                logps = state_logps(model, row, hidden)
                total = total + torch.stack([logps[k] if k in own else torch.zeros(()).double() for k in range(CANVAS)])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", MERGED)
def test_the_sum_over_segments_is_the_trajectory(kind):
    views = REPLAY(SAMPLED, randomness(4), settings(**MERGED[kind][0]))
    assert views.noise.shape[1] <= ESTIMATORS["replay"].views(settings(**MERGED[kind][0]))
    for model in every_model():
        assert_same(model, scores(model, views).logps, trajectory(model, kind))


def test_tokens_behind_the_end_are_hidden_until_the_sampler_revealed_them():
    """Code that cuts a completion at its EOS before it rebuilds the states shows what stands behind in all of them."""
    views = REPLAY(SAMPLED, randomness(4), settings())
    behind = views.noise[:, :, PROMPT + 3]
    assert behind[1].tolist() == [True, True, True, True]  # the last step's, of a completion of three tokens
    eos_alone = views.noise[2, :, PROMPT:]
    assert eos_alone[0].tolist() == [True, True, True, True]
    assert eos_alone[1].tolist() == [True, False, True, True]  # the last was never revealed, as after an EOS stop
    assert eos_alone[2].tolist() == [False, False, True, True]
    assert (views.weights[2] != 0).sum() == 1


# --- Draws -----------------------------------------------------------------------------------------------------------


def all_draws(rows, draws, chosen):
    """Every order and every u of the numbers that `rows` rows share out: (chance, numbers (rows, draws)).

    What a number draws changes only where it passes a sum of chances, so one u for each part between these is enough.
    """
    total = rows * draws
    segments = segments_of(SAMPLED.reveal_steps, SAMPLED.scored, chosen.segments, chosen.segment_steps)
    edges = chances(segments, SAMPLED.scored, SAMPLED.entropies, chosen.draw_steps).cumsum(-1).flatten() * total % 1
    cuts = torch.cat([torch.zeros(1), edges, torch.ones(1)]).double().sort().values.tolist()
    orders = list(permutations(range(total)))
    for low, high in pairwise(cuts):
        if high - low > 1e-9:
            for order in orders:
                numbers = strata(torch.tensor(order), torch.tensor((low + high) / 2, dtype=torch.float64))
                yield (high - low) / len(orders), numbers.view(rows, draws)


METHODS = {
    "agrpo, uniform": ({"num_views": 2}, "each step"),
    "agrpo, by entropy": ({"num_views": 2, "draw_steps": "entropy"}, "each step"),
    "d2": ({"num_views": 1, "segments": 3}, "three segments"),
    "merged steps, by entropy": ({"num_views": 2, "segment_steps": 2, "draw_steps": "entropy"}, "two steps"),
    "more segments than steps": ({"num_views": 2, "segments": 9}, "more than steps"),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_over_all_draws_is_the_trajectory(method):
    chosen, kind = settings(**METHODS[method][0]), METHODS[method][1]
    segments = segments_of(SAMPLED.reveal_steps, SAMPLED.scored, chosen.segments, chosen.segment_steps)
    chance = chances(segments, SAMPLED.scored, SAMPLED.entropies, chosen.draw_steps)
    # Two of the four rows share the numbers out, so that draws of one row depend on those of another.
    odds, numbers = zip(*all_draws(2, chosen.num_views, chosen), strict=True)
    rows = []
    for row in range(4):
        own = torch.stack([of[row % 2] for of in numbers])
        picked, weights = drawn(chance[[row]].expand(len(own), -1), own)
        some = some_rows(SAMPLED, [row] * len(own))
        views = replay_views(PROMPT, segments[[row]].expand(len(own), -1), picked, weights, some.scored)
        rows.append(merged(torch.tensor(odds, dtype=torch.float64), views))
    for model in every_model():
        assert_same(model, scores(model, stacked(rows)).logps, trajectory(model, kind))


def test_chances_end_with_the_last_scored_token_and_are_uniform_or_the_entropies_share():
    """Row 0 reveals nothing at step 2; of row 1 the token of step 3, of row 2 all but that of step 1 are behind the
    end; row 3 takes no part."""
    segments = segments_of(SAMPLED.reveal_steps, SAMPLED.scored, None, None)
    uniform = chances(segments, SAMPLED.scored, SAMPLED.entropies, "uniform")
    expected = torch.tensor([[1, 1, 1, 1], [4 / 3, 4 / 3, 4 / 3, 0], [2, 2, 0, 0], [4, 0, 0, 0]]).double() / 4
    torch.testing.assert_close(uniform, expected, rtol=0, atol=1e-7)
    entropy = chances(segments, SAMPLED.scored, SAMPLED.entropies, "entropy")
    expected = torch.tensor([[0.15, 0.55, 0, 0.3], [4 / 15, 9 / 15, 2 / 15, 0], [0, 1, 0, 0], [1, 0, 0, 0]]).double()
    torch.testing.assert_close(entropy, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.sum(-1), torch.ones(4).double())
    assert ((entropy > 0) == (uniform > 0)).all()
    # Where more segments are asked for than there are steps, none is empty.
    for many in (4, 9):
        finer = segments_of(SAMPLED.reveal_steps, SAMPLED.scored, many, None)
        torch.testing.assert_close(chances(finer, SAMPLED.scored, SAMPLED.entropies, "uniform"), uniform)
    # Rounding below zero takes no chance away from others, and gives none below zero.
    below = chances(segments, SAMPLED.scored, torch.full_like(SAMPLED.entropies, -1e-4), "entropy")
    torch.testing.assert_close(below, uniform)


@pytest.mark.parametrize("draw_steps", ["uniform", "entropy"])
def test_draws_have_these_chances_and_several_of_one_segment_weigh_together(draw_steps):
    chosen = settings(num_views=3, draw_steps=draw_steps)
    segments = segments_of(SAMPLED.reveal_steps, SAMPLED.scored, None, None)
    chance = chances(segments, SAMPLED.scored, SAMPLED.entropies, draw_steps)
    random, taken = randomness(4), torch.zeros(4, CANVAS)
    for _ in range(400):
        views = REPLAY(SAMPLED, random, chosen)
        assert (views.weights.ne(0).sum(1) <= 1).all()  # no token is scored twice
        taken += views.weights.sum(1)
    times = taken * 3 * torch.where(SAMPLED.scored, chance.float().gather(1, segments.clamp(min=0)), 0)
    for row, length in enumerate(LENGTHS):
        for k in range(length):
            often, p = times[row, k].round(), float(chance[row, segments[row, k]])
            if 0.01 < p < 0.99:
                assert_frequencies(torch.stack([often, 1200 - often]), torch.tensor([p, 1 - p]))
            else:
                assert abs(often - 1200 * p) < 12


def test_numbers_at_the_edges_draw_segments_that_have_a_chance():
    chance = torch.tensor([[0.25, 0.5, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    numbers = torch.tensor([[0.0, 0.25, 0.75, 1.0], [0.0, 0.5, 0.999, 1.0]])
    chosen, weights = drawn(chance, numbers)
    assert chosen.tolist() == [[0, 1, 2, 2], [0, 0, 0, 0]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.5, 2.0, 0.0], [1.0, 0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("chosen", [{}, {"num_views": 4}, {"num_views": 4, "draw_steps": "entropy"}, {"segments": 3}])
@pytest.mark.parametrize("steps", [[0, 1, 2, 3], [3, 2, 1, 0], [0, -1, -1, -1]])
def test_a_completion_that_is_only_an_eos_is_one_token(chosen, steps):
    sampled = replace(some_rows(SAMPLED, [2]), reveal_steps=torch.tensor([steps]))
    views = REPLAY(sampled, randomness(1), settings(**chosen))
    # Numbers of a row alone lie one in each quarter, so that each of four steps is drawn once.
    expected = torch.tensor([1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(views.weights[0].sum(0), expected, rtol=0, atol=1e-4)
