"""Read problems from local files or the hub, with errors that name the file and what it lacks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Json, List, Value, load_dataset
from pyarrow import parquet

from d1.hub import closest, no_hub, use_cache
from d1.rows import NoRowsError, lines_of, read_rows
from d1.tasks import DATA_FILES, SPLITS

HubName = tuple[str, str | None]  # of a dataset on the hub, with its config
# The types of a ground truth
TEXT = Value("string")
NUMBER = Value("float64")
JSON = Json()

DATASET_DIR = Path(__file__).resolve().parents[2] / "dataset"  # the problem sets that come with a checkout
HELD_OUT = 500
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # OWNER/NAME


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")


def file_of(split: str, data_file: str | None, name: str) -> str:
    """`data_file`, or else the file `name` in the checkout's folder `dataset/`, with the split in place of "{}"."""
    check_split(split)
    if data_file:
        return data_file
    path = DATASET_DIR / name.format(split)
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: install from a checkout with `pip install -e .`, or pass --data_file FILE")
    return str(path)


def read_file(path: str, *schemas: Iterable[str], keep_in_memory: bool = True) -> Dataset:
    """The rows of a local .json, .jsonl, .csv or .parquet file, with each value as the file has it (`d1.rows`).

    Args:
        schemas: the sets of columns that a file may have; it must have all columns of one set.
        keep_in_memory: False if `datasets` should cache what is made from the rows.

    Raises:
        FileNotFoundError, ValueError: the file is missing, has another format, is unreadable, or lacks rows or columns.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no data file {path}{closest(path)}")
    if file.suffix not in DATA_FILES:
        raise ValueError(f"cannot read {path}: not a {', '.join(DATA_FILES[:-1])} or {DATA_FILES[-1]} file")
    try:
        with open(file, "rb") as content:  # `datasets` caches by path and time, which a changed file may share
            fingerprint = hashlib.file_digest(content, "sha256").hexdigest()[:16]
        if file.suffix == ".parquet":
            if not parquet.read_metadata(file).num_rows:
                raise NoRowsError
            options: dict[str, Any] = {"keep_in_memory": keep_in_memory, "config_id": f"default-{fingerprint}"}
            rows = Dataset.from_parquet(str(file), **options)
        else:
            rows = read_rows(file, fingerprint, keep_in_memory)
    except NoRowsError:
        raise ValueError(f"{path} has no rows") from None
    except Exception as error:  # the readers raise many classes; all of them mean that this file cannot be used
        cause = error.__cause__ or error  # the readers of `datasets` 4 have several ways to say "no rows"
        if isinstance(cause, StopIteration) or "corresponds to no data" in str(cause):
            raise ValueError(f"{path} has no rows") from error
        raise ValueError(f"cannot read {path}: {cause}") from error
    check_columns(rows, path, *schemas)
    return rows


def read_hub(name: str, config: str | None, split: str, *schemas: Iterable[str]) -> Dataset:
    """A split of a dataset on the hub, or of its cache if the hub does not answer."""
    hub_problem = no_hub()
    if hub_problem:
        use_cache(name, hub_problem)
    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:  # offline, missing, gated, broken cache: the advice is the same
        reason = hub_problem or f"{type(error).__name__}: {error}"
        raise ConnectionError(
            f"cannot load {name} from the hub ({reason}). To use a local .json, .jsonl, .csv or "
            ".parquet file with the same columns, pass --data_file FILE (--few_shot_file FILE for eval.py's examples)"
        ) from error
    check_columns(rows, name, *schemas)
    return rows


def read_problems(
    split: str, data_file: str | None, train: HubName, test: HubName, *schemas: Iterable[str]
) -> tuple[str, Dataset]:
    """The source of a task's rows, for messages, and the rows: all of `data_file`, or a split of a dataset on the hub.

    The last `HELD_OUT` rows of the hub's training split, after a seed-42 shuffle, are the validation split.

    Args:
        data_file: a file; or OWNER/NAME, a dataset on the hub, whose split of that name is used.
    """
    check_split(split)
    if data_file:
        path = Path(data_file)
        if HUB_NAME.fullmatch(data_file) and path.suffix not in DATA_FILES and not path.is_file():
            return data_file, read_hub(data_file, None, split, *schemas)
        return data_file, read_file(data_file, *schemas)
    # Validation rows are held out of the training split, as in d1.
    if split == "test":
        name, config = test
        return name, read_hub(name, config, "test", *schemas)
    name, config = train
    return name, hold_out(read_hub(name, config, "train", *schemas), split)


def hold_out(rows: Dataset, split: str) -> Dataset:
    """The last `HELD_OUT` rows after a seed-42 shuffle for "validation", those before them for "train" (d1's rule)."""
    if split == "test":
        return rows
    if len(rows) <= HELD_OUT:
        raise ValueError(f"{HELD_OUT} rows are held out for validation, and there are only {len(rows)}")
    rows = rows.shuffle(seed=42)
    cut = len(rows) - HELD_OUT
    if split == "train":
        return rows.select(range(cut))
    return rows.select(range(cut, len(rows)))


def check_columns(rows: Dataset, source: str, *schemas: Iterable[str]) -> None:
    if not any(set(schema) <= set(rows.column_names) for schema in schemas):
        missing = [name for name in schemas[0] if name not in rows.column_names]
        raise ValueError(
            f"{source} lacks the columns {', '.join(missing)}; it has {', '.join(rows.column_names)}, "
            f"and needs {' or '.join(', '.join(schema) for schema in schemas)}"
        )
    if not len(rows):
        raise ValueError(f"{source} has no rows")


def text_in(row: dict[str, Any], column: str) -> str:
    """The text in a column of a row. Raises ValueError if it is something else, or blank."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{column} must be a text, got {value!r:.80}")
    return value


def line_before(rows: Iterable[dict[str, Any]], index: int) -> str:
    """For a message, "line 3, " for a row of a file, else an empty text."""
    if not isinstance(rows, Dataset):
        return ""
    lines = lines_of(rows, [index])
    return f"{lines[index]}, " if lines else ""


def task_rows(
    source: str, rows: Iterable[dict[str, Any]], task_row: Callable[[dict[str, Any]], dict[str, Any]], ground_truth: Any
) -> Dataset:
    """The rows that `task_row` makes: `prompt`, `question`, `ground_truth` and perhaps `solution`.

    Args:
        source: the name of where the rows come from; with the row's line and number, it begins the message of a
            ValueError.
        ground_truth: the feature of that column, e.g. `Value("string")`.
    """
    rows_read = []
    for number, row in enumerate(rows, start=1):
        try:
            rows_read.append(task_row(row))
        except ValueError as error:
            raise ValueError(f"{source}, {line_before(rows, number - 1)}row {number}: {error}") from None
    message = {"role": Value("string"), "content": Value("string")}
    features = {"prompt": List(message), "question": Value("string"), "ground_truth": ground_truth}
    if rows_read and "solution" in rows_read[0]:
        features["solution"] = Value("string")
    return Dataset.from_list(rows_read, features=Features(features))
