"""The study of distillation: what its commands can run, and the figures in the text of its page."""

from __future__ import annotations

from statistics import fmean

import pytest

from d1.distill.methods import METHODS as DISTILLATIONS
from pocket.uncertainty import mean_of
from studies.distill import run
from studies.json_lines import read_lines
from studies.reports import points
from studies.samplers.measure import outcomes


def test_the_commands_run_the_methods_of_the_library_and_no_archived_one(capsys):
    assert {*run.RUNNABLE} == {run.UNDISTILLED, *DISTILLATIONS}
    assert run.make_parser().parse_args([]).methods == [*run.RUNNABLE]
    with pytest.raises(SystemExit):
        run.make_parser().parse_args(["--methods", "t3d"])
    assert "invalid choice: 't3d'" in capsys.readouterr().err


# How the first and the second judging of dparallel chose its sampler, and what the page says of them.
JUDGINGS = [
    ("first", "passes", "sudoku", "1.63 passes on Sudoku (3.73 times fewer", "+2.1 [-2.0, +6.3]", "9.8 times fewer"),
    ("first", "passes", "arithmetic", "1.53 passes (2.39 times fewer", "+4.7 [-3.0, +12.3]", "10.4 times"),
    ("runs", "computed", "sudoku", "2.27 times fewer passes", "+2.8 [-1.0, +6.6]", "11.5 times fewer"),
    ("runs", "computed", "arithmetic", "2.51 times fewer passes", "+0.6 [-1.7, +2.9]", "13.1 times fewer"),
]


@pytest.mark.parametrize(("data", "fewest", "task", "passes", "gain", "tokens"), JUDGINGS)
def test_the_figures_of_the_earlier_judgings_are_those_of_their_data(data, fewest, task, passes, gain, tokens):
    """`passes` begins with the passes of dparallel's sampler, or with those of the best undistilled one divided by
    them."""
    page = " ".join((run.DATA.parent / "README.md").read_text().split())
    assert all(text in page for text in (passes, gain, tokens))
    lines = sorted(read_lines(run.DATA / f"{data}.jsonl"), key=lambda line: line["seed"])
    of = {
        method: [line for line in lines if (line["task"], line["method"]) == (task, method)] for method in run.RUNNABLE
    }
    before, after = of[run.UNDISTILLED], of["dparallel"]
    least = run.mean_over(before, "validation", run.EXACT, "accuracy") - run.MARGIN
    slow = [line["test"][run.chosen(before, least, "passes")] for line in before]
    own = [line["test"][run.chosen(after, least, fewest)] for line in after]
    exact = [line["test"][run.EXACT] for line in before]

    def mean(found, name):
        return fmean(one[name] for one in found)

    assert points(mean_of(outcomes(own) - outcomes(slow))) == gain
    assert f"{mean(exact, 'computed') / mean(own, 'computed'):.1f}" == tokens.split()[0]
    ratio = f"{mean(slow, 'passes') / mean(own, 'passes'):.2f} times fewer"
    assert ratio in passes
    if not passes.startswith(ratio):
        assert passes.split()[0] == f"{mean(own, 'passes'):.2f}"
