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

from d1.models import load_model
from d1.runs.record import local_name, of_file, of_model, of_rows, of_settings, write_card
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
    before = of_model(str(folder))
    assert before == of_model(str(tiny_model_dir))  # a copy is the same model
    (folder / "README.md").write_text("a card")
    (folder / "training_args.bin").write_text("of a run")
    assert of_model(str(folder)) == before
    change(folder)
    after = of_model(str(folder))
    assert {name for name in before if before[name] != after[name]} == {part}


def test_an_adapter_counts_with_its_config_and_its_base(tiny_model_dir: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    adapter = tmp_path / "adapter"
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
    get_peft_model(load_model(str(base)), config).save_pretrained(adapter)
    before = of_model(str(adapter))
    assert before.keys() == {"model", "adapter", "tokenizer"}
    assert before == of_model(str(base), str(adapter))
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(tiny_model_dir))  # the same model elsewhere
    assert of_model(str(adapter)) == before
    edit_json(adapter / "adapter_config.json", lora_alpha=8)
    scaled = of_model(str(adapter))
    assert scaled == before | {"adapter": scaled["adapter"]} != before
    edit_json(base / "config.json", rms_norm_eps=1e-2)
    other = of_model(str(base), str(adapter))
    assert other == scaled | {"model": other["model"]} != scaled


def test_a_hub_name_stands_for_the_commit_in_the_cache(tiny_model_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    found = []
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny_model_dir, repository / "snapshots" / commit)
        (repository / "refs/main").write_text(commit)
        found.append(of_model("some/model"))
    assert found == [{"model": commit * 16, "tokenizer": commit * 16} for commit in "ab"]


def test_rows_count_with_their_order_and_the_names_of_their_columns() -> None:
    rows = [{"q": [index], "a": {"b": str(index)}} for index in range(2500)]
    data = Dataset.from_list(rows)
    assert of_rows(data) == of_rows(Dataset.from_list(rows)) == of_rows(data.select(range(2500)))
    others = [rows[::-1], rows[:-1], [*rows[:-1], {"q": [0], "a": {"b": "2499"}}]]
    prints = {of_rows(Dataset.from_list(one)) for one in (rows, *others)}
    assert len(prints | {of_rows(data.rename_column("q", "p"))}) == 5


def test_settings_that_name_files_are_followed(tiny_model_dir: Path, tmp_path: Path) -> None:
    for name in ("task.py", "rows.jsonl", "notes.txt"):
        (tmp_path / name).write_text(name)
    settings = {name: str(tmp_path / name) for name in ("task.py", "rows.jsonl", "notes.txt", "missing.py")}
    found = of_settings(settings | {"model_name": str(tiny_model_dir), "seed": 1, "data_file": None})
    assert found == {
        "contents of task.py": of_file(tmp_path / "task.py"),
        "contents of rows.jsonl": of_file(tmp_path / "rows.jsonl"),
        "contents of model_name": of_model(str(tiny_model_dir)),
    }


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
