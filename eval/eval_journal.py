"""What keeps an evaluation whole: an append-only journal a killed run resumes from, and files replaced atomically.

While a setup runs, `{setup}.partial/` holds `identity.json` (all that determines the results) and one journal a rank:
one JSON line a completion, written in a single call. Whoever resumes reads all journals, whatever the number of
processes was. When every completion is there, they become `{setup}_0_generations.json` and the folder goes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

Key = tuple[int, int]  # problem index in its split, sample

WHOLE_FILE = 16 << 20  # bytes up to which a weights file is hashed whole
PIECES, PIECE = 256, 1 << 16  # larger ones are hashed in pieces spread over the file


class Journal:
    """The partial results of one setup in `output_dir`."""

    def __init__(self, output_dir: str | Path, setup: str, rank: int):
        self.output_dir, self.setup, self.rank = Path(output_dir), setup, rank
        self.folder = self.output_dir / f"{setup}.partial"
        self.results = self.output_dir / f"{setup}_0_generations.json"
        self.record = self.output_dir / f"{setup}_record.json"
        self.lines: Any = None

    def prepare(self, identity: dict[str, Any], overwrite: bool) -> bool:
        """Makes the folder ready for `identity` (rank 0 only); False when the results are already complete.

        Raises:
            ValueError: results of another run are there, or that run is still going.
        """
        if overwrite:
            for path in (self.results, self.record):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.results.exists() and self.record.exists():
            self.check_identity(json.loads(self.record.read_text())["identity"], identity)
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / "lock", "w")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is evaluating into {self.folder}") from None
        known = self.folder / "identity.json"
        if known.exists():
            self.check_identity(json.loads(known.read_text()), identity)
        write_atomically(known, json.dumps(identity, indent=1))
        return True

    def check_identity(self, known: dict[str, Any], identity: dict[str, Any]) -> None:
        changed = [
            f"{name}: {known.get(name)!r} there, {identity.get(name)!r} now"
            for name in known | identity
            if known.get(name) != identity.get(name)
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
        """Adds one completion with `index` and `sample`, in one write to the end of this rank's journal."""
        if self.lines is None:
            path = self.folder / f"rank_{self.rank}.jsonl"
            self.lines = open(path, "ab", buffering=0)  # noqa: SIM115 - held until `finish`
            if path.stat().st_size:
                self.lines.write(b"\n")  # ends what a kill may have cut off
        self.lines.write(json.dumps(entry).encode() + b"\n")

    def finish(self, results: dict[str, Any], record: dict[str, Any]) -> None:
        """Puts results and record in their place and removes the journal (rank 0, when everything is done)."""
        write_atomically(self.results, json.dumps(results, indent=1, ensure_ascii=False))
        write_atomically(self.record, json.dumps(record, indent=1, default=str))
        shutil.rmtree(self.folder)


def parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None  # cut off by a kill, and ended by the launch after it
    return entry if isinstance(entry, dict) and {"index", "sample"} <= set(entry) else None


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path` as a whole: readers see the old content or the new, never a part."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    with open(staging, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, path)


def weights_fingerprint(path: str) -> str:
    """A hash of the weights in a local folder, so that a retrained model is not taken for the one before.

    A hub name stands for itself. Files larger than `WHOLE_FILE` count by size and by pieces spread over them.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as weights:
            starts = [0] if size <= WHOLE_FILE else [i * (size - PIECE) // (PIECES - 1) for i in range(PIECES)]
            for start in starts:
                weights.seek(start)
                digest.update(weights.read(WHOLE_FILE if size <= WHOLE_FILE else PIECE))
    return digest.hexdigest()[:16]
