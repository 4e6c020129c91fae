"""The rows to train on: read from a file or the hub, reported if unusable, and shared out to optimizer steps."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from datasets import Dataset, DatasetDict, Features, load_dataset, load_from_disk
from datasets.fingerprint import Hasher
from torch.utils.data import Sampler

from d1.cpus import available_cpus
from d1.hub import closest, is_path, no_hub, use_cache
from d1.masking import keyed_generator
from d1.models import messages, tokenizer
from d1.rows import lines_of
from d1.runs.cli import ListedError
from d1.tasks import DATA_FILES
from d1.tasks.data import read_file

logger = logging.getLogger(__name__)

MAX_LISTED = 5  # of the rows that cannot be trained on
ROWS_PER_PROCESS = 500  # for fewer rows another process saves no time
LIBRARIES = ("transformers", "tokenizers", "trl")  # whose versions determine the tokens of a row


def require_dataset(name: str, data: Any) -> None:
    """Raise ValueError if the data with this `name` are no `Dataset`."""
    if isinstance(data, DatasetDict):
        raise ValueError(f"{name} is a DatasetDict: choose one of its splits, {', '.join(data)}")
    if not isinstance(data, Dataset):
        raise ValueError(f"{name} is {type(data).__name__}, not datasets.Dataset: use Dataset.from_list(rows)")


def load_rows(train_data: str, known: Iterable[str] = ()) -> Dataset:
    """The rows of a local .json, .jsonl, .parquet or .csv file, of a folder saved by `datasets`, or of a hub data set.

    An error message suggests the closest name: of a file, or of the other names that the caller accepts (`known`).

    Raises:
        FileNotFoundError: there is no such file or folder, and the hub gives no such data set.
        ValueError: the file or the folder cannot be read, or has no rows, or the folder has splits but no train.
    """
    path = Path(train_data)
    hub_problem = ""
    if path.is_file() or path.suffix in DATA_FILES:
        return read_file(train_data, (), keep_in_memory=False)  # any columns
    if not path.is_dir():
        if is_path(train_data):
            raise FileNotFoundError(f"--train_data {train_data}: there is no such file{closest(train_data, known)}")
        hub_problem = no_hub()
        if hub_problem:
            use_cache(train_data, hub_problem)
    try:
        if path.is_dir():
            data = load_from_disk(train_data)
        else:
            data = load_dataset(train_data, split="train")
    except Exception as error:  # each reader and the hub client have their own errors
        reason = hub_problem or f"{type(error).__name__}: {error}"
        if path.is_dir():
            raise ValueError(
                f"--train_data {train_data}: the folder cannot be read as a data set of datasets.save_to_disk "
                f"({reason}): name a file in it, or a folder saved so"
            ) from error
        raise FileNotFoundError(
            f"--train_data {train_data}: neither a local file{closest(train_data, known)} nor a data set that the hub "
            f"gives ({reason}). Download it elsewhere and pass a local file of such columns: --train_data rows.jsonl"
        ) from error
    rows = data
    if isinstance(data, DatasetDict):
        if "train" not in data:
            raise ValueError(
                f"--train_data {train_data} has no split train, only {', '.join(data)}: save that split alone"
            )
        rows = data["train"]
    if not len(rows):
        raise ValueError(f"--train_data {train_data} has no rows")
    return rows


def tokenize_rows(
    data: Dataset,
    tokenize_row: Callable[..., dict[str, Any]],
    source: ModuleType,
    options: dict[str, Any],
    features: Features,
    num_proc: int | None,
    *,
    also: Sequence[ModuleType] = (),
    constants: Sequence[str] = (),
    cached: bool = True,
) -> Dataset:
    """What `tokenize_row(row, **options)`, of the module `source`, returns for each row: the columns `features`.

    Args:
        also: further modules whose text determines what it returns.
        constants: texts of other modules that determine it.
        cached: take what an earlier run made of the same rows and options; False if anything else has an influence.
    """
    data = data.with_format(None)  # a folder that was saved with a format gives arrays or tables
    processes = min(num_proc or available_cpus(), len(data) // ROWS_PER_PROCESS)
    # `datasets` caches by the name of an imported function; the modules' texts make an edited one run again, and so do
    # other versions of the libraries that write and tokenise a conversation.
    sources = [inspect.getsource(module) for module in (source, messages, tokenizer, *also)]
    versions = [version(library) for library in LIBRARIES]
    return data.map(
        tokenize_row,
        fn_kwargs=options,
        features=features,
        remove_columns=data.column_names,
        num_proc=processes if processes > 1 else None,
        load_from_cache_file=None if cached else False,
        new_fingerprint=Hasher.hash([data._fingerprint, options, *sources, *versions, *constants]),
        desc="Tokenising",
    )


def describe_row_error(error: Exception) -> str:
    """The line that says what is wrong with a row that raised this error; never empty."""
    if isinstance(error, KeyError):
        return f"there is no {error}"
    if isinstance(error, ValueError):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


def usable_rows(
    status: Sequence[str], problems: Sequence[str], bad_rows: str, data: Dataset | None = None
) -> list[int]:
    """Indices of the rows to train on. The others are counted and reported, or raise ValueError.

    Args:
        status: of each row: "ok", "truncated", "dropped" or "bad".
        problems: what is wrong with each bad row.
        data: the rows; those of a file are reported by their lines in it, others by their numbers from 0.
    """
    status = status[:]  # of a column of `datasets`, a list: cell by cell takes much longer
    counts = Counter(status)
    bad = [index for index, kind in enumerate(status) if kind == "bad"]

    # The first bad rows, each with its location and its problem.
    lines: dict[int, str] = {}
    if data is not None and bad:
        lines = lines_of(data, bad[:MAX_LISTED])
    entries = []
    for index in bad[:MAX_LISTED]:
        location = lines.get(index, f"row {index}")
        problem = " ".join(problems[index].split())
        entries.append(f"  {location}: {problem}")
    if len(bad) > MAX_LISTED:
        entries.append(f"  and {len(bad) - MAX_LISTED} more")
    listed = "\n".join(entries)

    if bad and bad_rows == "error":
        numbering = "" if lines else " (rows count from 0)"
        raise ListedError(
            f"{len(bad)} of {len(status)} rows cannot be trained on{numbering}:\n{listed}\n"
            "Fix them, or leave them out with --bad_rows skip"
        )
    if bad:
        logger.warning("skipped %d of %d rows that cannot be trained on:\n%s", len(bad), len(status), listed)
    for kind in ("truncated", "dropped"):
        if counts[kind]:
            logger.warning("%s %d of %d rows longer than --max_length", kind, counts[kind], len(status))

    usable = [index for index, kind in enumerate(status) if kind in ("ok", "truncated")]
    if not usable:
        raise ListedError(f"nothing to train on: of {len(status)} rows, {dict(counts)}\n{listed}".rstrip())
    return usable


# --- The order of rows, and their optimizer steps ---------------------------------------------------------------------

IGNORED = -100  # the label of what is not trained on, which Trainer does not count
ORDER = 2  # the second part of the key of the rows' order; another value would change it


class BatchRow(NamedTuple):
    """One row of a global batch, which is all rows of an optimizer step."""

    row: int  # its index in the data; -1: an empty row, which fills up the last batch of an epoch
    epoch: int = 0
    t: float | None = None  # the diffusion time; None: drawn from U(0, 1)
    length: int = 0  # the row is filled with EOS up to this number of tokens


@dataclass(eq=False)
class GlobalBatchSampler(Sampler[BatchRow]):
    """The rows of an epoch, one global batch after another. Batches do not depend on the number of processes. Empty
    rows fill the epoch up to a `multiple`, so that no row is used twice."""

    lengths: Sequence[int]  # tokens of each row
    batch_size: int  # rows per optimizer step: rows per device x accumulation x processes
    multiple: int  # rows per device x processes
    seed: int
    epoch: Callable[[], int]  # called when the epoch begins
    fill: bool = False  # whether rows are filled to the longest row of their batch

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[BatchRow]:
        epoch = self.epoch()
        order = torch.randperm(len(self.lengths), generator=keyed_generator(self.seed, ORDER, epoch)).tolist()
        for first in range(0, len(order), self.batch_size):
            rows = order[first : first + self.batch_size]
            length = 0
            if self.fill:
                length = max(self.lengths[row] for row in rows)
            yield from [BatchRow(row, epoch, length=length) for row in rows]
        yield from [BatchRow(-1)] * (len(self) - len(order))
