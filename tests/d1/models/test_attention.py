"""Masks and positions, made in one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3Config

from d1.masking import keyed_generator
from d1.models import load_model, prepare
from d1.models.attention import (
    ATTENTION,
    before_in_context,
    check_attention,
    count_positions,
    over_queries,
    padding_mask,
    takes_masks_over_queries,
)
from d1.models.head import backbone_and_head
from d1.transformers_bridge import CACHE
from tests.d1.released import BLOCKS, CAUSAL, seen_in_blocks, write_released
from tests.rounding import assert_near

VISIBLE = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]])
WINDOWED = ("gemma2", "gemma3_text")


def test_positions_count_real_tokens_alone_and_a_mask_that_hides_nothing_is_none():
    assert count_positions(VISIBLE).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 3]]
    assert padding_mask(torch.ones(2, 5, dtype=torch.long)) is None
    assert padding_mask(VISIBLE) is VISIBLE


@torch.no_grad()
def test_a_mask_over_queries_says_what_the_padding_mask_says(kind_dirs, kind):
    model = load_model(kind_dirs[kind], attn_implementation=None if kind == "gemma2" else "sdpa")
    assert not takes_masks_over_queries(load_model(kind_dirs[kind], attn_implementation="eager").config)
    takes = takes_masks_over_queries(model.config)
    assert takes == (kind not in (*WINDOWED, *BLOCKS, CAUSAL, "bert", "roberta", "modernbert"))
    mask = over_queries(VISIBLE, 5)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, torch.stack([row.bool().expand(1, 5, 5) for row in VISIBLE]))
    if takes:
        ids = torch.randint(4, 64, (2, 5), generator=torch.Generator().manual_seed(0))
        plain = model(input_ids=ids, attention_mask=VISIBLE).logits
        wide = model(input_ids=ids, attention_mask=mask, position_ids=count_positions(VISIBLE)).logits
        assert torch.equal(wide, plain)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_transformers_reads_is_causal_in_every_pass(kind_dirs, name):
    """`prepare` relies on this: a decoder that was built causal attends in both directions once its config says so."""
    model = AutoModelForCausalLM.from_config(load_model(kind_dirs[name]).config).eval()
    ids = torch.randint(4, 64, (1, 8), generator=torch.Generator().manual_seed(0))
    last = ids.clone()
    last[0, -1] += 1 if ids[0, -1] < 60 else -1
    moved = {}
    for causal in (True, False):
        model.config.is_causal = causal
        with torch.no_grad():
            moved[causal] = (model(input_ids=ids).logits - model(input_ids=last).logits)[0, 0].abs().max()
    assert moved[True] == 0 < moved[False]


# --- Blocks ----------------------------------------------------------------------------------------------------------


def with_blocks(folder: Any, size: int | None, attention: str = "sdpa") -> Any:
    """The weights in `folder` under block-causal attention; None: as Transformers runs them, causally."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    model.config.block_size = size
    if size is None:
        model.config.is_causal = True
        return model
    return prepare(model)


def test_blocks_count_real_tokens_alone():
    visible = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1]])
    found = ATTENTION["block-causal"].mask(Qwen3Config(block_size=2), visible, 0, 8)[0, 0]
    real = torch.tensor([2, 3, 4, 6, 7])
    assert torch.equal(found[real][:, real], seen_in_blocks(5, 2))
    assert not found[:, [0, 1, 5]].any()
    assert found.any(-1).all(), "padding that sees nothing would make attention divide by zero"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["sdar", "Fast_dLLM_Qwen"])
def test_neither_batch_nor_padding_changes_a_row_whose_prompt_ends_anywhere_in_a_block(kind_dirs, name, attention):
    """Whole and at chosen positions of the last layer; removing the text after a block's end changes nothing before
    it."""
    model: Any = load_model(kind_dirs[name], attn_implementation=attention)
    backbone, size = backbone_and_head(model)[0], model.config.block_size
    texts = [torch.randint(4, 64, (size + n,), generator=keyed_generator(n)) for n in range(size)]
    width = 2 * size + 3
    ids, mask = torch.full((2 * size, width), 7), torch.zeros(2 * size, width, dtype=torch.long)
    places = []
    for row, text in enumerate(texts * 2):
        start = width - 1 - len(text) if row < size else row - size  # padding on the left, or on both sides
        ids[row, start : start + len(text)], mask[row, start : start + len(text)] = text, 1
        places.append([start + len(text) - 1, start, start + 1, start + size - 1])
    at = torch.tensor(places)
    with torch.no_grad():
        whole, some = backbone(ids, mask), backbone(ids, mask, at)
        for row, text in enumerate(texts * 2):
            alone = backbone(text[None])[0]
            assert_near(whole[row, mask[row].bool()], alone)
            assert_near(some[row], whole[row, at[row]])
            assert_near(alone[:size], backbone(text[None, :size])[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_both_limits(kind_dirs, attention):
    """Blocks of one token are causal attention; a block that holds the text is full attention."""
    ids = torch.randint(4, 64, (2, 9), generator=keyed_generator(0))

    def logits(model: Any) -> Tensor:
        return model(input_ids=ids).logits

    folder = kind_dirs["qwen3"]
    causal, full = with_blocks(folder, None, attention), load_model(folder, attn_implementation=attention)
    assert_near(logits(with_blocks(folder, 1, attention)), logits(causal))
    for size in (9, 64):
        assert_near(logits(with_blocks(folder, size, attention)), logits(full))
    assert (logits(with_blocks(folder, 8, attention)) - logits(full)).abs().amax(-1).min() > 1e-4


@torch.no_grad()
def test_a_pass_that_reads_the_keys_of_the_blocks_before_it(kind_dirs):
    model: Any = load_model(kind_dirs["sdar"])
    ids = torch.randint(4, 64, (2, 11), generator=keyed_generator(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # so that its blocks end at 6 and 10, the other's at 4 and 8
    for row, cut in ((0, 6), (1, 8)):
        text, seen, past = ids[row : row + 1], mask[row : row + 1], DynamicCache()
        whole = model(input_ids=text, attention_mask=seen).logits
        model(input_ids=text[:, :cut], attention_mask=seen[:, :cut], **{CACHE: past})
        places = count_positions(seen)[:, cut:]
        rest = model(input_ids=text[:, cut:], attention_mask=seen, position_ids=places, **{CACHE: past})
        assert_near(rest.logits, whole[:, cut:])


def test_what_cannot_attend_in_blocks_is_refused(kind_dirs, tmp_path):
    flash = Qwen3Config(block_size=4, attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match=r"m: block-causal attention runs under .*, not under flash_attention_2"):
        check_attention(flash, "m")
    for name in ("gemma3_text", "bert"):
        config: Any = load_model(kind_dirs[name]).config
        config.block_size = 4
        plain: Any = type(load_model(kind_dirs[name]))(config)
        with pytest.raises(ValueError, match=f"needs a decoder without windows, not {name}"):
            prepare(plain)
    with pytest.raises(ValueError, match="block_size must be positive and whole, got -1"):
        load_model(write_released(tmp_path, "sdar", block_size=-1))


@pytest.mark.parametrize(("queries", "expected"), [(4, [0, 0, 2, 2]), (2, [0, 0]), (1, [0])])
def test_an_opened_token_is_scored_by_the_token_before_it_and_the_first_of_a_pass_by_itself(queries, expected):
    opened = torch.tensor([[False, True, False, True]])
    index = before_in_context(LlamaConfig(), torch.ones(1, 4), 0, queries, opened=opened)
    assert index.tolist() == [expected]
