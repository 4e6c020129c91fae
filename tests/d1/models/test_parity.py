"""LLaDA and Dream, rebuilt here from their papers and configs in plain tensor algebra, against the native loader.

Both are pre-norm transformers with RMSNorm, rotary positions computed in fp32, SwiGLU and attention to every position
(LLaDA: arXiv 2502.09992, section 2 and appendix B; Dream: arXiv 2508.15487, a Qwen2.5 whose outputs stay shifted).
Weights are random, in the original checkpoint format.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from d1.models import load_model

DREAM_NAMES = {  # LLaDA's module -> Dream's, so that one reference serves both
    "wte": "embed_tokens",
    "ln_f": "norm",
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


def read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """config.json and weights; Dream's renamed to `wte.weight`, `blocks.0.q_proj.bias`, `ff_out.weight`..."""
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    if config["model_type"] == "llada":
        return config, {name.removeprefix("model.transformer."): w for name, w in weights.items()}
    back = {new: old for old, new in DREAM_NAMES.items()}
    named = {"ff_out.weight": weights.pop("lm_head.weight")}
    for name, w in weights.items():
        name = name.removeprefix("model.")
        block, rest = ("", name) if not name.startswith("layers.") else name.removeprefix("layers.").split(".", 1)
        module, kind = rest.rsplit(".", 1)
        named[(f"blocks.{block}." if block else "") + f"{back[module]}.{kind}"] = w
    return config, named


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions 0..T-1 on (T, head): the pairs (j, j + head/2) turn by T * theta^(-2j/head)."""
    length, head = x.shape
    half = head // 2
    out = torch.empty_like(x)
    for position in range(length):
        for j in range(half):
            angle = torch.tensor(position * theta ** (-2 * j / head), dtype=torch.float32)
            a, b = x[position, j], x[position, j + half]
            out[position, j] = a * angle.cos() - b * angle.sin()
            out[position, j + half] = b * angle.cos() + a * angle.sin()
    return out


def reference_logits(folder: Path, ids: Tensor) -> Tensor:
    """Logits (T, vocab) of one text, as the published code numbers them."""
    config, w = read(folder)
    llada = config["model_type"] == "llada"
    names = ("n_layers", "n_heads", "n_kv_heads") if llada else (
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    )  # fmt: skip
    layers, heads, kv_heads = (config[name] for name in names)
    eps, theta = config["rms_norm_eps"], config["rope_theta"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(1))

    x = w["wte.weight"][ids]
    for i in range(layers):
        block = f"blocks.{i}."
        h = rms_norm(x, w[block + "attn_norm.weight"], eps)
        q, k, v = (linear(h, block + f"{name}_proj") for name in "qkv")
        size = q.shape[-1] // heads
        out = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            qh = rotate(q[:, head * size : (head + 1) * size], theta)
            kh = rotate(k[:, shared * size : (shared + 1) * size], theta)
            scores = torch.softmax(qh @ kh.T / size**0.5, dim=-1)  # no mask: every position sees every position
            out.append(scores @ v[:, shared * size : (shared + 1) * size])
        x = x + linear(torch.cat(out, -1), block + "attn_out")
        h = rms_norm(x, w[block + "ff_norm.weight"], eps)
        gate = linear(h, block + "ff_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(h, block + "up_proj"), block + "ff_out")
    return linear(rms_norm(x, w["ln_f.weight"], eps), "ff_out")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_llada_equals_the_published_architecture(kind_dirs, attention):
    ids = torch.randint(0, 64, (13,), generator=torch.Generator().manual_seed(1))
    model = load_model(kind_dirs["llada"], attn_implementation=attention)
    expected = reference_logits(kind_dirs["llada"], ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(input_ids=ids[None]).logits[0], expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_llada_without_grouped_heads_and_with_a_padded_vocabulary(tmp_path, llada_writer):
    torch.manual_seed(3)
    folder = llada_writer(tmp_path, n_kv_heads=4, vocab_size=60)
    ids = torch.randint(0, 64, (9,), generator=torch.Generator().manual_seed(1))
    logits = load_model(folder)(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(logits, reference_logits(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_dream_equals_the_published_architecture_one_position_later(kind_dirs, attention):
    """Published logits at i predict token i + 1; the published sampler uses token 0's own logits for token 0."""
    ids = torch.randint(0, 64, (13,), generator=torch.Generator().manual_seed(1))
    model = load_model(kind_dirs["Dream"], attn_implementation=attention)
    published = reference_logits(kind_dirs["Dream"], ids)
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
