"""The states of traces: against the sampler's own canvases, plain loops and frequencies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d1.distill.states import STATES, Traces, blocks_of_canvas, halves, steps, trace
from d1.masking import keyed_generator
from d1.sampling import SamplingSettings
from d1.sampling.loop import rollout_of, rollout_steps
from tests.d1.scoring.enumeration import EOS, MASK, PROMPT, SAMPLED, VISIBLE, tiny

CANVAS, BLOCK = 8, 4
BLOCKS = torch.arange(CANVAS) // BLOCK
# The second row ends at its third token; the EOS stop left its second block out.
TRACES = Traces(
    ids=torch.tensor([[1, 3, 2, 1, 2, 2, 3, 1], [2, 1, EOS, 3, EOS, EOS, EOS, EOS]]),
    steps=torch.tensor([[0, 1, 0, 1, 3, 2, 3, 2], [1, 0, 0, 1, -1, -1, -1, -1]]),
    blocks=BLOCKS.expand(2, -1),
    right=torch.tensor([True, True]),
    eos_token_id=EOS,
)


def drawn(draw: Any, seed: int = 0, part: int = 0, **settings: Any) -> Any:
    generators = [keyed_generator(seed, row) for row in range(2)]
    return draw(TRACES, generators, SimpleNamespace(**settings), part)


@pytest.mark.parametrize("tail", [-1, 0, 1])
def test_halves_are_opposite_halves_of_one_block(tail: int) -> None:
    blocks, hidden = [], torch.zeros(CANVAS)
    scored = torch.arange(CANVAS) < torch.tensor([[8], [3 + tail if tail >= 0 else 8]])
    for seed in range(400):
        found = drawn(halves, seed, tail=tail)
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


@pytest.mark.parametrize(("power", "tokens"), [(1000.0, 1), (1000.0, 3), (0.0, 2)])
def test_a_trace_hides_what_was_revealed_first_and_weighs_it_by_levels(power: float, tokens: int) -> None:
    """The weighted sum of any values is the mean over levels of their means, by a loop."""
    values, sizes = torch.randn(2, CANVAS, dtype=torch.float64), set()
    for seed in range(40):
        found = drawn(trace, seed, tail=1, share_power=power, path_tokens=tokens)
        for row, valid in enumerate(([4, 4], [4, 0])):
            by_block = []
            for block, size in enumerate(valid):
                own = [k for k in range(CANVAS) if BLOCKS[k] == block][:size]
                order = sorted(own, key=lambda k: (int(TRACES.steps[row, k]), k))
                count = int(found.positions[row, 0, own].sum())
                sizes.add(count / max(size, 1))
                assert (
                    sorted(order[:count]) == (found.positions[row, 0] & (block == BLOCKS)).nonzero().flatten().tolist()
                )
                by_block.append(order[:count])
            longest = max(map(len, by_block))
            levels = [[k for own in by_block for k in own[: at + tokens]] for at in range(0, longest, tokens)]
            means = [values[row, level].mean() for level in levels]
            expected = torch.stack(means).mean() if means else torch.zeros((), dtype=torch.float64)
            torch.testing.assert_close((found.weights[row, 0] * values[row]).sum(), expected, atol=1e-6, rtol=0)
            after = torch.arange(CANVAS) >= (8 if row == 0 else 4)
            assert found.noise[row, 0][after].all()
    assert sizes == ({1.0, 0.0} if power else {1.0, 0.75, 0.5, 0.25, 0.0})


@pytest.mark.parametrize("block", [None, 2])
def test_steps_are_the_samplers_own_canvases(block: int | None) -> None:
    """The text that a state shows is the canvas before that step, for each row."""
    settings, model = SamplingSettings(gen_length=6, block_length=2, steps=5, temperature=1.0), tiny(2, block=block)
    generators = [keyed_generator(3, row) for row in range(4)]
    options: dict[str, Any] = {"mask_token_id": MASK, "generator": generators, "eos_token_ids": [EOS]}
    canvases, taken = [], []
    for step in rollout_steps(model, SAMPLED.prompt_ids, VISIBLE, settings, **options):
        canvases.append(step.canvas[:, PROMPT:].clone())
        taken.append(step)
    whole = rollout_of(taken)
    blocks = blocks_of_canvas(settings, VISIBLE.sum(1).tolist(), block)
    if block:
        assert blocks[1].tolist() == [0, 1, 1, 2, 2, 3]  # three tokens of its prompt fill one block and a half
    traces = Traces(whole.ids[:, PROMPT:], whole.reveal_steps[:, PROMPT:], blocks, torch.ones(4).bool(), EOS)
    found = steps(traces, generators, SimpleNamespace(num_iterations=1, hints=0.0))
    shown = found.ids.unsqueeze(1).masked_fill(found.noise, MASK)
    seen = 0
    for row in range(4):
        own = [torch.full((6,), MASK)]
        for canvas in canvases:
            if not torch.equal(canvas[row], own[-1]):
                own.append(canvas[row])
        for state in range(int(whole.passes[row])):
            assert torch.equal(shown[row, state], own[state])
            assert int(found.picks[row, state]) == int((whole.reveal_steps[row] == state).sum())
            now = whole.reveal_steps[row, PROMPT:] == state
            assert bool((now & ~found.positions[row, state]).sum() == 0)
            assert len({*blocks[row][found.positions[row, state]].tolist()}) == 1
            seen += 1
        assert not found.positions[row, int(whole.passes[row]) :].any()
    assert seen > 10


def test_parts_share_a_traces_steps_and_hints_show_later_blocks() -> None:
    whole = drawn(steps, num_iterations=1, hints=0.5)
    assert whole.noise.shape[1] == 4
    parts = [drawn(steps, part=part, num_iterations=2, hints=0.5) for part in range(2)]
    assert torch.equal(torch.cat([part.noise for part in parts], dim=1)[0], whole.noise[0])
    torch.testing.assert_close(whole.weights.amax(2), torch.tensor([[0.25] * 4, [0.5, 0.5, 0, 0]]))
    hints = whole.noise & ~whole.teacher_noise
    assert hints.sum(-1).tolist() == [[2, 2, 0, 0], [0, 0, 0, 0]]  # the second row ends in its first block
    assert not hints[:, :, :BLOCK].any()


@pytest.mark.parametrize("name", STATES)
def test_a_rows_states_do_not_depend_on_its_batch(name: str) -> None:
    settings = SimpleNamespace(tail=-1, share_power=1.0, path_tokens=2, num_iterations=1, hints=0.5)
    both = STATES[name](TRACES, [keyed_generator(0, row) for row in range(2)], settings)
    alone = STATES[name](TRACES.at(torch.tensor([1])), [keyed_generator(0, 1)], settings)
    count = alone.noise.shape[1]
    for key in ("noise", "positions", "weights"):
        assert torch.equal(getattr(both, key)[[1], :count], getattr(alone, key))
