"""Texts packed into one row and blocks in two streams, compared with each text and each block alone, for every kind and
kernel."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AttentionInterface

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.adapters import lora_targets
from d1.models.head import backbone_and_head
from d1.models.packing import enable_packed_rows, packed_two_stream_states, place_packed, two_stream_states
from tests.d1.released import BLOCKS
from tests.rounding import TOKENS, assert_near, largest

LENGTHS = [11, 1, 18, 6]
TEXTS = [(length, 0) for length in LENGTHS]
IDS = torch.randint(4, 64, (sum(LENGTHS),), generator=keyed_generator(0))
HIDDEN = torch.rand(IDS.shape, generator=keyed_generator(1)) < 0.5
HIDDEN[-LENGTHS[-1] :] = False  # the last text hides nothing
NOISED = IDS.masked_fill(HIDDEN, 3)
WINDOWED = ("gemma2", "gemma3_text", "modernbert")


def one_by_one(model: Any) -> Tensor:
    """(tokens, hidden size) of each text in its own pass."""
    return torch.cat([backbone_and_head(model)[0](text[None])[0] for text in IDS.split(LENGTHS)])


def in_one_row(model: Any, positions: Tensor | None = None) -> Tensor:
    return backbone_and_head(model)[0](IDS[None], None, positions, segments=TEXTS)[0]


@torch.no_grad()
def test_a_text_is_what_it_is_alone(kind_dirs, kind, attention):
    """All positions, chosen positions of the last layer, and a noised copy after each text."""
    model: Any = load_model(kind_dirs[kind], attn_implementation=attention)
    if kind in WINDOWED:
        message = "need layers without windows, and some of its layers attend only within one: leave --packing out$"
        with pytest.raises(ValueError, match=message):
            enable_packed_rows(model)
        assert model.config._attn_implementation == attention
        return
    expected, at = one_by_one(model), HIDDEN.nonzero().T
    enable_packed_rows(model)
    assert_near(in_one_row(model), expected)
    assert_near(in_one_row(model, at), expected[HIDDEN])
    torch.testing.assert_close(one_by_one(model), expected, atol=0, rtol=0)  # plain rows as before
    if kind in BLOCKS:
        pairs = zip(IDS.split(LENGTHS), NOISED.split(LENGTHS), strict=True)
        alone = torch.cat([two_stream_states(model, a[None], b[None], None)[0] for a, b in pairs])[HIDDEN]
        found = packed_two_stream_states(model, IDS[None], NOISED[None], LENGTHS, HIDDEN[None])
        assert_near(found, alone)


@pytest.mark.parametrize("kind", ["llada", "Dream", "lladamoe", "roberta"])
def test_gradients_through_checkpointed_layers_and_an_adapter(kind_dirs, kind):
    found = []
    for packed in (False, True):
        torch.manual_seed(0)
        model: Any = load_model(kind_dirs[kind])
        adapter = LoraConfig(target_modules=lora_targets(model, "attention"), init_lora_weights=False)
        model = get_peft_model(model, adapter).train()
        for dropout in (module for module in model.modules() if isinstance(module, torch.nn.Dropout)):
            dropout.p = 0.0
        if packed:
            model.gradient_checkpointing_enable()
            enable_packed_rows(model)
        states = in_one_row(model) if packed else one_by_one(model)
        states.square().sum().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad})
    scale = largest([*found[0].values()])
    for name, gradient in found[0].items():
        assert_near(found[1][name], gradient, least=scale, terms=TOKENS)


def slow_twin(module, query, key, value, attention_mask, scaling=None, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention as the arguments of FlashAttention's `varlen` functions define it, one text and one head at a time."""
    ends, most = kwargs["cu_seq_lens_k"].tolist(), kwargs["max_length_k"]
    assert attention_mask is None
    assert ends == kwargs["cu_seq_lens_q"].tolist()
    assert most == kwargs["max_length_q"] == max(b - a for a, b in itertools.pairwise(ends))
    shared, out = query.shape[1] // key.shape[1], torch.zeros_like(query)
    for head in range(query.shape[1]):
        for a, b in itertools.pairwise(ends):
            scores = query[0, head, a:b] @ key[0, head // shared, a:b].T * (scaling or query.shape[-1] ** -0.5)
            out[0, head, a:b] = scores.softmax(-1) @ value[0, head // shared, a:b]
    return out.transpose(1, 2), None


@pytest.mark.parametrize("kind", ["llada", "Dream", "lladamoe", "gemma", "bert", "roberta"])
@torch.no_grad()
def test_flash_attention_is_told_where_texts_end(kind_dirs, kind):
    """The arguments of the kernel call, for each class of models; the kernel itself needs a GPU."""
    model: Any = load_model(kind_dirs[kind])
    expected, config = one_by_one(model), model.config
    flash: Any = SimpleNamespace(config=type(config)(**config.to_dict(), attn_implementation="flash_attention_2"))
    _, told = place_packed(flash, (), {"input_ids": IDS[None], "segments": TEXTS})
    AttentionInterface.register("slow_twin", slow_twin)
    model.set_attn_implementation("slow_twin")
    assert_near(backbone_and_head(model)[0](**told)[0], expected)


def test_what_cannot_keep_texts_apart_is_refused(kind_dirs, tmp_path):
    model: Any = load_model(kind_dirs["llama"])
    with pytest.raises(ValueError, match=r"LlamaModel: rows of several texts need .*enable_packed_rows\(model\), sdpa"):
        in_one_row(model)
    enable_packed_rows(model)
    model.save_pretrained(tmp_path)
    assert "packed" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


PADDING, WHOLE = 5, 23


def block_by_block(model: Any, clean: Tensor, noised: Tensor) -> Tensor:
    """(length, hidden) of one text without padding: each block noised, after the clean blocks before it, alone."""
    states, size, backbone = [], model.config.block_size, backbone_and_head(model)[0]
    for start in range(0, len(clean), size):
        text = torch.cat([clean[:start], noised[start : start + size]])
        states.append(backbone(text[None])[0, start:])
    return torch.cat(states)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_two_streams_are_the_blocks_one_by_one(kind_dirs, name, attention):
    """With padding on either side, and for a copy without the first blocks."""
    model: Any = load_model(kind_dirs[name], attn_implementation=attention)
    size = model.config.block_size = 4
    clean = torch.randint(4, 64, (size, WHOLE), generator=keyed_generator(0))
    hidden = torch.rand(clean.shape, generator=keyed_generator(1)) < 0.6
    noised = clean.masked_fill(hidden, 3)
    ids, masks = torch.full((size, WHOLE + PADDING), 7), torch.zeros(size, WHOLE + PADDING, dtype=torch.long)
    copies = ids.clone()
    for row in range(size):
        place = slice(row, row + WHOLE)
        ids[row, place], copies[row, place], masks[row, place] = clean[row], noised[row], 1
    whole = two_stream_states(model, ids, copies, masks)
    part = two_stream_states(model, ids, copies[:, -17:], masks)
    for row in range(size):
        expected = block_by_block(model, clean[row], noised[row])
        assert_near(whole[row, row : row + WHOLE], expected)
        # The copy begins at column 11 and so in the middle of a block, unless row + 4 n is 11.
        first = next(k for k in range(WHOLE) if k % size == 0 and row + k >= WHOLE + PADDING - 17)
        assert_near(part[row, first + row - 11 : WHOLE + row - 11], expected[first:])
        alone = two_stream_states(model, clean[row : row + 1], noised[row : row + 1], None)[0]
        assert_near(alone, expected)
    assert whole.isfinite().all()
    assert part.isfinite().all()
