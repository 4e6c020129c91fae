"""Sampling with a causal context: a rule written out for one row after the other, and the cache against none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import SamplingSettings, rollout, rollout_stream
from d1.sampling.infilling import infill
from d1.sampling.settings import check_sampler
from tests.d1.models.test_causal_context import Stock
from tests.d1.released import CAUSAL, write_shifted
from tests.d1.sampling.reference import MASK, SHARP_LOGITS, VOCAB, Row, check_row, make_prompts, parts, sharper
from tests.d1.sampling.test_stream import assert_row
from tests.rounding import assert_near

WIDTHS, ENDS = [9, 1, 4, 6], [*range(30, 40)]
Settings = dict[str, Any]
CASES: list[tuple[int, int, int, Settings]] = [  # tokens, tokens per block, steps, and further settings
    (12, 4, 12, {}),
    (11, 4, 7, {}),
    (10, 6, 10, {"sampler": "parallel", "reveal_level": 0.3}),
    (10, 5, 8, {"sampler": "parallel", "reveal": "entropy", "reveal_level": 0.6, "temperature": 0.8}),
    (9, 1, 9, {}),  # autoregressive
    (12, 12, 9, {"temperature": 0.8, "remasking": "random"}),
    (10, 4, 8, {"first_token": "masked"}),
    (12, 8, 12, {"first_token": "masked", "sampler": "parallel", "reveal_level": 0.3, "temperature": 0.8}),
    (12, 4, 12, {"first_token": "masked", "remasking": "leftmost", "temperature": 1.0}),
]


@pytest.fixture(scope="module", params=[False, True], ids=["in place", "shift"])
def folder(request, kind_dirs, tmp_path_factory):
    if not request.param:
        return kind_dirs[CAUSAL]
    return write_shifted(tmp_path_factory.mktemp("shifted") / "model", kind_dirs[CAUSAL])


@pytest.fixture(scope="module")
def model(folder):
    return sharper(load_model(folder))


@pytest.fixture(scope="module")
def stock(folder, model):
    found = Stock(folder)
    found.model.load_state_dict(model.state_dict())
    return found


def sample_row(stock: Stock, prompt: list[int], settings: SamplingSettings, generator: Any, ends: Any) -> Row:
    """NVIDIA's rule (`generate` of the released model) for one row: the prompt and finished blocks are read from left
    to right and give the next block's first token; the block's other tokens are revealed one pass after the other."""
    length, temperature = settings.gen_length, settings.temperature
    row = Row(
        [*prompt, *[MASK] * length],
        [0.0] * length,
        [0.0] * length,
        [-1] * length,
        [[] for _ in range(length)],
    )
    causal = settings.first_token != "masked"
    sizes = [min(settings.block_length, length - first) for first in range(0, length, settings.block_length)]
    planned = [size - causal for size in sizes]
    steps = [min(1, size) for size in planned]
    while sum(steps) + causal * len(sizes) < settings.steps:
        rates = [size / count if count else 0 for size, count in zip(planned, steps, strict=True)]
        steps[rates.index(max(rates))] += 1
    start, stored = len(prompt), 0
    for size, rest, count in zip(sizes, planned, steps, strict=True):
        end, scheduled = start + size, 0
        plan = [1] * causal + (parts(rest, count) if rest else [])
        for step, more in enumerate(plan):
            ids, alone = torch.tensor(row.ids), causal and step == 0
            masked = [i for i in range(start, end) if row.ids[i] == MASK]
            if not masked:
                break
            if alone:  # the state of the last finished token predicts the first token
                logits, left = stock.logits(ids[None, :start])[0, -1:].double(), [start]
            else:
                logits, left = stock.block(ids, ids, start, end)[[i - start for i in masked]].double(), masked
            row.tokens += (start - stored if step == 0 else 0) + (0 if alone else size)
            stored, scheduled = start, scheduled + more
            uniform = torch.rand(len(left), VOCAB, generator=generator).clamp(min=2.0**-25) if temperature else None
            ranks = torch.rand(len(left), generator=generator).tolist() if settings.remasking == "random" else None
            guesses = []
            for number, i in enumerate(left):
                own = logits[number].log_softmax(-1)
                scores = logits[number].clone()
                if uniform is not None:
                    scores -= temperature * (-torch.log1p(-uniform[number])).log()
                scores[MASK] = -math.inf
                token = int(scores.argmax())
                rank = {"low_confidence": -own[token].item(), "leftmost": i}.get(settings.remasking)
                entropy = -(own.exp() * own).sum().item()
                guesses.append((ranks[number] if ranks else rank, i, token, own[token].item(), entropy))
            if ranks:  # the largest first
                guesses = [(-guess[0], *guess[1:]) for guess in guesses]
            guesses.sort()
            due = max(1, scheduled - (size - len(masked))) if not alone else 1
            if settings.rule == "threshold":
                due = max(due, sum(math.exp(guess[3]) > settings.level for guess in guesses))
            if settings.rule == "entropy":
                entropies = [guess[4] for guess in guesses]
                due = max(
                    [due]
                    + [
                        n
                        for n in range(1, len(guesses) + 1)
                        if sum(entropies[:n]) - max(entropies[:n]) <= settings.level
                    ]
                )
            for _, i, token, logp, entropy in guesses[:due]:
                row.ids[i], at = token, i - len(prompt)
                row.logps[at], row.entropies[at], row.reveal_steps[at] = logp, entropy, row.passes
            row.passes += 1
            first_mask = next((i for i in range(start, end) if row.ids[i] == MASK), end)
            if ends and set(row.ids[start:first_mask]) & {*ends}:  # nothing before the EOS is hidden
                row.ids[first_mask:] = [ends[0] if token == MASK else token for token in row.ids[first_mask:]]
                return row
        start = end
    return row


def settings_of(tokens: int, block: int, steps: int, more: Settings) -> SamplingSettings:
    return SamplingSettings(tokens, block, steps, **more)


def generators() -> list[torch.Generator]:
    return [keyed_generator(5, row) for row in range(len(WIDTHS))]


@pytest.mark.parametrize("ends", [None, ENDS], ids=["", "eos"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_of_the_rule_written_out_and_the_cache_is_exact(model, stock, case, ends):
    settings = settings_of(*case)
    ids, mask = make_prompts(WIDTHS, 2)
    options: Settings = {"mask_token_id": MASK, "eos_token_ids": ends}
    cached = rollout(model, ids, mask, settings, generator=generators(), **options)
    whole = rollout(model, ids, mask, settings, generator=generators(), recompute=True, **options)
    for row, width in enumerate(WIDTHS):
        alone = sample_row(stock, ids[row, -width:].tolist(), settings, keyed_generator(5, row), ends)
        check_row(cached, row, width, alone)
    assert torch.equal(cached.ids, whole.ids)
    assert torch.equal(cached.reveal_steps, whole.reveal_steps)
    assert_near(cached.logps, whole.logps, least=SHARP_LOGITS)
    assert (cached.forward_tokens < whole.forward_tokens).all()
    if ends:
        assert len(cached.passes.unique()) > 1, "no row ended before another: the test shows little"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_give_the_same_rows(model, case):
    settings = settings_of(*case)
    ids, mask = make_prompts(WIDTHS, 2)
    options: Settings = {"mask_token_id": MASK, "eos_token_ids": ENDS}
    expected = rollout(model, ids, mask, settings, generator=generators(), **options)
    prompts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
    ended = []
    asked = zip(prompts, generators(), strict=True)
    for numbers, part in rollout_stream(model, asked, settings, batch_size=2, **options):
        ended += numbers
        for index, number in enumerate(numbers):
            assert_row(part, index, expected, number)
    assert sorted(ended) == [0, 1, 2, 3]


def test_the_causal_token_takes_a_step_of_its_own():
    assert SamplingSettings(10, 4, 7, first_token="causal").schedule() == [[1, 2, 1], [1, 3], [1, 1]]
    assert SamplingSettings(5, 4, 3, first_token="causal").schedule() == [[1, 3], [1]]
    assert SamplingSettings(3, 1, 3, first_token="causal").schedule() == [[1], [1], [1]]
    assert SamplingSettings(10, 4, 5, first_token="masked").schedule(3) == [[2, 2], [2, 2], [2]]
    for steps in (3, 9):
        with pytest.raises(ValueError, match=rf"8 tokens in 2 blocks, whose .* between 4 and 8 steps, got {steps}"):
            SamplingSettings(8, 4, steps, first_token="causal")
    for steps in (1, 9):
        with pytest.raises(ValueError, match=f"8 tokens in 2 blocks need between 2 and 8 steps, got {steps}"):
            SamplingSettings(8, 4, steps, first_token="masked")


def test_what_a_causal_context_cannot_do_is_refused(load):
    model, sdar = load(CAUSAL), load("sdar")
    assert SamplingSettings(8, 4, 8, first_token="masked").for_model(sdar.config) == SamplingSettings(8, 4, 8)
    ids = torch.tensor([[5, 6]])
    options: Settings = {"mask_token_id": MASK, "gen_length": 8, "block_length": 4, "steps": 8}
    for fields, message in (
        ({"cfg_scale": 1.0}, "cannot sample with guidance"),
        ({"sampler": "parallel", "edit_threshold": 0.5}, "cannot sample with editing"),
        ({"sampler": "cached"}, "needs no cached sampler"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout(model, ids, torch.ones_like(ids), **options | fields)
    with pytest.raises(ValueError, match="prompt is empty"):
        rollout(model, ids, torch.tensor([[0, 0]]), **options)
    with pytest.raises(ValueError, match="causal context: it reads text from left to right and cannot fill a gap"):
        infill(model, ids, ids == 5, mask_token_id=MASK)
    with pytest.raises(
        ValueError, match="first_token='causal' is for models with a causal context, not for this qwen3"
    ):
        check_sampler(SamplingSettings(8, 4, 8, first_token="causal"), sdar.config)
