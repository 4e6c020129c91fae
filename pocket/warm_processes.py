"""Starts `python script flags` as a process that need not import PyTorch, Transformers and TRL, which takes it seconds.

Python's fork server (`multiprocessing`) imports them once, and each command is a fork of it. The server does nothing
else: it reads no model and asks for no GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

# Set before the imports, as libraries read them then: small models waste threads, and a count of GPUs that goes through
# CUDA would keep the forks from using them.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
IMPORTED = (
    *("trl.trainer.grpo_trainer", "transformers.models.llama.modeling_llama", "matplotlib.pyplot"),
    *("d1.models.load", "d1.sampling.stream", "d1.scoring.views"),
)


def start(command: Sequence[object], folder: Path, log: Path) -> BaseProcess:
    """Starts [python, script, *flags] in `folder`, in a session of its own; what it says goes to the end of `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    with _small_and_quiet():
        forkserver.ensure_running()
    arguments = [str(part) for part in command[1:]]
    process = context.Process(target=_run, args=(arguments, str(folder), str(log), os.environ | ENVIRONMENT))
    process.start()
    return process


def stop(process: BaseProcess) -> None:
    """Ends it and what it has started: asks first, and does not ask again after five seconds."""
    for kill, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        if process.exitcode is None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kill)
            process.join(patience)


@contextlib.contextmanager
def _small_and_quiet() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(arguments: list[str], folder: str, log: str, environment: dict[str, str]) -> None:
    gc.freeze()  # a search for garbage, which the trainers order, need not go through all that is imported
    os.setsid()  # Ctrl-C reaches whoever started this alone, who then stops it in order
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which `multiprocessing` leaves out: temporary folders are removed by these
