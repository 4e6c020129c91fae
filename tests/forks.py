"""Scripts in real processes: each is a fork of one process that has imported the libraries, which takes 8 seconds."""

from __future__ import annotations

import gc
import glob
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import yaml

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["d1.rl.train", "d1.rl.trainer", "d1.sft.stage", "d1.eval.completions"])


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def deepspeed(stage: int) -> dict[str, str]:
    """What Accelerate's launcher sets for ZeRO on a CPU."""
    options = {"ZERO_STAGE": str(stage), "ZERO3_INIT": "false", "ZERO3_SAVE_16BIT_MODEL": str(stage == 3).lower()}
    options |= {"OFFLOAD_OPTIMIZER_DEVICE": "none", "OFFLOAD_PARAM_DEVICE": "none"}
    shared = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    return shared | {f"ACCELERATE_DEEPSPEED_{name}": value for name, value in options.items()}


def without_kernels() -> None:
    """Leaves the sums over processes to gloo: DeepSpeed would compile kernels of its own for CPUs, for a minute."""
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def fsdp2() -> dict[str, str]:
    """What Accelerate's launcher sets for `launch/fsdp2.yaml`, on a CPU in fp32."""
    options = yaml.safe_load((Path(__file__).parents[1] / "launch" / "fsdp2.yaml").read_text())["fsdp_config"]
    shared = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    return shared | {name.upper(): str(value).lower() for name, value in options.items()}


def sharded(path: str, *words: str) -> None:
    """`script`, or `module`, with FSDP2 over gloo."""
    use_fsdp2()
    (script if path.endswith(".py") else module)(path, *words)


def use_fsdp2() -> None:
    """Makes Accelerate take FSDP2 over gloo, which it offers GPUs only: on CPUs it silently takes DDP. The processes
    are called GPUs while it decides. Each step of an optimizer checks that every weight it trains is sharded."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import register_optimizer_step_post_hook

    decide = AcceleratorState.__init__

    def as_gpus(state: AcceleratorState, *given: Any, **more: Any) -> None:
        if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        decide(state, *given, **more)

    def check(optimizer: Any, *_: Any) -> None:
        for weight in (one for group in optimizer.param_groups for one in group["params"]):
            assert isinstance(weight, DTensor), f"a weight of shape {tuple(weight.shape)} is not sharded"
            assert weight.to_local().numel() < weight.numel()

    AcceleratorState.__init__ = as_gpus  # type: ignore[method-assign]
    register_optimizer_step_post_hook(check)


def script(path: str, *words: str) -> None:
    """What `python path words...` does."""
    sys.argv[:] = [path, *words]
    sys.path.insert(0, str(Path(path).absolute().parent))
    runpy.run_path(path, run_name="__main__")


def module(name: str, *words: str) -> None:
    """What `python -m name words...` does."""
    sys.argv[:] = [name, *words]
    sys.modules.pop(f"{name}.__main__", None)  # which a test may have imported
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def die_at(pattern: str) -> None:
    """SIGKILL to this process as soon as a file of this pattern exists.

    A thread of the process itself: it cannot come too late on a busy machine, as a test that watches from outside can.
    """
    while not glob.glob(pattern, recursive=True, include_hidden=True):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def within(log: Path, folder: Path, environment: dict[str, str], work: Callable[..., object], *given: Any) -> None:
    """Runs `work(*given)` as a process of its own session, in `folder`, with both outputs appended to `log`."""
    gc.freeze()  # or each collection would search all libraries
    # As tests/conftest.py in the tests' own process: MKL then has other kernels than with OMP_NUM_THREADS=1 alone.
    torch.set_num_threads(1)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        without_kernels()
    if "KILLED_AT" in environment and environment.get("RANK", "0") == "0":
        threading.Thread(target=die_at, args=[environment["KILLED_AT"]], daemon=True).start()
    work(*given)


def start(
    work: Callable[..., object], *given: Any, log: Path, folder: Path, processes: int = 1, **environment: str | None
) -> list[BaseProcess]:
    """`processes` processes that call `work(*given)`; of several, each has the variables that launchers set.

    A variable that is None is not set. `KILLED_AT`: a pattern of files; the first process kills itself when one exists.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    shared = {name: value for name, value in variables.items() if value is not None}
    if processes > 1:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
        shared |= {"LOCAL_WORLD_SIZE": str(processes)}
    started = []
    for rank in range(processes):
        own = shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {})
        started.append(SERVER.Process(target=within, args=(log, folder, own, work, *given)))
        started[-1].start()
    return started


def job(
    program: Path | str, flags: Sequence[str], output_dir: Path, processes: int = 1, **environment: str | None
) -> list[BaseProcess]:
    """A script in its own folder, or a module, as the job "job" in `output_dir`; its log is `output_dir`/log."""
    words = [*flags, "--output_dir", str(output_dir), "--job_name", "job"]
    where: dict[str, Any] = {"log": output_dir / "log", "processes": processes, **environment}
    if isinstance(program, str):
        work = sharded if "ACCELERATE_USE_FSDP" in environment else module
        return start(work, program, *words, folder=Path(__file__).parents[1], **where)
    return start(script, program.name, *words, folder=program.parent, **where)


def finish(started: Sequence[BaseProcess], log: Path, status: int = 0, timeout: float = 900) -> str:
    """What the processes wrote, once all have ended with `status`."""
    try:
        for process in started:
            process.join(timeout)
        text = log.read_text()
        assert [process.exitcode for process in started] == [status] * len(started), text[-4000:]
    finally:
        kill(started)
    return text


def wait_for_kill(started: Sequence[BaseProcess], log: Path, timeout: float = 900) -> None:
    """Waits until the first process has met `KILLED_AT`, then kills the others."""
    started[0].join(timeout)
    kill(started)
    assert started[0].exitcode == -signal.SIGKILL, log.read_text()[-4000:]


def kill(started: Sequence[BaseProcess]) -> None:
    """SIGKILL, and wait for the end."""
    for process in started:
        process.kill()
    for process in started:
        process.join()
