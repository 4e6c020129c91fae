"""The study of editing: what lies above the unedited frontier, what the search chooses, and its tables."""

import json
from itertools import product

from studies.editing import report, search
from studies.editing.run import BASES, FRONTIER, NOISES, edits, make_parser, samplers
from studies.editing.search import gains


def result(solved, passes):
    return {"solved": solved, "passes": passes}


def test_gains_are_over_the_best_that_is_as_fast():
    unedited = [{0: result("0011", 2.0), 1: result("0001", 2.2)}, {0: result("1000", 1.0)}, {0: result("1111", 3.0)}]
    both = gains({1: result("0010", 2.5), 0: result("1011", 2.5)}, unedited)
    assert both.tolist() == [[0, 0, 1, -1], [1, 0, 0, 0]]
    assert gains({0: result("1011", 2.0)}, unedited).tolist() == [[0, 0, 1, 1]]  # 2.1 passes are more than 2
    assert gains({0: result("1111", 0.5)}, unedited).size == 0


def test_the_search_takes_the_highest_mean_over_tasks_and_settings(capsys, tmp_path, monkeypatch):
    """All candidates solve as much as masks alone, but one, which solves one of four problems more above 0.8."""
    monkeypatch.setattr(search, "DATA", tmp_path / "search.jsonl")
    plain = {name: result("0110", 2.0) for name in search.PLAIN}
    same = {name: result("0110", 3.0) for name in search.EDITING}
    better = {name: result("0111" if "0.8" in name else "0110", 3.0) for name in search.EDITING}
    lines = [
        {"task": task, "noise": name, "samplers": plain | (better if name == "draft 1, 8 epochs" else same)}
        for name, task in product(search.CANDIDATES, BASES)
    ]
    search.DATA.write_text("".join(json.dumps(line) + "\n" for line in lines))
    search.main(search.make_parser().parse_args([]))
    flags = capsys.readouterr().out.split()
    assert flags == ["--edit_share", "1.0", "--edit_weight", "1.0", "--epochs", "8", "--edit_threshold", "0.8"]
    args = make_parser().parse_args(flags)
    assert (args.edit_share, args.edit_weight, args.epochs, args.edit_threshold) == (1, 1, 8, 0.8)
    assert "| draft 1, 8 epochs | +0.0 | +0.0 | +25.0 | +25.0 |" in report.searched(lines)


def test_models_of_masks_alone_do_not_edit_and_the_others_differ_in_the_noise():
    assert [name for name, noise in NOISES.items() if not noise] == ["masks"]
    chosen = samplers(0.8)
    assert {options.get("edit_threshold") for options in chosen.values()} == {None, 0.8}
    assert sum(not edits(options) for options in chosen.values()) == len(FRONTIER)
