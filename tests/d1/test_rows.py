"""Rows of files: each value is the one that the file has, to its last digit; errors name the line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from d1.rows import MAX_DEPTH, Number, json_text, lines_of
from d1.runs.data import load_rows
from d1.tasks import load_task
from d1.tasks.data import read_file
from tests.commands import ROOT

REAL = ROOT / "tests/real_files"


def read(folder: Path, name: str, content: str | bytes) -> Dataset:
    """The rows of a file with this content, read as SFT, preference training and distillation read them."""
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_rows(str(file))


def cells(rows: Dataset, column: str) -> list[Any]:
    return [row[column] for row in rows]


# --- JSON -------------------------------------------------------------------------------------------------------------

TEXTS = {  # a column's cells as the file has them -> their text in a template
    "a date": (['"2024-05-01"', '"2024-05-02"'], ["2024-05-01", "2024-05-02"]),
    "a time": (['"2024-05-01T10:00:00Z"', '"10:00"'], ["2024-05-01T10:00:00Z", "10:00"]),
    "a text of digits next to a number": (['"007"', "7"], ["007", "7"]),
    "a number next to a text of digits": (["7", '"007"'], ["7", "007"]),
    "an integer next to a float": (["3", "4.5"], ["3", "4.5"]),
    "a float that is whole": (["1.0", "1"], ["1.0", "1"]),
    "whole floats alone": (["1.0", "2.0"], ["1.0", "2.0"]),
    "a trailing zero": (["1.10", "2.5"], ["1.10", "2.5"]),
    "an exponent": (["1e5", "6.02E23"], ["1e5", "6.02E23"]),
    "more digits than a float has": (["0.30000000000000004", "3.14159265358979323846"],) * 2,
    "integers above 64 bits": (["9223372036854775807", "9223372036854775808"],) * 2,
    "integers below 64 bits": (["-9223372036854775809", "1"],) * 2,
    "above 64 bits in floats": (["1e400", "1"], ["1e400", "1"]),
    "a truth value next to a text": (["true", '"true"'], ["True", "true"]),
    "texts like other values": (['"null"', '"true"', '"NaN"', '"[1]"'], ["null", "true", "NaN", "[1]"]),
    "other scripts": (['"\\u00fc \\ud83d\\ude42"', '"漢 \\\\n"'], ["ü 🙂", "漢 \\n"]),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_the_text_of_a_cell_is_that_of_the_file(name: str, kind: str, tmp_path: Path) -> None:
    written, texts = TEXTS[kind]
    lines = [f'{{"id": {number}, "cell": {cell}}}' for number, cell in enumerate(written)]
    content = "\n".join(lines) if name == "rows.jsonl" else f"[{', '.join(lines)}]"
    rows = read(tmp_path, name, content)
    assert [str(cell) for cell in cells(rows, "cell")] == texts
    assert [str(row["cell"]) for row in read_file(str(tmp_path / name), ("cell",))] == texts
    assert [str(cell) for cell in rows["cell"]] == texts
    kept = rows.map(lambda row: {"twice": f"{row['cell']}|{row['cell']}"}, new_fingerprint=f"{name} {kind}")
    assert kept["twice"][:] == [f"{text}|{text}" for text in texts]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["a", "b", "c.d", "ü"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.dictionaries(NAMES, VALUES, min_size=1), min_size=1, max_size=5), indent=st.booleans())
@example(rows=[{"a": {"\0": None}}], indent=False)
def test_values_and_types_are_those_of_pythons_own_reader(rows: list[dict[str, Any]], indent: bool, tmp_path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    content = json.dumps(rows, indent=2) if indent else "\n".join(lines)
    found = list(read(tmp_path, "rows.json" if indent else "rows.jsonl", content))
    names = {name for row in rows for name in row}
    assert repr([sorted_row(row) for row in found]) == repr(
        [sorted_row({name: row.get(name) for name in names}) for row in rows]
    )


def sorted_row(row: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(row.items())


def test_a_number_is_a_float_with_the_text_of_the_file() -> None:
    number = Number("1.10")
    assert (number, str(number), f"{number}", f"{number:.1f}", number + 1) == (1.1, "1.10", "1.10", "1.1", 2.1)
    assert json_text({"a": [number, True, None, "ü"]}) == '{"a": [1.10, true, null, "ü"]}'
    assert math.isnan(Number("NaN"))


def test_objects_keep_their_own_names_and_order(tmp_path: Path) -> None:
    """Arrow would give each object the names of all."""
    calls = [{"name": "f", "arguments": {"b": 1, "a": "2"}}, {"name": "g", "arguments": {"city": "Oslo"}}]
    rows = read(tmp_path, "rows.jsonl", "\n".join(json.dumps({"calls": [call]}) for call in calls))
    assert json.dumps(cells(rows, "calls")) == json.dumps([[call] for call in calls])


def test_plain_columns_have_arrows_types(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"text": "a", "whole": 1, "real": 0.5, "true": True, "none": None, "list": ["a"], "messages": messages}
    rows = read(tmp_path, "rows.jsonl", "\n".join([json.dumps(row)] * 3))
    assert rows.features == Dataset.from_list([row] * 3).features
    assert rows.to_list() == [row] * 3


def test_a_column_may_begin_after_megabytes(tmp_path: Path) -> None:
    """`datasets` reads the columns from the first 10 MB."""
    row, late = {"prompt": "p" * 1000, "completion": "c", "id": None}, {"id": "x", "extra": {"score": 0.5}}
    rows = read(tmp_path, "rows.jsonl", f"{json.dumps(row)}\n" * 11_000 + json.dumps(row | late))
    assert len(rows) == 11_001
    assert (rows[0], rows[11_000]) == ({**row, "extra": None}, row | late)


FORMS = {
    "rows.json": '{"data": [{"a": "1"}, {"a": 1}]}',
    "named.json": '{"version": "2", "rows": [{"a": "1"},\n {"a": 1}], "count": 2}',
    "own_name.json": '{"problems": [{"a": "1"}, {"a": 1}]}',
    "lines.json": '{"a": "1"}\n{"a": 1}\n',
    "pretty.json": '{\n "a": "1"\n}\n{\n "a": 1\n}',
    "pretty.jsonl": '{\n "a": "1"\n}\n{\n "a": 1\n}',
    "list.jsonl": '[{"a": "1"},\n{"a": 1}]',
    "one_line.jsonl": '{"a": "1"} {"a": 1}',
    "windows.jsonl": '\ufeff{"a": "1"}\r\n\r\n{"a": 1}\r\n',
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_json(name: str, tmp_path: Path) -> None:
    assert cells(read(tmp_path, name, FORMS[name]), "a") == ["1", 1]


def test_a_file_of_another_kind_is_read_anew(tmp_path: Path) -> None:
    """A list in an object is found in a .json file; as the only line of a .jsonl file it is a column."""
    content = '{"data": [{"a": "1"}, {"a": 1}]}'
    assert read(tmp_path, "rows.jsonl", content).column_names == ["data"]
    assert cells(read(tmp_path, "rows.json", content), "a") == ["1", 1]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_encodings(name: str, encoding: str, tmp_path: Path) -> None:
    content = "q,a\nü 漢,007\n" if name == "rows.csv" else '{"q": "ü 漢", "a": "007"}\n'
    assert list(read(tmp_path, name, content.encode(encoding))) == [{"q": "ü 漢", "a": "007"}]


def test_an_object_with_messages_is_one_row(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for number, row in enumerate([{"messages": turns}, {"question": "?", "test": "t", "test_info": [{"name": "f"}]}]):
        assert list(read(tmp_path, f"{number}.json", json.dumps(row, indent=1))) == [row]
    assert list(read(tmp_path, "list.json", '[{"data": [{"a": 1}]}]')) == [{"data": [{"a": 1}]}]


ERRORS = {
    "cut.jsonl": ('{"a": 1}\n\n{"a": ', "line 3, column 6: this is no JSON: Expecting value"),
    "comma.jsonl": ('{"a": 1}\n{"a": 1,}\n{"a": 2}', "line 2, column 9: this is no JSON"),
    "comma.json": ('[\n{"a": 1},\n{"a": 1 "b": 2}\n]', "line 3, column 9: this is no JSON: Expecting ',' delimiter"),
    "open.json": ('[{"a": 1},\n{"a": 2}\n', "line 3: expected , or ] after a row, found the end of the file"),
    "after.json": ('[{"a": 1}]\n{"a": 2}\n', "line 2: the list of rows ends before this line"),
    "list.jsonl": ('{"a": 1}\n[1]\n', r"line 2 is a list, not an object: a row is \{column: value"),
    "text.jsonl": ('{"a": 1}\n"a"\n', "line 2 is a text, not an object"),
    "number.json": ("[1, 2]", "line 1 is a number, not an object"),
    "twice.jsonl": ('{"a": 1}\n{"a": 1, "a": 2}\n', "line 2: the name 'a' comes twice in one object"),
    "half.jsonl": ('{"a": 1}\n{"a": "\\ud83d"}\n', "line 2: .* one half of a character"),
    "latin.jsonl": ('{"a": "a"}\n{"a": "ü"}\n'.encode("latin-1"), "line 2 is not UTF-8 .*: save it as UTF-8"),
    "latin.csv": ("a,b\n1,2\nü,3\n".encode("latin-1"), "line 3 is not UTF-8 .*: save it as UTF-8"),
    "digits.jsonl": (f'{{"a": 1}}\n{{"a": {"9" * 5000}}}\n', "line 2: Exceeds the limit"),
    "splits.json": ('{"train": [{"a": 1}], "test": [{"a": 2}]}', "several lists of rows, train, test: write one"),
    "cells.csv": ('a,b\n"x\ny",1\n\n1,2,3\n', "line 5: row 2 has 3 cells, the header 2: quote texts with commas"),
    "semicolons.csv": ("a;b\n1;2;3\n", "line 2: row 1 has 3 cells, the header 2: quote texts with semicolons"),
    "open.csv": ('a,b\n1,"x\n2,y\n', "line 2: a cell in quotation marks does not end"),
    "after.csv": ('sep=,\na,b\n1,2\n"x" y,2\n', "line 4: a cell in quotation marks does not end"),
    "header.csv": ("a,b,a\n1,2,3\n", "the header has the column 'a' twice"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_wrong_is_named_once_with_its_line(name: str, tmp_path: Path) -> None:
    content, message = ERRORS[name]
    with pytest.raises(ValueError, match=rf"^cannot read .*{name}: .*{message}") as raised:
        read(tmp_path, name, content)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 90_000])
@pytest.mark.parametrize(("opening", "end"), ["[]", ('{"a":', "}")])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_rows_that_are_nested_deeply_are_refused(name, opening, end, depth, tmp_path: Path) -> None:
    deep = f'{{"a": 1, "b": {opening * depth}1{end * depth}}}'
    with pytest.raises(ValueError, match=f"line 2: its lists and objects are more than {MAX_DEPTH} deep$"):
        read(tmp_path, name, f'{{"a": 1}}\n{deep}\n')


def test_rows_are_as_deep_as_allowed(tmp_path: Path) -> None:
    deep = f'{{"a": {"[" * (MAX_DEPTH - 1)}"007"{"]" * (MAX_DEPTH - 1)}}}'
    assert json_text(read(tmp_path, "rows.jsonl", f'{deep}\n{{"a": 7}}')[0]) == deep


# --- csv --------------------------------------------------------------------------------------------------------------

CSV = {
    "commas": "q,a\n0012,None\n1e5,NA\n2024-05-01,\n 1.0 ,true\n",
    "semicolons": "q;a\n0012;None\n1e5;NA\n2024-05-01;\n 1.0 ;true\n",
    "tabs": "q\ta\n0012\tNone\n1e5\tNA\n2024-05-01\t\n 1.0 \ttrue\n",
    "Excel's own line": "sep=;\r\nq;a\r\n0012;None\r\n1e5;NA\r\n2024-05-01;\r\n 1.0 ;true\r\n",
}


@pytest.mark.parametrize("kind", CSV)
def test_cells_of_csv_are_texts(kind: str, tmp_path: Path) -> None:
    rows = read(tmp_path, "rows.csv", CSV[kind])
    assert rows.to_dict() == {"q": ["0012", "1e5", "2024-05-01", " 1.0 "], "a": ["None", "NA", "", "true"]}


def test_a_header_with_commas_decides(tmp_path: Path) -> None:
    assert read(tmp_path, "rows.csv", "a,b;c;d\n1,2\n").to_list() == [{"a": "1", "b;c;d": "2"}]
    assert read(tmp_path, "one.csv", "text\na;b\n").to_list() == [{"text": "a;b"}]
    assert read(tmp_path, "empty.csv", '\n\na;b\n1;say "hi"\n').to_list() == [{"a": "1", "b": 'say "hi"'}]


# --- Files that look as others make them ------------------------------------------------------------------------------


def test_real_files() -> None:
    texts = ["2024-05-01", "007", "7", "3", "4.5", "1.10", "6.02e23", "18446744073709551616", "0.30000000000000004"]
    rows = load_rows(str(REAL / "reader_kinds.jsonl"))
    assert [str(row["answer"]) for row in rows][:9] == texts
    assert rows[11]["answer"] == ["007", 7, None, {"at": "2024-05-01"}]
    semicolons = load_rows(str(REAL / "reader_semicolons.csv"))
    assert semicolons["answer"][:] == ["007", "4,5", "1e5", "NA", "2024-05-01"]
    assert semicolons["question"][0] == "Which room; and when?"
    excel = [{"question": 'Was heißt "sieben"?', "answer": "007"}, {"question": "zwei\r\nZeilen?", "answer": "ж 漢 🙂"}]
    assert load_rows(str(REAL / "reader_excel.csv")).to_list() == excel
    assert cells(load_rows(str(REAL / "reader_wrapped.json")), "answer") == ["2024-05-01", 7]


# --- Places and readers -----------------------------------------------------------------------------------------------


def test_lines_of_rows(tmp_path: Path) -> None:
    rows = read(tmp_path, "rows.jsonl", '\n{"a": 1}\n\n{"a": 2}\n{"a": 3}\n')
    assert lines_of(rows, [0, 2]) == {0: "line 2", 2: "line 5"}
    assert lines_of(rows.select([2, 0]), [0]) == lines_of(Dataset.from_list([{"a": 1}]), [0]) == {}
    table = read(tmp_path, "rows.csv", 'a,b\n"x\ny",1\n\nz,2\n')
    assert lines_of(table, [0, 1]) == {0: "line 2", 1: "line 5"}
    wrapped = read(tmp_path, "rows.json", '{"data": [{"a": 1}, {"a": 2}]}')
    assert lines_of(wrapped, [1]) == {1: "data[1]"}
    pretty = read(tmp_path, "pretty.json", '[\n {"a": 1},\n {"a":\n  2},\n {"a": 3}]')
    assert lines_of(pretty, [1, 2]) == {1: "line 3", 2: "line 5"}


def test_a_task_names_the_line_of_a_wrong_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "answer": "#### 1"}\n\n{"question": "b", "answer": "none"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3, row 2: answer must end with '#### number'"):
        load_task("gsm8k").load_rows("test", str(file))


@pytest.mark.parametrize(
    ("written", "gold"),
    [(["1.10", '"x"'], "1.10"), (["18446744073709551616", "1"], "18446744073709551616"), (['"007"', "7"], "007")],
)
def test_a_task_compares_with_the_digits_of_the_file(written: list[str], gold: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"problem": "?", "answer": {answer}}}\n' for answer in written))
    assert load_task("math").load_rows("test", str(file))["ground_truth"][0] == gold
