"""merge, export and a2d, through the command line's own parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from d1.__main__ import main, make_parser
from d1.models import load_model, load_tokenizer
from d1.models.tokenizer import PLAIN_CHAT_TEMPLATE
from tests.faults import full_disk

IDS = torch.randint(4, 60, (2, 11), generator=torch.Generator().manual_seed(0))


def run(*words: object) -> None:
    main(make_parser().parse_args([str(word) for word in words]))


@torch.no_grad()
def logits_of(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids).logits


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: w for file in folder.glob("*.safetensors") for name, w in load_file(file).items()}


def adapter_on(path: Path, folder: Path, seed: int, size: float = 0.2) -> None:
    torch.manual_seed(seed)
    peft: Any = get_peft_model(load_model(path), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=size)
    peft.save_pretrained(str(folder))


@pytest.mark.parametrize("name", ["llada", "Dream"])
def test_merge_folds_every_adapter_in(kind_dirs, tmp_path, name):
    base = kind_dirs[name]
    adapter_on(base, tmp_path / "one", seed=1)
    adapter_on(base, tmp_path / "two", seed=2)
    run("merge", base, tmp_path / "one", tmp_path / "two", tmp_path / "out")
    expected: Any = load_model(base)
    scale = 8 / 4  # PEFT's default alpha over r
    for adapter in ("one", "two"):
        lora = load_file(tmp_path / adapter / "adapter_model.safetensors")
        for key, a in lora.items():
            if key.endswith("lora_A.weight"):
                weight = key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                delta = scale * lora[key.replace("lora_A", "lora_B")] @ a
                expected.get_parameter(weight).data += delta
    merged = load_model(tmp_path / "out")
    assert (logits_of(merged) - logits_of(load_model(base))).abs().max() > 0.1
    torch.testing.assert_close(logits_of(merged), logits_of(expected), atol=1e-4, rtol=1e-4)
    assert not list((tmp_path / "out").glob("adapter*"))


def test_merge_keeps_the_dtype_of_the_base_or_takes_another(kind_dirs, tmp_path):
    load_model(kind_dirs["llama"], torch.bfloat16).save_pretrained(tmp_path / "base")
    adapter_on(tmp_path / "base", tmp_path / "adapter", seed=1)
    run("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "bf16")
    run("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "fp32", "--dtype", "float32")
    assert {w.dtype for w in weights_of(tmp_path / "bf16").values()} == {torch.bfloat16}
    assert {w.dtype for w in weights_of(tmp_path / "fp32").values()} == {torch.float32}


@pytest.mark.parametrize("command", [["merge", "a"], ["a2d"], ["export", "--format", "llada"]])
def test_nothing_is_written_over(kind_dirs, tmp_path, command):
    (tmp_path / "kept").write_text("")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        run(command[0], kind_dirs["llama"], *command[1:], tmp_path)


@pytest.mark.parametrize("command", ["merge", "merge released", "export", "a2d"])
def test_the_model_has_the_mode_of_the_umask_and_a_full_disk_is_named(kind_dirs, tmp_path, command):
    """As the other files of the folder; safetensors itself makes its files private."""
    if command.startswith("merge"):
        base = kind_dirs["llada" if "released" in command else "llama"]
        adapter_on(base, tmp_path / "adapter", seed=1)
        words = ["merge", base, tmp_path / "adapter", "{}"]
    elif command == "export":
        words = ["export", kind_dirs["llada"], "{}", "--format", "llada"]
    else:
        autoregressive(tmp_path / "causal", "llama", 60, 60)
        words = ["a2d", tmp_path / "causal", "{}"]
    run(*(tmp_path / "out" if word == "{}" else word for word in words))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert list((tmp_path / "out").glob("*.safetensors"))
    (tmp_path / "new").write_text("")
    assert modes == {(tmp_path / "new").stat().st_mode & 0o777}
    message = rf"^no room for the model in {tmp_path}/full \(File too large; \d+\.\d GB .* delete that folder"
    with full_disk(8_000), pytest.raises(OSError, match=message):
        run(*(tmp_path / "full" if word == "{}" else word for word in words))


def test_export_writes_lladas_own_names_bit_for_bit(kind_dirs, tmp_path):
    source = kind_dirs["llada"]
    load_model(source).save_pretrained(tmp_path / "native")
    assert "model.embed_tokens.weight" in weights_of(tmp_path / "native")
    run("export", tmp_path / "native", tmp_path / "llada", "--format", "llada")
    before, after = weights_of(source), weights_of(tmp_path / "llada")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "llada"))
    assert {k: new.get(k) for k in old if k != "auto_map"} == {k: v for k, v in old.items() if k != "auto_map"}
    assert new["auto_map"]["AutoModel"].endswith("modeling_llada.LLaDAModelLM")
    assert torch.equal(logits_of(load_model(tmp_path / "llada")), logits_of(load_model(source)))


def test_export_keeps_every_field_of_the_published_config(tmp_path, llada_writer):
    """As on the hub, where some fields have no meaning for a Llama and the embedding is larger than the vocabulary."""
    hub = {"alibi_bias_max": 8.0, "attention_layer_norm_with_affine": True, "block_group_size": 1, "bos_token_id": 1}
    hub |= {"init_cutoff_factor": None, "init_device": "meta", "init_std": 0.02, "init_fn": "mitchell", "mlp_ratio": 4}
    hub |= {"precision": "amp_bf16", "flash_attention": False, "use_cache": False, "vocab_size": 60}
    source = llada_writer(tmp_path / "hub", torch.bfloat16, **hub)
    load_model(source, "auto").save_pretrained(tmp_path / "native")
    run("export", tmp_path / "native", tmp_path / "out", "--format", "llada")
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert new.pop("torch_dtype") == "bfloat16"
    assert old.keys() == new.keys()
    assert {name: value for name, value in new.items() if value != old[name]}.keys() == {"auto_map"}


@pytest.mark.parametrize("command", [["export", "--format", "llada"], ["a2d"]])
def test_an_adapter_is_no_model_to_convert(kind_dirs, tmp_path, command):
    adapter_on(kind_dirs["llama"], tmp_path / "adapter", seed=1)
    with pytest.raises(ValueError, match=r"adapter is an adapter: run `python -m d1 merge"):
        run(command[0], tmp_path / "adapter", *command[1:], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_takes_the_mask_from_the_tokenizer_where_the_config_has_none(tiny_model_dir, tmp_path):
    run("export", tiny_model_dir, tmp_path / "out", "--format", "llada")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["mask_token_id"], config["eos_token_id"], config["pad_token_id"]) == (3, 2, 0)


@pytest.mark.parametrize("name", ["qwen2", "gemma", "bert"])
def test_export_refuses_what_lladas_code_cannot_run(kind_dirs, tmp_path, name):
    with pytest.raises(ValueError, match="only a Llama"):
        run("export", kind_dirs[name], tmp_path / "out", "--format", "llada")


def autoregressive(folder: Path, kind: str, words: int, rows: int, mask: str | None = None, tied: bool = False) -> Path:
    """A causal checkpoint with a tokenizer of `words` words and an embedding of `rows` rows."""
    vocabulary = {
        word: i for i, word in enumerate(["<unk>", "<|endoftext|>", *[f"w{i}" for i in range(words - 3)], "<spare>"])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<|endoftext|>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    fields: dict[str, Any] = dict(vocab_size=rows, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    fields |= dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.2)
    fields |= dict(bos_token_id=None, eos_token_id=1, pad_token_id=None)
    model: Any = LlamaForCausalLM(LlamaConfig(**fields)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**fields))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind_", "words", "rows", "token", "tied"),
    [
        ("llama", 60, 60, "<|mask|>", False),  # a new row
        ("qwen2", 60, 60, "<|mask|>", True),  # one table serves as both
        ("qwen2", 60, 64, "<|mask|>", False),  # a row of the padding
        ("llama", 60, 60, "<spare>", False),  # a spare token
    ],
)
def test_a2d_turns_a_causal_model_both_ways(tmp_path, kind_, words, rows, token, tied):
    source = autoregressive(tmp_path / "ar", kind_, words, rows, tied=tied)
    run("a2d", source, tmp_path / "out", "--mask_token", token)
    tokenizer: Any = load_tokenizer(tmp_path / "out")
    model: Any = load_model(tmp_path / "out")
    mask = tokenizer.mask_token_id
    assert mask == (59 if token == "<spare>" else 60)
    assert model.config.mask_token_id == mask
    assert tokenizer.pad_token == "<|endoftext|>"
    before = weights_of(source)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name not in before:
            continue
        known = [i for i in range(words) if i != mask]
        table = model.get_parameter(name)
        assert len(table) == max(rows, mask + 1)
        assert torch.equal(table[known], before[name][known])
        torch.testing.assert_close(table[mask], before[name][known].mean(0), atol=1e-6, rtol=0)
        assert torch.equal(table[max(rows, mask) :], table[mask].expand_as(table[max(rows, mask) :]))
    ids = torch.tensor([[5, mask, 7, 8]])
    changed = torch.tensor([[5, mask, 7, 9]])
    assert (logits_of(model, ids) - logits_of(model, changed))[0, 0].abs().max() > 1e-4, "still causal"
    model.train()(input_ids=ids).logits[0, 1].logsumexp(-1).backward()
    assert model.get_input_embeddings().weight.grad[mask].abs().sum() > 0


def test_a2d_can_keep_predicting_the_next_position(tmp_path):
    source = autoregressive(tmp_path / "ar", "qwen2", 60, 60)
    run("a2d", source, tmp_path / "plain")
    run("a2d", source, tmp_path / "shifted", "--keep_shift", "--plain_chat_template")
    assert load_tokenizer(tmp_path / "plain").chat_template is None
    assert load_tokenizer(tmp_path / "shifted").chat_template == PLAIN_CHAT_TEMPLATE
    plain, shifted = (logits_of(load_model(tmp_path / name)) for name in ("plain", "shifted"))
    torch.testing.assert_close(shifted[:, 1:], plain[:, :-1], atol=1e-6, rtol=0)


def test_a2d_makes_block_causal_models(tmp_path):
    """With one token per block and the shift kept, the model is unchanged: it predicts the next token from earlier
    ones."""
    source = autoregressive(tmp_path / "ar", "qwen2", 60, 60)
    causal = logits_of(Qwen2ForCausalLM.from_pretrained(source).eval())
    run("a2d", source, tmp_path / "one", "--block_size", 1, "--keep_shift")
    torch.testing.assert_close(logits_of(load_model(tmp_path / "one"))[:, 1:, :60], causal[:, :-1], atol=1e-5, rtol=0)
    run("a2d", source, tmp_path / "long", "--block_size", 64)
    run("a2d", source, tmp_path / "full")
    found, full = (logits_of(load_model(tmp_path / name)) for name in ("long", "full"))
    torch.testing.assert_close(found, full, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="--block_size 0 "):
        run("a2d", source, tmp_path / "none", "--block_size", 0)


def test_a2d_refuses_a_masked_model(kind_dirs, tiny_model_dir, tiny_block_dir, tmp_path):
    """Whatever says that it is one: its kind, its config or its tokenizer."""
    source = autoregressive(tmp_path / "ar", "llama", 60, 60)
    run("a2d", source, tmp_path / "once")
    folders = {kind_dirs[name]: f"its kind is {name}" for name in ("llada", "Dream", "sdar", "llada2_moe")}
    folders |= {kind_dirs["bert"]: "it is an encoder, bert", tmp_path / "once": "its config.json has a mask_token_id"}
    folders |= {tiny_model_dir: "its config.json says is_causal false"}
    folders |= {tiny_block_dir: "its config.json has a block_size"}
    for folder, reason in folders.items():
        with pytest.raises(ValueError, match=f"is a masked model already, not an autoregressive decoder: {reason}"):
            run("a2d", folder, tmp_path / "out")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source, mask_token="<|own|>")
    tokenizer.save_pretrained(source)
    with pytest.raises(ValueError, match=r"its tokenizer has the mask token '<\|own\|>', so it may be a masked model"):
        run("a2d", source, tmp_path / "out")
    run("a2d", source, tmp_path / "out", "--mask_token", "<|own|>")


@pytest.mark.parametrize(
    ("token", "message"), [("<|endoftext|>", "is also the eos_token"), ("w5", "the mask token 'w5' is ordinary text")]
)
def test_a2d_refuses_a_mask_token_with_another_meaning(tmp_path, token, message):
    source = autoregressive(tmp_path / "ar", "llama", 60, 60)
    with pytest.raises(ValueError, match=message):
        run("a2d", source, tmp_path / "out", "--mask_token", token)
    assert not (tmp_path / "out").exists()


def test_what_was_written_is_said(kind_dirs, tmp_path, capsys):
    source, out = autoregressive(tmp_path / "ar", "llama", 60, 60), tmp_path / "out"
    run("a2d", source, out, "--block_size", 4)
    count = sum(weight.numel() for weight in weights_of(out).values())
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"Written: {out} (llama, {count:,} parameters in float32): {source} with blocks of 4 and the mask token "
        f"<|mask|>. Next, train it: d1 sft --model_name {out}"
    )
    adapter_on(kind_dirs["llada"], tmp_path / "adapter", seed=1)
    run("merge", kind_dirs["llada"], tmp_path / "adapter", tmp_path / "merged")
    said = f"): {kind_dirs['llada']} with {tmp_path / 'adapter'} merged into it\n"
    assert capsys.readouterr().err.endswith(said)
    run("export", tmp_path / "merged", tmp_path / "llada", "--format", "llada")
    said = f"{tmp_path / 'merged'}, which had the format llada already, for the code of llada\n"
    assert capsys.readouterr().err.endswith(said)
    load_model(tmp_path / "merged").save_pretrained(tmp_path / "native")
    run("export", tmp_path / "native", tmp_path / "again", "--format", "llada")
    assert capsys.readouterr().err.endswith(f"): {tmp_path / 'native'}, for the code of llada\n")


def test_export_needs_a_mask_token(kind_dirs, tmp_path):
    with pytest.raises(ValueError, match="llama names no mask token, which the format llada needs"):
        run("export", kind_dirs["llama"], tmp_path / "out", "--format", "llada")
    assert not (tmp_path / "out").exists()
