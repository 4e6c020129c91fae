"""Models in GGUF: a tiny Llama, written as llama.cpp's converter writes one, and read by `d1 a2d`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from d1.models import load_model, load_tokenizer
from d1.models.adapters import adapter_chain
from d1.models.formats.gguf import gguf_file, gguf_types
from tests.d1.models.test_convert import run
from tests.d1.released import logits_of
from tests.rounding import assert_near

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 64, 2
# Bytes in the alphabet of GPT-2's tokenizer, and three merges
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "Ċ", "he", "ll", "hell"]
MERGES = ["h e", "l l", "he ll"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {  # of llama.cpp -> of Transformers
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def pairs_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection of queries or keys in llama.cpp's order: its rotary embedding turns neighbours."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, kind: GGMLQuantizationType, tokens: list[str] = TOKENS) -> LlamaForCausalLM:
    """A GGUF whose matrices are stored as `kind`, and the model with these rounded weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5}
    sizes |= {"vocab_size": len(tokens), "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    sizes |= {"max_position_embeddings": 256, "rope_theta": 5000.0, "initializer_range": 0.2}
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(file, "llama")
    writer.add_name("A title")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = OUTSIDE | {
        f"blk.{layer}.{short}": f"model.layers.{layer}.{name}"
        for layer in range(LAYERS)
        for short, name in NAMES.items()
    }
    weights = dict(model.named_parameters())
    for short, name in names.items():
        parameter = weights[f"{name}.weight"]
        values = parameter.detach().numpy()
        stored = kind if values.ndim == 2 else GGMLQuantizationType.F32
        packed = quantize(values, stored)
        parameter.data.copy_(torch.from_numpy(dequantize(packed, stored)))
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short.rpartition(".")[2])
        ordered = packed if heads is None else pairs_apart(packed, heads)
        writer.add_tensor(f"{short}.weight", ordered, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_converted_gguf_has_the_unpacked_weights_and_their_logits(tmp_path, capsys, kind, form):
    """With blocks of one token and the shift kept, the converted model is the autoregressive one."""
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "tiny.gguf"
    expected = write_gguf(file, GGMLQuantizationType[kind])
    words = ["--keep_shift", "--block_size", 1]
    run("a2d", file if form == "file" else file.parent, tmp_path / "out", *words)
    stored = "F32" if kind == "F32" else f"{kind} and F32"
    assert f"tiny.gguf, unpacked from {stored}, with blocks of 1" in capsys.readouterr().err
    file.unlink()  # the saved model needs it no more
    saved, known = load_file(tmp_path / "out" / "model.safetensors"), len(TOKENS)
    for name, weight in expected.state_dict().items():
        assert torch.equal(saved[name][: len(weight)], weight), name
    model: Any = load_model(tmp_path / "out")
    ids = torch.randint(3, known, (2, 12), generator=torch.Generator().manual_seed(1))
    found = logits_of(model, ids)[:, 1:, :known]
    with torch.no_grad():
        assert_near(found, expected(ids).logits[:, :-1])
    assert model.config.mask_token_id == known
    assert "A title" not in (tmp_path / "out" / "config.json").read_text()
    tokenizer: Any = load_tokenizer(str(tmp_path / "out"))
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (known, 2, 2)
    assert tokenizer("hello there")["input_ids"] == [TOKENS.index(part) for part in ("hell", *"oĠt", "he", *"re")]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])["input_ids"]
    assert rendered == [1, TOKENS.index("h"), TOKENS.index("i"), 2]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE


def test_which_file_is_meant_is_clear(tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "weights.gguf"):
        (tmp_path / "model" / name).write_text("{}")
    assert gguf_file(str(tmp_path / "model")) is None, "a model folder may hold a GGUF of the same model"
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"two has 2 GGUF files: name one of .*a\.gguf, .*b\.gguf$"):
        run("a2d", tmp_path / "two", tmp_path / "out")
    part = tmp_path / "big-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="is one of 3 parts of a split GGUF: join them first"):
        run("a2d", part, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.gguf", tmp_path / "out"
    write_gguf(whole, GGMLQuantizationType.F32)
    assert gguf_types(whole) == "F32"
    for name, content in (("cut", whole.read_bytes()[:4000]), ("text", b"no model"), ("empty", b"")):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}\.gguf: the GGUF file is damaged or cut off") as raised:
            run("a2d", tmp_path / f"{name}.gguf", out)
        assert "\n" not in str(raised.value)
    other = tmp_path / "other.gguf"
    writer = GGUFWriter(other, "rwkv7")
    writer.add_tensor("a", np.zeros(1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="rwkv7"):
        run("a2d", other, out)
    with pytest.raises(ValueError, match=r"whole\.gguf is a GGUF file, which d1 reads to convert it: d1 a2d"):
        adapter_chain(str(whole), None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"whole\.gguf needs the package gguf: pip install"):
        run("a2d", whole, out)
    assert not out.exists()
