"""RL with rewards from the sandbox, killed while programs are judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from d1.rl import train
from tests.commands import ROOT
from tests.sandbox import skip_without_sandbox
from tests.tiny_grpo import clockless

FLAGS = {
    "config": "pocket.yaml",
    "model_path": ROOT / "pocket" / "programs_base",
    "dataset": "programs",
    "max_prompt_length": 12,
    "max_completion_length": 24,
    "diffusion_steps": 12,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "num_iterations": 2,
    "max_steps": 6,  # three rollouts
    "save_steps": 1,
    "logging_steps": 1,
    "eval_strategy": "no",
    "resume_from_checkpoint": "true",
}


def flags(folder: Path) -> list[str]:
    return [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))] + ["--output_dir", str(folder)]


def until(holds: Callable[[], Any]) -> Any:
    """What `holds` returns as soon as that is something."""
    deadline = time.monotonic() + 300
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


def logs(folder: Path) -> list[dict[str, Any]]:
    """What a run logged at each step, without what depends on the clock."""
    return clockless([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def test_a_run_killed_while_programs_are_judged_leaves_none_and_repeats_an_unbroken_one(
    tmp_path: Path, monkeypatch: Any
) -> None:
    skip_without_sandbox("programs")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "diffu_grpo_train.py", *flags(killed)]
    monkeypatch.chdir(ROOT / "diffu-grpo")
    run = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def judging() -> list[psutil.Process]:
        """The sandboxes of the second rollout."""
        assert run.poll() is None
        found = run.children(recursive=True) if (killed / "checkpoint-2").exists() else []
        return [child for child in found if "bwrap" in child.name()]

    sandboxes = until(judging)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    until(lambda: not any(sandbox.is_running() for sandbox in sandboxes))
    assert not (killed / "checkpoint-3").exists()
    for folder in (killed, whole):
        train.main(*train.make_parser().parse_args_and_config(flags(folder)))
    assert [line["step"] for line in logs(killed)] == [line["step"] for line in logs(whole)]
    assert logs(killed) == logs(whole)
    assert len({line["reward"] for line in logs(whole) if "reward" in line}) > 1
    expected, found = (load_file(folder / "model.safetensors") for folder in (whole, killed))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
