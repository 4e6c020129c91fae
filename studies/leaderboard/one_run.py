"""One run of the leaderboard: trains, evaluates at a quarter of the compute and at the end, and appends its result.

    python -m studies.leaderboard.one_run --output_dir runs/board --task sudoku --start base --method d1 \
        --seed 0 --split test --learning_rate 1e-4 --num_iterations 4 --budget 1000000

`run.py` starts these. The result is one JSON line of `results.jsonl`. Killed, even with -9, and started again,
it continues: training from its last checkpoint, an evaluation from its last batch. All of it is one process, which
saves the seconds of importing what each stage needs.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from d1.runs.entry import OneLineParser, run_script
from d1.runs.record import run_record
from d1.tasks import load_task
from studies.json_lines import append_line
from studies.leaderboard.plan import START, TASKS, Run
from studies.leaderboard.results import RESULTS, read_results, results_of

logger = logging.getLogger(__name__)

QUARTER = "quarter"  # diffu_grpo_train.py's folder of the model at a quarter of the compute
KL_PROMPTS = 64


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="the board's folder")
    for field in fields(Run):
        kind = {"int": int, "float": float, "str": str}[str(field.type)]
        parser.add_argument(f"--{field.name}", type=kind, required=field.name in ("task", "start", "method", "seed"))
    parser.set_defaults(split="test", learning_rate=0.0, num_iterations=0, budget=0, limit=0, change="")
    return parser


def train(name: str, flags: list[str], callbacks: list[Any] | None = None) -> str | None:
    """RL with these flags; what stopped it if the loss or the weights became infinite or NaN on the way."""
    from d1.rl import train as diffu_grpo_train

    args, model_args = diffu_grpo_train.make_parser().parse_args_and_config(flags)
    try:
        diffu_grpo_train.main(args, model_args, callbacks=callbacks)
    except FloatingPointError as error:
        logger.warning("%s: %s", name, error)
        return str(error)
    return None


def evaluate(run: Run, model: Path, folder: Path, more_flags: Sequence[str] = ()) -> dict[str, Any]:
    """Whether each problem was solved, as "0110...", in the order of the split; `more_flags` are eval.py's."""
    from d1.eval import run as evaluation

    evaluation.main(evaluation.make_parser().parse_args([*run.evaluation(model, folder), *more_flags]))
    (file,) = folder.glob("*_generations.json")
    problems = sorted(json.loads(file.read_text())["generations"], key=lambda problem: problem["index"])
    task = load_task(TASKS[run.task].dataset)
    right = [next(iter(task.score(problem["text"], problem).values())) for problem in problems]
    asked = "\n".join(problem["question"] for problem in problems)
    return {
        "right": "".join(str(round(value)) for value in right),
        "problems": hashlib.sha256(asked.encode()).hexdigest()[:12],
    }


def logs_of(folder: Path) -> dict[str, Any]:
    """Of a run's `metrics.jsonl`: what it spent, and its rollouts' accuracy against compute. A log is a rollout with
    the updates on it, over which some of its values are means."""
    file = folder / "metrics.jsonl"
    entries = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    logs = [entry for entry in entries if "loss" in entry]
    steps = [entry["step"] for entry in logs]
    updates = [step - before for step, before in zip(steps, [0, *steps], strict=False)]

    def total(name: str) -> float:
        means = name in ("seconds/update", "seconds/processor")
        return sum(entry.get(name, 0.0) * (count if means else 1) for entry, count in zip(logs, updates, strict=True))

    clocks = ("seconds/rollout", "seconds/reward", "seconds/scoring", "seconds/update")
    return {
        "compute_tokens": logs[-1]["compute_tokens"] if logs else 0,
        "rollouts": sum("seconds/rollout" in entry for entry in logs),
        "updates": sum(updates),
        "seconds": round(sum(map(total, clocks)), 1),
        "processor_seconds": round(total("seconds/processor"), 1),
        "peak_memory_gb": max((entry["peak_memory_gb"] for entry in entries if "peak_memory_gb" in entry), default=0.0),
        "curve": [
            [entry["compute_tokens"], round(entry["rewards/accuracy/mean"], 4)]
            for entry in logs
            if "rewards/accuracy/mean" in entry
        ],
    }


def kl_to_start(run: Run, model: Path, start: Path) -> float:
    from d1.models import load_model, load_tokenizer
    from studies.estimators.completions import divergence

    task = TASKS[run.task]
    prompts = load_task(task.dataset).load_rows("validation")["prompt"][:KL_PROMPTS]
    both = load_model(str(model)), load_model(str(start))
    return divergence(*both, load_tokenizer(str(start)), prompts, task.length)


def result_of(run: Run, board: Path, folder: Path) -> dict[str, Any]:
    start = run.start_model(board)
    if run.method == START:
        return {"points": {"end": evaluate(run, start, folder / "end")}}
    finite = train(run.name, run.settings(board, folder)) is None
    found: dict[str, Any] = {"diverged": not finite} | logs_of(folder)
    points = {"quarter": folder / QUARTER, "end": folder} if run.split == "test" else {"end": folder}
    models = {name: model for name, model in points.items() if finite or (name != "end" and model.exists())}
    found["points"] = {name: evaluate(run, model, folder / f"at_{name}") for name, model in models.items()}
    found["kl"] = round(kl_to_start(run, folder, start), 5) if finite and run.split == "test" else None
    return found


def main(args: argparse.Namespace) -> None:
    board = args.output_dir.resolve()
    run = Run(**{field.name: getattr(args, field.name) for field in fields(Run)})
    folder = board / run.name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if results_of(read_results(board), [run]):
            return
        started = time.perf_counter()
        line = {"run": asdict(run), **result_of(run, board, folder)}
        line |= {"wall_seconds_of_the_last_start": round(time.perf_counter() - started, 1), "record": run_record()}
        append_line(board / RESULTS, line)
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)


if __name__ == "__main__":
    run_script("studies.leaderboard.one_run", lambda: main(make_parser().parse_args()))
