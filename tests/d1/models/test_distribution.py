"""Distributions made from a model's logits, compared with a slow softmax over the remaining tokens."""

import math

import pytest
import torch

import d1.models.head
from d1.models.distribution import OWN, Distribution
from d1.models.head import target_logps, token_logps
from tests.d1.models.test_target_logps import make
from tests.d1.sampling.reference import left_of

SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_k": 500},
    {"top_p": 0.7},
    {"top_p": 1e-9},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95},
]
each = pytest.mark.parametrize("chosen", SETTINGS, ids=str)


def logits(positions=12, vocab=20):
    return 2 * torch.randn(positions, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@each
def test_log_probs_are_the_slow_softmaxs_and_their_gradients_its_own(chosen):
    """Log-probabilities of every token: a token that was removed is added back, alone, to the remaining ones."""
    distribution, given = Distribution(**chosen), logits()
    temperature = chosen.get("temperature", 1.0)
    outside = 0
    for token in range(20):
        free = given.clone().requires_grad_()
        ids = torch.full((len(free),), token)
        found = token_logps(distribution.logits(free, ids), ids)
        assert found.isfinite().all()
        (found * torch.arange(1, len(free) + 1)).sum().backward()
        for row, values in enumerate(given.tolist()):
            left = {*left_of(values, **chosen)}
            outside += token not in left
            powers = {k: math.exp(values[k] / temperature) for k in left | {token}}
            total = math.fsum(powers.values())
            assert found[row].item() == pytest.approx(math.log(powers[token] / total), abs=1e-12)
            slope = [(row + 1) * ((k == token) - powers.get(k, 0) / total) / temperature for k in range(20)]
            torch.testing.assert_close(free.grad[row], torch.tensor(slope, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool(outside) == (distribution.truncates and chosen.get("top_k") != 500)


@each
def test_what_is_left_is_what_the_slow_softmax_leaves_with_its_logits_as_they_were(chosen):
    given = logits()
    kept = Distribution(**chosen).truncated(given.view(3, 4, 20)).view(12, 20)
    for row, values in enumerate(given.tolist()):
        left = left_of(values, **chosen)
        assert kept[row].isfinite().nonzero().flatten().tolist() == sorted(left)
        assert torch.equal(kept[row][list(left)], given[row][list(left)])
    assert torch.equal(given, logits())  # not overwritten


@each
@pytest.mark.parametrize("positions", [5, 1000])
def test_chunks_of_the_head_score_in_the_distribution_and_entropies_stay_the_models_own(chosen, positions, monkeypatch):
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", positions * 50)
    model, distribution = make("llama"), Distribution(**chosen)
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(12, 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 50, (12,), generator=generator)
    found, entropies = target_logps(model, states, targets, with_entropies=True, distribution=distribution)
    whole = model.lm_head(states)
    expected = token_logps(distribution.logits(whole, targets), targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropies, torch.distributions.Categorical(logits=whole).entropy())
    slopes = (torch.autograd.grad(values.sum(), [model.lm_head.weight])[0] for values in (found, expected))
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-10)
    none = target_logps(model, states[:0], targets[:0], distribution=distribution)[0]
    assert none.shape == (0,)


def test_the_default_is_the_models_own_and_copies_nothing():
    given = logits()
    assert OWN.logits(given, torch.zeros(12, dtype=torch.long)) is given
    assert Distribution(1.0, 0, 1.0) == OWN
