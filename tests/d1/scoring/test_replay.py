"""Replay and its variants: states rebuilt by hand, all draws of segments, and the rollout's own record with every
sampler, with edits, and under every sampling distribution."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise, permutations
from math import exp

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from d1.masking import keyed_generator
from d1.models import prepare
from d1.models.distribution import MODEL_DISTRIBUTION
from d1.models.kinds import block_size
from d1.rl.tables import ESTIMATORS
from d1.sampling import SamplingSettings, eos_cut, rollout
from d1.scoring import Randomness, SampledRows, Views
from d1.scoring.inputs import canvas_blocks, strata
from d1.scoring.replay import draw_segments, segment_probabilities
from tests.d1.scoring.enumeration import (
    CANVAS,
    EOS,
    LENGTHS,
    PROMPT,
    SAMPLED,
    assert_frequencies,
    assert_same,
    every_model,
    marked,
    merged,
    randomness,
    scores,
    settings,
    some_rows,
    stacked,
    state_logps,
    tiny,
)
from tests.rounding import LOGITS, assert_near, rounding

REPLAY = ESTIMATORS["replay"]
LEFT_TO_RIGHT = ESTIMATORS["left_to_right"]


# --- States rebuilt by hand ------------------------------------------------------------------------------------------

# Estimator, settings, and the first and the last step of each segment, of four steps 0..3.
MERGED = {
    "each step": ("replay", {}, [(0, 0), (1, 1), (2, 2), (3, 3)]),
    "two steps": ("replay", {"segment_steps": 2}, [(0, 1), (2, 3)]),
    "three steps": ("replay", {"segment_steps": 3}, [(0, 2), (3, 3)]),
    "all steps": ("replay", {"segment_steps": 8}, [(0, 3)]),
    "two segments": ("segments", {"segments": 2}, [(0, 1), (2, 3)]),
    "three segments": ("segments", {"segments": 3}, [(0, 1), (2, 2), (3, 3)]),
    "as many as steps": ("segments", {"segments": 4}, [(0, 0), (1, 1), (2, 2), (3, 3)]),
    "more than steps": ("segments", {"segments": 9}, [(0, 0), (1, 1), (2, 2), (3, 3)]),
}


def step_sums(model, parts):
    """For each part (its first step, its last): (rows, canvas) log p of the tokens revealed in it, in the state at its
    beginning, state by state. Tokens after the completion's end are shown from their own step on, as the sampler saw
    them."""
    found = []
    for first, last in parts:
        rows = []
        for row, length in enumerate(LENGTHS):
            steps = SAMPLED.reveal_steps[row].tolist()
            hidden = [k for k in range(CANVAS) if steps[k] >= first or steps[k] < 0]
            own = [k for k in hidden if k < length and first <= steps[k] <= last]
            rows.append(marked(own) * state_logps(model, row, hidden))
        found.append(torch.stack(rows))
    return torch.stack(found)


@pytest.mark.parametrize("kind", MERGED)
def test_the_sum_over_segments_is_the_trajectory(kind):
    estimator, chosen, parts = MERGED[kind]
    views = ESTIMATORS[estimator](SAMPLED, randomness(4), settings(**chosen))
    assert views.noise.shape[1] <= ESTIMATORS[estimator].views(settings(**chosen))
    assert torch.equal(views.weights.sum(1), SAMPLED.scored.float())
    for model in every_model():
        assert_same(model, scores(model, views).logps, step_sums(model, parts).sum(0))


@pytest.mark.parametrize(("steps", "segments"), [(64, 16), (64, 10), (7, 3), (5, 5), (5, 8), (6, 1)])
def test_segments_cut_all_steps_of_the_canvas_evenly_and_hide_prompt_tokens_at_random(steps, segments):
    """However many segments a completion has: its later segments score nothing."""
    order = torch.stack([torch.randperm(steps, generator=keyed_generator(row)) for row in range(4)])
    scored = torch.ones(4, steps, dtype=torch.bool)
    scored[1, 2:], scored[3] = False, False
    long = {"reveal_steps": order, "scored": scored, "canvas_ids": torch.ones_like(order)}
    chosen = settings(steps=steps, segments=segments, p_mask_prompt=0.15, gen_length=steps)
    wide = torch.ones(4, 500, dtype=torch.long)
    sampled = replace(SAMPLED, prompt_ids=wide, attention_mask=wide, maskable=wide.bool(), **long)
    views = ESTIMATORS["segments"](sampled, randomness(4), chosen)
    count = min(steps, segments)
    assert views.weights.shape[1] == ESTIMATORS["segments"].views(chosen) == count
    assert torch.equal(views.weights.sum(1), scored.float())  # each token once, with weight 1
    sizes = views.weights[0].sum(-1)
    assert sizes.sum() == steps
    assert sizes.max() - sizes.min() <= 1
    firsts = [order[0][of > 0].min().item() for of in views.weights[0]]
    assert firsts == sorted(firsts)
    for row in range(4):
        for view, first in enumerate(firsts):
            assert torch.equal(views.noise[row, view, 500:], order[row] >= first)
    noise = views.noise[:, 0, :500]
    assert torch.equal(views.noise[..., :500], noise.unsqueeze(1).expand(-1, count, -1))  # the same in all segments
    assert abs(noise.float().mean() - 0.15) < 4 * (0.15 * 0.85 / noise.numel()) ** 0.5
    assert count == 1 or not torch.equal(noise[:, 0], noise[:, 1])  # each view has its own


# --- Draws -----------------------------------------------------------------------------------------------------------


def all_numbers(rows, chosen, chance):
    """Every order and every u of the numbers that are divided among `rows` rows: (probability, numbers (rows, draws)).

    The result of a number changes only where it passes a sum of probabilities, so one u for each part between these is
    enough.
    """
    total = rows * chosen.num_views
    edges = chance.cumsum(-1).flatten() * total % 1
    cuts = torch.cat([torch.zeros(1), edges, torch.ones(1)]).double().sort().values.tolist()
    orders = list(permutations(range(total)))
    for low, high in pairwise(cuts):
        if high - low > 1e-9:
            for order in orders:
                numbers = strata(torch.tensor(order), torch.tensor((low + high) / 2, dtype=torch.float64))
                yield (high - low) / len(orders), numbers.view(rows, chosen.num_views)


def mean_over_draws(monkeypatch, chosen):
    """The mean over all numbers of the views of four rows. The numbers are divided among two rows, so the draws of one
    row depend on those of another."""
    segments = SAMPLED.reveal_steps // (chosen.segment_steps or 1)
    chance = segment_probabilities(segments, SAMPLED.scored, SAMPLED.entropies, chosen.draw_steps)
    odds, numbers = zip(*all_numbers(2, chosen, chance), strict=True)
    rows = []
    for row in range(4):
        own = torch.stack([of[row % 2] for of in numbers])
        with monkeypatch.context() as given:
            given.setattr(Randomness, "evenly_spread", lambda random, draws, own=own: own)
            views = REPLAY(some_rows(SAMPLED, [row] * len(own)), randomness(len(own)), chosen)
        rows.append(merged(torch.tensor(odds, dtype=torch.float64), views))
    return stacked(rows)


STEPS = torch.tensor([4, 3, 2, 1]).unsqueeze(1)  # of each row, up to the last scored token's


@pytest.mark.parametrize(
    ("chosen", "kind"),
    [
        ({"num_views": 2}, "each step"),
        ({"num_views": 2, "draw_steps": "entropy"}, "each step"),
        ({"num_views": 2, "segment_steps": 2, "draw_steps": "entropy"}, "two steps"),
    ],
    ids=str,
)
def test_the_mean_over_all_draws_is_the_trajectory_or_with_mean_step_its_mean_over_steps(monkeypatch, chosen, kind):
    """AGRPO takes the mean over steps; the sum over the trajectory is T times that."""
    parts = MERGED[kind][2]
    of_sum, of_mean = (mean_over_draws(monkeypatch, settings(mean_step=mean, **chosen)) for mean in (False, True))
    segments = STEPS if kind == "each step" else (STEPS + 1) // 2
    for model in every_model():
        each = step_sums(model, parts)
        assert_same(model, scores(model, of_sum).logps, each.sum(0))
        steps = [each[: segments[row], row].mean(0) for row in range(4)]
        assert_same(model, scores(model, of_mean).logps, torch.stack(steps))
    whole, mean = (REPLAY(SAMPLED, randomness(4, seed=3), settings(mean_step=mean, **chosen)) for mean in (False, True))
    assert torch.equal(whole.noise, mean.noise)
    torch.testing.assert_close(mean.weights * segments.unsqueeze(-1), whole.weights, rtol=1e-6, atol=0)


def test_top_takes_the_eight_steps_of_the_highest_mean_entropy_each_with_weight_one():
    """The steps with the highest mean over their tokens, not sum; among equal ones the first. Nothing is random."""
    generator, count, canvas = keyed_generator(0), 5, 40
    steps = torch.randint(0, 20, (count, canvas), generator=generator)
    entropies = torch.rand(count, canvas, generator=generator)
    entropies[1] = 0.5  # all alike
    scored = torch.arange(canvas) < torch.tensor([40, 40, 25, 6, 0]).unsqueeze(1)
    wide = torch.ones(count, 3, dtype=torch.long)
    filled = {"logps": entropies, "canvas_ids": torch.ones_like(steps)}
    sampled = SampledRows(wide, wide, wide.bool(), scored=scored, reveal_steps=steps, entropies=entropies, **filled)
    chosen = settings(num_views=8, draw_steps="top", steps=20)
    views = REPLAY(sampled, randomness(count), chosen)
    again = REPLAY(sampled, randomness(count, seed=1), chosen)
    assert torch.equal(views.noise, again.noise)
    for row in range(count):
        means = {}
        for step in range(20):
            own = [float(entropies[row, k]) for k in range(canvas) if scored[row, k] and steps[row, k] == step]
            if own:
                means[step] = sum(own) / len(own)
        best = sorted(means, key=lambda step: (-round(means[step], 5), step))[:8]
        assert len(best) == min(8, len(means))
        expected = sum((scored[row] & (steps[row] == step) for step in best), torch.zeros(canvas))
        assert torch.equal(views.weights[row].sum(0), expected)
        for step, noise, weights in zip(best, views.noise[row], views.weights[row], strict=False):
            assert torch.equal(noise[3:], steps[row] >= step)
            assert torch.equal(weights, (scored[row] & (steps[row] == step)).float())


def states_drawn(surprisals, count):
    """{set of steps: chance} of `count` draws without replacement, one after the other, each in proportion to
    exp(surprisal) of the remaining steps."""
    odds = Counter()
    for order in permutations(surprisals, min(count, len(surprisals))):
        chance, left = 1.0, {step: exp(value) for step, value in surprisals.items()}
        for step in order:
            chance *= left[step] / sum(left.values())
            del left[step]
        odds[frozenset(order)] += chance
    return odds


LOGPS = -torch.tensor([[0.3, 1.0, 0.1, 2.0], [2.0, 0.1, 0.6, 9.0], [0.5, 9.0, 9.0, 9.0], [1.0, 1.0, 1.0, 1.0]])
# The mean surprisal of the tokens that each step revealed, for the three rows that take part; row 0 has none at step 2.
SURPRISALS = [{0: 0.3, 1: 0.1, 3: 1.5}, {0: 0.6, 1: 0.1, 2: 2.0}, {1: 0.5}]


def hidden_in(row, step):
    """(canvas,) what the state of one of a row's `SURPRISALS` hides: the completion's tokens of this step and later
    ones. Tokens after the end are hidden only in the row's first step."""
    after_end = torch.full((CANVAS,), step == min(SURPRISALS[row]))
    return torch.where(SAMPLED.scored[row], SAMPLED.reveal_steps[row] >= step, after_end)


def steps_of(views, number, row):
    """The step of each view of row `number` of a batch, which is row `row` of `SAMPLED`."""
    steps = []
    for hidden, weights in zip(views.noise[number, :, PROMPT:], views.weights[number], strict=True):
        assert torch.equal(weights, (hidden & SAMPLED.scored[row]).float())
        steps += [step for step in SURPRISALS[row] if torch.equal(hidden, hidden_in(row, step))]
    assert len(steps) == views.noise.shape[1]
    return steps


@pytest.mark.parametrize("count", [1, 2, 4])
def test_states_are_drawn_by_surprisal_and_those_that_a_row_lacks_with_replacement(count):
    times = 1500
    for row, surprisals in enumerate(SURPRISALS):
        sampled = some_rows(replace(SAMPLED, logps=LOGPS), [row] * times)
        generators = [keyed_generator(7, n) for n in range(times)]
        random = Randomness(generators, keyed_generator(0), 0, times)
        views = ESTIMATORS["states"](sampled, random, settings(num_views=count))
        found, again, new = Counter(), Counter(), min(count, len(surprisals))
        for number in range(times):
            steps = steps_of(views, number, row)
            assert len({*steps[:new]}) == new
            found[frozenset(steps[:new])] += 1
            again.update(steps[new:])
        odds = states_drawn(surprisals, count)
        assert set(found) == set(odds)
        assert_frequencies(torch.tensor([found[key] for key in odds]), torch.tensor([odds[key] for key in odds]))
        if again:
            chance = torch.tensor([*surprisals.values()], dtype=torch.float64).softmax(0)
            assert_frequencies(torch.tensor([again[step] for step in surprisals]), chance)


def test_a_state_scores_the_tokens_of_all_later_steps_and_shows_all_that_follow_the_end():
    views = ESTIMATORS["states"](replace(SAMPLED, logps=LOGPS), randomness(4), settings(num_views=4))
    assert not views.noise[..., :PROMPT].any()
    assert not views.weights[3].any()
    for model in every_model():
        expected = torch.zeros(4, CANVAS).double()
        for row in range(3):
            for step in steps_of(views, row, row):
                hidden = hidden_in(row, step)
                own = hidden & SAMPLED.scored[row]
                expected[row] += own * state_logps(model, row, hidden.nonzero().flatten().tolist())
        assert_same(model, scores(model, views).logps, expected)


def test_chances_end_with_the_last_scored_token_and_are_uniform_or_the_entropies_share():
    """Row 0 reveals nothing at step 2. In row 1 the token of step 3 is after the end, in row 2 all except that of step
    1. Row 3 takes no part."""
    segments = SAMPLED.reveal_steps
    uniform = segment_probabilities(segments, SAMPLED.scored, SAMPLED.entropies, "uniform")
    expected = torch.tensor([[1, 1, 1, 1], [4 / 3, 4 / 3, 4 / 3, 0], [2, 2, 0, 0], [4, 0, 0, 0]]).double() / 4
    torch.testing.assert_close(uniform, expected, rtol=0, atol=1e-7)
    entropy = segment_probabilities(segments, SAMPLED.scored, SAMPLED.entropies, "entropy")
    expected = torch.tensor([[0.15, 0.55, 0, 0.3], [4 / 15, 9 / 15, 2 / 15, 0], [0, 1, 0, 0], [1, 0, 0, 0]]).double()
    assert_near(entropy, expected)
    torch.testing.assert_close(entropy.sum(-1), torch.ones(4).double())
    assert ((entropy > 0) == (uniform > 0)).all()
    # Rounding below zero does not reduce the probability of others, and gives no negative probability.
    below = segment_probabilities(segments, SAMPLED.scored, torch.full_like(SAMPLED.entropies, -1e-4), "entropy")
    torch.testing.assert_close(below, uniform)


@pytest.mark.parametrize("draw_steps", ["uniform", "entropy"])
def test_draws_have_these_chances_and_several_of_one_segment_weigh_together(draw_steps):
    chosen = settings(num_views=3, draw_steps=draw_steps)
    segments = SAMPLED.reveal_steps
    chance = segment_probabilities(segments, SAMPLED.scored, SAMPLED.entropies, draw_steps)
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
    chosen, weights = draw_segments(chance, numbers)
    assert chosen.tolist() == [[0, 1, 2, 2], [0, 0, 0, 0]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.5, 2.0, 0.0], [1.0, 0.0, 0.0, 0.0]]))


# --- The chain rule ---------------------------------------------------------------------------------------------------


def chain_rule(model):
    rows = []
    for row, length in enumerate(LENGTHS):
        each = [state_logps(model, row, range(k, CANVAS))[k] for k in range(length)]
        rows.append(torch.stack([*each, *[torch.zeros((), dtype=torch.float64)] * (CANVAS - length)]))
    return torch.stack(rows)


def test_the_sum_of_left_to_right_log_probs_is_the_chain_rule():
    views = LEFT_TO_RIGHT(SAMPLED, randomness(4), settings())
    assert views.noise.shape[1] == LEFT_TO_RIGHT.views(settings())
    for model in every_model():
        assert_same(model, scores(model, views).logps, chain_rule(model))
    # In a block-causal model, a view scores a token of every block.
    sampled = replace(SAMPLED, blocks=canvas_blocks(SAMPLED.attention_mask, CANVAS, 2))
    views, model = LEFT_TO_RIGHT(sampled, randomness(4), settings()), tiny(2, block=2)
    assert views.noise.shape[1] == 2
    assert_same(model, scores(model, views).logps, chain_rule(model))


def test_probabilities_of_all_completions_sum_to_one():
    texts = torch.cartesian_prod(*[torch.arange(5)] * 3)
    texts = torch.cat([texts, torch.zeros_like(texts[:, :1])], dim=1)  # four tokens: all end
    completions = texts.masked_fill(~eos_cut(texts, [EOS]), EOS).unique(dim=0)
    scored = eos_cut(completions, [EOS])
    scored[:, 3] = False  # three tokens may be scored, so that a completion without an EOS among them counts
    count = len(completions)
    sampled = replace(some_rows(SAMPLED, [1] * count), canvas_ids=completions, scored=scored)
    with torch.no_grad():
        logps = scores(tiny(2), LEFT_TO_RIGHT(sampled, randomness(count), settings()), sampled).logps
    torch.testing.assert_close(logps.sum(-1).exp().sum(), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-10)


# --- The rollout's own record -----------------------------------------------------------------------------------------

VOCAB, MASK, LENGTH = 12, 4, 11
PROMPTS = torch.tensor([[0, 0, 1, 2, 3], [3, 2, 1, 2, 3], [0, 1, 5, 6, 7], [5, 1, 5, 1, 5], [0, 0, 0, 0, 9]])
ENDS = [6, 7]  # of twelve ids: most rows end somewhere within
SAMPLERS = [
    *({"sampler": "exact", "remasking": name} for name in ("low_confidence", "random")),
    {"sampler": "parallel", "reveal": "threshold", "reveal_level": 0.4},
    {"sampler": "parallel", "reveal": "factor", "reveal_level": 1.5},
    {"sampler": "parallel", "reveal": "entropy", "reveal_level": 0.8},
]
EDITORS = [
    {"reveal_level": 0.4, "edit_threshold": 0.5},
    {"reveal_level": 0.3, "edit_threshold": 0.3, "max_post_steps": 4},
    {"reveal_level": 0.4, "edit_threshold": 0.0, "max_post_steps": 2, "temperature": 0.9},
]
EDITORS = [{"sampler": "parallel", "steps": LENGTH, **editor} for editor in EDITORS]


@pytest.fixture(scope="module", params=[None, 4], ids=["full", "blocks"])
def model(request):
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return prepare(
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.6, block_size=request.param, **shape))
    ).eval()


def sample(model, eos_stop=False, **options):
    """A rollout of 11 tokens in blocks of 4, 4 and 3, in 7 steps, and the part of it that estimators may use."""
    visible = (PROMPTS != 0).long()
    chosen = SamplingSettings(**{"gen_length": LENGTH, "block_length": 4, "steps": 7, **options})
    own = {"generator": [keyed_generator(2, row) for row in range(5)], "eos_token_ids": ENDS if eos_stop else None}
    taken = rollout(model, PROMPTS, visible, chosen, mask_token_id=MASK, **own)
    ids = taken.ids[:, PROMPTS.shape[1] :]
    blocks = canvas_blocks(visible, LENGTH, block_size(model.config))
    record = (taken.reveal_steps, taken.logps, taken.entropies, blocks)
    writes = () if taken.writes is None else (taken.writes.ids, taken.writes.steps, taken.writes.entropies)
    return SampledRows(PROMPTS, visible, visible.bool(), ids, eos_cut(ids, ENDS), *record, *writes), taken


def replayed(model, sampled, views, distribution=MODEL_DISTRIBUTION):
    """`score`; this model's mask token is the tiny one's, too."""
    with torch.no_grad():
        return scores(model, views, sampled, views_at_once=4, distribution=distribution)


@pytest.mark.parametrize("eos_stop", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_replayed_log_probs_are_those_the_sampler_recorded(model, sampler, temperature, eos_stop):
    sampled, _ = sample(model, eos_stop, temperature=temperature, **sampler)
    lengths = sampled.scored.sum(-1)
    assert lengths.min() < LENGTH  # some end early
    expected = sampled.logps * sampled.scored
    views = REPLAY(sampled, randomness(5), settings())
    assert torch.equal((views.weights != 0).sum(1), sampled.scored.long())  # each token once
    most = 4 if block_size(model.config) else LENGTH  # a view shows a step of every block
    assert views.noise.shape[1] <= most
    assert_near(replayed(model, sampled, views).logps, expected, least=LOGITS)
    for draw_steps in ("uniform", "entropy"):  # wherever a drawn view scores a token
        views = REPLAY(sampled, randomness(5), settings(num_views=3, draw_steps=draw_steps))
        found, seen = replayed(model, sampled, views).view_logps, views.weights != 0
        assert seen.any()
        assert_near(found[seen], expected.unsqueeze(1).expand_as(found)[seen], least=LOGITS)


@pytest.mark.parametrize("model", [None], indirect=True)
@pytest.mark.parametrize(
    ("estimator", "chosen"),
    [
        ("replay", {}),
        ("replay", {"segment_steps": 2}),
        ("replay", {"num_views": 2, "mean_step": True}),
        ("replay", {"num_views": 2, "draw_steps": "top"}),
        ("segments", {"segments": 3, "steps": 7}),
        ("states", {"num_views": 2, "steps": 7}),
    ],
)
def test_the_eos_stop_changes_no_view(model, estimator, chosen):
    """Steps after a completion's end are left out; no view shows or draws from them."""
    for sampler in SAMPLERS:
        whole, stopped = (sample(model, stop, temperature=0.9, **sampler)[0] for stop in (False, True))
        assert (stopped.reveal_steps < 0).any()
        assert torch.equal(whole.scored, stopped.scored)
        views, fewer = (ESTIMATORS[estimator](some, randomness(5), settings(**chosen)) for some in (whole, stopped))
        scoring = fewer.weights.any(-1)
        assert torch.equal(views.noise[scoring], fewer.noise[scoring])
        assert torch.equal(views.weights, fewer.weights)


@pytest.mark.parametrize("segments", [1, 3, 7])
def test_segments_score_each_token_once_whatever_steps_its_block_took(model, segments):
    """In a block-causal model each block has its own segments; its share of the steps is not a whole number here."""
    chosen = settings(gen_length=LENGTH, steps=7, block_length=4, segments=segments)
    for sampler in SAMPLERS:
        sampled, _ = sample(model, eos_stop=True, temperature=0.9, **sampler)
        weights = ESTIMATORS["segments"](sampled, randomness(5), chosen).weights
        assert weights.shape[1] <= ESTIMATORS["segments"].views(chosen)
        assert torch.equal(weights.sum(1), sampled.scored.float())


TRUNCATED = [
    {"temperature": 0.6},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 1},
]


@pytest.mark.parametrize("remasking", ["random", "entropy"])
@pytest.mark.parametrize("chosen", TRUNCATED, ids=str)
def test_what_was_recorded_as_sampled_is_replayed_under_the_same_distribution(model, chosen, remasking):
    """So ratios start at 1. For the model's own distribution the record is different, for the same tokens. In fp64,
    because in fp32 the cache of a block-causal model changes logits slightly, and a temperature below 1 amplifies
    that."""
    model = deepcopy(model).double()
    options = {"remasking": remasking, **chosen}
    recorded = SamplingSettings(LENGTH, 4, 7, record_as_sampled=True, **options).record_distribution
    sampled, _ = sample(model, record_as_sampled=True, **options)
    views = REPLAY(sampled, randomness(5), settings())
    found = replayed(model, sampled, views, recorded)
    assert_near(found.logps, sampled.logps.double() * sampled.scored, least=LOGITS)
    own, _ = sample(model, **options)
    assert torch.equal(own.canvas_ids, sampled.canvas_ids)
    found = replayed(model, own, views)
    assert_near(found.logps, own.logps.double() * own.scored, least=LOGITS)
    assert (own.logps - sampled.logps).abs().max() > 0.1


@pytest.mark.parametrize("model", [None], indirect=True)
def test_a_sampler_with_blocks_of_one_token_recorded_the_log_probs_of_the_chain_rule(model):
    sampled, _ = sample(model, block_length=1, steps=LENGTH, temperature=1.0)
    found = replayed(model, sampled, LEFT_TO_RIGHT(sampled, randomness(5), settings(gen_length=LENGTH))).logps
    assert_near(found, sampled.logps * sampled.scored, least=LOGITS)


# --- Rollouts with edits: every written token in the state that the sampler wrote it in -------------------------------

NO_WRITES = {"write_ids": None, "write_steps": None, "write_entropies": None}


@pytest.mark.parametrize("eos_stop", [False, True])
@pytest.mark.parametrize("editor", EDITORS, ids=str)
def test_the_log_prob_of_a_trajectory_is_the_sum_over_written_tokens(model, editor, eos_stop):
    """The sampler recorded it, so that ratios start at 1; last writes alone would show final tokens for drafts."""
    sampled, taken = sample(model, eos_stop, **editor)
    assert (taken.edits > 0).any()
    expected = taken.writes.logps.sum(-1) * sampled.scored
    views = REPLAY(sampled, randomness(5), settings())
    found = replayed(model, sampled, views)
    assert_near(found.logps, expected, least=LOGITS)
    times = (taken.writes.steps >= 0).sum(-1) * sampled.scored
    assert torch.equal((views.weights != 0).sum(1), times)  # each written token once
    # With last writes alone, views show final tokens where drafts were, and earlier edits are lost.
    last_only = replace(sampled, **NO_WRITES)
    blind = replayed(model, sampled, REPLAY(last_only, randomness(5), settings()))
    assert (blind.logps - taken.logps * sampled.scored).abs().max() > 0.01


@pytest.mark.parametrize("draw_steps", ["uniform", "entropy", "top"])
def test_drawn_steps_score_what_these_wrote(model, draw_steps):
    sampled, taken = sample(model, **EDITORS[1])
    views = REPLAY(sampled, randomness(5), settings(num_views=3, draw_steps=draw_steps))
    found, seen = replayed(model, sampled, views).view_logps, views.weights != 0
    assert seen.any()
    for row, view, k in seen.nonzero().tolist():
        same = taken.writes.ids[row, k] == views.targets[row, view, k]
        close = (taken.writes.logps[row, k] - found[row, view, k]).abs() < rounding(LOGITS)
        assert (same & close & (taken.writes.steps[row, k] >= 0)).any()


def slow_states(sampled, taken, row, segment_steps):
    """(hidden, shown, targets) of each segment of a row of full attention: dictionaries by position."""
    writes = [
        (int(step), k, int(token))
        for k in range(LENGTH)
        for step, token in zip(taken.writes.steps[row, k], taken.writes.ids[row, k], strict=True)
        if step >= 0
    ]
    last = max(step // segment_steps for step, k, _ in writes if sampled.scored[row, k])
    for segment in range(last + 1):
        shown = {position: token for step, position, token in sorted(writes) if step < segment * segment_steps}
        own = {position: token for step, position, token in sorted(writes) if step // segment_steps == segment}
        yield shown, {k: token for k, token in own.items() if sampled.scored[row, k]}


@pytest.mark.parametrize("model", [None], indirect=True)
@pytest.mark.parametrize("segment_steps", [1, 2, 3])
def test_views_show_drafts_and_score_what_a_segment_ends_with(model, segment_steps):
    sampled, taken = sample(model, **EDITORS[1])
    views = REPLAY(sampled, randomness(5), settings(segment_steps=segment_steps))
    for row in range(len(PROMPTS)):
        view = -1
        for view, (shown, own) in enumerate(slow_states(sampled, taken, row, segment_steps)):
            canvas = views.noise[row, view, PROMPTS.shape[1] :]
            assert {position for position in range(LENGTH) if not canvas[position]} == {*shown}
            assert {k: views.shown[row, view, k].item() for k in shown} == shown
            scored = views.weights[row, view].nonzero().flatten().tolist()
            assert {k: views.targets[row, view, k].item() for k in scored} == own
        assert not views.weights[row, view + 1 :].any()


def test_estimators_of_final_tokens_are_unchanged_and_states_refuses_edits(model):
    sampled, _ = sample(model, **EDITORS[0])
    plain = replace(sampled, **NO_WRITES)
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
    plain = replace(sampled, **NO_WRITES)
    views = REPLAY(plain, randomness(5), settings())
    ids = sampled.canvas_ids.unsqueeze(1).expand_as(views.weights)
    said = Views(views.noise, views.weights, ids, ids)
    assert torch.equal(replayed(model, sampled, views).logps, replayed(model, sampled, said).logps)
    for name, wrong in (("shown", ids[..., 1:]), ("targets", ids[:, :1]), ("shown", ids.int())):
        with pytest.raises(ValueError, match=rf"views.{name} must be \(5, {ids.shape[1]}, 11\) of torch.int64, got"):
            replayed(model, sampled, replace(views, **{name: wrong}))
