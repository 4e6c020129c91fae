"""Reading and scoring any files in a folder: wrong files are reported, the rest is scored, nothing hangs."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d1.eval.files import read_setups
from d1.eval.scores import compare, score_setup

SUDOKU = {"question": "Solve the following Sudoku puzzle: 0234341221434300\n", "ground_truth": "1234341221434321"}
COUNTDOWN = {"question": "Numbers: [3, 4, 5]\nTarget: 27", "ground_truth": [[3, 4, 5], 27]}
GSM8K = {"question": "How many?", "ground_truth": 18.0}
MATH = {"question": "What is $x$?", "ground_truth": r"\frac{1}{2}"}
ROWS: dict[str, dict[str, Any]] = {"sudoku": SUDOKU, "countdown": COUNTDOWN, "gsm8k": GSM8K, "math": MATH}
RIGHT = {
    "sudoku": "<answer>1234341221434321</answer>",
    "countdown": r"<answer>\boxed{3 * (4 + 5)}</answer>",
    "gsm8k": r"\boxed{18}",
    "math": r"\boxed{1/2}",
}


def write(folder: Path, name: str, items: list, **fields) -> Path:
    path = folder / f"{name}_generations.json"
    path.write_text(json.dumps({"generations": items, **fields}))
    return path


def item(task: str, text: str = "", number: int = 0, **fields) -> dict:
    row = ROWS[task]
    return {"question": row["question"] + " " * number, "generations": text, "prompt_input": ""} | {
        "ground_truth": row["ground_truth"],
        **fields,
    }


def score_all(folder: Path, scoring: str = "strict"):
    return {setup.name: score_setup(setup, scoring, {}) for setup in read_setups(folder)}


def test_ranks_merge_by_the_name_without_rank(tmp_path):
    for rank in (0, 1, 3):
        write(tmp_path, f"sudoku_my_own_model_32_16_{rank}", [item("sudoku", RIGHT["sudoku"], rank)])
    write(tmp_path, "math500_my_own_model_128_64_0", [item("math", RIGHT["math"])])
    write(tmp_path, "math_my_own_model_128_64_0", [item("math", RIGHT["math"])])
    rows = {name: row for name, (row, _) in score_all(tmp_path).items()}
    sudoku = rows["sudoku_my_own_model_32_16"]
    assert (sudoku.task, sudoku.model, sudoku.gen_length) == ("sudoku", "my_own_model", 32)
    assert (sudoku.n, sudoku.expected, sudoku.missing_ranks, sudoku.complete) == (3, 256, [2], False)
    for name in ("math500_my_own_model_128_64", "math_my_own_model_128_64"):
        assert (rows[name].task, rows[name].model, rows[name].accuracy) == ("math", "my_own_model", 100)


def test_more_problems_than_expected_repeated_indices_and_foreign_rows_are_errors(tmp_path):
    ours = {"task": "sudoku", "expected_problems": 3}
    three = [item("sudoku", RIGHT["sudoku"], index=i) for i in range(3)]
    write(tmp_path, "sudoku_right_32_16_0", three, **ours)
    write(tmp_path, "sudoku_twice_32_16_0", [*three, three[1]], **ours)
    write(tmp_path, "sudoku_mixed_32_16_0", [*three[:2], item("sudoku", RIGHT["sudoku"], 5)], **ours)
    write(tmp_path, "sudoku_seeds_32_16_0", three, seed=0, **ours)
    write(tmp_path, "sudoku_seeds_32_16_1", [item("sudoku", "", index=9)], seed=1, **ours)
    write(tmp_path, "sudoku_many_32_16_0", [item("sudoku", RIGHT["sudoku"], index=i) for i in range(120)], **ours)
    write(tmp_path, "sudoku_d1s_32_16_0", [item("sudoku", "", i) for i in range(257)])
    errors = {
        "many": "sudoku_many_32_16: 120 completions instead of 3",
        "twice": "sudoku_twice_32_16: index 1 occurs 2 times",
        "mixed": "sudoku_mixed_32_16: some problems have an index and others have none",
        "seeds": "sudoku_seeds_32_16_1_generations.json: not read, because it is from another run (here seed 1)",
        "d1s": "sudoku_d1s_32_16: 257 completions instead of 256",
    }
    for scoring in ("strict", "published"):
        rows = {row.model: row for row, _ in score_all(tmp_path, scoring).values()}
        for model, message in errors.items():
            (error,) = rows[model].errors
            assert error.startswith(message)
            assert not rows[model].complete
        assert (rows["right"].n, rows["right"].expected, rows["right"].complete) == (3, 3, True)
        assert (rows["seeds"].n, rows["seeds"].accuracy) == (3, 100)  # the foreign row is not counted


@pytest.mark.parametrize("expected", ["3", -3, 0, 2.5, math.inf, True, [3]])
def test_expected_problems_that_is_no_count_is_said(tmp_path, expected):
    items = [item("sudoku", RIGHT["sudoku"], index=i) for i in range(3)]
    write(tmp_path, "sudoku_m_32_16_0", items, task="sudoku", expected_problems=expected)
    row, _ = score_all(tmp_path)["sudoku_m_32_16"]
    assert (row.n, row.accuracy, row.expected, row.complete) == (3, 100, None, False)
    (error,) = row.errors
    assert error.startswith('sudoku_m_32_16: "expected_problems" must be a whole number above 0, got')


def test_names_that_cannot_be_are_said_and_the_others_read(tmp_path):
    wrong = ("_00", "_5000000", f"_{'9' * 100}", "")  # two digits, too many, far too many, no rank
    for number, rank in enumerate(("_0", "_7", *wrong)):
        write(tmp_path, f"sudoku_m_32_16{rank}", [item("sudoku", RIGHT["sudoku"], number)])
    rows = {name: row for name, (row, _) in score_all(tmp_path).items()}
    assert (rows["sudoku_m_32_16"].n, rows["sudoku_m_32_16"].missing_ranks) == (2, [1, 2, 3, 4, 5, 6])
    for rank in wrong:
        row = rows[f"sudoku_m_32_16{rank}_generations.json"]
        assert not row.complete
        (error,) = row.errors
        assert "its name is not TASK_MODEL_LENGTH_STEPS_RANK" in error


def test_duplicates_count_once_strictly_and_again_as_published(tmp_path):
    items = [item("sudoku", RIGHT["sudoku"]), item("sudoku", "<answer></answer>"), item("sudoku", "", 1)]
    write(tmp_path, "sudoku_m_32_16_0", items)
    strict, published = (score_all(tmp_path, scoring)["sudoku_m_32_16"][0] for scoring in ("strict", "published"))
    assert (strict.n, strict.duplicates, strict.accuracy) == (2, 1, 50)
    assert (published.n, published.duplicates, published.accuracy) == (3, 1, pytest.approx(100 / 3))


def test_what_edits_corrected_and_spoiled_is_counted(tmp_path):
    """Of four completions one became right, one wrong, and one stayed wrong; the fourth has no edits to speak of."""
    right, wrong = RIGHT["sudoku"], "<answer></answer>"
    texts = [(right, wrong, 2), (wrong, right, 1), (wrong, "", 3), (right, right, 0)]
    items = [
        item("sudoku", text, number) | {"first_text": first, "edits": edits}
        for number, (text, first, edits) in enumerate(texts)
    ]
    write(tmp_path, "sudoku_m_32_16_0", items)
    row, details = score_all(tmp_path)["sudoku_m_32_16"]
    assert row.edits == 1.5
    assert {name: row.metrics[f"{name} by edits"] for name in ("corrected", "spoiled")} == dict.fromkeys(
        ("corrected", "spoiled"), 25
    )
    assert [detail["before_edits"] for detail in details] == [0, 1, 0, 1]
    write(tmp_path, "sudoku_m_32_16_0", [item("sudoku", right)])
    assert "corrected by edits" not in score_all(tmp_path)["sudoku_m_32_16"][0].metrics


MALFORMED = {
    "an item must be an object, got str": "text",
    "an item must be an object, got NoneType": None,
    '"generations" must be text, got NoneType': {"question": "q", "ground_truth": "1"},
    '"generations" must be text, got int': item("gsm8k") | {"generations": 5},
    '"question" must be text, got list': item("gsm8k") | {"question": []},
    '"text" must be text, got int': item("gsm8k") | {"text": 3},
    '"tokens", "forward_passes" and "edits" must be whole numbers': item("gsm8k", tokens="3"),
    '"first_text" must be text, got int': item("gsm8k", first_text=1),
}


def test_malformed_items_are_named_and_the_rest_scored(tmp_path):
    items = [*MALFORMED.values(), item("gsm8k", r"\boxed{18}")]
    write(tmp_path, "gsm8k_m_128_64_0", items, task="gsm8k", expected_problems=len(items))
    row, _ = score_all(tmp_path)["gsm8k_m_128_64"]
    assert (row.n, row.accuracy, row.complete) == (1, 100, False)
    for number, message in enumerate(MALFORMED):
        assert f"gsm8k_m_128_64_0_generations.json, item {number}: {message}" in row.errors[number]


BAD_TRUTHS: dict[str, list[Any]] = {
    "gsm8k": [None, "eighteen", [1], {}, math.nan],
    "math": [None, 5, ["1"]],
    "countdown": [None, "27", [], [[3, 4], "x"], [["3", {}], 1], [3, 4]],
    "sudoku": [None, "12", 12, ["1234341221434321"]],
}


@pytest.mark.parametrize("task", BAD_TRUTHS)
@pytest.mark.parametrize("scoring", ["strict", "published"])
def test_bad_ground_truths_do_not_stop_the_others(tmp_path, task, scoring):
    items = [item(task, RIGHT[task], i + 1, ground_truth=truth) for i, truth in enumerate(BAD_TRUTHS[task])]
    lost = {key: value for key, value in item(task, RIGHT[task], 99).items() if key != "ground_truth"}
    write(tmp_path, f"{task}_m_128_64_0", [*items, lost, item(task, RIGHT[task])])
    row, details = score_all(tmp_path, scoring)[f"{task}_m_128_64"]
    assert details[-1]["where"].endswith(f"item {len(items) + 1}")
    assert details[-1]["accuracy"] == 1
    if (task, scoring) != ("sudoku", "strict"):  # the rules show that a grid is right, whatever is stored
        assert sum(detail["accuracy"] for detail in details) == 1
    if scoring == "strict":
        assert any("item 0: ValueError: no ground truth" in error for error in row.errors)
        assert any(f"item {len(items)}: ValueError: no ground truth" in error for error in row.errors)


BROKEN = {
    "cut": '{"generations": [{"question": "a", "gener',
    "empty": "",
    "list": "[1, 2]",
    "no-list": '{"generations": 5}',
    "deep": "[" * 200_000,
    "binary": "\x00\x01",
    "digits": '{"generations": [' + "9" * 10_000 + "]}",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_files_are_named_and_the_others_read(tmp_path, content):
    (tmp_path / "sudoku_m_32_16_0_generations.json").write_text(content)
    write(tmp_path, "sudoku_m_32_16_1", [item("sudoku", RIGHT["sudoku"])])
    row, _ = score_all(tmp_path)["sudoku_m_32_16"]
    assert (row.n, row.accuracy, row.complete) == (1, 100, False)
    assert "sudoku_m_32_16_0_generations.json" in row.errors[0]


def test_unknown_tasks_are_errors_of_their_row_and_name_no_code_to_run(tmp_path):
    module = tmp_path / "evil.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    write(tmp_path, "game24_m_32_16_0", [item("sudoku")])
    write(tmp_path, "evil_m_32_16_0", [item("sudoku")], task=str(module), expected_problems=1)
    write(tmp_path, "sudoku_m_32_16_0", [item("sudoku", RIGHT["sudoku"])])
    rows = {name: row for name, (row, _) in score_all(tmp_path).items()}
    for name in ("game24_m_32_16", "evil_m_32_16"):
        assert "unknown task" in rows[name].errors[0]
    assert "its name begins with none of gsm8k, math500" in rows["game24_m_32_16"].errors[0]
    assert not (tmp_path / "ran").exists()
    assert rows["sudoku_m_32_16"].accuracy == 100


NASTY = [
    "",
    r"\boxed{{{{{}}",
    "}" * 1000 + r"\boxed{1}" + "{" * 1000,
    r"\boxed{" * 20_000,
    "<answer>```" * 10_000,
    "<answer>" + "```\n1234" * 10_000,
    "<answer>```" + " " * 40_000 + "</answer>",
    r"<answer>\boxed{99**80**50}</answer>",
    r"<answer>\boxed{3/(4-4)*5}</answer>",
    r"<answer>\boxed{" + "(" * 5_000 + "3+4+5" + ")" * 5_000 + "}</answer>",
    r"<answer>\boxed{" + "-" * 30_000 + "3+4+5}</answer>",
    r"<answer>\boxed{" + "3+" * 20_000 + "4}</answer>",
    r"<answer>\boxed{" + "9" * 40_000 + "}</answer>",
    r"<answer>\boxed{1e999}</answer>",
    r"<answer>\boxed{nan}</answer>",
    r"<answer>\boxed{١٢٣}</answer>",
    r"<answer>\boxed{３*(４+５)}</answer>",
    "<answer>" + "１２３４" * 4 + "</answer>",
    r"<answer>\boxed{\frac{1}{0}}</answer>",
    r"<answer>\boxed{\frac}</answer>",
    r"<answer>\boxed{" + r"\frac{" * 2_000 + "1" + "}{2}" * 2_000 + "}</answer>",
    r"<answer>\boxed{" + "x^{" * 100 + "2" + "}" * 100 + "}</answer>",
    r"<answer>\boxed{10000000!}</answer>",
    r"<answer>\boxed{\sum_{n=1}^{1000000} n^{1000}}</answer>",
    r"<answer>\boxed{" + r"\sqrt{" * 70 + "2" + "}" * 70 + "}</answer>",
    r"<answer>\boxed{2^{2^{2^{2^{2^{2}}}}}}</answer>",
    r"<answer>\boxed{\int e^{-x^2} \sin(x^x) dx}</answer>",
    r"<answer>\boxed{(x+y+z+w)^{60}}</answer>",
    r"<answer>\boxed{\binom{10^8}{10^7}}</answer>",
    "<answer>__import__('os').system('false')</answer>",
    "\x00" * 100,
    "\ud800 <answer>1</answer>",
    "1234123412341234 " * 3_000,
    "=".join(["1+2"] * 15_000),
    "1/" * 25_000,
    "x" * 10_000_000,
    "<answer>" * 1_250_000,
]


@pytest.mark.parametrize("task", ROWS)
@pytest.mark.parametrize("scoring", ["strict", "published"])
def test_nothing_hangs_or_is_lost_on_a_nasty_completion(tmp_path, task, scoring):
    score_setup(warm_up(tmp_path, task), scoring, {})
    texts = [*NASTY, RIGHT[task]]
    write(tmp_path, f"{task}_m_128_64_0", [item(task, text, number) for number, text in enumerate(texts)])
    setup = next(setup for setup in read_setups(tmp_path) if setup.model == "m")
    for text, completion in zip(texts, setup.completions, strict=True):
        began, working = time.perf_counter(), time.process_time()
        row, details = score_setup(replace(setup, completions=[completion]), scoring, {})
        assert time.process_time() - working < 1, text[:60]  # of this process alone: other work does not slow it down
        assert time.perf_counter() - began < 30, text[:60]  # math-verify's process stops by its own clock
        assert not row.errors, text[:60]
        assert (details[0]["accuracy"] == 1) == (text == RIGHT[task]), text[:60]


def warm_up(folder: Path, task: str):
    """Scores a first problem, so that one-time work (imports, a helper process) is not timed."""
    warm = folder / "warm"
    warm.mkdir()
    write(warm, f"{task}_m_128_64_0", [item(task, r"\boxed{x^2+1}")])
    return read_setups(warm)[0]


def test_comparison_pairs_by_question(tmp_path):
    right, wrong = RIGHT["gsm8k"], r"\boxed{1}"
    a, b = [right, wrong, wrong, wrong, right], [right, right, right, wrong, wrong]
    write(tmp_path, "gsm8k_a_128_64_0", [item("gsm8k", text, i) for i, text in enumerate(a)])
    write(tmp_path, "gsm8k_b_128_64_0", [item("gsm8k", text, i + 1) for i, text in enumerate(b[1:])][::-1])
    results = score_all(tmp_path)
    pair = compare("a", results["gsm8k_a_128_64"][1], "b", results["gsm8k_b_128_64"][1])
    assert (pair["shared"], pair["only_a"], pair["only_b"]) == (4, 1, 0)
    assert (pair["b_better"], pair["a_better"], pair["difference"]) == (2, 1, 25)
    assert pair["p_value"] == 1
    with pytest.raises(ValueError, match="no problem in common"):
        compare("a", results["gsm8k_a_128_64"][1], "b", [])
