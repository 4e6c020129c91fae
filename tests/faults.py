"""What can go wrong around a run, made on purpose: for tests of any room."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# --- The clock --------------------------------------------------------------------------------------------------------

# --- Files ------------------------------------------------------------------------------------------------------------


def rewrite_unseen(path: Path, content: bytes) -> None:
    """Give a file other content, but the times that it had, as `cp -p` and `rsync -t` do."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_json(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file such as a model's `config.json`."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# --- Models -----------------------------------------------------------------------------------------------------------

# --- Servers ----------------------------------------------------------------------------------------------------------

# --- The sandbox ------------------------------------------------------------------------------------------------------
