"""What stops a run before processes connect: a model out of reach, and the lock of a build that was killed."""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from d1.hub import closest, hub_problem
from d1.models.adapters import check_there
from d1.runs.data import load_rows
from d1.runs.stage import check_start
from d1.tasks import TASKS, load_task
from tests import forks
from tests.commands import ROOT


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that refuses connections, and an empty cache, which is returned."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub_problem.cache_clear()
    return tmp_path


@pytest.mark.parametrize(("offline", "why"), [(True, "HF_HUB_OFFLINE is set"), (False, "9 does not answer")])
def test_a_model_out_of_reach_is_refused_by_its_name(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch, offline: bool, why: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(FileNotFoundError, match=f"^me/model is no folder .*{why}.*hf download me/model$"):
        check_there("me/model")
    hub_problem.cache_clear()


def test_without_a_network_a_cached_model_is_read_from_the_cache(
    no_hub: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = no_hub / "models--me--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    check_there("me/model")
    assert constants.HF_HUB_OFFLINE  # nothing is asked again
    assert "so me/model is read from the cache" in caplog.text
    hub_problem.cache_clear()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("me/rows", "neither a local file nor a data set that the hub gives (http://127.0.0.1:9 does not answer ("),
        ("sudokuu", "neither a local file (the nearest is sudoku) nor a data set that the hub gives (http"),
        ("./rows", "there is no such file"),
        ("some/folder/rows", "there is no such file"),
    ],
)
def test_a_data_set_out_of_reach_is_refused_without_retries(no_hub: Path, name: str, problem: str) -> None:
    started = time.monotonic()
    with pytest.raises(FileNotFoundError, match=f"^--train_data {re.escape(f'{name}: {problem}')}"):
        load_rows(name, TASKS)
    assert time.monotonic() - started < 5  # the hub's client tries for 23 seconds
    hub_problem.cache_clear()


def test_a_task_out_of_reach_is_refused_without_retries(no_hub: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ConnectionError, match=r"^cannot load openai/gsm8k from the hub \(http://127.0.0.1:9 does not"):
        load_task("gsm8k").load_rows("train")
    assert time.monotonic() - started < 5
    hub_problem.cache_clear()


def test_a_name_gets_the_closest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pocket" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert closest("pocket/basex") == closest("./pocket/bases") == " (the nearest is pocket/base)"
    assert closest("sudoko", TASKS) == " (the nearest is sudoku)"
    assert closest("GSAI-ML/LLaDA-8B-Instruct", TASKS) == closest("elsewhere/base") == ""


def test_deepspeed_that_is_not_installed_is_named(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as where it is not installed
    with pytest.raises(ValueError, match='for DeepSpeed, which is not installed: pip install "deepspeed=='):
        check_start(str(tiny_model_dir))


def test_only_the_lock_of_a_killed_build_is_refused(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    check_start(str(tiny_model_dir))  # without DeepSpeed nothing waits for it
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=f"^{lock} is left from a build that was killed"):
        check_start(str(tiny_model_dir))
    caplog.clear()
    with lock.open():  # as the build does
        check_start(str(tiny_model_dir))
    assert [line.partition(":")[0] for line in caplog.messages] == ["GPU", "DeepSpeed"]
    lock.rename(lock.with_suffix(".so").with_stem("deepspeed_shm_comm"))
    caplog.clear()
    check_start(str(tiny_model_dir))
    assert [line.partition(":")[0] for line in caplog.messages] == ["GPU"]


def test_sft_says_so_before_its_processes_connect(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The other process never starts: a process that waited for it would reach the timeout."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "lock").touch()
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29987"}
    world |= {"ACCELERATE_USE_DEEPSPEED": "true", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    words = ["sft_train.py", "--model_name", str(tiny_model_dir), "--debugging", "--output_dir", str(tmp_path)]
    started = forks.start(forks.script, *words, log=tmp_path / "log", folder=ROOT / "SFT", **world)
    said = forks.finish(started, tmp_path / "log", status=1, timeout=120)
    assert said.splitlines()[-1].startswith(f"sft_train.py: {tmp_path}/own/lock is left from a build")
