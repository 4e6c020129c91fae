"""MATH: equivalence of answers, its time limit in any thread, and each reward, compared with values computed by
hand."""

import contextlib
import os
import signal
import threading

import pytest

from d1.tasks import math500, maths

SAME = [
    ("12", "12"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\frac12", r"\frac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    ("10,080", r"10,\!080"),
    ("1,234", "1234"),
    ("−3", "-3"),
    (r"36", r"36^\circ"),
    (r"36°", r"36^{\circ}"),
    (r"12\text{ cm}", "12"),
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    (r"\$12.50", "12.50"),
    ("x = 5", "5"),
    ("Evelyn", r"\text{Evelyn}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\begin{pmatrix} \frac{2}{4} \\ 1 \end{pmatrix}", r"\begin{pmatrix} 1/2 \\ 1 \end{pmatrix}"),
    (r"\{3, 1, 2\}", r"\{1,2,3\}"),
    ("-2 + 7i", "7i - 2"),
    ("５", "5"),
]
DIFFERENT = [
    ("12", "21"),
    ("-3", "3"),
    (r"\frac{1}{3}", "0.33"),
    ("(1,2)", "(2,1)"),
    ("(0,1]", "(0,1)"),
    ("1,234", "(1,234)"),
    ("2 1/2", "21/2"),
    (r"\text{Evelyn}", r"\text{Navin}"),
    ("x^2", "x^3"),
    (r"\sqrt{2}", "1.41"),
    ("", "5"),
    ("?", "5"),
    (r"\frac{1}{0}", "0"),
    ("1e999", "5"),
    (r"\boxed{", "5"),
    ("}{", "5"),
    ("5" * 501, "5"),
]


@pytest.mark.parametrize(("answer", "gold"), [*SAME, *DIFFERENT])
def test_equivalence(answer, gold):
    assert maths.equivalent(answer, gold) == ((answer, gold) in SAME)
    assert maths.equivalent(gold, answer) == ((answer, gold) in SAME)


def test_equivalence_works_in_a_thread_where_signals_do_not():
    verdicts: list[bool] = []
    thread = threading.Thread(target=lambda: verdicts.extend([maths.equivalent("(a+b)^2", "a^2+2ab+b^2")]))
    thread.start()
    thread.join()
    assert verdicts == [True]


def test_a_helper_that_dies_is_replaced():
    assert maths.equivalent("(p+1)^2", "p^2+2p+1")
    os.kill(maths.helper_process.pid, signal.SIGKILL)
    maths.helper_process.wait()
    assert maths.equivalent("(p+2)^2", "p^2+4p+4")


def test_a_timeout_around_a_comparison_changes_no_later_verdict():
    """The reply to the comparison that was given up must not answer the next one."""

    class GivenUp(Exception):
        pass

    def give_up(*_):
        raise GivenUp

    assert maths.equivalent("(r+1)^2", "r^2+2r+1")
    os.kill(maths.helper_process.pid, signal.SIGSTOP)
    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(GivenUp):
            maths.equivalent("(r+2)^2", "r^2+4r+5")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with contextlib.suppress(ProcessLookupError):
        os.kill(maths.helper_process.pid, signal.SIGCONT)
    assert maths.equivalent("(r+3)^2", "r^2+6r+9")
    assert not maths.equivalent("(r+4)^2", "r^2+8r+17")
    assert maths.equivalent("(r+5)^2", "r^2+10r+25")


def test_a_machine_that_is_busy_for_seconds_changes_no_verdict():
    """A stopped helper is to the clock what one on a busy machine is: time passes, and it does not run."""
    assert maths.equivalent("(q+1)^2", "q^2+2q+1")
    os.kill(maths.helper_process.pid, signal.SIGSTOP)
    threading.Timer(2.5, os.kill, (maths.helper_process.pid, signal.SIGCONT)).start()
    assert maths.equivalent("(q+2)^2", "q^2+4q+4")


def test_an_undecided_pair_is_counted_and_is_tried_again(monkeypatch, caplog):
    assert maths.equivalent("(p+1)^2", "p^2+2p+1")
    with monkeypatch.context() as patch:
        patch.setattr(maths, "STALL_LIMIT", 0.5)
        os.kill(maths.helper_process.pid, signal.SIGSTOP)
        assert not maths.equivalent("(p+3)^2", "p^2+6p+9")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "counted as wrong" in record.getMessage()
    assert "(p+3)^2" in record.getMessage()
    assert maths.equivalent("(p+3)^2", "p^2+6p+9")


@pytest.mark.parametrize("answer", [r"\binom{10^8}{10^7}", r"2^{2^{2^{2^{2^{2}}}}}", "(x+y+z+w)^{60}"])
def test_processor_time_ends_what_no_machine_can_decide(answer, caplog):
    assert not maths.equivalent(answer, "(x+y)^2")
    assert maths.equivalent("(p+4)^2", "p^2+8p+16")
    if answer.startswith("2^"):  # a number of 2^65536 bits
        assert "processor time" in caplog.text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<answer>\boxed{\frac{1}{2}}</answer>", r"\frac{1}{2}"),
        (r"<answer>The answer is $x+1$.</answer>", "x+1"),
        (r"<answer>It is \(\frac{1}{2}\) then</answer>", r"\frac{1}{2}"),
        ("<answer>7</answer>", "7"),
        (r"so \boxed{3}", "3"),
        ("so 3", None),
    ],
)
def test_extraction(text, answer):
    assert math500.extract(text) == answer


@pytest.mark.parametrize(
    ("text", "correct", "form"),
    [
        ("<reasoning>a\nb</reasoning>\n<answer>\n\\boxed{1/2}\n</answer>", 2.0, 1.0),
        ("<answer>0.5</answer>", 2.0, 0.75),
        (r"\boxed{0.5}", 2.0, 0.5),
        (r"\boxed{0.5} <answer>0.5</answer>", 2.0, 0.75),  # the box is not inside
        ("0.5", 0.0, 0.25),
        (r"<answer>\boxed{2}</answer>", 0.0, 1.0),
        ("<answer>\boxed{0.5}</answer>", 0.0, 0.75),  # d1's own typo in its reward: a backspace, not a box
        ("", 0.0, 0.25),
    ],
)
def test_rewards_by_hand(text, correct, form):
    assert math500.correct_reward([text], ground_truth=[r"\frac{1}{2}"]) == [correct]
    assert math500.boxed_in_answer_reward([text]) == [form]
