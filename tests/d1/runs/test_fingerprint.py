"""Fingerprints follow contents: not paths, names or times."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model

from d1.models import load_model
from d1.runs.data import load_rows
from d1.runs.record import of_file, of_model, of_rows, of_settings
from d1.tasks.data import read_file
from tests.faults import edit_json, write_at_the_same_time


def one_bit(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    write_at_the_same_time(path, bytes(content))


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "the first bit of the weights": ("model", lambda folder: one_bit(folder / "model.safetensors", 9)),
    "the last bit of the weights": ("model", lambda folder: one_bit(folder / "model.safetensors", -1)),
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


def write_rows(path: Path, text: str) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"question": [text]}), path)
    else:
        path.write_text(f"question\n{text}\n" if path.suffix == ".csv" else json.dumps({"question": text}) + "\n")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("read", [load_rows, lambda path: read_file(path, ("question",))], ids=["training", "task"])
def test_rows_of_the_same_path_and_time_are_read_again(tmp_path: Path, suffix: str, read) -> None:
    path, other = tmp_path / f"rows{suffix}", tmp_path / f"other{suffix}"
    write_rows(path, "first")
    assert read(str(path))["question"] == ["first"]
    write_rows(other, "again")
    write_at_the_same_time(path, other.read_bytes())
    assert read(str(path))["question"] == ["again"]
