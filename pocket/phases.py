"""Runs the commands of a job as processes, some side by side, with live progress, and continues where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# One thread is fastest for models this small.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
PERCENT = re.compile(r"(\d+)%\|")  # tqdm's bar, which every entry point writes to its log


@dataclass
class Phase:
    """A command [python, script, *flags]. `weight` is its share of the work (seconds on a laptop core); `needs` names
    phases before it."""

    name: str
    command: Sequence[str]
    folder: Path
    weight: float
    needs: Sequence[str] = ()


class PhaseError(RuntimeError):
    """A command failed; the message has the end of its log."""


def run_phases(phases: Sequence[Phase], state_dir: Path, jobs: int, console: Console) -> dict[str, float]:
    """Runs all phases, at most `jobs` at a time, and returns the seconds each took.

    What is done is written to `state_dir/phases.json`, so a second call skips it; a phase cut off by Ctrl-C is started
    again and resumes by its own means.

    Raises:
        PhaseError: a command failed, or `state_dir` belongs to another job (other commands).
        KeyboardInterrupt: after the running commands have been stopped.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    state = _State(state_dir / "phases.json", phases)
    running: dict[str, tuple[subprocess.Popen, float]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False)
    with Progress(*columns, *left, console=console) as progress:
        bar = progress.add_task("all", total=sum(phase.weight for phase in phases))
        try:
            while not all(phase.name in state.done for phase in phases):
                ready = [p for p in phases if p.name not in state.done and p.name not in running]
                ready = [p for p in ready if state.done.issuperset(p.needs)]
                for phase in ready[: jobs - len(running)]:
                    running[phase.name] = (_start(phase, state_dir), time.monotonic())
                time.sleep(0.1)
                for name in list(running):
                    process, started = running[name]
                    if process.poll() is None:
                        continue
                    del running[name]
                    state.add(name, time.monotonic() - started, done=process.returncode == 0)
                    if process.returncode:
                        raise PhaseError(f"{name} failed:\n{_tail(state_dir / f'{name}.log', 3000)}")
                    console.print(f"  {name:<28} {state.seconds[name]:6.0f} s")
                fractions = {name: _fraction(state_dir / f"{name}.log") for name in running}
                done = sum(p.weight * (p.name in state.done or fractions.get(p.name, 0.0)) for p in phases)
                progress.update(bar, completed=done, description=", ".join(running) or "all")
        finally:
            for name, (process, started) in running.items():
                _stop(process)
                state.add(name, time.monotonic() - started, done=False)
    return {phase.name: state.seconds[phase.name] for phase in phases}


class _State:
    """What has been done, kept in a file that is replaced at once."""

    def __init__(self, path: Path, phases: Sequence[Phase]) -> None:
        self.path = path
        self.commands = {phase.name: [str(part) for part in phase.command] for phase in phases}
        self.seconds: dict[str, float] = {}
        self.done: set[str] = set()
        if path.exists():
            saved = json.loads(path.read_text())
            if any(saved["commands"].get(name, command) != command for name, command in self.commands.items()):
                raise PhaseError(f"{path.parent} was made with other commands: remove that folder to start again")
            self.commands = saved["commands"] | self.commands
            self.seconds, self.done = saved["seconds"], set(saved["done"])

    def add(self, name: str, seconds: float, done: bool) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if done:
            self.done.add(name)
        content = {"commands": self.commands, "seconds": self.seconds, "done": sorted(self.done)}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1))
        os.replace(partial, self.path)


def _start(phase: Phase, state_dir: Path) -> subprocess.Popen:
    log = state_dir / f"{phase.name}.log"
    with open(log, "ab") as file:
        file.write(f"\n$ {' '.join(map(str, phase.command))}\n".encode())
        file.flush()
        # A session of its own: Ctrl-C reaches only this process, which then stops the others in order.
        return subprocess.Popen(
            [str(part) for part in phase.command],
            cwd=phase.folder,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _stop(process: subprocess.Popen) -> None:
    """Ends a process and what it has started: asks first, and kills after five seconds."""
    for kill, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, kill)
                process.wait(patience)


def _tail(log: Path, size: int) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read().decode(errors="replace")


def _fraction(log: Path) -> float:
    found = PERCENT.findall(_tail(log, 2000).rpartition("\n$ ")[2]) if log.exists() else []
    return min(int(found[-1]), 100) / 100 if found else 0.0
