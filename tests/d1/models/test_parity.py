"""LLaDA and Dream, compared with a slow reference in plain tensor algebra (`tests/d1/released.py`).

Weights are random, in the original checkpoint format. Dream is a Qwen2.5 whose outputs stay shifted.
"""

from __future__ import annotations

import pytest
import torch

from d1.models import load_model
from tests.d1.released import twin_logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_llada_equals_the_published_architecture(kind_dirs, attention):
    ids = torch.randint(0, 64, (13,), generator=torch.Generator().manual_seed(1))
    model = load_model(kind_dirs["llada"], attn_implementation=attention)
    expected = twin_logits(kind_dirs["llada"], ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(input_ids=ids[None]).logits[0], expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_llada_without_grouped_heads_and_with_a_padded_vocabulary(tmp_path, llada_writer):
    torch.manual_seed(3)
    folder = llada_writer(tmp_path, n_kv_heads=4, vocab_size=60)
    ids = torch.randint(0, 64, (9,), generator=torch.Generator().manual_seed(1))
    logits = load_model(folder)(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(logits, twin_logits(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_dream_equals_the_published_architecture_one_position_later(kind_dirs, attention):
    """Published logits at i predict token i + 1; the published sampler uses token 0's own logits for token 0."""
    ids = torch.randint(0, 64, (13,), generator=torch.Generator().manual_seed(1))
    model = load_model(kind_dirs["Dream"], attn_implementation=attention)
    published = twin_logits(kind_dirs["Dream"], ids)
    expected = torch.cat([published[:1], published[:-1]])
    torch.testing.assert_close(model(input_ids=ids[None]).logits[0], expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_dream_shift_skips_padding_wherever_it_is(kind_dirs):
    """The predecessor of a real token is the previous real token, even across a gap of padding."""
    model = load_model(kind_dirs["Dream"])
    ids = torch.randint(4, 64, (8,), generator=torch.Generator().manual_seed(2))
    alone = model(input_ids=ids[None]).logits[0]
    spread, real = torch.zeros(1, 14, dtype=torch.long), torch.tensor([2, 3, 4, 7, 8, 10, 11, 12])
    mask = torch.zeros_like(spread)
    spread[0, real], mask[0, real] = ids, 1
    torch.testing.assert_close(model(input_ids=spread, attention_mask=mask).logits[0, real], alone, atol=1e-5, rtol=0)
