"""What keeps an evaluation whole: an append-only journal a killed run resumes from, and files replaced atomically.

While a setup runs, `{setup}.partial/` holds `identity.json` (all that determines the results) and one journal a rank:
one JSON line a completion, written in a single call. Whoever resumes reads all journals, whatever the number of
processes was. When every completion is there, they become `{setup}_0_generations.json` and the folder goes.

Rank 0 holds a lock on `{setup}.lock`, every rank one on its own journal. The system takes a lock back when its process
ends, however it ends, so the files of a killed run block no other.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

Key = tuple[int, int]  # problem index in its split, sample

# Version 0.1 did not record these, so they are not compared where it began the run.
UNKNOWN_OF_0_1 = ("batch_size", "attn_implementation", "device", "libraries")


class Journal:
    """The partial results of one setup in `output_dir`."""

    def __init__(self, output_dir: str | Path, setup: str, rank: int):
        self.output_dir, self.setup, self.rank = Path(output_dir), setup, rank
        self.folder = self.output_dir / f"{setup}.partial"
        self.results = self.output_dir / f"{setup}_0_generations.json"
        self.record = self.output_dir / f"{setup}_record.json"
        self.lock_path = self.output_dir / f"{setup}.lock"
        self.lock: io.FileIO | None = None  # held until `finish` or the end of the process
        self.lines: io.FileIO | None = None  # this rank's journal, likewise

    def prepare(self, identity: dict[str, Any], overwrite: bool) -> bool:
        """Makes the folder ready for `identity` (rank 0 only); False when the results are already complete.

        Raises:
            ValueError: results of another run are there, or a run of this setup is still going; nothing was changed.
        """
        if not overwrite and self.is_complete(identity):
            return False
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.take_lock()
        try:
            if overwrite:
                self.remove()
            elif self.is_complete(identity):  # since the first look
                self.release_lock()
                return False
            self.folder.mkdir(exist_ok=True)
            known = self.folder / "identity.json"
            if known.exists():
                self.check_identity(json.loads(known.read_text()), identity)
            else:
                write_atomically(known, json.dumps(identity, indent=1))
        except (ValueError, OSError):
            self.release_lock()
            raise
        return True

    def remove(self) -> None:
        for path in (self.results, self.record):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_complete(self, identity: dict[str, Any]) -> bool:
        """Whether the results are there. Raises ValueError where they are those of another run."""
        if not (self.results.exists() and self.record.exists()):
            return False
        self.check_identity(json.loads(self.record.read_text())["identity"], identity)
        return True

    def take_lock(self) -> None:
        """Raises ValueError where another process, of any rank, is writing this setup's results."""
        self.lock = lock_file(self.lock_path)
        journals = sorted(self.folder.glob("rank_*.jsonl"))
        if self.lock is None or not all(map(is_unlocked, journals)):
            self.release_lock()
            raise ValueError(
                f"another process is evaluating into {self.folder}: wait until it is done or end it; otherwise choose "
                "another --suffix or --output_dir"
            )

    def release_lock(self) -> None:
        if self.lock is not None:
            self.lock_path.unlink(missing_ok=True)
            self.lock.close()
            self.lock = None

    def check_identity(self, known: dict[str, Any], identity: dict[str, Any]) -> None:
        changed = [
            f"{name}: {known.get(name)!r} there, {identity.get(name)!r} now"
            for name in known | identity
            if known.get(name) != identity.get(name) and (name in known or name not in UNKNOWN_OF_0_1)
        ]
        if changed:
            raise ValueError(
                f"{self.output_dir} already holds {self.setup} of a different run ({'; '.join(changed)}). "
                "Choose another --suffix or --output_dir, or pass --overwrite to start again"
            )

    def read(self) -> dict[Key, dict[str, Any]]:
        """Every completion written so far, by any rank of any launch; a line cut off by a kill does not count."""
        done: dict[Key, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("rank_*.jsonl")):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n") and line.strip():
                    entry = parse_line(line)
                    if entry is not None:
                        done.setdefault((entry["index"], entry["sample"]), entry)
        return done

    def append(self, entry: dict[str, Any]) -> None:
        """Adds one completion with `index` and `sample`, in one write to the end of this rank's journal.

        Raises:
            OSError: it could not be written, because the disk is full for example; says what is safe.
        """
        try:
            if self.lines is None:
                self.lines = self.open_lines()
            write_whole(self.lines, json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise self.stopped(error) from error

    def open_lines(self) -> io.FileIO:
        """This rank's journal, open to append and locked."""
        lines = lock_file(self.folder / f"rank_{self.rank}.jsonl")
        if lines is None:
            raise BlockingIOError(f"another process is writing {self.folder}/rank_{self.rank}.jsonl")
        if os.fstat(lines.fileno()).st_size:
            write_whole(lines, b"\n")  # ends what a kill may have cut off
        return lines

    def stopped(self, error: OSError) -> OSError:
        """The error that ends a run that can write no more."""
        return OSError(
            f"could not write to {self.output_dir} ({error.strerror or error}): {len(self.read())} completions are "
            f"safe in {self.folder}. Make room and start the same command again: it continues from there"
        )

    def finish(self, results: dict[str, Any], record: dict[str, Any]) -> None:
        """Puts results and record in their place and removes the journal (rank 0, when everything is done).

        Raises:
            OSError: they could not be written; the journal is as it was.
        """
        try:
            write_atomically(self.results, json.dumps(results, indent=1, ensure_ascii=False))
            write_atomically(self.record, json.dumps(record, indent=1, default=str))
        except OSError as error:
            raise self.stopped(error) from error
        shutil.rmtree(self.folder)
        self.release_lock()


def parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None  # cut off by a kill, and ended by the launch after it
    return entry if isinstance(entry, dict) and {"index", "sample"} <= set(entry) else None


def lock_file(path: Path) -> io.FileIO | None:
    """`path`, made if need be, open to append and locked until it is closed; None where another process has it."""
    while True:
        file = io.FileIO(path, "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        # Its last owner may have removed it in between: then this one locks nobody out.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def is_unlocked(path: Path) -> bool:
    file = lock_file(path)
    if file is not None:
        file.close()
    return file is not None


def write_whole(file: io.FileIO, data: bytes) -> None:
    """Appends all of `data`, or none of it and raises OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        while data:  # a disk that is almost full takes a part, then none
            data = data[file.write(data) :]
    except OSError:
        file.truncate(size)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path` as a whole: readers see the old content or the new, never a part."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(staging, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
