"""The JSON files of a model's folder: each must be an object, and an index may name files of its own folder only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SMALL = ("config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json")
OF_TOKENIZER = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
AGAIN = "it is damaged: copy or download it again"


def read_object(path: Path, advice: str = AGAIN) -> dict[str, Any]:
    """The object in a JSON file; ValueError with `advice` if the file holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of the encoding or of JSON
        raise ValueError(f"{path} is no JSON ({error}): {advice}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object, but a {type(value).__name__}: {advice}")
    return value


def check_files(folder: Path) -> None:
    """Raise ValueError for a small JSON file that is damaged, and for an index of weights that is (`check_index`)."""
    for path in (folder / name for name in SMALL):
        if path.is_file():
            read_object(path)
    for path in sorted(folder.glob("*.index.json")):
        check_index(path)


def check_index(path: Path, complete: bool = True) -> None:
    """Raise ValueError for an index of weights whose files lie outside its folder or, if that is `complete`, are
    missing there."""
    index = read_object(path)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{path} has no weight_map from names to files: {AGAIN}")
    if not isinstance(index.get("metadata"), dict):
        raise ValueError(f"{path} has no metadata, which Transformers reads: {AGAIN}")
    for name in sorted({*files.values()}):
        if Path(name).name != name:
            raise ValueError(f"{path} names files in other folders, such as {name}: an index is for its own folder")
        if complete and not (path.parent / name).is_file():
            raise ValueError(f"{path} names {name}, which is not there: copy or download it")


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Turn an error that a library raises while it reads `path`, of any class, into a ValueError that names the file.

    Errors that are a user's already (ValueError, OSError, ImportError) stay as they are.
    """
    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # the libraries check little: a wrong type can fail anywhere
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: {what}: {' '.join(reason.split())}") from error
