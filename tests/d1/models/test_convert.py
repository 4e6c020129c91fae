"""merge, export and a2d, through the command line's own parser; models published as block diffusion or as mixtures of
experts: read, run and written back as they were."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from d1.__main__ import main, make_parser
from d1.models import convert, load_model, load_tokenizer
from d1.models.adapters import save_learnt
from d1.models.folder import ModelFolder
from d1.models.kinds import KINDS, kind_of
from d1.models.load import REFUSAL
from d1.models.tokenizer import PLAIN_CHAT_TEMPLATE
from d1.sampling import SamplingSettings, rollout
from d1.scoring import Views, score
from d1.scoring.inputs import CanvasBlocks
from pocket.make_base import build_model
from tests.commands import ROOT
from tests.d1.released import (
    CONFIGS,
    IDS,
    config_of,
    logits_of,
    read_files,
    seen_by,
    twin_logits,
    write_files,
    write_released,
    write_with_tokenizer,
)
from tests.faults import edit_json, full_disk
from tests.rounding import LOGITS, assert_near

POCKET = ROOT / "pocket" / "base"


def run(*words: object) -> None:
    main(make_parser().parse_args([str(word) for word in words]))


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
    assert_near(logits_of(merged), logits_of(expected), least=2 * LOGITS)  # a merged weight is rounded once more
    assert not list((tmp_path / "out").glob("adapter*"))
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]  # a small model


def test_merge_keeps_the_dtype_of_the_base_or_takes_another(kind_dirs, tmp_path):
    load_model(kind_dirs["llama"], torch.bfloat16).save_pretrained(tmp_path / "base")
    adapter_on(tmp_path / "base", tmp_path / "adapter", seed=1)
    run("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "bf16")
    run("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "fp32", "--dtype", "float32")
    assert {w.dtype for w in read_files(tmp_path / "bf16").values()} == {torch.bfloat16}
    assert {w.dtype for w in read_files(tmp_path / "fp32").values()} == {torch.float32}


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
    assert "model.embed_tokens.weight" in read_files(tmp_path / "native")
    run("export", tmp_path / "native", tmp_path / "llada", "--format", "llada")
    before, after = read_files(source), read_files(tmp_path / "llada")
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


def test_export_keeps_the_blocks_of_a_config_that_had_them(tmp_path, llada_writer):
    source = llada_writer(tmp_path / "blocks", torch.float32, block_size=4)
    load_model(source).save_pretrained(tmp_path / "native")
    run("export", tmp_path / "native", tmp_path / "out", "--format", "llada")
    assert load_model(tmp_path / "out").config.block_size == 4


def test_export_takes_the_mask_from_the_tokenizer_where_the_config_has_none(tiny_model_dir, tmp_path):
    run("export", tiny_model_dir, tmp_path / "out", "--format", "llada")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["mask_token_id"], config["eos_token_id"], config["pad_token_id"]) == (3, 2, 0)


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
    before = read_files(source)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name not in before:
            continue
        known = [i for i in range(words) if i != mask]
        table = model.get_parameter(name)
        assert len(table) == max(rows, mask + 1)
        assert torch.equal(table[known], before[name][known])
        assert_near(table[mask], before[name][known].mean(0))
        assert torch.equal(table[max(rows, mask) :], table[mask].expand_as(table[max(rows, mask) :]))
    ids = torch.tensor([[5, mask, 7, 8]])
    changed = torch.tensor([[5, mask, 7, 9]])
    assert (logits_of(model, ids) - logits_of(model, changed))[0, 0].abs().max() > 1e-4, "still causal"
    model.train()(input_ids=ids).logits[0, 1].logsumexp(-1).backward()
    assert model.get_input_embeddings().weight.grad[mask].abs().sum() > 0


def test_a_mask_token_that_would_get_the_id_of_a_word_is_refused(tmp_path):
    """The ids of the vocabulary have holes, and the tokenizers library counts the tokens."""
    source = autoregressive(tmp_path / "ar", "llama", 60, 70)
    fields = json.loads((source / "tokenizer.json").read_text())
    for word, number in fields["model"]["vocab"].items():
        if number >= 50:
            fields["model"]["vocab"][word] = number + 5
    (source / "tokenizer.json").write_text(json.dumps(fields))
    message = r"ids with holes, so a new token '<\|mask\|>' gets the id 60, which is that of 'w53': name a spare token"
    with pytest.raises(ValueError, match=message):
        run("a2d", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run("a2d", source, tmp_path / "out", "--mask_token", "<spare>")
    assert load_tokenizer(tmp_path / "out").mask_token_id == 64


def test_plain_transformers_refuses_to_write_from_left_to_right_with_a_converted_model(tmp_path):
    """The class of Transformers loads it; its `generate` would print garbage, and says what the model is instead."""
    source = autoregressive(tmp_path / "ar", "llama", 60, 60)
    plain = AutoModelForCausalLM.from_pretrained(source)
    plain.generation_config.max_new_tokens = 500
    plain.save_pretrained(source)
    ids = torch.tensor([[5, 7, 8]])
    assert plain.generate(ids, max_new_tokens=2).shape[1] > 3
    run("a2d", source, tmp_path / "out")
    for folder in (tmp_path / "out", POCKET):
        converted = AutoModelForCausalLM.from_pretrained(folder)
        assert converted.config.is_causal is False
        assert converted(ids).logits.shape[:2] == (1, 3)  # forward passes are as before
        for how in ({}, {"max_new_tokens": 2}, {"do_sample": True}, {"num_beams": 2}):
            with pytest.raises(ValueError, match=r"this is a masked diffusion model.*python -m d1 chat FOLDER"):
                converted.generate(ids, **how)
        converted.save_pretrained(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert again.generation_config.sequence_bias == REFUSAL
    # The limit of an autoregressive model is not the length of a canvas.
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()).get("max_new_tokens") is None
    load_model(tmp_path / "out").save_pretrained(tmp_path / "saved")  # as training does
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["sequence_bias"] == REFUSAL


def test_pocket_models_are_written_with_their_length_and_the_refusal():
    tokenizer = load_tokenizer(POCKET)
    config = build_model(tokenizer, seed=0).generation_config
    stored = json.loads((POCKET / "generation_config.json").read_text())
    assert (config.max_new_tokens, config.sequence_bias) == (stored["max_new_tokens"], stored["sequence_bias"])
    for folder in sorted(POCKET.parent.glob("*base")):
        assert json.loads((folder / "generation_config.json").read_text())["sequence_bias"] == REFUSAL


def test_a2d_can_keep_predicting_the_next_position(tmp_path):
    source = autoregressive(tmp_path / "ar", "qwen2", 60, 60)
    run("a2d", source, tmp_path / "plain")
    run("a2d", source, tmp_path / "shifted", "--keep_shift", "--plain_chat_template")
    assert load_tokenizer(tmp_path / "plain").chat_template is None
    assert load_tokenizer(tmp_path / "shifted").chat_template == PLAIN_CHAT_TEMPLATE
    plain, shifted = (logits_of(load_model(tmp_path / name)) for name in ("plain", "shifted"))
    assert_near(shifted[:, 1:], plain[:, :-1])


def test_a2d_makes_block_causal_models(tmp_path):
    """With one token per block and the shift kept, the model is unchanged: it predicts the next token from earlier
    ones."""
    source = autoregressive(tmp_path / "ar", "qwen2", 60, 60)
    causal = logits_of(Qwen2ForCausalLM.from_pretrained(source).eval())
    run("a2d", source, tmp_path / "one", "--block_size", 1, "--keep_shift")
    assert_near(logits_of(load_model(tmp_path / "one"))[:, 1:, :60], causal[:, :-1])
    run("a2d", source, tmp_path / "long", "--block_size", 64)
    run("a2d", source, tmp_path / "full")
    found, full = (logits_of(load_model(tmp_path / name)) for name in ("long", "full"))
    assert_near(found, full)
    with pytest.raises(ValueError, match="--block_size 0 "):
        run("a2d", source, tmp_path / "none", "--block_size", 0)


@pytest.mark.parametrize("kind_", ["llama", "qwen2"])
@pytest.mark.parametrize("words", [(), ("--keep_shift",)], ids=["in place", "shift"])
@torch.no_grad()
def test_a_causal_context_keeps_the_autoregressive_model(tmp_path, kind_, words):
    """Before any training: clean text gets the logits that it had, at block 1 greedy samples are what `generate` of
    Transformers gives, and scores are the log-probabilities of the autoregressive model. Rows differ in length."""
    source, widths, new = autoregressive(tmp_path / "ar", kind_, 60, 60), (9, 4), 12
    run("a2d", source, tmp_path / "out", "--causal_context", "--block_size", 8, *words)
    model: Any = load_model(tmp_path / "out", torch.float64)
    stock: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    config, mask = model.config, model.config.mask_token_id
    assert (config.attention_pattern, config.block_size) == ("causal-context", 8)
    assert getattr(config, "predicts_next_token", False) == bool(words)
    prompts = torch.randint(2, 60, (2, max(widths)), generator=torch.Generator().manual_seed(0))
    real = torch.tensor([[0] * (max(widths) - width) + [1] * width for width in widths])
    torch.testing.assert_close(logits_of(model, prompts)[..., :60], stock(prompts).logits, atol=1e-9, rtol=0)
    model.get_output_embeddings().weight[mask] = -model.get_output_embeddings().weight[:60].sum(0)  # never the best
    for first_token in ("causal", "masked") if words else ("causal",):
        settings = SamplingSettings(new, 1, new, first_token=first_token)
        taken = rollout(model, prompts, real, settings, mask_token_id=mask)
        for row, width in enumerate(widths):
            prompt = prompts[row : row + 1, -width:]
            alone = stock.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None)
            assert torch.equal(taken.ids[row, -width - new :], alone[0])
            expected = next_token_logps(stock, mask, model, alone, width)
            assert_near(taken.logps[row].double(), expected, least=LOGITS)
            views = mean_field_views(1, width, new)
            scored = score(
                model,
                prompt,
                torch.ones_like(prompt),
                alone[:, width:],
                views,
                mask_token_id=mask,
                gen_length=new,
                blocks=CanvasBlocks.from_config(config, 1, first_token),
            )
            torch.testing.assert_close(scored.logps[0], expected, atol=1e-9, rtol=0)


def mean_field_views(rows: int, prompt: int, canvas: int) -> Views:
    """One view that hides the whole canvas."""
    hidden = torch.cat([torch.zeros(rows, prompt), torch.ones(rows, canvas)], dim=1).bool()
    return Views(hidden.unsqueeze(1), torch.ones(rows, 1, canvas))


def next_token_logps(stock: Any, mask: int, model: Any, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Log-probabilities of the tokens after the first `width` of `ids` (1, length), among the converted model's: its
    head has a row more, that of the mask."""
    states = stock.base_model(ids).last_hidden_state[0, width - 1 : -1]
    logits = torch.cat([stock.lm_head(states), states @ model.get_output_embeddings().weight[mask, :, None]], dim=-1)
    return logits.log_softmax(-1).gather(1, ids[0, width:, None])[:, 0]


def test_a_causal_context_needs_blocks_and_layers_without_windows(kind_dirs, tmp_path):
    source, out = autoregressive(tmp_path / "ar", "llama", 60, 60), tmp_path / "out"
    with pytest.raises(ValueError, match="--causal_context needs --block_size"):
        run("a2d", source, out, "--causal_context")
    windowed = shutil.copytree(kind_dirs["gemma3_text"], tmp_path / "windowed")
    for file in source.glob("tokenizer*"):
        shutil.copy(file, windowed)
    with pytest.raises(ValueError, match="causal-context attention needs a decoder without windows, not gemma3_text"):
        run("a2d", windowed, out, "--causal_context", "--block_size", 8)
    assert not out.exists()
    for words, reason in (
        (("--keep_shift",), "'predicts_next_token': True"),
        (("--causal_context", "--block_size", 8), "'attention_pattern': 'causal-context'"),
        (("--block_size", 8), "'block_size': 8"),
    ):
        run("a2d", source, tmp_path / words[0], *words)
        with pytest.raises(ValueError, match=rf"can be written as LLaDA: .*{reason}"):
            run("export", tmp_path / words[0], out, "--format", "llada")


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
    with pytest.raises(ValueError, match=r"its tokenizer has a mask token .* name it: --mask_token '<\|own\|>'"):
        run("a2d", source, tmp_path / "out")
    run("a2d", source, tmp_path / "out", "--mask_token", "<|own|>")


def test_what_cannot_be_converted_is_refused_and_nothing_is_written(kind_dirs, tmp_path, monkeypatch):
    adapter_on(kind_dirs["llama"], tmp_path / "adapter", seed=1)
    source, out = autoregressive(tmp_path / "ar", "llama", 60, 60), tmp_path / "out"
    for words, message in (
        (["a2d", tmp_path / "adapter", out], r"adapter is an adapter, .* fold it into \S+llama with PEFT's"),
        (["a2d", source, out, "--mask_token", "<|endoftext|>"], "is also the eos_token"),
        (["a2d", source, out, "--mask_token", "w5"], "the mask token 'w5' is ordinary text"),
        (["a2d", source, out, "--mask_token", "new"], "the mask token 'new' is ordinary text"),
        (["a2d", source, out, "--mask_token", "two words"], "the mask token 'two words' is ordinary text"),
        (["a2d", source, out, "--mask_token", " "], "the mask token ' ' is ordinary text"),
        (
            ["export", tmp_path / "adapter", out, "--format", "sdar"],
            "is on a llama, which has no released format 'sdar'",
        ),
        (
            ["export", kind_dirs["llama"], out, "--format", "llada"],
            "set mask_token_id in its config.json, or put its tokenizer into",
        ),
        (["export", kind_dirs["qwen3"], out, "--format", "sdar"], "only a model that was read from this format"),
        (["export", kind_dirs["sdar"], out, "--format", "sdar_moe"], "was released as 'sdar', not as 'sdar_moe'"),
        *((["export", kind_dirs[k], out, "--format", "llada"], "only a Llama") for k in ("qwen2", "gemma", "bert")),
    ):
        with pytest.raises(ValueError, match=message):
            run(*words)
    assert not out.exists()
    with pytest.raises(ValueError, match="'qwen3' is not a released format"):
        convert.export(str(kind_dirs["sdar"]), str(out), "qwen3")
    without_tokenizer = shutil.copytree(source, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(FileNotFoundError, match="bare has no tokenizer, which a2d needs: none of tok"):
        run("a2d", without_tokenizer, out)
    without_eos = shutil.copytree(source, tmp_path / "endless")
    edit_json(without_eos / "config.json", eos_token_id=None)
    edit_json(without_eos / "tokenizer_config.json", eos_token=None)
    monkeypatch.setattr(convert, "load_model", None)  # before the weights are read
    with pytest.raises(ValueError, match=r"endless: neither the tokenizer nor config.json names an eos_token, which"):
        run("a2d", without_eos, out)
    assert not out.exists()
    for words in (["merge", kind_dirs["llama"], "a"], ["a2d", source], ["export", source, "--format", "llada"]):
        with pytest.raises(FileExistsError, match="not an empty folder"):
            run(*words, source)


MIXTURES = ("sdar_moe", "lladamoe", "llada2_moe")


def assert_same_files(before: Path, after: Path, but: str = "nothing") -> None:
    """Every tensor equal byte for byte, except those with `but` in their name, and every field of the config."""
    old, new = read_files(before), read_files(after)
    assert old.keys() == new.keys()
    for name, weight in old.items():
        assert weight.dtype == new[name].dtype, name
        same = torch.equal(weight.view(torch.uint8), new[name].view(torch.uint8))
        assert same != (but in name), name
    configs = [json.loads((folder / "config.json").read_text()) for folder in (before, after)]
    codes = [config.pop("auto_map", {}) for config in configs]
    assert configs[0] == configs[1]
    assert all(code.endswith(codes[0][name]) for name, code in codes[1].items())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("released", [*CONFIGS, "llada", "Dream"])
def test_logits_are_those_of_the_slow_twin(kind_dirs, attention, released):
    """Published logits of a model that predicts the next token are one position early."""
    model: Any = load_model(kind_dirs[released], attn_implementation=attention)
    assert isinstance(model, AutoModelForCausalLM.from_config(model.config).__class__)
    seen = seen_by(released, 11, getattr(model.config, "block_size", None))
    logits, twin = logits_of(model), torch.stack([twin_logits(kind_dirs[released], row, seen) for row in IDS])
    if KINDS[released].shift:  # the published sampler uses the first token's own logits for it
        twin = torch.cat([twin[:, :1], twin[:, :-1]], dim=1)
    assert_near(logits, twin)


@pytest.mark.parametrize(
    ("released", "fields"),
    [
        ("lladamoe", {"norm_topk_prob": True, "model_type": "llada", "architectures": ["LLaDAMoEModelLM"]}),
        ("llada2_moe", {"first_k_dense_replace": 0, "num_shared_experts": 2, "n_group": 1, "topk_group": 1}),
    ],
)
def test_other_settings_equal_the_twin_too(tmp_path, released, fields):
    torch.manual_seed(3)
    folder = write_released(tmp_path / "a", released, **fields)
    model = load_model(folder)
    seen = seen_by(released, 11, 3)
    assert_near(logits_of(model, IDS[:1])[0], twin_logits(folder, IDS[0], seen))
    convert.export(str(folder), str(tmp_path / "b"), released)
    assert_same_files(folder, tmp_path / "b")


@torch.no_grad()
def test_llada_without_grouped_heads_and_with_a_padded_vocabulary(tmp_path, llada_writer):
    torch.manual_seed(3)
    folder = llada_writer(tmp_path, n_kv_heads=4, vocab_size=60)
    ids = torch.randint(0, 64, (9,), generator=torch.Generator().manual_seed(1))
    logits = load_model(folder)(input_ids=ids[None]).logits[0]
    assert_near(logits, twin_logits(folder, ids), least=LOGITS)


@pytest.mark.parametrize(
    ("released", "config", "expected"),
    [
        ("sdar", {"block_size": 64}, (64, 3)),
        ("sdar", {"block_size": None, "mask_token_id": None}, (4, 151669)),
        ("Fast_dLLM_Qwen", {"bd_size": 16, "mask_token_id": None}, (16, 151665)),
        ("llada2_moe", {"mask_token_id": None, "block_size": None}, (32, 156895)),
        ("llada2_moe", {"enable_editing": False, "insert_threshold": None, "expert_capacity": None}, (3, 3)),
        ("lladamoe", {"mask_token_id": None}, (None, 156895)),
    ],
)
def test_block_size_and_mask_are_the_configs_or_else_the_kinds(tmp_path, released, config, expected):
    sizes = {"vocab_size": max(64, expected[1] + 1)}
    model: Any = load_model(write_released(tmp_path / "a", released, **sizes, **config))
    assert (getattr(model.config, "block_size", None), model.config.mask_token_id) == expected
    model.save_pretrained(tmp_path / "b")
    again: Any = load_model(tmp_path / "b")
    assert (getattr(again.config, "block_size", None), again.config.mask_token_id) == expected
    assert kind_of(again.config) is KINDS[KINDS[released].becomes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("released", [*CONFIGS, "Dream"])
def test_what_is_read_and_written_again_is_the_same_byte_for_byte(kind_dirs, tmp_path, monkeypatch, released, dtype):
    """From the released files and from what training saves, with other sizes of files."""
    if dtype == torch.bfloat16 and released == "Dream":
        pytest.skip("its fixture is in float32")
    source = kind_dirs[released]
    if dtype == torch.bfloat16:
        torch.manual_seed(2)
        source = write_released(tmp_path / "bf16", released, dtype, torch_dtype="bfloat16")
    monkeypatch.setattr(convert, "SHARD_BYTES", 20_000)
    run("export", source, tmp_path / "direct", "--format", released)
    files = list((tmp_path / "direct").glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 30_000 for file in files)
    if released != "Dream":
        assert_same_files(source, tmp_path / "direct")
    assert torch.equal(logits_of(load_model(tmp_path / "direct")), logits_of(load_model(source)))
    convert.write_weights(load_model(source), tmp_path / "sent")  # what a server of rollouts gets
    assert torch.equal(logits_of(load_model(tmp_path / "sent")), logits_of(load_model(source)))
    load_model(source, "auto").save_pretrained(tmp_path / "native")
    assert json.loads((tmp_path / "native" / "config.json").read_text())["model_type"] == KINDS[released].becomes
    convert.write_weights(load_model(tmp_path / "native"), tmp_path / "sent again")
    assert torch.equal(logits_of(load_model(tmp_path / "sent again")), logits_of(load_model(source)))
    run("export", tmp_path / "native", tmp_path / "again", "--format", released)
    old, new = read_files(source), read_files(tmp_path / "again")
    assert old.keys() == new.keys()
    assert all(torch.equal(weight, new[name].to(weight.dtype)) for name, weight in old.items())


@pytest.mark.parametrize("tied", [BertForMaskedLM, Qwen3ForCausalLM])
def test_a_server_gets_tied_weights_once(tmp_path, tied):
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = tied.config_class(**sizes, intermediate_size=48, tie_word_embeddings=True)
    config.mask_token_id = 3
    tied(config).save_pretrained(tmp_path / "a")
    model = load_model(tmp_path / "a")
    convert.write_weights(model, tmp_path / "b")
    assert len(read_files(tmp_path / "b")) == len(dict(model.named_parameters()))
    before, after = model.state_dict(), load_model(tmp_path / "b").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_only_the_weights_of_one_file_are_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "SHARD_BYTES", 3 * 400)
    living, most = weakref.WeakSet(), 0

    def weights():
        nonlocal most
        for number in range(8):
            weight = torch.full((100,), float(number))
            living.add(weight)
            most = max(most, len(living))
            yield f"{number}", weight

    convert.save_shards(weights(), tmp_path)
    assert most <= 4
    found = read_files(tmp_path)
    assert {name: weight[0].item() for name, weight in found.items()} == {f"{n}": float(n) for n in range(8)}
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]


def test_weights_of_another_precision_than_the_rest_keep_it(tmp_path):
    """A router in float32 among weights of 16 bits, in the first file, whatever `config.json` says."""
    torch.manual_seed(0)
    first = write_released(tmp_path / "a", "llada2_moe", torch.bfloat16)
    config, weights = json.loads((first / "config.json").read_text()), read_files(first)
    routers = {name: torch.randn(w.shape) for name, w in weights.items() if ".mlp.gate." in name}
    source = write_files(tmp_path / "b", config | {"torch_dtype": "bfloat16"}, routers | weights | routers, shards=3)
    run("export", source, tmp_path / "c", "--format", "llada2_moe")
    assert_same_files(source, tmp_path / "c")
    assert load_model(source, "auto").dtype == torch.bfloat16
    load_model(source, "auto").save_pretrained(tmp_path / "native")
    run("export", tmp_path / "native", tmp_path / "d", "--format", "llada2_moe")
    biases = [name for name in routers if name.endswith("expert_bias")]
    assert all(torch.equal(routers[name], read_files(tmp_path / "d")[name]) for name in biases)


@pytest.mark.parametrize("released", [*CONFIGS, "llada"])
def test_merging_writes_the_format_of_the_base(kind_dirs, tmp_path, released):
    base = kind_dirs[released]
    torch.manual_seed(0)
    peft: Any = get_peft_model(load_model(base), LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False))
    peft.save_pretrained(str(tmp_path / "adapter"))
    expected = logits_of(peft.eval())
    run("merge", base, tmp_path / "adapter", tmp_path / "out")
    assert_near(logits_of(load_model(tmp_path / "out")), expected, least=2 * LOGITS)
    if released != "llada":
        assert_same_files(base, tmp_path / "out", but="attention.dense" if released == "llada2_moe" else "o_proj")
    else:
        assert read_files(base).keys() == read_files(tmp_path / "out").keys()


@pytest.mark.parametrize("released", MIXTURES)
def test_experts_that_come_stacked(kind_dirs, tmp_path, released):
    """Stacked as in Transformers, gate before up."""
    weights, stacks = read_files(kind_dirs[released]), {}
    for name in [name for name in weights if ".experts.0." in name]:
        parts = (weights.pop(name.replace(".experts.0.", f".experts.{e}.")) for e in range(8) if e < count(released))
        stacks[name.replace(".experts.0.", ".experts.").removesuffix(".weight")] = torch.stack(list(parts))
    for name in [name for name in stacks if name.endswith("gate_proj")]:
        both = stacks.pop(name), stacks.pop(name.replace("gate_proj", "up_proj"))
        stacks[name.replace("gate_proj", "gate_up_proj")] = torch.cat(both, dim=1)
    config = json.loads((kind_dirs[released] / "config.json").read_text())
    folder = write_files(tmp_path / "stacked", config, weights | stacks)
    assert torch.equal(logits_of(load_model(folder)), logits_of(load_model(kind_dirs[released])))
    run("export", folder, tmp_path / "out", "--format", released)
    assert_same_files(kind_dirs[released], tmp_path / "out")


def count(released: str) -> int:
    return int(CONFIGS[released]["num_experts"])


def test_an_expert_that_is_missing_or_of_another_width_is_an_error(kind_dirs, tmp_path):
    config = json.loads((kind_dirs["llada2_moe"] / "config.json").read_text())
    weights = read_files(kind_dirs["llada2_moe"])
    lost = {name: w for name, w in weights.items() if ".1.mlp.experts.7." not in name}
    with pytest.raises(ValueError, match=r"do not fit(.|\n)*model\.layers\.1\.mlp\.experts"):
        load_model(write_files(tmp_path / "lost", config, lost))
    wide = weights | {"model.layers.2.mlp.experts.3.up_proj.weight": torch.zeros(17, 32)}
    with pytest.raises(ValueError, match=r"do not fit the config: some cannot be stacked"):
        load_model(write_files(tmp_path / "wide", config, wide))


def test_illada_is_a_llada_with_fewer_key_heads_and_a_tied_head(tmp_path, llada_writer):
    def tie(folder: Path) -> Path:
        weights, config = read_files(folder), json.loads((folder / "config.json").read_text())
        del weights["model.transformer.ff_out.weight"]
        return write_files(tmp_path / "tied", config, weights)

    torch.manual_seed(0)
    fields = {"weight_tying": True, "n_kv_heads": 1, "mask_token_id": 5, "flash_attention": True}
    folder = tie(llada_writer(tmp_path / "own", **fields))
    model: Any = load_model(folder)
    assert (model.config.num_key_value_heads, model.config.mask_token_id) == (1, 5)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    weights = read_files(folder)
    weights["model.transformer.ff_out.weight"] = weights["model.transformer.wte.weight"].clone()
    config = json.loads((folder / "config.json").read_text()) | {"weight_tying": False}
    untied = load_model(write_files(tmp_path / "untied", config, weights))
    assert torch.equal(logits_of(model), logits_of(untied))
    run("export", folder, tmp_path / "out", "--format", "llada")
    old, new = read_files(folder), read_files(tmp_path / "out")
    assert old.keys() == new.keys()
    assert all(torch.equal(weight, new[name]) for name, weight in old.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["flash_attention"] is True


@pytest.mark.parametrize(
    ("released", "fields", "message"),
    [
        ("lladamoe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("lladamoe", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
        ("lladamoe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("lladamoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("lladamoe", {"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq"),
        ("lladamoe", {"rope_theta": None}, "lacks rope_theta"),
        ("lladamoe", {"num_experts": None}, "lacks num_experts"),
        ("llada2_moe", {"use_bias": True}, "use_bias"),
        ("llada2_moe", {"num_shared_experts": 0}, "no shared expert"),
        ("llada2_moe", {"edit_threshold": 0.9}, "edit_threshold 0.9: if its model edits"),
        ("llada2_moe", {"enable_insertion": True}, "enable_insertion True: .*if it inserts"),
        ("llada2_moe", {"delete_token_id": 156930}, "delete_token_id 156930: "),
        ("llada2_moe", {"split_token_id": 156931}, "split_token_id 156931: "),
        ("llada2_moe", {"expert_capacity": 48}, "expert_capacity 48: "),
    ],
)
def test_what_no_class_here_has_is_refused_by_name(tmp_path, released, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(config_of(released, **fields)))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_what_sft_learnt_goes_through_a_released_format(tmp_path):
    """Next to an adapter, into its merge and an export; there it asks no class for editing."""
    base = write_released(tmp_path / "base", "llada2_moe")
    peft = get_peft_model(load_model(base), LoraConfig(target_modules=["q_proj"]))
    peft.config.edit_noise = "draft"
    peft.save_pretrained(tmp_path / "adapter")
    save_learnt(peft, tmp_path / "adapter")
    run("merge", base, tmp_path / "adapter", tmp_path / "merged")
    run("export", tmp_path / "merged", tmp_path / "again", "--format", "llada2_moe")
    run("export", tmp_path / "adapter", tmp_path / "theirs", "--format", "llada2_moe")
    for folder in ("adapter", "merged", "again", "theirs"):
        assert load_model(tmp_path / folder).config.edit_noise == "draft"
    assert not hasattr(load_model(base).config, "edit_noise")


def with_template(source: Path, folder: Path, template: str) -> None:
    """The tokenizer in `source` with another chat template."""
    tokenizer: Any = load_tokenizer(source)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("released", [None, "sdar"])
def test_the_tokenizer_is_that_of_the_last_adapter_that_has_one(tiny_model_dir, tmp_path, released):
    """With its own chat template; the base may be at another place than the adapter was trained on."""
    base = tiny_model_dir
    if released:
        base = write_with_tokenizer(tmp_path / "base", released, tiny_model_dir)
    for name in ("first", "second", "third"):
        adapter_on(base, tmp_path / name, seed=1)
    for name in ("first", "second"):
        with_template(base, tmp_path / name, f"{name}{{{{ messages[0]['content'] }}}}")
        edit_json(tmp_path / name / "adapter_config.json", base_model_name_or_path="/nowhere")
    run("merge", base, *(tmp_path / name for name in ("first", "second", "third")), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").chat_template.startswith("second")
    run("merge", base, tmp_path / "third", tmp_path / "plain")
    assert load_tokenizer(tmp_path / "plain").chat_template == load_tokenizer(base).chat_template


def test_an_exported_adapter_keeps_its_own_tokenizer(tiny_model_dir, tmp_path):
    run("export", tiny_model_dir, tmp_path / "base", "--format", "llada")
    adapter_on(tmp_path / "base", tmp_path / "adapter", seed=1)
    run("export", tmp_path / "adapter", tmp_path / "without", "--format", "llada")
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    with_template(tmp_path / "base", tmp_path / "adapter", "own{{ messages[0]['content'] }}")
    run("export", tmp_path / "adapter", tmp_path / "out", "--format", "llada")
    assert load_tokenizer(tmp_path / "out").chat_template.startswith("own")


def test_transformers_4_reads_an_exported_tokenizer(tiny_model_dir, tmp_path):
    """Released code runs on it. It raises for a list of special tokens under the newer name, and for an `auto_map` to
    code that is not in the folder (4.57)."""
    source = write_with_tokenizer(tmp_path / "source", "sdar", tiny_model_dir)
    code = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    edit_json(source / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=code)
    run("export", source, tmp_path / "out", "--format", "sdar")
    fields = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert fields["additional_special_tokens"] == ["<user>", "<assistant>", "<system>"]
    assert not {"extra_special_tokens", "auto_map"} & fields.keys()
    before, after = load_tokenizer(source), load_tokenizer(tmp_path / "out")
    assert after.all_special_tokens == before.all_special_tokens


def test_the_length_that_a_model_names_is_kept_in_its_released_format(tiny_model_dir, tmp_path):
    base = write_with_tokenizer(tmp_path / "base", "sdar", tiny_model_dir)
    (base / "generation_config.json").write_text(json.dumps({"max_new_tokens": 64, "eos_token_id": 2}))
    adapter_on(base, tmp_path / "adapter", seed=1)
    run("merge", base, tmp_path / "adapter", tmp_path / "merged")
    run("export", base, tmp_path / "out", "--format", "sdar")
    for folder in ("merged", "out"):
        assert ModelFolder.read(tmp_path / folder).gen_length == 64
        assert json.loads((tmp_path / folder / "generation_config.json").read_text())["eos_token_id"] == 2
    run("export", POCKET, tmp_path / "pocket", "--format", "llada")
    fields = json.loads((tmp_path / "pocket" / "generation_config.json").read_text())
    assert fields["max_new_tokens"] == ModelFolder.read(POCKET).gen_length
    assert "sequence_bias" not in fields, "only the generate of Transformers reads it"


def stored_head(folder: Path, tiny_model_dir: Path) -> Path:
    """A tied model whose file has the head, too, with norms in another precision than the rest."""
    write_with_tokenizer(folder, "sdar", tiny_model_dir)
    edit_json(folder / "config.json", tie_word_embeddings=True, torch_dtype="bfloat16")
    weights = read_files(folder)
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink(missing_ok=True)
    weights = {name: w if "norm" in name else w.bfloat16() for name, w in weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_tied_head_that_a_file_has_is_written_again(tiny_model_dir, tmp_path):
    base = stored_head(tmp_path / "base", tiny_model_dir)
    run("export", base, tmp_path / "out", "--format", "sdar")
    assert_same_files(base, tmp_path / "out")
    adapter_on(base, tmp_path / "adapter", seed=1)
    run("merge", base, tmp_path / "adapter", tmp_path / "merged")
    assert read_files(tmp_path / "merged").keys() == read_files(base).keys()


@pytest.mark.parametrize(("released", "field"), [("sdar", "tie_word_embeddings"), ("llada", "weight_tying")])
def test_a_head_that_is_not_the_tied_one_of_the_config_is_untied_in_what_is_written(
    tiny_model_dir, tmp_path, released, field
):
    """Merged adapters are published like this. Code that believes the config would not read the head."""
    if released == "sdar":
        base = write_with_tokenizer(tmp_path / "base", "sdar", tiny_model_dir)
    else:
        base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    edit_json(base / "config.json", tie_word_embeddings=True)
    model: Any = load_model(base)
    assert model.config.tie_word_embeddings is False
    run("export", base, tmp_path / "out", "--format", released)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[field] is False
    assert torch.equal(logits_of(load_model(tmp_path / "out")), logits_of(model))


def test_a_hub_name_is_written_in_the_precision_of_its_files(tiny_model_dir, tmp_path, monkeypatch):
    """As its folder is: norms in fp32 stay, which the config's dtype would round."""
    base = stored_head(tmp_path / "base", tiny_model_dir)
    repository = tmp_path / "hub" / "models--org--sdar"
    shutil.copytree(base, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "hub"), raising=False)
    run("export", "org/sdar", tmp_path / "out", "--format", "sdar")
    assert_same_files(base, tmp_path / "out")
    adapter_on(base, tmp_path / "adapter", seed=1)
    run("merge", "org/sdar", tmp_path / "adapter", tmp_path / "merged")
    assert read_files(tmp_path / "merged")["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("command", ["merge", "export", "a2d"])
def test_a_folder_that_cannot_be_written_is_refused_before_weights_are_read(
    tiny_model_dir, tmp_path, monkeypatch, command
):
    monkeypatch.setattr("d1.models.convert.load_model", lambda *_: pytest.fail("read the weights"))
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    words = {"merge": [tiny_model_dir, tmp_path / "adapter"], "export": [tiny_model_dir], "a2d": [tiny_model_dir]}
    more = ["--format", "llada"] if command == "export" else []
    with pytest.raises(ValueError, match=rf"^OUT {tmp_path}/out: you may not write to {tmp_path}; name another folder"):
        run(command, *words[command], tmp_path / "out", *more)
