"""Fingerprints of what a run reads: model, adapter, tokenizer, rows, and files with code of the user.

Evaluations, traces, resumed runs and model cards all use them. A path or a name says where something was, a fingerprint
what it was: the first 16 hexadecimal digits of a SHA-256. Imports no torch.

Covered: every byte of a model's and an adapter's weights, its `config.json` or `adapter_config.json`, the files of the
tokenizer with its chat template, the values of rows, and files of data and code. A folder that was moved or copied
keeps its fingerprint. For a hub name, it is that of the commit in the local cache, whose files are not read.
Not covered: `generation_config.json`, which nothing here reads; other files that a user's `.py` file imports; versions
of libraries.

SHA-256 reads 1 to 2 GB of weights per second, from files that are then loaded anyway; only one process does it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

CONTENTS, ROWS = "contents of ", "rows of "  # + the name of a setting: how a record names the fingerprint
MODEL_SETTINGS = ("model_path", "model_name")  # that name a model; the stages call it differently
FILES = (".py", ".json", ".jsonl", ".parquet", ".csv")  # of code and data
WEIGHTS = (".safetensors", ".bin")
OF_AN_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "learnt.json")
OF_A_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
DIGITS = 16
BATCH = 1000  # rows that are read at once


def of_setting(name: str) -> str:
    """The name of the setting that a fingerprint in a record belongs to; other names are unchanged."""
    return name.removeprefix(CONTENTS).removeprefix(ROWS)


def of_values(values: Any) -> str:
    """The fingerprint of values that JSON can hold; others count as their text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]


def of_rows(rows: Dataset) -> str:
    """The fingerprint of the names and values of all columns, in the order of the rows."""
    digest = hashlib.sha256()
    for batch in rows.with_format(None).iter(BATCH):
        digest.update(json.dumps(batch, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:DIGITS]


def of_file(path: str | Path) -> str:
    """The fingerprint of a file's bytes. For an `adapter_config.json`, the path of its base does not count."""
    file = Path(path)
    if file.name == "adapter_config.json":
        return of_values(json.loads(file.read_text()) | {"base_model_name_or_path": None})
    known = file.stat()
    stamps = known.st_size, known.st_mtime_ns, known.st_ctime_ns
    return _of_bytes(str(file.resolve()), known.st_dev, known.st_ino, stamps)


@functools.cache
def _of_bytes(path: str, device: int, inode: int, stamps: tuple[int, ...]) -> str:
    """Hash a file, once per process as long as the system reports no change: a run needs some of them twice."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def of_folder(path: str, names: Iterable[str]) -> str:
    """The fingerprint of those of the named files that a local folder has; for a hub name, of its cached commit."""
    folder = Path(path)
    if not folder.is_dir():
        return commit_of(path)
    files = [file for file in (folder / name for name in sorted(set(names))) if file.is_file()]
    with ThreadPoolExecutor() as threads:  # hashing releases the lock of the interpreter
        return of_values([[file.name, found] for file, found in zip(files, threads.map(of_file, files), strict=True)])


def commit_of(name: str) -> str:
    """The commit of a hub name in the local cache, where its config is downloaded to; the name if there is none."""
    from huggingface_hub import try_to_load_from_cache

    from d1.transformers_bridge import has_file

    for file in ("config.json", "adapter_config.json", "tokenizer_config.json"):
        if has_file(name, file) and isinstance(path := try_to_load_from_cache(name, file), str):
            return Path(path).parent.name[:DIGITS]
    return name


def of_model(path: str, adapter: str | None = None) -> dict[str, str]:
    """The fingerprints of a model as `load_model(path, adapter=adapter)` loads it: `model`, of the base; `adapter`, of
    all adapters on it, in order, if there are any; and `tokenizer`, the adapter's own if it has one.

    Raises:
        ValueError, FileNotFoundError: one of them is missing.
    """
    from d1.models.adapters import adapter_chain
    from d1.models.tokenizer import tokenizer_folder

    base, adapters = adapter_chain(path, adapter)
    found = {"model": of_folder(base, model_files(base))}
    if adapters:
        found["adapter"] = of_values([of_folder(one, OF_AN_ADAPTER) for one in adapters])
    own = adapter and Path(adapter, "tokenizer_config.json").is_file()
    found["tokenizer"] = of_folder(tokenizer_folder(str(adapter if own else path)), OF_A_TOKENIZER)
    return found


def model_files(folder: str) -> list[str]:
    """The names of a local model's files that determine what it computes: its config, weights and their index."""
    files = [file.name for file in Path(folder).glob("*") if file.name != "training_args.bin"]
    return ["config.json", *(name for name in files if name.endswith((*WEIGHTS, ".index.json")))]


def of_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprints of the model and of the files of code and data that a run's settings name, by
    `contents of SETTING`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name in MODEL_SETTINGS and value:
            found[CONTENTS + name] = of_model(str(value))
        elif isinstance(value, str) and value.endswith(FILES) and Path(value).is_file():
            found[CONTENTS + name] = of_file(value)
    return found


def from_rank_0(compute: Callable[[], Any]) -> Any:
    """The result of `compute` on rank 0. An exception there is raised on every rank, so that no rank waits for ever."""
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    joined = dist.is_available() and dist.is_initialized()
    if not joined or dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except (ValueError, OSError) as error:
            outcome[1] = error
    if joined:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
