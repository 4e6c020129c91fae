"""The exact cache of block-causal models: equal to recomputing everything, with a counted part of the tokens."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import SamplingSettings, rollout
from tests.d1.sampling.reference import MASK, SAMPLERS, make_prompts, sharper

GIVEN = {"max_examples": 20, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
WITHOUT_CACHE = [sampler for sampler in SAMPLERS if "cached" not in sampler["sampler"]]
KINDS = [("sdar", "sdpa"), ("sdar_moe", "eager"), ("Fast_dLLM_Qwen", "sdpa"), ("llada2_moe", "sdpa")]


@pytest.fixture(params=KINDS, ids=str, scope="module")
def model(request, kind_dirs):
    kind, kernel = request.param
    return sharper(load_model(kind_dirs[kind], attn_implementation=kernel))


@st.composite
def cases(draw):
    gen_length, block_length = draw(st.integers(1, 14)), draw(st.integers(1, 15))
    sampler = draw(st.sampled_from(WITHOUT_CACHE))
    return {
        "widths": draw(st.lists(st.integers(1, 11), min_size=1, max_size=4)),
        "settings": SamplingSettings(
            gen_length=gen_length,
            block_length=block_length,
            steps=draw(st.integers(-(-gen_length // block_length), gen_length)),
            temperature=draw(st.sampled_from([0.0, 0.8])),
            cfg_scale=draw(st.sampled_from([0.0, 0.0, 0.5])),
            remasking="low_confidence" if "reveal" in sampler else draw(st.sampled_from(["low_confidence", "random"])),
            **sampler,
        ),
        "ends": draw(st.sampled_from([None, list(range(4, 16))])),
        "seed": draw(st.integers(0, 1000)),
    }


def sample(model, ids, mask, case, rows, **options):
    """A rollout of `rows`, each with the generator that it has in any batch, and the real tokens that were computed."""
    fed = []

    def count(body, args, kwargs):
        tokens, seen = kwargs["input_ids"], kwargs["attention_mask"]
        fed.append(tokens.numel() if seen is None else int(seen[:, -tokens.shape[1] :].sum()))

    hook = model.base_model.register_forward_pre_hook(count, prepend=True, with_kwargs=True)
    generators = [keyed_generator(case["seed"], row) for row in rows]
    options |= {"mask_token_id": MASK, "generator": generators, "eos_token_ids": case["ends"], "other_blocks": True}
    got = rollout(model, ids[rows], mask[rows], case["settings"], **options)
    hook.remove()
    return got, sum(fed)


def tokens_of(steps, width, block_length, size):
    """The tokens that a row's `reveal_steps` cost: for each block its steps times the model's blocks that it touches,
    and once each token before the last block that was filled."""
    length, total, start, stored = len(steps), 0, 0, 0
    while start < length and steps[start] >= 0:
        end = min((width + start) // block_length * block_length + block_length - width, length)
        begins, ends = (width + start) // size * size, min(-((width + end) // -size) * size, width + length)
        total, stored = total + len(set(steps[start:end])) * (ends - begins), begins
        start = end
    return total + stored


def same(one, other):
    for name in ("ids", "reveal_steps", "passes"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("logps", "entropies"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=2e-5)


EMPTY = {  # all-masked positions are alike, so the order is random
    "widths": [0, 5, 10],
    "settings": SamplingSettings(14, 5, 14, 0.8, remasking="random"),
    "ends": None,
    "seed": 0,
}
EARLY = {  # rows wait for others in their block, leave at an end, and form several groups
    "widths": [7, 2, 2, 7, 2],
    "settings": SamplingSettings(14, 5, 14, 0.8, 0.5, sampler="parallel", reveal_level=0.3),
    "ends": list(range(4, 10)),
    "seed": 1,
}


@given(case=cases())
@example(case=EMPTY)
@example(case=EARLY)
@settings(**GIVEN)
def test_the_cache_changes_nothing_but_the_tokens_fed_which_are_counted(model, case):
    widths, chosen = case["widths"], case["settings"]
    ids, mask = make_prompts([max(width, 1) for width in widths], case["seed"])
    mask[torch.tensor(widths) == 0] = 0
    rows = list(range(len(widths)))
    got, fed = sample(model, ids, mask, case, rows)
    whole, fed_by_all = sample(model, ids, mask, case, rows, recompute=True)
    same(got, whole)
    branches = 2 if chosen.cfg_scale else 1
    lengths = [chosen.block_length, model.config.block_size]
    costs = [tokens_of(*row, *lengths) * branches for row in zip(got.reveal_steps.tolist(), widths, strict=True)]
    assert got.forward_tokens.tolist() == costs
    assert whole.forward_tokens.tolist() == [
        passes * (width + chosen.gen_length) * branches
        for passes, width in zip(whole.passes.tolist(), widths, strict=True)
    ]
    assert (fed, fed_by_all) == (sum(costs), whole.forward_tokens.sum())
    alone, _ = sample(model, ids, mask, case, rows[-1:])
    last = {name: getattr(got, name)[-1:] for name in vars(got) if name != "writes"}
    same(alone, type(got)(**last))


def test_a_block_costs_its_steps_and_one_more(kind_dirs):
    """An upper limit, because the last block is never stored."""
    model = load_model(kind_dirs["sdar"])
    ids, mask = make_prompts([8] * 2, 0)
    got = rollout(model, ids, mask, mask_token_id=MASK, gen_length=16, block_length=4, steps=8)
    assert got.forward_tokens.tolist() == [8 + 4 * (2 + 1) * 4 - 4] * 2
    assert got.passes.tolist() == [8] * 2
