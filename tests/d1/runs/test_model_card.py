"""A model card states what a run's records contain, in a form that the hub and a reader's own commands accept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard

from d1.runs.model_card import local_name, write_card
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
    assert rows["base"] == ["my-sft"]
    assert rows["method"] == ["diffu-GRPO, method espo: ESPO, [arXiv 2512.03759](https://arxiv.org/abs/2512.03759)"]
    assert rows["data"] == ["gsm8k"]
    assert str(tmp_path) not in card.content


def test_the_card_of_a_run_on_programs_says_how_they_were_judged(tmp_path) -> None:
    rows = tables(write_card(run_of(tmp_path / "run", RL | {"dataset": "code", "paper": PAPER})).read_text())
    (judged,) = rows["answers judged by"]
    assert judged.startswith(
        "tests in a bubblewrap sandbox, with limits per program: 10 s, 4 s of processor time and 512 MiB"
    )
    assert "answers judged by" not in tables(write_card(run_of(tmp_path / "other", RL | {"paper": PAPER})).read_text())


def test_what_a_card_says_of_loading_works(tmp_path, monkeypatch) -> None:
    folder = run_of(tmp_path / "my-model", SFT)
    text = write_card(folder).read_text()
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
