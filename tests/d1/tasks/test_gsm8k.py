"""GSM8K: reading numbers, and each reward, compared with values computed by hand."""

import json

import pytest

from d1.tasks import gsm8k

GOOD = "<reasoning>\n3 + 4 = 7\n16 - 7 = 9\n</reasoning>\n<answer>\n9\n</answer>"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        ("1,234", 1234),  # d1 read 1
        ("$1,234,567.50", 1234567.5),
        (r"385\,000", 385000),
        ("1{,}234", 1234),
        ("-3", -3),  # d1 read 3, or nothing
        ("−3", -3),
        ("-$10", -10),
        (r"\(-10\)", -10),
        ("10 - 13 = -3", -3),
        (r"9 \times 2 = 18", 18),
        (r"120\text{ minutes}", 120),
        (r"5 \text{ cm}^2", 5),
        (r"60\%", 60),
        ("60%", 60),
        (r"\$ 250", 250),
        ("18 eggs for 2 days", 18),
        ("in 2 days she sells 18 eggs.", 18),
        ("3/4", 0.75),
        (r"\frac{3}{4}", 0.75),
        (r"-\dfrac{3}{4}", -0.75),
        ("2 1/2", 2.5),
        (r"2\frac{1}{2}", 2.5),
        (".5", 0.5),
        ("1e3", 1000),
        (r"\boxed{28", 28),  # cut off
        ("1e999", None),
        ("1/0", None),
        ("9" * 100_000, None),
        ("１２３", None),  # digits, but not ASCII
        ("²", None),
        ("none", None),
        ("", None),
    ],
)
def test_numbers(text, number):
    assert gsm8k.number_in(text) == number
    assert gsm8k.extract(f"<reasoning>7</reasoning><answer>{text}</answer>") == number


def test_golds_with_commas_and_signs_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "x\\n#### 1,234"}\n{"question": "b", "answer": "x\\n#### -10"}\n')
    assert gsm8k.load_rows("test", str(path))["ground_truth"][:] == [1234.0, -10.0]


def test_a_missing_gold_is_refused_rather_than_counted():
    with pytest.raises(ValueError, match="the ground truth must be a number, got None"):
        gsm8k.score("<answer>3</answer>", {"question": "", "ground_truth": None})


@pytest.mark.parametrize(
    ("text", "tags", "soft", "strict", "integer", "correct"),
    [
        (GOOD, 0.5, 0.5, 0.5, 0.5, 2.0),  # several lines of reasoning: d1 could not give both soft and strict
        (GOOD.replace("\n9\n", "\n\\boxed{9}\n"), 0.5, 0.5, 0.5, 0.5, 2.0),
        (GOOD + "\n", 0.5, 0.5, 0.5, 0.5, 2.0),
        (GOOD + "\nI am sure.", 0.49, 0.5, 0.0, 0.5, 2.0),
        (GOOD.replace("\n", " "), 0.5, 0.5, 0.0, 0.5, 2.0),
        (GOOD.replace("\n9\n", "\n-9\n"), 0.5, 0.5, 0.5, 0.5, 0.0),
        (GOOD.replace("\n9\n", "\n9.0\n"), 0.5, 0.5, 0.5, 0.0, 2.0),
        (GOOD.replace("\n9\n", "\n9 eggs\n"), 0.5, 0.5, 0.5, 0.0, 2.0),
        (GOOD.replace("<reasoning>", "<think>"), 0.375, 0.0, 0.0, 0.5, 2.0),
        (GOOD + "<answer>", 0.367, 0.5, 0.0, 0.0, 0.0),  # two opening tags, eight characters too many
        ("the answer is \\boxed{9}", 0.0, 0.0, 0.0, 0.5, 2.0),
        ("9", 0.0, 0.0, 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0, 0.0, 0.0),
        (GOOD + "x" * 10_000, 0.0, 0.5, 0.0, 0.5, 2.0),  # never below zero
    ],
)
def test_rewards_by_hand(text, tags, soft, strict, integer, correct):
    paid = [reward([text], ground_truth=[9.0])[0] for reward in gsm8k.REWARDS]
    assert paid == pytest.approx([tags, soft, strict, integer, correct], abs=1e-12)


def test_a_unicode_digit_is_no_integer():
    assert gsm8k.integer_reward(["<answer>²</answer>", "<answer>١</answer>", "<answer>1,234</answer>"]) == [0, 0, 0.5]


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        ("18", 18),
        (" 1,234", 1234),
        ("1,234,567.50", 1234567.5),
        ("70,000", 70000),
        ("$5.00", 5),
        (r"\$250", 250),
        ("-$10", -10),
        ("−3", -3),
        ("60%", 60),
        (r"60\%", 60),
        ("5.", 5),
        ("5%.", 5),
        ("0.5", 0.5),
        (".5", 0.5),
        ("3/4", 0.75),
        ("2 1/2", 2.5),
        (r"\frac{3}{4}", 0.75),
        ("1e3", 1000),
        ("3,14", None),  # was 3
        ("5 or 6", None),  # was 5
        ("x - 3", None),  # was -3
        ("0,500", None),  # was 500
        ("1234,567", None),
        ("1,2345", None),
        ("2x", None),
        ("5 million", None),
        ("18 eggs", None),
        ("3+4", None),
        ("9+9=18", None),
        ("± 3", None),
        ("3^2", None),
        ("nan", None),
        ("1e999", None),
        ("1/0", None),
        ("", None),
    ],
)
def test_a_gold_is_one_number_and_nothing_else(gold, number, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": f"So.\n#### {gold}"}))
    if number is not None:
        assert gsm8k.load_rows("test", str(path))["ground_truth"][:] == [number]
        return
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1: answer must end with '#### number', got "):
        gsm8k.load_rows("test", str(path))


def test_the_arithmetic_and_thousands_of_other_golds_read_as_before():
    golds = [
        *map(str, range(0, 3000, 7)),
        *(f"{n:,}" for n in range(1000, 3_000_000, 99_991)),
        *("-1", "-2.5", "$3", "4.75"),
    ]
    assert [gsm8k.gold_number(gold) for gold in golds] == [gsm8k.number_in(gold) for gold in golds]
