"""Any text: every extractor returns, scores stay in [0, 1], rewards are finite, and nothing takes a second."""

import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d1.tasks import TASKS, answer_block, final_answer, last_boxed, load_task, maths
from tests.sandbox import SANDBOXED, skip_without_sandbox

TESTS = {"prefix": "", "source": "with __case__(0):\n    assert f(1) == 2", "names": ["f"], "count": 1, "setup": ""}
TRUTHS = {"gsm8k": 18.0, "math": r"\frac{\pi}{7}", "countdown": [[17, 96, 91], 22], "sudoku": "4132231412433421"}
TRUTHS |= {"code": TESTS, "programs": [["abcde", "ab"]], "pocket_countdown": [[17, 96, 91], 22], "arithmetic": 18.0}
TRUTHS |= {"products": 170570, "svamp": 18.0}
QUESTION = "Solve the following Sudoku puzzle: 0102230010030400\n"  # which other tasks do not read
ROWS = {name: {"question": QUESTION, "ground_truth": truth} for name, truth in TRUTHS.items()}
PIECES = [
    *("<answer>", "</answer>", "<reasoning>", "</reasoning>", r"\boxed{", r"\boxed", "{", "}", r"\{", r"\}"),
    *("(", ")", "[", "]", "$", r"\$", r"\(", r"\)", r"\frac{1}{2}", r"\frac", r"\text{", r"\sqrt{", r"\pi", r"\left"),
    *(r"\times", r"\div", r"\cdot", r"\%", r"\ ", r"\\", r"\begin{pmatrix}", "<|eot_id|>", "__import__('os')"),
    *("17", "96", "91", "22", "0", "1e999", "1/0", "99**80**50", "1,234", "4132231412433421", "a4 b1 c3", "nan", "inf"),
    *("１２", "²", "٣", "−", *"+-*/=,.%^_#~!;|x \n"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=40).map("".join)


def check(text: str, names: list[str]) -> None:
    for shared in (answer_block, last_boxed, final_answer, maths.normalize):
        result = shared(text)
        assert result is None or isinstance(result, str)
    for name in names:
        task, row = load_task(name), ROWS[name]
        answer = task.extract(text)
        assert answer is None or isinstance(answer, str) or math.isfinite(answer)
        assert answer != ""
        scores = task.score(text, row)
        assert all(0.0 <= value <= 1.0 for value in scores.values())
        assert scores["accuracy"] == 0.0 or answer is not None
        for reward in task.REWARDS:
            (paid,) = reward([text], **{key: [value] for key, value in row.items()})
            assert 0.0 <= paid <= 2.0


# Small versions of tasks are read and scored by the functions of these tasks.
JUDGED = [*{(load_task(name).extract, load_task(name).score): name for name in reversed([*TASKS])}.values()]
PLAIN = [name for name in JUDGED if name not in SANDBOXED]


@pytest.mark.parametrize(
    ("names", "texts", "examples", "milliseconds"),
    [
        (["gsm8k", "countdown", "sudoku"], TEXTS, 200, 1000),
        (["math"], TEXTS, 30, None),
        ([*SANDBOXED], TEXTS.map("<answer>{}".format), 10, None),
        pytest.param(PLAIN, TEXTS | st.text(max_size=2000), 10_000, 2000, marks=pytest.mark.slow),
    ],
)
def test_any_text(names, texts, examples, milliseconds):
    skip_without_sandbox(names[0])

    @given(texts)
    @settings(max_examples=examples, deadline=milliseconds, suppress_health_check=list(HealthCheck))
    def any_text(text):
        check(text, names)
        load_task("math").extract(text)

    any_text()


REPEATED = ["9", "{", "(", "1 ", "$ ", " ", "°", r"^{\circ}", r"\sin ", r"\sin 30^{\circ}", r"\frac", "a and ", ","]


@pytest.mark.parametrize("piece", REPEATED)
def test_an_answer_of_500_characters_is_read_in_a_tenth_of_a_second(piece):
    """Beginnings and ends decide whether a pattern matches, so that it has to try every way to read what is between."""
    start = time.process_time()
    for before in ("", "1", r"\sin 30", r"\text{"):
        for after in ("", "x", r"\%"):
            text = before + piece * ((maths.MAX_ANSWER - 10) // len(piece)) + after
            maths.equivalent(text, "1")
    assert time.process_time() - start < 1.2  # of 12 texts


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize(
    "piece", ["9", "{", "(", "1 ", "$ ", "\t", r"\(", r"\boxed{", "<answer>", "</reasoning><answer>"]
)
def test_ten_megabytes_take_less_than_a_second(name, piece):
    text = "<answer>" + piece * (10_000_000 // len(piece))
    task = load_task(name)
    start = time.process_time()  # of this process: whatever else the machine is doing
    assert task.score(text, ROWS[name])["accuracy"] == 0.0
    assert time.process_time() - start < 1.0
