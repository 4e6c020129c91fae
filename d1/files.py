"""Files of runs and models: written whole or not at all, locked for one run, and refused in one line if damaged."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import platform
import re
import shutil
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# --- Errors of full disks ---------------------------------------------------------------------------------------------

FULL_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# How messages of PyTorch 2.13 begin if it cannot write a file; it drops the system's reason.
TORCH_WRITE_ERRORS = (
    "[enforce fail at inline_container",
    "PytorchStreamWriter failed writing",
    "basic_ios::clear",
    "write(): fd ",
)


@contextmanager
def writing(folder: Path, what: str, advice: str | Callable[[], str]) -> Iterator[None]:
    """Raise an OSError of one line if a file written inside has no room. It names the `folder`, `what` is written (e.g.
    "checkpoint-8"), the room that is left, and `advice`, which may be a function that is called only then."""
    try:
        yield
    except Exception as error:  # safetensors, PyTorch and shutil have their own classes
        reason = no_room(error)
        if not reason:
            raise
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        free = shutil.disk_usage(existing).free / 1e9
        if not isinstance(advice, str):
            advice = advice()
        raise OSError(f"no room for {what} in {folder} ({reason}; {free:.1f} GB are free there): {advice}") from error


def no_room(error: Exception) -> str:
    """The reason in an error if it is a full disk, a quota or a limit of size; else an empty string."""
    text = str(error)
    for number in FULL_DISK_ERRORS & {*map(int, re.findall(r"(?:os error |Errno )(\d+)", text))}:
        return os.strerror(number)
    # PyTorch gives no reason, so any failure of its writing counts.
    if text.startswith(TORCH_WRITE_ERRORS) and "Reader" not in text:
        return "a file could not be written to its end"
    return ""


def give_usual_mode(files: Iterable[Path]) -> None:
    """Give files that safetensors 0.8 wrote, with mode 600, the mode that the umask gives."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in files:
        with suppress(PermissionError):  # of another user
            file.chmod(0o666 & ~umask)


# --- The folder of a run, and files that are either complete or absent ------------------------------------------------


def check_output_dir(folder: str | Path, name: str = "--output_dir") -> None:
    """Refuse (ValueError) a folder that cannot be created or written, before anything is loaded; `name` is what a
    command calls it. Creates nothing."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"{name} {folder}: {existing} is a file, not a folder; name another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{name} {folder}: you may not write to {existing}; name another folder")


def valid_unicode(text: str) -> str:
    """A text that UTF-8 can write: halves of a character (surrogates) that belong together are joined, and each half
    without the other becomes U+FFFD. JSON's \\u escapes can make such halves."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def valid_unicode_in(value: Any) -> Any:
    """A value of lists and dictionaries whose texts are `valid_unicode`."""
    if isinstance(value, str):
        return valid_unicode(value)
    if isinstance(value, list):
        return [valid_unicode_in(part) for part in value]
    if isinstance(value, dict):
        return {valid_unicode_in(key): valid_unicode_in(part) for key, part in value.items()}
    return value


def harmless(text: str, allowed: str = "\n\t") -> str:
    """A model's text, made safe for a terminal and for XML. Characters that move the cursor or change the direction of
    writing, lone surrogates, U+FFFE and U+FFFF are shown by their number, such as "⟨1B⟩" for the escape of ANSI codes,
    unless they are `allowed`.
    """
    shown = []
    for character in text:
        kind = unicodedata.category(character)
        changes_direction = kind == "Cf" and unicodedata.bidirectional(character) != "BN"
        is_control = kind in ("Cc", "Cs", "Zl", "Zp") or changes_direction
        is_forbidden = is_control or character in "\ufffe\uffff"  # no XML file can hold the last two
        shown.append(f"⟨{ord(character):X}⟩" if is_forbidden and character not in allowed else character)
    return "".join(shown)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` as a whole: readers see the old content or the new, never a part. See `valid_unicode`."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(staging, "w", encoding="utf-8") as file:
            file.write(valid_unicode(text))
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except OSError as error:
        with suppress(OSError):
            staging.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Some network file systems cannot do this for a
    folder; there it does nothing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or no_room(error):
            raise
    finally:
        os.close(descriptor)


# --- A lock on a folder that one run at a time may write to -----------------------------------------------------------

NO_LOCK_ERRORS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what a file system without locks answers


class LockHeldError(ValueError):
    """Another process holds the lock. The message names it, as in "process 12 on node3"."""


class FileLock:
    """`flock` on a file, exclusive or shared. The system releases it whenever its process ends.

    It holds between the machines of an NFS whose server has locks (Linux maps flock to its byte-range locks), but not
    under the mount options `nolock` or `local_lock`, nor on a Lustre mounted with `localflock`: there it holds on each
    machine alone. A file system that refuses locks gives a warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: io.FileIO | None = None  # open while the lock is held

    def acquire(self, kind: int = fcntl.LOCK_EX) -> None:
        """Take the lock, or change the kind of one that is held. Raises LockHeldError if another process has it."""
        while True:
            if self.file is None:
                self.file = self.open()
            try:
                fcntl.flock(self.file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = ""
                if self.path.exists():
                    holder = self.path.read_text()
                self.release()
                raise LockHeldError(holder or "another process") from None
            except OSError as error:
                if error.errno not in NO_LOCK_ERRORS:
                    raise
                logger.warning("%s cannot be locked (%s): start no second run there", self.path, error.strerror)
            if self.path.exists() and os.fstat(self.file.fileno()).st_ino == self.path.stat().st_ino:
                break
            self.release()  # its holder removed the file after it was opened here
        if kind == fcntl.LOCK_EX:
            with suppress(OSError):  # a full disk is reported where something needed is written
                self.file.truncate(0)
                self.file.write(f"process {os.getpid()} on {platform.node()}".encode())

    def open(self) -> io.FileIO:
        file = io.FileIO(self.path, "ab")
        file_reference = weakref.ref(file)

        def close_copy() -> None:
            """A forked process, such as a data loader's, would hold the lock for longer than its parent lives."""
            copy = file_reference()
            if copy is not None:
                copy.close()

        os.register_at_fork(after_in_child=close_copy)
        return file

    def release(self, remove: bool = False) -> None:
        """Let the lock go; `remove` its file first."""
        if self.file is not None:
            if remove:
                self.path.unlink(missing_ok=True)
            self.file.close()
            self.file = None


# --- A model's files, which may be damaged ----------------------------------------------------------------------------

SMALL_FILES = ("config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json")
# In the order in which Transformers (5.24) looks for them
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_JSON_FILES = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
DAMAGED_ADVICE = "it is damaged: copy or download it again"


def read_object(path: Path, advice: str = DAMAGED_ADVICE) -> dict[str, Any]:
    """The object in a JSON file; ValueError with `advice` if the file holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of the encoding or of JSON
        raise ValueError(f"{path} is no JSON ({error}): {advice}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object, but a {type(value).__name__}: {advice}")
    return value


def check_files(folder: Path) -> None:
    """Raise ValueError for a damaged small JSON file of a model, or a damaged index of its weights (`check_index`).
    Only the first of `WEIGHT_FILES` that the folder has is read: an index of another format may be left over."""
    for name in SMALL_FILES:
        if (folder / name).is_file():
            read_object(folder / name)
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            if name.endswith(".index.json"):
                check_index(folder / name)
            return


def check_index(path: Path, complete: bool = True) -> None:
    """Raise ValueError for an index of weights that names files outside its folder or, if it is `complete`, files that
    are not there."""
    index = read_object(path)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{path} has no weight_map from names to files: {DAMAGED_ADVICE}")
    if not isinstance(index.get("metadata"), dict):
        raise ValueError(f"{path} has no metadata, which Transformers reads: {DAMAGED_ADVICE}")
    for name in sorted({*files.values()}):
        if Path(name).name != name:
            raise ValueError(f"{path} names files in other folders, such as {name}: an index is for its own folder")
        if complete and not (path.parent / name).is_file():
            raise ValueError(f"{path} names {name}, which is not there: copy or download it")


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Turn an error of any class that a library raises while it reads `path` into a ValueError that names the file;
    ValueError, OSError and ImportError are clear already and stay."""
    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # the libraries check little: a wrong type can fail anywhere
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: {what}: {' '.join(reason.split())}") from error
