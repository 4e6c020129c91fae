"""`d1.eval.evaluate`, `d1 eval` and `d1 parse`: the same rows, in a checkout and installed without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from d1.eval import evaluate
from d1.eval import run as evaluation
from tests import forks
from tests.commands import ROOT

SETTINGS = {"gen_length": (12, 8), "block_length": 4, "batch_size": 3, "limit": 4, "temperature": 0.5}
FLAGS = [part for name, value in SETTINGS.items() for part in (f"--{name}", *str(value).strip("()").split(", "))]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that holds the package and nothing else of the checkout."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "d1", folder / "d1", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def python(cwd: Path, *arguments: object, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_evaluate_returns_in_silence_the_rows_that_the_commands_print(tiny_model_dir, tmp_path, capsys):
    rows = [asdict(row) for row in evaluate(tiny_model_dir, "sudoku", output_dir=tmp_path / "api", **SETTINGS)]
    assert not capsys.readouterr().out
    assert [(row["gen_length"], row["n"], row["complete"]) for row in rows] == [(12, 4, True), (8, 4, True)]
    folder = tmp_path / "command"
    flags = ["--model_path", tiny_model_dir, "--dataset", "sudoku", "--output_dir", folder, *FLAGS]
    log = tmp_path / "log"
    said = forks.finish(forks.start(forks.module, "d1", "eval", *map(str, flags), log=log, folder=tmp_path), log)
    parsed = rows_of(python(tmp_path, "-m", "d1", "parse", folder, "--format", "json"))
    assert sorted(parsed, key=lambda row: -row["gen_length"]) == rows
    assert said.endswith(evaluation.as_table(evaluate(tiny_model_dir, "sudoku", output_dir=folder, **SETTINGS)))
    for first, second in zip(sorted((tmp_path / "api").iterdir()), sorted(folder.iterdir()), strict=True):
        assert first.name == second.name
        one, two = (json.loads(path.read_text()) for path in (first, second))
        if "identity" in one:
            assert one["identity"] == two["identity"]
            assert one["settings"] | {"output_dir": ""} == two["settings"] | {"output_dir": ""}
        else:
            texts = [[item["generations"] for item in file["generations"]] for file in (one, two)]
            assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"gen_len": 12}, TypeError, r"no such setting: --gen_len=12"),  # not as an abbreviation either
        ({"split": "dev"}, ValueError, "argument --split: invalid choice: 'dev'"),
        ({"limit": "many"}, ValueError, "argument --limit: must be an integer"),
        ({"gen_length": [12, 0]}, ValueError, "out of range: --gen_length 12 0"),
        ({"limit": 0}, ValueError, "out of range: --limit 0"),
    ],
)
def test_settings_are_checked_as_on_the_command_line_before_anything_is_loaded(tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        evaluate("no model", "sudoku", output_dir=tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_a_package_without_a_checkout_evaluates_and_parses(installed, tiny_model_dir, tmp_path):
    file = shutil.copy(ROOT / "dataset" / "sudoku_test.csv", tmp_path)
    call = f"evaluate({str(tiny_model_dir)!r}, 'sudoku', data_file={file!r}, output_dir='results', **{SETTINGS})"
    program = "import json; from dataclasses import asdict; from d1.eval import evaluate\n"
    program += f"print(json.dumps([asdict(row) for row in {call}]))"
    rows = rows_of(python(tmp_path, "-c", program, path=installed))
    parsed = rows_of(python(tmp_path, "-m", "d1", "parse", "results", "--format", "json", path=installed))
    assert sorted(parsed, key=lambda row: -row["gen_length"]) == rows
    assert [row["n"] for row in rows] == [4, 4]
    alone = python(tmp_path, "-m", "d1", "parse", path=installed)
    assert (alone.returncode, alone.stdout) == (1, "")
    assert alone.stderr == (
        "d1 parse: name a folder of generation files: those of the pocket models come with a checkout\n"
    )


NO_ROWS = """
from datasets import Dataset
def load_rows(split, data_file=None): return Dataset.from_dict({"prompt": [], "question": [], "ground_truth": []})
def extract(text): return text
def score(text, row): return {"accuracy": 1.0}
REWARDS = [lambda completions, **columns: [0.0 for _ in completions]]
"""


def test_a_task_without_rows_is_said(tiny_model_dir, tmp_path):
    (tmp_path / "no_rows.py").write_text(NO_ROWS)
    (tmp_path / "empty.csv").write_text("Puzzle,Solution\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty.json").write_text("[]")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"no_rows\.py has no rows in its validation split"):
        evaluate(tiny_model_dir, tmp_path / "no_rows.py", split="validation", output_dir=out)
    with pytest.raises(ValueError, match=r"empty\.csv has no rows"):
        evaluate(tiny_model_dir, "sudoku", data_file=tmp_path / "empty.csv", output_dir=out)
    for name in ("empty.jsonl", "empty.json"):
        with pytest.raises(ValueError, match=f"{name} has no rows"):
            evaluate(tiny_model_dir, "gsm8k", data_file=tmp_path / name, output_dir=out)
    assert not out.exists()
