"""Rows of local .json, .jsonl and .csv files, with every value as the file has it.

Arrow alone changes some: the text "2024-05-01" becomes a time, "007" next to 7 becomes a number, 3 next to 4.5 becomes
a float, and each object of a list gets the keys of all others. Here a column has one of Arrow's types only if nothing
is lost by that. In every other column, each cell is stored as its own JSON text (`ExactJson`).

A file is read twice: first for the types of its columns, then into the cache of `datasets`. A .jsonl or .csv file is
never in memory as a whole; a .json file is, as one text.
"""

from __future__ import annotations

import csv
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
from datasets import ArrowBasedBuilder, Dataset, DatasetInfo, Features, Json, List, SplitGenerator, Value
from datasets.features.features import register_feature

LAYOUT = "rows-2"  # of the table in the cache: another layout, or other rows of a file, need another name
ROWS_PER_TABLE = 1000
MAX_DEPTH = 100  # of a row, in nested lists and objects


class NoRowsError(ValueError):
    """A file has no rows."""


Placed = tuple[str, Any]  # where in its file a value begins, such as "line 3", and the value


# --- Values of JSON ---------------------------------------------------------------------------------------------------


class Number(float):
    """A number whose text in the file is not the one that Python gives it, such as 1.10 or 1e5; `str` is the file's."""

    def __new__(cls, text: str) -> Number:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[Number], tuple[str]]:
        return Number, (self.text,)


def read_number(text: str) -> float:
    number = float(text)
    if repr(number) == text:
        return number
    return Number(text)


def read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these names and values. ValueError for a name that comes twice, whose one value would be lost."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} comes twice in one object")
    return fields


# Without `strict`, a text may have tabs and other control characters in it.
DECODER = json.JSONDecoder(parse_float=read_number, parse_constant=Number, object_pairs_hook=read_pairs, strict=False)


def json_text(value: Any) -> str:
    """A value as JSON; numbers have the digits of the file that they come from."""
    if isinstance(value, dict):
        cells = [f"{json.dumps(str(name), ensure_ascii=False)}: {json_text(cell)}" for name, cell in value.items()]
        return f"{{{', '.join(cells)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(json_text, value))}]"
    if isinstance(value, Number):
        return value.text
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclass
class ExactJson(Json):
    """A column of cells of any kinds, each stored as its JSON text. `Json` itself would read the text "007" as 7."""

    decode: bool = True
    id: str | None = field(default=None, repr=False)
    _type: str = field(default="ExactJson", init=False, repr=False)

    def encode_example(self, example_data: Any) -> str | None:
        if example_data is None:
            return None
        return json_text(example_data)

    def decode_example(self, example_data: str | None, token_per_repo_id: Any = None) -> Any:
        if example_data is None:
            return None
        try:
            return DECODER.decode(example_data)
        except ValueError:  # `map` of `datasets` stores a text in a column that it keeps without quotation marks
            return example_data


with warnings.catch_warnings(action="ignore"):  # "experimental"
    register_feature(ExactJson, "ExactJson")


# --- The type of a column ---------------------------------------------------------------------------------------------
#
# A type is a name of Arrow's, None (there are only nulls), ("list", type), ("object", ((name, type), ...)), or MIXED.

MIXED = "mixed"


def type_of(value: Any, depth: int = 0) -> Any:
    """The type of one value. ValueError if it is nested too deeply, or has text that is no Unicode."""
    if depth > MAX_DEPTH:
        raise ValueError(f"its lists and objects are more than {MAX_DEPTH} deep")
    if value is None:
        return None
    if isinstance(value, str):
        if not value.isascii():
            check_unicode(value)
        return "string"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64" if -(2**63) <= value < 2**63 else MIXED
    if isinstance(value, Number):
        return MIXED
    if isinstance(value, float):
        return "float64"
    if isinstance(value, list):
        inner = None
        for item in value:
            inner = common_type(inner, type_of(item, depth + 1))
        return MIXED if inner == MIXED else ("list", inner)
    for name in value:
        check_unicode(name)
    parts = tuple((name, type_of(cell, depth + 1)) for name, cell in value.items())
    if any("\0" in name for name in value):  # Arrow would cut the name there
        return MIXED
    if not parts or any(part == MIXED for _, part in parts):
        return MIXED
    return ("object", parts)


def common_type(first: Any, second: Any) -> Any:
    """The type that values of both types have without a change."""
    if first is None or first == second:
        return second
    if second is None:
        return first
    if first[0] == second[0] == "list":
        inner = common_type(first[1], second[1])
        return MIXED if inner == MIXED else ("list", inner)
    if first[0] == second[0] == "object":
        names = [name for name, _ in first[1]]
        if names != [name for name, _ in second[1]]:
            return MIXED
        parts = []
        for (name, part), (_, second_part) in zip(first[1], second[1], strict=True):
            parts.append((name, common_type(part, second_part)))
        if any(part == MIXED for _, part in parts):
            return MIXED
        return ("object", tuple(parts))
    return MIXED


def feature_of(kind: Any) -> Any:
    if kind == MIXED:
        return ExactJson()
    if kind is None:
        return Value("null")
    if kind[0] == "list":
        return List(feature_of(kind[1]))
    if kind[0] == "object":
        return {name: feature_of(part) for name, part in kind[1]}
    return Value(kind)


def check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r:.80} has one half of a character, which is no Unicode text") from None


def features_of(rows: Iterable[Placed]) -> Features:
    """The columns of rows, in the order in which they appear, and their types. ValueError names the location of a row
    that cannot be used, NoRowsError if there are none."""
    kinds: dict[str, Any] = {}
    for location, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{location} is {kind_name(row)}, not an object: a row is {{column: value, ...}}")
        try:
            for name, cell in row.items():
                check_unicode(name)
                kinds[name] = common_type(kinds.get(name), type_of(cell))
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from None
    if not kinds:
        raise NoRowsError
    return Features({name: feature_of(kind) for name, kind in kinds.items()})


def kind_name(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# --- Rows of JSON -----------------------------------------------------------------------------------------------------

SPACE = re.compile(r"[ \t\r\n]*")
WRAPPERS = ("data", "rows", "train", "examples")  # names of a list of rows that a file may have next to other values


class JsonText:
    """The values of a text, one after the other. ValueError names the line of what is no JSON."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text = text
        self.line = line
        self.position = 0

    def move(self, position: int) -> None:
        self.line += self.text.count("\n", self.position, position)
        self.position = position

    def peek(self) -> str:
        """Skip spaces; return the next character, or an empty text at the end."""
        space = SPACE.match(self.text, self.position)
        assert space is not None
        self.move(space.end())
        return self.text[self.position : self.position + 1]

    def value(self) -> Any:
        try:
            value, end = DECODER.raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            column = error.pos - self.text.rfind("\n", 0, error.pos)
            self.move(error.pos)
            raise ValueError(f"line {self.line}, column {column}: this is no JSON: {error.msg}") from None
        except RecursionError:
            raise ValueError(f"line {self.line}: its lists and objects are more than {MAX_DEPTH} deep") from None
        except ValueError as error:  # of `read_pairs`, or of an integer of thousands of digits
            raise ValueError(f"line {self.line}: {str(error).partition(';')[0]}") from None
        self.move(end)
        return value

    def values(self) -> Iterator[Placed]:
        """The values up to the end; of a list alone, its items, where a text is a row with the column `text`."""
        if self.peek() == "[":
            yield from self.items()
            if self.peek():
                raise ValueError(f"line {self.line}: the list of rows ends before this line")
            return
        while self.peek():
            location = f"line {self.line}"
            yield location, self.value()

    def items(self) -> Iterator[Placed]:
        """The items of the list that begins here."""
        self.move(self.position + 1)
        if self.peek() == "]":
            self.move(self.position + 1)
            return
        while True:
            self.peek()
            location = f"line {self.line}"
            item = self.value()
            if isinstance(item, str):
                item = {"text": item}
            yield location, item
            next_character = self.peek()
            if next_character not in (",", "]"):
                actual = next_character or "the end of the file"
                raise ValueError(f"line {self.line}: expected , or ] after a row, found {actual}")
            self.move(self.position + 1)
            if next_character == "]":
                return


def json_rows(path: Path) -> Iterator[Placed]:
    """The rows of a .json file: a list, one object after the other, or one object that has a list of rows."""
    with open_text(path) as file:
        text = JsonText(file.read())
    is_list = text.peek() == "["
    values = text.values()
    first_values = list(islice(values, 2))
    if len(first_values) == 1 and not is_list:
        _, value = first_values[0]
        name = name_of_rows(value) if isinstance(value, dict) else ""
        if name:
            first_values = [(f"{name}[{number}]", row) for number, row in enumerate(value[name])]
    yield from first_values
    yield from values


def name_of_rows(value: dict[str, Any]) -> str:
    """The name of the list of rows in an object that is no row itself; an empty text if it is one.

    A row, too, may have lists of objects: messages, or what else belongs to a problem. So the list is the only member,
    or has one of the names `WRAPPERS`. ValueError if there are several.
    """
    lists = []
    for name, items in value.items():
        if not isinstance(items, list) or not items:
            continue
        if all(isinstance(item, dict) and not item.keys() & {"role", "from"} for item in items):
            lists.append(name)
    wrappers = [name for name in lists if name in WRAPPERS]
    if wrappers and len(lists) > 1:
        raise ValueError(f"it has several lists of rows, {', '.join(lists)}: write one of them to a file of its own")
    if wrappers:
        return wrappers[0]
    if len(value) == len(lists) == 1:
        return lists[0]
    return ""


def jsonl_rows(path: Path) -> Iterator[Placed]:
    """The rows of a .jsonl file, one per line; a list, or objects over several lines, as in a .json file."""
    with open_text(path) as lines:
        first_line = next(filter(str.strip, lines), "")
    if is_unfinished(first_line):
        yield from json_rows(path)
        return
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            text = JsonText(line.rstrip(), number)
            while text.peek():
                yield f"line {number}", text.value()


def is_unfinished(line: str) -> bool:
    """Whether the first line of a file begins a list of rows, or a value that does not end in that line."""
    if line.lstrip().startswith("["):
        return True
    try:
        DECODER.decode(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(line.rstrip())
    except (ValueError, RecursionError):  # reported where the row is read
        pass
    return False


# --- Rows of csv ------------------------------------------------------------------------------------------------------

MAX_CELL = 1 << 30  # characters
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def csv_rows(path: Path) -> Iterator[Placed]:
    """The rows of a .csv file, with cells as text. ValueError for a row with more or fewer cells than the header, and
    for a quotation mark that nothing closes."""
    csv.field_size_limit(MAX_CELL)
    with open_text(path) as lines:
        # A first line that names the separator is no record.
        first_number = 0
        first_line = ""
        for number, line in enumerate(lines, start=1):
            if line.strip():
                first_number = number
                first_line = line
                break
        separator = find_separator(first_line)
        skipped = 0
        if first_line.startswith("sep="):
            skipped = first_number
        else:
            lines.seek(0)

        records = csv_records(lines, separator, skipped)
        _, header = next(records, (0, []))
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            raise ValueError(f"the header has the column {twice[0]!r} twice: give each column a name of its own")
        for number, (line_number, cells) in enumerate(records, start=1):
            if len(cells) != len(header):
                raise ValueError(
                    f"line {line_number}: row {number} has {len(cells)} cells, the header {len(header)}: quote texts "
                    f"with {SEPARATORS[separator]}"
                )
            yield f"line {line_number}", dict(zip(header, cells, strict=True))


def csv_records(lines: TextIO, separator: str, skipped: int) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line that is not empty, after the line in which they begin.

    The reader is strict: otherwise a quotation mark that nothing closes makes one cell of the rest of the file.
    """
    table = csv.reader(lines, delimiter=separator, strict=True)
    end = 0
    while True:
        line = end + 1 + skipped
        try:
            cells = next(table, None)
        except csv.Error:
            problem = "a cell in quotation marks does not end before a separator or the end of its line"
            raise ValueError(f'line {line}: {problem}: write a quotation mark inside it twice, as ""') from None
        if cells is None:
            return
        end = table.line_num
        if cells:
            yield line, cells


def find_separator(first_line: str) -> str:
    """What separates the cells of a csv file with this first line: commas, or else semicolons or tabs. Excel may write
    a line of its own that says so, such as "sep=;"."""
    if first_line.startswith("sep=") and first_line[4:5] in SEPARATORS:
        return first_line[4]
    counts = {}
    for separator in SEPARATORS:
        counts[separator] = len(next(csv.reader([first_line], delimiter=separator), []))
    if counts[","] > 1:
        return ","
    return max(counts, key=counts.__getitem__)


# --- Text in any encoding of Unicode ----------------------------------------------------------------------------------


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A file in UTF-8, or in the UTF-16 or UTF-32 of its first bytes. ValueError names the line of other bytes."""
    with path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
    try:
        with path.open(encoding=encoding, newline="") as text:
            yield text
    except UnicodeDecodeError as error:
        name = encoding.upper().removesuffix("-SIG")
        raise ValueError(f"{undecodable(path, encoding)} is not {name} ({error.reason}): save it as UTF-8") from None


def undecodable(path: Path, encoding: str) -> str:
    """The location of the first line that is not in this encoding."""
    if not encoding.startswith("utf-8"):
        return "the text"
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"line {number}"
    return "the text"


# --- Data sets --------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Path], Iterator[Placed]]] = {".json": json_rows, ".jsonl": jsonl_rows, ".csv": csv_rows}


BUILDER = "rows"  # the name that `datasets` gives to the builder, that of this module


class Rows(ArrowBasedBuilder):
    """Writes the rows of a file into the cache of `datasets`."""

    def __init__(self, file: Path, **options: Any) -> None:
        super().__init__(hash=LAYOUT, **options)
        self.file = file

    def _info(self) -> DatasetInfo:
        return DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        self.info.features = features_of(READERS[self.file.suffix](self.file))
        return [SplitGenerator("train", {"features": self.info.features})]

    def _generate_tables(self, features: Features) -> Iterator[tuple[int, pa.Table]]:
        schema = features.arrow_schema
        rows = (row for _, row in READERS[self.file.suffix](self.file))
        number = 0
        while True:
            batch = list(islice(rows, ROWS_PER_TABLE))
            if not batch:
                return
            columns = []
            for name, feature in features.items():
                cells = [row.get(name) for row in batch]
                if isinstance(feature, ExactJson):
                    cells = [feature.encode_example(cell) for cell in cells]
                columns.append(column_of(cells, schema.field(name).type))
            yield number, pa.Table.from_arrays(columns, schema=schema)
            number += 1


def column_of(cells: list[Any], kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.JsonType):
        return pa.ExtensionArray.from_storage(kind, pa.array(cells, kind.storage_type))
    return pa.array(cells, kind)


def read_rows(file: Path, digest: str, keep_in_memory: bool) -> Dataset:
    """The rows of a .json, .jsonl or .csv file with this digest of its content.

    Raises:
        NoRowsError: the file has no rows.
        ValueError: the file cannot be read; the message names the line.
    """
    builder = Rows(file, config_id=f"default-{file.suffix[1:]}-{digest}")
    builder.download_and_prepare()
    rows = builder.as_dataset(split="train", in_memory=keep_in_memory)
    assert isinstance(rows, Dataset)
    rows.info.description = str(file)  # for `lines_of`
    return rows


def lines_of(rows: Dataset, numbers: Collection[int]) -> dict[int, str]:
    """The locations in their file of rows that `read_rows` read, such as "line 3", by their numbers, which count from
    0; for messages. Empty for other rows, and for a selection of rows."""
    file = Path(rows.info.description)
    if rows.info.builder_name != BUILDER or rows._indices is not None or not file.is_file():
        return {}
    locations = {}
    for number, (location, _) in enumerate(islice(READERS[file.suffix](file), max(numbers, default=-1) + 1)):
        if number in numbers:
            locations[number] = location
    return locations
