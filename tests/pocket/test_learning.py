"""The runs that show whether new methods learn: their commands, their table, and the task of IGPO."""

from pathlib import Path

import pytest

from d1.models import load_tokenizer
from d1.rl.methods import METHODS
from d1.tasks import load_task
from pocket import careful_arithmetic, learning
from pocket.recipes import ROOT


def test_the_table_of_the_page_is_that_of_the_data():
    assert learning.table() in (ROOT / "pocket" / "RESULTS.md").read_text()


def test_every_method_has_a_run_and_two_evaluations_and_its_flags_are_settings_of_rl():
    phases = learning.phases_of([*learning.RUNS])
    assert {*learning.RUNS} <= {*METHODS}
    assert [phase.name for phase in phases if phase.needs] == [f"{name}-after-evaluated" for name in learning.RUNS]
    for phase in phases:
        assert (phase.folder / phase.command[1]).exists()


@pytest.mark.parametrize(("gained", "lost"), [(30, 10), (5, 0), (0, 0)])
def test_the_interval_of_a_paired_difference_is_that_of_the_mean_of_changes(gained, lost):
    n = 100
    changes = [1] * gained + [-1] * lost + [0] * (n - gained - lost)
    mean = sum(changes) / n
    half = 1.959964 * (sum((change - mean) ** 2 for change in changes) / n / n) ** 0.5
    expected = f"{100 * mean:+.1f} [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"
    assert learning.difference({"problems": n, "gained": gained, "lost": lost}) == expected


def test_solutions_of_the_careful_task_are_right_and_in_the_words_of_the_pocket_model():
    tokenizer = load_tokenizer(ROOT / "pocket" / "arithmetic_base")
    task = load_task(str(Path(careful_arithmetic.__file__)))
    for row in careful_arithmetic.load_rows("train").select(range(20)):
        text = careful_arithmetic.demonstrate(row)
        assert task.score(text, row)["accuracy"] == 1
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= 40
