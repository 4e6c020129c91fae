"""The journal after a kill, a full disk or with a second process."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from d1.eval.completions import Journal
from tests import forks
from tests.faults import full_disk


def completion(index: int, text: str = "x", **fields: Any) -> dict[str, Any]:
    counts = {"tokens": 1, "forward_passes": 2, "forward_tokens": 3, "seconds": 0.5}
    return {"index": index, "generations": text, "text": text, **counts, **fields}


def write_and_wait(folder: Path, rank: int) -> None:
    journal = Journal(folder, "s", rank)
    if rank == 0:
        journal.prepare({"seed": 0}, overwrite=False)
    journal.append(completion(rank))
    sys.stdout.write("writing\n")
    sys.stdout.flush()
    time.sleep(600)


@contextmanager
def alive(folder: Path, rank: int) -> Iterator[BaseProcess]:
    """A process that has written a completion as `rank` and is still alive."""
    log = folder.with_name(f"{rank}.log")
    started = forks.start(write_and_wait, folder, rank, log=log, folder=folder.parent)
    try:
        while "writing" not in log.read_text():
            assert started[0].is_alive(), log.read_text()
            time.sleep(0.01)
        yield started[0]
    finally:
        forks.kill(started)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_living_run_is_left_alone_whichever_of_its_processes_lives(tmp_path, overwrite):
    folder = tmp_path / "run"
    journal = Journal(folder, "s", 0)
    with alive(folder, 0) as first, alive(folder, 1) as second:
        for process in (first, second):
            with pytest.raises(ValueError, match=f"process {first.pid} on .*another process of its launch, is eval"):
                journal.prepare({"seed": 0}, overwrite)
            assert set(journal.read()) == {0, 1}
            process.kill()
            process.join()
    assert journal.prepare({"seed": 0}, overwrite)  # the lock of a killed run blocks no other
    assert set(journal.read()) == (set() if overwrite else {0, 1})
    journal.finish({}, {"identity": {"seed": 0}})
    assert sorted(path.name for path in folder.iterdir()) == ["s_0_generations.json", "s_record.json"]


def test_a_full_disk_loses_nothing_and_says_how_to_go_on(tmp_path):
    journal = Journal(tmp_path, "s", 0)
    assert journal.prepare({"seed": 0}, overwrite=False)
    entries = [completion(index) for index in range(10)]
    with full_disk(409):
        for entry in entries[:3]:
            journal.append(entry)
        with pytest.raises(OSError, match=r"no room for completions in .*: 3 are safe in .*same command again"):
            journal.append(entries[3])
    assert list(journal.read().values()) == entries[:3]  # without the written part of the fourth
    for entry in entries[3:]:
        journal.append(entry)
    with full_disk(409), pytest.raises(OSError, match="10 are safe"):
        journal.finish({"generations": entries}, {"identity": {"seed": 0}})
    assert list(journal.read().values()) == entries
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.partial"]
    journal.finish({"generations": entries}, {"identity": {"seed": 0}})
    assert json.loads(journal.results.read_text()) == {"generations": entries}


FOREIGN = {  # lines of valid or nearly valid JSON that are not completions
    "not an entry": b'{"reward": 1.0}',
    "not an object": b"[1, 2]",
    "without its time": json.dumps({k: v for k, v in completion(1).items() if k != "seconds"}).encode(),
    "of another type": json.dumps(completion(1, tokens="3")).encode(),
    "damaged": b"\x00\xff\x00",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("line", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_line_is_left_out_and_finished_work_is_kept(tmp_path, line):
    journal = Journal(tmp_path, "s", 0)
    assert journal.prepare({"seed": 0}, overwrite=False)
    (journal.folder / "rank_1.jsonl").write_bytes(json.dumps(completion(2)).encode() + b"\n" + line + b"\n\n" + line)
    journal.append(completion(0))
    assert journal.read() == {0: completion(0), 2: completion(2)}
    journal.append(completion(1))
    assert journal.read().keys() == {0, 1, 2}


@pytest.mark.parametrize("content", ["", "[1]", '{"identity": '])
def test_a_damaged_identity_or_record_is_named(tmp_path, content):
    journal = Journal(tmp_path, "s", 0)
    journal.folder.mkdir()
    (journal.folder / "identity.json").write_text(content)
    (journal.folder / "rank_0.jsonl").write_text(json.dumps(completion(0)))
    with pytest.raises(ValueError, match=r"identity\.json .* it is damaged: restore it, or pass --overwrite"):
        journal.prepare({"seed": 0}, overwrite=False)
    journal.results.touch()
    journal.record.write_text(content)
    with pytest.raises(ValueError, match=r"s_record\.json .* it is damaged: restore it, or pass --overwrite"):
        journal.prepare({"seed": 0}, overwrite=False)
    assert journal.prepare({"seed": 0}, overwrite=True)


def test_results_without_a_record_are_not_replaced_but_on_demand(tmp_path):
    """d1's own files have the same names."""
    file = tmp_path / "s_0_generations.json"
    file.write_text('{"generations": []}')
    journal = Journal(tmp_path, "s", 0)
    with pytest.raises(ValueError, match=r"s_0_generations\.json has no s_record\.json, so it is of another run"):
        journal.prepare({"seed": 0}, overwrite=False)
    assert file.read_text() == '{"generations": []}'
    assert journal.prepare({"seed": 0}, overwrite=True)
    # A kill between the two files of a run leaves its journal.
    journal.append(completion(0))
    file.write_text('{"generations": []}')
    journal.close()
    assert Journal(tmp_path, "s", 0).prepare({"seed": 0}, overwrite=False)


def test_no_file_is_open_when_the_journal_is_removed(tmp_path, monkeypatch):
    """NFS keeps files that are removed while they are open, and refuses to remove their folder."""
    journal = Journal(tmp_path, "s", 0)
    journal.prepare({"seed": 0}, overwrite=False)
    journal.append(completion(0))

    def links() -> list[str]:
        files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        return [file for file in files if file.startswith(str(journal.folder))]

    assert links()
    open_files = []
    rmtree = shutil.rmtree

    def remove(folder: Path) -> None:
        open_files.extend(links())
        rmtree(folder)

    monkeypatch.setattr(shutil, "rmtree", remove)
    journal.finish({}, {})
    assert open_files == []
    assert not journal.folder.exists()
