"""eval.py as users start it: several real processes, kills, and the shell scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from d1.eval import run as evaluation
from tests import forks
from tests.commands import ROOT, calls_of

EVAL = ROOT / "eval"
LENGTHS = ["--gen_length", "12", "--block_length", "4"]


def start(
    processes: int, folder: Path, *arguments: object, script: Path = EVAL / "eval.py", **environment: str
) -> list[BaseProcess]:
    words = [str(script), "--dataset", "sudoku", *LENGTHS, "--output_dir", *map(str, (folder, *arguments))]
    options = {"processes": processes, "ACCELERATE_USE_CPU": "true", **environment}
    return forks.start(forks.script, *words, log=log_of(folder), folder=EVAL, **options)


def log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")


def finish(started: list[BaseProcess], folder: Path, status: int = 0) -> str:
    return forks.finish(started, log_of(folder), status)


def evaluate(*arguments: object) -> None:
    """The same in this process: the reference."""
    args = evaluation.make_parser().parse_args(["--dataset", "sudoku", *LENGTHS, *map(str, arguments)])
    evaluation.main(args)


def items(folder: Path) -> list[dict]:
    """The problems of all generation files of a folder."""
    files = sorted(folder.glob("*_generations.json"))
    return [item for file in files for item in json.loads(file.read_text())["generations"]]


def texts(folder: Path) -> list[tuple]:
    return [(item["index"], item["generations"]) for item in items(folder)]


def test_one_and_two_processes_say_the_same(tiny_model_dir, tmp_path):
    """With the variables of a launcher and alone."""
    one, two = tmp_path / "one", tmp_path / "two"
    flags = ("--model_path", tiny_model_dir, "--limit", 10, "--gen_length", 12, 8, "--temperature", 0.7)
    assert "10/10" in finish(start(2, two, *flags, "--batch_size", 1), two)
    record = json.loads(next(two.glob("*_record.json")).read_text())
    assert record["processes"] == 2
    evaluate(*flags, "--batch_size", 7, "--output_dir", one)
    assert len(texts(one)) == 20
    assert texts(one) == texts(two)
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}


TWO_EVALUATIONS = """
import sys
from d1.eval.run import evaluate

model, folder = sys.argv[sys.argv.index("--model_path") + 1], sys.argv[sys.argv.index("--output_dir") + 1]
settings = {"gen_length": 12, "block_length": 4, "limit": 6, "batch_size": 1, "temperature": 0.7}
for seed in (0, 1):
    rows = evaluate(model, "sudoku", output_dir=f"{folder}/{seed}", seed=seed, **settings)
    print("rows", [row.n for row in rows])
"""


def test_a_script_evaluates_twice_on_two_processes(tiny_model_dir, tmp_path):
    """The second one has the counters' names of the first one, in the store of the launcher, which outlives both."""
    script, folder = tmp_path / "twice.py", tmp_path / "two"
    script.write_text(TWO_EVALUATIONS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    words = ["--model_path", str(tiny_model_dir), "--output_dir", str(folder)]
    subprocess.run([*launch, *words], check=True, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    for seed in (0, 1):
        flags = ("--model_path", tiny_model_dir, "--limit", 6, "--temperature", 0.7, "--seed", seed)
        evaluate(*flags, "--output_dir", tmp_path / f"one{seed}")
        assert texts(folder / str(seed)) == texts(tmp_path / f"one{seed}")


STANDS_STILL = f"""
import os, runpy, sys, time
from pathlib import Path
from torch.nn.modules.module import register_module_forward_pre_hook

rank, folder = os.environ.get("RANK", "0"), Path(sys.argv[sys.argv.index("--output_dir") + 1])
most = int(os.environ["MOST"].split()[int(rank)])

def wait(module, args):
    while sum(path.read_bytes().count(b"}}\\n") for path in folder.glob(f"*.partial/rank_{{rank}}.jsonl")) >= most:
        time.sleep(0.01)

register_module_forward_pre_hook(wait)
runpy.run_path({str(EVAL / "eval.py")!r}, run_name="__main__")
"""


def kill_half_way(most: Sequence[int], folder: Path, flags: Sequence[object]) -> list[list[dict]]:
    """What each process had written when all were killed: process i stands still after `most[i]` problems."""
    script = folder.with_suffix(".py")
    script.write_text(STANDS_STILL)
    started = start(len(most), folder, *flags, script=script, MOST=" ".join(map(str, most)))

    def written() -> list[list[dict]]:
        paths = (next(folder.glob(f"*.partial/rank_{rank}.jsonl"), None) for rank in range(len(most)))
        texts = (path.read_text() if path else "" for path in paths)
        return [[json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")] for text in texts]

    while [len(lines) for lines in written()] != list(most):
        assert all(process.is_alive() for process in started), log_of(folder).read_text()
        time.sleep(0.02)
    forks.kill(started)
    return written()


def test_a_fast_process_takes_more_problems_and_a_killed_run_continues_with_other_processes(tiny_model_dir, tmp_path):
    """More than its half of them: the other one stands still after its second batch. Nothing is lost or repeated."""
    flags = ("--model_path", tiny_model_dir, "--limit", 300, "--batch_size", 4, "--eos_stop")
    flags += ("--sampler", "parallel", "--reveal_level", 0.1)
    fast, slow = kill_half_way([200, 8], tmp_path / "two", flags)
    with open(next((tmp_path / "two").glob("*.partial/rank_0.jsonl")), "ab") as journal:
        journal.write(b'{"index": 3, "generat')  # an incomplete line, as after a kill
    assert "300/300" in finish(start(1, tmp_path / "two", *flags), tmp_path / "two")
    assert not list((tmp_path / "two").glob("*.partial"))
    results = {item["index"]: item for item in items(tmp_path / "two")}
    assert len(items(tmp_path / "two")) == len(results) == 300
    for entry in [*fast, *slow]:  # the very measurement, so it was not made again
        assert results[entry["index"]]["seconds"] == entry["seconds"]
    evaluate(*flags, "--output_dir", tmp_path / "one", "--batch_size", 7)
    for one, two in zip(items(tmp_path / "one"), items(tmp_path / "two"), strict=True):
        assert {**one, "seconds": 0} == {**two, "seconds": 0}  # all else is equal, even the passes


def test_errors_end_every_process_with_one_line(tiny_model_dir, tmp_path):
    none = start(1, tmp_path / "none", "--model_path", tiny_model_dir, "--data_file", "nowhere.csv")
    assert finish(none, tmp_path / "none", status=1).splitlines()[-1] == "eval.py: no data file nowhere.csv"
    flags = ("--model_path", tiny_model_dir, "--limit", 2)
    evaluate(*flags, "--output_dir", tmp_path / "run")
    two = start(2, tmp_path / "run", *flags, "--seed", 1)
    said = finish(two, tmp_path / "run", status=1)  # the rank that did not check the files must not wait forever
    assert "different run (seed: 0 there, 1 now)" in said


# ---- scripts


def bash(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {name: value for name, value in os.environ.items() if name not in ("MODEL_PATH", "TASKS", "EXTRA")}
    return subprocess.run(
        ["bash", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**variables, "PATH": path, **environment},
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would start the 8B model")
def test_run_eval_without_gpu_and_model_says_what_to_do():
    done = bash(EVAL / "run_eval.sh")
    assert done.returncode == 1
    assert "no GPU found and no MODEL_PATH" in done.stderr
    command = next(line for line in done.stderr.splitlines() if line.startswith("  MODEL_PATH="))
    assert "MODEL_PATH=../pocket/base TASKS=sudoku" in command
    assert bash(EVAL / "run_eval.sh", "0,1").returncode == 1


def test_run_eval_reads_all_lines_of_its_variables(tmp_path):
    given = {
        "MODEL_PATH": "x",
        "TASKS": "math\nsudoku",
        "GEN_LENGTHS": "12\n18 24\n",
        "EXTRA": "--seed 3\n\t--eos_stop\n",
    }
    calls = calls_of(EVAL / "run_eval.sh", [], given, tmp_path, gpus=1)
    assert [call[call.index("--dataset") + 1] for call in calls] == ["math", "sudoku"]
    for call in calls:
        at = call.index("--gen_length")
        assert call[at + 1 : at + 5] == ["12", "18", "24", "--batch_size"]
        assert call[-3:] == ["--seed", "3", "--eos_stop"]
    (call,) = calls_of(EVAL / "run_eval.sh", [], given | {"TASKS": "math", "EXTRA": ""}, tmp_path, gpus=1)[2:]
    assert call[-2:] == ["--output_dir", "results/"]


def test_run_eval_then_parse(tiny_model_dir, tmp_path):
    (tmp_path / "rows.csv").write_text("Puzzle,Solution\n0234341221434300,1234341221434321\n")
    given = {"MODEL_PATH": str(tiny_model_dir), "TASKS": "sudoku", "GEN_LENGTHS": "12 18", "BLOCK_LENGTH": "6"}
    given |= {"OUTPUT_DIR": str(tmp_path), "EXTRA": f"--data_file {tmp_path / 'rows.csv'}"}
    done = bash(EVAL / "run_eval.sh", **given)
    assert done.returncode == 0, done.stderr
    assert f"python parse_and_get_acc.py {tmp_path}" in done.stdout
    files = (json.loads(path.read_text()) for path in tmp_path.glob("*_generations.json"))
    assert {file["gen_length"]: file["block_length"] for file in files} == {12: 6, 18: 6}
    parsed = bash("-c", f"python {EVAL / 'parse_and_get_acc.py'} {tmp_path} --format json")
    rows = json.loads(parsed.stdout)
    assert sorted((row["gen_length"], row["n"], row["expected"]) for row in rows) == [(12, 1, 1), (18, 1, 1)]
