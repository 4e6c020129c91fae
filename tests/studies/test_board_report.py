"""The leaderboard's final table: the bootstrap against its closed-form moments, the order of methods, a whole page."""

import json

import numpy as np
import pytest
from scipy.stats import spearmanr

from studies.json_lines import append_line
from studies.leaderboard.figures import draw_places
from studies.leaderboard.plan import SETUPS, START, Protocol, file_of, written_values
from studies.leaderboard.report import write
from studies.leaderboard.tables import (
    Table,
    duels,
    interval,
    not_worse,
    order,
    order_kept,
    p_value,
    rank_correlations,
    resampled_means,
    tables_of,
)


def second_moments(scores):
    """E of the product of two methods' resampled means: weights of seeds are multinomial, those of problems too."""
    _, seeds, problems = scores.shape
    of_seeds = np.full((seeds, seeds), 1 - 1 / seeds) + np.eye(seeds)
    of_problems = np.full((problems, problems), 1 - 1 / problems) + np.eye(problems)
    return np.einsum("asp,btq,st,pq->ab", scores, scores, of_seeds, of_problems) / (seeds * problems) ** 2


def test_draws_have_the_moments_of_two_independent_multinomials():
    generator = np.random.default_rng(0)
    scores = (generator.uniform(size=(3, 4, 30)) < generator.uniform(size=(1, 4, 30))).astype(int)
    draws = resampled_means(scores, draws=40_000)
    assert draws.mean(1) == pytest.approx(scores.mean((1, 2)), abs=2e-3)
    expected = second_moments(scores) - np.outer(scores.mean((1, 2)), scores.mean((1, 2)))
    assert np.cov(draws) == pytest.approx(expected, abs=1.5e-4)  # the smallest is 1.2e-3


def test_a_method_never_differs_from_its_copy_and_pairing_cancels_what_both_share():
    scores = np.random.default_rng(1).integers(0, 2, size=(1, 8, 50)).repeat(2, axis=0)
    a, b = resampled_means(scores, draws=100)
    assert (a == b).all()
    assert p_value(a - b) == 1.0
    assert interval(0.0, a - b) == (0.0, 0.0, 0.0)


def test_p_values_and_margins_are_shares_of_draws():
    draws = np.arange(-20, 980) / 1000 + 1e-9  # 20 of 1,000 are below 0
    assert p_value(draws) == pytest.approx(2 * 21 / 1001)
    assert p_value(-draws) == p_value(draws)
    assert interval(0.5, draws)[1:] == pytest.approx(np.quantile(draws, [0.025, 0.975]))
    assert not_worse(np.linspace(-0.03, 0.17, 1001))  # its 5% quantile is -0.02 + 0.01
    assert not not_worse(np.linspace(-0.031, 0.169, 1001) - 0.01)


def test_ranks_and_ties_follow_the_separated_pairs():
    """a and b are tied, b and c are tied, a is above c; d is below all."""
    spread = np.random.default_rng(2).normal(size=(4, 10_000)) * 0.01
    means = {"c": 0.66, "d": 0.2, "a": 0.72, "b": 0.69}
    draws = {name: value + one for (name, value), one in zip(means.items(), spread, strict=True)}
    found = order(means, draws)
    assert found.ranks == {"a": (1, 2), "b": (1, 3), "c": (2, 3), "d": (4, 4)}
    assert found.ties == [{"a", "b"}, {"b", "c"}, {"d"}]
    assert len(found.p_values) == 6
    assert all(pair == tuple(sorted(pair)) for pair in found.p_values)  # the better one first


def test_rank_correlations_are_spearmans():
    a, b = np.random.default_rng(4).normal(size=(2, 6, 50))
    expected = [spearmanr(x, y).statistic for x, y in zip(a.T, b.T, strict=True)]
    assert rank_correlations(a, b) == pytest.approx(expected, abs=1e-12)


SMALL = Protocol(
    methods=("d1", "tracerl", "wd1"), setups=(SETUPS["sudoku-base"],), budgets=(100, 200), seeds=4, few=2, most=2
)


def fill(data, chances):
    """Lines of a whole board in which methods solve problems with these chances; the search is there, too."""
    generator = np.random.default_rng(3)
    hard = generator.uniform(size=200)
    results = {}
    while todo := SMALL.missing(results):
        for run in todo:
            right = (generator.uniform(size=200) * hard < chances[run.method] ** 2).astype(int)
            text = "".join(map(str, right))
            line = {
                **run.__dict__,
                "values": written_values(run.method),
                "steps": 5,
                "rollouts": 2,
                "processor_seconds": 1.0,
            }
            line |= {"overshoot": 2, "kl": 0.1, "diverged": False, "curve": []}
            field = "validation" if run.stage == "tuning" else "sealed"
            peak = f"{'1' * round(100 * chances[run.method] - 10 * (run.learning_rate != 3e-4)):0<200}"
            line[field] = {"exact": peak if run.stage == "tuning" else text, "own": text}
            results[run] = line
            append_line(file_of(data, run), line)
    return results


def test_the_order_of_two_tables_is_compared_over_the_methods_and_seeds_of_both():
    generator = np.random.default_rng(5)

    def table(chances, seeds):
        def lines(chance):
            texts = ["".join(map(str, (generator.uniform(size=300) < chance).astype(int))) for _ in range(seeds)]
            return {seed: {"sealed": {"exact": text}} for seed, text in enumerate(texts)}

        runs = {name: lines(chance) for name, chance in chances.items()}
        return Table(SETUPS["sudoku-sft"], 1, runs, dict.fromkeys(runs), None, {})

    large = table({START: 0.1, "a": 0.2, "b": 0.5, "c": 0.8}, 3)
    for chances, expected in (((0.3, 0.6, 0.9), 1), ((0.9, 0.6, 0.3), -1), ((0.6, 0.3, 0.9), 0.5)):
        small = table({"other": 0.9, **dict(zip("abc", chances, strict=True))}, 8)
        assert order_kept(small, large) == pytest.approx((expected, expected, expected))


def test_a_candidate_is_ranked_once_every_run_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{tables_of.__module__}.CANDIDATES", {"tracerl": "tracerl"})
    results = fill(tmp_path / "data", {START: 0.3, "d1": 0.4, "tracerl": 0.8, "wd1": 0.1})
    assert all("tracerl" in table.order.ranks for table in tables_of(results, SMALL))
    del results[next(run for run in results if (run.stage, run.budget, run.seed) == ("final", 100, 3))]
    (large,) = (table for table in tables_of(results, SMALL) if table.budget == 200)
    assert {*large.order.ranks} == {"d1"}
    assert "tracerl" in large.places
    assert not any("tracerl" in tie for tie in large.order.ties)


@pytest.mark.parametrize(
    ("candidate", "other", "verdict"),
    [
        ("tracerl", "d1", "tops the board: it has such a difference to the other in 3 of 3 rows"),
        ("d1", "tracerl", "does not top the board: it has such a difference to the other in 1 of 3 rows"),
    ],
)
def test_a_candidate_tops_the_board_if_it_wins_every_duel(tmp_path, monkeypatch, candidate, other, verdict):
    monkeypatch.setattr(f"{tables_of.__module__}.CANDIDATES", {candidate: candidate})
    results = fill(tmp_path / "data", {START: 0.3, "d1": 0.4, "tracerl": 0.8, "wd1": 0.1})

    def solved(name, budget, seeds):
        of = [run for run in results if (run.stage, run.method, run.budget) == ("final", name, budget)]
        return np.mean([results[run]["sealed"]["exact"].count("1") / 200 for run in of if run.seed < seeds])

    found = duels(tables_of(results, SMALL))
    assert [(one.table.budget, one.other) for one in found] == [(200, other), (100, other), (100, "wd1")]
    for one, seeds in zip(found, (4, 4, 2), strict=True):
        budget = one.table.budget
        difference = solved(candidate, budget, seeds) - solved(one.other, budget, seeds)
        assert one.difference.value == pytest.approx(difference, abs=1e-12)
        assert one.p_value == pytest.approx(3 * 2 / 10_001)  # no draw has the other sign
        assert one.won == (difference > 0)
    write(tmp_path / "data", tmp_path / "page.md", SMALL)
    assert f"{candidate} {verdict}" in (tmp_path / "page.md").read_text()


def test_a_page_from_lines_alone(tmp_path):
    results = fill(tmp_path / "data", {START: 0.3, "d1": 0.4, "tracerl": 0.8, "wd1": 0.1})
    page = tmp_path / "page.md"
    write(tmp_path / "data", page, SMALL)
    text = page.read_text()
    assert "not complete" not in text
    for budget in SMALL.budgets:
        lines = [
            line.split(" | ") for line in text.split(f"base, {budget:,} tokens")[1].split("\n\n")[1].splitlines()[2:]
        ]
        names = [line[0].strip("| ") for line in lines]
        assert {*names} == {"tracerl", "d1", "the start itself", *["wd1"] * (budget == SMALL.budgets[0])}
        assert names[0] == "tracerl"
        found = dict(zip(names, lines, strict=True))
        right = [
            results[run]["sealed"]["exact"].count("1") / 200
            for run in results
            if (run.stage, run.method, run.budget) == ("final", "tracerl", budget)
        ]
        assert len(right) == 4
        assert float(found["tracerl"][2].split()[0]) == pytest.approx(100 * np.mean(right), abs=0.051)
        assert found["tracerl"][3:5] == ["1", "a"]
        assert found["d1"][1:4:2] == ["4", "2"]
        assert found.get("wd1", ["", "2", "", "behind"])[1:4:2] == ["2", "behind"]
        assert found["d1"][5] == ""
    assert "3e-04" not in text
    assert "0.0003, 1: " in text
    assert "| d1 | 3e-06 | " in text  # its authors' rate
    picture = page.with_suffix(".svg")
    assert "hollow" not in picture.read_text()  # but in the picture of the smaller budget, where wd1 has no rank
    before = page.read_bytes(), picture.read_bytes()
    write(tmp_path / "data", page, SMALL)
    assert (page.read_bytes(), picture.read_bytes()) == before
    draw_places([table for table in tables_of(results, SMALL) if table.budget == SMALL.budgets[0]], picture)
    assert "; hollow: no rank" in picture.read_text()
    file = file_of(tmp_path / "data", next(run for run in results if run.stage == "final"))
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if json.loads(line)["seed"] != 3) + "\n")
    write(tmp_path / "data", page, SMALL)
    assert "**The board is not complete: " in page.read_text()
    for row in page.read_text().split("base, 200 tokens")[1].split("\n\n")[1].splitlines()[2:4]:
        cells = row.strip("| ").split(" | ")
        assert cells[1] == "2"
        assert cells[-1] == cells[2].split()[0]  # both samplers solved the same, so on the same seeds they are equal
