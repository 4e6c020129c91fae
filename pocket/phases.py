"""Run the commands of a job as processes, several at a time, with live progress; a stopped job can be continued."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from d1.files import write_atomically
from d1.runs.record import FILES, TOKENIZER_FILES, hash_file, hash_folder, model_files

# One thread is fastest for models this small. glibc returns large blocks to the kernel when they are freed, which then
# maps and clears new ones for the next tensors; the MALLOC values keep them.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
ENVIRONMENT |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": f"{2**34}", "MALLOC_TOP_PAD_": f"{2**26}"}
PERCENT = re.compile(r"(\d+)%\|")  # in tqdm's progress bar, which every command writes to its log


@dataclass
class Phase:
    """A command [python, script, *flags]. `weight` is its share of the work (seconds on a laptop core); `needs` names
    the phases that must finish before it; `threads` are those of its products of matrices."""

    name: str
    command: Sequence[str]
    folder: Path
    weight: float
    needs: Sequence[str] = ()
    threads: int = 1


class PhaseError(RuntimeError):
    """A command failed (the message has the end of its log), or a folder belongs to another job."""


def run_phases(phases: Sequence[Phase], state_dir: Path, jobs: int, console: Console) -> dict[str, float]:
    """Runs all phases, at most `jobs` at a time, and returns the seconds that each took.

    Finished phases are listed in `state_dir/phases.json`, and a second call skips them; a phase that was interrupted
    by Ctrl-C is started again and resumes by its own means.

    Raises:
        PhaseError: a command failed, or `state_dir` belongs to another job: other commands, or other contents of a
            model or a file that they name.
        KeyboardInterrupt: after the running commands have been stopped.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    path = state_dir / "phases.json"
    commands = {phase.name: [*phase.command] for phase in phases}
    state: dict[str, Any] = {"commands": {}, "seconds": {}, "done": [], "contents": {}}
    state |= json.loads(path.read_text()) if path.exists() else {}
    contents = {name: content for phase in phases for name, content in _contents(phase, state_dir)}
    for known, found in (state["commands"], commands), (state["contents"], contents):
        for name, value in found.items():
            if known.setdefault(name, value) != value:
                what = f"another command of the stage {name}" if found is commands else f"other contents of {name}"
                raise PhaseError(
                    f"{state_dir} was made with {what}: to continue it, repeat its settings and files; to start again, "
                    "give another output folder"
                )
    seconds, done, logs = state["seconds"], state["done"], {name: state_dir / f"{name}.log" for name in commands}
    running: dict[str, tuple[subprocess.Popen, float]] = {}

    def ended(name: str, started: float, finished: bool) -> None:
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - started
        done.extend([name] if finished else [])
        write_atomically(path, json.dumps(state, indent=1))

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False)
    with ended_by_signals(), Progress(*columns, *left, console=console) as progress:
        bar = progress.add_task("all", total=sum(phase.weight for phase in phases))
        try:
            while not {*commands} <= {*done}:
                ready = [p for p in phases if p.name not in {*done, *running} and {*p.needs} <= {*done}]
                for phase in ready[: jobs - len(running)]:
                    running[phase.name] = (_start(phase, logs[phase.name]), time.monotonic())
                time.sleep(0.1)
                for name, (process, started) in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        ended(name, started, finished=process.returncode == 0)
                        if process.returncode:
                            raise PhaseError(f"{name} failed:\n{_tail(logs[name], 3000)}")
                        console.print(f"  {name:<28} {seconds[name]:6.0f} s")
                parts = dict.fromkeys(done, 1.0) | {name: _fraction(logs[name]) for name in running}
                completed = sum(phase.weight * parts.get(phase.name, 0.0) for phase in phases)
                progress.update(bar, completed=completed, description=", ".join(running) or "all")
        finally:
            for name, (process, started) in running.items():
                _stop(process)
                ended(name, started, finished=False)
    return {name: seconds[name] for name in commands}


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, and the SIGHUP of a terminal that is closed, raise KeyboardInterrupt as Ctrl-C does, so that the phases
    at work are stopped; an ignored signal, as under nohup, stays ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _contents(phase: Phase, state_dir: Path) -> Iterator[tuple[str, Any]]:
    """The models and files that a command names, by fingerprint; without what the job itself makes."""
    for word in phase.command[2:]:
        path = Path(os.path.realpath(phase.folder / word))
        if word.endswith((*FILES, ".yaml")) and os.path.isfile(path):
            yield word, hash_file(str(path))
        elif os.path.isfile(path / "config.json") and not path.is_relative_to(state_dir.resolve()):
            yield word, hash_folder(str(path), [*model_files(str(path)), *TOKENIZER_FILES])


def _start(phase: Phase, log: Path) -> subprocess.Popen:
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(phase.threads)}
    given: dict[str, Any] = {"cwd": phase.folder, "env": environment, "stdin": subprocess.DEVNULL}
    with open(log, "ab", buffering=0) as file:
        file.write(f"\n$ {' '.join(phase.command)}\n".encode())
        # In its own session, so that Ctrl-C reaches only this process, which then stops the others.
        return subprocess.Popen(phase.command, **given, stdout=file, stderr=file, start_new_session=True)


def _stop(process: subprocess.Popen) -> None:
    """Ends a process and its children: SIGTERM first, SIGKILL after five seconds."""
    for kill, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, kill)
                process.wait(patience)


def _tail(log: Path, size: int) -> str:
    return log.read_bytes()[-size:].decode(errors="replace")


def _fraction(log: Path) -> float:
    """The progress of a running phase, from 0 to 1, by its last progress bar."""
    found = PERCENT.findall(_tail(log, 2000).rpartition("\n$ ")[2])
    return min(int(found[-1]), 100) / 100 if found else 0.0
