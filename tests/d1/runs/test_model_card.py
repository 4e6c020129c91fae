"""A model card states what a run's records contain, in a form that the hub and a reader's own commands accept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from d1.runs.record import local_name, write_card
from tests.commands import ROOT, check_script
from tests.conftest import save_tiny_model

SFT = {"model_name": "GSAI-ML/LLaDA-8B-Instruct", "train_data": "simplescaling/s1K"}
RL = {"method": "espo", "model_path": "GSAI-ML/LLaDA-8B-Instruct", "dataset": "gsm8k"}
PAPER = "ESPO, arXiv 2512.03759"


def run_of(folder: Path, settings: dict[str, Any]) -> Path:
    """A run's record, next to a model."""
    save_tiny_model(folder)
    (folder / "run.json").write_text(json.dumps({"settings": settings}))
    return folder


def tables(text: str) -> dict[str, list[str]]:
    """First cell -> the other cells, for all tables of a card."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in lines}


def test_an_sft_card_has_base_and_data(tmp_path) -> None:
    card = ModelCard.load(write_card(run_of(tmp_path / "my-sft", SFT)))
    assert card.data.base_model == "GSAI-ML/LLaDA-8B-Instruct"
    assert card.data.datasets == ["simplescaling/s1K"]
    assert (card.data.library_name, card.data.tags) == ("transformers", ["d1", "masked-diffusion", "sft"])
    rows = tables(card.text)
    assert rows["base"] == ["GSAI-ML/LLaDA-8B-Instruct"]
    assert rows["data"] == ["simplescaling/s1K"]
    assert "https://arxiv.org/abs/2502.09992" in rows["method"][0]


def test_an_rl_card_has_its_method_and_task(tmp_path) -> None:
    (tmp_path / "my-sft").mkdir()
    settings = RL | {"model_path": str(tmp_path / "my-sft"), "paper": PAPER}
    card = ModelCard.load(write_card(run_of(tmp_path / "run" / "merged", settings)))
    assert card.data.base_model is None
    rows = tables(card.text)
    assert rows["base"] == ["my-sft, a local folder, which records no model of the hub that it was made from"]
    assert rows["method"] == ["diffu-GRPO, method espo: ESPO, [arXiv 2512.03759](https://arxiv.org/abs/2512.03759)"]
    assert rows["data"] == ["gsm8k"]
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
    card = ModelCard.load(write_card(run_of(tmp_path / "rl", RL | {"model_path": str(second), "paper": PAPER})))
    assert card.data.base_model == "GSAI-ML/LLaDA-8B-Instruct"
    assert tables(card.text)["base"] == ["second, a local folder, made from GSAI-ML/LLaDA-8B-Instruct"]
    (first / file).write_text(json.dumps({"base_model_name_or_path": str(second)}))  # a circle ends
    assert ModelCard.load(write_card(tmp_path / "rl")).data.base_model is None


def test_a_relative_path_in_a_record_is_no_name_on_the_hub(tmp_path) -> None:
    sft = tmp_path / "runs" / "sft"
    sft.mkdir(parents=True)
    (sft / "run.json").write_text(json.dumps({"settings": {"model_name": "runs/gone"}}))
    settings = RL | {"model_path": str(sft), "paper": PAPER}
    card = write_card(run_of(tmp_path / "runs" / "rl", settings))
    assert ModelCard.load(card).data.base_model is None
    (tmp_path / "runs" / "gone").mkdir()
    (tmp_path / "runs" / "gone" / "config.json").write_text(json.dumps({"_name_or_path": "GSAI-ML/LLaDA-8B-Instruct"}))
    assert ModelCard.load(write_card(card.parent)).data.base_model == "GSAI-ML/LLaDA-8B-Instruct"


def test_the_card_of_a_run_on_programs_says_how_they_were_judged(tmp_path) -> None:
    rows = tables(write_card(run_of(tmp_path / "run", RL | {"dataset": "code", "paper": PAPER})).read_text())
    (judged,) = rows["answers judged by"]
    assert judged.startswith(
        "tests in a bubblewrap sandbox, with limits per program: 10 s, 4 s of processor time and 512 MiB"
    )
    assert "answers judged by" not in tables(write_card(run_of(tmp_path / "other", RL | {"paper": PAPER})).read_text())


EVALUATIONS = {
    "sft": (
        [{"eval_loss": loss, "step": 4 * step} for step, loss in enumerate([0.4, 0.5, 0.6, None])],
        "loss 0.5 at step 4",
    ),
    "rl": ([{"eval_reward": 1.5, "eval_rewards/accuracy/mean": 0.25, "step": 4}], "accuracy 25.0% at step 4"),
    "none": ([{"loss": 0.1, "reward": 0.9, "rewards/accuracy/mean": 1.0, "step": 8}], "not measured"),
}


@pytest.mark.parametrize(("logs", "result"), EVALUATIONS.values(), ids=EVALUATIONS)
def test_a_card_has_the_held_out_result_and_no_noisy_batch(tmp_path, logs, result) -> None:
    folder = run_of(tmp_path / "run", SFT)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(log) + "\n" for log in logs))
    assert tables(write_card(folder).read_text())["held-out result"] == [result]


@pytest.mark.parametrize(
    ("more", "hardware", "duration"),
    [
        ({"gpus": ["H100"] * 4}, "4 x H100 per machine; processes: 8", "1:01:02 (hours:minutes:seconds)"),
        (
            {"gpus": [], "resumed_at": 40},
            "EPYC, 2 cores per machine; processes: 8",
            "1:01:02 (hours:minutes:seconds), from step 40 on",
        ),
    ],
)
def test_a_card_has_hardware_duration_and_licence(tmp_path, more, hardware, duration) -> None:
    folder = run_of(tmp_path / "run", SFT)
    record = {"settings": SFT, "processes": 8, "cpu": {"model": "EPYC", "cores": 2}, **more}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text('{"train_runtime": 3662.4, "step": 9}\n')
    rows = tables(write_card(folder).read_text())
    assert (rows["hardware"], rows["duration"]) == ([hardware], [duration])
    assert "weights: as GSAI-ML/LLaDA-8B-Instruct and the data; library: Apache-2.0" in rows["licence"][0]


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
