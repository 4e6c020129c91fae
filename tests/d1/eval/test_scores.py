"""Scores of generation files: the parser's command line, a task's `extract`, pass@k, and d1's released rules."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from itertools import combinations
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d1.eval import scores
from d1.eval.files import read_completion, read_setups
from d1.eval.published_rules import score_published
from d1.eval.scores import compare, score_setup
from d1.eval.uncertainty import wilson_interval
from tests.commands import ROOT

SCRIPT = ROOT / "eval" / "parse_and_get_acc.py"

# ---- the command


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        scores.cli("parse_and_get_acc.py", [*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, int(str(left.value.code)), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_sudoku) -> Path:
    """Two models at two lengths, 8 problems each: base solves 2 and 3, tuned 6 and 7."""
    path = tmp_path_factory.mktemp("generations")
    for model, solved in (("base", (2, 3)), ("my_tuned", (6, 7))):
        for length, right in zip((32, 40), solved, strict=True):
            write_sudoku(path / f"sudoku_{model}_{length}_16_0_generations.json", right, of=8, tokens=length - 4)
    return path


def test_rows_as_json_and_as_a_table(folder):
    done = run(folder, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [row["setup"] for row in rows] == [
        f"sudoku_{model}_{length}_16" for model in ("base", "my_tuned") for length in (32, 40)
    ]
    first = rows[0]
    assert (first["task"], first["accuracy"], first["n"], first["expected"]) == ("sudoku", 25, 8, 8)
    assert (first["tokens"], first["forward_passes"], first["complete"]) == (28, 16, True)
    assert first["ci_low"] == pytest.approx(7.148, abs=1e-3)  # Wilson's interval of 2 of 8
    assert first["ci_high"] == pytest.approx(59.072, abs=1e-3)
    assert first["metrics"]["cells"] == pytest.approx(25)
    published = json.loads(run(folder, "--scoring", "published", "--format", "json").stdout)[0]
    assert (published["scoring"], published["accuracy"]) == ("published", pytest.approx(25))
    header, *lines = run(folder).stdout.splitlines()
    assert header.split("  ")[0].strip() == "setup"
    (line,) = (line for line in lines if "sudoku_my_tuned_40_16" in line)
    values = ["87.50", "[52.91,", "97.76]", "8/8", "36.0", "16.0", "cells", "87.50"]
    assert line.split() == ["sudoku_my_tuned_40_16", *values]


def test_incomplete_setups_exit_with_1_unless_allowed(tmp_path, write_sudoku):
    write_sudoku(tmp_path / "sudoku_base_32_16_1_generations.json", 2, of=5, expected=8)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "5/8 (!)" in done.stdout
    assert "5 of 8 completions scored" in done.stderr
    assert "no file of rank 0" in done.stderr
    assert run(tmp_path, "--allow-partial").returncode == 0
    write_sudoku(tmp_path / "sudoku_base_32_16_0_generations.json", 2, of=12, expected=8)
    (tmp_path / "sudoku_base_32_16_1_generations.json").unlink()
    done = run(tmp_path)
    assert done.returncode == 1
    assert "12/8 (!)" in done.stdout
    assert "ERROR sudoku_base_32_16: 12 completions instead of 8" in done.stderr
    for rank in (2, 6, 9999):
        write_sudoku(tmp_path / f"sudoku_ranks_32_16_{rank}_generations.json", 2, of=5)
    assert "ERROR sudoku_ranks_32_16: no file of rank 0 and 9996 others\n" in run(tmp_path).stderr


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


def test_a_comparison_names_why_a_setup_could_not_be_scored(folder, tmp_path, write_sudoku):
    path = tmp_path / "mine_m_32_16_0_generations.json"
    write_sudoku(path, 1, of=2)
    path.write_text(path.read_text().replace('"task": "sudoku"', '"task": "mine"'))
    done = run(folder, "--compare", "sudoku_base_32_16", tmp_path / "mine_m_32_16")
    assert done.returncode == 1
    assert "mine_m_32_16: unknown task 'mine': name its file with --task_file" in done.stderr


def test_without_a_folder_it_scores_the_shipped_generations():
    done = run("--format", "json")
    assert done.returncode == 0, done.stderr
    assert all(row["complete"] for row in json.loads(done.stdout))


def test_an_answer_is_what_the_tasks_extract_returns(tmp_path, write_sudoku):
    """A task of a user's own file, which reads another answer in the same texts."""
    write_sudoku(tmp_path / "mine_m_32_16_0_generations.json", 1, of=2)
    path = tmp_path / "mine_m_32_16_0_generations.json"
    path.write_text(path.read_text().replace('"task": "sudoku"', '"task": "mine"'))
    task = tmp_path / "mine.py"
    source = "def load_rows(split, data_file=None): raise NotImplementedError\n"
    source += "def extract(text): return text.count('1234') or None\n"
    source += (
        "def score(text, row): return {'accuracy': float(extract(text) == 1), 'some': float(bool(extract(text)))}\n"
    )
    task.write_text(source + "REWARDS = [lambda completions, **columns: [0.0 for _ in completions]]\n")
    done = run(tmp_path, "--task_file", task, "--format", "json", "--details", tmp_path / "details.jsonl")
    (row,) = json.loads(done.stdout)
    assert (row["accuracy"], row["metrics"]) == (50, {"some": 50})
    details = [json.loads(line) for line in (tmp_path / "details.jsonl").read_text().splitlines()]
    assert [detail["answer"] for detail in details] == ["1", None]
    # The second text has no answer, so its score lacks a metric.
    task.write_text(
        task.read_text().replace("'some': float(bool(extract(text)))}", "**({'some': 1.0} if extract(text) else {})}")
    )
    done = run(tmp_path, "--task_file", task, "--format", "json")
    (row,) = json.loads(done.stdout)
    assert (done.returncode, row["n"], row["accuracy"], row["metrics"]) == (1, 1, 100, {"some": 100})
    (error,) = row["errors"]
    assert error.startswith("mine_m_32_16_0_generations.json, item 1: score() of the task returns the metrics [] after")


@pytest.mark.parametrize("returned", ["1.0", "{}", "None"])
def test_a_score_that_is_no_dict_of_metrics_is_said(returned):
    task = ModuleType("mine")
    exec(f"def extract(text): return text\ndef score(text, row): return {returned}", vars(task))
    with pytest.raises(ValueError, match=r"score\(\) of the task must return its metrics, .* got " + returned):
        scores.score_strict("", task, {"question": "", "ground_truth": 1})


def test_details_may_be_in_a_new_folder_and_a_wrong_one_is_said_before_scoring(folder, tmp_path, monkeypatch):
    assert run(folder, "--details", tmp_path / "new" / "details.jsonl").returncode == 0
    assert len((tmp_path / "new" / "details.jsonl").read_text().splitlines()) == 32
    (tmp_path / "file").touch()
    monkeypatch.setattr(scores, "score_setup", None)
    done = run(folder, "--details", tmp_path / "file" / "details.jsonl")
    assert done.returncode == 1
    assert "--details: the folder" in done.stderr


# ---- several completions per problem

RIGHT = [[True, False, False, True, False], [False] * 5, [True] * 5, [False, False, False, False, True]]


@pytest.fixture
def scored(tmp_path, write_sudoku):
    """A setup of four puzzles with five samples each, right as `RIGHT` says."""
    path = tmp_path / "sudoku_m_8_4_0_generations.json"
    write_sudoku(path, 1, 4)
    content = json.loads(path.read_text())
    solved, wrong = (content["generations"][i]["text"] for i in (0, 1))
    content["generations"] = [
        item | {"sample": sample, "text": solved if right else wrong}
        for item, rights in zip(content["generations"], RIGHT, strict=True)
        for sample, right in enumerate(rights)
    ]
    path.write_text(json.dumps(content | {"expected_problems": 20}))
    return score_setup(read_setups(tmp_path)[0], "strict", {})


def test_pass_at_k_is_the_mean_share_of_subsets_with_a_right_sample(scored, tmp_path):
    row, details = scored
    assert row.complete, row.errors
    assert (row.n, len(details), row.accuracy) == (20, 20, pytest.approx(40))
    assert list(row.pass_at) == ["pass@1", "pass@2", "pass@5"]
    for k in (1, 2, 5):
        expected = fmean(fmean(any(subset) for subset in combinations(rights, k)) for rights in RIGHT)
        low, high = wilson_interval(expected, 4)  # over problems: a problem's samples are no new problems
        assert row.pass_at[f"pass@{k}"] == pytest.approx((100 * expected, 100 * low, 100 * high))
    assert (row.ci_low, row.ci_high) == pytest.approx(row.pass_at["pass@1"][1:])
    published, _ = score_setup(read_setups(tmp_path)[0], "published", {})
    low, high = wilson_interval(published.accuracy / 100, 4)
    assert (published.ci_low, published.ci_high) == pytest.approx((100 * low, 100 * high))
    result = compare("a", details, "b", details)  # by the mean of a problem's samples
    assert (result["shared"], result["accuracy_a"], result["difference"]) == (4, pytest.approx(40), 0)


def sampled_setup(folder: Path, samples: int, share: float):
    """A setup of one problem with equal samples, of a task whose accuracy is `share`, and that task."""
    item = {"question": "q", "prompt_input": "q", "generations": "a", "ground_truth": 1, "index": 0}
    items = [item | {"sample": sample} for sample in range(samples)]
    (folder / "shares_m_8_4_0_generations.json").write_text(json.dumps({"generations": items, "task": "shares"}))
    task = ModuleType("shares")
    task.extract = lambda text: text  # type: ignore[attr-defined]
    task.score = lambda text, row: {"accuracy": share}  # type: ignore[attr-defined]
    return read_setups(folder)[0], {"shares": task}


@pytest.mark.parametrize(("samples", "expected"), [(3, [1, 2, 3]), (4, [1, 2, 4]), (5, [1, 2, 5]), (8, [1, 2, 5, 8])])
def test_pass_at_k_goes_up_to_the_number_of_samples(tmp_path, samples, expected):
    setup, tasks = sampled_setup(tmp_path, samples, 1.0)
    row, _ = score_setup(setup, "strict", tasks)
    assert [*row.pass_at] == [f"pass@{k}" for k in expected]


def test_accuracies_that_are_shares_have_no_pass_at_k(tmp_path):
    setup, tasks = sampled_setup(tmp_path, 4, 0.75)
    row, _ = score_setup(setup, "strict", tasks)
    assert (row.accuracy, row.pass_at) == (75, {})


def test_problems_with_one_question_are_compared_by_their_ground_truth():
    details = [{"question": "Solve.", "ground_truth": [number], "accuracy": float(number < 3)} for number in range(5)]
    better = [detail | {"accuracy": 1.0} for detail in details]
    result = compare("a", details, "b", better)
    assert (result["shared"], result["accuracy_a"], result["b_better"]) == (5, 60, 2)


# ---- d1's released rules: the published figures from d1's own files, and a small case for each of their faults

PUZZLE = "Solve the following Sudoku puzzle: 0234341221434300\n"
SOLUTION = "1234341221434321"

FIGURES = {  # accuracy in percent and number of problems, as published
    "gsm8k_instruct_128_64": (69.29, 1130),
    "gsm8k_instruct_256_128": (76.37, 1130),
    "math500_instruct_128_64": (26.00, 500),
    "math500_instruct_256_128": (32.40, 500),
    "countdown_instruct_128_64": (20.70, 256),
    "countdown_instruct_256_128": (19.53, 256),
    "sudoku_instruct_128_64": (11.72, 256),
    "sudoku_instruct_256_128": (6.69, 256),
}


@pytest.fixture(scope="module")
def d1_setups():
    folder = os.environ.get("D1_FILES")
    if not folder:
        pytest.skip("set D1_FILES to the folder that holds d1_generations/")
    return {setup.name: setup for setup in read_setups(Path(folder) / "d1_generations")}


@pytest.mark.parametrize("name", FIGURES)
def test_published_figures_come_out_of_d1s_own_files(d1_setups, name):
    row, _ = score_setup(d1_setups[name], "published", {})
    assert row.accuracy is not None
    assert (round(row.accuracy, 2), row.n) == FIGURES[name]
    assert not row.errors
    strict, _ = score_setup(d1_setups[name], "strict", {})
    assert strict.accuracy is not None
    assert strict.metrics.get("cells", strict.accuracy) == pytest.approx(row.accuracy, abs=4)
    if name.startswith("sudoku"):  # solved puzzles, where d1 counts cells
        assert strict.accuracy < row.accuracy
        assert abs(strict.metrics["cells"] - row.accuracy) < 1
    elif not name.startswith("countdown"):  # commas, fractions and unclosed boxes are read
        assert strict.accuracy > row.accuracy


COUNTDOWN = [[3, 4, 5], 27]
CASES = [  # task, text, ground truth, points
    ("gsm8k", r"\boxed{18}", 18.0, 1),
    ("gsm8k", r"\boxed{...} then \boxed{\$5 each} then \boxed{7}", 5.0, 1),
    ("gsm8k", r"\boxed{1,234}", 1234.0, 0),  # a comma ends a number
    ("gsm8k", r"\boxed{1,234}", 1.0, 1),
    ("gsm8k", r"<answer>between 3 and 4</answer>", 4.0, 1),
    ("gsm8k", r"<answer>4", 4.0, 0),
    ("gsm8k", r"<answer>2</answer> \boxed{3}", 3.0, 1),
    ("gsm8k", r"\boxed{3}", None, 0),
    ("gsm8k", "no number", None, 0),
    ("math", r"\boxed{\dfrac{1}{2}}", r"\frac12", 1),
    ("math", r"\boxed{1/2}", r"\frac{1}{2}", 1),
    ("math", r"\boxed{0.5}", r"\frac{1}{2}", 1),
    ("math", r"\boxed{0.25}", r"\frac{1}{4}", 0),  # only 0.5 is known to be a fraction
    ("math", r"\boxed{\sqrt3}", r"\sqrt{3}", 1),
    ("math", r"\boxed{x = 5}", "5", 1),
    ("math", r"\boxed{10\%}", "10", 1),
    ("math", r"\boxed{30^\circ}", "30", 1),
    ("math", r"\boxed{5 \text{ cm}}", "5", 1),
    ("math", r"\boxed{1} and \boxed{2}", "2", 1),
    ("math", r"\boxed{a/b}", "a/b", 1),
    ("math", r"\boxed{a/ b}", "a/b", 0),  # a slash between anything but integers stops the normalisation
    ("math", "<answer>7</answer>", "7", 0),  # without a box the whole text is the answer
    ("math", r"\boxed{9 <answer>7</answer>", "7", 1),  # unless a box is left open
    ("math", r"\boxed{\frac{1}{2}", r"\frac{1}{2}", 0),
    ("countdown", r"\boxed{3 * (4 + 5)}", COUNTDOWN, 1),
    ("countdown", r"\boxed{3 \times (4 + 5) = 27}", COUNTDOWN, 1),
    ("countdown", r"\boxed{3 * 4 + 5}", COUNTDOWN, 0),
    ("countdown", r"\boxed{3 * (4 + 5) + 0}", COUNTDOWN, 0),  # a number that was not given
    ("countdown", r"\boxed{3 * 9}", COUNTDOWN, 0),
    ("countdown", "<answer>3 * (4 + 5)</answer>", COUNTDOWN, 0),  # without a box the whole text is the answer
    ("countdown", "so 3 * (4 + 5) = 27", COUNTDOWN, 1),
    ("countdown", r"\boxed{3 / (4 - 5 + 1 - 1)}", COUNTDOWN, 0),
    ("countdown", r"\boxed{3 / (4 * 0 - 5 * 0)}", COUNTDOWN, 0),
    ("countdown", r"\boxed{3 (4 + 5)}", COUNTDOWN, 0),
    ("countdown", r"\boxed{3*(4+5}", COUNTDOWN, 0),
    ("sudoku", f"<answer>{SOLUTION}</answer>", SOLUTION, 3),
    ("sudoku", "<answer>1234 3412 2143 4312</answer>", SOLUTION, 1),
    ("sudoku", f"<answer>here: ```\n{SOLUTION}\n``` </answer>", SOLUTION, 3),
    ("sudoku", f"<answer></answer>{SOLUTION}<|eot_id|>", SOLUTION, 3),
    ("sudoku", f"<answer></answer>{SOLUTION[:4]}<|eot_id|>21.", SOLUTION, 1),  # cut at the end mark
    ("sudoku", f"it is {SOLUTION} </answer>", SOLUTION, 3),
    ("sudoku", f"it is {SOLUTION}.", SOLUTION, 3),
    ("sudoku", "<answer>1</answer>", SOLUTION, 1),
    ("sudoku", "nothing", SOLUTION, 0),
]


@pytest.mark.parametrize(("task", "text", "truth", "points"), CASES)
def test_published_rules(task, text, truth, points):
    """A problem gives one point, and a Sudoku one per empty cell."""
    row = {"question": PUZZLE if task == "sudoku" else "", "ground_truth": truth}
    assert score_published(task, text, row) == (points, 3 if task == "sudoku" else 1)


JSON: st.SearchStrategy = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()) | st.just({})
)


FIELDS = ["question", "generations", "text", "tokens", "edits", "first_text", "index", "ground_truth"]


@settings(max_examples=1_000, deadline=None)
@given(item=st.dictionaries(st.sampled_from(FIELDS), JSON) | JSON)
def test_items_of_any_shape_are_read_or_refused(item):
    try:
        read = read_completion("file, item 0", item)
    except TypeError:
        return
    assert all(isinstance(text, str) for text in (read.question, read.raw, read.text, read.key))
