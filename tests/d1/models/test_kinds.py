"""A kind of model is one row of a table, which may be added from outside the package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from d1.models import load_model, load_tokenizer, prepare
from d1.models.adapters import lora_targets
from d1.models.formats.released import key_mapping, rename
from d1.models.kinds import KINDS, Kind, check_room, is_encoder, max_positions, without_kernels
from d1.runs.turns import TurnSettings
from d1.sampling import generate
from d1.scoring import mean_field_logps
from tests.rounding import assert_near

IDS = torch.randint(4, 64, (2, 9), generator=torch.Generator().manual_seed(0))
TOY_NAMES = (("net.embed", "model.embed_tokens"), ("net.block.{}", "model.layers.{}"), ("net.norm", "model.norm"))


def write_toy(folder: Path, source: Path) -> Path:
    """The Qwen3 in `source` as somebody else might release it: another model_type, other names, its own code."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"model_type": "toy", "width": 32}
    config |= {"architectures": ["ToyModel"], "auto_map": {"AutoConfig": "configuration_toy.ToyConfig"}}
    config |= {"attn_implementation": "flex_attention"}
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    back = key_mapping((native, own) for own, native in TOY_NAMES)
    weights = {rename(name, back): weight for name, weight in load_file(source / "model.safetensors").items()}
    assert "net.block.0.mlp.gate_proj.weight" in weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def rename_width(raw: dict[str, Any]) -> dict[str, Any]:
    return {("hidden_size" if name == "width" else name): value for name, value in raw.items()}


def test_a_released_model_under_other_names_is_one_row(kind_dirs, tmp_path, monkeypatch):
    folder = write_toy(tmp_path / "toy", kind_dirs["qwen3"])
    with pytest.raises(ValueError, match="model_type 'toy' is not supported"):
        load_model(folder)
    row = Kind(
        becomes="qwen3",
        fields=rename_width,
        names=key_mapping(TOY_NAMES),
        shift=True,
        mask_token_id=3,
        lora={"attention": ("q_proj", "v_proj")},
    )
    monkeypatch.setitem(KINDS, "toy", row)
    model, plain = load_model(folder), load_model(kind_dirs["qwen3"])
    assert (type(model), model.config.model_type, model.config.mask_token_id) == (type(plain), "qwen3", 3)
    assert "auto_map" not in vars(model.config)
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert_near(logits_of(model)[:, 1:], logits_of(plain)[:, :-1])

    ids = generate(model, IDS, torch.ones_like(IDS), mask_token_id=3, gen_length=4, block_length=2, steps=4)
    assert torch.equal(ids[:, :9], IDS)
    assert not (ids == 3).any()
    noise = torch.zeros_like(IDS, dtype=torch.bool)
    logps = mean_field_logps(model, IDS, torch.ones_like(IDS), ids[:, 9:], noise, mask_token_id=3, gen_length=4)
    canvas = torch.cat([IDS, torch.full((2, 4), 3)], dim=1)
    with torch.no_grad():
        expected = model(input_ids=canvas).logits[:, 9:].log_softmax(-1).gather(-1, ids[:, 9:, None])[..., 0]
    assert_near(logps, expected)

    model.save_pretrained(tmp_path / "native")
    assert "model.layers.0.mlp.gate_proj.weight" in load_file(tmp_path / "native" / "model.safetensors")
    torch.testing.assert_close(logits_of(load_model(tmp_path / "native")), logits_of(model), atol=0, rtol=0)


def test_an_adapter_made_on_the_released_names(kind_dirs, tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "toy", Kind(becomes="qwen3", fields=rename_width, names=key_mapping(TOY_NAMES)))
    model: Any = load_model(write_toy(tmp_path / "toy", kind_dirs["qwen3"]))
    torch.manual_seed(0)
    peft: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    expected = logits_of(peft)
    peft.save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = {name.replace("model.layers.", "net.block."): weight for name, weight in load_file(file).items()}
    assert any(".net.block." in name for name in weights)
    save_file(weights, file, metadata={"format": "pt"})
    again = load_model(tmp_path / "toy", adapter=tmp_path / "adapter")
    assert_near(logits_of(again), expected)


class OwnConfig(Qwen3Config):
    model_type = "own_toy"


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig


def test_a_class_of_ones_own_is_registered_and_one_row(kind_dirs, tmp_path, monkeypatch):
    AutoConfig.register("own_toy", OwnConfig, exist_ok=True)
    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM, exist_ok=True)
    monkeypatch.setitem(KINDS, "own_toy", Kind(lora={"attention": ("q_proj",)}))
    config = json.loads((kind_dirs["qwen3"] / "config.json").read_text()) | {"model_type": "own_toy"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(kind_dirs["qwen3"] / "model.safetensors")
    model = load_model(tmp_path)
    assert (type(model), model.config.model_type) == (OwnForCausalLM, "own_toy")
    assert torch.equal(logits_of(model), logits_of(load_model(kind_dirs["qwen3"])))
    assert lora_targets(model, "attention") == ["q_proj"]
    assert not is_encoder(model.config)

    monkeypatch.setitem(KINDS, "own_toy", Kind(shift=True))
    built = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_near(logits_of(prepare(built))[:, 1:], logits_of(model)[:, :-1])


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention", "no_such_kernel"])
def test_the_kernel_that_a_config_names_is_its_authors_business(kind_dirs, kind, tmp_path, kernel):
    config = json.loads((kind_dirs[kind] / "config.json").read_text())
    config |= {"attn_implementation": kernel, "_attn_implementation": kernel}
    for inner in config.values():
        if isinstance(inner, dict):
            inner["attn_implementation"] = kernel
    assert kernel not in json.dumps(without_kernels(config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in kind_dirs[kind].glob("model*"):
        (tmp_path / file.name).symlink_to(file)
    assert torch.equal(logits_of(load_model(tmp_path)), logits_of(load_model(kind_dirs[kind])))


def write_unknown(folder: Path, with_config: bool) -> Path:
    """A model with code that must not run: it would leave a file behind."""
    (folder / "own.py").write_text("open('ran', 'w').close()\n")
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}
    if with_config:
        (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of", "auto_map": auto}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": auto}))
    (folder / "vocab.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("load", "with_config", "message"), [
    (load_model, True, "model_type 'unheard_of' is not supported: known are llada"),
    (load_tokenizer, True, "model_type 'unheard_of' is not supported: known are llada"),
    (load_tokenizer, False, "code"),
])  # fmt: skip
def test_code_of_an_unknown_kind_is_an_error_and_no_question(tmp_path, monkeypatch, load, with_config, message):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(write_unknown(tmp_path, with_config))
    assert not Path("ran").exists()


def test_importing_the_room_and_asking_for_help_need_no_torch():
    script = """
import sys
import d1.models, d1.models.kinds, d1.__main__
d1.__main__.make_parser().format_help()
assert not {"torch", "transformers", "peft"} & sys.modules.keys(), sys.modules.keys()
try:
    d1.models.no_such_name
except AttributeError:
    pass
else:
    raise AssertionError("a name that is not there")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "room"), [("bert", 128), ("roberta", 127), ("llama", 128)])
def test_the_longest_text_fits_the_positions_and_a_longer_one_is_refused(kind_dirs, name, room):
    """RoBERTa's positions begin after the id of its padding token, 0 here."""
    model: Any = load_model(kind_dirs[name])
    assert max_positions(model.config) == room
    ids = torch.randint(4, 64, (1, room), generator=torch.Generator().manual_seed(0))
    check_room(model.config, room, 0)
    with torch.no_grad():
        model(input_ids=ids)
        if name == "roberta":
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=torch.cat([ids, ids[:, :1]], dim=1))
    with pytest.raises(ValueError, match=rf"{room + 1} tokens of text exceed the model's {room} positions"):
        check_room(model.config, room + 1, 0)
    limits = SimpleNamespace(**vars(TurnSettings()))
    assert TurnSettings.from_attributes(limits, 28, model.config).max_turn_prompt == room - 28


def test_a_text_with_longrope_is_no_longer_than_its_original_length(kind_dirs, tmp_path):
    shutil.copytree(kind_dirs["llama"], tmp_path / "long")
    config = json.loads((tmp_path / "long/config.json").read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    scaling |= {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
    (tmp_path / "long/config.json").write_text(json.dumps(config | {"rope_parameters": scaling}))
    model = load_model(tmp_path / "long")
    check_room(model.config, 24, 8)
    with pytest.raises(ValueError, match="24 tokens of text and 9 to fill in exceed the model's 32 positions"):
        check_room(model.config, 24, 9)


@pytest.mark.parametrize("kind", ["llada", "lladamoe", "Dream", "qwen3"])
@pytest.mark.parametrize("field", ["block_size", "canvas_length"])
def test_the_blocks_and_the_mask_that_others_write_are_read_under_each_kind(kind_dirs, tmp_path, kind, field):
    """A token sees its own block of three, and not the next one, which the model without the field sees."""
    config = json.loads((kind_dirs[kind] / "config.json").read_text()) | {field: 3, "mask_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in kind_dirs[kind].glob("*.safetensors*"):
        (tmp_path / file.name).symlink_to(file)
    model: Any = load_model(tmp_path)
    assert (model.config.block_size, model.config.mask_token_id) == (3, 7)
    other = torch.cat([IDS[:, :6], IDS[:, 6:].flip(1) ^ 1], 1)
    with torch.no_grad():
        change = (model(input_ids=other).logits - logits_of(model)).abs().amax((0, 2))
        whole = load_model(kind_dirs[kind])
        without = (whole(input_ids=other).logits - logits_of(whole)).abs().amax((0, 2))
    first = 6 + KINDS[kind].shift  # logits at a position come from the one before it
    assert change[:first].max() < 1e-6 < 1e-4 < change[first:].min()
    assert without.min() > 1e-5
