"""The approximate samplers: what they share with the exact one, what they count, and the rules alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import rollout
from d1.sampling.caches import CACHES
from d1.sampling.reveal import RULES
from tests.d1.sampling.reference import MASK, SAMPLERS, count_by_rule, make_prompts, sharper

LENGTHS = {"mask_token_id": MASK, "gen_length": 12, "block_length": 4, "steps": 6}


@pytest.fixture(params=["llama", "llada", "Dream"], scope="module")  # Dream's logits predict the next token
def model(request, kind_dirs):
    return sharper(load_model(kind_dirs[request.param]))


def test_a_cache_renewed_in_every_step_is_exact(model):
    ids, mask = make_prompts([6, 2, 4], 0)
    lengths = {"mask_token_id": MASK, "gen_length": 8, "block_length": 1, "steps": 8}  # each block is one step
    exact = rollout(model, ids, mask, **lengths)
    for cache in [*CACHES][:-1]:
        cached = rollout(model, ids, mask, sampler="cached", kv_cache=cache, **lengths)
        assert torch.equal(cached.ids, exact.ids)
        torch.testing.assert_close(cached.logps, exact.logps, rtol=0, atol=1e-5)
        assert torch.equal(cached.forward_tokens, exact.forward_tokens)


@pytest.mark.parametrize("sampler", ["cached", "cached+parallel"])
def test_a_lasting_cache_is_the_delayed_one_in_a_single_block_and_feeds_less_in_several(model, sampler):
    ids, mask = make_prompts([6, 2, 4], 0)
    for block_length in (12, 3):
        lengths = LENGTHS | {"block_length": block_length, "steps": 8, "sampler": sampler}
        delayed, lasting = (rollout(model, ids, mask, kv_cache=cache, **lengths) for cache in ("delayed", "lasting"))
        if block_length == 12:
            assert torch.equal(delayed.ids, lasting.ids)
            assert torch.equal(delayed.forward_tokens, lasting.forward_tokens)
            torch.testing.assert_close(delayed.logps, lasting.logps, rtol=0, atol=1e-5)
        else:
            assert (lasting.forward_tokens < 0.8 * delayed.forward_tokens).all()


@pytest.mark.parametrize("steps", [6, 12])
@pytest.mark.parametrize(("reveal", "level"), [("threshold", 1.0), ("factor", 0.0)])
def test_a_rule_that_nothing_meets_leaves_the_schedule(model, steps, reveal, level):
    ids, mask = make_prompts([6, 2, 4], 1)
    lengths = LENGTHS | {"steps": steps, "temperature": 0.7}
    runs = []
    for sampler in ({}, {"sampler": "parallel", "reveal": reveal, "reveal_level": level}):
        generators = [keyed_generator(2, row) for row in range(3)]
        runs.append(rollout(model, ids, mask, generator=generators, **lengths, **sampler))
    exact, parallel = runs
    assert torch.equal(exact.ids, parallel.ids)
    assert torch.equal(exact.passes, parallel.passes)
    assert exact.passes.tolist() == [steps] * 3


def test_log_probs_are_those_of_the_step_that_revealed_the_token(model):
    ids, mask = make_prompts([5], 2)
    got = rollout(model, ids, mask, mask_token_id=MASK, gen_length=6, block_length=6, steps=1)
    canvas = torch.cat([ids, torch.full((1, 6), MASK)], dim=1)
    with torch.no_grad():
        expected = model(input_ids=canvas).logits[:, 5:].log_softmax(-1).gather(-1, got.ids[:, 5:, None]).squeeze(-1)
    torch.testing.assert_close(got.logps, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
def test_counts_are_what_the_body_was_fed(model, sampler, cfg_scale):
    name = sampler["sampler"]
    fed = []
    hook = model.base_model.register_forward_pre_hook(
        lambda body, args, kwargs: fed.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    ids, mask = make_prompts([6] * 5, 4)
    lengths = LENGTHS | {"steps": 12 if "parallel" in name else 6, "cfg_scale": cfg_scale}
    got = rollout(model, ids, mask, **lengths, **sampler)
    hook.remove()
    all_fed = sum(rows * length for rows, length in fed)
    if name == "cached+parallel" and sampler["kv_cache"] in ("delayed", "lasting"):
        # Each row's own positions; rows with fewer positions than others are padded.
        assert 0.7 * all_fed < got.forward_tokens.sum() <= all_fed
    else:
        assert got.forward_tokens.sum() == all_fed
    assert got.passes.sum() * (2 if cfg_scale else 1) == sum(rows for rows, _ in fed)
    assert got.passes.max() <= lengths["steps"]
    if "parallel" in name:
        assert len(got.passes.unique()) > 1, "no row took fewer passes than another: the test shows nothing"
    if name == "cached":
        # Each of the three blocks takes two passes, and each pass reveals two of the block's four tokens.
        fed = {
            "prefix": 3 * 18 + (12 + 8 + 4),
            "dual": 3 * 18 + 3 * 4,
            "delayed": 3 * 18 + 3 * 4,
            "lasting": 18 + 4 + (2 + 4) + 4 + (2 + 4) + 4,
        }[sampler["kv_cache"]]
        # The token before the window, or before each hidden token.
        shift = {"prefix": 3, "dual": 3, "delayed": 3 * 2, "lasting": 2 + 4 + 2 + 4 + 2}[sampler["kv_cache"]]
        fed += shift * int(getattr(model.config, "predicts_next_token", False))
        assert got.forward_tokens.tolist() == [fed * (2 if cfg_scale else 1)] * 5


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_the_eos_stop_changes_no_token_up_to_the_eos(model, sampler):
    ids, mask = make_prompts([6, 2, 4, 6, 6, 1], 1)

    def run(ends):
        generators = [keyed_generator(5, row) for row in range(6)]
        lengths = LENGTHS | {"temperature": 0.8}
        return rollout(model, ids, mask, generator=generators, eos_token_ids=ends, **lengths, **sampler)

    full = run(None)
    words, counts = full.ids[:, 6:].unique(return_counts=True)
    ends = words[counts.argsort(descending=True)][:3]
    stopped = run(ends.tolist())
    is_end = torch.isin(full.ids[:, 6:], ends)
    before = is_end.cumsum(1) - is_end.long() == 0
    assert torch.equal(full.ids[:, 6:][before], stopped.ids[:, 6:][before])
    assert torch.equal(full.reveal_steps[before], stopped.reveal_steps[before])
    for name in ("logps", "entropies"):
        torch.testing.assert_close(getattr(full, name)[before], getattr(stopped, name)[before], rtol=0, atol=1e-5)
    assert stopped.forward_tokens.sum() < full.forward_tokens.sum()
    assert (stopped.forward_tokens <= full.forward_tokens).all()


@given(
    places=st.lists(st.tuples(st.integers(1, 97), st.integers(0, 89)), min_size=1, max_size=8), step=st.integers(0, 40)
)
@settings(max_examples=200, deadline=None)
def test_rules_count_as_their_papers_say(places, step):
    probabilities = sorted((place / 97 for place, _ in places), reverse=True)
    entropies = [place / 30 for _, place in places]
    level = step / 10 + math.pi / 1000  # no sum of these fractions equals it, so rounding has no effect
    for reveal, rule in RULES.items():
        logps, nats = torch.tensor([probabilities]).double().log(), torch.tensor([entropies]).double()
        expected = count_by_rule(reveal, level, probabilities, entropies)
        assert rule.count(logps, nats, level).item() == expected


def test_a_threshold_is_met_by_what_exceeds_it():
    certain = torch.zeros(1, 3)
    assert RULES["threshold"].count(certain, certain, 1.0).item() == 0
    assert RULES["threshold"].count(certain - 1e-3, certain, 0.0).item() == 3


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bert", "no key-value cache"),
        ("roberta", "no key-value cache"),
        ("modernbert", "no key-value cache"),
        ("gemma2", "windowed attention"),
        ("gemma3_text", "windowed attention"),
    ],
)
def test_kinds_that_no_cache_is_right_for_are_refused_by_name(kind_dirs, kind, message):
    model = load_model(kind_dirs[kind])
    ids, mask = make_prompts([4, 2], 0)
    with pytest.raises(ValueError, match=f"{kind}.*{message}.*parallel"):
        rollout(model, ids, mask, sampler="cached", **LENGTHS)
    assert rollout(model, ids, mask, sampler="parallel", reveal_level=0.2, **LENGTHS).ids.shape == (2, 16)


def test_parallel_refuses_draws_that_rows_would_share(model):
    ids, mask = make_prompts([4, 2], 0)
    with pytest.raises(ValueError, match="one per row"):
        rollout(model, ids, mask, temperature=1.0, generator=keyed_generator(0), sampler="parallel", **LENGTHS)
