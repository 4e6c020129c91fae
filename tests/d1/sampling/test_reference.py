"""Every rollout and its record, compared with one slow reference."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import d1.models.head
from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import SamplingSettings, rollout
from d1.sampling.reveal import REMASKING
from tests.d1.sampling import reference
from tests.d1.sampling.reference import MASK, SAMPLERS, VOCAB, make_prompts, sharper

GIVEN = {"max_examples": 25, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.fixture(params=["llama", "llada", "Dream"], scope="module")  # Dream's logits predict the next token
def model(request, kind_dirs):
    return sharper(load_model(kind_dirs[request.param]))


TRUNCATED = [{"top_k": 3}, {"top_p": 0.7, "record_as_sampled": True}]
TRUNCATED += [{"top_k": 5, "top_p": 0.9, "record_as_sampled": True}, {"record_as_sampled": True}]


@st.composite
def cases(draw):
    gen_length = draw(st.integers(1, 12))
    block_length = draw(st.integers(1, 14))
    sampler = draw(st.sampled_from(SAMPLERS))
    temperature = draw(st.sampled_from([0.0, 0.8]))
    return {
        "widths": draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)),
        "settings": SamplingSettings(
            gen_length=gen_length,
            block_length=block_length,
            steps=draw(st.integers(-(-gen_length // block_length), gen_length)),
            temperature=temperature,
            cfg_scale=draw(st.sampled_from([0.0, 0.0, 0.5])),
            remasking="low_confidence" if "reveal" in sampler else draw(st.sampled_from(list(REMASKING))),
            **sampler,
            **draw(st.sampled_from([{}, *TRUNCATED] if temperature else [{}])),
        ),
        "ends": draw(st.sampled_from([None, list(range(4, 20))])),
        "seed": draw(st.integers(0, 1000)),
        "chunk": draw(st.sampled_from([1, 3 * VOCAB, 2**23])),
    }


def check_against_the_reference(model, case):
    """Returns the rollout."""
    ids, mask = make_prompts(case["widths"], case["seed"])
    generators = [keyed_generator(case["seed"], 9, row) for row in range(len(ids))]
    options = {"mask_token_id": MASK, "generator": generators, "eos_token_ids": case.get("ends")}
    got = rollout(model, ids, mask, case["settings"], **options)
    assert got.reveal_steps.dtype == torch.long
    for row, width in enumerate(case["widths"]):
        twin = keyed_generator(case["seed"], 9, row)
        prompt = ids[row, ids.shape[1] - width :].tolist()
        expected = reference.sample(model, prompt, case["settings"], twin, case.get("ends"))
        reference.check_row(got, row, width, expected)
        assert torch.equal(generators[row].get_state(), twin.get_state())  # and drew no further number
    return got


ALL_IS_WINDOW = {  # with Dream's shift, the window begins at the prompt's only token
    "widths": [1, 1],
    "settings": SamplingSettings(3, 3, 3, **SAMPLERS[6] | {"reveal_level": 0.1}),
    "ends": None,
    "seed": 0,
    "chunk": 2**23,
}


@given(case=cases())
@example(case=ALL_IS_WINDOW)
@settings(**GIVEN)
def test_rows_of_a_padded_batch_equal_the_reference_on_each_row_alone(model, monkeypatch, case):
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", 2 * case["chunk"])
    check_against_the_reference(model, case)


RANDOM = [one | {"remasking": "random"} for one in SAMPLERS[:3]]
WARM: list[dict[str, Any]] = [{}, {"temperature": 0.8}]
WARMER = [one | {"temperature": 0.8, **TRUNCATED[2]} for one in (SAMPLERS[0], RANDOM[0], SAMPLERS[2], SAMPLERS[5])]


@pytest.mark.parametrize("sampler", [one | warm for one in SAMPLERS + RANDOM for warm in WARM] + WARMER, ids=str)
def test_the_record_of_every_sampler_is_the_references(model, sampler):
    chosen = SamplingSettings(12, 4, 9, **sampler)
    got = check_against_the_reference(model, {"widths": [6, 1, 4], "settings": chosen, "seed": 3})
    assert (got.reveal_steps >= 0).all()
    stopped = check_against_the_reference(
        model, {"widths": [6, 1, 4], "settings": chosen, "seed": 3, "ends": got.ids[:, 6:10].unique()[:3].tolist()}
    )
    filled = stopped.reveal_steps == -1
    assert filled.any(), "no row stopped: the test shows nothing"
    assert (stopped.logps[filled] == 0).all()
    assert (stopped.entropies[filled] == 0).all()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_every_sampler_equals_the_reference_under_eager_attention(kind_dirs, sampler):
    model = sharper(load_model(kind_dirs["Dream"], attn_implementation="eager"))
    chosen = SamplingSettings(12, 4, 9, cfg_scale=0.5, **sampler)
    check_against_the_reference(model, {"widths": [6, 1, 4], "settings": chosen, "seed": 3})


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("cache", ["prefix", "dual", "delayed", "lasting"])
def test_other_kinds_with_caches_equal_the_reference(kind_dirs, kind, cache):
    chosen = SamplingSettings(9, 3, 6, sampler="cached", kv_cache=cache)
    check_against_the_reference(load_model(kind_dirs[kind]), {"widths": [5, 2], "settings": chosen, "seed": 1})


@pytest.mark.parametrize("name", ["sdar", "Fast_dLLM_Qwen", "llada2_moe"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, **TRUNCATED[1]},
        {"cfg_scale": 0.5, "remasking": "random"},
        SAMPLERS[5],
        {"remasking": "entropy"},
    ],
    ids=str,
)
def test_blocks_end_where_a_block_causal_models_do(kind_dirs, name, options):
    """Prompts that end at every position of a block, one of them inside the first block."""
    model = sharper(load_model(kind_dirs[name]))
    size = model.config.block_size
    widths = [size + n for n in range(size)] + [1]
    case = {"widths": widths, "settings": SamplingSettings(11, size, 6, **options), "seed": 2}
    got = check_against_the_reference(model, case)
    assert (got.reveal_steps >= 0).all()
    ends = got.ids[:, -11:-6].unique()[:6].tolist()
    assert (check_against_the_reference(model, case | {"ends": ends}).reveal_steps == -1).any()


def test_blocks_of_another_length_are_filled_only_when_asked_for(kind_dirs):
    model = load_model(kind_dirs["Fast_dLLM_Qwen"])
    ids, mask = make_prompts([6, 3], 0)
    lengths = {"mask_token_id": MASK, "gen_length": 7, "block_length": 3, "steps": 7}
    with pytest.raises(
        ValueError, match=r"has blocks of 5 tokens, so block_length must be 5, not 3;.*other_blocks=True"
    ):
        rollout(model, ids, mask, **lengths)
    got = rollout(model, ids, mask, other_blocks=True, **lengths)
    for row, width in enumerate((6, 3)):
        expected = reference.sample(
            model, ids[row, 6 - width :].tolist(), SamplingSettings(7, 3, 7), keyed_generator(0)
        )
        reference.check_row(got, row, width, expected)
    with pytest.raises(
        ValueError, match=r"qwen2 with blocks of 5 tokens needs no cached sampler:.*use the sampler exact or para"
    ):
        rollout(model, ids, mask, sampler="cached", **lengths | {"block_length": 5})
