"""The settings of a rollout check themselves, and their tables accept a user's own rows."""

import argparse
import dataclasses
import math
from collections import Counter

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.distribution import OWN, Distribution
from d1.sampling import SamplingSettings, rollout, rollout_stream
from d1.sampling.caches import CACHES, Cache
from d1.sampling.passes import Passes
from d1.sampling.reveal import REMASKING, RULES, Order, Rule
from d1.sampling.settings import SAMPLERS
from tests.d1.sampling.reference import MASK, make_prompts

GOOD = {"gen_length": 12, "block_length": 4, "steps": 6}
TRUNCATED = {"top_k": 2, "top_p": 0.9, "record_as_sampled": True}
NUMBERS = [math.nan, math.inf, -math.inf, -1.0, "1", None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[({name: value}, f"{name} must be positive and whole, got") for name in GOOD for value in (0, -4, 2.0, "4")],
        *[({name: True}, f"{name} must be positive and whole, got True") for name in GOOD],
        *[({name: value}, f"{name} must be >= 0") for name in ("temperature", "cfg_scale") for value in NUMBERS],
        *[({"sampler": "parallel", "reveal_level": value}, "reveal_level must be >= 0") for value in NUMBERS[:-1]],
        ({"steps": 2}, "12 tokens in 3 blocks need between 3 and 12 steps, got 2"),
        ({"steps": 13}, "between 3 and 12 steps, got 13"),
        *[({"temperature": 1.0, "top_k": value}, "top_k must be whole and >= 0") for value in (-1, 2.0, "3", None)],
        *[({"temperature": 1.0, "top_p": value}, "top_p must be above 0") for value in (*NUMBERS, 0.0, 1.1)],
        *[({name: value}, "need a temperature above 0") for name, value in TRUNCATED.items()],
        ({"remasking": "margin"}, "remasking must be one of low_confidence, random, entropy, got 'margin'"),
        ({"sampler": "parallel", "remasking": "entropy"}, "needs remasking low_confidence, got entropy"),
        ({"sampler": "fast"}, r"sampler must be one of exact, cached, parallel, cached\+parallel, got 'fast'"),
        ({"sampler": "cached", "kv_cache": "suffix"}, "kv_cache must be one of prefix, dual, delayed"),
        ({"sampler": "parallel", "reveal": "margin"}, "reveal must be one of threshold, factor, entropy"),
        ({"sampler": "parallel", "remasking": "random"}, "needs remasking low_confidence"),
        ({"kv_cache": "dual"}, "kv_cache='dual' would be ignored by the sampler exact"),
        ({"sampler": "parallel", "kv_cache": "dual"}, "would be ignored by the sampler parallel"),
        ({"reveal": "factor"}, "would be ignored by the sampler exact"),
        ({"sampler": "cached", "reveal_level": 0.5}, "would be ignored by the sampler cached"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**GOOD | changes)


def in_use(**changes):
    chosen = SamplingSettings(**GOOD | changes)
    return chosen.cache, chosen.rule, chosen.level


def test_what_is_not_said_is_the_tables_default():
    assert in_use() == (None, None, 0.0)
    assert in_use(sampler="cached") == ("dual", None, 0.0)
    assert in_use(sampler="cached", kv_cache="prefix") == ("prefix", None, 0.0)
    assert in_use(sampler="parallel", reveal="factor") == (None, "factor", RULES["factor"].level)
    assert in_use(sampler="parallel", reveal_level=0) == (None, "threshold", 0)
    assert in_use(sampler="cached+parallel") == ("dual", "threshold", RULES["threshold"].level)
    assert (SAMPLERS, tuple(CACHES)) == (
        ("exact", "cached", "parallel", "cached+parallel"),
        ("prefix", "dual", "delayed", "lasting"),
    )


def test_settings_know_whether_they_draw():
    assert not SamplingSettings(**GOOD).draws
    assert SamplingSettings(**GOOD, temperature=0.1).draws
    assert SamplingSettings(**GOOD, remasking="random").draws


def test_settings_know_what_they_draw_from_and_what_they_record():
    """At temperature 0 nothing is drawn, and the model's own log-probability is recorded."""
    greedy, warm = SamplingSettings(**GOOD), SamplingSettings(**GOOD, temperature=0.5, top_k=2, top_p=0.9)
    assert (greedy.drawn_from, greedy.record_distribution) == (OWN, OWN)
    assert (warm.drawn_from, warm.record_distribution) == (Distribution(0.5, 2, 0.9), OWN)
    assert dataclasses.replace(warm, record_as_sampled=True).record_distribution == warm.drawn_from


def test_flags_with_other_names_give_the_settings():
    flags = {"diffusion_steps": 6, "temperature": 0.5, "cfg_scale": 1, "remasking": "low_confidence"}
    flags |= {"sampler": "cached+parallel", "kv_cache": None, "reveal": "factor", "reveal_level": 2.0, "seed": 3}
    args = argparse.Namespace(max_completion_length=12, block_length=4, **flags)
    found = SamplingSettings.of(args, steps="diffusion_steps", gen_length="max_completion_length")
    assert found == SamplingSettings(12, 4, 6, 0.5, 1, "low_confidence", "cached+parallel", None, "factor", 2.0)


@pytest.fixture(scope="module")
def model(kind_dirs):
    return load_model(kind_dirs["llada"])


def test_a_rule_added_from_outside_says_how_many_are_revealed(model, monkeypatch):
    def even(logps, entropies, level):
        """Two at a time; all tokens of a row if their entropies sum to less than the level."""
        return torch.where(entropies.sum(-1) < level, logps.shape[1], 2)

    monkeypatch.setitem(RULES, "even", Rule(even, 0.0))
    ids, mask = make_prompts([5, 2], 0)
    pairs = rollout(model, ids, mask, mask_token_id=MASK, sampler="parallel", reveal="even", **GOOD | {"steps": 12})
    assert pairs.reveal_steps.sort(1).values.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]] * 2
    options = {"sampler": "parallel", "reveal": "even", "reveal_level": 1000.0}
    blocks = rollout(model, ids, mask, mask_token_id=MASK, **options, **GOOD)
    assert blocks.reveal_steps.tolist() == [[0] * 4 + [1] * 4 + [2] * 4] * 2


def test_an_order_added_from_outside_says_which_are_revealed(model, monkeypatch):
    def from_the_right(logps, entropies, uniform):
        return torch.arange(logps.shape[1]).expand_as(logps).float()

    monkeypatch.setitem(REMASKING, "from_the_right", Order(from_the_right))
    ids, mask = make_prompts([5, 2], 0)
    options = {"mask_token_id": MASK, "remasking": "from_the_right", "generator": keyed_generator(0)}
    got = rollout(model, ids, mask, eos_token_ids=[MASK], **options, **GOOD)  # draws nothing: one generator will do
    assert got.reveal_steps.tolist() == [[1, 1, 0, 0, 3, 3, 2, 2, 5, 5, 4, 4]] * 2


def test_an_order_that_draws_needs_a_generator_a_row_beside_the_eos_stop(model, monkeypatch):
    monkeypatch.setitem(REMASKING, "coin", Order(lambda logps, entropies, uniform: uniform().round(), draws=True))
    ids, mask = make_prompts([5, 2], 0)
    options = {"mask_token_id": MASK, "remasking": "coin", "eos_token_ids": [MASK]}
    with pytest.raises(ValueError, match="one per row"):
        rollout(model, ids, mask, generator=keyed_generator(0), **options, **GOOD)
    generators = [keyed_generator(0, row) for row in range(2)]
    assert (rollout(model, ids, mask, generator=generators, **options, **GOOD).reveal_steps >= 0).all()


def test_an_order_by_confidence_added_from_outside_goes_with_a_rule(monkeypatch):
    monkeypatch.setitem(REMASKING, "mine", Order(lambda logps, entropies, uniform: logps, by_confidence=True))
    assert SamplingSettings(**GOOD, remasking="mine", sampler="parallel").rule == "threshold"
    monkeypatch.setitem(REMASKING, "other", Order(lambda logps, entropies, uniform: -entropies))
    with pytest.raises(ValueError, match="needs remasking low_confidence or mine"):
        SamplingSettings(**GOOD, remasking="other", sampler="parallel")


def test_a_cache_added_from_outside_serves_the_fixed_batch_and_the_stream(model, monkeypatch):
    counts = Counter()

    class OwnPasses(Passes):
        """Counts blocks and passes, and computes all tokens, like the exact sampler."""

        def enter(self, places, kept):
            counts["blocks"] += 1

        def states(self, *tensors):
            counts["passes"] += 1
            return super().states(*tensors)

    monkeypatch.setitem(CACHES, "mine", Cache(OwnPasses))
    ids, mask = make_prompts([5, 2], 0)
    exact = rollout(model, ids, mask, mask_token_id=MASK, **GOOD)
    own = SamplingSettings(**GOOD, sampler="cached", kv_cache="mine")
    got = rollout(model, ids, mask, own, mask_token_id=MASK)
    assert all(torch.equal(getattr(got, name), value) for name, value in vars(exact).items() if name != "writes")
    assert counts == {"blocks": 3, "passes": 6}
    prompts = [(row[real.bool()].tolist(), None) for row, real in zip(ids, mask, strict=True)]
    for _, part in rollout_stream(model, prompts, own, batch_size=2, mask_token_id=MASK):
        assert torch.equal(part.ids[:, 5:], got.ids[:, 5:])
        assert torch.equal(part.reveal_steps, got.reveal_steps)
    assert counts == {"blocks": 6, "passes": 12}
