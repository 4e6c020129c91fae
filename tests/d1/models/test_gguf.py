"""Models in GGUF: a tiny Llama, written as llama.cpp's converter writes one, and read by `d1 a2d`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
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


def write_gguf(
    file: Path,
    kind: GGMLQuantizationType,
    tokens: list[str] = TOKENS,
    more: Callable[[GGUFWriter], None] = lambda writer: None,
) -> LlamaForCausalLM:
    """A GGUF whose matrices are stored as `kind`, and the model with these rounded weights; `more` adds to the file."""
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
    more(writer)
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


def with_rope_scaling(scaling: RopeScalingType | None, factor: float) -> Callable[[GGUFWriter], None]:
    def add(writer: GGUFWriter) -> None:
        if scaling is None:
            writer.add_float32("llama.rope.scale_linear", factor)
        else:
            writer.add_rope_scaling_type(scaling)
            writer.add_rope_scaling_factor(factor)

    return add


@pytest.mark.parametrize("scaling", [RopeScalingType.LINEAR, RopeScalingType.NONE, None])
def test_a_linear_scaling_of_positions_is_kept(tmp_path, scaling):
    factor = 4.0
    expected = write_gguf(tmp_path / "x.gguf", GGMLQuantizationType.F32, more=with_rope_scaling(scaling, factor))
    run("a2d", tmp_path / "x.gguf", tmp_path / "out", "--keep_shift", "--block_size", 1)
    fields = expected.config.to_dict()
    if scaling != RopeScalingType.NONE:
        fields["rope_parameters"] |= {"rope_type": "linear", "factor": factor}
    scaled = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    scaled.load_state_dict(expected.state_dict())
    known = len(TOKENS)
    ids = torch.randint(3, known, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_near(logits_of(load_model(tmp_path / "out"), ids)[:, 1:, :known], scaled(ids).logits[:, :-1])


def add_biases(writer: GGUFWriter) -> None:
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.attn_q.bias", np.ones(HIDDEN, dtype=np.float32))


def add_factors(writer: GGUFWriter) -> None:
    """What llama.cpp's converter makes of Llama 3's scaling of positions."""
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (with_rope_scaling(RopeScalingType.YARN, 4.0), r"\(llama\.rope\.scaling\.type yarn, factor 4\), which is not"),
        (add_factors, r"has 1 tensors that a llama of Transformers does not use, such as rope_freqs\.weight: without"),
        (add_biases, r"has 2 tensors .* such as blk\.0\.attn_q\.bias, blk\.1\.attn_q\.bias: without them"),
    ],
)
def test_what_transformers_leaves_out_is_refused_by_name(tmp_path, more, problem):
    write_gguf(tmp_path / "x.gguf", GGMLQuantizationType.F32, more=more)
    with pytest.raises(ValueError, match=rf"x\.gguf .*{problem}"):
        run("a2d", tmp_path / "x.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_files_of_its_folder_do_not_count(tiny_model_dir, tmp_path):
    """The tokenizer, the generation config and the adapter of something else."""
    write_gguf(tmp_path / "alone.gguf", GGMLQuantizationType.F32)
    run("a2d", tmp_path / "alone.gguf", tmp_path / "expected")
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in tiny_model_dir.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 33, "temperature": 0.3}))
    config = {"peft_type": "LORA", "base_model_name_or_path": "/nowhere", "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "alone.gguf").rename(folder / "alone.gguf")
    run("a2d", folder / "alone.gguf", tmp_path / "out")
    for file in (tmp_path / "expected").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
