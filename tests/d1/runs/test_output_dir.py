"""Folders that cannot be written are refused at the start; where a run continues."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from d1.files import check_output_dir
from d1.runs.checkpoints import checkpoint_to_resume, staged_checkpoint

ROOT = Path(__file__).parents[3]


def test_a_file_in_the_way_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "run", file / "runs" / "run"):
        with pytest.raises(ValueError, match=rf"--output_dir {folder}: {file} is a file, not a folder"):
            check_output_dir(folder)
    check_output_dir(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="you may not write to"):
        check_output_dir(tmp_path / "run")


def stub(folder: Path) -> Any:
    """The part of a Trainer that saving needs."""
    state = SimpleNamespace(global_step=7, best_global_step=None, best_model_checkpoint=None)
    args = SimpleNamespace(
        output_dir=str(folder), save_total_limit=None, should_save=True, process_index=0, world_size=1
    )
    return SimpleNamespace(args=args, state=state, accelerator=SimpleNamespace(wait_for_everyone=lambda: None))


def test_a_full_disk_leaves_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    trainer = stub(tmp_path)

    def save() -> None:
        with staged_checkpoint(trainer) as folder:
            folder.mkdir(parents=True)
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save()
    assert not (tmp_path / "checkpoint-7").exists()
    assert trainer.args.output_dir == str(tmp_path)


def test_where_a_run_continues(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for resume in (None, "false", "true", True):
        assert checkpoint_to_resume(str(folder), resume) is None
    for step in (4, 12):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    for resume in ("true", True):
        assert checkpoint_to_resume(str(folder), resume) == folder / "checkpoint-12"
    assert checkpoint_to_resume(str(folder), str(folder / "checkpoint-4")) == folder / "checkpoint-4"
    for resume in (None, "false", False):
        with pytest.raises(ValueError, match=r"holds another run \(checkpoint-12\): continue it with --resume"):
            checkpoint_to_resume(str(folder), resume)
    for resume in ("ture", str(tmp_path)):
        with pytest.raises(ValueError, match="it must be true, false or the folder of a checkpoint"):
            checkpoint_to_resume(str(folder), resume)
