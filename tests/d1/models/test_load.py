"""Every kind of model follows one calling convention: bidirectional, aligned, independent of padding; a model that the
user built is refused without preparation, and equal to a loaded one after it."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
    modeling_utils,
)

from d1.models import load_model, prepare
from d1.models.adapters import lora_targets
from d1.models.attention import require_prepared
from d1.models.convert import merge
from d1.models.folder import ModelFolder
from d1.models.head import backbone_and_head
from d1.transformers_bridge import stored_weights
from tests.d1.released import BLOCKS, CAUSAL, logits_of
from tests.faults import edit_json
from tests.rounding import TOKENS, assert_near, largest

VOCAB = 64


def rows(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (length,), generator=generator) for length in lengths]


def pad(texts: list[Tensor], left: list[int], width: int, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Each text after `left` pads of token `fill`, filled to `width` on the right."""
    ids, mask = torch.full((len(texts), width), fill), torch.zeros(len(texts), width, dtype=torch.long)
    for row, (text, start) in enumerate(zip(texts, left, strict=True)):
        ids[row, start : start + len(text)] = text
        mask[row, start : start + len(text)] = 1
    return ids, mask


def test_threads_that_load_models_leave_the_library_and_the_environment_as_they_were(kind_dirs):
    """Weights of a released LLaDA MoE are converted, for which the library's reader is replaced."""
    reader, variables = modeling_utils.safe_open, dict(os.environ)
    with ThreadPoolExecutor(4) as pool:
        models = [*pool.map(load_model, [kind_dirs["lladamoe"], kind_dirs["llama"]] * 2)]
    assert modeling_utils.safe_open is reader
    assert dict(os.environ) == variables
    for model, other in (models[::2], models[1::2]):
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_padding_other_rows_and_batch_size_are_invisible(kind_dirs, kind, attention):
    model = load_model(kind_dirs[kind], attn_implementation=attention)
    texts = rows(7, 12, 16)
    alone = [logits_of(model, text[None])[0] for text in texts]
    assert [a.shape for a in alone] == [(n, VOCAB) for n in (7, 12, 16)]
    for left, width, fill in (([9, 4, 0], 16, 0), ([0, 0, 0], 16, 2), ([3, 8, 1], 20, 17)):
        ids, mask = pad(texts, left, width, fill)
        together = logits_of(model, ids, mask)
        for row, (text, start) in enumerate(zip(texts, left, strict=True)):
            assert_near(together[row, start : start + len(text)], alone[row])


def test_every_position_sees_every_other_in_both_directions(kind_dirs, kind, attention):
    """Texts longer than the windows of some kinds: their full layers must carry what the windows hide."""
    if kind in (*BLOCKS, CAUSAL):
        pytest.skip("a token sees its own block, if there are any noised ones, and those before it")
    model = load_model(kind_dirs[kind], attn_implementation=attention)
    text = rows(14)[0]
    changed = text.repeat(len(text), 1)
    changed.fill_diagonal_(3)
    moved = (logits_of(model, changed) - logits_of(model, text[None])).abs().amax(-1)
    assert (moved > 1e-6).all(), f"(changed token, position): {(moved <= 1e-6).nonzero().tolist()}"


def test_logits_to_keep_selects_positions(kind_dirs, kind):
    model = load_model(kind_dirs[kind])
    ids, mask = pad(rows(9, 12), [3, 0], 12)
    keep = torch.tensor([11, 4, 5])
    kept = logits_of(model, ids, mask, logits_to_keep=keep)
    assert_near(kept, logits_of(model, ids, mask)[:, keep])


@pytest.mark.parametrize("lora", [False, True])
def test_backbone_and_head_make_up_the_logits(kind_dirs, kind, lora):
    model = load_model(kind_dirs[kind])
    ids, mask = pad(rows(9, 12), [3, 0], 12)
    if lora:
        plain = logits_of(model, ids, mask)
        targets = lora_targets(model, "all-linear")
        model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False)).eval()
        assert (logits_of(model, ids, mask) - plain).abs().max() > 1e-3
    backbone, head = backbone_and_head(model)
    with torch.no_grad():
        states = backbone(ids, mask)
        assert states.shape == (2, 12, 32)
        assert_near(head(states), logits_of(model, ids, mask))


def test_saved_folder_loads_here_and_in_plain_transformers_bit_for_bit(kind_dirs, kind, tmp_path):
    model = load_model(kind_dirs[kind])
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert dict(model.named_parameters()).keys() == dict(again.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    ids = torch.stack(rows(8, 8))
    logits = logits_of(model, ids)
    assert torch.equal(logits_of(again, ids), logits)
    if kind in (*BLOCKS, CAUSAL):
        return  # plain Transformers does not know what their tokens see
    auto = AutoModelForMaskedLM if kind in MASKED_LM else AutoModelForCausalLM
    plain = logits_of(auto.from_pretrained(tmp_path).eval(), ids)
    if kind == "Dream":  # a plain Qwen2 does not know that its logits are one early
        plain, logits = plain[:, :-1], logits[:, 1:]
    assert_near(plain, logits)


def test_gradient_checkpointing_changes_no_gradient(kind_dirs, kind):
    ids, mask = pad(rows(9, 12), [3, 0], 12)
    gradients = []
    for checkpointing in (False, True):
        model = load_model(kind_dirs[kind]).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model(input_ids=ids, attention_mask=mask).logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    scale = largest([*gradients[0].values()])
    for name, gradient in gradients[0].items():
        assert_near(gradients[1][name], gradient, least=scale, terms=TOKENS, msg=name)


def test_the_padding_token_can_be_learned(kind_dirs, kind):
    """Padding is often EOS: its embedding must get a gradient if it occurs in the text."""
    model = load_model(kind_dirs[kind])
    model(input_ids=torch.tensor([[5, 0, 6]])).logits.square().mean().backward()
    gradient = next(model.get_input_embeddings().parameters()).grad
    assert gradient is not None
    assert gradient[0].abs().sum() > 0


@pytest.mark.parametrize("name", ["llada", "Dream", "gemma3_text", "modernbert"])
def test_compiled_forward_is_the_forward(kind_dirs, name):
    model = load_model(kind_dirs[name])
    ids, mask = pad(rows(9, 12), [3, 0], 12)
    compiled = torch.compile(model, backend="aot_eager")
    assert_near(logits_of(compiled, ids, mask), logits_of(model, ids, mask))


def test_folders_that_are_no_models_and_configs_with_other_layers_are_refused(tmp_path, llada_writer):
    with pytest.raises(FileNotFoundError, match=r"\d has no config\.json"):
        load_model(tmp_path)
    odd: dict[str, Any] = {"alibi": True, "block_type": "sequential", "rope_theta": None}
    for name, value in odd.items():
        with pytest.raises(ValueError, match=name):
            load_model(llada_writer(tmp_path, **{name: value}))


def test_weights_that_do_not_fit_are_all_listed(tmp_path, llada_writer):
    from safetensors.torch import load_file, save_file

    llada_writer(tmp_path, shards=1)
    (tmp_path / "model.safetensors.index.json").unlink()
    file = tmp_path / "model-00001-of-00001.safetensors"
    weights = load_file(file)
    del weights["model.transformer.blocks.1.attn_out.weight"]
    weights["model.transformer.blocks.0.q_norm.weight"] = torch.ones(8)
    weights["model.transformer.ln_f.weight"] = torch.ones(31)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="do not fit") as error:
        load_model(tmp_path)
    for part in (
        "1 missing: ['model.layers.1.self_attn.o_proj.weight']",
        "1 unexpected: ['model.transformer.blocks.0.q_norm.weight']",
        "[('model.norm.weight', (31,), (32,))]",
    ):
        assert part in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("kind_", ["llada", "Dream", "qwen3", "modernbert"])
def test_flash_attention_ignores_padding(kind_dirs, kind_):
    pytest.importorskip("flash_attn")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    flash = load_model(kind_dirs[kind_], attn_implementation="flash_attention_2", **options)
    sdpa = load_model(kind_dirs[kind_], **options)
    ids, mask = (x.cuda() for x in pad(rows(9, 12), [3, 0], 12))
    difference = (logits_of(flash, ids, mask) - logits_of(sdpa, ids, mask))[mask.bool()]
    assert difference.abs().mean() < 0.02 * logits_of(sdpa, ids, mask).std()


MASKED_LM = ("modernbert", "bert", "roberta")


def padded_logits(model: Any) -> Tensor:
    ids, mask = pad(rows(7, 12), [5, 0], 12, fill=17)  # not the padding token, by which RoBERTa would count
    return logits_of(model, ids, mask)[mask.bool()]


def build_plain(folder: Path, source: Path, kind: str) -> Any:
    """A model of Transformers alone, with the weights in `source`: decoders attend causally, as they do by default."""
    load_model(source).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("is_causal", None)
    config.pop("use_cache", None)
    (folder / "config.json").write_text(json.dumps(config))
    auto: Any = AutoModelForMaskedLM if kind in MASKED_LM else AutoModelForCausalLM
    return auto.from_pretrained(folder).eval()


def test_a_plain_model_is_refused_and_equals_load_models_once_prepared(kind_dirs, kind, tmp_path):
    plain, expected = build_plain(tmp_path, kind_dirs[kind], kind), padded_logits(load_model(kind_dirs[kind]))
    with pytest.raises(ValueError, match=r"was not prepared for masked diffusion.*d1\.models\.prepare\(model\)"):
        require_prepared(plain)
    if kind not in ("modernbert", CAUSAL):  # rotary positions do not depend on where a text begins
        assert (padded_logits(plain) - expected).abs().max() > 1e-3
    assert prepare(prepare(plain)) is plain  # two shifts would move Dream's logits by two positions
    require_prepared(plain)
    assert torch.equal(padded_logits(plain), expected)


@pytest.mark.parametrize("name", ["Dream", "bert"])
def test_copies_adapters_and_a_resized_vocabulary_stay_prepared(kind_dirs, name, tmp_path):
    expected = padded_logits(load_model(kind_dirs[name]))
    model: Any = prepare(build_plain(tmp_path, kind_dirs[name], name))
    copied = copy.deepcopy(model)
    require_prepared(copied)
    assert torch.equal(padded_logits(copied), expected)
    targets = lora_targets(model, "attention")
    peft: Any = get_peft_model(copied, LoraConfig(target_modules=targets)).eval()
    require_prepared(peft)
    assert prepare(peft) is peft
    assert torch.equal(padded_logits(peft), expected)
    require_prepared(peft.merge_and_unload())
    model.resize_token_embeddings(70, mean_resizing=False)
    require_prepared(model)
    assert_near(padded_logits(model)[:, :64], expected)
    model(input_ids=torch.tensor([[5, 0, 6]])).logits.square().mean().backward()
    assert model.get_input_embeddings().weight.grad[0].abs().sum() > 0, "the padding token can be learned"


def test_what_cannot_be_prepared_is_refused(kind_dirs):
    sizes: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    causal = BertForMaskedLM(BertConfig(**sizes, is_decoder=True))
    other: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    headless: Any = LlamaModel(load_model(kind_dirs["llama"]).config)
    windows: Any = AutoModelForCausalLM.from_config(load_model(kind_dirs["gemma2"]).config)
    windows.config.layer_types = ["sliding_attention"] * 3
    for model, message in (
        (causal, "BertForMaskedLM was built to be causal: build it from a config with is_decoder=False"),
        (other, "GPT2LMHeadModel: model_type 'gpt2' is not supported: known are llada, Dream"),
        (headless, "LlamaModel does not split into a `base_model`.* and the head lm_head"),
        (windows, "Gemma2ForCausalLM: every layer attends to a window only"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(model)
        with pytest.raises(ValueError, match="was not prepared"):
            require_prepared(model)


@torch.no_grad()
def test_dream_shift_skips_padding_wherever_it_is(kind_dirs):
    """The predecessor of a real token is the previous real token, even across a gap of padding."""
    model = load_model(kind_dirs["Dream"])
    ids = torch.randint(4, 64, (8,), generator=torch.Generator().manual_seed(2))
    alone = model(input_ids=ids[None]).logits[0]
    spread, real = torch.zeros(1, 14, dtype=torch.long), torch.tensor([2, 3, 4, 7, 8, 10, 11, 12])
    mask = torch.zeros_like(spread)
    spread[0, real], mask[0, real] = ids, 1
    assert_near(model(input_ids=spread, attention_mask=mask).logits[0, real], alone)


def recast(folder, dtype):
    """One weight of a checkpoint in another dtype, without a scale."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.int32, "I32"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
    ],
)
def test_weights_without_their_scales_are_refused(tiny_model_dir, tmp_path, dtype, stored):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    name = recast(folder, dtype)
    for load in (load_model, lambda path: merge(str(path), [], str(tmp_path / "out"))):
        with pytest.raises(
            ValueError, match=rf"model\.safetensors stores {re.escape(name)} as {stored}, not as one of"
        ):
            load(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_other_precisions_are_read(tiny_model_dir, tmp_path, dtype):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    name = recast(folder, dtype)
    weight, expected = (load_model(path).get_parameter(name) for path in (folder, tiny_model_dir))
    assert torch.equal(weight, expected.to(dtype).float())


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"has a quantization_config \(gptq\)"),
        ({"quantization_config": {"load_in_8bit": True}}, r"a quantization_config \(without a quant_method\)"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "has a compression_config"),
        ({"mask_token_id": -1}, r"says mask_token_id -1, which is no id of its 60 tokens \(0 to 59\)"),
        ({"mask_token_id": 60}, "says mask_token_id 60, which is no id"),
        ({"mask_token_id": "3"}, "says mask_token_id '3', which is no id"),
        ({"mask_token_id": True}, "says mask_token_id True, which is no id"),
        ({"pad_token_id": 60}, "says pad_token_id 60, which is no id"),
    ],
)
def test_a_config_of_a_quantised_model_or_with_an_id_beyond_the_vocabulary_is_refused(
    tiny_model_dir, tmp_path, fields, problem
):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ValueError, match=problem) as error:
        load_model(folder)
    assert "\n" not in str(error.value)


def test_a_config_without_quantization_is_read(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    edit_json(folder / "config.json", quantization_config=None, mask_token_id=59, pad_token_id=-1)
    load_model(folder)


@pytest.mark.parametrize(
    "invalid",
    [{"temperature": 0.6, "top_p": 0.9, "do_sample": False}, {"num_beams": 1, "early_stopping": True}],
)
def test_a_generation_config_that_transformers_does_not_save_keeps_what_is_read_here(tiny_model_dir, tmp_path, invalid):
    """Else training ends at its first checkpoint, and `d1 a2d` after all weights were converted."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    kept = {"eos_token_id": [2, 5], "pad_token_id": 0, "max_new_tokens": 48}
    (folder / "generation_config.json").write_text(json.dumps(kept | invalid))
    model = load_model(folder)
    model.generation_config.max_length = None  # a change, after which Transformers checks all fields
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {name: saved.get(name) for name in kept} == kept
    assert not invalid.keys() & saved.keys()
    assert ModelFolder.read(folder).gen_length == ModelFolder.read(tmp_path / "saved").gen_length == 48


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_padding_id_of_minus_one_is_none_in_what_is_saved(tiny_model_dir, tmp_path, file):
    """Transformers reads such a generation config, makes one of such a config, and saves neither."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    edit_json(folder / file, pad_token_id=-1)
    load_model(folder).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert (saved["eos_token_id"], saved.get("pad_token_id")) == (2, None)


def test_4_bits_of_weights_whose_dtype_is_unknown_are_refused_in_one_line(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model: which dtype its weights have is only known .* pass a dtype"):
        load_model(folder, "auto", quantization="nf4")


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ("cuda", r"^device cuda is not there: PyTorch \S+ sees 0 GPUs; use cpu$"),
        ("cuda:1", r"^device cuda:1 is not there"),
        ("gpu", "^device 'gpu' is unknown to PyTorch: use cpu, cuda or cuda:NUMBER$"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_line(tiny_model_dir, tmp_path, device, problem):
    for load in (load_model, lambda path, device: merge(str(path), [], str(tmp_path / "out"), device=device)):
        with pytest.raises(ValueError, match=problem):
            load(tiny_model_dir, device=device)


@pytest.mark.parametrize("shards", [1, 2])
def test_only_the_files_that_are_loaded_decide_about_a_folder(tmp_path, llada_writer, shards):
    """A stray file of integers had the folder refused, and one in another precision changed its dtype."""
    folder = llada_writer(tmp_path, shards=shards)
    expected = {name: file for name, *_, file in stored_weights(str(folder))}
    save_file({"step": torch.ones(1_000_000, dtype=torch.int64)}, folder / "optimizer.safetensors")
    save_file({"weight": torch.ones(1_000_000, dtype=torch.bfloat16)}, folder / "consolidated.safetensors")
    assert {name: file for name, *_, file in stored_weights(str(folder))} == expected
    assert len({*expected.values()}) == shards
    assert load_model(folder).dtype == torch.float32
