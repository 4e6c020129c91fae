"""GSM8K: reading numbers, and each reward, compared with values computed by hand."""

import pytest

from d1.tasks import gsm8k

GOOD = "<reasoning>\n3 + 4 = 7\n16 - 7 = 9\n</reasoning>\n<answer>\n9\n</answer>"
READ = {  # number -> texts that are it, as the gold of a row and in an answer
    18: ("18",),
    1234: ("1,234", " 1,234", "1{,}234"),  # d1 read 1
    1234567.5: ("1,234,567.50", "$1,234,567.50"),
    385000: ("385,000", r"385\,000"),
    250: (r"\$ 250", r"\$250", "$250.00"),
    -3: ("-3", "−3", "− 3", "-3."),  # d1 read 3, or nothing
    -10: ("-10", "-$10"),
    60: ("60%", r"60\%", "60%.", r"60\%."),
    0.75: ("3/4", r"\frac{3}{4}", ".75"),
    -0.75: (r"-\dfrac{3}{4}",),
    2.5: ("2 1/2", r"2\frac{1}{2}"),
    1000: ("1e3",),
    123: ("１２３",),
    70000: ("70 000", "70\u202f000", "70\u00a0000", "70\u2009000", "70'000", "70’000", "70~000"),
    -0.5: ("-1/2", r"-\frac12", r"–\dfrac{1}2"),
    -7: ("–7", "—7", "‑7", "- 7", "－7"),
    None: ("1e999", "1/0", "9" * 100_000, "²", "٣", "none", "nan", ""),  # not finite, or digits of other scripts
}
ANSWERS = {  # number -> texts from which an answer is read, but that are no gold: a gold is one number and nothing else
    18: (
        "Total - $18",
        "Step 1: 9 + 9\n- 18 eggs",
        r"9 \times 2 = 18",
        "18 eggs for 2 days",
        "in 2 days she sells 18 eggs.",
        "9+9=18",
        r"with \frac{\pi}2 it is 18",
        r"with \frac ab it is 18",
    ),
    -3: ("it is - 3", "a loss of - 3", "it equals - 3", "10 - 13 = -3", "Answer: –3", "the loss is –3"),
    7: ("The answer – 7", "**7**", "*7*", "**$7**", "`7`", r"\mathbf{7}", "7 or 7.0"),
    -10: (r"\(-10\)",),
    70000: (r"70\ 000", r"70\;000"),
    120: (r"120\text{ minutes}",),
    5: (r"5 \text{ cm}^2", "5 cm²", "5 apples and 6 pears", "5 (five)"),
    5_000_000: ("5 million", r"5\text{ million}"),
    28: (r"\boxed{28",),  # cut off
    2: ("2:00 pm",),
    500: ("0,500",),
    1234567: ("1234,567",),
    None: (  # more than one number, or an expression
        *("5 or 6", "5 apples or 6 apples", "5-6", "5–6", "5 to 6", "5, 6", "5 and 6", "5/6 or 6/5", "5\n6", "5 - 6"),
        *("5!", "5^2", "5**2", "(5)^2", "5²", "3+4", r"3 \times 4"),
        *("5 dollars and 50 cents", "5:30", r"\log 5"),
        *(r"\frac{3+5}{2}", r"\frac{x}{2}", "She earns 2 * 9", "She has 3 + 3", "2 x 9"),
        *("3 - x", "x - 3", "x + 3", "2x", "2n", r"\sqrt{16}"),
        *("± 3", r"\pm 3", "5 ± 1", "3,14", "1,2345", "1.234.567", "12_7", "1_000"),
    ),
}


def pairs(table):
    return [pytest.param(number, text, id=text[:20]) for number, texts in table.items() for text in texts]


@pytest.mark.parametrize(("number", "text"), [*pairs(READ), *pairs(ANSWERS)])
def test_numbers(number, text):
    assert gsm8k.number_in(text) == number
    assert gsm8k.extract(f"<reasoning>7</reasoning><answer>{text}</answer>") == number
    assert gsm8k.gold_number(text) == (number if text in READ.get(number, ()) else None)


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


@pytest.mark.parametrize(
    ("answer", "paid"),
    [("²", 0), ("١", 0), ("1,234", 0.5), ("–7", 0.5), ("70 000", 0.5), ("70\u202f000", 0.5), ("7.5", 0), ("7 eggs", 0)],
)
def test_what_is_an_integer_and_nothing_else(answer, paid):
    assert gsm8k.integer_reward([f"<answer>{answer}</answer>"]) == [paid]
