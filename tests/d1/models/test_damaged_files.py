"""A damaged file of a model, its tokenizer or an adapter is one line that names the file, never a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from d1.files import check_index
from d1.models import load_model, load_tokenizer
from d1.models.adapters import adapter_chain, peft_config
from d1.runs.cli import MISTAKES

DAMAGE: dict[str, Any] = {
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a list": lambda data: b"[1, 2]",
    "a number": lambda data: b"3",
    "null": lambda data: b"null",
    "binary": lambda data: b"\xff\xfe\x00",
}
READERS = {  # file -> what reads it
    "config.json": (load_model, load_tokenizer),
    "generation_config.json": (load_model,),
    "tokenizer.json": (load_tokenizer,),
    "tokenizer_config.json": (load_tokenizer,),
    "model.safetensors": (load_model,),
    "adapter_config.json": (load_model, load_tokenizer),
    "adapter_model.safetensors": (load_model,),
}


@pytest.fixture(scope="module")
def adapter(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(load_model(tiny_model_dir), LoraConfig(target_modules=["v_proj"])).save_pretrained(folder)
    return folder


def copy_of(source: Path, folder: Path, name: str, data: bytes) -> Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_named(tiny_model_dir, adapter, tmp_path, name, damage):
    source = adapter if name.startswith("adapter") else tiny_model_dir
    folder = copy_of(source, tmp_path / "copy", name, DAMAGE[damage]((source / name).read_bytes()))
    for read in READERS[name]:
        with pytest.raises(MISTAKES, match=rf"^{folder}(/{name})? ?.*(is no JSON|holds no JSON object|is damaged)"):
            read(folder)


FIELDS = {
    "hidden_size": "big",
    "num_hidden_layers": None,
    "vocab_size": -3,
    "num_attention_heads": 0,
    "hidden_act": "nope",
    "rms_norm_eps": "small",
    "rope_parameters": [1],
    "layer_types": ["nope", "nope"],
    "dtype": "float99",
    "eos_token_id": "</s>",
    "model_type": 5,
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_a_wrong_type_is_named(tiny_model_dir, tmp_path, name):
    config = json.loads((tiny_model_dir / "config.json").read_text()) | {name: FIELDS[name]}
    folder = copy_of(tiny_model_dir, tmp_path / "copy", "config.json", json.dumps(config).encode())
    with pytest.raises(MISTAKES, match=rf"^{folder}: (its config\.json describes no|model_type 5 is not)") as caught:
        load_model(folder)
    said = {"vocab_size": "negative dimension -3", "num_attention_heads": "modulo by zero", "dtype": "float99"}
    assert said.get(name, name if name not in ("hidden_act",) else "nope") in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "NOPE"}, r"PEFT cannot read its adapter_config\.json: KeyError: 'NOPE'"),
        ({"r": "x"}, r"PEFT cannot make the adapter of its adapter_config\.json: TypeError"),
        ({"base_model_name_or_path": 7}, r"base_model_name_or_path in adapter_config\.json is 7: use"),
    ],
)
def test_an_adapter_that_peft_cannot_read_is_named(adapter, tmp_path, changed, message):
    config = json.loads((adapter / "adapter_config.json").read_text()) | changed
    with pytest.raises(ValueError, match=message):
        load_model(copy_of(adapter, tmp_path / "copy", "adapter_config.json", json.dumps(config).encode()))


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "IA3"])
def test_an_adapter_of_another_kind_than_lora_is_refused_before_a_repository_that_it_names_is_read(
    adapter, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)  # PEFT would ask to run its code
    config = {"peft_type": kind, "base_model_name_or_path": "base", "task_type": "CAUSAL_LM"}
    if kind == "PROMPT_TUNING":
        config |= {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "a", "num_virtual_tokens": 1}
        config |= {"tokenizer_name_or_path": "someone/else"}
    folder = copy_of(adapter, tmp_path / "copy", "adapter_config.json", json.dumps(config).encode())
    with pytest.raises(ValueError, match=rf"adapter {folder} is of the kind .*{kind}.*: only LoRA is supported"):
        peft_config(str(folder))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"metadata": {}, "weight_map": {"a": "../tiny/model.safetensors"}},
            r"names files in other folders, such as \.\.",
        ),
        ({"metadata": {}, "weight_map": {"a": "/tmp/model.safetensors"}}, "names files in other folders, such as /tmp"),
        ({"metadata": {}, "weight_map": {"a": "gone.safetensors"}}, r"names gone\.safetensors, which is not there"),
        ({"metadata": {}, "weight_map": {"a": 3}}, "has no weight_map from names to files"),
        ({"weight_map": {}}, "has no metadata"),
        ([], "holds no JSON object, but a list"),
    ],
)
def test_an_index_is_for_files_of_its_own_folder(tiny_model_dir, tmp_path, index, message):
    shutil.copytree(tiny_model_dir, tmp_path / "tiny")
    folder = copy_of(tiny_model_dir, tmp_path / "copy", INDEX, json.dumps(index).encode())
    (folder / "model.safetensors").unlink()
    for read in (load_model, lambda path: adapter_chain(str(path), None)):
        with pytest.raises(ValueError, match=rf"^{folder}/{INDEX} {message}"):
            read(folder)
    if message.endswith("not there"):  # on the hub, files may be yet to come
        check_index(folder / INDEX, complete=False)


@pytest.mark.parametrize("left_over", [INDEX, "pytorch_model.bin.index.json"])
def test_an_index_that_is_not_used_may_be_left_over(tiny_model_dir, tmp_path, left_over):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "gone-00001-of-00002.bin"}}
    folder = copy_of(tiny_model_dir, tmp_path / "copy", left_over, json.dumps(index).encode())
    load_model(folder)
    load_tokenizer(folder)
    if left_over != INDEX:  # the weights in two files, whose index is used
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(weights)
        files = {}
        for number, part in enumerate((names[:5], names[5:])):
            save_file({name: weights[name] for name in part}, folder / f"{number}.safetensors", {"format": "pt"})
            files |= dict.fromkeys(part, f"{number}.safetensors")
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
        load_model(folder)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("damage", ["cut off", "html"])
def test_a_damaged_file_of_pytorch_weights_is_named(tiny_model_dir, tmp_path, legacy, damage):
    folder = copy_of(tiny_model_dir, tmp_path / "copy", "config.json", (tiny_model_dir / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save(weights, file, _use_new_zipfile_serialization=not legacy)
    load_model(folder)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage == "cut off" else b"<html>not found</html>")
    with pytest.raises(ValueError, match=rf"^{folder}.*cut off: copy or download it again$"):
        load_model(folder)
