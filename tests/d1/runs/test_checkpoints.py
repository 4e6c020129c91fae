"""Which checkpoint a run continues from, which ones are kept, and which are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from d1.runs.checkpoints import (
    broken_checkpoint_error,
    check_checkpoint,
    checkpoint_to_resume,
    rotate,
    set_aside_later,
)


def test_where_a_run_continues(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for resume in (None, "false", "true", True):
        assert checkpoint_to_resume(str(folder), resume) is None
    for step in (4, 12):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    for resume in ("true", True):
        assert checkpoint_to_resume(str(folder), resume) == folder / "checkpoint-12"
    assert checkpoint_to_resume(str(folder), str(folder)) == folder / "checkpoint-12"
    assert checkpoint_to_resume(str(folder), str(folder / "checkpoint-4")) == folder / "checkpoint-4"
    for resume in (None, "false", False):
        with pytest.raises(ValueError, match=r"holds another run \(checkpoint-12\): continue it with --resume"):
            checkpoint_to_resume(str(folder), resume)
    for resume in ("ture", str(tmp_path)):
        with pytest.raises(ValueError, match="it must be true, false or the folder of a checkpoint"):
            checkpoint_to_resume(str(folder), resume)


@pytest.mark.parametrize("last", ["checkpoint-12", "finished"])
def test_a_checkpoint_of_another_run_is_refused_in_a_folder_with_a_run(tmp_path: Path, last: str) -> None:
    other = tmp_path / "other" / "checkpoint-2"
    folder = tmp_path / "run"
    state = folder if last == "finished" else folder / last
    for path in (other, state):
        path.mkdir(parents=True)
        (path / "trainer_state.json").write_text("{}")
    message = rf"--resume {other} is not directly in .*run, which holds a run already \({last}\): copy the"
    with pytest.raises(ValueError, match=message):
        checkpoint_to_resume(folder, str(other))
    assert checkpoint_to_resume(tmp_path / "new", str(other)) == other
    (tmp_path / "link").symlink_to(folder)
    assert checkpoint_to_resume(tmp_path / "link", str(state)) == state
    assert checkpoint_to_resume(folder, "true") == state
    (folder / "checkpoint-2").symlink_to(other)  # a checkpoint that was moved to another disk
    assert checkpoint_to_resume(folder, str(folder / "checkpoint-2")) == folder / "checkpoint-2"


def test_checkpoints_of_later_steps_are_set_aside_and_none_is_lost(tmp_path: Path) -> None:
    for content in ("first", "second"):
        for step in (2, 4, 10):
            (tmp_path / f"checkpoint-{step}").mkdir(exist_ok=True)
            (tmp_path / f"checkpoint-{step}" / "content").write_text(content)
        set_aside_later(tmp_path, 10)
        assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (10, 2, 4)]
        set_aside_later(tmp_path, 2)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    moved = {path.name: (path / "content").read_text() for path in (tmp_path / "abandoned").iterdir()}
    first = {"checkpoint-4": "first", "checkpoint-10": "first"}
    assert moved == first | {"checkpoint-4-2": "second", "checkpoint-10-2": "second"}


def test_a_broken_checkpoint_names_the_one_before_it_and_no_folder_without_a_step(tmp_path: Path) -> None:
    for name in ("mine", "4", "12"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    (tmp_path / "checkpoint-4").rename(tmp_path / "away")
    broken = tmp_path / "checkpoint-12"
    assert "; no earlier checkpoint is left" in str(broken_checkpoint_error(broken, "x", "is missing"))
    (tmp_path / "away").rename(tmp_path / "checkpoint-4")
    assert str(broken_checkpoint_error(broken, "x", "is missing")).endswith(f"--resume {tmp_path / 'checkpoint-4'}")


@pytest.mark.parametrize(
    ("steps", "saved", "limit", "best", "left"),
    [
        ([2, 4, 10, 9], 10, 2, None, [9, 10]),
        ([2, 4, 10, 9], 10, 2, 2, [2, 10]),
        ([2, 4, 10, 9], 10, 1, 4, [4, 10]),
        ([2, 4, 10, 9], 10, 1, 10, [10]),
        ([2, 4, 10], 10, None, None, [2, 4, 10]),
        ([2, 4, 10], 10, 0, None, [2, 4, 10]),
    ],
)
def test_which_checkpoints_a_limit_keeps(tmp_path: Path, steps, saved, limit, best, left) -> None:
    for step in steps:
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-mine").mkdir()
    rotate(tmp_path / f"checkpoint-{saved}", limit, None if best is None else str(tmp_path / f"checkpoint-{best}"))
    expected = {*(f"checkpoint-{step}" for step in left), "checkpoint-mine"}
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == expected


@pytest.mark.parametrize(
    ("plugin", "files"),
    [
        (None, ["optimizer.pt", "scheduler.pt", "model.safetensors"]),
        (None, ["optimizer.bin", "scheduler.pt", "pytorch_model_fsdp.bin"]),  # FSDP, FULL_STATE_DICT
        (None, ["optimizer_0/.metadata", "scheduler.pt", "pytorch_model_fsdp_0"]),  # FSDP, SHARDED_STATE_DICT
        (SimpleNamespace(deepspeed_config={}), ["latest", "scheduler.pt"]),
        (SimpleNamespace(deepspeed_config={"scheduler": {}}), ["latest"]),
    ],
)
def test_a_launch_needs_the_files_that_it_saves(tmp_path: Path, plugin: Any, files: list[str]) -> None:
    """Names as Transformers 5.23, Accelerate and DeepSpeed 0.19 write them."""
    args: Any = SimpleNamespace(deepspeed_plugin=plugin)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    check_checkpoint(tmp_path, args)
    for name in files:
        (tmp_path / name).rename(tmp_path / "away")
        with pytest.raises(ValueError, match="is missing"):
            check_checkpoint(tmp_path, args)
        (tmp_path / "away").rename(tmp_path / name)
