"""The journal: what a kill, a full disk or a second process leaves of it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from d1.eval.journal import Journal

EVAL = Path(__file__).resolve().parents[3] / "eval"
IDENTITY = {"seed": 0, "dtype": "torch.bfloat16", "batch_size": 4, "device": "cpu"}
WRITER = """
import sys
from d1.eval.journal import Journal
folder, rank = sys.argv[1:]
journal = Journal(folder, "s", int(rank))
if rank == "0":
    journal.prepare({"seed": 0}, overwrite=False)
journal.append({"index": int(rank), "sample": 0})
print("writing", flush=True)
sys.stdin.read()
"""


@contextmanager
def alive(folder: Path, rank: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has written a completion as `rank` and lives."""
    command = [sys.executable, "-c", WRITER, str(folder), str(rank)]
    with subprocess.Popen(command, cwd=EVAL, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        try:
            yield process
        finally:
            process.kill()


def test_lines_cut_off_by_a_kill_do_not_count(tmp_path):
    journal = Journal(tmp_path, "s", 0)
    assert journal.prepare({"seed": 0}, overwrite=False)
    journal.append({"index": 0, "sample": 0, "text": "line\nbreak \u2028"})
    with open(journal.folder / "rank_0.jsonl", "ab") as file:
        file.write(b'{"index": 1, "sample": 0, "te')
    assert set(journal.read()) == {(0, 0)}
    journal.lines = None  # which closes it, as a kill does
    journal.append({"index": 2, "sample": 0})
    journal.append({"index": 1, "sample": 0})
    assert set(journal.read()) == {(0, 0), (1, 0), (2, 0)}
    second = Journal(tmp_path, "s", 0)
    with pytest.raises(ValueError, match="another process"):
        second.prepare({"seed": 0}, overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_living_run_is_left_alone_whichever_of_its_processes_lives(tmp_path, overwrite):
    journal = Journal(tmp_path, "s", 0)
    with alive(tmp_path, 0) as first, alive(tmp_path, 1) as second:
        for process in (first, second):
            with pytest.raises(ValueError, match="another process is evaluating into"):
                journal.prepare({"seed": 0}, overwrite)
            assert set(journal.read()) == {(0, 0), (1, 0)}
            process.kill()
            process.wait()
    assert journal.prepare({"seed": 0}, overwrite)  # the lock of a killed run blocks no other
    assert set(journal.read()) == (set() if overwrite else {(0, 0), (1, 0)})
    journal.finish({}, {"identity": {"seed": 0}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s_0_generations.json", "s_record.json"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside, the system refuses to let a file of this process grow beyond `size` bytes, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_nothing_and_says_how_to_go_on(tmp_path):
    journal = Journal(tmp_path, "s", 0)
    assert journal.prepare({"seed": 0}, overwrite=False)
    entries = [{"index": index, "sample": 0, "text": "x" * 100} for index in range(10)]
    with files_of_at_most(500):
        for entry in entries[:3]:
            journal.append(entry)
        with pytest.raises(OSError, match=r"could not write .*: 3 completions are safe in .*same command again"):
            journal.append(entries[3])
    assert (journal.folder / "rank_0.jsonl").read_bytes() == b"".join(
        json.dumps(entry).encode() + b"\n" for entry in entries[:3]
    )
    for entry in entries[3:]:
        journal.append(entry)
    with files_of_at_most(500), pytest.raises(OSError, match="10 completions are safe"):
        journal.finish({"generations": entries}, {"identity": {"seed": 0}})
    assert list(journal.read().values()) == entries
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.lock", "s.partial"]
    journal.finish({"generations": entries}, {"identity": {"seed": 0}})
    assert json.loads(journal.results.read_text()) == {"generations": entries}


def test_what_an_older_version_did_not_write_down_is_no_difference(tmp_path):
    old = {"seed": 0, "dtype": "torch.bfloat16"}
    (tmp_path / "s.partial").mkdir()
    (tmp_path / "s.partial" / "identity.json").write_text(json.dumps(old))
    (tmp_path / "s.partial" / "lock").touch()
    journal = Journal(tmp_path, "s", 0)
    assert journal.prepare(IDENTITY, overwrite=False)
    journal.finish({}, {"identity": IDENTITY})
    assert not journal.prepare(IDENTITY, overwrite=False)
    for changed in ({"batch_size": 8}, {"device": "NVIDIA H200"}):
        with pytest.raises(ValueError, match=f"{next(iter(changed))}: .* there, .* now"):
            journal.prepare(IDENTITY | changed, overwrite=False)
    with pytest.raises(ValueError, match="batch_size: 4 there, None now"):
        journal.prepare(old, overwrite=False)
