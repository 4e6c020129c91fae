"""Runs of the study of samplers inside RL: training to a budget of processor seconds, with models saved in between, and
each model's accuracy with the exact sampler. Everything happens in the calling process, run after run."""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from transformers import TrainerCallback

from d1.rl.methods import METHODS
from d1.runs.record import run_record
from d1.runs.trainer import check_weights
from pocket.demo import sft
from pocket.phases import run_phases
from studies.json_lines import append_line, read_lines
from studies.leaderboard.one_run import evaluate, train
from studies.leaderboard.plan import ROOT, START, TASKS, sft_folder

RESULTS = "results.jsonl"


class Level(NamedTuple):
    """The settings of a sampler.

    Attributes:
        flags: flags of rollouts.
        blocks: number of blocks of the canvas; None: blocks of 8 tokens.
        steps: maximum number of steps; None: one per two tokens.
    """

    flags: tuple[object, ...] = ()
    blocks: int | None = None
    steps: int | None = None


# Levels were chosen on validation problems by an earlier frontier.py; Countdown uses Sudoku's.
OF_ANY_TASK = {"exact": Level(), "cached": Level(("--kv_cache", "dual"))}
OF_SUDOKU = OF_ANY_TASK | {
    "parallel": Level(("--reveal", "entropy", "--reveal_level", 1.75), blocks=1, steps=4),
    "cached+parallel": Level(("--kv_cache", "dual", "--reveal", "factor", "--reveal_level", 1.5), blocks=2),
}
OF_ARITHMETIC = OF_ANY_TASK | {
    "parallel": Level(("--reveal", "threshold", "--reveal_level", 0.9), blocks=1, steps=8),
    "cached+parallel": Level(("--kv_cache", "dual", "--reveal", "threshold", "--reveal_level", 0.8), blocks=2),
}
LEVELS = {"sudoku": OF_SUDOKU, "countdown": OF_SUDOKU, "arithmetic": OF_ARITHMETIC}
SAMPLERS = ("exact", "parallel", "cached", "cached+parallel")


def flags_of(values: Mapping[str, Any]) -> tuple[object, ...]:
    pairs = [(f"--{name}", *(value if isinstance(value, list) else [value])) for name, value in values.items()]
    return tuple(itertools.chain(*pairs))


# With TraceRL's values, rollouts are most of the cost. The other two have d1's values for everything else; replay
# scores each token in the state in which it was revealed, with the whole prompt visible.
ESTIMATORS: dict[str, tuple[object, ...]] = {
    "one_step": (),
    "replay": ("--estimator", "replay", "--p_mask_prompt", 0),
    "tracerl": flags_of(METHODS["tracerl"].values),
}
NO_CURE = "none"
SHORT_BLOCKS = "blocks of 8"  # and at most one step per two tokens, as for the exact sampler
SURER, LASTING, PREFIX = (f"{SHORT_BLOCKS}, {name}threshold 0.95" for name in ("", "lasting, ", "prefix, "))
OF_BLOCKS: dict[str, tuple[object, ...]] = {  # cure -> flags that it adds to the sampler's
    SHORT_BLOCKS: (),
    SURER: ("--reveal_level", 0.95),
    LASTING: ("--kv_cache", "lasting", "--reveal_level", 0.95),
    PREFIX: ("--kv_cache", "prefix", "--reveal_level", 0.95),
}
CURES: dict[str, tuple[object, ...]] = {
    NO_CURE: (),
    "weights up to 1": ("--sampling_weight_cap", 1),
    "weights up to 3": ("--sampling_weight_cap", 3),
    "temperature 0.6": ("--temperature", 0.6),
    "temperature 1.2": ("--temperature", 1.2),
    **{cure: () for cure in OF_BLOCKS},
}
RATE = 1e-4
SEEDS = (0, 1, 2)
KEPT = (  # the logged metrics that are kept
    *("step", "compute_tokens", "entropy", "kl", "ratio_max", "grad_norm", "rewards/accuracy/mean", "reward"),
    *("sampling/logp_difference_mean", "sampling/logp_difference_abs", "sampling/ratio_max"),
    *("sampling/weight_mean", "sampling/weight_capped", "sampling/forward_passes", "sampling/forward_tokens"),
)


@dataclass(frozen=True)
class Run:
    """One training; if `sampler` is `START`, the evaluation of the model that training starts from.

    Attributes:
        seconds: processor seconds of training at a constant learning rate; 0: training ends with its steps.
        points: number of models saved and evaluated, at even shares of the seconds.
        limit: number of problems for the evaluation; 0: all.
        steps: optimizer steps, over which the learning rate falls linearly to 0; 0: training ends with its seconds.
    """

    task: str
    sampler: str
    estimator: str
    cure: str
    seed: int
    split: str
    learning_rate: float
    seconds: float
    points: int
    limit: int = 0
    steps: int = 0

    @property
    def name(self) -> str:
        parts = [self.task, self.sampler, self.estimator, self.cure, f"seed{self.seed}", self.split]
        parts += [f"{self.learning_rate:g}", f"{self.steps}steps" if self.steps else f"{self.seconds:g}s"]
        return "_".join(parts).replace(" ", "-")

    @property
    def sampling(self) -> list[str]:
        """The flags of sampling, for RL and eval.py."""
        task, level = TASKS[self.task], LEVELS[self.task][self.sampler]
        if self.cure in OF_BLOCKS:
            level = Level((*level.flags, *OF_BLOCKS[self.cure]))
        flags: list[object] = ["--sampler", self.sampler, *level.flags]
        flags += ["--diffusion_steps", level.steps or task.length // 2]
        flags += ["--block_length", task.length // level.blocks if level.blocks else 8]
        return [*map(str, flags)]

    def flags(self, folder: Path, output_dir: Path) -> list[str]:
        """The flags of diffu_grpo_train.py. A budget of seconds is enforced by the callback, not by max_steps."""
        task = TASKS[self.task]
        flags: list[object] = ["--config", ROOT / "diffu-grpo" / "pocket.yaml", "--dataset", task.dataset, *task.flags]
        flags += ["--seed", self.seed, "--model_path", start_of(folder, self)]
        flags += ["--learning_rate", self.learning_rate, "--max_steps", self.steps or 1_000_000]
        flags += ["--lr_scheduler_type", "linear" if self.steps else "constant"]
        flags += ["--eval_strategy", "no", "--save_strategy", "no", "--output_dir", output_dir]
        flags += [*ESTIMATORS[self.estimator], *self.sampling, *CURES[self.cure]]
        return [*map(str, flags)]


def start_of(folder: Path, run: Run) -> Path:
    """The SFT model that a run starts from."""
    return sft_folder(folder, run.task, run.seed) / "sft"


def make_start(folder: Path, run: Run, console: Console) -> None:
    """Trains the SFT model of the run's seed if it is missing."""
    if not (start_of(folder, run) / "model.safetensors").exists():
        state = sft_folder(folder, run.task, run.seed)
        run_phases([sft(state, run.seed, miniature=False, task=run.task)], state, 1, console)


class SavePoints(TrainerCallback):
    """Saves the model at the first step at or after each even share of a budget of this process's processor seconds,
    and ends the run with the last one. If the budget is 0, it saves the model of the run's last step. The time for
    saving is not counted.

    Attributes:
        saved: (folder, processor seconds, step) of each model.
        logs: everything that was logged, also by a run that raised an error.
    """

    def __init__(self, folder: Path, seconds: float, points: int) -> None:
        self.folder, self.seconds, self.points = folder, seconds or math.inf, points
        self.saved: list[tuple[Path, float, int]] = []
        self.logs: list[dict[str, Any]] = []
        self.began = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.process_time()

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        now = time.process_time()
        spent = now - self.began
        if spent < self.seconds * (len(self.saved) + 1) / self.points and state.global_step < state.max_steps:
            return
        check_weights(model, state.global_step)
        path = self.folder / f"step{state.global_step}"
        for part in (model, processing_class):
            part.save_pretrained(path)
        self.saved.append((path, spent, state.global_step))
        control.should_log = True  # the compute up to here
        control.should_training_stop = spent >= self.seconds or len(self.saved) == self.points
        self.began += time.process_time() - now

    def last_step(self, state: Any) -> int:
        """The step at which the seconds will be over, if steps take as long as before."""
        if not state.global_step or math.isinf(self.seconds):
            return int(state.max_steps)
        return math.ceil(state.global_step * self.seconds / (time.process_time() - self.began))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append({"step": state.global_step, **(logs or {})})


def measure(run: Run, folder: Path, console: Console) -> dict[str, Any]:
    """The run's points, each with the problems solved as "0110...", the problems that its last model solves with the
    run's own sampler, and its logs; leaves no files."""
    make_start(folder, run, console)
    output_dir = folder / run.name
    shutil.rmtree(output_dir, ignore_errors=True)  # left by a killed run
    judged: list[object] = ["--split", run.split, *(["--limit", run.limit] if run.limit else [])]
    if run.sampler == START:
        found: dict[str, Any] = {
            "points": [evaluate(run.task, start_of(folder, run), output_dir / "start", judged) | {"seconds": 0.0}]
        }
    else:
        saver = SavePoints(output_dir / "points", run.seconds, run.points)
        reason = train(run.name, run.flags(folder, output_dir), callbacks=[saver])
        compute = {log["step"]: log["compute_tokens"] for log in saver.logs if "compute_tokens" in log}
        points = [
            evaluate(run.task, model, output_dir / f"at_{step}", judged)
            | {"seconds": round(spent, 2), "step": step, "compute_tokens": compute[step]}
            for model, spent, step in saver.saved
        ]
        own = None
        if saver.saved and run.sampler != "exact":
            own = evaluate(run.task, saver.saved[-1][0], output_dir / "own", [*judged, *run.sampling])
        logs = [{key: log[key] for key in KEPT if log.get(key) is not None} for log in saver.logs if "loss" in log]
        found = {"points": points, "own": own, "logs": logs, "not_finite": reason}
    shutil.rmtree(output_dir, ignore_errors=True)
    gc.collect()
    return found


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ValueError if a number that all studies of runs have is out of its range."""
    if not args.learning_rate > 0:
        raise ValueError("--learning_rate must be above 0")
    if args.limit < 0 or min(args.seeds) < 0:
        raise ValueError("--limit and --seeds must not be negative")


def run_missing(runs: Sequence[Run], folder: Path, console: Console) -> list[dict[str, Any]]:
    """Measures the runs without a line in the folder's `RESULTS`, and appends their lines; returns all lines."""
    folder.mkdir(parents=True, exist_ok=True)
    done = [Run(**line["run"]) for line in read_lines(folder / RESULTS)]
    for run in runs:
        if run not in done:
            console.print(run.name)
            line = {"run": asdict(run), **measure(run, folder, console), "record": run_record()}
            append_line(folder / RESULTS, line)
    return read_lines(folder / RESULTS)
