"""Rows to train on: folders of `datasets`, and rows that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from datasets.arrow_dataset import Column

from d1.models import load_tokenizer
from d1.runs.data import describe_row_error, load_rows, usable_rows
from d1.sft.data import preprocess_dataset

ROWS = Dataset.from_dict({"prompt": ["1+1=", "2+2="], "completion": ["2", "4"]})


def test_a_saved_folder_gives_its_rows_or_those_of_its_split_train(tmp_path: Path) -> None:
    ROWS.save_to_disk(tmp_path / "rows")
    assert load_rows(str(tmp_path / "rows")).to_list() == ROWS.to_list()
    DatasetDict({"train": ROWS, "test": ROWS.select([0])}).save_to_disk(tmp_path / "splits")
    assert load_rows(str(tmp_path / "splits")).to_list() == ROWS.to_list()
    DatasetDict({"a": ROWS, "b": ROWS}).save_to_disk(tmp_path / "others")
    message = f"--train_data {tmp_path / 'others'} has no split train, only a, b: save that split alone"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_rows(str(tmp_path / "others"))


@pytest.mark.parametrize("name", ["arrow", "numpy", "pandas", "torch"])
def test_the_format_of_a_saved_folder_changes_no_row(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]]
    tokenizer = load_tokenizer(tiny_model_dir)
    for number, rows in enumerate((ROWS, Dataset.from_dict({"messages": messages}))):
        expected = preprocess_dataset(rows, tokenizer, 100, 0.0)[0]
        rows.with_format(name).save_to_disk(tmp_path / f"{number}")
        saved = load_rows(str(tmp_path / f"{number}"))
        assert preprocess_dataset(saved, tokenizer, 100, 0.0)[0].to_list() == expected.to_list()


def test_a_folder_that_cannot_be_read_is_not_called_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r": the folder cannot be read as a data set of datasets\.save_to_disk \(File"):
        load_rows(str(tmp_path))


def test_an_error_without_a_message_is_named_by_its_class() -> None:
    assert describe_row_error(ValueError()) == "ValueError"
    assert describe_row_error(ValueError("too long")) == "too long"


def test_bad_rows_are_those_with_this_status_whatever_their_problem_says() -> None:
    with pytest.raises(ValueError, match="1 of 2 rows cannot be trained on"):
        usable_rows(["ok", "bad"], ["", ""], "error")
    assert usable_rows(["ok", "bad"], ["", ""], "skip") == [0]


def test_the_status_of_rows_may_be_a_column_which_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(column: Column) -> None:
        raise AssertionError("read cell by cell")

    monkeypatch.setattr(Column, "__iter__", fail)
    rows = Dataset.from_dict({"status": ["ok", "bad", "truncated"], "problem": ["", "too long", ""]})
    assert usable_rows(rows["status"], rows["problem"], "skip") == [0, 2]
