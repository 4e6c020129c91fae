"""Models and data that cannot be reached are refused at once, by name, with what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from d1.hub import closest, hub_problem
from d1.models.adapters import check_model_path
from d1.runs.data import load_rows
from d1.tasks import TASKS


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A hub that refuses connections, and an empty cache, which is returned. Its client, which would try again for half
    a minute, must not wait."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub_problem.cache_clear()
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    yield tmp_path
    assert not waits
    hub_problem.cache_clear()


@pytest.mark.parametrize(("offline", "why"), [(True, "HF_HUB_OFFLINE is set"), (False, "9 does not answer")])
def test_a_model_out_of_reach_is_refused_by_its_name(no_hub: Path, monkeypatch, offline: bool, why: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(FileNotFoundError, match=f"^me/model is no folder .*{why}.*hf download me/model$"):
        check_model_path("me/model")


def test_without_a_network_a_cached_model_is_read_from_the_cache(no_hub: Path, caplog) -> None:
    for name, text in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}")):
        path = no_hub / "models--me--model" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    check_model_path("me/model")
    assert constants.HF_HUB_OFFLINE  # nothing is asked again
    assert "so me/model is read from the cache" in caplog.text


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("me/rows", "neither a local file nor a data set that the hub gives (http://127.0.0.1:9 does not answer ("),
        ("sudokuu", "neither a local file (the nearest is sudoku) nor a data set that the hub gives (http"),
        ("some/folder/rows", "there is no such file"),
    ],
)
def test_a_data_set_out_of_reach_is_refused_without_retries(no_hub: Path, name: str, problem: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"^--train_data {re.escape(f'{name}: {problem}')}"):
        load_rows(name, TASKS)


def test_a_name_gets_the_closest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pocket" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert closest("pocket/basex") == closest("./pocket/bases") == " (the nearest is pocket/base)"
    assert closest("sudoko", TASKS) == " (the nearest is sudoku)"
    assert closest("GSAI-ML/LLaDA-8B-Instruct", TASKS) == closest("elsewhere/base") == ""
