"""Columns of users' files that SFT understands: templates with the file's own texts, Alpaca's, ShareGPT's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from d1.runs.data import load_rows
from d1.sft import data as sft_data
from d1.sft.columns import suggest_flags
from d1.sft.data import convert_columns, join_turns
from tests.commands import ROOT
from tests.d1.sft.templates import byte_tokenizer
from tests.d1.sft.test_data import TOKENIZERS, parts, prepare

REAL = ROOT / "tests/real_files"


def to_messages(row: dict[str, Any], function: Any, template: Any) -> list[Any]:
    messages, _ = join_turns(convert_columns(row, function, template))
    return messages


def turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in to_messages(row, None, None)]


def trained(rows: Dataset, *template: str) -> list[tuple[str, str]]:
    """The user's text and the trained text of each row, in the order of the file."""
    found = []
    for index in range(len(rows)):
        (row,) = prepare(rows.select([index]), template=template or None)
        (prompt, _), (answer, _) = parts(row, TOKENIZERS["chatml"])
        asked = prompt.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        found.append((asked, answer.removesuffix("<|im_end|><eos>")))
    return found


# --- Templates --------------------------------------------------------------------------------------------------------


def test_a_template_trains_on_the_texts_of_the_file() -> None:
    found = trained(load_rows(str(REAL / "reader_kinds.jsonl")), "{question}", "{answer}")
    assert [answer for _, answer in found] == [
        *("2024-05-01", "007", "7", "3", "4.5", "1.10", "6.02e23", "18446744073709551616", "0.30000000000000004"),
        *("3.14159265358979323846264338327950288", "true", '["007", 7, null, {"at": "2024-05-01"}]', "null"),
    ]
    assert found[0][0] == "When was it signed?"


@pytest.mark.parametrize(
    ("cell", "template", "text"),
    [
        ("1.10", "{a:.1f}", "1.1"),
        ("1.10", "{a!r}", "1.1"),
        ("1.10", "{a!s}", "1.10"),
        ("false", "{a}", "false"),
        ('{"b": [1.50, "x"]}', "{a}", '{"b": [1.50, "x"]}'),
        ('{"b": [1.50, "x"]}', "{a[b][0]} {a[b][1]}", "1.50 x"),
        ('"ü"', "{{{a}}}", "{ü}"),
    ],
)
def test_fields_of_a_template(cell: str, template: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"q": "q", "a": {cell}}}\n')
    assert trained(load_rows(str(file)), "{q}", template) == [("q", text)]


def test_a_template_may_name_a_column_with_dots() -> None:
    rows = Dataset.from_list([{"meta.q": "q", "a[0]": "a", "meta": {"q": "other"}}])
    assert trained(rows, "{meta.q}", "{a[0]}") == [("q", "a")]


@pytest.mark.parametrize(("cell", "name"), [(None, "null"), (float("nan"), "NaN")])
def test_what_a_template_cannot_fill_in_is_named(cell: Any, name: str) -> None:
    rows = [{"q": "q", "none": cell}, {"q": "q", "none": cell}]
    with pytest.raises(ValueError, match=f"row 0: none is {name}, which --template cannot fill in"):
        prepare(rows, template=("{q}", "{none}"))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{answr}", "--template '{answr}': there is no column 'answr' (the nearest is answer); the data has the"),
        ("{answr[0].text!r}", "there is no column 'answr' (the nearest is answer); the data has the columns answer, q"),
        ("{answer:{wide}}", "--template '{answer:{wide}}': there is no column 'wide'; the data has the columns"),
        ("{answer", "--template '{answer': expected '}' before end of string; write a brace of the text itself twice"),
        ("{}", "--template needs the name of a column in each pair of braces, as in {question}"),
        ("{0}", "--template needs the name of a column in each pair of braces, as in {question}"),
    ],
)
def test_a_template_of_other_columns_is_refused_before_rows_are_read(
    monkeypatch: pytest.MonkeyPatch, template: str, problem: str
) -> None:
    """The advice for bad rows, to skip them, would leave nothing."""

    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(sft_data, "tokenize_row", fail)
    for pair in (("{q}", template), (template, "{answer}")):
        with pytest.raises(ValueError, match=re.escape(problem)) as raised:
            prepare([{"q": "q", "answer": "a"}], template=pair)
        assert "--bad_rows" not in str(raised.value)


@pytest.mark.parametrize(
    ("cell", "field", "problem"),
    [
        ('{"b": null}', "a[b]", "is null, which --template cannot fill in"),
        ("[null]", "a[0]", "is null, which --template cannot fill in"),
        ('{"values": "7"}', "a.values", r"is a method of Python: a field has brackets, as in {meta\[title\]}"),
    ],
)
def test_a_null_and_a_method_within_a_cell_are_no_text(cell: str, field: str, problem: str, tmp_path: Path) -> None:
    """They were trained on as Python writes them."""
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"q": "q", "a": {cell}}}\n')
    with pytest.raises(ValueError, match=f"line 1: {re.escape(field)} {problem}"):
        prepare(load_rows(str(file)), template=("{q}", f"{{{field}}}"))


def test_numbers_of_calls_and_tools_are_those_of_the_chat_template(tmp_path: Path) -> None:
    """As SFT/README.md says; all other values are the file's."""
    file = tmp_path / "rows.jsonl"
    calls = '[{"type": "function", "function": {"name": "f", "arguments": {"a": 1.10, "b": 1e5, "n": null}}}]'
    messages = f'[{{"role": "user", "content": "u"}}, {{"role": "assistant", "content": "", "tool_calls": {calls}}}]'
    tools = '[{"type": "function", "function": {"name": "f", "parameters": {"k": 1.20, "m": null}}}]'
    file.write_text(f'{{"messages": {messages}, "tools": {tools}}}\n')
    tokenizer = byte_tokenizer("qwen2_5")
    (row,) = prepare(load_rows(str(file)), tokenizer)
    (prompt, _), (answer, _) = parts(row, tokenizer)
    assert '{"name": "f", "arguments": {"a": 1.1, "b": 100000.0}}' in answer
    assert '"parameters": {"k": 1.2}' in prompt


# --- Alpaca and ShareGPT ----------------------------------------------------------------------------------------------


def test_alpaca() -> None:
    rows = load_rows(str(REAL / "reader_alpaca.json"))
    assert trained(rows) == [
        ("Name a prime number.", "7"),
        ("Add the numbers.\n2 and 3", "5"),
        ("Say hello.", "Hello."),
    ]


def test_alpaca_with_its_other_columns() -> None:
    row = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}
    assert turns(row) == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert turns({"instruction": "c", "output": "d", "history": None, "system": None}) == turns(row)[3:]


def test_sharegpt() -> None:
    rows = load_rows(str(REAL / "reader_sharegpt.jsonl"))
    assert [turns(row) for row in rows] == [
        [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")],
        [("system", "Be kind."), ("user", "2+2?"), ("assistant", "4"), ("user", "And 3+3?"), ("assistant", "6")],
    ]
    assert {row["status"] for row in prepare(rows)} == {"ok"}


def test_conversations_may_be_messages() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert to_messages({"conversations": messages}, None, None) == messages
    assert to_messages({"prompt": "of another column", "conversations": messages}, None, None) == messages


def test_a_function_may_return_such_columns() -> None:
    rows = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    assert to_messages({"x": 1}, lambda row: rows[0], None)[0] == {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"conversations": "text"}, "conversations is not a list of {from, value}"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "from 'narrator' has no role"),
        ({"conversations": [{"from": "humans", "value": "a"}]}, r"has no role \(the nearest is human\)"),
        ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "b"}]}, "the user message is NoneType"),
        ({"instruction": None, "output": "b"}, "instruction is NoneType, not text"),
        ({"instruction": "a", "output": ""}, "output is empty"),
        ({"instruction": "a", "input": 3, "output": "b"}, "input is int, not text"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, r"history must be a list of \[instruction, output\]"),
        ({"instruction": "a", "output": "b", "history": 3}, r"history must be a list of .*, got 3"),
        ({"instruction": "a", "output": "b", "system": 3}, "system is int, not text"),
        (
            {"system": "s", "conversations": [{"from": "system", "value": "t"}, {"from": "gpt", "value": "b"}]},
            "the column system and the system message differ",
        ),
    ],
)
def test_what_is_wrong_with_a_cell_is_named_by_its_column(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"row 0: .*{problem}"):
        prepare([row])


# --- Other columns ----------------------------------------------------------------------------------------------------


CAPITALS = ", with a column's name for each word in capitals"


@pytest.mark.parametrize(
    ("columns", "way"),
    [
        (["text", "answer"], "use --template '{text}' '{answer}' or --data_function"),
        (["Label", "id", "Document"], "use --template '{Document}' '{Label}' or --data_function"),
        (["foo", "bar", "baz"], "use --template '{QUESTION}' '{ANSWER}' or --data_function" + CAPITALS),
        (["support", "question"], "use --template '{question}' '{ANSWER}' or --data_function" + CAPITALS),
        (["id", "answer"], "use --template '{QUESTION}' '{answer}' or --data_function" + CAPITALS),
        (["prompt", "score_rejected"], "use --template '{prompt}' '{ANSWER}' or --data_function" + CAPITALS),
        (
            ["prompt", "chosen", "rejected"],
            "pairs of chosen and rejected answers are for `d1 prefer`; to train on the chosen ones alone, use "
            "--data_function",
        ),
        (["text"], "use --data_function"),
    ],
)
def test_a_hint_names_the_files_own_columns(columns: list[str], way: str) -> None:
    assert suggest_flags(columns) == way
    with pytest.raises(ValueError, match="the data has the columns") as raised:
        prepare([dict.fromkeys(columns, "x")])
    assert str(raised.value).endswith(way)


def test_completions_with_labels_are_preferences(tmp_path: Path) -> None:
    """The bad ones were trained on as the good ones."""
    file = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "completion": "good", "label": True},
        {"prompt": "a", "completion": "bad", "label": False},
        {"prompt": "a", "completion": "unknown", "label": None},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"the column label .* use `d1 prefer --method elbo-kto`, or keep the good"):
        prepare(load_rows(str(file)))
    chosen = [row for row in rows if row["label"]]
    assert trained(Dataset.from_list(chosen).remove_columns("label")) == [("a", "good")]
    assert trained(Dataset.from_list(rows[:1]), "{prompt}", "{completion}") == [("a", "good")]


@pytest.mark.parametrize(
    ("good", "bad"), [(True, False), (1, 0), (1.0, 0.0), ("True", "false"), ("1", "0"), (1, False), ("true", 0)]
)
@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_labels_that_preference_training_reads_are_refused(good: Any, bad: Any, ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows.{ending}"
    cells = [("good", good), ("bad", bad), ("unknown", None)]
    if ending == "jsonl":
        lines = [json.dumps({"prompt": "a", "completion": text, "label": label}) for text, label in cells]
    else:
        lines = ["prompt,completion,label"] + [f"a,{text},{'' if label is None else label}" for text, label in cells]
    file.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"the column label says whether a completion is good or bad"):
        prepare(load_rows(str(file)))


@pytest.mark.parametrize("labels", [(2, 0), ("sport", "news"), (True, "unsure"), (None, None)])
def test_labels_of_another_kind_say_nothing_about_a_completion(labels: tuple[Any, ...], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": "a", "completion": "b", "label": label}) for label in labels]
    file.write_text("".join(line + "\n" for line in lines))
    assert len(prepare(load_rows(str(file)))) == 2


def test_a_file_of_columns_is_called_by_their_names(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('{"prompt": ["a", "b"], "completion": ["c", "d"]}')
    problem = "line 1: prompt is a list, but not of {role, content}: write one object per row, whose prompt is a text"
    with pytest.raises(ValueError, match=re.escape(problem)):
        prepare(load_rows(str(file)))
    with pytest.raises(ValueError, match=r"row 0: completion is a list, but not of {role, content}"):
        prepare([{"prompt": "a", "completion": ["b", "c"]}])


def test_bad_rows_of_a_file_have_their_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "completion": "" if number % 2 else "b"} for number in range(16)]
    file.write_text("\n" + "\n\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="8 of 16 rows cannot be trained on:") as raised:
        prepare(load_rows(str(file)))
    lines = [f"  line {2 * (number + 1)}: completion is empty" for number in range(16) if number % 2]
    assert str(raised.value).splitlines()[1:] == [
        *lines[:5],
        "  and 3 more",
        "Fix them, or leave them out with --bad_rows skip",
    ]
    assert len(prepare(load_rows(str(file)), bad_rows="skip")) == 8
    assert f"{lines[0]}\n{lines[1]}" in caplog.text
