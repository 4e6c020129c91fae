"""Fingerprints follow contents, not paths or times; a model card states what a run's records contain."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard, constants
from peft import LoraConfig, get_peft_model

from d1.lazy import local_imports
from d1.models import load_model
from d1.rl.checks import ON_RESUME as RL_ON_RESUME
from d1.runs.record import (
    OnResume,
    RunHistory,
    flatten_settings,
    hash_file,
    hash_model,
    hash_rows,
    hash_settings,
    local_name,
    write_card,
)
from d1.sft.stage import ON_RESUME as SFT_ON_RESUME
from tests.commands import ROOT, check_script
from tests.conftest import save_tiny_model
from tests.faults import edit_json, flip_bit

# --- Fingerprints -----------------------------------------------------------------------------------------------------


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "the first bit of the weights": ("model", lambda folder: flip_bit(folder / "model.safetensors", 0.0)),
    "the last bit of the weights": ("model", lambda folder: flip_bit(folder / "model.safetensors", 1 - 1e-9)),
    "the config": ("model", lambda folder: edit_json(folder / "config.json", rms_norm_eps=1e-2)),
    "another file of weights": ("model", lambda folder: (folder / "more.safetensors").write_bytes(b"1")),
    "a token": ("tokenizer", lambda folder: edit_json(folder / "tokenizer.json", version="2.0")),
    "the chat template": ("tokenizer", lambda folder: (folder / "chat_template.jinja").write_text("{{ 1 }}")),
}


@pytest.mark.parametrize(("part", "change"), CHANGES.values(), ids=CHANGES)
def test_each_change_of_a_model_changes_its_part(tiny_model_dir: Path, tmp_path: Path, part: str, change) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    before = hash_model(str(folder))
    assert before == hash_model(str(tiny_model_dir))  # a copy is the same model
    (folder / "README.md").write_text("a card")
    (folder / "training_args.bin").write_text("of a run")
    assert hash_model(str(folder)) == before
    change(folder)
    after = hash_model(str(folder))
    assert {name for name in before if before[name] != after[name]} == {part}


def test_an_adapter_counts_with_its_config_and_its_base(tiny_model_dir: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    adapter = tmp_path / "adapter"
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
    get_peft_model(load_model(str(base)), config).save_pretrained(adapter)
    before = hash_model(str(adapter))
    assert before.keys() == {"model", "adapter", "tokenizer"}
    assert before == hash_model(str(base), str(adapter))
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(tiny_model_dir))  # the same model elsewhere
    assert hash_model(str(adapter)) == before
    edit_json(adapter / "adapter_config.json", lora_alpha=8)
    scaled = hash_model(str(adapter))
    assert scaled == before | {"adapter": scaled["adapter"]} != before
    edit_json(base / "config.json", rms_norm_eps=1e-2)
    other = hash_model(str(base), str(adapter))
    assert other == scaled | {"model": other["model"]} != scaled


def test_a_hub_name_stands_for_the_commit_in_the_cache(tiny_model_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    found = []
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny_model_dir, repository / "snapshots" / commit)
        (repository / "refs/main").write_text(commit)
        found.append(hash_model("some/model"))
    assert found == [{"model": commit * 16, "tokenizer": commit * 16} for commit in "ab"]


def test_rows_count_with_their_order_and_the_names_of_their_columns() -> None:
    rows = [{"q": [index], "a": {"b": str(index)}} for index in range(2500)]
    data = Dataset.from_list(rows)
    assert hash_rows(data) == hash_rows(Dataset.from_list(rows)) == hash_rows(data.select(range(2500)))
    others = [rows[::-1], rows[:-1], [*rows[:-1], {"q": [0], "a": {"b": "2499"}}]]
    prints = {hash_rows(Dataset.from_list(one)) for one in (rows, *others)}
    assert len(prints | {hash_rows(data.rename_column("q", "p"))}) == 5


def test_settings_that_name_files_are_followed(tiny_model_dir: Path, tmp_path: Path) -> None:
    for name in ("task.py", "rows.jsonl", "notes.txt"):
        (tmp_path / name).write_text(name)
    settings = {name: str(tmp_path / name) for name in ("task.py", "rows.jsonl", "notes.txt", "missing.py")}
    found = hash_settings(settings | {"model_name": str(tiny_model_dir), "seed": 1, "data_file": None})
    assert found == {
        "contents of task.py": hash_file(tmp_path / "task.py"),
        "contents of rows.jsonl": hash_file(tmp_path / "rows.jsonl"),
        "contents of model_name": hash_model(str(tiny_model_dir)),
    }


def test_each_file_of_a_list_and_each_function_of_a_file_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    for file in (first, second):
        file.write_text(f"def {file.stem}(row): return row\n")
    settings = {"tools": ["calculator", str(first), str(second)], "data_function": f"{first}:first", "names": ["a", 1]}
    found = hash_settings(settings)
    assert found == {
        "contents of tools": [hash_file(first), hash_file(second)],
        "contents of data_function": hash_file(first),
    }
    second.write_text("def second(row): return None\n")
    changed = hash_settings(settings)
    assert {name for name in found if found[name] != changed[name]} == {"contents of tools"}


def test_the_local_modules_that_code_imports_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    files = {
        "mine.py": "import os, json\nimport torch\nimport d1.rows\nimport near\nfrom package import part as own\n",
        "near.py": "def late():\n    from elsewhere_module import name\n",
        "package/__init__.py": "from .other import thing\n",
        "package/part.py": "part = 1\n",
        "package/other.py": "from . import part\nimport mine\n",
        "package/unread.py": "",
        "elsewhere/elsewhere_module.py": "name = 1\n",
        "unread.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    read = {*files} - {"mine.py", "package/unread.py", "unread.py"}
    assert {str(file.relative_to(tmp_path)) for file in local_imports(tmp_path / "mine.py")} == read
    before = hash_settings({"reward_file": str(tmp_path / "mine.py")})
    assert before.keys() == {"contents of reward_file", "imports of reward_file"}
    for name in files:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content + b"\n# changed")
        after = hash_settings({"reward_file": str(tmp_path / "mine.py")})
        part = {"contents of reward_file"} if name == "mine.py" else {"imports of reward_file"}
        assert {key for key in before if before[key] != after[key]} == (part if name in read | {"mine.py"} else set())
        (tmp_path / name).write_bytes(content)
    (tmp_path / "mine.py").write_text("this is no Python (")
    assert hash_settings({"reward_file": str(tmp_path / "mine.py")}).keys() == {"contents of reward_file"}


@pytest.mark.parametrize(
    ("setting", "changed", "on_resume"),
    [
        ("tools", "tool.py", RL_ON_RESUME),
        ("tools", "helper_of_tool.py", RL_ON_RESUME),
        ("dataset", "helper_of_tool.py", RL_ON_RESUME),
        ("data_function", "tool.py", SFT_ON_RESUME),
        ("data_function", "helper_of_tool.py", SFT_ON_RESUME),
    ],
)
def test_a_resume_with_other_code_is_refused(setting: str, changed: str, on_resume: OnResume, tmp_path: Path) -> None:
    tool, helper = tmp_path / "tool.py", tmp_path / "helper_of_tool.py"
    tool.write_text("import helper_of_tool\n")
    helper.write_text("a = 1\n")
    values = {"tools": ["calculator", str(tool)], "dataset": str(tool), "data_function": f"{tool}:convert"}
    settings = {setting: values[setting]}
    history = RunHistory(8, flatten_settings({**settings, **hash_settings(settings)}))
    assert on_resume.changes(history, {**settings, **hash_settings(settings)}, tmp_path) == {}
    (tmp_path / changed).write_text("import helper_of_tool\na = 2\n")
    part = "contents" if changed == "tool.py" else "imports"
    with pytest.raises(ValueError, match=f"holds a run with {part} of {setting} .* instead of .*: continue it with"):
        on_resume.changes(history, {**settings, **hash_settings(settings)}, tmp_path)
    before = RunHistory(8, flatten_settings(settings))  # the record of an earlier version has no such fingerprint
    assert on_resume.changes(before, {**settings, **hash_settings(settings)}, tmp_path) == {}


def test_a_resume_with_other_rewards_is_noted(tmp_path: Path) -> None:
    """Rewards may change on a resume; the log and the record say so."""
    file = tmp_path / "rewards.py"
    file.write_text("import helper_of_rewards\n")
    (tmp_path / "helper_of_rewards.py").write_text("a = 1\n")
    settings = {"reward_file": str(file)}
    history = RunHistory(8, flatten_settings({**settings, **hash_settings(settings)}))
    (tmp_path / "helper_of_rewards.py").write_text("a = 2\n")
    changes = RL_ON_RESUME.changes(history, {**settings, **hash_settings(settings)}, tmp_path)
    assert changes.keys() == {"imports of reward_file"}


# --- Model card -------------------------------------------------------------------------------------------------------

HUB = "GSAI-ML/LLaDA-8B-Instruct"
SFT = {"model_name": HUB, "train_data": "simplescaling/s1K"}
RL = {"method": "espo", "model_path": HUB, "dataset": "gsm8k", "paper": "ESPO, arXiv 2512.03759"}


def card_of(folder: Path, settings: dict[str, Any]) -> ModelCard:
    """The card of a run with these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"settings": settings}))
    write_card(folder)
    return ModelCard.load(folder / "README.md")


def entries(card: ModelCard) -> dict[str, str]:
    return dict(re.findall(r"^\| (\w+) \| (.*) \|$", card.text, re.MULTILINE))


def test_a_card_has_base_method_and_data(tmp_path) -> None:
    card = card_of(tmp_path / "my-sft", SFT)
    assert (card.data.base_model, card.data.datasets) == (HUB, ["simplescaling/s1K"])
    assert (card.data.library_name, card.data.tags) == ("transformers", ["d1", "masked-diffusion", "sft"])
    found = entries(card)
    assert (found["base"], found["data"]) == (HUB, "simplescaling/s1K")
    assert "https://arxiv.org/abs/2502.09992" in found["method"]
    (tmp_path / "my-sft/run.json").unlink()
    card = card_of(tmp_path / "run/merged", RL | {"model_path": str(tmp_path / "my-sft")})
    assert (card.data.base_model, card.data.datasets) == (None, None)
    found = entries(card)
    assert (found["base"], found["data"]) == ("my-sft", "gsm8k")
    assert found["method"] == "diffu-GRPO, method espo: ESPO, [arXiv 2512.03759](https://arxiv.org/abs/2512.03759)"
    assert str(tmp_path) not in card.content


@pytest.mark.parametrize(
    ("file", "record"),
    [
        ("run.json", {"settings": {"model_name": HUB}}),
        ("adapter_config.json", {"base_model_name_or_path": HUB}),
        ("config.json", {"_name_or_path": HUB}),
    ],
)
def test_the_card_of_a_run_from_a_local_folder_names_the_model_of_the_hub(tmp_path, file, record) -> None:
    for folder in (first := tmp_path / "first", second := tmp_path / "second"):
        folder.mkdir()
    (first / file).write_text(json.dumps(record))
    (second / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(first)}))
    card = card_of(tmp_path / "rl", RL | {"model_path": str(second)})
    assert card.data.base_model == HUB
    assert entries(card)["base"] == f"second, made from {HUB}"
    (first / file).write_text(json.dumps({"base_model_name_or_path": str(second)}))  # a circle ends
    assert card_of(tmp_path / "rl", RL | {"model_path": str(second)}).data.base_model is None


def test_the_card_of_a_run_without_masks_or_with_a_causal_context_says_so(tmp_path) -> None:
    card = card_of(tmp_path / "uniform", SFT | {"uniform_noise": True, "causal_weight": 1.0})
    assert "masked" not in card.content
    assert "sft_diffusion_gemma.py" in entries(card)["method"]
    assert "random tokens" in card.text
    card = card_of(tmp_path / "causal", SFT | {"causal_context": True, "masked_weight": 0.3, "causal_weight": 1.0})
    assert {"x 0.3", "x 1.0"} <= {*re.findall(r"x [\d.]+\d", entries(card)["method"])}
    assert "fills in mask tokens" in card.text


def test_what_a_card_says_of_loading_works(tmp_path, monkeypatch) -> None:
    text = card_of(save_tiny_model(tmp_path / "my-model"), SFT).content
    monkeypatch.chdir(tmp_path)
    (loading,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(loading, "README.md", "exec"), names := {})
    ids = torch.arange(8, 20)[None]
    assert names["model"](ids).logits.shape == (1, 12, len(names["tokenizer"]))
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    check_script(commands, ROOT)


def test_names_show_nothing_of_this_machine(tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local_name("me/model") == "me/model"
    assert local_name("here") == local_name("./here") == local_name(tmp_path / "here") == "here"
    assert local_name("/home/me/run/checkpoint-40") == "run/checkpoint-40"
    assert local_name("../x/run/merged") == "run/merged"
