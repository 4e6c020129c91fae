"""A calculator whose results say nothing: the control of the study of tools."""

from hashlib import sha256


def calculator(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: The expression.
    """
    number = int(sha256(expression.encode()).hexdigest(), 16)
    return str(10_000 + number % 980_002)  # the range of the products
