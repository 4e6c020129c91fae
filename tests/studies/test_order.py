"""The study of a learned order: its start is the rule, and its probabilities and gradients are those of enumeration."""

from __future__ import annotations

import copy
from itertools import permutations, product

import numpy as np
import pytest
import torch

from d1.models import load_model, load_tokenizer
from d1.models.head import body_and_head
from d1.sampling import SamplingSettings, rollout
from d1.sampling.places import Steps, step_logps
from d1.tasks import load_task
from pocket.recipes import ROOT
from studies.order.learned import RULES, Head, Places, Step, Training, fill, losses, order_logps, train
from studies.samplers.measure import prompts_of
from tests.d1.scoring.enumeration import MASK, tiny

LENGTH = 32


@pytest.fixture(scope="module")
def pocket():
    """The pocket model, its mask token and some prompts."""
    model, tokenizer = load_model(str(ROOT / "pocket" / "base")).eval(), load_tokenizer(str(ROOT / "pocket" / "base"))
    rows = load_task("sudoku").load_rows("validation").select(range(24))
    return model, tokenizer.mask_token_id, prompts_of(rows, tokenizer, "cpu")


def moved(head: Head, seed: int = 0, scale: float = 1.0) -> Head:
    """A head with other weights than before training."""
    other = copy.deepcopy(head)
    torch.manual_seed(seed)
    torch.nn.init.normal_(other.last.weight, std=scale)
    return other


@pytest.mark.parametrize("steps", [4, 8, 16])
def test_the_start_is_the_confidence_rule_to_the_bit(pocket, steps):
    model, mask, prompts = pocket
    options = {"mask_token_id": mask, "gen_length": LENGTH, "block_length": LENGTH, "steps": steps}
    wanted = rollout(model, prompts, torch.ones_like(prompts), **options)
    head = Head(model.config.hidden_size, 0)
    ids, taken = fill(model, head, prompts, LENGTH, steps, mask)
    assert torch.equal(ids, wanted.ids[:, prompts.shape[1] :])
    for number, step in enumerate(taken):
        assert torch.equal(head(step.places), step.places.logps)
        places = step.positions.gather(1, step.order).sort(1).values - prompts.shape[1]
        assert torch.equal(places, (wanted.reveal_steps == number).nonzero()[:, 1].view_as(places))
    others, _ = fill(model, moved(head), prompts, LENGTH, steps, mask)
    assert not torch.equal(others, ids)


def test_the_rule_entropy_is_that_of_the_library(pocket):
    model, mask, prompts = pocket
    options = {"mask_token_id": mask, "gen_length": LENGTH, "block_length": LENGTH, "steps": 8}
    wanted = rollout(model, prompts, torch.ones_like(prompts), remasking="entropy", **options)
    ids, _ = fill(model, RULES["entropy"], prompts, LENGTH, 8, mask)
    assert torch.equal(ids, wanted.ids[:, prompts.shape[1] :])


def chain(scores: list[float], order: tuple[int, ...], noise: float) -> float:
    """The probability of a draw without replacement, one place after the other."""
    left, p = dict(enumerate(np.exp(np.array(scores) / noise))), 1.0
    for place in order:
        p *= left[place] / sum(left.values())
        del left[place]
    return p


@pytest.mark.parametrize("due", [1, 2, 3])
def test_the_probability_of_an_order_is_that_of_draws_one_after_the_other(due):
    """All orders sum to 1, and noise draws them as often as that."""
    scores, noise = torch.tensor([0.3, -0.4, 0.1, -1.2], dtype=torch.float64), 0.7
    orders = [*permutations(range(4), due)]
    found = order_logps(scores.expand(len(orders), -1), torch.tensor(orders), noise).exp()
    wanted = [chain(scores.tolist(), order, noise) for order in orders]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    assert found.sum().item() == pytest.approx(1.0, abs=1e-12)


def test_noise_draws_orders_as_often_as_their_probability(pocket):
    """The first step of many rows with the same prompt, from a head with other weights."""
    model, mask, prompts = pocket
    head, rows, length = moved(Head(model.config.hidden_size, 1)), 6000, 4
    generator = torch.Generator().manual_seed(3)
    many = prompts[:1].expand(rows, -1)
    (step, _) = fill(model, head, many, length, 2, mask, noise=0.5, generator=generator)[1]
    with torch.no_grad():
        scores = head(step.places)[0]
    orders = [*permutations(range(length), 2)]
    p = torch.tensor([chain(scores.tolist(), order, 0.5) for order in orders])
    counts = torch.stack([(step.order == torch.tensor(order)).all(1).sum() for order in orders])
    assert counts.sum() == rows
    assert ((counts - rows * p).abs() < 4.5 * (rows * p * (1 - p)).sqrt() + 1e-9).all()


def test_at_the_start_it_is_the_probability_of_the_order_gumbel():
    """d1/sampling/places.py, which tests/d1/sampling compares with all draws."""
    torch.manual_seed(0)
    logits, noise, mask = torch.randn(5, 6, dtype=torch.float64), 0.4, 5
    settings = SamplingSettings(5, 5, 3, temperature=1.0, remasking="gumbel", order_temperature=noise)
    order = [3, 0]
    written, ranks = torch.zeros(5).bool(), torch.zeros(5).long()
    written[order], ranks[order] = True, torch.tensor([1, 2])
    steps = Steps([5], torch.ones(5).bool(), written, torch.zeros(5).long(), ranks, torch.tensor([False]))
    wanted = step_logps(logits, steps, settings, settings.drawn(mask))[1]
    logps = logits.log_softmax(-1)
    best, states = logps[:, :mask].amax(-1)[None], torch.randn(1, 5, 7, dtype=torch.float64)
    places = Places(best, -(logps.exp() * logps).sum(-1)[None], torch.ones_like(best), states, best)
    found = order_logps(Head(7, 0).double()(places), torch.tensor([order]), noise)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def trajectories(model, head, prompt, s, draw):
    """All ways to fill a canvas: (steps, probability), differentiable, by one state after the other; `draw`: the
    tokens are drawn at `s.temperature`, else they are the most likely ones."""
    body, run_head = body_and_head(model)
    start = (torch.cat([prompt, prompt.new_full((1, s.length), s.mask)], 1), (), torch.ones((), dtype=torch.float64))
    open_ones, size = [start], s.length // s.steps
    for _ in range(s.steps):
        grown = []
        for ids, path, p in open_ones:
            positions = (ids == s.mask).nonzero()[:, 1].view(1, -1)
            states = body(ids, None, positions)
            logits = run_head(states)[0]
            own = logits.log_softmax(-1)
            others = [token for token in range(logits.shape[-1]) if token != s.mask]
            best, entropies = own[:, others].amax(-1), -(own.exp() * own).sum(-1)
            left = torch.full_like(best, positions.shape[1] / s.length)
            places = Places(*(of[None] for of in (best, entropies, left)), states, best[None])
            rates = (head(places)[0] / s.noise).exp()
            q = (logits[:, others] / s.temperature).softmax(-1)
            for order in permutations(range(positions.shape[1]), size):
                remaining, chance = rates.sum(), p
                if size < positions.shape[1]:
                    for place in order:
                        chance, remaining = chance * rates[place] / remaining, remaining - rates[place]
                elif order != tuple(sorted(order)):
                    continue  # one set of places
                likely = [[int(q[place].argmax())] for place in order]
                for tokens in product(range(len(others)), repeat=size) if draw else product(*likely):
                    each = [q[place, token] for place, token in zip(order, tokens, strict=True)] if draw else []
                    chosen = torch.tensor([[others[token] for token in tokens]])
                    step = Step(ids, positions, places, torch.tensor([order]), chosen)
                    filled = ids.scatter(1, positions.gather(1, step.order), chosen)
                    grown.append((filled, (*path, step), chance * torch.stack(each).prod() if draw else chance))
        open_ones = grown
    return open_ones


def stacked(paths):
    """The steps of many rows as those of one rollout."""
    steps = []
    for parts in zip(*paths, strict=True):
        places = Places(*(torch.cat(of) for of in zip(*(step.places for step in parts), strict=True)))
        others = {name: torch.cat([getattr(step, name) for step in parts]) for name in Step._fields if name != "places"}
        steps.append(Step(**others, places=Places(*(of.detach() for of in places))))
    return steps


@pytest.mark.parametrize(("arm", "length", "steps"), [("order", 4, 2), ("order", 3, 3), ("joint", 2, 2)])
def test_the_gradient_is_that_of_the_mean_reward_over_all_trajectories(arm, length, steps):
    """REINFORCE, weighted with the probability of each trajectory, against autograd through the enumeration. A Llama's
    norms are fp32, so the model's gradients depend on the batch by rounding; the head's are fp64."""
    model = copy.deepcopy(tiny(1))
    head = moved(Head(8, 0), scale=0.5).double()
    s = Training(arm, length, steps, MASK, 1, 0.0, noise=0.6, temperature=0.8)
    every = trajectories(model, head, torch.tensor([[1, 2]]), s, draw=s.learns_tokens)
    p = torch.stack([chance for _, _, chance in every])
    assert p.sum().item() == pytest.approx(1.0, abs=1e-12)
    torch.manual_seed(1)
    of_text = {tuple(ids[0].tolist()): torch.randn(1).item() for ids, _, _ in every}
    assert len(of_text) > 1
    rewards = torch.tensor([of_text[tuple(ids[0].tolist())] for ids, _, _ in every], dtype=torch.float64)
    weights = [*head.parameters(), *(model.parameters() if s.learns_tokens else [])]
    wanted = torch.autograd.grad((p * rewards).sum(), weights)
    # A mean over rows of p x rows x reward: the sum over trajectories.
    advantages = (p * rewards).detach() * len(every)
    total = sum(losses(model, head, stacked([path for _, path, _ in every]), advantages, s))
    found = torch.autograd.grad(-total, weights)
    assert sum(one.abs().sum() for one in wanted) > 1e-3
    for one, other in zip(found, wanted, strict=True):
        rounding = 3e-6 * other.abs().max().item() if s.learns_tokens else 1e-12
        torch.testing.assert_close(one, other, rtol=1e-9, atol=rounding)


@pytest.mark.parametrize("arm", ["order", "joint", "tokens"])
def test_an_arm_trains_what_it_says(arm, pocket):
    model, mask, prompts = copy.deepcopy(pocket[0]), *pocket[1:]
    head = Head(model.config.hidden_size, 0)
    before = copy.deepcopy([head.state_dict(), model.state_dict()])
    s = Training(arm, LENGTH, 8, mask, 2, 1e-2, rate=1e-3, noise=0.5)
    rows = prompts[:2].repeat_interleave(8, 0)
    reward = lambda ids: ids.double().mean(1).float()  # noqa: E731
    curve = train(model, head, iter([(rows, reward)] * 2), s, torch.Generator().manual_seed(0))
    assert len(curve) == 2
    same = [
        all(torch.equal(values[name], value) for name, value in module.state_dict().items())
        for module, values in zip((head, model), before, strict=True)
    ]
    assert same == [arm == "tokens", arm == "order"]
