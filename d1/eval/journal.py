"""An append-only journal, which keeps the completions of an evaluation that is interrupted.

While a setup runs, `{setup}.partial/` holds `identity.json` (all that determines the results) and one journal per rank:
one JSON line per completion, written in a single call. A resumed run reads all journals, with any number of processes.
When every completion is there, they become `{setup}_0_generations.json` and the folder is removed.

All ranks share a lock on `{setup}.lock`, which rank 0 first takes for itself alone. The system releases a lock when its
process ends, however it ends, so the files of a killed run block no other.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from d1.runs.output_dir import write_atomically

logger = logging.getLogger("eval")

Key = tuple[int, int]  # problem index in its split, sample
ENTRY: dict[str, type | tuple[type, ...]] = {  # what a line must hold to be a completion
    "index": int,
    "sample": int,
    "generations": str,
    "text": str,
    "tokens": int,
    "forward_passes": int,
    "seconds": (int, float),
}

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
        self.lines: io.FileIO | None = None  # this rank's journal

    def prepare(self, identity: dict[str, Any], overwrite: bool) -> bool:
        """Makes the folder ready for `identity` (rank 0 only); False when the results are already complete.

        Raises:
            ValueError: results of another run are there, or another process writes this setup; nothing was changed.
        """
        if not overwrite and self.is_complete(identity):
            return False
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.take_lock(fcntl.LOCK_EX)
        try:
            if overwrite:
                self.results.unlink(missing_ok=True)
                self.record.unlink(missing_ok=True)
                shutil.rmtree(self.folder, ignore_errors=True)
            elif self.is_complete(identity):  # since the first look
                self.release_lock()
                return False
            self.folder.mkdir(exist_ok=True)
            known = self.folder / "identity.json"
            if known.exists():
                self.check_identity(read_object(known), identity)
            else:
                write_atomically(known, json.dumps(identity, indent=1))
            self.take_lock(fcntl.LOCK_SH)
        except (ValueError, OSError):
            self.release_lock()
            raise
        return True

    def is_complete(self, identity: dict[str, Any]) -> bool:
        """Whether the results are there. Raises ValueError where they are those of another run."""
        if not (self.results.exists() and self.record.exists()):
            return False
        self.check_identity(read_object(self.record).get("identity") or {}, identity)
        return True

    def take_lock(self, kind: int) -> None:
        """Locks the setup for this process alone, or with the other ranks of its run.

        Raises:
            ValueError: another process is writing this setup's results.
        """
        while True:
            file = self.lock or io.FileIO(self.lock_path, "ab")
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                self.lock = None
                raise ValueError(
                    f"another process is evaluating into {self.folder}: wait until it is done or end it; otherwise "
                    "choose another --suffix or --output_dir"
                ) from None
            # Its last owner may have removed it in between: then this lock excludes nobody.
            if self.lock_path.exists() and os.path.samestat(os.fstat(file.fileno()), self.lock_path.stat()):
                self.lock = file
                return
            file.close()

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

    def read(self, wanted: Collection[Key] | None = None) -> dict[Key, dict[str, Any]]:
        """Every completion written so far, by any rank of any launch; the first line of a key counts.

        Args:
            wanted: the keys of this run. If given, other keys are left out, and rank 0 warns of lines that are none of
                the run's completions: cut off by a kill, damaged, or of another setup. They stay in the file.
        """
        done: dict[Key, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("rank_*.jsonl")):
            skipped = []
            for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
                entry = self.parse(line)
                if entry is not None and (wanted is None or (entry["index"], entry["sample"]) in wanted):
                    done.setdefault((entry["index"], entry["sample"]), entry)
                elif line.strip():
                    skipped.append(number)
            if skipped and wanted is not None and self.rank == 0:
                logger.warning(
                    "%s: %d line(s) skipped (first: line %d), which are no completions of this run: cut off by a kill, "
                    "damaged, or of another setup. What they stand for is generated again",
                    *(path, len(skipped), skipped[0]),
                )
        return done

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """The completion of a line, or None if it is none of this setup's."""
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None
        whole = isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in ENTRY.items())
        return entry if whole and entry.pop("setup", self.setup) == self.setup else None

    def append(self, entry: dict[str, Any]) -> None:
        """Adds one completion, which has the fields of `ENTRY`, in one write to the end of this rank's journal.

        Raises:
            OSError: it could not be written, because the disk is full for example; says what is safe.
        """
        try:
            if self.lock is None:
                self.take_lock(fcntl.LOCK_SH)
            if self.lines is None:
                self.lines = io.FileIO(self.folder / f"rank_{self.rank}.jsonl", "ab")
                if os.fstat(self.lines.fileno()).st_size:
                    write_whole(self.lines, b"\n")  # ends what a kill may have cut off
            write_whole(self.lines, json.dumps({**entry, "setup": self.setup}).encode() + b"\n")
        except OSError as error:
            raise self.stopped(error) from error

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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of ours. Raises ValueError, with the file's name, where there is none."""
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
        fault = "not an object"
    except (ValueError, RecursionError) as error:
        fault = str(error)
    raise ValueError(f"{path} is damaged ({fault}): restore it, or pass --overwrite to start again")


def write_whole(file: io.FileIO, data: bytes) -> None:
    """Appends all of `data`, or none of it and raises OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        while data:  # a disk that is almost full takes a part, then none
            data = data[file.write(data) :]
    except OSError:
        file.truncate(size)
        raise
