"""The loss and its gradient against the paper's formula, position by position; and logits read state by state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from d1.distill.losses import (
    NoisedTexts,
    ScoredPositions,
    certainty_loss,
    count_positions,
    is_most_likely,
    read_certainty,
    read_positions,
)
from tests.d1.scoring.enumeration import CANVAS, MASK, PROMPT, SAMPLED, VISIBLE, canvas_logits, tiny

STATES, VOCABULARY = 2, 7


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Row 1 has positions in one state only, row 2 none.
AT = [(0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0), (0, 1, 2), (1, 1, 0), (1, 1, 1), (1, 1, 3)]
STUDENT = random(8, VOCABULARY, seed=1)
IDS = torch.tensor([0, 3, 3, 1, 2, 6, 5, 0])
IDS[::3] = STUDENT[::3].argmax(-1)


def scored_positions(which: list[int]) -> ScoredPositions:
    state = torch.tensor([AT[i][1] for i in which], dtype=torch.long)
    (right,) = is_most_likely(STUDENT[which], IDS[which])
    return ScoredPositions(state, IDS[which], right)


def loss_of(parts: list[list[int]], logits: Tensor) -> Tensor:
    """The sum of the parts' losses."""
    batches, loss = [scored_positions(which) for which in parts], torch.zeros(())
    totals = torch.stack([count_positions(batch) for batch in batches]).sum(0)
    for which, batch in zip(parts, batches, strict=True):
        logps, entropies = read_certainty(logits[which], batch.ids, 0.5)
        loss = loss + certainty_loss(batch, logps, entropies, totals, 2.0)
    return loss


def by_hand(logits: Tensor) -> Tensor:
    logps = logits.log_softmax(-1)
    total = logits.sum() * 0
    for state in range(STATES):
        own = [i for i, at in enumerate(AT) if at[1] == state]
        total = total - sum(logps[i, IDS[i]] for i in own) / len(own)
        sharp = (logits / 0.5).log_softmax(-1)
        right = [i for i in own if int(STUDENT[i].argmax()) == int(IDS[i])]
        entropies = [-(sharp[i].exp() * sharp[i]).sum() for i in right]
        total = total + 2.0 * sum(entropies) / len(right)
    return total


def test_the_loss_is_the_papers_formula_however_the_step_is_split() -> None:
    logits = STUDENT.clone().requires_grad_()
    expected = by_hand(logits)
    slope = torch.autograd.grad(expected, logits)[0]
    assert slope.abs().sum() > 0.1
    for parts in ([[*range(8)]], [[0, 1, 2, 3, 4], [5, 6, 7]], [[0, 1, 2, 3, 4], [], [5, 6, 7]]):
        found = loss_of(parts, logits)
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(found, logits)[0], slope, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("block", [None, 2])
def test_logits_are_those_of_each_state_alone(block: int | None) -> None:
    """Values and gradients, with one state or several per pass; positions come row after row, state after state."""
    model: Any = tiny(2, block=block)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(4, 3, CANVAS, generator=generator) < 0.6
    positions = noise & (torch.rand(4, 3, CANVAS, generator=generator) < 0.6)
    positions[1, 2] = positions[3] = False
    ids = torch.cat([SAMPLED.prompt_ids, SAMPLED.canvas_ids], dim=1)
    visible = torch.cat([VISIBLE, torch.ones_like(SAMPLED.canvas_ids)], dim=1)
    texts = NoisedTexts(ids, visible, noise, positions)
    expected = []
    for row, state, position in positions.nonzero().tolist():
        clean = ids[row][visible[row].bool()]
        hidden = torch.cat([torch.zeros(len(clean) - CANVAS).bool(), noise[row, state]])
        expected.append(canvas_logits(model, clean, hidden, CANVAS)[position])
    columns = (torch.arange(int(positions.sum())),)
    wanted, mix = torch.stack(expected), random(int(positions.sum()), 5, seed=4)
    weights = list(model.parameters())
    slopes = torch.autograd.grad((wanted * mix).sum(), weights)
    for at_once in (1, 3):
        options: dict[str, Any] = {"mask_token_id": MASK, "states_at_once": at_once}
        (found, numbers), compute = read_positions(model, texts, lambda *read: read, columns, **options)
        assert torch.equal(numbers, columns[0])
        torch.testing.assert_close(found, wanted)
        for slope, other in zip(torch.autograd.grad((found * mix).sum(), weights), slopes, strict=True):
            torch.testing.assert_close(slope, other, atol=1e-6, rtol=1e-5)
        read = positions.any(-1).sum(1)
        noised = visible[:, -(CANVAS + block - 1) :] if block else visible[:, :0]
        assert int(compute) == 3 * int((read * (visible.sum(1) + noised.sum(1))).sum())
    with torch.no_grad():
        none = replace(texts, positions=torch.zeros_like(positions))
        (nothing,), free = read_positions(model, none, lambda logits: (logits,), mask_token_id=MASK)
    assert (len(nothing), int(free)) == (0, 0)
    assert ids.shape[1] == PROMPT + CANVAS
