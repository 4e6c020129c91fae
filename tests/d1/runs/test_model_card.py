"""A model card says what a run's records say, in a form that the hub and a reader's own commands take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from d1.__main__ import main, make_parser
from d1.runs.model_card import local_name, write_card
from tests.commands import ROOT, check_script
from tests.conftest import save_tiny_model

SFT = {"model_name": "GSAI-ML/LLaDA-8B-Instruct", "train_data": "simplescaling/s1K"}
RL = {"method": "espo", "model_path": "GSAI-ML/LLaDA-8B-Instruct", "dataset": "gsm8k", "data_file": None}
PAPER = "ESPO, arXiv 2512.03759"
# What parse_and_get_acc.py prints of an evaluation of 256 problems of which 40 are right.
SCORES = {"task": "gsm8k", "gen_length": 256, "accuracy": 15.625, "ci_low": 11.68, "ci_high": 20.57, "n": 256}


def run_of(folder: Path, settings: dict[str, Any], logs: list[dict[str, Any]], **state: Any) -> Path:
    """A finished run's records, beside a model."""
    save_tiny_model(folder)
    (folder / "run.json").write_text(json.dumps({"settings": settings}))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": logs, **state}))
    return folder


def tables(text: str) -> dict[str, list[str]]:
    """First cell -> the others, of all tables of a card."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in lines}


def test_an_sft_card_has_base_data_settings_and_the_losses_of_the_weights_that_were_kept(tmp_path) -> None:
    losses = [(0, 2.0), (100, 1.25), (200, 1.5)]
    logs = [{"step": step, "eval_loss": loss} for step, loss in losses] + [{"step": 200, "train_loss": 1.75}]
    odd = {"learning_rate": 1e-5, "template": ["{a}|`{b}`", "x\ny"], "data_function": str(tmp_path / "own.py:rows")}
    run_of(tmp_path / "my-sft", SFT | {"changed": odd}, logs, best_global_step=100)
    card = ModelCard.load(write_card(tmp_path / "my-sft"))
    assert card.data.base_model == "GSAI-ML/LLaDA-8B-Instruct"
    assert card.data.datasets == ["simplescaling/s1K"]
    assert (card.data.library_name, card.data.tags) == ("transformers", ["d1", "masked-diffusion", "sft"])
    rows = tables(card.text)
    assert rows["base"] == ["`GSAI-ML/LLaDA-8B-Instruct`"]
    assert rows["data"] == ["`simplescaling/s1K`"]
    assert "https://arxiv.org/abs/2502.09992" in rows["method"][0]
    assert rows["--learning_rate"] == ["`1e-05`"]
    assert rows["--template"] == ["`{a}\\|'{b}' x y`"]
    assert rows["--data_function"] == ["`own.py:rows`"]
    assert rows["loss on held-out rows"] == ["2 (step 0)", "1.25 (step 100)"]
    assert rows["mean training loss"] == ["", "1.75 (step 200)"]
    assert str(tmp_path) not in card.content


def test_an_rl_card_has_intervals_and_the_base_that_its_own_base_was_made_of(tmp_path) -> None:
    """Of validation problems from the run, of an evaluation through the command; SFT's card names the base."""
    run_of(tmp_path / "my-sft", SFT, [])
    write_card(tmp_path / "my-sft")
    logs = [
        {"step": step, "eval_rewards/accuracy/mean": share, "reward": share} for step, share in ((0, 0.25), (8, 0.5))
    ]
    settings = RL | {"model_path": str(tmp_path / "my-sft"), "validation_problems": 64, "paper": PAPER}
    folder = run_of(tmp_path / "run" / "merged", settings, logs)
    (tmp_path / "scores.json").write_text(json.dumps([SCORES | {"complete": True}, SCORES | {"complete": False}]))
    main(make_parser().parse_args(["card", str(folder), "--results", str(tmp_path / "scores.json")]))
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "GSAI-ML/LLaDA-8B-Instruct"
    assert [(one.metric_type, one.metric_value) for one in card.data.eval_results] == [("accuracy", 15.625)] * 2
    rows = tables(card.text)
    assert rows["base"] == ["`my-sft`"]
    assert rows["method"] == ["diffu-GRPO, `espo`: ESPO, [arXiv 2512.03759](https://arxiv.org/abs/2512.03759)"]
    # Wilson's interval of 32 of 64, by its formula: 1/2 -+ z / (2 sqrt(n + z^2)).
    low, high = (0.5 + side * 1.959964 / (2 * (64 + 1.959964**2) ** 0.5) for side in (-1, 1))
    _, last = rows["accuracy on validation problems, sampled"]
    assert last == f"50.0%, 95% interval {low:.1%} to {high:.1%} of 64 problems (step 8)"
    assert rows["reward in training"] == ["0.25 (step 0)", "0.5 (step 8)"]
    assert "| gsm8k | 256 | 15.6 | 11.7 to 20.6 | 256 |" in card.text
    assert "| gsm8k | 256 | 15.6 | 11.7 to 20.6 | 256 (some are missing) |" in card.text
    assert str(tmp_path) not in card.content


def test_what_a_card_says_of_loading_works(tmp_path, monkeypatch) -> None:
    folder = run_of(tmp_path / "my-model", SFT, [])
    text = write_card(folder).read_text()
    monkeypatch.chdir(tmp_path)
    (loading,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(loading, "README.md", "exec"), names := {})
    ids = torch.arange(8, 20)[None]
    assert names["model"](ids).logits.shape == (1, 12, len(names["tokenizer"]))
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    check_script(commands, ROOT)
    export = commands.splitlines()[-1].split()
    assert export[-2:] == ["--format", "llada"]
    main(make_parser().parse_args(export[3:]))
    assert json.loads(Path("OUT/config.json").read_text())["model_type"] == "llada"


def test_what_is_no_run_or_no_result_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no run\.json"):
        write_card(tmp_path)
    run_of(tmp_path / "run", RL, [])  # a record without "paper", as earlier versions wrote it
    assert tables(write_card(tmp_path / "run").read_text())["method"] == ["diffu-GRPO, `espo`"]
    with pytest.raises(ValueError, match=r"no results of `.*`: KeyError"):
        write_card(tmp_path / "run", results=[{"accuracy": 1.0}])


def test_names_show_nothing_of_this_machine(tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local_name("me/model") == "me/model"
    assert local_name("here") == local_name("./here") == local_name(tmp_path / "here") == "here"
    assert local_name("/home/me/run/checkpoint-40") == "run/checkpoint-40"
    assert local_name("../x/run/merged") == "run/merged"
