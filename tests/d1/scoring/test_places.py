"""The probability of whole trajectories, places included: all of a small sampler, and what rollouts recorded."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from d1.masking import keyed_generator
from d1.models.kinds import block_size
from d1.rl.batch import SCORED, Sampled
from d1.sampling import SamplingSettings, eos_cut
from d1.sampling.loop import keep
from d1.scoring import ESTIMATORS, SampledRows
from d1.scoring.rollouts import blocks_of
from tests.d1.scoring.enumeration import EOS, MASK, canvas_logits, randomness, scores, settings, some_rows, tiny
from tests.d1.scoring.test_replay import EDITORS, LENGTH, SAMPLERS, sample
from tests.d1.scoring.test_replay import model as model
from tests.rounding import LOGITS, assert_near

PLACES = ESTIMATORS["places"]

# --- Every trajectory of a canvas of three tokens, in blocks of two and one or in one block --------------------------

CANVAS, TOKENS = 3, range(MASK)
EXACT = {
    "one per step": {},
    "two per step": {"steps": 2},
    "threshold": {"sampler": "parallel", "reveal_level": 0.5},
    "entropy": {"sampler": "parallel", "reveal": "entropy", "reveal_level": 0.7},
    "random": {"remasking": "random"},
}


def trajectories(small, prompt, sampling):
    """Every trajectory of a completion of `prompt` (length,): (probability, ids, steps), by `keep` on all draws. The
    probabilities are differentiable products of q."""
    state = (torch.full((CANVAS,), MASK), torch.full((CANVAS,), -1), 0, 0, 0, torch.ones((), dtype=torch.float64))
    todo, done = [state], []
    while todo:
        ids, steps, number, block, of_block, p = todo.pop()
        counts = sampling.schedule()
        start = sum(map(sum, counts[:block]))
        own = [k for k in range(start, start + sum(counts[block])) if ids[k] == MASK]
        logits = logits_of(small, tuple(prompt.tolist()), tuple(ids.tolist()))[own]
        q = (logits[:, :MASK] / sampling.temperature).softmax(-1)
        logps = logits.detach().log_softmax(-1)
        draws = torch.tensor(list(product(TOKENS, repeat=len(own))))
        entropies = -(logps.exp() * logps).sum(-1).expand(len(draws), -1)
        due = torch.full((len(draws),), max(1, len(own) - sum(counts[block][of_block + 1 :])))
        chances = q.gather(-1, draws.T).prod(0)
        hidden = torch.ones_like(draws).bool()
        if sampling.remasking == "random":
            sets = [kept for kept in product((False, True), repeat=len(own)) if sum(kept) == due[0]]
            kept = torch.tensor(sets).repeat_interleave(len(draws), 0)
            draws, chances = draws.repeat(len(sets), 1), chances.repeat(len(sets)) / len(sets)
        else:
            given = logps.gather(-1, draws.T).T, entropies, hidden, due, [len(own)] * len(draws), None
            kept, _ = keep(sampling, *given)
        found = {}
        for row, draw, chance in zip(kept.tolist(), draws, chances, strict=True):
            key = tuple(k for k, one in zip(own, row, strict=True) if one), tuple(draw[torch.tensor(row)].tolist())
            found[key] = found.get(key, 0.0) + chance
        for (places, tokens), chance in found.items():
            new, when = ids.clone(), steps.clone()
            new[list(places)], when[list(places)] = torch.tensor(tokens), number
            full = len(places) == len(own)
            after = (new, when, number + 1, block + full, 0 if full else of_block + 1, p * chance)
            (done if full and block + 1 == len(counts) else todo).append(after)
    return [(p, ids, steps) for ids, steps, *_, p in done]


@cache
def logits_of(small, prompt, ids):
    text = torch.tensor([*prompt, *ids])
    return canvas_logits(small, text, torch.zeros_like(text).bool(), CANVAS)


@pytest.mark.parametrize("block", [None, 2], ids=["full", "blocks"])
@pytest.mark.parametrize("chosen", EXACT)
def test_all_trajectories_have_their_probability_and_the_mean_reward_its_gradient(chosen, block):
    """The reward reads the text up to its first EOS. Steps after the one that completed it are left out of the score,
    and tokens after the EOS count if their step did: the gradient is that of the enumerated mean reward."""
    small, prompt = tiny(1, block=block), torch.tensor([1, 2])
    logits_of.cache_clear()
    lengths = {"gen_length": CANVAS, "block_length": 2 if block else CANVAS, "steps": CANVAS}
    sampling = SamplingSettings(**lengths | {"temperature": 0.8} | EXACT[chosen])
    found = trajectories(small, prompt, sampling)
    p, ids, steps = (torch.stack(of) for of in zip(*found, strict=True))
    assert p.sum().item() == pytest.approx(1.0, abs=1e-12)
    rows, ended = len(ids), eos_cut(ids, [EOS])
    given = {"is_end": ids == EOS, "is_padding": ids == EOS, "settled": steps}
    scored = SCORED["completed"].of(Sampled(ids, ended, steps, **given))
    prompts, nothing = prompt.expand(rows, -1), torch.zeros(rows, CANVAS)
    visible = torch.ones_like(prompts)
    sampled = SampledRows(prompts, visible, visible.bool(), ids, torch.ones_like(scored), steps, nothing, nothing)
    sampled = replace(sampled, blocks=blocks_of(visible, CANVAS, block))
    how = settings(gen_length=CANVAS, sampling=sampling)

    def log_p(rows):
        got = scores(small, PLACES(rows, randomness(len(ids)), how), rows, sampling=sampling)
        return got.logps.sum(-1) + got.place_logps.sum(-1)

    torch.testing.assert_close(log_p(sampled).detach().exp(), p.detach(), rtol=1e-9, atol=1e-14)
    cut = replace(sampled, scored=scored)
    assert (scored != ended).any()
    assert (scored != sampled.scored).any()
    texts = ids.masked_fill(~ended, EOS)
    rewards = torch.stack(
        [torch.randn((), generator=keyed_generator(*text), dtype=torch.float64) for text in texts.tolist()]
    )
    weights = list(small.parameters())
    exact = torch.autograd.grad((p * rewards).sum(), weights, retain_graph=True)
    score = log_p(cut)
    estimated = torch.autograd.grad((p.detach() * rewards * score).sum(), weights, retain_graph=True)
    for one, other in zip(estimated, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)  # the model's norms compute in fp32
    means = torch.autograd.grad((p.detach() * score).sum(), weights)
    assert max(float(of.abs().max()) for of in means) < 5e-6


# --- What rollouts record ---------------------------------------------------------------------------------------------

NOISY = [
    {"remasking": "gumbel", "order_temperature": 0.5},
    {"remasking": "gumbel", "sampler": "parallel", "reveal_level": 0.4, "order_temperature": 0.3},
]
DRAWN = [{"temperature": 0.9}, {"temperature": 1.0}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9}]


def places_of(model, sampled, sampling, change=lambda views: views):
    """Scores of all steps of a rollout, in views that `change` changes; and the views."""
    how = settings(gen_length=LENGTH, sampling=sampling, steps=sampling.most_passes())
    views = change(PLACES(sampled, randomness(len(sampled.scored)), how))
    return scores(model, views, sampled, views_at_once=4, sampling=sampling), views


def completed(sampled, settled=None):
    """The rows with the tokens scored that `SCORED["completed"]` counts."""
    steps = sampled.reveal_steps
    given = {"is_end": sampled.scored, "is_padding": sampled.scored, "settled": steps if settled is None else settled}
    return replace(sampled, scored=SCORED["completed"].of(Sampled(sampled.canvas_ids, sampled.scored, steps, **given)))


@pytest.mark.parametrize("eos_stop", [False, True])
@pytest.mark.parametrize("sampler", [*SAMPLERS, {"remasking": "entropy"}, *NOISY], ids=str)
def test_replayed_steps_have_the_probability_that_the_sampler_recorded(model, sampler, eos_stop):
    """So ratios start at 1, also in two streams, in which the sampler's cache and the views differ; whatever the batch,
    its padding and the EOS stop. No other forward pass than replay's is needed."""
    model = deepcopy(model).double()
    for drawn in DRAWN:
        options = {"record_exactly": True, "record_steps": True} | drawn | sampler
        sampled, taken = sample(model, eos_stop, **options)
        sampling = SamplingSettings(**{"gen_length": LENGTH, "block_length": 4, "steps": 7} | options)
        sampled = completed(replace(sampled, ranks=taken.ranks))
        got, views = places_of(model, sampled, sampling)
        assert got.place_logps.isfinite().all()
        assert_near(got.logps, taken.logps.double() * sampled.scored, least=LOGITS)
        own = torch.where(views.weights != 0, taken.step_logps.unsqueeze(1), 0.0).sum(-1)
        assert_near(got.view_logps.sum(-1) + got.place_logps, own.double(), least=LOGITS)
        # Which blocks have steps left: without rivals, a view's choice of places is certain.
        last = (views.rivals != 0).sum(-1) == (views.weights != 0).sum(-1)
        if not sampling.noise:
            assert got.place_logps[last].abs().max() < 1e-12
        replayed = ESTIMATORS["replay"](sampled, randomness(5), settings())
        assert torch.equal(replayed.noise, views.noise)
        assert torch.equal(replayed.weights, views.weights)
    assert (got.place_logps < -0.01).any() == (sampling.remasking != "entropy")


def test_probabilities_of_places_depend_on_no_other_row_and_on_no_padding(model):
    options = {"sampler": "parallel", "reveal_level": 0.4, "temperature": 0.9}
    sampled = completed(sample(model, **options)[0])
    sampling = SamplingSettings(LENGTH, 4, 7, **options)
    whole, _ = places_of(model, sampled, sampling)
    for row in range(5):
        alone, views = places_of(model, some_rows(sampled, [row]), sampling)
        count = views.weights.shape[1]
        assert_near(alone.place_logps[0], whole.place_logps[row, :count], least=LOGITS)
        assert not whole.place_logps[row, count:].any()
    wide = torch.zeros(5, 3, dtype=torch.long)
    padded = {name: torch.cat([wide, getattr(sampled, name)], dim=1) for name in ("prompt_ids", "attention_mask")}
    padded["maskable"] = torch.cat([wide.bool(), sampled.maskable], dim=1)
    found, _ = places_of(model, replace(sampled, **padded), sampling)
    assert_near(found.place_logps, whole.place_logps, least=LOGITS)


def test_blocks_of_a_view_add_up(model):
    """In two streams a view holds a step of every block; with the rivals of one block alone, it scores that step."""
    sampled = completed(sample(model, temperature=0.9)[0])
    sampling = SamplingSettings(LENGTH, 4, 7, temperature=0.9)
    whole, views = places_of(model, sampled, sampling)
    parts = torch.zeros_like(whole.place_logps)
    for number in views.rivals.unique().tolist():
        if number:
            own = views.rivals == number
            alone = replace(views, rivals=views.rivals * own, weights=views.weights * own)
            parts = parts + scores(model, alone, sampled, sampling=sampling).place_logps
    assert_near(parts, whole.place_logps, least=LOGITS)


@pytest.mark.parametrize("editor", [{**EDITORS[0], "temperature": 0.9}, EDITORS[2]], ids=str)
def test_with_edits_each_pass_of_a_block_counts_also_the_one_that_writes_nothing(model, editor):
    """As many views as passes, and in each of them all places of its block are decided on."""
    sampled, taken = sample(model, **editor)
    sampling = SamplingSettings(**{"gen_length": LENGTH, "block_length": 4, "steps": LENGTH} | editor)
    sampled = replace(sampled, scored=torch.ones_like(sampled.scored))
    got, views = places_of(model, sampled, sampling)
    assert got.place_logps.isfinite().all()
    silent = views.scoring & ~views.weights.any(-1)
    assert silent.any() or block_size(model.config)  # there, another block writes in most of these views
    if block_size(model.config):
        passes = torch.stack([row.unique().ne(0).sum() for view in views.rivals.unbind(1) for row in view.abs()])
        passes = passes.view(-1, 5).sum(0)
    else:
        passes = views.scoring.sum(1)
    assert torch.equal(passes, taken.passes)
    sizes = torch.stack([views.rivals[row].abs().eq(number).sum(-1) for row in range(5) for number in (1, 2, 3, 4)])
    assert {*sizes.flatten().tolist()} <= {0, 1, 2, 3, 4}
    for row, of in enumerate(views.rivals.abs()):
        for number in of.unique().tolist():  # in each of its passes, the same places
            own = of.eq(number)[of.eq(number).any(-1)]
            assert not number or (own == own[0]).all(), row
