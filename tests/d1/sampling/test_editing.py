"""Samplers that edit: every pass, write and stop of the rule against the slow reference, alone and in batches."""

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d1.models import load_model
from d1.sampling import SamplingSettings, fill, rollout, rollout_steps
from tests.d1.sampling.reference import EDITORS, MASK, make_prompts, sharper
from tests.d1.sampling.test_reference import TRUNCATED, check_against_the_reference
from tests.d1.sampling.test_stream import ENDS, WIDTHS, generators, stream

GIVEN = {"max_examples": 25, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
KINDS = ["llama", "Dream", "Fast_dLLM_Qwen"]


@pytest.fixture(params=KINDS, scope="module")
def model(request, kind_dirs):
    return sharper(load_model(kind_dirs[request.param]))


@st.composite
def cases(draw, size):
    gen_length = draw(st.integers(1, 12))
    block_length = size or draw(st.integers(1, 14))
    temperature = draw(st.sampled_from([0.0, 0.8]))
    level, edit = draw(st.floats(0.05, 0.99)), draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9]))
    chosen = SamplingSettings(
        gen_length=gen_length,
        block_length=block_length,
        steps=draw(st.integers(-(-gen_length // block_length), gen_length)),
        temperature=temperature,
        cfg_scale=draw(st.sampled_from([0.0, 0.0, 0.5])),
        sampler="parallel",
        reveal=draw(st.sampled_from(["threshold", "factor", "entropy"])),
        reveal_level=level,
        edit_threshold=edit,
        max_post_steps=draw(st.integers(0, 4)),
        **draw(st.sampled_from([{}, *TRUNCATED] if temperature else [{}])),
    )
    widths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    ends = draw(st.sampled_from([None, list(range(4, 20))]))
    return {"widths": widths, "settings": chosen, "seed": draw(st.integers(0, 1000)), "ends": ends}


@given(data=st.data())
@settings(**GIVEN)
def test_every_write_is_the_references(model, data):
    check_against_the_reference(model, data.draw(cases(getattr(model.config, "block_size", None))))


@pytest.mark.parametrize("editor", EDITORS[1:4], ids=str)
def test_rows_of_a_stream_are_those_of_a_batch(model, editor):
    ids, mask = make_prompts(WIDTHS, 0)
    chosen = SamplingSettings(11, getattr(model.config, "block_size", None) or 4, 7, temperature=0.8, **editor)
    options = {"mask_token_id": MASK, "generator": generators(len(ids)), "eos_token_ids": ENDS}
    expected = rollout(model, ids, mask, chosen, **options)
    got, _ = stream(model, ids, mask, chosen, 4, ENDS)
    assert torch.equal(got["ids"], expected.ids[:, ids.shape[1] :])
    assert torch.equal(got["written ids"], expected.writes.ids)
    assert torch.equal(got["written steps"], expected.writes.steps)
    assert torch.equal(got["passes"], expected.passes)


def test_the_exact_cache_changes_nothing_and_edits_happen(kind_dirs):
    model = sharper(load_model(kind_dirs["sdar"]))
    ids, mask = make_prompts([9, 4, 5, 2], 1)
    options = {"mask_token_id": MASK, "gen_length": 14, "block_length": 4, "steps": 14}
    for editor in EDITORS:
        cached = rollout(model, ids, mask, **options, **editor)
        plain = rollout(model, ids, mask, recompute=True, **options, **editor)
        assert torch.equal(cached.ids, plain.ids)
        assert torch.equal(cached.writes.steps, plain.writes.steps)
        # With a budget of 0, only what was revealed before the last mask can be edited.
        assert (cached.edits > 0).any() or editor.get("max_post_steps") == 0


class Scripted(torch.nn.Module):
    """A head that predicts at each pass what a script says, whatever it reads."""

    def __init__(self, model, script):
        super().__init__()
        self.script, self.calls, self.weight = script, 0, model.lm_head.weight

    def forward(self, states):
        rows = [
            [math.log(p) if token == k else math.log((1 - p) / 63) for k in range(64)]
            for token, p in self.script[min(self.calls, len(self.script) - 1)]
        ]
        self.calls += 1
        return torch.tensor(rows).expand(states.shape[0], -1, -1) if states.dim() == 3 else torch.tensor(rows)


def scripted(kind_dirs, script, **chosen):
    model = load_model(kind_dirs["llama"])
    model.lm_head = Scripted(model, script)
    ids, mask = make_prompts([3], 0)
    given = {"gen_length": 2, "block_length": 2, "steps": 2, "sampler": "parallel", "reveal_level": 0.5} | chosen
    return rollout(model, ids, mask, mask_token_id=MASK, **given)


def test_a_block_ends_after_a_pass_without_masks_and_edits(kind_dirs):
    script = [[(5, 0.9), (6, 0.2)], [(7, 0.8), (6, 0.9)], [(7, 0.9), (8, 0.4)]]
    got = scripted(kind_dirs, script, edit_threshold=0.5)
    # Pass 0 reveals a 5; pass 1 replaces it by a 7, with masks left, and reveals a 6; pass 2 would write an 8 of 0.4.
    assert got.ids[0, 3:].tolist() == [7, 6]
    assert (got.passes.item(), got.edits.item()) == (3, 1)
    assert got.writes.ids[0, :, :2].tolist() == [[5, 7], [6, 0]]
    assert got.first_ids[0].tolist() == [*got.ids[0, :3].tolist(), 5, 6]
    assert got.writes.steps[0, :, :2].tolist() == [[0, 1], [1, -1]]
    torch.testing.assert_close(got.writes.logps[0, 0, :2].exp(), torch.tensor([0.9, 0.8]))


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_block_ends_when_its_budget_is_spent(kind_dirs, budget):
    unsettled = [[(5 + n % 2, 0.9), (7 + n % 2, 0.9)] for n in range(40)]
    got = scripted(kind_dirs, unsettled, edit_threshold=0.5, max_post_steps=budget)
    assert (got.passes.item(), got.edits.item()) == (1 + budget, 2 * budget)


def test_at_zero_an_edit_of_any_probability_is_made_and_unset_none(kind_dirs):
    script = [[(5, 0.9), (6, 0.9)], [(7, 0.02), (6, 0.9)]]
    assert scripted(kind_dirs, script, edit_threshold=0.0).ids[0, 3:].tolist() == [7, 6]
    assert scripted(kind_dirs, script, edit_threshold=0.1).ids[0, 3:].tolist() == [5, 6]
    unset = scripted(kind_dirs, script)
    assert (unset.ids[0, 3:].tolist(), unset.passes.item(), unset.writes) == ([5, 6], 1, None)


def test_an_editor_that_never_edits_fills_like_the_sampler_without(model):
    """At a threshold that no prediction reaches, greedy tokens are those without editing, for one more pass a block."""
    ids, mask = make_prompts([6, 3, 1], 4)
    size = getattr(model.config, "block_size", None) or 4
    chosen = SamplingSettings(12, size, 9, sampler="parallel", reveal_level=0.5)
    plain = rollout(model, ids, mask, chosen, mask_token_id=MASK)
    editing = dataclasses.replace(chosen, edit_threshold=0.999999)
    edited = rollout(model, ids, mask, editing, mask_token_id=MASK)
    assert torch.equal(plain.ids, edited.ids)
    assert not edited.edits.any()
    assert (edited.passes > plain.passes).all()


def test_a_model_that_does_not_say_that_it_learnt_to_edit_is_warned_of_once(kind_dirs, caplog):
    model = load_model(kind_dirs["llama"])
    ids, mask = make_prompts([3], 0)
    chosen = {"mask_token_id": MASK, "gen_length": 4, "block_length": 4, "steps": 4}
    rollout(model, ids, mask, **chosen)
    model.config.edit_noise = "uniform"
    rollout(model, ids, mask, **chosen, **EDITORS[0])
    assert not caplog.records
    del model.config.edit_noise
    model.config.name_or_path = "a model trained on masks"
    for _ in range(2):
        rollout(model, ids, mask, **chosen, **EDITORS[0])
    assert [record.getMessage() for record in caplog.records] == [caplog.records[0].getMessage()]
    assert "a model trained on masks: nothing in its config says that it learnt to correct" in caplog.text


def test_holes_are_edited_and_the_text_around_them_stays(kind_dirs):
    model = sharper(load_model(kind_dirs["llama"]))
    ids, _ = make_prompts([12, 12], 2)
    hidden = torch.zeros(2, 12, dtype=torch.bool)
    hidden[0, 3:7], hidden[1, [0, 5, 11]] = True, True
    got = fill(model, ids, hidden, mask_token_id=MASK, **EDITORS[1])
    assert torch.equal(got.ids[~hidden], ids[~hidden])
    assert got.edits.sum() > 0
    assert ((got.writes.steps >= 0).any(-1) == hidden).all()


def test_steps_name_what_they_write(kind_dirs):
    model = sharper(load_model(kind_dirs["sdar"]))
    ids, mask = make_prompts([5], 2)
    canvas = torch.full((1, 12), MASK)
    steps = rollout_steps(model, ids, mask, SamplingSettings(12, 4, 12, **EDITORS[1]), mask_token_id=MASK)
    for step in steps:
        at = step.positions[0][step.revealed[0]] - 5
        assert (canvas[0, at] != step.ids[0][step.revealed[0]]).all()  # an edit writes another token
        canvas[0, at] = step.ids[0][step.revealed[0]]
        assert torch.equal(canvas[0], step.canvas[0, 5:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampler": "exact", "edit_threshold": 0.5}, "would be ignored by the sampler exact: choose a parallel one"),
        ({"sampler": "exact", "editing": "speed"}, "would be ignored by the sampler exact: choose a parallel one"),
        ({"edit_threshold": 1.0}, r"edit_threshold must be in \[0, 1\), got 1.0"),
        ({"edit_threshold": "0.5x"}, r"edit_threshold must be in \[0, 1\)"),
        ({"edit_threshold": 0.5, "max_post_steps": -1}, r"max_post_steps must be an integer in \[0, 256\], got -1"),
        ({"max_post_steps": 3}, "max_post_steps would be ignored: nothing is edited"),
        ({"editing": "fast"}, "editing must be one of quality, speed, got 'fast'"),
        ({"editing": "speed", "reveal": "factor"}, "has a level of the rule threshold, not of factor"),
        ({"sampler": "cached+parallel", "edit_threshold": 0.5}, "use the sampler parallel, which is exact"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**{"gen_length": 12, "block_length": 4, "steps": 12, "sampler": "parallel"} | fields)


def test_the_presets_are_llada21s_and_single_values_win():
    def in_use(**fields):
        chosen = SamplingSettings(64, 32, 64, sampler="parallel", **fields)
        return chosen.level, chosen.edits, chosen.post_steps

    assert in_use() == (0.9, None, 0)
    assert in_use(editing="quality") == (0.7, 0.5, 16)
    assert in_use(editing="speed") == (0.5, 0.0, 16)
    assert in_use(editing="speed", edit_threshold=0.9, max_post_steps=2, reveal_level=0.95) == (0.95, 0.9, 2)
    assert SamplingSettings(64, 32, 64, sampler="parallel", editing="speed").most_passes() == 64 + 2 * 16
