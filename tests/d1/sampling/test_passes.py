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
from d1.sampling.passes import KVCacheRows, Passes
from tests.d1.released import CAUSAL
from tests.d1.sampling.reference import (
    GIVEN,
    MASK,
    SAMPLERS,
    SHARP_LOGITS,
    WITHOUT_CACHE,
    cases,
    check_against_the_reference,
    make_prompts,
)
from tests.rounding import assert_near

LENGTHS = {"mask_token_id": MASK, "gen_length": 12, "block_length": 4, "steps": 6}


@pytest.fixture(params=["llama", "Dream"])  # LLaDA runs as a Llama; Dream's logits predict the next token
def model(request, load):
    return load(request.param)


@contextmanager
def computed_tokens(model):
    """(rows, real tokens) of each forward pass through the transformer."""
    computed = []

    def count(backbone, args, kwargs):
        ids, visible = kwargs["input_ids"], kwargs.get("attention_mask")
        seen = visible is not None and visible.dim() == 2
        computed.append((len(ids), int(visible[:, -ids.shape[1] :].sum()) if seen else ids.numel()))

    hook = model.base_model.register_forward_pre_hook(count, prepend=True, with_kwargs=True)
    yield computed
    hook.remove()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
def test_counts_are_what_the_body_was_fed(model, sampler, cfg_scale):
    name, cache = sampler["sampler"], sampler.get("kv_cache")
    ids, mask = make_prompts([6] * 5, 4)
    lengths = LENGTHS | {"steps": 12 if "parallel" in name else 6, "cfg_scale": cfg_scale}
    with computed_tokens(model) as computed:
        got = rollout(model, ids, mask, generator=[keyed_generator(row) for row in range(5)], **lengths, **sampler)
    rows, all_computed = map(sum, zip(*computed, strict=True))
    if name == "cached+parallel" and cache in ("delayed", "lasting"):
        # Each row's own positions; rows with fewer positions than others are padded.
        assert 0.7 * all_computed < got.forward_tokens.sum() <= all_computed
    else:
        assert got.forward_tokens.sum() == all_computed
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
        with computed_tokens(model) as computed:
            got = rollout(model, ids, mask, case["settings"], recompute=recompute, **options)
        assert sum(tokens for _, tokens in computed) == got.forward_tokens.sum()
        for name in ("ids", "reveal_steps", "passes"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        for name in ("logps", "entropies"):
            assert_near(getattr(got, name), getattr(expected, name), least=SHARP_LOGITS)
    lengths = torch.tensor(case["widths"]) + case["settings"].gen_length
    assert torch.equal(got.forward_tokens, got.passes * lengths * (2 if case["settings"].cfg_scale else 1))


# --- Columns that the next turn of an episode reads again -------------------------------------------------------------

WIDTHS, ENDS = [9, 2, 5, 14], [*range(4, 14)]
GIVEN_TEXT = [1, 3, 6, 4]  # tokens of given text after each row's cut


def following(texts):
    """The prompts (rows, prompt) of a next turn: the texts up to their cuts, and given text."""
    rows = [[*text, *(5 + (7 * row + at) % 20 for at in range(GIVEN_TEXT[row]))] for row, text in enumerate(texts)]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return rows, ids, mask


def copies(cache_rows):
    return [KVCacheRows(list(one.layers)) for one in cache_rows]


@pytest.mark.parametrize(
    ("kind", "ends"), [("sdar", None), ("sdar", ENDS), ("Fast_dLLM_Qwen", None), (CAUSAL, None), (CAUSAL, ENDS)]
)
def test_turns_that_read_cached_tokens_are_those_that_recompute_wherever_the_canvas_is_cut(load, kind, ends):
    """Three turns, cut at every offset in a block: tokens, log-probs and passes of a batch, of some of its rows, and of
    a stream; and exactly the cached tokens are not processed again."""
    model = load(kind)
    size = 4 if kind == CAUSAL else model.config.block_size
    whole, length = 1 if kind == CAUSAL else size, 3 * size
    settings = SamplingSettings(length, size, 6, 0.8, remasking="random")
    options = {"mask_token_id": MASK, "eos_token_ids": ends}

    def sample(ids, mask, key, rows=range(4), **more):
        random = [keyed_generator(key, row) for row in rows]
        return rollout(model, ids[[*rows]], mask[[*rows]], settings, generator=random, **options, **more)

    def blocks_before_the_last(width):
        """The tokens before the last block that sampling processes."""
        after = 1 + (width + length - (width if kind == CAUSAL else 0) - 1) % size
        return width + length - after

    first_ids, first_mask = make_prompts(WIDTHS, 3)
    for cut in (*range(size, 2 * size), length):
        ids, mask, widths = first_ids, first_mask, WIDTHS
        held = [KVCacheRows() for _ in WIDTHS]
        for turn in range(3):
            known, again = [one.tokens for one in held], copies(held)
            some, streamed = copies(held), copies(held)
            found = sample(ids, mask, turn, cache_rows=held)
            without, recomputed = sample(ids, mask, turn), sample(ids, mask, turn, recompute=True)
            for other in (without, recomputed):
                for name in ("ids", "reveal_steps", "passes"):
                    assert torch.equal(getattr(found, name), getattr(other, name)), (cut, turn, name)
                for name in ("logps", "entropies"):
                    assert_near(getattr(found, name), getattr(other, name), least=SHARP_LOGITS)
            saved = torch.tensor([min(of, width - 1) // whole * whole for of, width in zip(known, widths, strict=True)])
            assert torch.equal(without.forward_tokens - found.forward_tokens, saved)
            with computed_tokens(model) as computed:
                sample(ids, mask, turn, cache_rows=again)
            assert sum(tokens for _, tokens in computed) == found.forward_tokens.sum()
            # Of rows 1 and 3 alone, and of a stream in which rows wait.
            part = sample(ids, mask, turn, [1, 3], cache_rows=[some[1], some[3]])
            for name in ("ids", "reveal_steps", "forward_tokens"):
                assert torch.equal(getattr(part, name), getattr(found, name)[[1, 3]]), name
            assert_near(part.logps, found.logps[[1, 3]], least=SHARP_LOGITS)
            texts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
            asked = [(text, keyed_generator(turn, row), None, streamed[row]) for row, text in enumerate(texts)]
            for numbers, of in rollout_stream(model, asked, settings, batch_size=2, **options):
                assert torch.equal(of.ids[:, -length:], found.ids[numbers, -length:])
                assert torch.equal(of.forward_tokens, found.forward_tokens[numbers])
                assert_near(of.logps, found.logps[numbers], least=SHARP_LOGITS)
            # What is left: the prompt and the finished blocks; the last block was never processed whole.
            texts = [row[-(width + length) :].tolist() for row, width in zip(found.ids, widths, strict=True)]
            for row, (one, width) in enumerate(zip(held, widths, strict=True)):
                assert one.tokens == streamed[row].tokens
                assert one.tokens <= blocks_before_the_last(width)
                assert ends or one.tokens == blocks_before_the_last(width)
                for layer, other in zip(one.layers, streamed[row].layers, strict=True):
                    assert_near(layer, other, least=SHARP_LOGITS)
            if turn:
                assert saved.sum() > 0
            for one, width in zip(held, widths, strict=True):
                one.crop(width + cut)
            rows, ids, mask = following([text[: width + cut] for text, width in zip(texts, widths, strict=True)])
            widths = [len(row) for row in rows]


def test_guidance_and_models_with_full_attention_leave_no_cache_rows(load):
    ids, mask = make_prompts([5, 2], 0)
    for kind, more in (("sdar", {"cfg_scale": 0.5}), ("llada", {})):
        held = [KVCacheRows(), KVCacheRows()]
        expected, found = (
            rollout(load(kind), ids, mask, cache_rows=cache_rows, **LENGTHS, **more) for cache_rows in (None, held)
        )
        assert [one.tokens for one in held] == [0, 0]
        assert torch.equal(expected.ids, found.ids)


def test_a_cache_added_from_outside_serves_the_fixed_batch_and_the_stream(load, monkeypatch):
    counts = Counter()

    class OwnPasses(Passes):
        """Counts blocks and passes, and computes all tokens, like the exact sampler."""

        def begin_blocks(self, blocks, kept):
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
