"""Passes over packed rows: what padded rows with a dense mask give, up to rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.packing import enable_packed_rows
from d1.sampling import SamplingSettings, rollout, rollout_stream
from d1.sampling.caches import CACHES, NO_CACHE, PACKED_TEXTS, cache_of
from tests.d1.models.test_packing import slow_twin
from tests.d1.sampling.reference import GIVEN, MASK, SAMPLERS, cases, check_against_the_reference, make_prompts, sharper
from tests.rounding import LOGITS, assert_near


def sampled(model, widths, how, ends=None):
    ids, mask = make_prompts(widths, 0)
    draws = [keyed_generator(7, row) for row in range(len(ids))]
    return rollout(model, ids, mask, how, mask_token_id=MASK, generator=draws, eos_token_ids=ends)


def check_near(got, wanted):
    for name in ("ids", "reveal_steps", "passes", "forward_tokens"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    for name in ("logps", "entropies"):
        assert_near(getattr(got, name), getattr(wanted, name), least=LOGITS)


@pytest.fixture(params=["llama", "Dream"])
def packed(request, kind_dirs, monkeypatch):
    """A model with sdpa text by text, which packs the rows of passes that have no cache."""
    model = sharper(load_model(kind_dirs[request.param]))
    enable_packed_rows(model)
    monkeypatch.setattr("d1.sampling.caches.NO_CACHE", PACKED_TEXTS)
    return model


WITHOUT_CACHE = [sampler for sampler in SAMPLERS if "cached" not in sampler["sampler"]]


@given(case=cases(st.sampled_from(WITHOUT_CACHE)))
@settings(max_examples=12, **GIVEN)
def test_packed_rows_equal_the_slow_reference(packed, case):
    assert cache_of(packed.config, None) is PACKED_TEXTS
    check_against_the_reference(packed, case)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8}, {"temperature": 0.8, "cfg_scale": 0.5}], ids=str)
def test_rollouts_are_those_of_padded_rows(load, kind_dirs, packed, monkeypatch, how):
    settings_, widths = SamplingSettings(12, 4, 9, **how), [6, 1, 4, 6]
    ends = sampled(packed, widths, settings_).ids[:, 6:10].unique()[:3].tolist()
    found = [sampled(packed, widths, settings_), sampled(packed, widths, settings_, ends)]
    monkeypatch.setattr("d1.sampling.caches.NO_CACHE", NO_CACHE)
    wanted = [sampled(packed, widths, settings_), sampled(packed, widths, settings_, ends)]
    assert (wanted[1].reveal_steps == -1).any()
    for got, want in zip(found, wanted, strict=True):
        check_near(got, want)


def test_a_stream_packs_rows_of_any_length(packed, monkeypatch):
    how = SamplingSettings(12, 4, 9, 0.8)

    def completions():
        prompts = (([5 + row, 6, 7, 8, 9][: 1 + row % 5], keyed_generator(7, row)) for row in range(7))
        finished = rollout_stream(packed, prompts, how, batch_size=3, mask_token_id=MASK)
        rows = {n: (r.ids[i, -12:], r.logps[i]) for numbers, r in finished for i, n in enumerate(numbers)}
        return [torch.stack(values) for values in zip(*(rows[number] for number in sorted(rows)), strict=True)]

    found = completions()
    monkeypatch.setattr("d1.sampling.caches.NO_CACHE", NO_CACHE)
    wanted = completions()
    assert torch.equal(found[0], wanted[0])
    assert_near(found[1], wanted[1], least=LOGITS)


def test_flash_attention_packs_and_gets_no_mask(kind_dirs, monkeypatch):
    """A kernel by flash attention's name, with its arguments and slow arithmetic. Without padding, it is not told where
    texts end."""
    model, masks = sharper(load_model(kind_dirs["llama"])), []
    wanted = [sampled(model, widths, SamplingSettings(12, 4, 9, 0.8)) for widths in ([6, 1, 4], [5, 5])]

    def kernel(module, query, key, value, attention_mask, **kwargs):
        masks.append((attention_mask, "cu_seq_lens_q" in kwargs))
        if "cu_seq_lens_q" in kwargs:
            return slow_twin(module, query, key, value, attention_mask, **kwargs)
        groups = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values).transpose(1, 2), None

    AttentionInterface.register("flash_attention_slow", kernel)
    AttentionMaskInterface.register("flash_attention_slow", lambda *args, **kwargs: None)
    model.config._attn_implementation = "flash_attention_slow"
    assert cache_of(model.config, None) is PACKED_TEXTS
    found = [sampled(model, widths, SamplingSettings(12, 4, 9, 0.8)) for widths in ([6, 1, 4], [5, 5])]
    for got, want in zip(found, wanted, strict=True):
        check_near(got, want)
    assert all(mask is None for mask, _ in masks)
    assert {told for _, told in masks} == {True, False}


def test_other_models_keep_their_passes(load):
    assert cache_of(load("llama").config, None) is NO_CACHE
    assert cache_of(load("sdar").config, None) is not PACKED_TEXTS
    assert "packed" not in CACHES
