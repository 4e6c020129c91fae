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
from studies.json_lines import append_line
from studies.order import report, run
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
    largest = max(one.abs().max().item() for one in wanted)
    assert largest > 1e-3
    rounding = (1e-5 if s.learns_tokens else 1e-11) * largest
    for one, other in zip(found, wanted, strict=True):
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


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A search in which leftmost is the best rule of the schedule, and the threshold 0.8 the best rule of Sudoku."""
    monkeypatch.setattr(run, "DATA", tmp_path)
    for setup in run.STUDIED:
        rules = {f"{rule}, {speed}": found(40 + 10 * (rule == "leftmost"), 8) for rule, speed in NAMES}
        levels = {f"threshold {level}": found(30, 99) for level in run.LEVELS}
        most = 70 if setup == "sudoku-sft" else 20
        levels |= {"threshold 0.8": found(most, 3), "threshold 0.85": found(most + 9, 7), "threshold 0.5": found(1, 1)}
        same = {"setup": setup, "seed": run.SEARCH_SEED}
        append_line(tmp_path / "search.jsonl", {**same, "arm": "rules", "found": rules | levels})
        for number, (noise, rate) in enumerate(run.CELLS):
            line = {**same, "arm": "order", "noise": noise, "rate": rate, "found": {"order": found(50 + number % 2, 8)}}
            append_line(tmp_path / "search.jsonl", line)


NAMES = [*product((*run.ORDERS, "random"), run.SPEEDS)]


def found(right, passes):
    return {"solved": "1" * right + "0" * (100 - right), "passes": passes, "tokens": 28.0}


def test_the_search_chooses_rules_and_cells_by_validation_problems(search):
    assert run.levels_of("sudoku") == {4: 0.85, 8: 0.8}  # within 8 and 4 passes
    assert run.levels_of("countdown") == {4: 0.8, 8: 0.8}  # within 6 and 3
    assert [run.best_rule("sudoku", speed) for speed in run.SPEEDS] == ["threshold, 4", "threshold, 8"]
    assert [run.best_rule("countdown", speed) for speed in run.SPEEDS] == ["leftmost, 4", "leftmost, 8"]
    assert run.best_rule("sudoku", 4, schedule=True) == "leftmost, 4"
    assert {run.cell_of(setup) for setup in run.STUDIED} == {run.CELLS[1]}
    (run.DATA / "search.jsonl").write_text("")
    with pytest.raises(ValueError, match="no rules of sudoku: run the search first"):
        run.levels_of("sudoku")
    with pytest.raises(ValueError, match="the search of sudoku-sft has 0 of 2 runs"):
        run.cell_of("sudoku-sft")


@pytest.mark.parametrize(("gains", "kept"), [((20, 5), True), ((20, 0), False), ((-3, 5), False)])
def test_the_order_is_kept_if_it_beats_the_best_rule_of_the_search_in_both_setups(search, gains, kept):
    lines = []
    for one in run.runs():
        best, gain = (70, gains[0]) if one["setup"] == "sudoku-sft" else (50, gains[1])
        own = {name: found(best + gain, 8) for name in ("order", "confidence")}
        if one["arm"] == "rules":
            own = {f"{rule}, {speed}": found(50, 8) for rule, speed in NAMES}
            own |= {f"threshold, {speed}": found(70 if best == 70 else 95, 8) for speed in run.SPEEDS}
        lines.append({**one, "found": own, "trained_s": 1.0})
    text = report.verdict(lines)
    assert ("is **kept**" in text) == kept
    assert all(f"{100 * report.gain(lines, setup).value:+.1f} [" in text for setup in run.STUDIED)
    assert [round(100 * report.gain(lines, setup).value) for setup in run.STUDIED] == [*gains]
    assert report.verdict(lines[1:]) == ""
    shown = report.table(lines)
    assert shown.count("best of the search") == 2 * len(run.SPEEDS)
    assert len(shown.splitlines()) > 2 * len(run.SPEEDS) * 6


def test_a_run_trains_and_is_judged(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "make_start", lambda *given: ROOT / "pocket" / "base")
    monkeypatch.setattr(run, "VALIDATION", 20)
    monkeypatch.setattr(run, "UPDATES", {"joint": 2})
    own = {"setup": "sudoku-sft", "seed": 1, "arm": "joint", "speed": 8, "noise": 0.5, "rate": 1e-2}
    found = run.line(own, tmp_path, judge=False)
    assert {name: len(of["solved"]) for name, of in found["found"].items()} == {"order": 20, "confidence": 20}
    assert found["found"]["order"]["passes"] == 4
    assert len(found["curve"]) == 2
    assert all(0 < reward <= 1 for reward in found["curve"])


def test_the_orders_of_the_judges_are_those_of_the_library(monkeypatch, tmp_path):
    """Confidence by the study's own sampler and by the library's solves the same problems."""
    monkeypatch.setattr(run, "make_start", lambda *given: ROOT / "pocket" / "base")
    monkeypatch.setattr(run, "VALIDATION", 40)
    start = run.Start("sudoku-sft", 0, tmp_path)
    rows = start.problems(judge=False)
    rules = run.rules(start, rows, {"threshold 0.8": 0.8})
    assert {*rules} == {"threshold 0.8", *(f"{rule}, {speed}" for rule, speed in NAMES)}
    for speed in run.SPEEDS:
        own = start.judged(RULES["confidence"], speed, rows)
        assert own == {name: rules[f"confidence, {speed}"][name] for name in own}
        assert len({rules[f"{rule}, {speed}"]["solved"] for rule in (*run.ORDERS, "random")}) > 1
