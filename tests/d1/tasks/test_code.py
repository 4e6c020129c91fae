"""Rows of the task code: which tests say something of a program, and which a right program passes."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets.config
import pytest

from d1.sandbox import SandboxError, box, shares_passed
from d1.tasks import code, programs
from tests import forks
from tests.faults import failing_sandbox
from tests.sandbox import skip_without_sandbox

skip_without_sandbox()

SQUARE = "def square(x):\n    return x * x"
GOOD: dict[str, Any] = {
    "question": "Write square.",
    "test": "from solution import square\n\ndef test_it():\n    assert square(3) == 9",
    "solution": SQUARE,
}


@pytest.fixture(autouse=True)
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of verdicts on rows, in a folder of the test's own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "d1_code_rows.jsonl"


FENCED = 'def f(x):\n    """The x of a call:\n\n    ```\n    f(1)\n    ```\n    """\n    return x  # not `x`\n'


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python3\nA\n```\nThat is it.", "A\n"),
        ("```Python\nA\n```\nDone.", "A\n"),
        ("```bash\nls\n```\n```python\nA\n```\nThat works.", "A\n"),
        ("```python\nA\n```\n```text\n4\n```\nBye", "A\n"),
        ("```python\nA\n```\nOutput:\n```\n4\n```", "A\n"),
        ("```python\nA\n```\n```python\nB\n```", "B\n"),
        ("```\nA\n```\n```\nB\n```", "B\n"),
        ("```python\nA", "A"),
        ("``` python\nA\n```\nDone.", "A\n"),
        ("Use ```x``` python\n```python\nA\n```", "A\n"),
        ("Use ```x``` then:\n```python\nA\n```", "A\n"),
        ("```python\nA\n```<answer>```py\nB```</answer>", "B"),
        ("<answer>\n    return 1\n</answer>", "    return 1"),
        ("<answer>x = 1</answer>", "x = 1"),
        ("<answer> def f(x):\n    return x\n</answer>", "def f(x):\n    return x"),
        ("1. So:\n   ```python\n   def f(x):\n       return x\n   ```", "def f(x):\n    return x\n"),
        (" ```python\ndef f(x):\n if x:\n  return 1\n```", "def f(x):\n if x:\n  return 1\n"),
        ("    ```python\ndef f(x):\n    return x\n```", "def f(x):\n    return x\n"),
        ("    ```python\n    return x\n```", "    return x\n"),
        ("```python\r\nA\r\n```", "A\r\n"),
        (f"```python\n{FENCED}```", FENCED),
        (f"<answer>\n```python\n{FENCED}```\n</answer>", FENCED),
        (f"```python\n{FENCED}", FENCED),  # cut off
        (f"```python\n{FENCED.replace('    ```', '```')}```", FENCED.replace("    ```", "```")),
        (f"```python\nf(\n```\nBetter:\n```python\n{FENCED}```\nIt prints:\n```\n1\n```", FENCED),
        ("```python\n    s = '```'\n    return s\n```", "    s = '```'\n    return s\n"),  # the body of a function
        ("```python\nx = 1  # ```\ny = 2\n```\nDone.", "x = 1  # ```\ny = 2\n"),
        ("```python\nx = 1```\nOr:\n```python\ny = (\n```", "y = (\n"),
        ("no program", None),
    ],
)
def test_the_program_of_a_completion(text: str, program: str | None) -> None:
    assert code.extract(text) == program


@pytest.mark.parametrize(
    "answer", ["x[0] + x[1]", "`x[0] + x[1]`", "```python\nx[0] + x[1]\n```", "```\nx[0] + x[1]```"]
)
def test_the_expression_of_a_program_may_stand_in_backticks(answer: str) -> None:
    assert programs.extract(f"<answer>{answer}</answer>") == "x[0] + x[1]"
    assert programs.extract("<answer></answer>") is None


def test_imports_from_the_future_come_before_the_beginning_of_a_row(tmp_path: Path) -> None:
    prompt = 'def square(x: int) -> int:\n    """The square."""\n'
    check = "def check(candidate):\n    assert candidate(3) == 9\n"
    row = {"prompt": prompt, "test": check, "entry_point": "square", "canonical_solution": "    return x * x\n"}
    (problem,) = code.load_rows("test", written(tmp_path, row))
    for future in ("annotations", "(\n    annotations,\n)"):
        program = f"```python\nfrom __future__ import {future}\n\n{SQUARE}\n```"
        assert code.score(program, problem)["accuracy"] == 1


def written(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    columns = {key for row in rows for key in row}
    path.write_text("".join(json.dumps(dict.fromkeys(columns) | row) + "\n" for row in rows))
    return str(path)


def load(folder: Path, *rows: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    return code.load_rows("train", written(folder, *rows), **options).to_list()


def left_out(folder: Path, **row: Any) -> str:
    """Why a row is left out, next to a good one of the same manner."""
    good = {"text": "?", "test_list": ["assert square(3) == 9"]} if "test_list" in row else GOOD
    if "entry_point" in row:
        good = {"prompt": f"{SQUARE}\n", "entry_point": "square", "test": "def check(f):\n    assert f(3) == 9"}
    with pytest.raises(ValueError, match="no row can be used: row 1, ") as caught:
        load(folder, row)
    reason = str(caught.value).partition("row 1, ")[2].removesuffix(" (line 1)")
    kept = load(folder, good, row)
    assert len(kept) == 1
    return reason


def share(program: str, row: dict[str, Any]) -> float:
    tests, prefix = code.tests_of(row["ground_truth"])
    return shares_passed([prefix + program], [tests])[0]


def cases_of(folder: Path, test: str) -> int:
    (row,) = load(folder, GOOD | {"test": IMPORT + test})
    assert share(SQUARE, row) == 1
    assert share("def square(x):\n    return 0", row) < 1
    assert share("def square(x):\n    pass", row) == 0
    return row["ground_truth"]["count"]


# ---- which rows are left out, and which cases there are

IMPORT = "from solution import square\n"
HUMANEVAL = {"prompt": "?", "test": "def check(f):\n    assert f(1) == 1", "entry_point": "f"}
PROMPT = "def f(x):\n    'The number itself.'\n"
MBPP: dict[str, Any] = {"text": "?", "test_list": ["assert f(1) == 1"]}
CATCHES = "def test_it():\n    try:\n        assert square(3) == 9\n    except Exception: pass"


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("async def test_it():\n    assert square(3) == 9", "test_it is async, and nothing here awaits it"),
        ("async def helper():\n    assert square(3) == 9", "there is no assert that runs and no test function"),
        ("if __name__ == '__main__':\n    assert square(3) == 9", "there is no assert that runs"),
        ("if True:\n    def test_it():\n        assert square(3) == 9", "there is no assert that runs"),
        ("for _ in [1]:\n    class Checks:\n        def test(self): assert square(3) == 9", "there is no assert"),
        ("assert True", "there is no assert that runs"),
        ("def test_it():\n    assert square(3) == 9\n    yield", "its tests pass with functions that do nothing"),
        ("if square is None:\n    assert square(3) == 9", "its tests pass with functions that do nothing"),
        (CATCHES, "its tests pass with functions that do nothing"),
        ("assert square(3) is None", "its tests pass with functions that do nothing"),
        ("assert square(3) == 9\nassert 1 < 2", "case 2 of its tests passes with every program"),
    ],
)
def test_a_row_that_any_program_passes_is_left_out(test: str, reason: str, tmp_path: Path) -> None:
    assert left_out(tmp_path, **GOOD | {"test": IMPORT + test}).startswith(reason)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (GOOD | {"solution": SQUARE + " + 1"}, "its own solution passes 0 of the 1 cases of its tests"),
        (GOOD | {"solution": "import numpy\n" + SQUARE}, "its own solution passes 0 of the 1 cases"),
        (
            GOOD | {"test": "def test_it():\n    import numpy\n    assert 1 == 2"},
            "the tests import numpy, which the san",
        ),
        (GOOD | {"test": "from . import solution\nassert 1 == 2"}, "the tests import their own package, which"),
        (GOOD | {"question": "  "}, "question must be a text, got '  '"),
        (GOOD | {"test": None}, "test must be a text, got None"),
        (MBPP | {"text": None, "prompt": None}, "prompt must be a text, got None"),
        (MBPP | {"test_list": [None]}, "test_list must be a list of tests, got [None]"),
        (MBPP | {"test_imports": "import math"}, "test_imports must be a list"),
        (MBPP | {"test_setup_code": "import numpy"}, "the tests import numpy"),
        (HUMANEVAL | {"prompt": "import numpy\n"}, "the tests import numpy"),
        (HUMANEVAL | {"entry_point": None}, "entry_point must be a text"),
        (HUMANEVAL | {"entry_point": "1"}, "entry_point must be the name of a function"),
        (GOOD | {"test": "assert 0 == 1" + " + 1" * 700}, "its tests are nested too deeply"),
        (
            GOOD | {"test": f"{IMPORT}def test_it(*, x):\n    assert square(3) == 9"},
            "test_it takes parameters",
        ),
        (
            GOOD | {"test": f"{IMPORT}def test_it(x, /):\n    assert square(3) == 9"},
            "test_it takes parameters",
        ),
        (GOOD | {"test": f"{IMPORT}assert square(3) == 9\nreturn"}, "test is no Python: 'return' outside function"),
        (
            HUMANEVAL | {"prompt": PROMPT, "test": "def check(*, f):\n    assert f(1) == 1"},
            "check must take one",
        ),
        (
            HUMANEVAL | {"prompt": PROMPT, "test": "def check(f, g):\n    assert f(1) == 1"},
            "check must take one",
        ),
        (HUMANEVAL | {"prompt": PROMPT, "test": "def check():\n    assert f(1) == 1"}, "check must take one"),
        (HUMANEVAL | {"prompt": PROMPT, "entry_point": "class"}, "entry_point must be the name of a function"),
    ],
)
def test_a_row_that_no_program_passes_is_left_out(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert reason in left_out(tmp_path, **row)


UNDEFINED = {  # tests that read a name that nothing defines -> the name
    "def test_it():\n    assert square(3) == nine": "nine",
    "def test_it():\n    with pytest.raises(ValueError):\n        square('a')": "pytest",
    "def test_it():\n    n = 9\n    assert square(3) == n\ndef test_other():\n    assert square(-3) == n": "n",
    "def test_it():\n    import math\n    assert square(3) == math.floor(9)\nassert square(2) == math.floor(4)": "math",
    "def helper(x):\n    return lower(x)\nassert square(3) == helper(9)": "lower",
    "assert square(3) == 9\nassert [cube(x) for x in (1, 2)] == [1, 8]": "cube",
    "class Box:\n    side = 3\n    def area(self):\n        return side\nassert square(3) == Box().area() ** 2": "side",
}
DEFINED = [  # tests that only look like those
    "nine = 9\ndef test_it():\n    assert square(3) == nine",
    "def test_it():\n    global nine\n    nine = 9\n    assert square(3) == nine",
    "from math import *\nassert square(3) == floor(9)",
    "def test_it(*more, k=9, **named):\n    assert square(3) == k",
    "if __name__ == '__main__':\n    pytest.main()\nassert square(3) == 9",
    "try:\n    assert square(3) == 9\nexcept ValueError as error:\n    raise error",
    "assert all(square(x) == (lambda y: y * y)(x) for x in (1, 2, 3))",
    "for x, y in [(3, 9)]:\n    assert square(x) == y == (z := 9) == z",
]


@pytest.mark.parametrize("test", UNDEFINED)
def test_tests_that_read_an_undefined_name_are_left_out(test: str, tmp_path: Path) -> None:
    reason = left_out(tmp_path, **GOOD | {"test": IMPORT + test, "solution": None})
    assert reason == f"its tests read the name {UNDEFINED[test]}, which nothing defines"


@pytest.mark.parametrize("test", DEFINED)
def test_tests_that_define_what_they_read_stay(test: str, tmp_path: Path) -> None:
    (row,) = load(tmp_path, GOOD | {"test": IMPORT + test, "solution": None})
    assert share(SQUARE, row) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (HUMANEVAL | {"prompt": "def f(x: List[int]):\n    'Doc'\n"}, "the name List, which nothing defines"),
        (
            HUMANEVAL | {"prompt": PROMPT, "test": "def check(f):\n    assert f(1) == one"},
            "the name one, which",
        ),
        (MBPP | {"test_list": ["assert f(1) == 1", "assert g(2) == 2"]}, "the name g, which neither the question nor"),
        (MBPP | {"test_list": ["assert f(1) == 1", "assert f(np.array(2)) == 2"]}, "the name np, which neither"),
        (MBPP | {"test_setup_code": "root = f(1)", "test_list": ["assert f(root) == 1"]}, "the name f, which nothing"),
    ],
)
def test_undefined_names_of_other_forms_are_left_out(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert reason in left_out(tmp_path, **row)


def test_what_never_runs_is_no_case_and_what_runs_is_one(tmp_path: Path) -> None:
    never = (
        "if __name__ == '__main__':\n    assert square(2) == 4\nif square:\n    def helper():\n        assert False\n"
    )
    never += "async def later():\n    assert False\nassert True, 'for debugging'\n"
    assert cases_of(tmp_path, f"{never}assert square(3) == 9") == 1
    runs = "for x, y in [(1, 1), (2, 4)]:\n    assert square(x) == y\nif True:\n    with open('/dev/null'):\n"
    runs += "        assert square(2) == 4\ntry:\n    assert square(3) == 9\nfinally:\n    pass\n"
    assert cases_of(tmp_path, f"{runs}def test_it(): assert square(4) == 16") == 4


def test_an_assert_of_what_is_false_runs_and_one_of_what_is_true_says_nothing(tmp_path: Path) -> None:
    test = "try:\n    g(-1)\n    assert False\nexcept ValueError:\n    pass"
    row = {"text": "Write g.", "test_list": ["assert g(1) == 1", test]}
    solution = "def g(x):\n    if x < 0:\n        raise ValueError\n    return x"
    (loaded,) = load(tmp_path, row | {"code": solution})
    assert loaded["ground_truth"]["count"] == 2
    assert share(solution, loaded) == 1
    assert share("def g(x):\n    return x", loaded) == 0.5
    assert cases_of(tmp_path, "assert 1\nassert square(3) == 9") == 1


def test_none_may_be_the_right_value_of_some_cases(tmp_path: Path) -> None:
    test = "from solution import first\ndef test_a(): assert first([]) is None\ndef test_b(): assert first([2]) == 2"
    solution = "def first(items):\n    return items[0] if items else None"
    (row,) = load(tmp_path, {"question": "?", "test": test, "solution": solution})
    assert share(solution, row) == 1
    assert share("def first(items):\n    pass", row) == 0.5


@pytest.mark.parametrize(
    "test",
    [
        "import solution as s\ndef test_it():\n    assert s.square(3) == 9",
        "import solution\ndef test_it():\n    assert solution.square(3) == 9",
        "import math, solution as s\ndef test_it():\n    assert s.square(math.floor(3.5)) == 9",
        "from solution import *\ndef test_it():\n    assert square(3) == 9",
        "from .solution import square as f\ndef test_it():\n    assert f(3) == 9",
        "def test_it():\n    from solution import square\n    assert square(3) == 9",
        "def test_it():\n    from solution import square as f\n    assert f(3) == f(-3) == 9",
        "def load():\n    import solution\n    return solution\ndef test_it():\n    assert load().square(3) == 9",
        "try:\n    from solution import square\nexcept ImportError:\n    raise\nassert square(3) == 9",
    ],
)
def test_each_way_to_import_the_program_works(test: str, tmp_path: Path) -> None:
    (row,) = load(tmp_path, {**GOOD, "test": test, "solution": None})  # kept without a solution to try
    assert share(SQUARE, row) == 1
    assert share("def square(x):\n    return x + 1", row) == 0
    if "load()" not in test:
        assert row["question"].endswith("\n\nName in the program: square")


def test_a_function_with_the_name_of_the_module_is_the_function(tmp_path: Path) -> None:
    """HumanEval/121: its function is called `solution`."""
    program = "def solution(x):\n    return x * x"
    human_eval = {"prompt": "def solution(x):\n    'The square.'\n", "test": "def check(f):\n    assert f(3) == 9"}
    human_eval |= {"entry_point": "solution", "canonical_solution": "    return x * x"}
    kodcode = GOOD | {"test": "from solution import solution\nassert solution(3) == 9", "solution": program}
    rows = load(tmp_path, human_eval) + load(tmp_path, kodcode)
    rows += load(tmp_path, {"text": "?", "test_list": ["assert solution(3) == 9"], "code": program})
    assert [share(program, row) for row in rows] == [1, 1, 1]


# ---- the verdicts


def test_verdicts_are_counted_kept_and_used_again(
    tmp_path: Path, verdicts: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = GOOD | {"solution": "def square(x): return 0"}
    rows: list[dict[str, Any]] = [bad | {"question": None}, GOOD, bad, GOOD | {"question": "Again."}]
    assert [row["question"][:6] for row in load(tmp_path, *rows)] == ["Write ", "Again."]
    assert "2 of 4 rows left out, first row 1, question must be a text, got None" in caplog.text
    kept = [line for line in verdicts.read_text().splitlines() if line]
    assert len(kept) == 2  # of different tests
    verdicts.write_text("\n".join([*kept, '["cut']))
    with monkeypatch.context() as patch:
        patch.setattr(code, "fault_of", None)
        assert len(load(tmp_path, *rows)) == 2  # nothing runs again
    assert len(load(tmp_path, GOOD, limits=box.Limits(seconds=9))) == 1  # other limits: these run again
    assert len([line for line in verdicts.read_text().splitlines() if line.endswith("]")]) == 3


def load_with_cache(path: str, cache: str) -> None:
    datasets.config.HF_DATASETS_CACHE = cache
    code.load_rows("train", path)


def test_processes_that_load_together_run_the_tests_once(tmp_path: Path, verdicts: Path) -> None:
    rows = [GOOD | {"solution": f"{SQUARE}  # {number}"} for number in range(6)]
    given, log = (written(tmp_path, *rows), str(verdicts.parent)), tmp_path / "log"
    forks.finish(forks.start(load_with_cache, *given, log=log, folder=tmp_path, processes=3), log)
    assert len([line for line in verdicts.read_text().splitlines() if line]) == 6


def test_a_sandbox_that_fails_leaves_no_row_out(
    tmp_path: Path, verdicts: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(box, "PAUSES", (0.01, 0.01))
    row = GOOD | {"solution": f"{SQUARE}  # of a machine without memory"}
    with failing_sandbox(None), pytest.raises(SandboxError, match="at each of 3 tries"):
        load(tmp_path, row)
    assert verdicts.read_text() == ""
    with failing_sandbox(2):
        assert len(load(tmp_path, row)) == 1
    assert "running the tests of 1 rows in the sandbox, once" in caplog.text
