"""`python -m d1 methods` prints the table's content."""

import re
from pathlib import Path

import pytest

from d1.__main__ import main, make_parser
from d1.rl.methods import METHODS


def printed(capsys, *words: str) -> list[list[str]]:
    """The cells of the table that a command prints."""
    main(make_parser().parse_args(["methods", *words]))
    lines = capsys.readouterr().out.splitlines()
    return [re.split("  +", line) for line in lines if "  " in line]


def test_every_method_has_a_row_with_its_values(capsys):
    header, *rows = printed(capsys)
    assert header == ["method", "estimator", "objective", "loss_type", "KL", "beta", "advantage", "mu", "paper"]
    assert [row[0] for row in rows] == [*METHODS]
    by_name = {row[0]: row[1:-1] for row in rows}
    assert by_name["espo"] == ["espo", "trl", "grpo", "k2_sequence", "0.001", "leave_one_out", "8"]
    assert by_name["bgpo"] == ["counts", "bgpo", "sum", "-", "0.0", "(r - mean) / std", "1"]
    assert by_name["d1"] == ["one_step", "trl", "bnpo", "k3", "0.04", "r - mean", "12"]


@pytest.mark.parametrize("name", ["espo", "just-grpo"])
def test_a_method_by_its_name_has_all_its_values(capsys, name):
    header, *rows = printed(capsys, name)
    method = METHODS[name]
    assert header == ["setting", "value"]
    assert dict(rows) == {f"--{setting}": str(value) for setting, value in {**method.values, **method.scale}.items()}


def test_a_method_of_a_users_own_file(capsys):
    file = Path(__file__).parents[2] / "my_method.py"
    header, *rows = printed(capsys, str(file))
    assert header == ["setting", "value"]
    assert ["--estimator", "half"] in rows
    assert ["--num_iterations", "2"] in rows


def test_an_unknown_name_is_an_error_with_those_there_are_and_the_nearest():
    with pytest.raises(ValueError, match=r"must be one of d1, .* got 'esop' \(the nearest is espo\)$"):
        main(make_parser().parse_args(["methods", "esop"]))
