"""Several completions per problem: the files, resuming, and pass@k of the parser."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from d1.eval import evaluate
from d1.eval.completions import Journal
from d1.eval.files import read_setups
from d1.eval.scores import compare, score_setup
from d1.show.uncertainty import wilson_interval

SETTINGS: dict[str, Any] = {"gen_length": 8, "block_length": 4, "batch_size": 3, "temperature": 1.0, "limit": 3}
RIGHT = [[True, False, False, True, False], [False] * 5, [True] * 5, [False, False, False, False, True]]


def items_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*_generations.json")
    items = json.loads(path.read_text())["generations"]
    return [{name: value for name, value in item.items() if name != "seconds"} for item in items]


def test_each_sample_has_its_own_draws_and_the_first_is_that_of_a_run_with_one(tiny_model_dir, tmp_path):
    several, one = tmp_path / "several", tmp_path / "one"
    evaluate(tiny_model_dir, "sudoku", output_dir=several, num_samples=3, **SETTINGS)
    evaluate(tiny_model_dir, "sudoku", output_dir=one, **SETTINGS)
    items, alone = items_of(several), items_of(one)
    assert [item["sample"] for item in items] == [0, 1, 2] * 3
    assert [item["index"] for item in items[::3]] == [item["index"] for item in alone]
    assert [item["generations"] for item in items[::3]] == [item["generations"] for item in alone]
    assert len({item["generations"] for item in items}) == 9
    assert not any("sample" in item for item in alone)


def test_a_killed_run_continues_with_the_same_samples(tiny_model_dir, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    evaluate(tiny_model_dir, "sudoku", output_dir=whole, num_samples=3, **SETTINGS)
    append, written = Journal.append, []

    def kill(journal: Journal, entry: dict[str, Any]) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(entry)
        append(journal, entry)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", kill)
        with pytest.raises(KeyboardInterrupt):
            evaluate(tiny_model_dir, "sudoku", output_dir=broken, num_samples=3, **SETTINGS)
    for journal in (*broken.glob("*.partial"),):
        assert sum(len(path.read_text().splitlines()) for path in journal.glob("rank_*.jsonl")) == 4
    with pytest.raises(ValueError, match="num_samples: 3 there, 2 now"):
        evaluate(tiny_model_dir, "sudoku", output_dir=broken, num_samples=2, **SETTINGS)
    evaluate(tiny_model_dir, "sudoku", output_dir=broken, num_samples=3, **SETTINGS)
    assert items_of(broken) == items_of(whole)


def test_greedy_samples_are_refused(tiny_model_dir, tmp_path):
    with pytest.raises(ValueError, match="--num_samples 2 needs --temperature above 0"):
        evaluate(tiny_model_dir, "sudoku", output_dir=tmp_path, num_samples=2)


@pytest.fixture
def scored(tmp_path, write_sudoku):
    """A setup of four puzzles with five samples each, right as `RIGHT` says."""
    path = tmp_path / "sudoku_m_8_4_0_generations.json"
    write_sudoku(path, 1, 4)
    content = json.loads(path.read_text())
    solved, wrong = (content["generations"][i]["text"] for i in (0, 1))
    content["generations"] = [
        item | {"sample": sample, "text": solved if right else wrong}
        for item, rights in zip(content["generations"], RIGHT, strict=True)
        for sample, right in enumerate(rights)
    ]
    path.write_text(json.dumps(content | {"expected_problems": 20}))
    return score_setup(read_setups(tmp_path)[0], "strict", {})


def test_pass_at_k_is_the_mean_share_of_subsets_with_a_right_sample(scored):
    row, details = scored
    assert row.complete, row.errors
    assert (row.n, len(details), row.accuracy) == (20, 20, pytest.approx(40))
    assert list(row.pass_at) == ["pass@1", "pass@2", "pass@5"]
    for k in (1, 2, 5):
        expected = fmean(fmean(any(subset) for subset in combinations(rights, k)) for rights in RIGHT)
        low, high = wilson_interval(expected, 4)  # over problems: a problem's samples are no new problems
        assert row.pass_at[f"pass@{k}"] == pytest.approx((100 * expected, 100 * low, 100 * high))
    assert (row.ci_low, row.ci_high) == pytest.approx(row.pass_at["pass@1"][1:])


def test_comparisons_are_by_the_mean_of_a_problems_samples(scored):
    _, details = scored
    result = compare("a", details, "b", details)
    assert (result["shared"], result["accuracy_a"], result["difference"]) == (4, pytest.approx(40), 0)
