"""The caches: what each one computes and counts, the exact one of block-causal models, and the user's own."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from d1.masking import keyed_generator
from d1.sampling import SamplingSettings, rollout, rollout_stream
from d1.sampling.caches import CACHES, Cache
from d1.sampling.passes import Passes
from tests.d1.sampling.reference import (
    GIVEN,
    MASK,
    SAMPLERS,
    WITHOUT_CACHE,
    cases,
    check_against_the_reference,
    make_prompts,
)

LENGTHS = {"mask_token_id": MASK, "gen_length": 12, "block_length": 4, "steps": 6}


@pytest.fixture(params=["llama", "Dream"])  # LLaDA runs as a Llama; Dream's logits predict the next token
def model(request, load):
    return load(request.param)


@contextmanager
def fed_tokens(model):
    """(rows, real tokens) of each forward pass through the transformer."""
    fed = []

    def count(body, args, kwargs):
        ids, visible = kwargs["input_ids"], kwargs.get("attention_mask")
        seen = visible is not None and visible.dim() == 2
        fed.append((len(ids), int(visible[:, -ids.shape[1] :].sum()) if seen else ids.numel()))

    hook = model.base_model.register_forward_pre_hook(count, prepend=True, with_kwargs=True)
    yield fed
    hook.remove()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
def test_counts_are_what_the_body_was_fed(model, sampler, cfg_scale):
    name, cache = sampler["sampler"], sampler.get("kv_cache")
    ids, mask = make_prompts([6] * 5, 4)
    lengths = LENGTHS | {"steps": 12 if "parallel" in name else 6, "cfg_scale": cfg_scale}
    with fed_tokens(model) as fed:
        got = rollout(model, ids, mask, generator=[keyed_generator(row) for row in range(5)], **lengths, **sampler)
    rows, all_fed = map(sum, zip(*fed, strict=True))
    if name == "cached+parallel" and cache in ("delayed", "lasting"):
        # Each row's own positions; rows with fewer positions than others are padded.
        assert 0.7 * all_fed < got.forward_tokens.sum() <= all_fed
    else:
        assert got.forward_tokens.sum() == all_fed
    branches = 2 if cfg_scale else 1
    assert got.passes.sum() * branches == rows
    assert got.passes.max() <= lengths["steps"]
    if "parallel" in name:
        assert len(got.passes.unique()) > 1, "no row took fewer passes than another: the test shows nothing"
    if name == "cached":
        # Each of the three blocks takes two passes, and each pass reveals two of the block's four tokens.
        tokens = {
            "prefix": 3 * 18 + (12 + 8 + 4),
            "dual": 3 * 18 + 3 * 4,
            "delayed": 3 * 18 + 3 * 4,
            "lasting": 18 + 4 + (2 + 4) + 4 + (2 + 4) + 4,
        }[cache]
        # The token before the window, or before each hidden token.
        shift = {"prefix": 3, "dual": 3, "delayed": 3 * 2, "lasting": 2 + 4 + 2 + 4 + 2}[cache]
        tokens += shift * int(getattr(model.config, "predicts_next_token", False))
        assert got.forward_tokens.tolist() == [tokens * branches] * 5


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        *((kind, "no key-value cache") for kind in ("bert", "roberta", "modernbert")),
        *((kind, "windowed attention") for kind in ("gemma2", "gemma3_text")),
        ("sdar", "with blocks of 4 tokens needs no cached sampler:"),
    ],
)
def test_kinds_that_no_cache_is_right_for_are_refused_by_name(load, kind, message):
    name = {"sdar": "qwen3"}.get(kind, kind)
    with pytest.raises(ValueError, match=f"{name}.*{message}.*use the sampler exact or parallel"):
        rollout(load(kind), *make_prompts([4, 2], 0), sampler="cached", **LENGTHS)


# --- The exact cache of block-causal models ---------------------------------------------------------------------------

# All-masked positions are alike, so the order is random.
RANDOM = SamplingSettings(14, 5, 14, 0.8, remasking="random")
EMPTY = {"widths": [0, 5, 10], "settings": RANDOM, "ends": None, "seed": 0}
# Rows wait for others in their block, leave at an end, and form several groups.
WAITING = SamplingSettings(14, 5, 14, 0.8, 0.5, sampler="parallel", reveal_level=0.3)
EARLY = {"widths": [7, 2, 2, 7, 2], "settings": WAITING, "ends": list(range(4, 10)), "seed": 1}


@pytest.mark.parametrize(
    ("kind", "kernel"), [("sdar", "sdpa"), ("sdar_moe", "eager"), ("Fast_dLLM_Qwen", "sdpa"), ("llada2_moe", "sdpa")]
)
@given(case=cases(st.sampled_from(WITHOUT_CACHE), longest=14, truncated=()))
@example(case=EMPTY)
@example(case=EARLY)
@settings(max_examples=12, **GIVEN)
def test_the_exact_cache_changes_nothing_but_the_tokens_computed_which_are_counted(load, kind, kernel, case):
    """With blocks of any length; the reference counts what each row alone must cost."""
    model = load(kind, attn_implementation=kernel)
    expected = check_against_the_reference(model, case, other_blocks=True)
    ids, mask = make_prompts(case["widths"], case["seed"])
    for recompute in (False, True):
        generators = [keyed_generator(case["seed"], 9, row) for row in range(len(ids))]
        options = {"mask_token_id": MASK, "generator": generators, "eos_token_ids": case["ends"], "other_blocks": True}
        with fed_tokens(model) as fed:
            got = rollout(model, ids, mask, case["settings"], recompute=recompute, **options)
        assert sum(tokens for _, tokens in fed) == got.forward_tokens.sum()
        for name in ("ids", "reveal_steps", "passes"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        for name in ("logps", "entropies"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=2e-5)
    lengths = torch.tensor(case["widths"]) + case["settings"].gen_length
    assert torch.equal(got.forward_tokens, got.passes * lengths * (2 if case["settings"].cfg_scale else 1))


def test_a_cache_added_from_outside_serves_the_fixed_batch_and_the_stream(load, monkeypatch):
    counts = Counter()

    class OwnPasses(Passes):
        """Counts blocks and passes, and computes all tokens, like the exact sampler."""

        def enter(self, blocks, kept):
            counts["blocks"] += 1

        def states(self, *tensors):
            counts["passes"] += 1
            return super().states(*tensors)

    monkeypatch.setitem(CACHES, "mine", Cache(OwnPasses))
    model, (ids, mask) = load("llada"), make_prompts([5, 2], 0)
    exact = SamplingSettings(12, 4, 6)
    own = replace(exact, sampler="cached", kv_cache="mine")
    expected, got = (rollout(model, ids, mask, chosen, mask_token_id=MASK) for chosen in (exact, own))
    assert all(torch.equal(getattr(got, name), value) for name, value in vars(expected).items() if value is not None)
    assert counts == {"blocks": 3, "passes": 6}
    prompts = [(row[real.bool()].tolist(), None) for row, real in zip(ids, mask, strict=True)]
    for _, part in rollout_stream(model, prompts, own, batch_size=2, mask_token_id=MASK):
        assert torch.equal(part.ids[:, 5:], got.ids[:, 5:])
        assert torch.equal(part.reveal_steps, got.reveal_steps)
    assert counts == {"blocks": 6, "passes": 12}
