"""One run of the leaderboard: trains, evaluates, and appends its line to the data. `run.py` calls `complete`.

A killed run leaves no line and starts again from its beginning, so results do not depend on kills. This is the only
module that reads the sealed problems and writes their outcomes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from d1.rl.trainer import saved_at
from d1.runs.record import run_record
from d1.tasks import load_task
from pocket.demo import sft
from pocket.recipes import ROOT
from studies.json_lines import append_line
from studies.leaderboard.plan import (
    ALL_TASKS,
    START,
    Protocol,
    Run,
    Setup,
    accuracy,
    own_sampler,
    sft_folder,
    start_model,
)
from studies.leaderboard.results import file_of, written_values

logger = logging.getLogger(__name__)

SEALED = ROOT / "studies" / "leaderboard" / "sealed"
QUARTERS = (0.25, 0.5, 0.75)
KL_PROMPTS = 64


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
