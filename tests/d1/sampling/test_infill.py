"""Filling masks anywhere, compared with a plain loop; the rollout is the case in which the end is hidden."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import SamplingSettings, fill, fill_steps, rollout
from tests.d1.sampling.reference import MASK, SAMPLERS, VOCAB, count_by_rule, make_prompts, parts, sharper

GIVEN = {"max_examples": 20, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
WITHOUT_CACHE = [sampler for sampler in SAMPLERS if "cached" not in sampler["sampler"]]
LENGTHS = {"mask_token_id": MASK, "block_length": 4, "steps": 6}


@pytest.fixture(params=["llada", "Dream", "modernbert", "sdar", "Fast_dLLM_Qwen"], scope="module")
def model(request, kind_dirs):
    loaded = load_model(kind_dirs[request.param])
    return loaded if request.param == "modernbert" else sharper(loaded)


def slow_fill(model, ids, hidden, block_length, steps, temperature, cfg_scale, remasking, level, generator):
    """One row without padding: id, log-prob, entropy and step of each hidden position, in Python's own numbers."""
    ids, size = list(ids), getattr(model.config, "block_size", None)
    places = [i for i, is_hidden in enumerate(hidden) if is_hidden]
    given = [i for i in range(len(ids)) if i not in places]
    steps = min(steps, len(places))
    if size:
        blocks = [[i for i in places if i // size == block] for block in sorted({i // size for i in places})]
        counts = [1] * len(blocks)
        while sum(counts) < steps:
            rates = [len(block) / count for block, count in zip(blocks, counts, strict=True)]
            counts[rates.index(max(rates))] += 1
    else:
        number = -(-len(places) // block_length)
        blocks, counts = [], parts(steps, number)
        for length in parts(len(places), number):
            blocks.append(places[sum(map(len, blocks)) :][:length])
    for i in places:
        ids[i] = MASK
    record, taken = {}, 0
    for block, count in zip(blocks, counts, strict=True):
        left, scheduled = sorted(block), 0
        for due in parts(len(block), count):
            scheduled += due
            if not left:
                break
            blind = [MASK if i in given else token for i, token in enumerate(ids)]
            with torch.no_grad():
                logits, other = model(input_ids=torch.tensor([ids, blind])).logits.double()
            logits = other + (cfg_scale + 1) * (logits - other)
            uniform = torch.rand(len(left), VOCAB, generator=generator).clamp(min=2.0**-25) if temperature else None
            drawn = torch.rand(len(left), generator=generator).tolist() if remasking == "random" else None
            guesses = []
            for number, i in enumerate(left):
                logps = logits[i].log_softmax(-1)
                scores = logits[i].clone()
                if temperature:
                    scores -= temperature * (-torch.log1p(-uniform[number])).log()
                scores[MASK] = -math.inf
                token = int(scores.argmax())
                score = drawn[number] if drawn else logps[token].item()
                guesses.append((-score, i, token, logps[token].item(), -(logps.exp() * logps).sum().item()))
            guesses.sort()
            now = scheduled - (len(block) - len(left))
            if level is not None:
                sure = count_by_rule("threshold", level, [math.exp(guess[3]) for guess in guesses], [0.0] * len(left))
                now = max(1, now, sure)
            for _, i, token, logp, entropy in guesses[:now]:
                ids[i], record[i] = token, (token, logp, entropy, taken)
                left.remove(i)
            taken += 1
    return record, taken


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(2, 14), min_size=1, max_size=3))
    block_length = draw(st.integers(1, 8))
    level = draw(st.sampled_from([None, 0.4]))
    return {
        "rows": [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for length in lengths],
        "block_length": block_length,
        "steps": draw(st.integers(-(-14 // block_length), 15)),
        "temperature": draw(st.sampled_from([0.0, 0.8])),
        "cfg_scale": draw(st.sampled_from([0.0, 0.5])),
        "remasking": "low_confidence" if level else draw(st.sampled_from(["low_confidence", "random"])),
        "level": level,
        "seed": draw(st.integers(0, 1000)),
    }


@given(case=cases())
@settings(**GIVEN)
def test_hidden_places_are_filled_as_by_a_plain_loop_and_no_others(model, case):
    size, rows, seed = getattr(model.config, "block_size", None), case["rows"], case["seed"]
    rows[0][-1] = True
    for places in rows:  # masks that see nothing else are all alike, so the most certain one is random
        places[0 if size else len(places) // 2] &= not (size or all(places))
    ids, mask = make_prompts([len(row) for row in rows], seed)
    width = ids.shape[1]
    hidden = torch.zeros_like(mask, dtype=torch.bool)
    for row, places in enumerate(rows):
        hidden[row, width - len(places) :] = torch.tensor(places)
    generators = [keyed_generator(seed, row) for row in range(len(rows))]
    names = ("steps", "temperature", "cfg_scale", "remasking")
    options = {name: case[name] for name in names} | {"block_length": size or case["block_length"]}
    if case["level"]:
        options |= {"sampler": "parallel", "reveal_level": case["level"]}
    got = fill(model, ids, hidden, mask, mask_token_id=MASK, generator=generators, **options)
    assert torch.equal(got.ids[~hidden], ids[~hidden])
    assert (got.reveal_steps >= 0).eq(hidden).all()
    assert (got.logps[~hidden] == 0).all()
    for row, places in enumerate(rows):
        at, twin = width - len(places), keyed_generator(seed, row)
        own = [case[name] for name in ("block_length", *names, "level")]
        expected, taken = slow_fill(model, ids[row, at:].tolist(), places, *own, twin)
        for place, (token, logp, entropy, step) in expected.items():
            column = row, at + place
            assert (got.ids[column].item(), got.reveal_steps[column].item()) == (token, step)
            assert got.logps[column].item() == pytest.approx(logp, abs=2e-5)
            assert got.entropies[column].item() == pytest.approx(entropy, abs=2e-5)
        branches = 2 if case["cfg_scale"] else 1
        assert (got.passes[row].item(), got.forward_tokens[row].item()) == (taken, taken * len(places) * branches)
        assert torch.equal(generators[row].get_state(), twin.get_state())


@pytest.mark.parametrize("sampler", WITHOUT_CACHE, ids=str)
def test_a_rollout_is_the_filling_of_a_hidden_end(model, sampler):
    size = getattr(model.config, "block_size", None)
    ids, mask = make_prompts([6, 1, 4, 3], 5)
    ids, mask = torch.cat([ids, ids[:, :1].expand(-1, 11)], 1), torch.cat([mask, torch.ones(4, 11).long()], 1)
    hidden = torch.arange(17).expand(4, -1) >= 6

    def options():
        return {"mask_token_id": MASK, "generator": [keyed_generator(1, row) for row in range(4)]}

    settings = {"block_length": size or 4, "steps": 8, "temperature": 0.8, "cfg_scale": 0.5, **sampler}
    whole = rollout(model, ids[:, :6], mask[:, :6], SamplingSettings(11, **settings), **options(), recompute=True)
    got = fill(model, ids, hidden, mask, **settings, **options())
    for name in ("ids", "passes", "forward_tokens"):
        assert torch.equal(getattr(got, name), getattr(whole, name)), name
    assert torch.equal(got.reveal_steps[:, 6:], whole.reveal_steps)
    for name in ("logps", "entropies"):  # in a block model, groups of other rows are filled together
        torch.testing.assert_close(getattr(got, name)[:, 6:], getattr(whole, name), rtol=0, atol=2e-5)
        assert size or torch.equal(getattr(got, name)[:, 6:], getattr(whole, name))


def test_a_block_model_says_that_it_sees_no_text_behind(kind_dirs, caplog):
    model = load_model(kind_dirs["sdar"])
    ids, _ = make_prompts([10], 0)
    hidden = torch.zeros(1, 10, dtype=torch.bool)
    hidden[0, 5] = True
    first = fill(model, ids, hidden, mask_token_id=MASK)
    assert "this qwen3 has blocks of 4 tokens and sees no block after that of a hidden position" in caplog.text
    ids[0, 8:] += 1
    assert torch.equal(fill(model, ids, hidden, mask_token_id=MASK).logps, first.logps)
    caplog.clear()
    fill(model, ids[:, :8], hidden[:, :8], mask_token_id=MASK)
    assert not caplog.text  # the rest belongs to its own block
    with pytest.raises(ValueError, match="block_length must be 4 or left out, not 3"):
        fill(model, ids, hidden, mask_token_id=MASK, block_length=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(1, 6).bool()}, "nothing to fill"),
        ({"hidden": torch.ones(1, 6)}, "hidden must be bool"),
        ({"hidden": torch.ones(1, 5).bool()}, r"must be \(rows, length\)"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "are padding"),
        ({"steps": 0}, "steps must be positive"),
        ({"steps": 1}, "between 2 and 6 steps, got 1"),
        ({"block_length": 0}, "block_length must be positive"),
        ({"sampler": "cached"}, "hidden positions may be anywhere: use the sampler exact or parallel"),
        ({"generator": [keyed_generator(0)] * 2}, "one generator per row"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_pass(kind_dirs, change, message):
    model = load_model(kind_dirs["llada"])
    model.register_forward_pre_hook(lambda *_: pytest.fail("ran the model"))
    ids, _ = make_prompts([6], 0)
    with pytest.raises(ValueError, match=message):
        fill_steps(model, **{"ids": ids, "hidden": torch.ones(1, 6).bool(), **LENGTHS, **change})
