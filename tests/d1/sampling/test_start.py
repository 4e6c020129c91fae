"""Sampling that continues from canvases with tokens: a run that is cut and continued equals the whole run, and tokens
that are given in advance stay."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d1.masking import keyed_generator
from d1.sampling import RolloutStart, SamplingSettings, infill, rollout, rollout_steps
from d1.sampling.record import rollout_of
from tests.d1.released import CAUSAL
from tests.d1.sampling.reference import (
    GIVEN,
    MASK,
    SHARP_LOGITS,
    VOCAB,
    WITHOUT_CACHE,
    cases,
    enlargement,
    make_prompts,
)
from tests.rounding import rounding

FIELDS = ("ids", "logps", "entropies", "reveal_steps", "passes")


def run_and_watch(model, prompts, chosen, options, seed):
    """A whole run, and the state of each row's generator before its every pass and after its last."""
    generators = [keyed_generator(seed, row) for row in range(len(prompts[0]))]
    states = [[one.get_state()] for one in generators]

    def watched():
        for step in rollout_steps(model, *prompts, chosen, generator=generators, **options):
            for row in step.rows.tolist():
                states[row].append(generators[row].get_state())
            yield step

    return rollout_of(watched(), prompts[0].shape[1]), states


def generators_at(states, step):
    generators = []
    for own in states:
        generators.append(torch.Generator())
        generators[-1].set_state(own[min(step, len(own) - 1)])
    return generators


@pytest.mark.parametrize("kind", ["llama", "Dream", "sdar"])
@given(case=cases(st.sampled_from(WITHOUT_CACHE), block_length=4), data=st.data())
@settings(max_examples=25, **GIVEN)
def test_a_run_that_is_cut_and_continued_equals_the_whole_run(load, kind, case, data):
    model, chosen, seed = load(kind), case["settings"], case["seed"]
    # Rows that a rule brings to different blocks are in other batches when they continue, where numbers may round
    # otherwise.
    widths = case["widths"][: 1 if chosen.rule else None]
    prompts = make_prompts(widths, seed)
    options = {"mask_token_id": MASK, "eos_token_ids": case["ends"]}
    whole, states = run_and_watch(model, prompts, chosen, options, seed)
    step = data.draw(st.integers(0, int(whole.passes.max())), label="step")
    start = RolloutStart.from_rollout(whole, step, MASK)
    generators = generators_at(states, step)
    found = rollout(model, *prompts, chosen, start=start, generator=generators, **options)
    assert (start.ids == MASK).sum() == ((whole.reveal_steps < 0) | (whole.reveal_steps >= step)).sum()
    for name in FIELDS:
        if kind == "sdar" and name in ("logps", "entropies"):  # its cache: the prompt is processed with more blocks
            close = {"rtol": 0, "atol": rounding(SHARP_LOGITS) * enlargement(chosen)}
            torch.testing.assert_close(getattr(found, name), getattr(whole, name), **close)
        else:
            assert torch.equal(getattr(found, name), getattr(whole, name)), name
    for own, after in zip(generators, states, strict=True):
        assert torch.equal(own.get_state(), after[-1])
    if kind != "sdar":
        each = prompts[1].sum(1) + chosen.gen_length
        passes = (whole.passes - step).clamp(min=0) * (2 if chosen.cfg_scale else 1)
        assert torch.equal(found.forward_tokens, passes * each)


def released_loop(model, prompt, canvas, block_length, steps):
    """LLaDA's greedy sampler on a canvas with tokens: each step of a block reveals its equal share of what the block
    hid at its beginning."""
    text = torch.tensor([prompt + canvas])
    blocks = len(canvas) // block_length
    for block in range(blocks):
        inside = torch.arange(len(prompt) + block * block_length, len(prompt) + (block + 1) * block_length)
        masked = int((text[0, inside] == MASK).sum())
        each, more = divmod(masked, steps // blocks)
        for step in range(steps // blocks):
            count = each + (step < more)
            with torch.no_grad():
                logits = model(input_ids=text).logits[0].double()
            probabilities = logits.softmax(-1)
            logits[:, MASK] = -torch.inf
            hidden = [at for at in inside.tolist() if text[0, at] == MASK]
            ids = logits.argmax(-1)
            best = sorted(hidden, key=lambda at: -float(probabilities[at, ids[at]]))[:count]
            for at in best:
                text[0, at] = ids[at]
    return text[0, len(prompt) :].tolist()


@given(data=st.data())
@settings(max_examples=15, **GIVEN)
def test_tokens_given_in_advance_stay_and_the_rest_is_the_released_loops(load, data):
    model = load("llama")
    rows = data.draw(st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3))
    steps, seed = data.draw(st.sampled_from([3, 6, 12])), data.draw(st.integers(0, 100))
    widths = data.draw(st.lists(st.integers(1, 6), min_size=len(rows), max_size=len(rows)))
    ids, mask = make_prompts(widths, seed)
    tokens = torch.randint(30, VOCAB, (len(rows), 12), generator=keyed_generator(seed))
    canvases = torch.where(torch.tensor(rows), tokens, MASK)
    chosen = SamplingSettings(12, 4, steps)
    found = rollout(model, ids, mask, chosen, mask_token_id=MASK, start=RolloutStart.from_ids(canvases))
    for row, canvas in enumerate(canvases.tolist()):
        prompt = ids[row][mask[row].bool()].tolist()
        assert found.ids[row, ids.shape[1] :].tolist() == released_loop(model, prompt, canvas, 4, steps)
        count = min(steps // 3, 12)
        hidden = [block.count(MASK) for block in (canvas[:4], canvas[4:8], canvas[8:])]
        assert found.passes[row] == sum(min(count, masks) for masks in hidden)
    assert (found.reveal_steps >= 0).eq(canvases == MASK).all()


# With a rule, a block that continues keeps the schedule of the whole block (`rest_of_schedule`); infilling counts gaps.
WITHOUT_RULE = [sampler for sampler in WITHOUT_CACHE if "parallel" not in sampler["sampler"]]


@given(case=cases(st.sampled_from(WITHOUT_RULE), block_length=12), data=st.data())
@settings(max_examples=15, **GIVEN)
def test_a_canvas_of_one_block_is_filled_like_a_text_with_gaps(load, case, data):
    model, seed = load("llama"), case["seed"]
    chosen = replace(case["settings"], cfg_scale=0.0)  # without guidance, which hides given tokens in a text with gaps
    length = chosen.gen_length
    shown = data.draw(st.lists(st.booleans(), min_size=length, max_size=length).filter(lambda row: not all(row)))
    ids, mask = make_prompts([4], seed)
    canvas = torch.randint(30, VOCAB, (1, length), generator=keyed_generator(seed)).masked_fill(
        ~torch.tensor([shown]), MASK
    )
    twins = [[keyed_generator(seed)], [keyed_generator(seed)]]
    options = {name: value for name, value in vars(chosen).items() if name != "gen_length"}
    found = rollout(
        model, ids, mask, chosen, mask_token_id=MASK, start=RolloutStart.from_ids(canvas), generator=twins[0]
    )
    text = torch.cat([ids, canvas], dim=1)
    expected = infill(model, text, text == MASK, mask_token_id=MASK, generator=twins[1], **options)
    assert torch.equal(found.ids, expected.ids)
    for name in ("logps", "entropies", "reveal_steps"):
        assert torch.equal(getattr(found, name), getattr(expected, name)[:, 4:])


def test_an_eos_in_the_full_blocks_of_the_start_ends_a_row_before_its_first_pass(load):
    ids, mask = make_prompts([3, 5], 0)
    canvas = torch.full((2, 12), MASK)
    canvas[:, :4] = 40
    canvas[0, 2] = 5
    options = {"mask_token_id": MASK, "gen_length": 12, "block_length": 4, "steps": 12, "eos_token_ids": [5]}
    found = rollout(load("llama"), ids, mask, start=RolloutStart.from_ids(canvas), **options)
    assert found.ids[0, 5:].tolist() == [40, 40, 5, 40, *[5] * 8]
    assert found.passes.tolist()[0] == found.forward_tokens.tolist()[0] == 0
    assert found.passes[1] > 0
    # All rows may be whole.
    alone = rollout(load("llama"), ids[:1], mask[:1], start=RolloutStart.from_ids(canvas[:1]), **options)
    assert torch.equal(alone.ids, found.ids[:1])


def test_what_the_eos_stop_replaces_loses_its_record(load):
    """The earlier run had no EOS stop, and revealed tokens after the end."""
    ids, mask = make_prompts([3], 0)
    options = {"mask_token_id": MASK, "gen_length": 12, "block_length": 4, "steps": 12}
    whole = rollout(load("llama"), ids, mask, **options)
    sampled = replace(whole, ids=torch.cat([ids, torch.tensor([[40, 40, 5, 40, *[41] * 8]])], dim=1))
    start = RolloutStart.from_rollout(sampled, 6, MASK)
    found = rollout(load("llama"), ids, mask, start=start, eos_token_ids=[5], **options)
    assert found.ids[0, 3:].tolist() == [40, 40, 5, 40, *[5] * 8]
    assert torch.equal(found.reveal_steps[0, :4], whole.reveal_steps[0, :4])
    assert found.reveal_steps[0, 4:].eq(-1).all()
    assert not found.logps[0, 4:].any()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"sampler": "parallel", "edit_threshold": 0.6}, "edit_threshold and editing may replace the tokens"),
        (CAUSAL, {}, "has a causal context, whose blocks begin with a pass for their first token"),
        ("llama", {"gen_length": 8}, r"start.ids must be \(1, 8\), got \(1, 12\)"),
    ],
)
def test_what_cannot_continue_is_refused_at_the_call(load, kind, changes, message):
    ids, mask = make_prompts([3], 0)
    model = load(kind)
    size = getattr(model.config, "block_size", None) or 4
    options = {"mask_token_id": MASK, "gen_length": 12, "block_length": size, "steps": 8} | changes
    with pytest.raises(ValueError, match=message):
        rollout_steps(model, ids, mask, start=RolloutStart.from_ids(torch.full((1, 12), MASK)), **options)
