"""Compare RL methods at the same compute: do the runs of PROTOCOL.md that are not in data/ yet.

    python -m studies.leaderboard.run --jobs 2 --hours 8    # start no run after eight hours
    python -m studies.leaderboard.run --setups sudoku-sft   # only one setup
    python -m studies.leaderboard.run --part way            # another part of the protocol, after the board's search
    python -m studies.leaderboard.run --quick               # a few minutes, in runs/leaderboard_quick

First it searches each method's learning rate and number of updates, then it does the final runs, seed by seed. If it is
killed (even with -9), run the same command to continue: a killed run leaves no line and starts again from its
beginning, so results do not depend on kills. Only this module reads the sealed problems and writes their outcomes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from rich.console import Console

from d1.ranges import COUNT, POSITIVE
from d1.runs.cli import OneLineParser, RunError, run_script
from d1.runs.record import run_record
from d1.tasks import load_task
from pocket.demo import sft
from pocket.phases import ENVIRONMENT
from pocket.recipes import ROOT
from studies.json_lines import append_line
from studies.leaderboard.plan import (
    ALL_TASKS,
    DATA,
    PARTS,
    QUICK,
    SETUPS,
    START,
    WIDTH,
    Protocol,
    Run,
    Setup,
    accuracy,
    file_of,
    own_sampler,
    read_results,
    sft_folder,
    start_model,
    written_values,
)

logger = logging.getLogger(__name__)

RUNS_PER_PROCESS = 25  # then a new process replaces it, so that memory leaks cannot grow
SEALED = ROOT / "studies" / "leaderboard" / "sealed"
QUARTERS = (0.25, 0.5, 0.75)
KL_PROMPTS = 64


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=COUNT, default=min(2, os.cpu_count() or 1), help="runs at the same time")
    parser.add_argument("--hours", type=POSITIVE, help="start no run later than this; default: until all are done")
    parser.add_argument("--setups", nargs="+", choices=[*SETUPS], metavar="SETUP", help=f"default: {' '.join(SETUPS)}")
    parser.add_argument("--part", choices=[*PARTS], default="board", help="default: board")
    parser.add_argument("--quick", action="store_true", help="two methods, one setup, one seed, one rate")
    parser.add_argument("--output_dir", type=Path, help="folder for models in use; default: runs/leaderboard")
    return parser


def train(name: str, flags: list[str], callbacks: list[Any] | None = None) -> str | None:
    """Runs RL with these flags; returns the error message if the loss or the weights became infinite or NaN."""
    from d1.rl import train as diffu_grpo_train

    args, model_args = diffu_grpo_train.make_parser().parse_args_and_config(flags)
    try:
        diffu_grpo_train.main(args, model_args, callbacks=callbacks)
    except FloatingPointError as error:
        logger.warning("%s: %s", name, error)
        return str(error)
    return None


def train_from(start: Path, own: Path, flags: Sequence[str]) -> str | None:
    """`train`, from the model `start` into the folder `own`, with pocket.yaml's settings and these."""
    places: list[object] = ["--config", ROOT / "diffu-grpo" / "pocket.yaml", "--model_path", start, "--output_dir", own]
    places += ["--eval_strategy", "no", "--save_strategy", "no", "--logging_steps", 1]
    return train(own.name, [*map(str, places), *flags])


def evaluate(name: str, model: Path, folder: Path, flags: Sequence[object] = ()) -> dict[str, str]:
    """Whether each problem of a task was solved, as "0110...", in the order of its file, and a hash of the questions.

    The judge is greedy, with the exact sampler, blocks of 8 and two tokens per step; `flags` of eval.py override it.
    """
    from d1.eval import run as evaluation

    task = ALL_TASKS[name]
    own: list[object] = ["--model_path", model, "--dataset", task.dataset, "--gen_length", task.length]
    own += ["--block_length", 8, "--batch_size", 128, "--eos_stop", "--output_dir", folder]
    evaluation.main(evaluation.make_parser().parse_args([*map(str, (*own, *flags))]))
    (file,) = folder.glob("*_generations.json")
    problems = sorted(json.loads(file.read_text())["generations"], key=lambda problem: problem["index"])
    score = load_task(task.dataset).score
    right = [next(iter(score(problem["text"], problem).values())) for problem in problems]
    asked = "\n".join(problem["question"] for problem in problems)
    return {
        "right": "".join(str(round(value)) for value in right),
        "problems": hashlib.sha256(asked.encode()).hexdigest()[:12],
    }


def logs_of(folder: Path) -> dict[str, Any]:
    """The cost of a run, from its `metrics.jsonl` with one line per optimizer step. Seconds are those of training."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    logs = [entry for entry in map(json.loads, lines) if "loss" in entry]

    def total(*names: str) -> float:
        return round(sum(entry.get(name, 0.0) for entry in logs for name in names), 1)

    spent = [0, *(entry["compute_tokens"] for entry in logs)]
    return {
        "compute": spent[-1],
        "last_step": spent[-1] - spent[-2] if logs else 0,
        "steps": len(logs),
        "rollouts": sum("seconds/rollout" in entry for entry in logs),
        "seconds": total("seconds/rollout", "seconds/reward", "seconds/scoring", "seconds/update"),
        "processor_seconds": total("seconds/processor"),
    }


def make_start(folder: Path, setup: Setup, seed: int) -> Path:
    """The model that a run starts from; a missing SFT model is trained."""
    if setup.start == "sft":
        from d1.sft import train as sft_train

        own = sft_folder(folder, setup.task, seed)
        own.mkdir(parents=True, exist_ok=True)
        with (own / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (own / "done").exists():
                task = ALL_TASKS[setup.task]
                command = sft(own, seed, miniature=False, task=task.recipe).command
                flags = [*map(str, command[2:]), "--model_name", str(task.base)]
                sft_train.main(sft_train.make_parser().parse_args(flags))
                (own / "done").touch()
    return start_model(folder, setup, seed)


def kl_to_start(task: str, model: Path, start: Path) -> float:
    from d1.models import load_model, load_tokenizer
    from studies.estimators.completions import divergence

    prompts = load_task(ALL_TASKS[task].dataset).load_rows("validation")["prompt"][:KL_PROMPTS]
    both = load_model(str(model)), load_model(str(start))
    return divergence(*both, load_tokenizer(str(start)), prompts, ALL_TASKS[task].length)


def sealed_flags(task: str) -> list[object]:
    (file,) = SEALED.glob(f"{ALL_TASKS[task].dataset}.*")
    return ["--data_file", file]


def judged(run: Run, model: Path | None, folder: Path, protocol: Protocol) -> dict[str, Any]:
    """The outcomes of a run's last model: on validation problems for tuning runs, on sealed problems for final runs.
    The sampler is the judge's ("exact"), for final runs also that of the run's own rollouts ("own"). A run that did not
    stay finite has no model and has solved nothing."""
    field = "sealed" if run.stage == "final" and protocol.sealed else "validation"
    flags: list[object] = ["--split", "validation"] if field == "validation" else sealed_flags(run.task)
    flags += ["--limit", protocol.limit] if protocol.limit else []
    exact = evaluate(run.task, model or start_model(folder.parent, run.setup, run.seed), folder / "exact", flags)
    outcomes = {"exact": exact["right"]}
    if run.stage == "final" and run.method != START:
        own = own_sampler(run.method, ALL_TASKS[run.task].length)
        outcomes["own"] = (
            evaluate(run.task, model, folder / "own", [*flags, *own])["right"] if own and model else exact["right"]
        )
    if model is None:
        outcomes = {name: "0" * len(right) for name, right in outcomes.items()}
    return {field: outcomes, "problems": exact["problems"]}


def curve(run: Run, folder: Path, protocol: Protocol, finite: bool) -> list[list[float]]:
    """[share of the budget, accuracy on validation problems] for each saved model."""
    from d1.rl.trainer import saved_at  # imports torch, which the process that plans does not need

    models = {share: saved_at(folder, share) for share in QUARTERS} | ({1: folder} if finite else {})
    flags = ["--split", "validation", "--limit", protocol.curve]
    there = {share: model for share, model in models.items() if (model / "model.safetensors").exists()}
    return [
        [share, round(accuracy(evaluate(run.task, model, folder / f"curve_{share}", flags)["right"]), 4)]
        for share, model in there.items()
    ]


def measured(run: Run, folder: Path, start: Path, protocol: Protocol) -> dict[str, Any]:
    """Trains and evaluates; returns the measured part of the run's line."""
    if run.method == START:
        return judged(run, start, folder, protocol)
    with_curve = run.stage == "final" and run.seed < protocol.few and run.budget == protocol.budgets[-1]
    flags = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), *run.settings()]
    flags += ["--model_path", str(start), "--output_dir", str(folder)]
    flags += ["--eval_strategy", "no", "--save_strategy", "no", "--logging_steps", "1"]
    flags += ["--save_at_compute", *map(str, QUARTERS)] if with_curve else []
    finite = train(run.name, flags) is None
    found: dict[str, Any] = {"diverged": not finite, **logs_of(folder)}
    found["overshoot"] = max(0, found["compute"] - run.budget)
    found |= judged(run, folder if finite else None, folder, protocol)
    if run.stage == "final":
        found["curve"] = curve(run, folder, protocol, finite) if with_curve else []
        found["kl"] = round(kl_to_start(run.task, folder, start), 5) if finite else None
    return found


def commit() -> str | None:
    """The commit of this checkout, with "+" if files differ from it."""
    try:
        options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()
        code = ["d1", "pocket", "studies/leaderboard/*.py"]
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", *code], **options
        ).stdout
        return head + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def complete(run: Run, folder: Path, data: Path, protocol: Protocol) -> dict[str, Any]:
    """Does a run in its own subfolder of `folder`, which is removed at the end; appends its line and returns it."""
    own = folder / run.name
    shutil.rmtree(own, ignore_errors=True)  # left by a killed run
    start = make_start(folder, run.setup, run.seed)
    own.mkdir(parents=True)
    settings = run.settings() if run.method != START else []
    line = {**asdict(run), "values": written_values(run.method), "settings": settings}
    line |= measured(run, own, start, protocol)
    line["start_weights"] = hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()[:12]
    append_line(file_of(data, run), line | {"commit": commit(), **run_record()})
    shutil.rmtree(own)
    return line


def begin(folder: Path) -> None:
    """Initialises a process of the pool: it writes to its own log, and ends when the runner ends for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    log = (folder / f"{multiprocessing.current_process().name}.log").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)


def do(run: Run, folder: Path, data: Path, protocol: Protocol) -> str:
    """Does a run in a process of the pool; returns a message about it."""
    started = time.monotonic()
    line = complete(run, folder, data, protocol)
    return f"{time.monotonic() - started:.0f} s" + ", diverged" * line.get("diverged", False)


def work(protocol: Protocol, folder: Path, data: Path, jobs: int, hours: float | None, console: Console) -> list[Run]:
    """Does the missing runs; returns those that failed, which a second call tries again.

    Raises:
        RunError: a process of the pool was killed, or another runner uses `folder`.
    """
    os.environ.update(ENVIRONMENT)
    folder.mkdir(parents=True, exist_ok=True)
    started, done = time.monotonic(), 0
    failed: list[Run] = []
    running: dict[Future[str], Run] = {}
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another runner is using {folder}: wait for it, or choose another --output_dir") from None
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            jobs, spawn, initializer=begin, initargs=(folder,), max_tasks_per_child=RUNS_PER_PROCESS
        ) as pool:
            while True:
                late = hours is not None and time.monotonic() - started > 3600 * hours
                known = [*running.values(), *failed]
                todo = [] if late else [run for run in protocol.missing(read_results(data)) if run not in known]
                for run in todo[: jobs - len(running)]:
                    running[pool.submit(do, run, folder, data, protocol)] = run
                if not running:
                    return failed
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run, done = running.pop(future), done + 1
                    try:
                        said = future.result()
                    except BrokenProcessPool:
                        raise RunError(f"{run.name} was killed: run the same command to continue") from None
                    except Exception as error:  # one failed run must not end a long series
                        failed.append(run)
                        said = f"failed: {type(error).__name__}: {error}"
                    hour = (time.monotonic() - started) / 3600
                    console.print(
                        f"{hour:6.2f} h, {done} runs, {len(todo)} can start: {run.name}: {said}", markup=False
                    )


def check_bases(protocol: Protocol) -> None:
    """Raises FileNotFoundError if a base model is missing."""
    for task in (ALL_TASKS[setup.task] for setup in protocol.setups):
        if not (task.base / "config.json").exists():
            make = f"python -m pocket.make_base --task {task.recipe} --hidden_size {WIDTH} --output_dir {task.base}"
            raise FileNotFoundError(f"no base model {task.base}: make it with {make} (half an hour)")


def main(args: argparse.Namespace) -> None:
    console = Console(soft_wrap=True)
    if args.setups and args.part != "board":
        raise ValueError(f"--setups chooses setups of the board: leave it out with --part {args.part}")
    protocol = QUICK if args.quick else PARTS[args.part](read_results())
    protocol = replace(protocol, setups=tuple(SETUPS[name] for name in args.setups)) if args.setups else protocol
    check_bases(protocol)
    folder = (args.output_dir or ROOT / "runs" / f"leaderboard{'_quick' * args.quick}").resolve()
    failed = work(protocol, folder, folder / "data" if args.quick else DATA, args.jobs, args.hours, console)
    if failed:
        raise RunError(f"{len(failed)} runs failed, the first {failed[0].name}: see {folder}/*.log")


if __name__ == "__main__":
    run_script("studies.leaderboard.run", lambda: main(make_parser().parse_args()))
