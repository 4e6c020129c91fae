"""A causal context (Nemotron-Labs-Diffusion): equal to a stock Ministral3, and to masks written out token by token."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Ministral3Config, Ministral3ForCausalLM

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.adapters import adapter_chain
from d1.models.attention import Blocks, has_causal_context
from d1.models.head import backbone_and_head
from d1.models.kinds import attention_name, native_config
from d1.models.packing import enable_packed_rows, packed_two_stream_states, two_stream_states
from d1.transformers_bridge import attention_kernel
from tests.d1.released import (
    CAUSAL,
    CONFIGS,
    MASK,
    VOCAB,
    config_of,
    of_nemotron,
    read_files,
    seen_by,
    twin_logits,
    write_released,
    write_shifted,
)
from tests.rounding import assert_near

LENGTHS, STARTS, SIZE = [37, 5, 22], [3, 0, 9], 6  # the first blocks begin at STARTS; the model's own size is 4
ROPE = CONFIGS[CAUSAL]["rope_parameters"]
OF_SIZES = {"3B": (16.0, 1e6), "14B": (16.0, 1e9), "3B-Base": (0.25, 1e6)}  # factor and theta, as released
ROPES = {name: ROPE | {"factor": factor, "rope_theta": theta} for name, (factor, theta) in OF_SIZES.items()}

SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
SIZES += ["num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"]


def text(length: int, key: int) -> Tensor:
    return torch.randint(8, VOCAB, (length,), generator=keyed_generator(key))


CLEAN = [text(length, length) for length in LENGTHS]
NOISED = [ids.masked_fill(torch.rand(len(ids), generator=keyed_generator(0)) < 0.6, MASK) for ids in CLEAN]


class Stock:
    """Transformers' own class, whose weights are read by name. If the model predicts the next token, noised tokens are
    scored by the token before them, the first one of a block by the clean one."""

    def __init__(self, folder: Path, kernel: str | None = None) -> None:
        released = json.loads((folder / "config.json").read_text())
        self.shift = released.get("predicts_next_token", False)
        config = Ministral3Config(**{name: released[name] for name in SIZES}, pad_token_id=None)
        self.model: Any = Ministral3ForCausalLM._from_config(config, attn_implementation=kernel).eval()
        names = str if self.shift else partial(of_nemotron, back=True)
        self.model.load_state_dict({names(name): weight for name, weight in read_files(folder).items()})

    def logits(self, ids: Tensor, **kwargs: Any) -> Tensor:
        return self.model(input_ids=ids, **kwargs).logits

    def block(self, clean: Tensor, noised: Tensor, start: int, end: int) -> Tensor:
        """Logits of a noised block after the clean text before it, by a mask that is written out."""
        ids = torch.cat([clean[:start], noised[start:end]])
        seen = [[j <= i or (i >= start and j >= start) for j in range(len(ids))] for i in range(len(ids))]
        logits = self.logits(ids[None], attention_mask=torch.tensor(seen)[None, None])[0]
        if self.shift:  # the first token of a text has none before it
            logits = torch.cat([logits[:1], logits[:-1]])
        return logits[start:]

    def blocks(self, clean: Tensor, noised: Tensor, start: int, size: int = SIZE) -> Tensor:
        """Logits of all noised blocks, one after the other; blocks of `size` lie around `start`."""
        edges = [0, *range(start % size or size, len(clean), size), len(clean)]
        return torch.cat([self.block(clean, noised, a, b) for a, b in pairwise(edges)])


@pytest.fixture(scope="module", params=ROPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return write_released(tmp_path_factory.mktemp("own") / "a", CAUSAL, rope_parameters=ROPES[request.param])


def test_a_clean_text_gets_the_logits_of_a_stock_ministral3(folder):
    """Also in batches with padding, and at positions where queries are scaled; and of the formulas, written out."""
    model: Any = load_model(folder)
    assert (attention_name(model.config), has_causal_context(model.config)) == ("causal-context", True)
    assert (model.config.pad_token_id, model.config.block_size, model.config.mask_token_id) == (0, 4, MASK)
    stock, width = Stock(folder, attention_kernel(model.config)), max(LENGTHS) + 2
    ids, visible = torch.full((3, width), 7), torch.zeros(3, width, dtype=torch.long)
    for row, own in enumerate(CLEAN):
        ids[row, row : row + len(own)], visible[row, row : row + len(own)] = own, 1
    with torch.no_grad():
        batch = model(input_ids=ids, attention_mask=visible).logits
        for row, own in enumerate(CLEAN):
            alone, expected = model(input_ids=own[None]).logits[0], stock.logits(own[None])[0]
            assert_near(alone, expected)
            assert_near(batch[row, row : row + len(own)], expected)
    written_out = twin_logits(folder, own, seen_by(CAUSAL, len(own), None))
    torch.testing.assert_close(alone, written_out, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shift", [False, True], ids=["in place", "shift"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@torch.no_grad()
def test_two_streams_are_the_masks_written_out(folder, tmp_path, kernel, shift):
    """Blocks of any size around any position, in padded batches and packed rows; clean states come in the same pass."""
    folder = write_shifted(tmp_path / "shifted", folder) if shift else folder
    model: Any = load_model(folder, attn_implementation=kernel)
    head, stock, width = backbone_and_head(model)[1], Stock(folder), max(LENGTHS) + 1
    ids, visible = torch.full((3, width), 7), torch.zeros(3, width, dtype=torch.long)
    copies = ids.clone()
    for row, own in enumerate(CLEAN):  # padding on one side, or on both
        at = slice(width - len(own) - row % 2, width - row % 2)
        ids[row, at], copies[row, at], visible[row, at] = own, NOISED[row], 1
    origin, clean_at = torch.tensor(STARTS)[:, None], torch.tensor([[1, 2], [width - 1, width - 3], [30, 31]])
    both = two_stream_states(model, ids, copies, visible, blocks=Blocks(SIZE, origin), clean_at=clean_at)
    streams = head(both[:, 2:])
    for row, own in enumerate(CLEAN):
        at = slice(width - len(own) - row % 2, width - row % 2)
        expected = stock.blocks(own, NOISED[row], STARTS[row])
        assert_near(streams[row, at], expected)
        for index, where in enumerate(clean_at[row].tolist()):
            if visible[row, where]:
                alone = stock.logits(own[None])[0, where - at.start]
                assert_near(head(both[row, index]), alone)
    enable_packed_rows(model)
    hidden, blocks = torch.cat(NOISED) == MASK, [Blocks(SIZE, start) for start in STARTS]
    row = [torch.cat(texts)[None] for texts in (CLEAN, NOISED)]
    predicted = torch.zeros_like(hidden).index_fill(0, torch.tensor([0, 36, 37, 50]), True)[None]
    packed = head(packed_two_stream_states(model, *row, LENGTHS, hidden[None], blocks=blocks, clean_at=predicted))
    texts = zip(CLEAN, NOISED, STARTS, strict=True)
    expected = torch.cat([stock.blocks(*one) for one in texts])[hidden]
    assert_near(packed[4:], expected)
    causal = torch.cat([stock.logits(own[None])[0] for own in CLEAN])[predicted[0]]
    assert_near(packed[:4], causal)


@pytest.mark.parametrize("shift", [False, True], ids=["in place", "shift"])
def test_the_block_that_is_being_filled_sees_itself(folder, tmp_path, shift):
    """The mask of the samplers: an opened block after clean text, and mask tokens after it, which nothing sees."""
    folder = write_shifted(tmp_path / "shifted", folder) if shift else folder
    model, stock, start, end = load_model(folder), Stock(folder), 22, 28
    ids = torch.cat([CLEAN[0][:start], NOISED[0][start:end], torch.full((9,), MASK)])
    opened = torch.zeros(1, len(ids), dtype=torch.bool)
    opened[:, start:end] = True
    backbone, head = backbone_and_head(model)
    with torch.no_grad():
        found = head(backbone(ids[None], None, opened=opened))[0]
        assert_near(found[start:end], stock.block(CLEAN[0], NOISED[0], start, end))
        assert_near(found[:start], stock.logits(ids[None])[0, :start])


@pytest.mark.parametrize(("fields", "message"), [
    ({"model_type": "nemotron_labs_diffusion_vlm"}, "it reads images: use a text model"),
    ({"dlm_paradigm": "autoregressive"}, "layers that are not supported: .*'dlm_paradigm': 'autoregressive'"),
    ({"sliding_window": 4096}, "'sliding_window': 4096"),
    ({"attention_bias": True, "mlp_bias": True}, "'attention_bias': True, 'mlp_bias': True"),
    ({"tie_word_embeddings": True}, "'tie_word_embeddings': True"),
    ({"head_dim": None}, "config.json lacks head_dim"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "lacks rope_parameters.llama_4_scaling_beta"),
])  # fmt: skip
def test_what_no_text_model_has_is_refused_by_name(tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(config_of(CAUSAL, **fields)))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_a_draft_adapter_and_a_window_are_refused(tmp_path):
    draft = tmp_path / "linear_spec_lora"
    draft.mkdir()
    (draft / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="linear_spec_lora is an adapter for speculative decoding"):
        adapter_chain(str(draft), None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ministral3", "sliding_window": 8}))
    with pytest.raises(ValueError, match="Ministral3 config asks for layers that are not supported"):
        native_config(str(tmp_path))
