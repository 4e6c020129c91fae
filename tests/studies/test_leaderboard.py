"""The leaderboard: runs mean what their names say, results survive any kill, and the page says what they hold."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from d1.eval.run import make_parser as eval_parser
from d1.rl.methods import METHODS
from d1.rl.train import make_parser
from pocket.recipes import RECIPES
from pocket.uncertainty import mean_of
from studies.json_lines import append_line, read_lines
from studies.leaderboard import run as leaderboard
from studies.leaderboard.one_run import logs_of
from studies.leaderboard.plan import (
    CHANGE_TASKS,
    CHANGES,
    MUS,
    RATES,
    START,
    TASKS,
    Run,
    board_runs,
    change_runs,
    start_runs,
    tuning_runs,
    untuned,
    updates_of,
)
from studies.leaderboard.reasons import changes_table, correlations_table
from studies.leaderboard.report import Board, compared, setup_table, write_report
from studies.leaderboard.results import RESULTS, Setup, check_problems, read_results, results_of, tuned
from studies.leaderboard.statistics import holm, pooled_seeds

ROOT = Path(__file__).parents[2]
SUDOKU = Setup("sudoku", "sft")


# --- What is run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_each_run_is_its_method_at_the_budget_and_at_the_rate_and_mu_it_names(method, task, tmp_path):
    row, length = RECIPES[task], TASKS[task].length
    run = Run(task, "sft", method, 1, "test", 3e-5, 1, 5000)
    config, _ = make_parser().parse_args_and_config(run.settings(tmp_path, tmp_path / run.name))
    expected = METHODS[method].values | {
        "num_iterations": 1,
        "diffusion_steps": length if method == "just-grpo" else length // 2,
        "learning_rate": 3e-5,
        "num_generations": 8,
        "max_compute_tokens": 5000,
        "seed": 1,
        "dataset": row.task,
        "model_path": str(tmp_path / f"{task}_sft1" / "sft"),
        "max_prompt_length": row.prompt_tokens,
        "max_completion_length": row.lengths[0],
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert config.lr_scheduler_type == "constant"
    assert config.max_steps >= 5000  # a step takes a token at the least
    evaluation = eval_parser().parse_args(run.evaluation(tmp_path / "m", tmp_path))
    assert (evaluation.split, evaluation.gen_length, evaluation.temperature) == ("test", [length], 0.0)


def test_the_search_is_alike_for_every_method_and_sees_no_test_problem():
    runs = tuning_runs([*METHODS], 1000)
    assert {run.split for run in runs} == {"validation"}
    assert {(run.seed, run.start, run.budget) for run in runs} == {(0, "sft", 500)}
    for method, row in METHODS.items():
        tried = {(run.learning_rate, run.num_iterations) for run in runs if run.method == method}
        mus = MUS if row.values["num_iterations"] > 1 else (1,)
        assert tried == {(rate, mu) for rate in RATES for mu in mus}
        assert updates_of(method) == [*mus]


def test_the_board_has_every_method_start_and_seed_once():
    runs = board_runs([*METHODS], untuned([*METHODS]), 1000)
    starts = [(task, start) for task, row in TASKS.items() for start in row.starts]
    assert len({run.name for run in runs}) == len(runs) == len(METHODS) * len(starts) * 3
    assert {run.split for run in runs} == {"test"}
    own = start_runs(runs)
    assert len(own) == sum(1 if start == "base" else 3 for _, start in starts)
    assert {run.method for run in own} == {START}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_d1_but_for_one_choice_that_another_method_has(change, tmp_path):
    (run,) = (one for one in change_runs({"d1": (3e-5, 4)}, 1000, [1]) if (one.task, one.change) == ("sudoku", change))
    assert (run.split, run.seed, run.learning_rate, run.num_iterations, run.budget) == ("test", 1, 3e-5, 4, 1000)
    changed, plain = (
        make_parser().parse_args_and_config(one.settings(tmp_path, tmp_path / "out"))[0]
        for one in (run, replace(run, change=""))
    )
    unlike = {name for name, value in vars(plain).items() if getattr(changed, name) != value} - {"distributed_state"}
    assert unlike
    others = [*(row.values for row in METHODS.values()), *({"learning_rate": rate} for rate in RATES)]
    rows = [vars(plain) | other for other in others]
    assert any(all(row[name] == getattr(changed, name) for name in unlike) for row in rows)


def test_changes_are_tried_from_sft_and_have_names_of_their_own():
    runs = change_runs({"d1": (3e-5, 4)}, 1000)
    assert len({run.name for run in runs}) == len(runs) == len(CHANGES) * len(CHANGE_TASKS) * 3
    assert {run.start for run in runs} == {"sft"}
    assert not {run.name for run in runs} & {run.name for run in board_runs(["d1"], {"d1": (3e-5, 4)}, 1000)}
    assert change_runs({"espo": (3e-5, 4)}, 1000) == []


# --- Results ----------------------------------------------------------------------------------------------------------


def line_of(run, right, quarter=None, **changes):
    points = {} if right is None else {"end": {"right": right, "problems": "p"}}
    points |= {} if quarter is None else {"quarter": {"right": quarter, "problems": "p"}}
    found = {"run": asdict(run), "points": points, "diverged": right is None and run.method != START, "kl": 0.01}
    found |= {"rollouts": 3, "seconds": 5.0, "processor_seconds": 4.0, "peak_memory_gb": 0.5, "curve": []}
    found |= {"record": {"cpu": {"model": "abacus"}}}
    return found | changes


def run_of(method, seed=0, **changes):
    return replace(Run("sudoku", "sft", method, seed, "test", 1e-4, 4, 1000), **changes)


def test_a_torn_line_is_passed_over_and_the_next_is_whole(tmp_path):
    path = tmp_path / "some" / RESULTS
    assert read_lines(path) == []
    append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"run": {"task"')  # killed here
    append_line(path, {"a": 2})
    append_line(path, {"a": 3})
    assert [line["a"] for line in read_lines(path)] == [1, 2, 3]


def test_results_of_a_run_merge_and_the_last_counts(tmp_path):
    first, second = run_of("d1"), run_of("d1", seed=1)
    for run, right in ((first, "0011"), (second, "1111"), (first, "0111")):
        append_line(tmp_path / RESULTS, line_of(run, right))
    found = results_of(read_results(tmp_path), [first, second, run_of("espo")])
    assert {run: line["points"]["end"]["right"] for run, line in found.items()} == {first: "0111", second: "1111"}


def test_runs_judged_on_other_problems_are_refused():
    lines = {run_of("d1"): line_of(run_of("d1"), "01"), run_of("espo"): line_of(run_of("espo"), "01")}
    check_problems(lines)
    lines[run_of("espo")]["points"]["end"]["problems"] = "q"
    with pytest.raises(ValueError, match="was judged on other problems than runs before it"):
        check_problems(lines)


def test_a_methods_search_chooses_once_all_of_it_is_there():
    runs = tuning_runs(["d1", "agrpo"], 1000)
    best = (RATES[2], 4)
    results = {
        run: line_of(run, "1100" if (run.learning_rate, run.num_iterations) == best else "1000")
        for run in runs
        if run.method == "d1"
    }
    results |= {run: line_of(run, None) for run in runs if run.method == "agrpo"}  # all diverged: the lowest rate
    assert tuned(results, runs) == {"d1": best, "agrpo": (RATES[0], 1)}
    del results[runs[0]]
    assert tuned(results, runs) == {"agrpo": (RATES[0], 1)}


def make_board(results, planned=6):
    return Board([*results], [], results, {}, {}, untuned(["d1", "espo", "wd1"]), planned, 1000, 0, [])


RIGHT = {  # two seeds, eight problems; the third method diverged on its second seed
    "d1": ["00110011", "00111011"],
    "espo": ["11111011", "10111011"],
    "wd1": ["00110010", None],
}


def small_board():
    runs = {run_of(method, seed): right for method, both in RIGHT.items() for seed, right in enumerate(both)}
    return make_board({run: line_of(run, right, quarter="01010101") for run, right in runs.items()})


def test_differences_are_paired_by_seed_and_problem_and_corrected_for_their_number():
    found = compared(small_board())
    bits = {
        method: np.array([[int(one) for one in right or "0" * 8] for right in both], dtype=float)
        for method, both in RIGHT.items()
    }
    of_seeds = pooled_seeds([dict(enumerate(rows)) for rows in bits.values()])
    plain = {method: mean_of(bits[method] - bits["d1"], of_seeds) for method in ("espo", "wd1")}
    assert of_seeds.freedom == 2
    assert {setup for setup, _ in found} == {SUDOKU}
    for (_, method), mean in found.items():
        assert mean[:3] == plain[method][:3]
    assert found[SUDOKU, "espo"].value == pytest.approx(5 / 16 - 1 / 16 + 1 / 16 - 1 / 16)
    assert [mean.p for mean in found.values()] == holm([plain[method].p for _, method in found])


def test_the_table_counts_divergence_and_a_diverged_run_solves_nothing():
    board = small_board()
    rows = [row.split(" | ") for row in setup_table(board, SUDOKU, compared(board)).splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == ["espo", "d1", "wd1"]  # the best first
    assert [row[5] for row in rows] == ["0 / 2", "0 / 2", "1 / 2"]
    assert rows[2][2].startswith("18.8 ")  # three of sixteen


def test_the_page_says_that_it_is_partial_and_keeps_what_was_written_by_hand(tmp_path):
    board, page = small_board(), tmp_path / "leaderboard.md"
    assert write_report(board, page).startswith("6 of 6 runs are done")
    assert "Partial" not in page.read_text()
    page.write_text(page.read_text().replace("Nothing has been read out of it yet.", "ESPO is ahead."))
    write_report(replace(board, planned=9), page)
    text = page.read_text()
    assert "**Partial: 6 of 9 runs are done.**" in text
    assert text.count("ESPO is ahead.") == 1
    assert "a core a run (abacus)" in text
    assert (tmp_path / "leaderboard.png").exists()
    untouched = tmp_path / "none.md"
    assert "No run of the board" in write_report(make_board({}), untouched)
    assert not untouched.exists()


def test_a_change_is_compared_with_d1_by_seed_and_problem():
    board, change = small_board(), "no KL"
    rights = ["00111011", "11111011"]
    changes = {run_of("d1", seed, change=change): right for seed, right in enumerate(rights)}
    changes = {run: line_of(run, right) for run, right in changes.items()}
    (row,) = [line.split(" | ") for line in changes_table(board.results, changes).splitlines()[2:]]
    assert row[0] == "| no KL"
    assert row[1].startswith("75.0 ")  # twelve of sixteen
    assert row[2].startswith("+18.8 ")  # d1 has nine
    assert setup_table(board, SUDOKU, compared(board)) == setup_table(
        replace(board, changes=changes), SUDOKU, compared(board)
    )


def test_correlations_are_of_ranks_over_methods():
    methods = ["a", "b", "c", "d", "e"]
    results = {}
    for place, method in enumerate(methods):
        right = "1" * (place + 1) + "0" * (7 - place)
        results[run_of(method)] = line_of(run_of(method), right, rollouts=place**3, updates=-place, kl=None)
        other = run_of(method, task="countdown")
        results[other] = line_of(other, right[::-1], rollouts=5, updates=[1, 0, 2, 3, 4][place])
    first, second = correlations_table(results, [SUDOKU, Setup("countdown", "sft")]).splitlines()[2:]
    assert first == "| sudoku from sft |  | +1.00 (p 0) | -1.00 (p 0) |  |  | +1.00 (p 0) |"
    assert second.startswith("| countdown from sft |  |  | +0.90 (p 0.037) |  | +1.00 (p 0) | ")


def test_what_a_run_spent_is_the_sum_of_its_logs(tmp_path):
    entries = [
        {"step": 4, "loss": 0.1, "compute_tokens": 10, "seconds/rollout": 2.0, "seconds/update": 0.5}
        | {"seconds/processor": 1.0, "peak_memory_gb": 0.5, "rewards/accuracy/mean": 0.25},
        {"step": 6, "loss": 0.2, "compute_tokens": 16, "seconds/rollout": 3.0, "seconds/update": 1.0}
        | {"seconds/processor": 2.0, "peak_memory_gb": 0.7, "rewards/accuracy/mean": 0.5},
        {"step": 6, "train_loss": 0.1, "peak_memory_gb": 0.8, "compute_tokens": 16},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    assert logs_of(tmp_path) == {
        "compute_tokens": 16,
        "rollouts": 2,
        "updates": 6,
        "seconds": 2.0 + 3.0 + 4 * 0.5 + 2 * 1.0,
        "processor_seconds": 4 * 1.0 + 2 * 2.0,
        "peak_memory_gb": 0.8,
        "curve": [[10, 0.25], [16, 0.5]],
    }


# --- The real thing, small --------------------------------------------------------------------------------------------


def test_a_miniature_that_is_killed_and_started_again_is_whole(tmp_path):
    """Killed with -9 while a run trains: the run, which outlives it, is waited for and not done twice."""
    command = [
        sys.executable,
        "-m",
        "studies.leaderboard.run",
        "--quick",
        "--methods",
        "d1",
        "--starts",
        "base",
        "--jobs",
        "1",
    ]
    command += ["--budget", "240000", "--limit", "8", "--output_dir", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **options)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("test_*/metrics.jsonl")):
        assert first.poll() is None, first.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    done = subprocess.run(command, **options, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = read_lines(tmp_path / RESULTS)
    assert sorted(line["run"]["method"] for line in lines) == ["d1", START]
    (trained,) = (line for line in lines if line["run"]["method"] == "d1")
    assert 240_000 <= trained["compute_tokens"] < 240_000 + 115_200  # which is a rollout with its updates
    assert trained["points"].keys() == {"quarter", "end"}
    assert {len(point["right"]) for point in trained["points"].values()} == {8}
    assert trained["kl"] == pytest.approx(0, abs=0.1)
    (metrics,) = tmp_path.glob("test_*d1*/metrics.jsonl")
    steps = [line["step"] for line in read_lines(metrics) if "loss" in line]
    assert steps == sorted(set(steps))  # trained once
    page = (tmp_path / "leaderboard.md").read_text()
    assert "Partial" not in page
    assert "| d1 | " in page
    before = (tmp_path / RESULTS).read_bytes()
    leaderboard.main(leaderboard.make_parser().parse_args(command[3:]))  # there is nothing left to do
    assert (tmp_path / RESULTS).read_bytes() == before
