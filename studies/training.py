"""What the studies of pocket models share: tasks and starts, a training, its judgement and its costs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from d1.tasks import load_task
from pocket.demo import sft
from pocket.recipes import RECIPES, ROOT

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyTask:
    """An entry of `TASKS`.

    Attributes:
        recipe: its entry of `RECIPES`.
        dataset: the task's name in d1's `TASKS`.
        base: the folder of the base model.
        length: tokens per completion, in training and evaluation.
        flags: flags of RL in addition to pocket.yaml.
    """

    recipe: str
    dataset: str
    base: Path
    length: int
    flags: tuple[object, ...]


def study_task(task: str) -> StudyTask:
    """A task of `RECIPES` at the shorter of its lengths."""
    recipe = RECIPES[task]
    length = recipe.lengths[0]
    flags = ("--max_prompt_length", recipe.prompt_tokens, "--max_completion_length", length)
    return StudyTask(task, recipe.task, ROOT / "pocket" / recipe.base, length, flags)


TASKS = {name: study_task(name) for name in ("sudoku", "countdown", "arithmetic")}


class Setup(NamedTuple):
    """A task, and the model that runs start from: "sft" or "base"."""

    task: str
    start: str

    @property
    def label(self) -> str:
        return f"{self.task}-{self.start}"


SETUPS = {
    setup.label: setup
    for setup in (
        Setup("sudoku", "sft"),
        Setup("sudoku", "base"),
        Setup("countdown", "sft"),
        Setup("arithmetic", "sft"),
    )
}


def accuracy(outcomes: str) -> float:
    """The share of ones in "0110..."."""
    return outcomes.count("1") / len(outcomes)


def best_rate(lines: Iterable[Mapping[str, Any]], rates: Sequence[float], seeds: int, name: str) -> float:
    """The rate of a search with the highest mean accuracy; of equal ones, the smallest.

    Raises:
        ValueError: a rate has fewer than `seeds` lines; the message has the `name` of what was searched.
    """
    lines = [*lines]
    found = {rate: [accuracy(line["right"]) for line in lines if line["rate"] == rate] for rate in rates}
    if any(len(of) < seeds for of in found.values()):
        raise ValueError(f"the search of {name} is not complete: run it first")
    return max(rates, key=lambda rate: (fmean(found[rate]), -rate))


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

    task = TASKS[name]
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
    """The model that a run starts from: the base, or the SFT model of the seed, which is trained if it is missing."""
    if setup.start == "base":
        return TASKS[setup.task].base
    from d1.sft import train as sft_train

    own = folder / f"{setup.task}_sft{seed}"
    own.mkdir(parents=True, exist_ok=True)
    with (own / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (own / "done").exists():
            task = TASKS[setup.task]
            command = sft(own, seed, miniature=False, task=task.recipe).command
            flags = [*map(str, command[2:]), "--model_name", str(task.base)]
            sft_train.main(sft_train.make_parser().parse_args(flags))
            (own / "done").touch()
    return own / "sft"


def commit() -> str | None:
    """The commit of this checkout, with "+" if files differ from it."""
    try:
        options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()
        code = ["d1", "pocket", "studies/*.py"]
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", *code], **options
        ).stdout
        return head + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None
