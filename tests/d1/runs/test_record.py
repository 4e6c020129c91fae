"""Fingerprints follow contents, not paths or times; a model card states what a run's records contain."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard, constants
from peft import LoraConfig, get_peft_model

from d1.models import load_model
from d1.runs.data import load_rows
from d1.runs.record import local_name, of_file, of_model, of_rows, of_settings, write_card
from d1.tasks.data import read_file
from tests.commands import ROOT, check_script
from tests.conftest import save_tiny_model
from tests.faults import edit_json, write_at_the_same_time

# --- Fingerprints -----------------------------------------------------------------------------------------------------


def one_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
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


# --- Model card -------------------------------------------------------------------------------------------------------

SFT = {"model_name": "GSAI-ML/LLaDA-8B-Instruct", "train_data": "simplescaling/s1K"}
RL = {
    "method": "espo",
    "model_path": "GSAI-ML/LLaDA-8B-Instruct",
    "dataset": "gsm8k",
    "paper": "ESPO, arXiv 2512.03759",
}


def run_of(folder: Path, settings: dict[str, Any]) -> Path:
    """A run's record, next to a model."""
    save_tiny_model(folder)
    (folder / "run.json").write_text(json.dumps({"settings": settings}))
    return folder


def tables(text: str) -> dict[str, list[str]]:
    """First cell -> the other cells, for all tables of a card."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in lines}


def test_a_card_has_base_method_and_data(tmp_path) -> None:
    card = ModelCard.load(write_card(run_of(tmp_path / "my-sft", SFT)))
    assert card.data.base_model == "GSAI-ML/LLaDA-8B-Instruct"
    assert card.data.datasets == ["simplescaling/s1K"]
    assert (card.data.library_name, card.data.tags) == ("transformers", ["d1", "masked-diffusion", "sft"])
    entries = tables(card.text)
    assert (entries["base"], entries["data"]) == (["GSAI-ML/LLaDA-8B-Instruct"], ["simplescaling/s1K"])
    assert "https://arxiv.org/abs/2502.09992" in entries["method"][0]
    assert entries["licence"] == ["weights: as GSAI-ML/LLaDA-8B-Instruct and the data; library: Apache-2.0"]
    settings = RL | {"model_path": str(tmp_path / "my-sft"), "dataset": "code"}
    (tmp_path / "my-sft/run.json").unlink()
    card = ModelCard.load(write_card(run_of(tmp_path / "run" / "merged", settings)))
    assert card.data.base_model is None
    entries = tables(card.text)
    assert entries["base"] == ["my-sft, a local folder, which records no model of the hub that it was made from"]
    assert entries["method"] == ["diffu-GRPO, method espo: ESPO, [arXiv 2512.03759](https://arxiv.org/abs/2512.03759)"]
    assert entries["data"] == ["code"]
    assert entries["answers judged by"][0].startswith("tests in a bubblewrap sandbox, with limits per program: 10 s")
    assert str(tmp_path) not in card.content


@pytest.mark.parametrize(
    ("file", "record"),
    [
        ("run.json", {"settings": {"model_name": "GSAI-ML/LLaDA-8B-Instruct"}}),
        ("adapter_config.json", {"base_model_name_or_path": "GSAI-ML/LLaDA-8B-Instruct"}),
        ("config.json", {"_name_or_path": "GSAI-ML/LLaDA-8B-Instruct"}),
    ],
)
def test_the_card_of_a_run_from_a_local_folder_names_the_model_of_the_hub(tmp_path, file, record) -> None:
    for folder in (first := tmp_path / "first", second := tmp_path / "second"):
        folder.mkdir()
    (first / file).write_text(json.dumps(record))
    (second / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(first)}))
    card = ModelCard.load(write_card(run_of(tmp_path / "rl", RL | {"model_path": str(second)})))
    assert card.data.base_model == "GSAI-ML/LLaDA-8B-Instruct"
    assert tables(card.text)["base"] == ["second, a local folder, made from GSAI-ML/LLaDA-8B-Instruct"]
    (first / file).write_text(json.dumps({"base_model_name_or_path": str(second)}))  # a circle ends
    assert ModelCard.load(write_card(tmp_path / "rl")).data.base_model is None


def test_a_relative_path_in_a_record_is_no_name_on_the_hub(tmp_path) -> None:
    sft = tmp_path / "runs" / "sft"
    sft.mkdir(parents=True)
    (sft / "run.json").write_text(json.dumps({"settings": {"model_name": "runs/gone"}}))
    settings = RL | {"model_path": str(sft)}
    card = write_card(run_of(tmp_path / "runs" / "rl", settings))
    assert ModelCard.load(card).data.base_model is None
    (tmp_path / "runs" / "gone").mkdir()
    (tmp_path / "runs" / "gone" / "config.json").write_text(json.dumps({"_name_or_path": "GSAI-ML/LLaDA-8B-Instruct"}))
    assert ModelCard.load(write_card(card.parent)).data.base_model == "GSAI-ML/LLaDA-8B-Instruct"


@pytest.mark.parametrize(
    ("logs", "result"),
    [
        (
            [{"eval_loss": loss, "step": 4 * step} for step, loss in enumerate([0.4, 0.5, 0.6, None])],
            "loss 0.5 at step 4",
        ),
        ([{"eval_reward": 1.5, "eval_rewards/accuracy/mean": 0.25, "step": 4}], "accuracy 25.0% at step 4"),
        ([{"loss": 0.1, "reward": 0.9, "rewards/accuracy/mean": 1.0, "step": 8}], "not measured"),
    ],
)
@pytest.mark.parametrize(
    ("more", "hardware", "since"),
    [({"gpus": ["H100"] * 4}, "4 x H100", ""), ({"gpus": [], "resumed_at": 40}, "EPYC, 2 cores", ", from step 40 on")],
)
def test_a_card_has_the_held_out_result_hardware_and_duration(tmp_path, logs, result, more, hardware, since) -> None:
    folder = run_of(tmp_path / "run", SFT)
    record = {"settings": SFT, "processes": 8, "cpu": {"model": "EPYC", "cores": 2}, **more}
    (folder / "run.json").write_text(json.dumps(record))
    logs = [*logs, {"train_runtime": 3662.4, "step": 9}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(log) + "\n" for log in logs))
    entries = tables(write_card(folder).read_text())
    assert entries["held-out result"] == [result]
    assert entries["hardware"] == [f"{hardware} per machine; processes: 8"]
    assert entries["duration"] == [f"1:01:02 (hours:minutes:seconds){since}"]


@pytest.mark.parametrize(
    ("metadata", "pip", "line"),
    [
        ("", None, "pip install -e .  # in a copy of the library's repository"),
        ("Project-URL: Repository, https://here.org/d1\n", None, 'pip install "d1 @ git+https://here.org/d1"'),
        (
            "",
            {"url": "https://here.org/d1", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            'pip install "d1 @ git+https://here.org/d1@abc"',
        ),
    ],
)
def test_a_card_says_how_to_install_the_library(tmp_path, monkeypatch, metadata, pip, line) -> None:
    info = tmp_path / "site" / "d1-7.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: d1\nVersion: 7.0\n{metadata}")
    if pip:
        (info / "direct_url.json").write_text(json.dumps(pip))
    monkeypatch.syspath_prepend(tmp_path / "site")
    text = write_card(run_of(tmp_path / "run", SFT)).read_text()
    assert "With the library d1 7.0, an independent rewrite of the code of [d1]" in text
    assert f"```bash\n{line}\n```" in text


def test_what_a_card_says_of_loading_works(tmp_path, monkeypatch) -> None:
    folder = run_of(tmp_path / "my-model", SFT)
    text = write_card(folder).read_text()
    monkeypatch.chdir(tmp_path)
    (loading,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(loading, "README.md", "exec"), names := {})
    ids = torch.arange(8, 20)[None]
    assert names["model"](ids).logits.shape == (1, 12, len(names["tokenizer"]))
    _, commands = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    check_script(commands, ROOT)


def test_names_show_nothing_of_this_machine(tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local_name("me/model") == "me/model"
    assert local_name("here") == local_name("./here") == local_name(tmp_path / "here") == "here"
    assert local_name("/home/me/run/checkpoint-40") == "run/checkpoint-40"
    assert local_name("../x/run/merged") == "run/merged"
