"""Countdown: what counts as an expression, its exact value, reward and score."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d1.tasks import countdown


def accuracy(answer: str, numbers=(17, 96, 91), target=22) -> float:
    text = f"<reasoning>r</reasoning><answer>{answer}</answer>"
    return countdown.score(text, {"question": "", "ground_truth": [list(numbers), target]})["accuracy"]


@pytest.mark.parametrize(
    ("answer", "numbers", "target"),
    [
        ("17 + 96 - 91", (17, 96, 91), 22),
        ("(96 - 91) + 17 = 22", (17, 96, 91), 22),
        (r"\boxed{17 + 96 - 91}", (17, 96, 91), 22),
        (r"\boxed{17 + 96 - 91 = 22}", (17, 96, 91), 22),
        (r"$\left(96 - 91\right) + 17$", (17, 96, 91), 22),
        (r"\[ 96 − 91 + 17 \]", (17, 96, 91), 22),
        ("-91 + 96 + 17", (17, 96, 91), 22),
        ("96 - 91 + 17.", (17, 96, 91), 22),
        ("**17 + 96 — 91**", (17, 96, 91), 22),
        ("**4 * 5 / 2**", (4, 5, 2), 10),
        ("`96 ‑ 91 + 17`", (17, 96, 91), 22),
        ("96\u00a0-\u202f91 + 17", (17, 96, 91), 22),
        ("```\n17 + 96 - 91\n```", (17, 96, 91), 22),
        ("```python\n17 + 96 - 91\n```", (17, 96, 91), 22),
        (r"\boxed{4 \times 5 \div 2}", (4, 5, 2), 10),
        (r"4 \cdot 5 - 2", (4, 5, 2), 18),
        (r"\frac{4}{2} \times 5", (4, 5, 2), 10),
        ("8 / (3 - 8/3)", (8, 3, 8, 3), 24),  # 0.3333... in floats
        ("(1/3 + 2) * 3", (1, 3, 2, 3), 7),
        (r"\boxed{17 + 96 - 91", (17, 96, 91), 22),  # cut off
        (r"\[ \boxed{17 + 96 - 91 = 22", (17, 96, 91), 22),
        (r"\boxed{48 + 29 + 16>", (48, 29, 16), 93),  # LLaDA's
    ],
)
def test_right_answers_latex_signs_and_exact_fractions(answer, numbers, target):
    assert accuracy(answer, numbers, target) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "17 + 96",  # a number is missing
        "17 + 96 - 91 + 17 - 17",  # used more than once
        "22",
        "22 = 17 + 96 - 91",  # the expression is before the equals sign
        "96 - 91 = 5 + 17 = 22",
        "96 - 17 - 91",  # another value
        "17.0 + 96 - 91",
        "17 + 96 - 91 # 22",
        "1_7 + 96 - 91",
        "１７ + 96 - 91",
        "abs(17) + 96 - 91",
        "17 ** 1 + 96 - 91",
        "17 // 1",
        "17 + 96 - 91 if 1 else 0",
        "True * 17 + 96 - 91",
        "[17 + 96 - 91][0]",
        "17 + 96 - 91)",
        "17 + 96 - 91>",
        r"\boxed{17 + 96",
        "",
    ],
)
def test_wrong_answers(answer):
    assert accuracy(answer) == 0.0


def test_rewards_are_one_a_tenth_and_nothing():
    completions = ["<answer>17 + 96 - 91</answer>", "<answer>17 + 96</answer>", "<answer></answer>", "no answer"]
    assert countdown.expression_reward(completions, ground_truth=[[[17, 96, 91], 22]] * 4) == [1.0, 0.1, 0.0, 0.0]


TREES = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), Fraction(n), [n])),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
        lambda t: (f"({t[0][0]} {t[1]} {t[2][0]})", _apply(t[1], t[0][1], t[2][1]), t[0][2] + t[2][2])
    ),
    max_leaves=6,
)


def _apply(sign: str, a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None or (sign == "/" and b == 0):
        return None
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]


@given(TREES, st.randoms())
def test_evaluation_is_exact_and_demands_each_number_once(tree, random):
    text, value, numbers = tree
    shuffled = random.sample(numbers, len(numbers))
    assert countdown.evaluate(text, shuffled) == value
    assert countdown.evaluate(text, [*shuffled, 7]) is None
    assert countdown.evaluate(text, shuffled[1:]) is None
