"""Folders that cannot be written are refused at the start; a full disk is named while saving."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from d1.runs.checkpoints import checkpoint_to_resume, staged_checkpoint
from d1.runs.output_dir import check_output_dir, writing

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
    """As much of a Trainer as saving asks for."""
    state = SimpleNamespace(global_step=7, best_global_step=None, best_model_checkpoint=None)
    args = SimpleNamespace(output_dir=str(folder), save_total_limit=None, should_save=True)
    return SimpleNamespace(args=args, state=state, accelerator=SimpleNamespace(wait_for_everyone=lambda: None))


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_names_the_checkpoint_and_leaves_the_old_ones(tmp_path: Path, error: Exception) -> None:
    trainer = stub(tmp_path)

    def save() -> None:
        with staged_checkpoint(trainer) as folder:
            folder.mkdir(parents=True)
            raise error

    with pytest.raises(OSError, match=r"could not write .*checkpoint-7: the disk .* is full") as caught:
        save()
    assert caught.value.__cause__ is error
    assert not (tmp_path / "checkpoint-7").exists()
    assert trainer.args.output_dir == str(tmp_path)


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), writing(tmp_path):
        raise RuntimeError("shapes differ")


def limited() -> None:
    """No file of the process may be longer than this, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))


def test_a_run_that_runs_out_of_room_says_so_in_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=?", "thinking_trajectories": ["add"], "attempt": "2"}\n' * 8)
    flags = ["--model_path", str(tiny_model_dir), "--train_data", str(rows), "--test_split", "0", "--debugging"]
    flags += ["--max_steps", "2", "--grad_accum_steps", "1", "--full_finetuning", "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "sft_train.py", *flags, "--num_proc", "1"],
        cwd=ROOT / "SFT",
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limited,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"sft_train.py: could not write {tmp_path}/out/llada-s1/checkpoint-2: the disk")


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
        with pytest.raises(ValueError, match="neither true, false nor the folder of a checkpoint"):
            checkpoint_to_resume(str(folder), resume)
