"""Folders that cannot be written are refused; one run per folder, and a death releases its lock."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from d1.files import FileLock, LockHeldError, check_output_dir, valid_unicode, valid_unicode_in, write_atomically
from tests import forks
from tests.faults import flip_bit

SFT = Path(__file__).parents[2] / "SFT"
start = partial(forks.job, SFT / "sft_train.py", ACCELERATE_USE_CPU="true")


def test_a_file_in_the_way_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "run", file / "runs" / "run"):
        with pytest.raises(ValueError, match=rf"--output_dir {folder}: {file} is a file, not a folder"):
            check_output_dir(folder)
    check_output_dir(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="you may not write to"):
        check_output_dir(tmp_path / "run")


def test_a_second_run_in_a_folder_is_refused_in_all_its_processes_until_the_first_dies(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    data, folder = tmp_path / "rows.jsonl", tmp_path / "out" / "job"
    data.write_text("".join(json.dumps({"prompt": f"{i}+{i}", "completion": f"={2 * i}!"}) + "\n" for i in range(40)))
    flags = ["--model_name", str(tiny_model_dir), "--train_data", str(data), "--batch_size", "2", "--eval_steps", "1"]
    flags += ["--test_split", "0", "--grad_accum_steps", "1", "--lora_r", "2", "--debugging", "--max_steps"]
    (first,) = start([*flags, "100000"], folder.parent)
    try:
        end = time.monotonic() + 120
        while not any(folder.glob("checkpoint-*")):  # any: a run keeps its last two, so the first is soon gone
            assert first.is_alive(), (folder.parent / "log").read_text()[-4000:]
            assert time.monotonic() < end, "no checkpoint"
            time.sleep(0.05)
        words = ["sft_train.py", *flags, "2", "--resume", "--output_dir", str(folder.parent), "--job_name", "job"]
        two: Any = {"processes": 2, "ACCELERATE_USE_CPU": "true"}
        second = forks.start(forks.script, *words, log=tmp_path / "second", folder=SFT, **two)
        said = forks.finish(second, tmp_path / "second", status=1, timeout=120)
        assert re.search(rf": process {first.pid} on \S+ writes to {folder}: wait until that run ends", said)
        assert "Traceback" not in said
        assert first.is_alive()
    finally:
        forks.kill([first])
    assert (folder / ".lock").exists()
    last = max(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
    flags[5] = "1"  # 2 rows in all, as with one process
    forks.finish(start([*flags, str(last + 1), "--resume"], folder.parent, processes=2), folder.parent / "log")
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == last + 1
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert not (folder / ".lock").exists()
    flip_bit(weights := folder / f"checkpoint-{last + 1}" / "adapter_model.safetensors")  # one process reads it
    log = tmp_path / "damaged" / "log"
    shutil.copytree(folder.parent, log.parent)
    text = forks.finish(start([*flags, str(last + 2), "--resume"], log.parent, processes=2), log, status=1, timeout=120)
    assert f"{weights.name} is damaged (its checksum is not that of what was saved)" in text
    assert "Traceback" not in text


@pytest.fixture
def locks(tmp_path: Path) -> tuple[FileLock, FileLock]:
    """Of two holders; the first has it."""
    one, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    one.acquire()
    return one, other


def test_a_lock_is_one_holders_and_says_whose(locks: tuple[FileLock, FileLock]) -> None:
    one, other = locks
    for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        with pytest.raises(LockHeldError, match=rf"^process {os.getpid()} on \S+$"):
            other.acquire(kind)
    one.acquire(fcntl.LOCK_SH)
    other.acquire(fcntl.LOCK_SH)
    with pytest.raises(LockHeldError):
        one.acquire()
    one.acquire(fcntl.LOCK_SH)
    other.release()
    one.release(remove=True)
    assert not one.path.exists()
    other.acquire()
    assert one.path.exists()


def test_a_forked_process_does_not_hold_the_lock_of_its_parent(locks: tuple[FileLock, FileLock]) -> None:
    """A data loader's process lives for seconds after its parent was killed."""
    ours, theirs = locks
    forking = multiprocessing.get_context("fork")
    alive = forking.Event()
    child = forking.Process(target=lambda: [alive.set(), time.sleep(60)])
    child.start()
    try:
        assert alive.wait(60)
        with pytest.raises(LockHeldError):
            theirs.acquire()
        ours.release()
        theirs.acquire()
    finally:
        child.kill()
        child.join()


def test_without_locks_in_the_file_system_a_run_goes_on_with_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    FileLock(tmp_path / "lock").acquire()
    assert caplog.messages == [f"{tmp_path}/lock cannot be locked (No locks available): start no second run there"]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\U0001f600 \ufffd \ufeff \x00 é", "\U0001f600 \ufffd \ufeff \x00 é"),
    ],
)
def test_halves_of_characters_can_be_written(text: str, written: str, tmp_path: Path) -> None:
    assert valid_unicode(text) == written
    assert valid_unicode_in([{"k\udfff": [text, 3, None]}]) == [{"k\ufffd": [written, 3, None]}]
    write_atomically(tmp_path / "text", text)
    assert (tmp_path / "text").read_bytes() == written.encode()
