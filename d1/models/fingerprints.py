"""The fingerprints of models, adapters and files, and whether an adapter is put on the model that it was trained on.

A fingerprint is the first 16 hexadecimal digits of a SHA-256. It covers a model's and an adapter's weights and config,
and the tokenizer's files. A folder that was moved or copied keeps its fingerprint. The fingerprint of a hub name is the
commit in the local cache. Imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from d1.files import read_object

logger = logging.getLogger(__name__)

RECORD = "run.json"  # of a run's folder: its settings, and the fingerprints of what they name
CONTENTS = "contents of "  # + a setting's name: the name of its fingerprint in a record
MODEL_SETTINGS = ("model_path", "model_name")  # the names that stages give to the path of the model
WEIGHTS = (".safetensors", ".bin")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "learnt.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
DIGITS = 16


def hash_values(values: Any) -> str:
    """The fingerprint of values that JSON can hold; others count as their text."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def hash_file(path: str | Path) -> str:
    """The fingerprint of a file's bytes; in an `adapter_config.json`, the path of the base does not count."""
    file = Path(path)
    if file.name == "adapter_config.json":
        return hash_values(json.loads(file.read_text()) | {"base_model_name_or_path": None})
    stat = file.stat()
    return hash_bytes(file.resolve(), (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))


@functools.cache
def hash_bytes(path: Path, stamps: tuple[int, ...]) -> str:
    """Hash a file, once per process as long as the system reports no change: a run hashes some files twice."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def hash_folder(path: str, names: Iterable[str]) -> str:
    """The fingerprint of those of the named files that a local folder has; for a hub name, of its cached commit."""
    folder = Path(path)
    if not folder.is_dir():
        return hub_commit(path)
    files = [folder / name for name in sorted(set(names)) if (folder / name).is_file()]
    with ThreadPoolExecutor() as threads:  # hashing releases the lock of the interpreter
        hashes = list(threads.map(hash_file, files))
    return hash_values([[file.name, file_hash] for file, file_hash in zip(files, hashes, strict=True)])


def hub_commit(name: str) -> str:
    """The commit of a hub name in the local cache, where its config is downloaded to; the name if there is none."""
    from huggingface_hub import try_to_load_from_cache

    from d1.transformers_bridge import has_file

    for file in ("config.json", "adapter_config.json", "tokenizer_config.json"):
        if has_file(name, file):
            path = try_to_load_from_cache(name, file)
            if isinstance(path, str):
                return Path(path).parent.name[:DIGITS]
    return name


def hash_model(path: str, adapter: str | None = None) -> dict[str, str]:
    """The fingerprints of a model as `load_model(path, adapter=adapter)` loads it: `model`, of the base; `adapter`, of
    all adapters on it, in order, if there are any; and `tokenizer`, the adapter's own if it has one. ValueError or
    FileNotFoundError if one of them is missing."""
    from d1.models.adapters import adapter_chain
    from d1.models.tokenizer import tokenizer_folder

    base, adapters = adapter_chain(path, adapter)
    fingerprints = {"model": hash_folder(base, model_files(base))}
    if adapters:
        fingerprints["adapter"] = hash_adapters(adapters)
    tokenizer_path = path
    if adapter and Path(adapter, "tokenizer_config.json").is_file():
        tokenizer_path = adapter
    fingerprints["tokenizer"] = hash_folder(tokenizer_folder(str(tokenizer_path)), TOKENIZER_FILES)
    return fingerprints


def hash_adapters(adapters: Sequence[str]) -> str:
    """The fingerprint of all adapters on a model, in order."""
    return hash_values([hash_folder(adapter, ADAPTER_FILES) for adapter in adapters])


def model_files(folder: str) -> list[str]:
    """The names of a local model's files that determine what it computes: its config, weights and their index."""
    files = [file.name for file in Path(folder).glob("*") if file.name != "training_args.bin"]
    return ["config.json", *(name for name in files if name.endswith((*WEIGHTS, ".index.json")))]


# --- The base of an adapter -------------------------------------------------------------------------------------------


def warn_of_other_base(base: str, adapters: Sequence[str]) -> None:
    """Log a warning for each adapter that, according to the record of its run, was trained on another model. `adapters`
    are put on `base` in this order. Only the first process compares. An adapter without a record is not compared."""
    if os.environ.get("RANK", "0") != "0":
        return
    for number, adapter in enumerate(adapters):
        trained_on = recorded_base(adapter)
        if trained_on is None:
            continue
        below = adapters[:number]
        actual_base: dict[str, str | None] = {"model": hash_folder(base, model_files(base)), "adapter": None}
        if below:
            actual_base["adapter"] = hash_adapters(below)
        if actual_base == trained_on or is_copy_of_hub_model(adapters[0], base):
            continue
        logger.warning(
            "The adapter %s was trained on another model than %s: the fingerprint of its base is %s in %s, and here it "
            "is %s. Load it on its own base, unless both hold the same weights in other files.",
            adapter,
            " with ".join([base, *below]),
            join_fingerprints(trained_on),
            RECORD,
            join_fingerprints(actual_base),
        )


def join_fingerprints(fingerprints: Mapping[str, str | None]) -> str:
    return " + ".join(value for value in fingerprints.values() if value)


def recorded_base(adapter: str) -> dict[str, str | None] | None:
    """The fingerprints of the `model` and the `adapter` (None without one) below an adapter, by the record in its
    folder or, for a checkpoint, in that of its run; None without a record of them."""
    from d1.transformers_bridge import file_of

    folder = Path(adapter)
    path = file_of(adapter, RECORD, needs_answer=False)
    if path is None and folder.name.startswith("checkpoint-"):
        path = str(folder.parent / RECORD)
    if path is None or not Path(path).is_file():
        return None
    with suppress(ValueError, KeyError, AttributeError):  # a damaged record is no reason to refuse the adapter
        settings = read_object(Path(path))["settings"]
        for name in MODEL_SETTINGS:
            contents = settings.get(CONTENTS + name)
            if isinstance(contents, dict) and "model" in contents:
                return {"model": contents["model"], "adapter": contents.get("adapter")}
    return None


def is_copy_of_hub_model(adapter: str, base: str) -> bool:
    """Whether an adapter names a model on the hub as its base and `base` is a folder with the same last name: a commit
    cannot be compared with the contents of files."""
    from d1.models.adapters import peft_config

    trained_on = str(peft_config(adapter).base_model_name_or_path)
    return Path(base).is_dir() and not Path(trained_on).is_absolute() and Path(trained_on).name == Path(base).name
