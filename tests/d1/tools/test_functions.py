"""Tools and their limits: values, and calls that fail, hang or flood."""

import asyncio
import math
import threading
import time
from fractions import Fraction

import pytest
import torch

from d1.masking import keyed_generator
from d1.runs.turns import TurnSettings
from d1.sandbox import SandboxError, working_python
from d1.tools.functions import END_SECONDS, MAX_TEXT, PYTHON, calculator, call, check_tools, load_tools, python
from tests.sandbox import skip_without_sandbox


def test_the_calculator_agrees_with_python_on_random_expressions():
    random = keyed_generator(0)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=random))

    for _ in range(200):
        a, b, c = number(-99, 99), number(1, 99), number(1, 9)
        values = {
            f"{a} * {b} - {c}": a * b - c,
            f"({a} + {b}) // {c}": (a + b) // c,
            f"{a} % {b} ** 2": a % b**2,
            f"-{b} / {c}": Fraction(-b, c),
            f"{b}.5 + {c}": Fraction(2 * b + 1, 2) + c,
        }
        for expression, value in values.items():
            found = calculator(expression)
            assert math.isclose(float(found), float(value), rel_tol=1e-11)
            assert found.lstrip("-").isdigit() == (Fraction(value).denominator == 1)
    assert calculator("2**100") == str(2**100)
    assert [calculator(f"({base})**5001") for base in (0, 1, -1)] == ["0", "1", "-1"]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("9**9**9", "too large"),
        ("2**5000", "too large"),
        ("9**9999*0", "too large"),
        ("(" + "*".join(["9999999999"] * 12) + ")**99", "too large"),
        ("1/0", "division by zero"),
        ("2**.5", "whole number"),
        ("1e999", "use numbers"),
        ("x+1", "use numbers"),
        ("__import__('os').system('id')", "use numbers"),
        ("1" * 201, "at most 200"),
        ("(1", "not an expression"),
        ("True + 1", "use numbers"),
    ],
)
def test_the_calculator_computes_nothing_else_and_nothing_large(expression, said):
    started = time.perf_counter()
    text, failed, hung = call(calculator, {"expression": expression}, 5)
    assert (failed, hung) == (True, False)
    assert text.startswith("error: ")
    assert said in text
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("for i in range(3):\n    print(i * i)", "0\n1\n4"),
        ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax (program.py, line 1)"),
        ("import sys\nprint(2)\nsys.exit(1)", "2"),
        ("import sys\nprint(2)\nsys.exit('no root')", "2\nno root"),
        ("open('/etc/passwd')", "FileNotFoundError: [Errno 2] No such file or directory: '/etc/passwd'"),
        ("import os\nprint(1)\nos._exit(3)", "1\nSystemExit: it ended with status 3"),
        ("import os\nprint(1)\nos.close(1)", "1"),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))", "<class '__main__.A'>"),
        ("def f(x: Missing): pass", "NameError: name 'Missing' is not defined"),
        (
            "import threading, time\nthreading.Thread(target=lambda: time.sleep(0.1) or print(4)).start()\nprint(3)",
            "3\n4",
        ),
    ],
)
def test_python_returns_what_a_program_prints_and_its_error(program, said):
    skip_without_sandbox()
    assert python(program) == said


def test_python_ends_a_program_that_floods_or_hangs(monkeypatch):
    skip_without_sandbox()
    assert python("while True:\n    print('x' * 1000)") == ("x" * 1000 + "\n") * (MAX_TEXT // 1001) + "x" * (
        MAX_TEXT % 1001
    )
    monkeypatch.setattr("d1.tools.functions.PYTHON", type(python.__globals__["PYTHON"])(seconds=0.3))
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    assert python("print(1)\nwhile True:\n    pass").endswith("TimeoutError: more than 0.3 seconds")
    monkeypatch.setattr("d1.tools.functions.PYTHON", type(python.__globals__["PYTHON"])(cpu_seconds=1))
    assert (
        python("print(1)\nwhile True:\n    pass")
        == "1\nTimeoutError: killed, after 1 s of processor time or for memory"
    )
    silent = "import os\nprint(1)\nos.close(1)\nwhile True:\n    pass"
    assert python(silent) == "1\nTimeoutError: killed, after 1 s of processor time or for memory"


def test_python_ends_its_program_before_the_call_is_given_up():
    """So that the model reads what was printed."""
    assert TurnSettings.tool_seconds > PYTHON.seconds + END_SECONDS


def test_a_run_with_python_does_not_start_without_a_sandbox(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    working_python.cache_clear()
    assert load_tools(["calculator"]) == [calculator]
    with pytest.raises(SandboxError, match="there is no `bwrap` here"):
        load_tools(["calculator", "python"])


def loops(x: int) -> str:
    """Never ends."""
    while True:
        pass


async def later(x: int) -> int:
    """Waits a little."""
    await asyncio.sleep(0)
    return x + 1


def leaves() -> None:
    """Ends the program."""
    raise SystemExit(3)


def yields() -> str:
    """Yields a text."""
    yield "5"


def without_text() -> object:
    """An object whose text is its address."""
    return object()


@pytest.mark.parametrize(("function", "kind"), [(yields, "generator"), (without_text, "object")])
def test_an_object_whose_text_is_its_address_is_an_error(function, kind):
    expected = f"error: TypeError: the tool returned an object of class {kind}, which has no text: return text"
    assert call(function, {}, 5) == (expected, True, False)


def test_a_call_gives_text_or_an_error_and_a_loop_ends():
    assert call(later, {"x": 2}, 5) == ("3", False, False)
    assert call(later, {}, 5) == ("error: TypeError: missing a required argument: 'x'", True, False)
    assert call(leaves, {}, 5) == ("error: SystemExit: 3", True, False)
    assert call(loops, {"x": 1}, 0.2) == ("error: loops took longer than 0.2 seconds", True, True)
    until = time.monotonic() + 60
    while any(thread.name == "tool loops" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_tools_by_name_and_from_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from math import sqrt\n\ndef _own(): ...\n\ndef half(x: float) -> float:\n"
        '    """Half of a number.\n\n    Args:\n        x: The number.\n    """\n    return x / 2\n'
    )
    found = load_tools(["calculator", str(file)])
    assert [one.__name__ for one in found] == ["calculator", "half"]
    assert call(found[1], {"x": 3}, 5).text == "1.5"
    with pytest.raises(
        ValueError, match=r"--tools calculato: expected calculator, python, or the path .*nearest is calculator"
    ):
        load_tools(["calculato"])
    with pytest.raises(FileNotFoundError, match="no file of tools"):
        load_tools([str(tmp_path / "other.py")])
    with pytest.raises(ValueError, match="two tools are called calculator"):
        load_tools(["calculator", "calculator"])
    with pytest.raises(ValueError, match=r"tool loops: .*docstring with `Args:`"):
        check_tools([loops])
    file.write_text("x = 1")
    with pytest.raises(ValueError, match="defines no function"):
        load_tools([str(file)])
