"""Filling masks anywhere, compared with the slow reference; the rollout is the case in which the end is hidden."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import d1.sampling
from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import Rollout, infill, infill_steps
from tests.d1.sampling.reference import EDITORS, GIVEN, MASK, WITHOUT_CACHE, cases, check_row, make_prompts, sample

LENGTHS = {"mask_token_id": MASK, "block_length": 4, "steps": 6}


@pytest.fixture(params=["llada", "Dream", "modernbert", "sdar", "Fast_dLLM_Qwen"])
def model(request, load, kind_dirs):
    return load_model(kind_dirs[request.param]) if request.param == "modernbert" else load(request.param)


@given(
    case=cases(st.sampled_from([WITHOUT_CACHE[0], WITHOUT_CACHE[1], EDITORS[1]]), truncated=()),
    rows=st.lists(st.lists(st.booleans(), min_size=2, max_size=14), min_size=1, max_size=3),
)
@settings(max_examples=20, **GIVEN)
def test_hidden_positions_are_filled_as_by_the_reference_and_no_others(model, case, rows):
    size, seed = getattr(model.config, "block_size", None), case["seed"]
    rows[0][-1] = True
    for holes in rows:  # masks that see nothing else are all alike, so the most certain one is random
        holes[0 if size else len(holes) // 2] &= not (size or all(holes))
    ids, mask = make_prompts([len(row) for row in rows], seed)
    width = ids.shape[1]
    hidden = torch.zeros_like(mask, dtype=torch.bool)
    for row, holes in enumerate(rows):
        hidden[row, width - len(holes) :] = torch.tensor(holes)
    block_length = size or case["settings"].block_length
    steps = max(case["settings"].steps, -(-14 // block_length))
    chosen = replace(case["settings"], gen_length=14, block_length=block_length, steps=steps)
    generators = [keyed_generator(seed, row) for row in range(len(rows))]
    options = {name: value for name, value in vars(chosen).items() if name != "gen_length"}
    got = infill(model, ids, hidden, mask, mask_token_id=MASK, generator=generators, **options)
    assert torch.equal(got.ids[~hidden], ids[~hidden])
    assert (got.reveal_steps >= 0).eq(hidden).all()
    assert (got.logps[~hidden] == 0).all()
    for row, holes in enumerate(rows):
        twin, at = keyed_generator(seed, row), [i for i, is_hidden in enumerate(holes) if is_hidden]
        if at:
            own = replace(chosen, gen_length=len(at), steps=min(steps, len(at)))
            expected = sample(model, ids[row, width - len(holes) :].tolist(), own, twin, holes=at)
            record = [values[row : row + 1][:, hidden[row]] for values in (got.logps, got.reveal_steps, got.entropies)]
            counts = (got.passes[row : row + 1], got.forward_tokens[row : row + 1])
            check_row(Rollout(got.ids[row : row + 1], *record, *counts), 0, len(holes) - len(at), expected)
            written = [] if got.writes is None else [step for step in got.writes.steps[row].flatten() if step >= 0]
            assert len(written) == sum(map(len, expected.writes)) * (got.writes is not None)
        assert torch.equal(generators[row].get_state(), twin.get_state())


def test_a_block_model_says_that_it_sees_no_text_behind(kind_dirs, caplog):
    model = load_model(kind_dirs["sdar"])
    ids, _ = make_prompts([10], 0)
    hidden = torch.zeros(1, 10, dtype=torch.bool)
    hidden[0, 5] = True
    first = infill(model, ids, hidden, mask_token_id=MASK)
    assert "this qwen3 has blocks of 4 tokens and sees no block after that of a hidden position" in caplog.text
    ids[0, 8:] += 1
    assert torch.equal(infill(model, ids, hidden, mask_token_id=MASK).logps, first.logps)
    caplog.clear()
    infill(model, ids[:, :8], hidden[:, :8], mask_token_id=MASK)
    assert not caplog.text  # the rest belongs to its own block
    hidden[0, 1] = True
    with pytest.raises(ValueError, match="steps must be at least 2, one for each of the model's blocks"):
        infill_steps(model, ids, hidden, mask_token_id=MASK, steps=1)
    with pytest.raises(ValueError, match="block_length must be 4 or left out, not 3"):
        infill(model, ids, hidden, mask_token_id=MASK, block_length=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(1, 6).bool()}, "nothing to fill"),
        *(({"hidden": hidden}, r"must be \(rows, length\)") for hidden in (torch.ones(1, 6), torch.ones(1, 5).bool())),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "are padding"),
        ({"steps": 0}, "steps must be an integer in"),
        ({"steps": 1}, "between 2 and 6 steps, got 1"),
        ({"sampler": "cached"}, "hidden positions may be anywhere: use the sampler exact or parallel"),
        ({"generator": [keyed_generator(0)] * 2}, "one generator per row"),
        ({"stop_entropy": 0.1}, "stop_entropy 0.1 is for models with uniform noise"),
        ({"output": "draw"}, "output draw is for models with uniform noise"),
        ({"first_token": "causal"}, "for models with a causal context"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_pass(kind_dirs, change, message):
    model = load_model(kind_dirs["llada"])
    model.register_forward_pre_hook(lambda *_: pytest.fail("ran the model"))
    ids, _ = make_prompts([6], 0)
    with pytest.raises(ValueError, match=message):
        infill_steps(model, **{"ids": ids, "hidden": torch.ones(1, 6).bool(), **LENGTHS, **change})


def test_the_old_names_warn(kind_dirs):
    ids, _ = make_prompts([6], 0)
    given = {"model": load_model(kind_dirs["llada"]), "ids": ids.int(), "hidden": torch.ones(1, 6).bool(), **LENGTHS}
    expected = infill(**(given | {"ids": ids}))
    with pytest.warns(FutureWarning, match="fill is now infill"):
        found = d1.sampling.fill(**given)
    assert torch.equal(found.ids, expected.ids)
    with pytest.warns(FutureWarning, match="fill_steps is now infill_steps"):
        assert len([*d1.sampling.fill_steps(**given)]) == len([*infill_steps(**given)])
