"""The probability of a step against all draws that `keep` may be given, in fp64: 3 places, 3 tokens and the mask."""

import math
from itertools import accumulate, permutations, product

import pytest
import torch
from scipy.optimize import brentq

from d1.masking import keyed_generator
from d1.sampling import SamplingSettings
from d1.sampling.loop import keep
from d1.sampling.places import Steps, chunks, step_logps
from d1.sampling.reveal import REMASKING
from tests.d1.sampling.reference import left_of
from tests.d1.scoring.enumeration import assert_frequencies

PLACES, MASK, VOCAB = 3, 3, 4
DRAWS = torch.tensor(list(product(range(MASK), repeat=PLACES)))
ORDERS = {
    "confidence": {},
    "random": {"remasking": "random"},
    "entropy order": {"remasking": "entropy"},
    "threshold": {"sampler": "parallel", "reveal_level": 0.45},
    "factor": {"sampler": "parallel", "reveal": "factor", "reveal_level": 1.4},
    "entropy bound": {"sampler": "parallel", "reveal": "entropy", "reveal_level": 1.1},
}
NOISY = {
    "gumbel": {"remasking": "gumbel", "order_temperature": 0.5},
    "gumbel, threshold": {"remasking": "gumbel", "order_temperature": 0.3, "sampler": "parallel", "reveal_level": 0.45},
}
SAMPLING = [{"temperature": t} for t in (0.7, 1.0, 1.3)] + [{"temperature": 0.8, "top_k": 2, "top_p": 0.9}]


def settings_of(**chosen):
    return SamplingSettings(PLACES, PLACES, PLACES, **{"temperature": 1.0, **chosen})


def some_logits(seed, ties=False, truncated=False):
    """(places, vocab), with some mass on the mask token. With `ties`, two places are alike, and so are two tokens
    unless they are truncated."""
    logits = 1.5 * torch.randn(PLACES, VOCAB, generator=keyed_generator(seed), dtype=torch.float64)
    if ties:
        logits[:, 1] = logits[:, 1 if truncated else 0]
        logits[2] = logits[0]
    return logits


def probabilities(logits, settings):
    """(places, tokens) q: the draws' own distribution, by the slow reference."""
    rows = []
    for row in logits[:, :MASK]:
        left = left_of(row.tolist(), settings.temperature, settings.top_k, settings.top_p)
        kept = torch.tensor([token in left for token in range(MASK)])
        rows.append((row / settings.temperature).masked_fill(~kept, -math.inf).softmax(-1))
    return torch.stack(rows)


def kept_of(logits, ids, settings, due, hidden=None, generator=None):
    """`keep` for the drawn `ids` (draws, places): what is revealed, and ranks."""
    logps, count = logits.log_softmax(-1), len(ids)
    drawn = logps.gather(-1, ids.T).T
    if REMASKING[settings.remasking].noisy:
        drawn = logps[:, :MASK].amax(-1).expand(count, -1)
    entropies = -(logps.exp() * logps).sum(-1).expand(count, -1)
    hidden = torch.ones_like(ids).bool() if hidden is None else hidden.expand(count, -1)
    return keep(settings, drawn, entropies, hidden, torch.full((count,), due), [PLACES] * count, generator)


def outcomes(logits, settings, due, q=None):
    """{(revealed, their tokens): probability} by all draws, the probabilities differentiable in q."""
    q = probabilities(logits, settings) if q is None else q
    of_draws = q.gather(-1, DRAWS.T).prod(0)
    if settings.remasking == "random":
        sets = [s for s in product((False, True), repeat=PLACES) if sum(s) == min(due, PLACES)]
        cases = [(s, draw, p / len(sets)) for s in sets for draw, p in zip(DRAWS, of_draws, strict=True)]
    else:
        cases = zip(kept_of(logits.detach(), DRAWS, settings, due)[0].tolist(), DRAWS, of_draws, strict=True)
    found = {}
    for kept, draw, p in cases:
        key = tuple(kept), tuple(draw[torch.tensor(kept)].tolist())
        found[key] = found.get(key, 0.0) + p
    return found


def log_p(logits, settings, due, cases, ranks=None):
    """log P (cases,) of {revealed, tokens} by `step_logps`, all cases as steps of one call."""
    revealed = torch.tensor([kept for kept, *_ in cases])
    ids = torch.zeros_like(revealed, dtype=torch.long)
    ids[revealed] = torch.tensor([token for _, tokens, *_ in cases for token in tokens])
    ranks = torch.ones_like(ids) if ranks is None else torch.tensor(ranks)
    flat = torch.ones(ids.numel()).bool(), revealed.flatten(), ids.flatten(), ranks.flatten()
    steps = Steps([PLACES] * len(cases), *flat, more=revealed.sum(1) > due)
    tokens, places = step_logps(logits.repeat(len(cases), 1), steps, settings, settings.drawn(MASK))
    return tokens.view(-1, PLACES).sum(-1) + places


@pytest.mark.parametrize("due", [1, 2, 3])
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_steps_have_the_probability_of_all_their_draws_and_the_gradient_of_the_mean_reward(order, sampling, due):
    settings = settings_of(**ORDERS[order], **sampling)
    for seed, ties in product(range(6), (False, True)):
        logits = some_logits(seed, ties, "top_k" in sampling).requires_grad_()
        expected = outcomes(logits, settings, due)
        expected = {key: p for key, p in expected.items() if p > 0}
        found = log_p(logits, settings, due, expected)
        wanted = torch.stack([*expected.values()])
        torch.testing.assert_close(found.exp(), wanted, rtol=1e-12, atol=1e-14)
        assert found.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
        # E[score] = 0, and the gradient of the mean reward is that of the enumerated one.
        (score,) = torch.autograd.grad((found.exp().detach() * found).sum(), logits, retain_graph=True)
        torch.testing.assert_close(score, torch.zeros_like(score), rtol=0, atol=1e-12)
        rewards = torch.randn(len(wanted), generator=keyed_generator(seed, 1), dtype=torch.float64)
        (estimated,) = torch.autograd.grad((rewards * found.exp().detach() * found).sum(), logits)
        (exact,) = torch.autograd.grad((rewards * wanted).sum(), logits)
        torch.testing.assert_close(estimated, exact, rtol=1e-10, atol=1e-12)
        # Sets that no draw gives are impossible.
        drawable = [row.nonzero().flatten().tolist() for row in probabilities(logits.detach(), settings)]
        sets = [kept for kept in product((False, True), repeat=PLACES) if sum(kept) >= due]
        chosen = [[tokens for tokens, one in zip(drawable, kept, strict=True) if one] for kept in sets]
        others = {(kept, tokens) for kept, of in zip(sets, chosen, strict=True) for tokens in product(*of)} - {
            *expected
        }
        assert not others or log_p(logits.detach(), settings, due, others).isneginf().all()


@pytest.mark.parametrize("due", [1, 2, 3])
@pytest.mark.parametrize("order", NOISY)
def test_an_order_with_noise_has_the_probability_of_its_clocks(order, due):
    """All ranks that a step can give sum to 1, the score has mean 0, and `keep` draws them as often as that."""
    settings, times = settings_of(**NOISY[order]), 40_000
    logits = some_logits(3).requires_grad_()
    ids = DRAWS[:1].expand(times, -1)
    own = keyed_generator(due)
    kept, ranks = kept_of(logits.detach(), ids, settings, due, generator=own)
    found = torch.where(kept, ranks, -1)
    # Every way to rank: with a rule, some places ring (0), and the next ones are ranked as long as fewer than due are.
    every = []
    for order in permutations(range(PLACES)):
        for rung in range(PLACES + 1) if settings.rule else (0,):
            row = [-1] * PLACES
            for rank, place in enumerate(order):
                row[place] = 0 if rank < rung else rank - rung + 1 if rank < due else -1
            every.append(tuple(row))
    every = sorted({*every})
    cases = [(tuple(rank >= 0 for rank in row), tuple(0 for rank in row if rank >= 0)) for row in every]
    p = log_p(logits, settings, due, cases, [[max(rank, 0) for rank in row] for row in every])
    q = probabilities(logits, settings)[:, 0].log()
    p = p - (torch.tensor([kept for kept, _ in cases]) * q).sum(-1)  # without the tokens
    assert p.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    (score,) = torch.autograd.grad((p.exp().detach() * p).sum(), logits)
    torch.testing.assert_close(score, torch.zeros_like(score), rtol=0, atol=1e-12)
    counts = torch.stack([(found == torch.tensor(row)).all(-1).sum() for row in every])
    assert counts.sum() == times
    likely = p.exp().detach() * times > 5
    counts = torch.cat([counts[likely], counts[~likely].sum().unsqueeze(0)])
    p = torch.cat([p.exp().detach()[likely], p.exp().detach()[~likely].sum().unsqueeze(0)])
    some = p * times > 4.5
    assert_frequencies(counts[some], p[some] / p[some].sum())


def mean_reward(logits, settings, due):
    """J: the mean of a fixed reward of the outcome, over all draws (and, with noise, the ranks)."""
    rewards = torch.randn(8 * 27, generator=keyed_generator(5), dtype=torch.float64)

    def reward(kept, tokens):
        number = sum(one << place for place, one in enumerate(kept))
        return rewards[number * 27 + sum(token * 3**place for place, token in enumerate(tokens))]

    if not settings.noise:
        return sum(p * reward(*key) for key, p in outcomes(logits, settings, due).items())
    cases = [
        ([place == first for place in range(PLACES)], (token,)) for first in range(PLACES) for token in range(MASK)
    ]
    return (log_p(logits, settings, due, cases).exp() * torch.stack([reward(*case) for case in cases])).sum()


def test_gradients_hold_between_the_jumps_and_only_noise_has_no_jumps():
    """Where the confidences of two places cross, the membership of their tokens changes at once, and so does the mean
    reward. No likelihood of the draws contains that; with noise on the order there is nothing to miss."""
    logits = torch.tensor([[1.0, 0.1, -0.5, -1.0], [1.0, 0.3, -0.8, -1.2], [0.2, -0.4, 0.9, -2.0]], dtype=torch.float64)
    crossing = torch.zeros_like(logits)
    crossing[0, 0] = 1.0  # the direction: token 0 of place 0 becomes surer, and passes that of place 1 on the way

    def gap(at):
        logps = (logits + at * crossing).log_softmax(-1)
        return float(logps[0, 0] - logps[1, 0])

    at = brentq(gap, -2, 2, xtol=1e-14)
    for chosen, jumps in (({}, True), (NOISY["gumbel"], False)):
        settings = settings_of(**chosen)

        def value(at, settings=settings):
            return mean_reward(logits + at * crossing, settings, due=1)

        inside = (logits + (at + 0.05) * crossing).requires_grad_()
        (slope,) = torch.autograd.grad(mean_reward(inside, settings, due=1), inside)
        step = 1e-5
        difference = (value(at + 0.05 + step) - value(at + 0.05 - step)) / (2 * step)
        assert float((slope * crossing).sum()) == pytest.approx(float(difference), abs=1e-8)
        jump = abs(float(value(at + 1e-7) - value(at - 1e-7)))
        assert jump > 0.01 if jumps else jump < 1e-6


def test_edits_have_the_probability_of_all_draws_of_hidden_and_visible_places():
    """One place of three is visible; at a level below one half, several tokens may replace it."""
    for seed, level in product(range(4), (0.0, 0.2, 0.5)):
        settings = settings_of(sampler="parallel", reveal_level=0.5, edit_threshold=level)
        logits, current = some_logits(seed).requires_grad_(), 1
        hidden = torch.tensor([True, False, True])
        q, logps = probabilities(logits, settings), logits.detach().log_softmax(-1)
        kept, _ = kept_of(logits.detach(), DRAWS, settings, 1, hidden)
        drawn = logps.gather(-1, DRAWS.T).T
        kept = kept | (~hidden & (current != DRAWS) & (drawn.exp() > level))
        expected = {}
        for row, draw, p in zip(kept, DRAWS, q.gather(-1, DRAWS.T).prod(0), strict=True):
            key = tuple(row.tolist()), tuple(draw[row].tolist())
            expected[key] = expected.get(key, 0.0) + p
        count = len(expected)
        written = torch.tensor([kept for kept, _ in expected])
        ids = torch.full(written.shape, current)
        ids[written] = torch.tensor([token for _, tokens in expected for token in tokens])
        flat = hidden.repeat(count), written.flatten(), ids.flatten(), ids.flatten()
        steps = Steps([PLACES] * count, *flat, more=(written & hidden).sum(1) > 1)
        tokens, places = step_logps(logits.repeat(count, 1), steps, settings, settings.drawn(MASK))
        found = (tokens.view(count, -1).sum(-1) + places).exp()
        torch.testing.assert_close(found, torch.stack([*expected.values()]), rtol=1e-12, atol=1e-14)
        assert found.sum().item() == pytest.approx(1.0, abs=1e-12)
        given = torch.autograd.grad(found.log().sum(), logits, retain_graph=True)
        torch.testing.assert_close(given, torch.autograd.grad(torch.stack([*expected.values()]).log().sum(), [logits]))


@pytest.mark.parametrize("counts", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("order", [*ORDERS, *NOISY])
def test_steps_without_places_are_certain(order, counts):
    """A rollout whose prompts are all dropped scores nothing, and its loss still needs a path to the logits."""
    settings, none = settings_of(**ORDERS[order] if order in ORDERS else NOISY[order]), torch.zeros(0).bool()
    logits = torch.zeros(0, VOCAB, dtype=torch.float64, requires_grad=True)
    steps = Steps(counts, none, none, none.long(), none.long(), torch.zeros(len(counts)).bool())
    tokens, places = step_logps(logits, steps, settings, settings.drawn(MASK))
    assert (tokens.tolist(), places.tolist()) == ([], [0.0] * len(counts))
    (tokens.sum() + places.sum()).backward()
    assert logits.grad.shape == (0, VOCAB)


def test_nothing_of_a_step_depends_on_the_others_of_its_chunk(monkeypatch):
    """Steps of different sizes, cut into chunks that hold whole steps."""
    counts = [3, 1, 2, 3, 3, 2]
    logits = torch.cat([some_logits(seed)[:count] for seed, count in enumerate(counts)])
    generator, total = keyed_generator(1), sum(counts)
    for chosen in (*ORDERS.values(), *NOISY.values()):
        settings = settings_of(**chosen)
        written = torch.cat([torch.arange(count) < 1 + (count > 2) for count in counts])
        ids = torch.randint(MASK, (total,), generator=generator)
        steps = Steps(counts, torch.ones(total).bool(), written, ids, written.long() * 0 + 1, torch.zeros(6).bool())
        together = step_logps(logits, steps, settings, settings.drawn(MASK))
        monkeypatch.setattr("d1.models.head.CHUNK_ELEMENTS", 15)
        parts = [*chunks(steps, VOCAB, settings)]
        assert len(parts) > 2
        ends = [0, *accumulate(counts)]
        apart = [
            step_logps(logits[ends[a] : ends[b]], steps.some(a, b), settings, settings.drawn(MASK)) for a, b in parts
        ]
        for whole, of in zip(together, map(torch.cat, zip(*apart, strict=True)), strict=True):
            assert torch.equal(whole, of)


@pytest.mark.parametrize(
    ("kept", "tokens", "expected"),
    [
        ([True, True, False], [0, 0], 0.95 * 0.92),
        ([True, False, False], [0], 0.95 * 0.08),  # place 1 drew one of the tokens below the threshold
        ([False, False, True], [0], 0.6 * 0.05 * 0.08),  # the fallback: the best of three below it
    ],
)
def test_a_threshold_of_0_9_gives_the_products_that_can_be_read_off(kept, tokens, expected):
    """The example of confidence_transition.py, sajadn/diffusion_RL@12ad9f6, at temperature 1 and one token per step."""
    p = torch.tensor([[0.95, 0.03, 0.02], [0.92, 0.05, 0.03], [0.60, 0.30, 0.10]], dtype=torch.float64)
    logits = torch.cat([p.log(), torch.full((3, 1), -math.inf, dtype=torch.float64)], dim=1)
    settings = settings_of(sampler="parallel", reveal_level=0.9)
    assert log_p(logits, settings, 1, [(kept, tokens)]).exp().item() == pytest.approx(expected, abs=1e-12)
