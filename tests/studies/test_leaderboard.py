"""The leaderboard: the protocol's rules, what a run is, its data, and a miniature that is killed and continues."""

import csv
import hashlib
import itertools
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from d1.eval.run import make_parser as eval_parser
from d1.rl.methods import METHODS
from d1.rl.train import make_parser
from d1.tasks import load_task
from dataset.make_problems import main as make_problems
from dataset.make_problems import make_parser as problems_parser
from pocket.recipes import RECIPES
from studies.json_lines import append_line, read_lines
from studies.leaderboard import plan
from studies.leaderboard.plan import (
    FULL,
    LADDER,
    OWN,
    QUICK,
    SETUPS,
    START,
    TASKS,
    Choice,
    Protocol,
    Run,
    file_of,
    own_sampler,
    read_results,
    updates_of,
    written_values,
)
from studies.leaderboard.run import SEALED, commit, logs_of
from tests import forks

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "studies" / "leaderboard"
PROTOCOL = (BOARD / "PROTOCOL.md").read_text()
SUDOKU = SETUPS["sudoku-sft"]


# --- Sealed problems --------------------------------------------------------------------------------------------------


def problem_key(task, row):
    """The keys by which the splits of a task are disjoint."""
    if task == "sudoku":
        return row["Solution"]
    if task == "pocket_countdown":
        return tuple(sorted(map(int, row["input"].split(","))))
    lines = [line.split() for line in row["answer"].splitlines()[:3]]
    return lines[0][0], *sorted(line[2] for line in lines)


def rows_of(path):
    if path.suffix == ".csv":
        with open(path, newline="") as file:
            return list(csv.DictReader(file))
    return read_lines(path)


@pytest.mark.parametrize("task", [row.dataset for row in TASKS.values()])
def test_sealed_problems_are_those_of_the_protocol_and_in_no_other_split(task, tmp_path):
    path = SEALED / f"{task}.jsonl"
    assert f"`{path.name}` | {len(rows_of(path)):,} |" in PROTOCOL
    assert hashlib.sha256(path.read_bytes()).hexdigest() in PROTOCOL
    sealed = rows_of(path)
    splits = {
        split: rows_of(next((ROOT / "dataset").glob(f"{task}_{split}.*"))) for split in ("train", "validation", "test")
    }
    keys = {split: {problem_key(task, row) for row in rows} for split, rows in splits.items()}
    own = {problem_key(task, row) for row in sealed}
    assert len({json.dumps(row) for row in sealed}) == len(sealed)
    assert not own & (keys["train"] | keys["validation"])
    if task == "sudoku":  # all grids belong to a split: other puzzles on those of the test split
        assert own == keys["test"]
        assert not {row["Puzzle"] for row in sealed} & {row["Puzzle"] for row in splits["test"]}
    elif task == "pocket_countdown":  # all sets of numbers belong to a split: the test split itself
        assert sealed == splits["test"]
    else:
        assert not own & keys["test"]
    assert len(load_task(task).load_rows("test", str(path))) == len(sealed)
    make_problems(problems_parser().parse_args(["--sealed", "--output_dir", str(tmp_path)]))
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_one_module_alone_reads_sealed_problems_and_one_their_outcomes():
    studies = {str(path.relative_to(BOARD.parent)): path.read_text() for path in BOARD.parent.rglob("*.py")}
    mentions = {name for name, text in studies.items() if "sealed" in text.lower()}
    own = ("figures", "plan", "report", "run", "tables", "texts")
    assert mentions == {f"leaderboard/{name}.py" for name in own}
    assert [name for name, text in studies.items() if "final_table=True" in text] == ["leaderboard/report.py"]
    assert "SEALED" not in (BOARD / "plan.py").read_text()
    fields = [line.strip() for line in (BOARD / "plan.py").read_text().splitlines() if '"sealed"' in line]
    assert fields == ['line.pop("sealed", None)']


# --- What a run is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "task"), zip(METHODS, itertools.cycle(TASKS), strict=False))
def test_each_run_is_its_method_at_the_budget_rate_and_mu_that_it_names(method, task, tmp_path):
    recipe, length, values = RECIPES[task], TASKS[task].length, METHODS[method].values
    run = Run("final", task, "sft", method, 1, 3e-5, 2, 5000)
    flags = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), *run.settings(), "--output_dir", str(tmp_path)]
    config, _ = make_parser().parse_args_and_config([*flags, "--model_path", str(ROOT / "pocket" / recipe.base)])
    expected = values | {
        "num_iterations": 2,
        "diffusion_steps": values.get("diffusion_steps", length // 2) or length,
        "block_length": values.get("block_length", 8),
        "learning_rate": 3e-5,
        "lr_scheduler_kwargs": {},
        "warmup_steps": 0,
        "num_generations": 8,
        "max_compute_tokens": 5000,
        "seed": 1,
        "dataset": recipe.task,
        "max_prompt_length": recipe.prompt_tokens,
        "max_completion_length": recipe.lengths[0],
        "weight_decay": 0.1,
        "adam_beta2": 0.99,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.lr_scheduler_type.value == "linear"
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert config.max_steps >= 5000  # a step takes a token at least
    assert str(ROOT) not in " ".join(run.settings())


@pytest.mark.parametrize("method", METHODS)
def test_the_own_sampler_is_that_of_the_methods_rollouts(method):
    values, length = METHODS[method].values, TASKS["sudoku"].length
    flags = own_sampler(method, length)
    common = ["--model_path", "m", "--dataset", "sudoku", "--gen_length", str(length), "--block_length", "8"]
    judge, own = (vars(eval_parser().parse_args([*common, *more])) for more in ([], flags or []))
    differing = {name: own[name] for name in own if own[name] != judge[name]}
    assert (flags is None) == (not differing)
    for name in OWN:
        if name in values:
            assert own[name] == (length if values[name] is None and name == "diffusion_steps" else values[name])
    assert differing.keys() <= {*OWN}
    assert own["temperature"] == 0


def test_the_updates_that_are_searched_are_those_a_row_can_have():
    assert {updates_of(method) for method in METHODS} == {(1,), (1, 4), (2, 4)}
    for method, row in METHODS.items():
        assert (updates_of(method) == (1,)) == (row.values["num_iterations"] == 1)
        assert (updates_of(method) == (2, 4)) == row.values["split_views"]


# --- The search -------------------------------------------------------------------------------------------------------


def searched(score, method="d1", **changes):
    """The search's result if (rate, mu, seed) scores `score`: the cells tried with each seed, and its choice."""
    protocol, results = replace(FULL, methods=(method,), setups=(SUDOKU,), **changes), {}
    for _ in range(50):
        runs, choice = protocol.tuning(results, SUDOKU, method)
        assert (not runs) == (choice is not None)
        if choice:
            tried = {
                seed: {(r.learning_rate, r.num_iterations) for r in results if r.seed == seed} for seed in (100, 101)
            }
            return tried, choice
        for run in runs:
            assert (run.stage, run.budget, run.start, run not in results) == ("tuning", 1_500_000, "sft", True)
            right = round(1000 * score(run.learning_rate, run.num_iterations, run.seed))
            results[run] = {"validation": {"exact": "1" * right + "0" * (1000 - right)}}
    raise AssertionError("the search does not end")


def peak(at, slope=0.05):
    """A score that falls by `slope` for each step on the ladder of rates from `at`."""
    return lambda rate: 0.7 - slope * abs(LADDER.index(rate) - LADDER.index(at))


def test_a_peak_inside_the_grid_needs_no_other_rate():
    tried, choice = searched(lambda rate, mu, seed: peak(1e-4)(rate) - 0.2 * (mu == 4))
    assert tried[100] == {(rate, mu) for rate in (3e-5, 1e-4, 3e-4) for mu in (1, 4)}
    assert tried[101] == {(1e-4, 1)}  # the others are more than 4 points behind
    assert choice == Choice(1e-4, 1, 0.7)


@pytest.mark.parametrize(("at", "last"), [(1e-5, 3e-6), (3e-3, 1e-2), (1e-6, 1e-6), (1e-2, 1e-2)])
def test_rates_are_extended_until_the_best_is_inside_or_at_the_limits(at, last):
    tried, choice = searched(lambda rate, mu, seed: peak(at)(rate), method="just-grpo")
    rates = sorted(rate for rate, _ in tried[100])
    assert choice[:2] == (at, 1)
    assert rates == [rate for rate in LADDER if min(last, 3e-5) <= rate <= max(last, 3e-4)]


def test_a_mu_is_extended_unless_it_is_far_behind():
    def score(gap):
        return lambda rate, mu, seed: peak(1e-4)(rate) if mu == 4 else peak(1e-5)(rate) - gap

    for gap, lowest in ((0.02, 3e-6), (0.25, 3e-5)):  # of mu 1 the best of the grid is 7 or 30 points behind
        tried, choice = searched(score(gap), far=0.2)
        assert choice[:2] == (1e-4, 4)
        assert min(rate for rate, mu in tried[100] if mu == 1) == lowest


def test_two_seeds_decide_among_the_near_and_extend_once_more():
    def score(rate, mu, seed):
        if seed == 101 and rate == 1e-4:
            return 0.75
        return {1e-4: 0.68, 3e-4: 0.7, 1e-3: 0.5, 3e-5: 0.6}[rate] - 0.3 * (mu == 4)

    tried, choice = searched(score)
    assert tried[101] == {(1e-4, 1), (3e-4, 1)}
    assert (3e-5, 1) in tried[100]  # at the edge by the mean of both seeds
    assert choice == (1e-4, 1, pytest.approx((0.68 + 0.75) / 2))


def test_equal_scores_choose_the_smaller_rate_then_the_smaller_mu():
    _, choice = searched(lambda rate, mu, seed: 0.3 if rate >= 1e-5 else 0.2)
    assert choice[:2] == (1e-5, 1)


# --- The final runs ---------------------------------------------------------------------------------------------------

PAIR = Protocol(methods=("d1", "just-grpo", "wd1"), setups=(SUDOKU, SETUPS["sudoku-base"]))


def chosen(**accuracies):
    names = {"d1": "d1", "just": "just-grpo", "wd1": "wd1"}
    return {(setup, names[n]): Choice(1e-4, 1, value) for setup in PAIR.setups for n, value in accuracies.items()}


def test_final_runs_go_seed_by_seed_and_those_far_behind_have_three_at_the_smaller_budget():
    runs = list(PAIR.final(chosen(d1=0.7, just=0.625, wd1=0.61)))
    assert len(runs) == len(set(runs))
    order = (
        [(s, 1_500_000) for s in range(3)] + [(s, 5_000_000) for s in range(8)] + [(s, 1_500_000) for s in range(3, 8)]
    )
    assert [*dict.fromkeys((run.seed, run.budget) for run in runs if run.method != START)] == order
    for setup in PAIR.setups:
        here = [run for run in runs if run.setup == setup]
        for budget, few in ((1_500_000, [0, 1, 2]), (5_000_000, [])):
            seeds = {m: [r.seed for r in here if (r.method, r.budget) == (m, budget)] for m in PAIR.methods}
            assert seeds == {"d1": [*range(8)], "just-grpo": [*range(8)], "wd1": few}
        starts = [run.seed for run in here if run.method == START]
        assert starts == ([*range(8)] if setup.start == "sft" else [0])


def test_at_most_six_methods_and_d1_have_every_seed():
    runs = list(replace(PAIR, most=1).final(chosen(d1=0.6, just=0.71, wd1=0.69)))
    assert {run.method for run in runs if run.seed > 2} - {START} == {"just-grpo", "d1"}
    assert FULL.most == 6


def test_a_candidate_has_every_seed_and_takes_no_other_methods_place(monkeypatch):
    monkeypatch.setattr(plan, "CANDIDATES", {"wd1": "wd1"})
    runs = list(replace(PAIR, most=1).final(chosen(d1=0.7, just=0.71, wd1=0.99)))
    assert {run.method for run in runs if run.seed > 2} - {START} == {"just-grpo", "wd1", "d1"}


def test_seeds_beyond_the_third_and_the_larger_budget_wait_for_the_search_of_every_method():
    runs = list(PAIR.final(chosen(d1=0.7, wd1=0.3)))
    assert {(run.seed, run.budget) for run in runs if run.method != START} == {(s, 1_500_000) for s in (0, 1, 2)}


def test_an_empty_board_begins_with_every_search():
    runs = [run for run in FULL.missing({}) if run.method != START]
    cells = sum(3 * len(updates_of(plan.CANDIDATES.get(method, method))) for method in METHODS)
    assert len(runs) == len(set(runs)) == 4 * cells
    assert {(run.stage, run.seed) for run in runs} == {("tuning", 100)}


# --- Data -------------------------------------------------------------------------------------------------------------


def line_of(run, **changes):
    return {**asdict(run), "values": written_values(run.method), **changes}


def test_results_are_read_without_sealed_outcomes_and_of_rows_as_they_are_now(tmp_path):
    first, second, other = (Run("final", *SUDOKU, "d1", seed, 1e-4, 4, 1000) for seed in (0, 1, 2))
    append_line(file_of(tmp_path, first), line_of(first, sealed={"exact": "01"}, kl=1.0))
    append_line(file_of(tmp_path, first), line_of(first, sealed={"exact": "01"}, kl=2.0))
    append_line(file_of(tmp_path, second), line_of(second) | {"values": {"beta": 7}})  # of an older row
    with file_of(tmp_path, other).open("a") as file:
        file.write('{"stage": "final", "ta')  # killed here
    append_line(file_of(tmp_path, other), line_of(other))
    found = read_results(tmp_path)
    assert found.keys() == {first, other}
    assert found[first]["kl"] == 2.0
    assert "sealed" not in found[first]
    assert read_results(tmp_path / "none") == {}


def test_what_a_run_spent_is_the_sum_of_its_logs(tmp_path):
    entries = [
        {"step": 1, "loss": 0.1, "compute_tokens": 10, "seconds/rollout": 2.0, "seconds/update": 0.5}
        | {"seconds/processor": 1.0},
        {"step": 2, "loss": 0.2, "compute_tokens": 16, "seconds/update": 1.0, "seconds/processor": 2.0},
        {"step": 2, "train_loss": 0.1, "compute_tokens": 16},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    expected = {"compute": 16, "last_step": 6, "steps": 2, "rollouts": 1, "seconds": 3.5}
    assert logs_of(tmp_path) == expected | {"processor_seconds": 3.0}
    assert logs_of(tmp_path / "none")["compute"] == 0


# --- The real thing, small --------------------------------------------------------------------------------------------

MINIATURE = """
import sys
from pathlib import Path
from rich.console import Console
from dataclasses import replace
from studies.leaderboard.plan import QUICK
from studies.leaderboard.run import work
if __name__ == "__main__":
    small = replace(QUICK, methods=("reinforce", "just-grpo"), budgets=(70_000,), limit=8, curve=8, sealed=True)
    sys.exit(len(work(small, Path(sys.argv[1]), Path(sys.argv[2]), 1, None, Console())))
"""


def test_a_miniature_that_is_killed_continues_and_its_lines_say_what_they_are(tmp_path):
    script, folder, data = tmp_path / "miniature.py", tmp_path / "work", tmp_path / "data"
    script.write_text(MINIATURE)

    def start(log):
        return forks.start(forks.script, str(script), str(folder), str(data), log=log, folder=ROOT)

    (first,) = start(tmp_path / "first.log")
    while not list(folder.glob("final_*just-grpo*/metrics.jsonl")):  # the third run that trains
        assert first.is_alive(), (tmp_path / "first.log").read_text()
        time.sleep(0.05)
    pool = psutil.Process(first.pid).children(recursive=True)
    forks.kill([first])
    assert not psutil.wait_procs(pool, 300)[1]  # the pool's process ends, too
    before = {path.name: path.read_bytes() for path in data.glob("*.jsonl")}
    assert not any(b"just-grpo" in text for name, text in before.items() if name == "final.jsonl")
    forks.finish(start(tmp_path / "second.log"), tmp_path / "second.log")
    for name, text in before.items():
        assert (data / name).read_bytes().startswith(text)

    results = read_results(data)
    assert len(results) == len(read_lines(data / "tuning.jsonl")) + len(read_lines(data / "final.jsonl")) == 5
    assert not list(folder.glob("*_seed*"))  # models are removed
    for line in read_lines(data / "final.jsonl"):
        assert str(ROOT) not in json.dumps(line)
        assert str(tmp_path) not in json.dumps(line)
        assert {len(right) for right in line["sealed"].values()} == {8}
        assert {"torch", "transformers", "trl"} <= line["versions"].keys()
        assert line["cpu"]["cores"] == os.cpu_count()
        assert line["commit"] == commit()
        if line["method"] != START:
            assert line["compute"] - line["budget"] == line["overshoot"]
            assert 0 <= line["overshoot"] < line["last_step"]
            assert [share for share, _ in line["curve"]][-1] == 1
            assert line["sealed"].keys() == {"exact", "own"}
            assert not line["diverged"]
            assert line["kl"] == pytest.approx(0, abs=0.2)
    pandas = pytest.importorskip("pandas")
    table = pandas.read_json(data / "final.jsonl", lines=True)
    assert 'pandas.read_json("studies/leaderboard/data/final.jsonl", lines=True)' in (BOARD / "README.md").read_text()
    assert table["sealed"].str["exact"].str.len().tolist() == [8, 8, 8]
    assert table["method"].tolist() == [START, "reinforce", "just-grpo"]

    assert forks.finish(start(tmp_path / "third.log"), tmp_path / "third.log") == ""  # there is nothing left to do


def test_quick_is_a_board_that_ends():
    results = {}
    for _ in range(3):
        results |= {run: {"validation": {"exact": "01"}} for run in QUICK.missing(results)}
    assert not QUICK.missing(results)
    assert sorted(run.stage for run in results) == 3 * ["final"] + 4 * ["tuning"]
