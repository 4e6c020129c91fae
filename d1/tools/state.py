"""The global state of the process, which a call of a tool leaves as it was.

A tool is a user's function in the process of the run. What it sets, such as torch's default dtype, a seed, the working
directory or standard output, ends with its call. A new kind of state is an entry of `STATE`. PyTorch's default device,
grad mode and autocast belong to the thread of the call, and end with it.
"""

from __future__ import annotations

import builtins
import gc
import locale
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from d1.masking import keyed_generator


class BorrowedStream:
    """A standard stream for a tool: to close or detach it leaves the stream itself open."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def close(self) -> None:
        self._stream.flush()

    def detach(self) -> Any:
        return self._stream.buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


STREAMS = ("stdin", "stdout", "stderr")


def lend_streams() -> dict[str, Any]:
    """Replace the standard streams by borrowed ones; returns the streams."""
    streams = {name: getattr(sys, name) for name in STREAMS}
    for name, stream in streams.items():
        if stream is not None:
            setattr(sys, name, BorrowedStream(stream))
    return streams


def restore_streams(streams: dict[str, Any]) -> None:
    for name, stream in streams.items():
        setattr(sys, name, stream)


def working_directory() -> str | None:
    """The working directory; None if it was removed."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return None


def restore_working_directory(folder: str | None) -> None:
    if folder is not None:
        with suppress(OSError):  # removed since
            os.chdir(folder)


def restore_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    time.tzset()


def umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def restore_alarm(timer: tuple[float, float]) -> None:
    """Stop a timer that was not there before, whose signal would end the process."""
    if timer == (0.0, 0.0):
        signal.setitimer(signal.ITIMER_REAL, 0)


def warning_filters() -> tuple[Any, ...]:
    return tuple(warnings.filters)


def restore_warning_filters(filters: tuple[Any, ...]) -> None:
    if tuple(warnings.filters) != filters:
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]


def logging_state() -> tuple[int, int, list[logging.Handler]]:
    return logging.root.manager.disable, logging.root.level, [*logging.root.handlers]


def restore_logging(state: tuple[int, int, list[logging.Handler]]) -> None:
    disabled, level, handlers = state
    logging.disable(disabled)
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers


def restore_collector(enabled: bool) -> None:
    if enabled:
        gc.enable()
    else:
        gc.disable()


def gpu_rng_states() -> list[torch.Tensor]:
    """The states of the GPUs' generators; none before CUDA is initialised."""
    if not torch.cuda.is_initialized():
        return []
    return torch.cuda.get_rng_state_all()


def restore_gpu_rng_states(states: list[torch.Tensor]) -> None:
    if states:
        torch.cuda.set_rng_state_all(states)


Hooks = tuple[Any, ...]


def hooks() -> Hooks:
    return sys.excepthook, threading.excepthook, sys.displayhook, sys.breakpointhook, sys.unraisablehook


def restore_hooks(functions: Hooks) -> None:
    sys.excepthook, threading.excepthook, sys.displayhook, sys.breakpointhook, sys.unraisablehook = functions


def restore_builtins(functions: dict[str, Any]) -> None:
    for name in vars(builtins).keys() - functions.keys():
        delattr(builtins, name)
    vars(builtins).update(functions)


def import_state() -> tuple[list[str], list[str]]:
    return [*sys.path], [*sys.argv]


def restore_import_state(state: tuple[list[str], list[str]]) -> None:
    path, arguments = state
    sys.path[:] = path
    sys.argv[:] = arguments


def loggers() -> list[tuple[logging.Logger, int, bool, bool]]:
    """The named loggers, with what silences them."""
    named = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    return [(logger, logger.level, logger.disabled, logger.propagate) for logger in named]


def restore_loggers(states: list[tuple[logging.Logger, int, bool, bool]]) -> None:
    for logger, level, disabled, propagate in states:
        if logger.level != level:  # setting it clears the caches of all loggers
            logger.setLevel(level)
        logger.disabled = disabled
        logger.propagate = propagate


def duplicate_descriptors() -> dict[int, int]:
    """Copies of the descriptors of the standard streams, of those that are open."""
    copies = {}
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            copies[descriptor] = os.dup(descriptor)
    return copies


def restore_descriptors(copies: dict[int, int]) -> None:
    for descriptor, copy in copies.items():
        os.dup2(copy, descriptor)
        os.close(copy)


LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_CORE)


def resource_limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(kind) for kind in LIMITS]


def restore_resource_limits(limits: list[tuple[int, int]]) -> None:
    for kind, (soft, hard) in zip(LIMITS, limits, strict=True):
        current_soft, current_hard = resource.getrlimit(kind)
        if (current_soft, current_hard) != (soft, hard):
            with suppress(OSError, ValueError):  # a hard limit that was lowered stays so
                resource.setrlimit(kind, (soft, current_hard))


def determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def restore_determinism(state: tuple[bool, bool]) -> None:
    if determinism() != state:  # PyTorch imports its compiler to set it
        enabled, warn_only = state
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def cudnn_flags() -> tuple[bool, bool]:
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


def restore_cudnn_flags(flags: tuple[bool, bool]) -> None:
    benchmark, deterministic = flags
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.deterministic = deterministic


# How each kind of state is read, and how it is restored.
STATE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (lend_streams, restore_streams),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (gpu_rng_states, restore_gpu_rng_states),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (determinism, restore_determinism),
    (cudnn_flags, restore_cudnn_flags),
    (lambda: torch.backends.mkldnn.enabled, lambda value: setattr(torch.backends.mkldnn, "enabled", value)),
    (working_directory, restore_working_directory),
    (lambda: dict(os.environ), restore_environment),
    (umask, os.umask),
    (lambda: signal.getitimer(signal.ITIMER_REAL), restore_alarm),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (warning_filters, restore_warning_filters),
    (logging_state, restore_logging),
    (loggers, restore_loggers),
    (hooks, restore_hooks),
    (lambda: dict(vars(builtins)), restore_builtins),
    (import_state, restore_import_state),
    (duplicate_descriptors, restore_descriptors),
    (resource_limits, restore_resource_limits),
    (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    (gc.isenabled, restore_collector),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
)


class StateKeeper:
    """Keeps the state of the process during calls: the first of concurrent calls reads it, the last restores it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0
        self.states: list[tuple[Callable[[Any], Any], Any]] = []

    @contextmanager
    def preserve(self) -> Iterator[None]:
        with self.lock:
            if self.calls == 0:
                self.states = [(restore, read()) for read, restore in STATE]
            self.calls += 1
        try:
            yield
        finally:
            with self.lock:
                self.calls -= 1
                if self.calls == 0:
                    for restore, state in self.states:
                        restore(state)


KEEPER = StateKeeper()


@contextmanager
def preserve_state(key: Sequence[int] | None = None) -> Iterator[None]:
    """Inside, the global state of the process may change; afterwards it is as before.

    Args:
        key: of the random numbers inside, which begin with a seed that depends on it alone; None: they begin with the
            state of the process.
    """
    with KEEPER.preserve():
        if key is not None:
            seed_generators(keyed_generator(*key).initial_seed())
        yield


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def preserve_thread_count() -> Iterator[None]:
    """Restore the number of PyTorch's threads, in the thread that may have changed it: each thread has its own."""
    count = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
