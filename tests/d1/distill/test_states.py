"""The states of traces: against plain loops and frequencies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from d1.distill.states import Traces, blocks_of_canvas, halves
from d1.masking import keyed_generator
from d1.sampling import SamplingSettings
from tests.d1.scoring.enumeration import EOS

CANVAS, BLOCK = 8, 4
BLOCKS = torch.arange(CANVAS) // BLOCK
# The second row ends at its third token; the EOS stop left its second block out.
TRACES = Traces(
    ids=torch.tensor([[1, 3, 2, 1, 2, 2, 3, 1], [2, 1, EOS, 3, EOS, EOS, EOS, EOS]]),
    steps=torch.tensor([[0, 1, 0, 1, 3, 2, 3, 2], [1, 0, 0, 1, -1, -1, -1, -1]]),
    blocks=BLOCKS.expand(2, -1),
    right=torch.tensor([True, True]),
    eos_token_ids=[EOS],
)


def test_a_trace_ends_at_its_first_end_token_and_is_filled_with_eos() -> None:
    """An end of turn ends a completion, too: what the model wrote after it is no part of what it is trained on."""
    end_of_turn = 3
    traces = replace(TRACES, eos_token_ids=[EOS, end_of_turn])
    assert traces.lengths.tolist() == [[2], [3]]
    assert traces.filled.tolist() == [[1, end_of_turn, *[EOS] * 6], [2, 1, *[EOS] * 6]]
    assert traces.scored_positions(1).sum(1).tolist() == [3, 4]
    states = halves(traces, [keyed_generator(0, row) for row in range(2)], -1)
    assert torch.equal(states.ids, traces.filled)


def test_blocks_begin_at_the_canvas_or_where_those_of_the_prompt_end() -> None:
    settings = SamplingSettings(gen_length=6, block_length=2, steps=3)
    assert blocks_of_canvas(settings, [3, 4], None).tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert blocks_of_canvas(settings, [3, 4], 2).tolist() == [[0, 1, 1, 2, 2, 3], [0, 0, 1, 1, 2, 2]]


@pytest.mark.parametrize("tail", [-1, 0, 1])
def test_halves_are_opposite_halves_of_one_block(tail: int) -> None:
    blocks, hidden = [], torch.zeros(CANVAS)
    scored = torch.arange(CANVAS) < torch.tensor([[8], [3 + tail if tail >= 0 else 8]])
    for seed in range(400):
        found = halves(TRACES, [keyed_generator(seed, row) for row in range(2)], tail)
        assert found.ids.tolist() == [TRACES.ids[0].tolist(), [2, 1, *[EOS] * 6]]
        for row in range(2):
            inside = found.noise[row].any(0) & ~found.noise[row].all(0)
            (block,) = {*BLOCKS[inside].tolist()} or {1}
            if inside.any():
                blocks.append((row, block))
            first, second = found.noise[row][:, block == BLOCKS]
            assert torch.equal(first & second, ~scored[row, block == BLOCKS])  # the tail is hidden in both
            assert not found.noise[row][:, block > BLOCKS].any()
            assert found.noise[row][:, block < BLOCKS].all()
            assert torch.equal(found.positions[row], found.noise[row] & (block == BLOCKS) & scored[row])
        hidden += found.noise[0, 0] & ~found.noise[0, 1]
    assert abs(hidden.sum() / 400 - BLOCK / 2) < 0.2
    share = sum(block == 0 for row, block in blocks if row == 0) / sum(row == 0 for row, _ in blocks)
    assert abs(share - 0.5) < 0.1
    assert {block for row, block in blocks if row == 1} == ({0, 1} if tail == -1 else {0})


def test_a_rows_states_do_not_depend_on_its_batch() -> None:
    both = halves(TRACES, [keyed_generator(0, row) for row in range(2)], tail=-1)
    alone = halves(TRACES.at(torch.tensor([1])), [keyed_generator(0, 1)], tail=-1)
    assert torch.equal(both.noise[[1]], alone.noise)
    assert torch.equal(both.positions[[1]], alone.positions)
