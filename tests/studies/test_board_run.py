"""The leaderboard's sealed problems, and a miniature of it that is killed and continues."""

import hashlib
import json
import os
import time
from pathlib import Path

import psutil
import pytest

from d1.tasks import load_task
from dataset.make_problems import main as make_problems
from dataset.make_problems import make_parser as problems_parser
from studies.json_lines import read_lines
from studies.leaderboard.plan import START, TASKS, read_results
from studies.leaderboard.run import SEALED, commit, logs_of
from tests import forks
from tests.d1.tasks.test_problem_sets import key, read

ROOT = Path(__file__).parents[2]
PROTOCOL = (ROOT / "studies" / "leaderboard" / "PROTOCOL.md").read_text()


@pytest.mark.parametrize("task", [row.dataset for row in TASKS.values()])
def test_sealed_problems_are_those_of_the_protocol_and_in_no_other_split(task, tmp_path):
    path = SEALED / f"{task}.jsonl"
    sealed = read_lines(path)
    assert f"`{path.name}` | {len(sealed):,} |" in PROTOCOL
    assert hashlib.sha256(path.read_bytes()).hexdigest() in PROTOCOL
    splits = {split: read(task, split) for split in ("train", "validation", "test")}
    keys = {split: {key(task, problem) for problem in problems} for split, problems in splits.items()}
    own = {key(task, problem) for problem in sealed}
    assert len({json.dumps(problem) for problem in sealed}) == len(sealed)
    assert not own & (keys["train"] | keys["validation"])
    if task == "sudoku":  # all grids belong to a split: other puzzles on those of the test split
        assert own == keys["test"]
        assert not {problem["Puzzle"] for problem in sealed} & {problem["Puzzle"] for problem in splits["test"]}
    elif task == "pocket_countdown":  # all sets of numbers belong to a split: the test split itself
        assert sealed == splits["test"]
    else:
        assert not own & keys["test"]
    assert len(load_task(task).load_rows("test", str(path))) == len(sealed)
    make_problems(problems_parser().parse_args(["--sealed", "--output_dir", str(tmp_path)]))
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_one_module_alone_reads_sealed_problems_and_one_their_outcomes():
    studies = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "studies").rglob("*.py")}
    assert [name for name, text in studies.items() if "SEALED" in text] == ["studies/leaderboard/run.py"]
    assert [name for name, text in studies.items() if "final_table=True" in text] == ["studies/leaderboard/report.py"]


def test_what_a_run_spent_is_the_sum_of_its_logs(tmp_path):
    first = {"seconds/rollout": 2.0, "seconds/update": 0.5, "seconds/processor": 1.0}
    entries = [
        {"step": 1, "loss": 0.1, "compute_tokens": 10, **first},
        {"step": 2, "loss": 0.2, "compute_tokens": 16, "seconds/update": 1.0, "seconds/processor": 2.0},
        {"step": 2, "train_loss": 0.1, "compute_tokens": 16},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    expected = {"compute": 16, "last_step": 6, "steps": 2, "rollouts": 1, "seconds": 3.5}
    assert logs_of(tmp_path) == expected | {"processor_seconds": 3.0}
    assert logs_of(tmp_path / "none")["compute"] == 0


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
    assert b"just-grpo" not in before.get("final.jsonl", b"")
    forks.finish(start(tmp_path / "second.log"), tmp_path / "second.log")
    for name, text in before.items():
        assert (data / name).read_bytes().startswith(text)

    final = read_lines(data / "final.jsonl")
    assert len(read_results(data)) == len(read_lines(data / "tuning.jsonl")) + len(final) == 5
    assert not list(folder.glob("*_seed*"))  # models are removed
    assert [line["method"] for line in final] == [START, "reinforce", "just-grpo"]
    for line in final:
        assert str(ROOT) not in json.dumps(line)
        assert str(tmp_path) not in json.dumps(line)
        assert {len(right) for right in line["sealed"].values()} == {8}
        assert {"torch", "transformers", "trl"} <= line["versions"].keys()
        assert (line["cpu"]["cores"], line["commit"]) == (os.cpu_count(), commit())
    for line in final[1:]:
        assert 0 <= line["compute"] - line["budget"] == line["overshoot"] < line["last_step"]
        assert [share for share, _ in line["curve"]][-1] == 1
        assert line["sealed"].keys() == {"exact", "own"}
        assert not line["diverged"]
        assert line["kl"] == pytest.approx(0, abs=0.2)

    assert forks.finish(start(tmp_path / "third.log"), tmp_path / "third.log") == ""  # there is nothing left to do
