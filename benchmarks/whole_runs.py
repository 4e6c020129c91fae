"""python benchmarks/whole_runs.py [--only sft rl evaluation] [--output_dir DIR]

Where the processor seconds of whole phases of `make demo` go: SFT, RL and one evaluation of the base model, each by its
entry point with the demo's own flags, in a fork that clocks itself from its start to its end. The imports that the
phases share are made once, and are part of "all of make demo".

Of what a phase does, "in passes" is inside the transformer's forward passes, with its head, and inside backward passes.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import functools
import importlib
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from d1.runs.entry import quick_imports, run_script

if TYPE_CHECKING:
    from benchmarks.clock import Clock

ROOT = Path(__file__).resolve().parents[1]
TRAINING = {
    "accelerate:Accelerator.clip_grad_norm_": "optimizer",
    "accelerate.optimizer:AcceleratedOptimizer.step": "optimizer",
    "transformers:Trainer.train": "training loop",
    "transformers:Trainer.evaluate": "evaluation in training",
    "d1.models.tokenizer:load_tokenizer": "data, templates",
    "d1.runs.hub:publish": "end",
}
# What is watched in each entry point, and the row its seconds go to. What is watched within another is left out there.
WATCHED = {
    "sft": TRAINING
    | {
        "sft_setup:load_data": "data, templates",
        "sft_setup:prepare_model": "model",
        "sft_trainer:dLLMTrainer.__init__": "trainer",
        "sft_batches:dLLMDataCollator.__call__": "data, templates",
        "sft_trainer:dLLMTrainer.compute_loss": "update",
        "sft_trainer:dLLMTrainer.log": "logging",
        "sft_trainer:dLLMTrainer._save_checkpoint": "checkpoints",
        "sft_trainer:dLLMTrainer.save_model": "checkpoints",
        "sft_plot:plot_losses": "end",
    },
    "rl": TRAINING
    | {
        "grpo_setup:load_problems": "data, templates",
        "grpo_checks:check_prompts": "data, templates",
        "rewards:check_rewards": "data, templates",
        "grpo_setup:start_model": "model",
        "diffu_grpo_trainer:DiffuGRPOTrainer.__init__": "trainer",
        "diffu_grpo_trainer:DiffuGRPOTrainer.sample": "rollout",
        "diffu_grpo_trainer:DiffuGRPOTrainer.score_rollout": "scoring",
        "diffu_grpo_trainer:DiffuGRPOTrainer._calculate_rewards": "rewards",
        "diffu_grpo_trainer:DiffuGRPOTrainer.loss": "update",
        "diffu_grpo_trainer:DiffuGRPOTrainer.log": "logging",
        "shown_rollouts:ShowRollouts.on_log": "logging",
        "diffu_grpo_trainer:DiffuGRPOTrainer._save_checkpoint": "checkpoints",
        "diffu_grpo_trainer:DiffuGRPOTrainer.save_model": "checkpoints",
        "grpo_setup:write_report": "end",
    },
    "evaluation": {
        "eval_prompts:read_prompts": "data, templates",
        "d1.models.tokenizer:load_tokenizer": "data, templates",
        "generate_completions:load_model_for": "model",
        "generate_completions:generate_missing": "rollout",
        "eval_journal:Journal.append": "checkpoints",
        "eval_journal:Journal.finish": "end",
        "score_setups:score_setup": "end",
    },
}
PASSES = " in passes"  # behind a row's name: the part of it inside passes
START, REST, EXIT = "imports, start", "settings, checks, the rest", "exit"
ROWS = (
    *(START, REST, "data, templates", "model", "trainer", "training loop", "rollout", "scoring", "rewards", "update"),
    *("optimizer", "evaluation in training", "logging", "checkpoints", "end", EXIT),
)
SCRIPTS = {"sft": "sft_train.py", "rl": "diffu_grpo_train.py", "evaluation": "eval.py"}
WORK = ("rollout", "scoring", "update", "optimizer")  # what a run is for; all else surrounds it


def watch(clock: Clock, kind: str) -> None:
    """Books what the entry point `kind` calls to the rows of `WATCHED`, and passes to the row they happen in."""

    def passing() -> str:
        return clock.open[-1].removesuffix(PASSES) + PASSES

    for place, row in WATCHED[kind].items():
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        clock.watch(functools.reduce(getattr, owners, importlib.import_module(module)), name, row)
    watch_passes(clock, passing)
    if kind != "evaluation":
        accelerator = importlib.import_module("accelerate").Accelerator
        accelerator.backward = clock.timed(clock.timed(accelerator.backward, passing), "update")


def watch_passes(clock: Clock, passing: Callable[[], str]) -> None:
    names = "transformers.models.llama.modeling_llama", "d1.models.head"  # the pocket model's class
    llama, head = (cast("Any", importlib.import_module(name)) for name in names)
    llama.LlamaModel.__call__ = clock.timed(llama.LlamaModel.__call__, passing)
    parts = head.logit_parts

    def clocked_parts(*args: Any, **options: Any) -> Iterator[Any]:
        found = parts(*args, **options)
        while True:
            with clock.phase(passing()):
                part = next(found, None)
            if part is None:
                return
            yield part

    head.logit_parts = clocked_parts


def watch_imports(clock: Clock) -> None:
    """Books every import, wherever it happens, to `START`."""
    found = builtins.__import__

    def clocked(*args: Any, **options: Any) -> Any:
        if clock.open[-1] == START:  # within another import
            return found(*args, **options)
        with clock.phase(START):
            return found(*args, **options)

    builtins.__import__ = clocked


def work(kind: str, out: str, script: str, *flags: str) -> None:
    """Runs a script of the working folder as `python script flags` does, and writes its processor seconds by row."""
    sys.path.insert(0, os.getcwd())
    with quick_imports():  # as the script would have made them
        from benchmarks.clock import Clock

        clock = Clock()
        clock.open, clock.since = [START], (0.0, 0.0)  # from the start of the process
        watch(clock, kind)
    clock.turn()
    clock.open = [REST]
    watch_imports(clock)
    atexit.register(end, clock, Path(out))  # what the script registers runs before
    sys.argv = [script, *flags]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        clock.turn()
        clock.open = [EXIT]


def end(clock: Clock, out: Path) -> None:
    clock.turn()
    out.write_text(json.dumps(clock.cpu))


def shared_imports() -> float:
    """Processor seconds of the fork server's imports."""
    from warm_processes import ENVIRONMENT, IMPORTED

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {', '.join(IMPORTED)}"], env=os.environ | ENVIRONMENT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(kind: str, phase: Any, folder: Path) -> dict[str, float]:
    """Processor seconds of a phase's process, by row; with `PASSES` behind a row's name, those inside passes."""
    from warm_processes import start

    out, log = folder / f"{kind}.json", folder / f"{kind}.log"
    script = [str(part) for part in phase.command[1:]]
    process = start([sys.executable, __file__, "--worker", kind, str(out), *script], phase.folder, log)
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{kind} failed:\n{log.read_text()[-3000:]}")
    return json.loads(out.read_text())


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Of all seconds: those inside passes, those of `WORK` outside passes, and those around the work, in percent."""
    whole = sum(seconds.values())
    inside = sum(value for row, value in seconds.items() if row.endswith(PASSES))
    working = sum(seconds.get(row, 0.0) for row in WORK)
    parts = {"inside passes, %": inside, "beside passes, %": working, "around the work, %": whole - inside - working}
    return {"seconds": whole} | {name: 100 * part / whole for name, part in parts.items()}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*WATCHED], default=[*WATCHED], help="phases to measure")
    parser.add_argument("--miniature", action="store_true", help="a few steps and problems of each")
    parser.add_argument("--output_dir", default="benchmark_results")
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # a process of `measure`
    return parser


def main(args: argparse.Namespace) -> None:
    if args.worker:
        return work(*args.worker)
    sys.path.insert(0, str(ROOT / "pocket"))
    from demo import phases_of

    from benchmarks.machine import describe
    from benchmarks.reports import write_report

    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        phases = phases_of(Path(folder), 0, args.miniature)
        of_kind = {kind: [phase for phase in phases if script in phase.command] for kind, script in SCRIPTS.items()}
        found = {kind: measure(kind, of_kind[kind][0], Path(folder)) for kind in args.only}
    table = {
        row: {f"{kind}{end}": seconds.get(row + end, 0.0) for kind, seconds in found.items() for end in ("", PASSES)}
        for row in ROWS
    }
    whole = {kind: shares(seconds) for kind, seconds in found.items()}
    if len(found) == len(WATCHED):
        summed: dict[str, float] = defaultdict(float, {START: shared_imports()})
        for kind, seconds in found.items():
            for row, value in seconds.items():
                summed[row] += value * len(of_kind[kind])
        whole["all of make demo"] = shares(summed)
    report = {"machine": describe(), "settings": {"phases": " ".join(args.only), "miniature": args.miniature}}
    write_report(report | {"processor seconds": table, "shares": whole}, args.output_dir, "whole_runs")


if __name__ == "__main__":
    run_script("whole_runs.py", lambda: main(make_parser().parse_args()))
