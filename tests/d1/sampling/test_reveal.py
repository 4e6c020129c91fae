"""How many tokens a step reveals, and which: schedules, rules and orders, the user's own too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d1.masking import keyed_generator
from d1.sampling import rollout
from d1.sampling.reveal import REMASKING, RULES, Order, Rule, block_schedule, reveal_schedule, split_evenly
from tests.d1.sampling.reference import MASK, count_by_rule, make_prompts

GOOD = {"gen_length": 12, "block_length": 4, "steps": 6}


@given(tokens=st.integers(1, 200), block=st.integers(1, 64), data=st.data())
@settings(max_examples=300, deadline=None)
def test_schedule_drops_neither_tokens_nor_steps(tokens, block, data):
    blocks = -(-tokens // block)
    steps = data.draw(st.integers(blocks, tokens))
    schedule = reveal_schedule(tokens, block, steps)
    assert len(schedule) == blocks
    assert sum(map(sum, schedule)) == tokens
    assert sum(map(len, schedule)) == steps
    assert max(map(sum, schedule)) <= block
    for reveals in schedule:
        assert reveals == sorted(reveals, reverse=True)  # the remainder first
        assert 1 <= reveals[-1] >= reveals[0] - 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 60))
def test_each_further_step_goes_to_the_slowest_block(sizes, steps):
    taken = [1] * len(sizes)
    for _ in range(steps - len(sizes)):
        speeds = [size / count for size, count in zip(sizes, taken, strict=True)]
        taken[speeds.index(max(speeds))] += 1
    assert block_schedule(sizes, steps) == [split_evenly(*block) for block in zip(sizes, taken, strict=True)]


@given(
    tokens=st.lists(st.tuples(st.integers(1, 97), st.integers(0, 89)), min_size=1, max_size=8), step=st.integers(0, 40)
)
@settings(max_examples=200, deadline=None)
def test_rules_count_as_their_papers_say(tokens, step):
    probabilities = sorted((share / 97 for share, _ in tokens), reverse=True)
    entropies = [nats / 30 for _, nats in tokens]
    level = step / 10 + math.pi / 1000  # no sum of these fractions equals it, so rounding has no effect
    for reveal, rule in RULES.items():
        logps, nats = torch.tensor([probabilities]).double().log(), torch.tensor([entropies]).double()
        assert rule.count(logps, nats, level).item() == count_by_rule(reveal, level, probabilities, entropies)


def test_the_order_leftmost_goes_from_left_to_right_in_every_row():
    logps = -torch.rand(3, 5, generator=keyed_generator(0))
    ranks = REMASKING["leftmost"].scores(logps, -logps, torch.rand).argsort(-1, descending=True)
    assert ranks.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_a_threshold_is_met_by_what_exceeds_it():
    certain = torch.zeros(1, 3)
    assert RULES["threshold"].count(certain, certain, 1.0).item() == 0
    assert RULES["threshold"].count(certain - 1e-3, certain, 0.0).item() == 3


def test_the_risk_budget_reveals_less_than_the_threshold_it_starts_from():
    """SLIM-RL's rule at level .9: the risks .005, .03, .04 and .05 of the first four sum to .125, more than .1."""
    logps = torch.tensor([[0.995, 0.97, 0.96, 0.95, 0.93, 0.8]]).log()
    counts = [RULES[rule].count(logps, logps, 0.9).item() for rule in ("risk_budget", "threshold")]
    assert counts == [3, 5]


# --- Rules and orders from outside ------------------------------------------------------------------------------------


@pytest.fixture
def sample(load):
    ids, mask = make_prompts([5, 2], 0)
    return lambda **options: rollout(load("llada"), ids, mask, mask_token_id=MASK, **GOOD | options)


def test_a_rule_added_from_outside_says_how_many_are_revealed(sample, monkeypatch):
    def even(logps, entropies, level):
        """Two at a time; all tokens of a row if their entropies sum to less than the level."""
        return torch.where(entropies.sum(-1) < level, logps.shape[1], 2)

    monkeypatch.setitem(RULES, "even", Rule(even, 0.0))
    pairs = sample(sampler="parallel", reveal="even", steps=12)
    assert pairs.reveal_steps.sort(1).values.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]] * 2
    blocks = sample(sampler="parallel", reveal="even", reveal_level=1000.0)
    assert blocks.reveal_steps.tolist() == [[0] * 4 + [1] * 4 + [2] * 4] * 2


def test_an_order_added_from_outside_says_which_are_revealed(sample, monkeypatch):
    def from_the_right(logps, entropies, uniform):
        return torch.arange(logps.shape[1]).expand_as(logps).float()

    monkeypatch.setitem(REMASKING, "from_the_right", Order(from_the_right))
    # It draws nothing: one generator is enough, also with the EOS stop.
    got = sample(remasking="from_the_right", eos_token_ids=[MASK], generator=keyed_generator(0))
    assert got.reveal_steps.tolist() == [[1, 1, 0, 0, 3, 3, 2, 2, 5, 5, 4, 4]] * 2
    monkeypatch.setitem(REMASKING, "coin", Order(lambda logps, entropies, uniform: uniform().round(), draws=True))
    options = {"remasking": "coin", "eos_token_ids": [MASK]}
    with pytest.raises(ValueError, match="one per row"):
        sample(generator=keyed_generator(0), **options)
    assert (sample(generator=[keyed_generator(0, row) for row in range(2)], **options).reveal_steps >= 0).all()
