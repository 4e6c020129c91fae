"""Logits that are not finite end the work everywhere a sampler runs, and the error names the row and the layer."""

import math
from functools import cache

import pytest
import torch
from peft import LoraConfig, get_peft_model

from d1.eval.harness import are_greedy, log_likelihoods
from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.head import NotFiniteError
from d1.sampling import SamplingSettings, generate, infill, infill_steps, rollout, rollout_steps, rollout_stream
from tests.d1.sampling.reference import EDITORS, MASK, SAMPLERS, make_prompts
from tests.faults import with_nan

DOWN = "model.layers.1.mlp.down_proj"
BAD = 9  # a token whose embedding is damaged: only rows that show it are
LENGTHS = {"gen_length": 8, "block_length": 4, "steps": 6}
WIDTHS = [5, 3, 4]


@pytest.fixture(scope="module")
def broken(kind_dirs, tmp_path_factory):
    """`broken(kind, weight, where)`: a model with NaN in a weight."""

    @cache
    def broken(kind, weight, where):
        return load_model(with_nan(kind_dirs[kind], tmp_path_factory.mktemp("broken") / kind, weight, where))

    return broken


@pytest.fixture
def damaged(broken):
    return broken("llama", f"{DOWN}.weight", (3, 5))


@pytest.fixture
def one_bad_token(broken):
    return broken("llama", "model.embed_tokens.weight", (BAD,))


def prompts(bad_row=None):
    ids, mask = make_prompts(WIDTHS, 0)
    ids = ids.masked_fill(ids == BAD, BAD + 1)
    if bad_row is not None:
        ids[bad_row, -2] = BAD
    return ids, mask


def options(settings):
    drawn = SamplingSettings(**LENGTHS, **settings).draws
    return {"mask_token_id": MASK, "generator": [keyed_generator(0, row) for row in range(3)] if drawn else None}


EVERY = [*SAMPLERS, *EDITORS, {"temperature": 0.8}, {"temperature": 0.8, "cfg_scale": 0.5, "top_k": 5}]
EVERY += [{"remasking": "random"}, {"remasking": "entropy"}]


@pytest.mark.parametrize("settings", EVERY, ids=str)
def test_every_sampler_ends_with_the_row_and_the_layer(damaged, settings):
    with pytest.raises(
        FloatingPointError, match=rf"^row 0: .*comes from {DOWN}, whose weight has 1 non-finite value out of \d+:"
    ):
        rollout(damaged, *prompts(), **LENGTHS, **settings, **options(settings))


@pytest.mark.parametrize("ends", [None, [0, 1, 2]])
@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[1], SAMPLERS[3]], ids=str)
def test_a_row_is_named_by_its_number(one_bad_token, sampler, ends):
    """The other rows are well, in a batch as alone."""
    clean = rollout(one_bad_token, *prompts(), **LENGTHS, **sampler, **options(sampler))
    assert clean.logps.isfinite().all()
    message = r"^row 1: .*comes from model\.embed_tokens, whose weight has 32 non-finite values out of \d+:"
    with pytest.raises(NotFiniteError, match=message) as caught:
        rollout(one_bad_token, *prompts(1), **LENGTHS, **sampler, eos_token_ids=ends, **options(sampler))
    assert caught.value.number == 1


def test_the_other_ways_to_sample_end_too(damaged, one_bad_token):
    ids, mask = prompts()
    for way in (generate, lambda *given, **named: list(rollout_steps(*given, **named))):
        with pytest.raises(NotFiniteError, match=DOWN):
            way(damaged, ids, mask, **LENGTHS, mask_token_id=MASK)
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[0, 2] = hidden[2, 1:3] = True
    for way in (infill, lambda *given, **named: list(infill_steps(*given, **named))):
        with pytest.raises(NotFiniteError, match=f"^row 0: .*{DOWN}"):
            way(damaged, ids, hidden, mask, mask_token_id=MASK)
    with pytest.raises(NotFiniteError, match=r"^row 2: .*embed_tokens"):
        infill(one_bad_token, prompts(2)[0], hidden, mask, mask_token_id=MASK)


@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[1]], ids=str)
def test_a_stream_yields_what_ended_before_and_names_the_prompt(one_bad_token, sampler):
    ids, _ = prompts()
    rows = [(ids[0].tolist(), None), (ids[2, 1:].tolist(), None), ([BAD, 5], None)]
    settings = SamplingSettings(**LENGTHS, **sampler)
    stream = rollout_stream(one_bad_token, rows, settings, batch_size=1, mask_token_id=MASK)
    for number in range(2):
        numbers, sampled = next(stream)
        assert numbers == [number]
        assert sampled.logps.isfinite().all()
    with pytest.raises(NotFiniteError, match=r"^row 2: .*embed_tokens"):
        next(stream)


@pytest.mark.parametrize(
    ("kind", "weight", "where"),
    [
        ("sdar", "model.layers.2.input_layernorm", 0),
        # A mask embedding shows in the first state alone: once all tokens are revealed, a pass is finite again.
        ("llama", "model.embed_tokens", MASK),
    ],
)
def test_other_weights_and_block_causal_models_too(broken, kind, weight, where):
    with pytest.raises(NotFiniteError, match=rf"comes from {weight}, whose"):
        rollout(broken(kind, f"{weight}.weight", (where,)), *prompts(), **LENGTHS, mask_token_id=MASK)


def test_float16_that_overflows_is_another_cause(kind_dirs):
    model = load_model(kind_dirs["llama"])
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1e5)
    assert rollout(model, *prompts(), **LENGTHS, mask_token_id=MASK).logps.isfinite().all()
    with pytest.raises(NotFiniteError, match=r"model\.layers\.1\.mlp\.up_proj"):
        rollout(model.half(), *prompts(), **LENGTHS, mask_token_id=MASK)
    model = load_model(kind_dirs["llama"], dtype=torch.float16)
    model.model.layers[1].mlp.up_proj.weight.data.fill_(6e4)
    with pytest.raises(NotFiniteError, match=r"comes from model\.layers\.1\.mlp\.up_proj, whose weights are f"):
        rollout(model, *prompts(), **LENGTHS, mask_token_id=MASK)


def test_adapters_are_named(kind_dirs):
    model = get_peft_model(load_model(kind_dirs["llama"]), LoraConfig(target_modules=["v_proj"])).eval()
    model.base_model.model.model.layers[2].self_attn.v_proj.lora_A["default"].weight.data[0, 0] = math.inf
    with pytest.raises(NotFiniteError, match=r"comes from .*layers\.2\.self_attn\.v_proj\.lora_A\.default, whose"):
        rollout(model, *prompts(), **LENGTHS, mask_token_id=MASK)


def test_likelihoods_end_with_the_pair(one_bad_token, damaged):
    pairs = [([5, 6], [7, 8, 10]), ([5, BAD], [7, 8, 11])]
    named = {"mask_token_id": MASK, "pad_token_id": 0, "batch_size": 2}
    with pytest.raises(NotFiniteError, match=r"^row 1: .*embed_tokens"):
        list(log_likelihoods(one_bad_token, pairs, draws=2, **named))
    for batch in (1, 2):
        with pytest.raises(NotFiniteError, match=r"^row 1: .*embed_tokens"):
            list(are_greedy(one_bad_token, pairs, **(named | {"batch_size": batch})))
    with pytest.raises(NotFiniteError, match=DOWN):
        list(are_greedy(damaged, pairs[:1], **named))
