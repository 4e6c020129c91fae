"""The command line of the parser: formats, exit codes, details, comparison, plot."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from d1.eval import scores as parse_and_get_acc
from tests.commands import ROOT

SCRIPT = ROOT / "eval" / "parse_and_get_acc.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        parse_and_get_acc.cli("parse_and_get_acc.py", [*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, int(str(left.value.code)), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_sudoku) -> Path:
    """Two models at two lengths, 8 problems each: base solves 2 and 3, tuned 6 and 7."""
    path = tmp_path_factory.mktemp("generations")
    for model, solved in (("base", (2, 3)), ("my_tuned", (6, 7))):
        for length, right in zip((32, 40), solved, strict=True):
            write_sudoku(path / f"sudoku_{model}_{length}_16_0_generations.json", right, of=8, tokens=length - 4)
    return path


def test_json_rows(folder):
    done = run(folder, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [row["setup"] for row in rows] == [
        "sudoku_base_32_16",
        "sudoku_base_40_16",
        "sudoku_my_tuned_32_16",
        "sudoku_my_tuned_40_16",
    ]
    first = rows[0]
    assert (first["task"], first["accuracy"], first["n"], first["expected"]) == ("sudoku", 25, 8, 8)
    assert (first["tokens"], first["forward_passes"], first["complete"]) == (28, 16, True)
    assert first["ci_low"] == pytest.approx(7.148, abs=1e-3)  # Wilson's interval of 2 of 8
    assert first["ci_high"] == pytest.approx(59.072, abs=1e-3)
    assert first["metrics"]["cells"] == pytest.approx(25)


def test_the_table_has_a_line_per_setup(folder):
    header, *lines = run(folder).stdout.splitlines()
    assert header.split("  ")[0].strip() == "setup"
    (line,) = (line for line in lines if "sudoku_my_tuned_40_16" in line)
    assert line.split() == [
        "sudoku_my_tuned_40_16",
        "87.50",
        *["[52.91,", "97.76]"],
        "8/8",
        "36.0",
        "16.0",
        "cells",
        "87.50",
    ]


def test_incomplete_setups_exit_with_1_unless_allowed(tmp_path, write_sudoku):
    write_sudoku(tmp_path / "sudoku_base_32_16_1_generations.json", 2, of=5, expected=8)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "5/8 (!)" in done.stdout
    assert "5 of 8 problems" in done.stderr
    assert "no file of rank 0" in done.stderr
    assert run(tmp_path, "--allow-partial").returncode == 0
    write_sudoku(tmp_path / "sudoku_base_32_16_0_generations.json", 2, of=12, expected=8)
    (tmp_path / "sudoku_base_32_16_1_generations.json").unlink()
    done = run(tmp_path)
    assert done.returncode == 1
    assert "12/8 (!)" in done.stdout
    assert "ERROR sudoku_base_32_16: 12 problems instead of 8" in done.stderr


def test_missing_ranks_are_said_in_one_short_line(tmp_path, write_sudoku):
    for rank in (2, 6, 9999):
        write_sudoku(tmp_path / f"sudoku_base_32_16_{rank}_generations.json", 2, of=5)
    assert "ERROR sudoku_base_32_16: no file of rank 0 and 9996 others\n" in run(tmp_path).stderr


def test_help_needs_no_torch():
    code = "import runpy, sys; sys.argv = sys.argv[1:]\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "finally: assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    command = [sys.executable, "-c", code, SCRIPT, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--scoring" in done.stdout


def test_details_hold_every_problem(folder, tmp_path):
    assert run(folder, "--details", tmp_path / "details.jsonl").returncode == 0
    details = [json.loads(line) for line in (tmp_path / "details.jsonl").read_text().splitlines()]
    assert len(details) == 32
    assert sum(detail["accuracy"] for detail in details) == 2 + 3 + 6 + 7
    assert details[0]["where"] == "sudoku_base_32_16_0_generations.json, item 0"
    assert details[0]["answer"] == details[0]["ground_truth"]


def test_comparison(folder):
    done = run(folder, "--compare", "sudoku_base_32_16", folder / "sudoku_my_tuned_32_16", "--format", "json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["shared"], result["difference"]) == (0, 8, 50)
    assert (result["b_better"], result["a_better"]) == (4, 0)
    assert result["p_value"] == pytest.approx(2 / 2**4)
    assert "p_value     0.125" in run(folder, "--compare", "sudoku_base_32_16", "sudoku_my_tuned_32_16").stdout
    missing = run(folder, "--compare", "sudoku_base_32_16", "nothing")
    assert missing.returncode == 1
    assert "no setup 'nothing'" in missing.stderr


def test_published_scoring_counts_cells(folder):
    rows = json.loads(run(folder, "--scoring", "published", "--format", "json").stdout)
    assert rows[0]["accuracy"] == pytest.approx(25)
    assert rows[0]["scoring"] == "published"


def test_without_a_folder_it_scores_the_shipped_generations():
    done = run("--format", "json")
    if list(parse_and_get_acc.BASELINES.glob("*_generations.json")):
        assert done.returncode == 0, done.stderr
        assert all(row["complete"] for row in json.loads(done.stdout))
    else:
        assert done.returncode == 1
        assert "eval_baselines" in done.stderr
