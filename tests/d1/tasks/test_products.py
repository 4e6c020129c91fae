"""Products: the number of an answer, in the formats that models write."""

import pytest

from d1.tasks import products


@pytest.mark.parametrize(
    "answer",
    [
        *("170570", "170,570", "170 570", "170\u202f570", "**170570**", "$170570$", r"\boxed{170570}", "170570."),
        *("170570.0", "370 * 461 = 170570", r"370 \times 461 = 170{,}570", "The product is 170570.", r"\text{170570}"),
    ],
)
def test_the_product_in_other_formats(answer):
    assert products.extract(f"<answer>{answer}</answer>") == 170570


@pytest.mark.parametrize(
    "answer", ["17057", "170570 or 1", "-170570", "170570!", "170.570", "170 57", "370 * 461", "170570.5", "1e999", ""]
)
def test_no_product(answer):
    assert products.extract(f"<answer>{answer}</answer>") != 170570


def test_a_number_is_exact_or_none():
    assert products.extract(f"<answer>{'9' * 25}</answer>") == int("9" * 25)
    assert products.extract(f"<answer>{'9' * 25}.0</answer>") is None  # no float has so many digits
