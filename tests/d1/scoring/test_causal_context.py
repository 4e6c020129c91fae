"""Scores with a causal context: states written out, the sampler's own log-probabilities, and the views of JustGRPO."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from d1.masking import keyed_generator
from d1.models import load_model
from d1.rl.methods import METHODS
from d1.rl.tables import ESTIMATORS
from d1.sampling import SamplingSettings, rollout
from d1.sampling.loop import eos_cut
from d1.scoring import Randomness, SampledRows, Views, ViewSettings, score
from d1.scoring.inputs import CanvasBlocks, canvas_blocks
from tests.d1.models.test_causal_context import Stock
from tests.d1.released import CAUSAL, MASK, VOCAB, write_shifted
from tests.d1.sampling.reference import make_prompts, sharper
from tests.rounding import LOGITS, assert_near

WIDTHS, CANVAS, ENDS = [7, 2, 5], 11, [*range(40, 48)]
IDS, REAL = make_prompts(WIDTHS, 4)


@pytest.fixture(scope="module", params=[False, True], ids=["in place", "shift"])
def folder(request: Any, kind_dirs: Any, tmp_path_factory: Any) -> Path:
    if not request.param:
        return kind_dirs[CAUSAL]
    return write_shifted(tmp_path_factory.mktemp("shifted") / "model", kind_dirs[CAUSAL])


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return sharper(load_model(folder, torch.float64))


@pytest.fixture(scope="module")
def stock(model: Any, folder: Path) -> Stock:
    found = Stock(folder)
    found.model.double().load_state_dict(model.state_dict())
    return found


def random_of(rows: int) -> Randomness:
    return Randomness([keyed_generator(6, row) for row in range(rows)], keyed_generator(6), 0, rows)


def state_logps(stock: Stock, row: int, canvas: Tensor, hidden: Tensor, blocks: CanvasBlocks) -> Tensor:
    """(canvas,) log-probabilities of a row's tokens, block after block: `hidden` (prompt + canvas) are masks."""
    text = torch.cat([IDS[row], canvas])[-CANVAS - WIDTHS[row] :]
    mask, prompt, size = hidden[-CANVAS - WIDTHS[row] :], WIDTHS[row], blocks.size
    clean = torch.cat([text[:prompt].masked_fill(mask[:prompt], MASK), canvas])
    found: list[Tensor] = []
    for start in range(prompt, len(text), size or 1):
        end, noised = min(start + int(size or 1), len(text)), clean.masked_fill(mask, MASK)
        if blocks.causal_first:
            noised[start] = clean[start]
        logits = stock.block(clean, noised, start, end)
        if blocks.causal_first:
            logits = torch.cat([stock.logits(clean[None, :start])[0, -1:], logits[1:]])
        found.append(logits.log_softmax(-1).gather(1, canvas[start - prompt : end - prompt, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("causal_first", [True, False])
@pytest.mark.parametrize("size", [None, 3, 16])
@torch.no_grad()
def test_scores_are_those_of_states_written_out(model, stock, size, causal_first):
    """Of any views, in a padded batch; None is the model's own block of 4, as by default."""
    canvas = torch.randint(8, VOCAB, (3, CANVAS), generator=keyed_generator(1))
    noise = torch.rand(3, 2, IDS.shape[1] + CANVAS, generator=keyed_generator(2)) < 0.5
    weights = torch.rand(3, 2, CANVAS, generator=keyed_generator(3), dtype=torch.float64)
    blocks = CanvasBlocks(size or 4, True, causal_first)
    given = None if size is None and causal_first else blocks
    options: dict[str, Any] = {"mask_token_id": MASK, "gen_length": CANVAS, "blocks": given}
    found = score(model, IDS, REAL, canvas, Views(noise, weights), **options)
    for row in range(3):
        views = [state_logps(stock, row, canvas[row], of, blocks) for of in noise[row]]
        torch.testing.assert_close(found.view_logps[row], torch.stack(views), atol=1e-9, rtol=0)
        expected = (weights[row] * torch.stack(views)).sum(0)
        torch.testing.assert_close(found.logps[row], expected, atol=1e-9, rtol=0)
    assert found.compute == 2 * (REAL.sum() + 2 * 3 * CANVAS)  # both views of each row, the canvas twice


def sampled_with(model: Any, settings: SamplingSettings, ends: Any) -> tuple[SampledRows, CanvasBlocks]:
    length = settings.gen_length
    settings = settings.for_model(model.config)
    random = [keyed_generator(8, row) for row in range(3)]
    options: dict[str, Any] = {"mask_token_id": MASK, "generator": random, "eos_token_ids": ends}
    taken = rollout(model, IDS, REAL, settings, **options)
    blocks = CanvasBlocks.from_config(model.config, settings.block_length, settings.first_token)
    canvas = taken.ids[:, -length:]
    rows = SampledRows(
        prompt_ids=IDS,
        attention_mask=REAL,
        maskable=REAL.bool(),
        canvas_ids=canvas,
        scored=eos_cut(canvas, ends or ENDS),
        reveal_steps=taken.reveal_steps,
        logps=taken.logps,
        entropies=taken.entropies,
        blocks=canvas_blocks(REAL, length, *blocks[:2]),
    )
    return rows, blocks


SAMPLERS: dict[str, dict[str, Any]] = {
    "scheduled": {"steps": 7},
    "threshold": {"steps": CANVAS, "sampler": "parallel", "reveal_level": 0.3},
    "leftmost": {"steps": CANVAS, "remasking": "leftmost"},
}


@pytest.mark.parametrize("first_token", ["causal", "masked"])
@pytest.mark.parametrize("ends", [None, ENDS], ids=["", "eos"])
@pytest.mark.parametrize("name", SAMPLERS)
@torch.no_grad()
def test_replay_gives_what_the_sampler_noted_so_that_ratios_are_one(model, name, ends, first_token):
    """Also left to right, if the sampler went from left to right. Blocks of 5, not the model's own."""
    settings = SamplingSettings(CANVAS, 5, temperature=0.8, first_token=first_token, **SAMPLERS[name])
    rows, blocks = sampled_with(model, settings, ends)
    assert rows.scored.any(1).all()
    for estimator in ("replay", *(["left_to_right"] if name == "leftmost" else [])):
        chosen = ViewSettings(gen_length=CANVAS, steps=settings.max_passes(), block_length=5)
        views = ESTIMATORS[estimator](rows, random_of(3), chosen)
        options: dict[str, Any] = {"mask_token_id": MASK, "gen_length": CANVAS, "blocks": blocks}
        found = score(model, IDS, REAL, rows.canvas_ids, views, **options).logps
        assert_near(found, rows.logps.masked_fill(~rows.scored, 0).double(), least=LOGITS)
    if ends and name == "threshold":
        assert (rows.reveal_steps[:, :5] < 0).any() or (rows.reveal_steps[:, 5:10] < 0).any()


@torch.no_grad()
def test_one_step_scores_the_first_pass_of_every_block(model, stock):
    """Given the prompt and earlier blocks, a block's first token, and then all others as if each came alone."""
    rows, blocks = sampled_with(model, SamplingSettings(CANVAS, 4, CANVAS), None)
    views = ESTIMATORS["one_step"](rows, random_of(3), ViewSettings(gen_length=CANVAS, block_length=4))
    found = score(model, IDS, REAL, rows.canvas_ids, views, mask_token_id=MASK, gen_length=CANVAS, blocks=blocks)
    hidden = torch.cat([torch.zeros(IDS.shape[1]), torch.ones(CANVAS)]).bool()
    for row in range(3):
        expected = state_logps(stock, row, rows.canvas_ids[row], hidden, blocks) * rows.scored[row]
        torch.testing.assert_close(found.logps[row], expected, atol=1e-9, rtol=0)


def nemo_views(rows: SampledRows, size: int, fraction: float) -> list[list[tuple[set[int], set[int]]]]:
    """For each row, what each view hides and scores of the canvas (`BlockJustGRPOSchedule` and
    `select_low_confidence_tokens` of NVIDIA-NeMo/RL, research/just_grpo): tokens after the EOS stay masks."""
    found = []
    for scored, logps in zip(rows.scored.tolist(), rows.logps.tolist(), strict=True):
        length, count = sum(scored), math.ceil(fraction * size)
        offsets: list[list[int]] = []  # of each block's chosen tokens
        for start in range(0, rows.gen_length, size):
            inside = range(start, min(start + size, length))
            best = sorted(inside, key=lambda place: (logps[place], place))[:count]
            offsets.append(sorted(place - start for place in best))
        views = []
        for view in range(count):
            hidden, asked = {*range(length, rows.gen_length)}, set()
            for block, own in enumerate(offsets):
                places = range(block * size, min((block + 1) * size, length))
                threshold = own[view] if view < len(own) else size
                hidden |= {place for place in places if place - block * size >= threshold}
                asked |= {place for place in places if place - block * size == threshold}
            views.append((hidden, asked))
        found.append(views)
    return found


@pytest.mark.parametrize(("method", "count"), [("just-grpo-blocks", 16), ("just-grpo-fast", 4)])
def test_the_views_of_justgrpo_are_those_of_nemo_rl(model, method, count):
    """In blocks of 16, one view per offset; or 4, for the quarter of the tokens that were least likely."""
    values, own, canvas = METHODS[method].values, METHODS[method].scale["block_length"], 37
    named = {name: values[name] for name in ("temperature", "first_token", "remasking")}
    rows, _ = sampled_with(model, SamplingSettings(canvas, own, canvas, **named), ENDS)
    lengths = rows.scored.sum(1).tolist()
    assert min(lengths) < canvas
    assert max(lengths) > own
    fields = {"gen_length": canvas, "steps": canvas, "block_length": own, "num_views": values.get("num_views")}
    chosen = ViewSettings(**fields)
    assert ESTIMATORS["left_to_right"].views(replace(chosen, gen_length=own)) == count
    views = ESTIMATORS["left_to_right"](rows, random_of(3), chosen)
    expected = nemo_views(rows, own, count / own)
    for row, length in enumerate(lengths):
        for view, (hidden, asked) in enumerate(expected[row]):
            assert {*views.weights[row, view].nonzero().flatten().tolist()} == asked
            assert not views.weights[row, view][[*asked]].ne(1).any()
            for place in asked:  # the state of what is scored: its block, and nothing of later ones
                block = range(place // own * own, min((place // own + 1) * own, length))
                seen = views.noise[row, view, -canvas:]
                assert {at for at in block if seen[at]} == {at for at in block if at in hidden}
                assert all(seen[at] for at in range(place, min((place // own + 1) * own, canvas)))
        assert not views.weights[row, len(expected[row]) :].any()
