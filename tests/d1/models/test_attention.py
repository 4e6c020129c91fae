"""Masks and positions, made in one place."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from d1.models import load_model
from d1.models.attention import ATTENTION, count_positions, over_queries, padding_mask, takes_masks_over_queries
from d1.models.kinds import KINDS

VISIBLE = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]])
WINDOWED = ("gemma2", "gemma3_text")


def test_positions_count_real_tokens_alone():
    assert count_positions(VISIBLE).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 3]]


def test_a_mask_that_hides_nothing_is_none():
    assert padding_mask(torch.ones(2, 5, dtype=torch.long)) is None
    assert padding_mask(VISIBLE) is VISIBLE


@torch.no_grad()
def test_a_mask_over_queries_says_what_the_padding_mask_says(kind_dirs, kind):
    model = load_model(kind_dirs[kind], attn_implementation=None if kind == "gemma2" else "sdpa")
    takes = takes_masks_over_queries(model.config)
    assert takes == (kind not in (*WINDOWED, "bert", "roberta", "modernbert"))
    mask = over_queries(VISIBLE, 5)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, torch.stack([row.bool().expand(1, 5, 5) for row in VISIBLE]))
    if takes:
        ids = torch.randint(4, 64, (2, 5), generator=torch.Generator().manual_seed(0))
        plain = model(input_ids=ids, attention_mask=VISIBLE).logits
        wide = model(input_ids=ids, attention_mask=mask, position_ids=count_positions(VISIBLE)).logits
        assert torch.equal(wide, plain)


def test_other_kernels_take_no_masks_over_queries(kind_dirs):
    assert not takes_masks_over_queries(load_model(kind_dirs["llama"], attn_implementation="eager").config)


def test_every_row_names_an_attention_that_there_is():
    assert {row.attention for row in KINDS.values()} <= ATTENTION.keys()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_transformers_reads_is_causal_in_every_pass(kind_dirs, name):
    """What `prepare` builds on: a decoder that was built causal attends both ways as soon as its config says so."""
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
