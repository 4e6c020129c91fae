"""An append-only journal, which keeps the completions of an interrupted evaluation.

While a setup runs, `{setup}.partial/` holds `identity.json` (everything that determines the results), a lock and one
journal per rank: one JSON line per completion, written in a single call. A resumed run reads all journals, with any
number of processes. When all completions are done, they become `{setup}_0_generations.json` and the folder is removed.

All ranks share the lock; rank 0 first takes it exclusively. The system releases a lock whenever its process ends, so
the files of a killed run block no other run.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from d1.runs.fingerprint import CONTENTS
from d1.runs.lock import FileLock, Held
from d1.runs.output_dir import write_atomically

logger = logging.getLogger("eval")

ENTRY: dict[str, type | tuple[type, ...]] = {  # a line with all of these fields is a completion
    "index": int,  # the problem's number in its split
    "generations": str,
    "text": str,
    "tokens": int,
    "forward_passes": int,
    "seconds": (int, float),
}


class Journal:
    """The partial results of one setup in `output_dir`."""

    def __init__(self, output_dir: str | Path, setup: str, rank: int):
        self.output_dir, self.setup, self.rank = Path(output_dir), setup, rank
        self.folder = self.output_dir / f"{setup}.partial"
        self.results = self.output_dir / f"{setup}_0_generations.json"
        self.record = self.output_dir / f"{setup}_record.json"
        self.lock = FileLock(self.folder / "lock")  # held until `finish` or the end of the process
        self.lines: io.FileIO | None = None  # this rank's journal

    def prepare(self, identity: dict[str, Any], overwrite: bool) -> bool:
        """Prepares the folder for `identity` (rank 0 only); returns False if the results are already complete.

        Raises:
            ValueError: there are results of another run, or another process writes this setup; nothing was changed.
        """
        if not overwrite and self.results.exists() and self.record.exists():
            self.check_identity(read_object(self.record).get("identity") or {}, identity, self.record)
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        self.take_lock(fcntl.LOCK_EX)
        known = self.folder / "identity.json"
        if overwrite:
            # The identity goes last: completions without one could be taken for those of this run.
            for path in (self.results, self.record, *self.folder.glob("rank_*.jsonl"), known):
                path.unlink(missing_ok=True)
        try:
            if self.read():  # else a run was killed before its first completion, and nothing depends on it
                self.check_identity(read_object(known), identity, known)
            else:
                write_atomically(known, json.dumps(identity, indent=1))
            self.take_lock(fcntl.LOCK_SH)
        except (ValueError, OSError):
            self.lock.release()
            raise
        return True

    def take_lock(self, kind: int) -> None:
        """Locks the setup, exclusively or shared with the other ranks of the run."""
        try:
            self.lock.take(kind)
        except Held as holder:
            raise ValueError(
                f"{holder}, or another process of its launch, is evaluating into {self.folder}: wait until it is done, "
                "end it, or choose another --suffix or --output_dir"
            ) from None

    def check_identity(self, known: dict[str, Any], identity: dict[str, Any], file: Path) -> None:
        """Refuses another run than the one of `known`, which `file` holds; an older file has no fingerprints."""
        unknown = [name for name in identity.keys() - known.keys() if name.startswith(CONTENTS)]
        changed = [
            f"{name}: {known.get(name)!r} there, {identity.get(name)!r} now"
            for name in known | identity
            if known.get(name) != identity.get(name) and name not in unknown
        ]
        if changed:
            raise ValueError(
                f"{self.output_dir} already holds {self.setup} of a different run ({'; '.join(changed)}): "
                "choose another --suffix or --output_dir, or pass --overwrite to start again"
            )
        if unknown:
            logger.warning(
                "%s is of an older version, which did not record %s: only the weights and the prompts were compared. "
                "If anything else of these may have changed, start again with --overwrite",
                file,
                ", ".join(sorted(unknown)),
            )

    def read(self) -> dict[int, dict[str, Any]]:
        """All completions written so far, by any rank of any launch, by index; the first line of an index counts.

        Lines that are not a completion (cut off by a kill, damaged) are skipped and stay in the file.
        """
        done: dict[int, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("rank_*.jsonl")):
            for line in path.read_bytes().split(b"\n"):
                if (entry := parse_entry(line)) is not None:
                    done.setdefault(entry["index"], entry)
        return done

    def append(self, entry: dict[str, Any]) -> None:
        """Appends one completion, with the fields of `ENTRY`, to this rank's journal in a single write."""
        line = json.dumps(entry).encode() + b"\n"
        try:
            if self.lock.file is None:
                self.take_lock(fcntl.LOCK_SH)
            if self.lines is None:
                self.lines = io.FileIO(self.folder / f"rank_{self.rank}.jsonl", "ab")
                if os.fstat(self.lines.fileno()).st_size:
                    line = b"\n" + line  # ends a line that a kill may have cut off
            if self.lines.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.lines = None
            raise self.stopped(error) from error

    def stopped(self, error: OSError) -> OSError:
        """The error of a run that can no longer write."""
        return OSError(
            f"could not write to {self.output_dir} ({error.strerror or error}): {len(self.read())} completions are "
            f"safe in {self.folder}. Make room and start the same command again: it continues from there"
        )

    def finish(self, results: dict[str, Any], record: dict[str, Any]) -> None:
        """Writes the results and the record, and removes the journal (rank 0, when everything is done)."""
        try:
            write_atomically(self.results, json.dumps(results, indent=1, ensure_ascii=False))
            write_atomically(self.record, json.dumps(record, indent=1, default=str))
        except OSError as error:
            raise self.stopped(error) from error
        shutil.rmtree(self.folder)
        self.lock.release()


def parse_entry(line: bytes) -> dict[str, Any] | None:
    """The completion in a line; None if the line is not a completion."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in ENTRY.items())
    return entry if whole else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of ours. Raises ValueError, with the file's name, if it holds none."""
    try:
        return {**json.loads(path.read_bytes())}
    except (ValueError, TypeError, RecursionError, FileNotFoundError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or pass --overwrite to start again") from error
