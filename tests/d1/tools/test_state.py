"""A tool leaves the global state of the process as it was, whatever it sets and however it ends."""

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
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from d1.tools.functions import call

LOGGER = logging.getLogger("d1.tests.state")
KEY = [5, 0, 1, 0]


def state():
    """Everything that the functions below change, as values that can be compared."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.benchmark,
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "stdout": sys.stdout,
        "closed": sys.stdout.closed,
        "stderr": sys.stderr,
        "stdin": sys.stdin,
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "warnings": [*warnings.filters],
        "logging": (logging.root.manager.disable, logging.root.level, [*logging.root.handlers]),
        "collector": gc.isenabled(),
        "timeout": socket.getdefaulttimeout(),
        "locale": locale.setlocale(locale.LC_ALL),
        "alarm": signal.getitimer(signal.ITIMER_REAL),
        "handler": signal.getsignal(signal.SIGTERM),
        "mkldnn": torch.backends.mkldnn.enabled,
        "path": [*sys.path],
        "arguments": [*sys.argv],
        "hook": (sys.excepthook, threading.excepthook),
        "builtins": dict(vars(builtins)),
        "logger": (LOGGER.level, LOGGER.disabled, LOGGER.propagate),
        "descriptor": [os.fstat(1).st_ino, os.fstat(2).st_ino],
        "open": len(os.listdir("/proc/self/fd")),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "digits": sys.get_int_max_str_digits(),
        "zone": time.tzname,
    }


def change_environment():
    os.environ["D1_TEST"] = "1"
    os.environ.pop("PATH", None)
    os.environ["HOME"] = "/nowhere"


def lose_output():
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    os.close(2)


def change_builtins():
    builtins.print = None
    builtins.added = 1


def change_time_zone():
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


CHANGES = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "grad": lambda: torch.set_grad_enabled(False),
    "threads": lambda: torch.set_num_threads(7),
    "matmul": lambda: torch.set_float32_matmul_precision("medium"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "cudnn": lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    "python": lambda: random.seed(1),
    "numpy": lambda: np.random.seed(1),
    "torch": lambda: torch.manual_seed(1),
    "folder": lambda: os.chdir("/"),
    "environment": change_environment,
    "stdout": lambda: setattr(sys, "stdout", None),
    "closed": lambda: sys.stdout.close(),
    "stderr": lambda: sys.stderr.close(),
    "stdin": lambda: setattr(sys, "stdin", None),
    "recursion": lambda: sys.setrecursionlimit(77_777),
    "switch": lambda: sys.setswitchinterval(0.5),
    "warnings": lambda: warnings.simplefilter("error"),
    "logging": lambda: (logging.disable(logging.CRITICAL), logging.root.addHandler(logging.NullHandler())),
    "collector": lambda: gc.disable(),
    "timeout": lambda: socket.setdefaulttimeout(3),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8" if locale.setlocale(locale.LC_ALL) == "C" else "C"),
    "alarm": lambda: signal.alarm(30),
    "mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "path": lambda: sys.path.clear(),
    "arguments": lambda: sys.argv.append("--other"),
    "hook": lambda: (setattr(sys, "excepthook", print), setattr(threading, "excepthook", print)),
    "builtins": change_builtins,
    "logger": lambda: (LOGGER.setLevel(logging.CRITICAL), setattr(LOGGER, "disabled", True)),
    "descriptor": lose_output,
    "files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
    "digits": lambda: sys.set_int_max_str_digits(0),
    "zone": change_time_zone,
    "handler": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),  # refused: no thread but the first may
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("ending", ["returns", "raises", "hangs"])
def test_what_a_tool_sets_ends_with_its_call(name, ending):
    def tool():
        CHANGES[name]()
        if ending == "raises":
            raise KeyError(name)
        while ending == "hangs":
            pass

    before, count = state(), torch.get_num_threads()
    outcome = call(tool, {}, 0.1 if ending == "hangs" else 20, KEY)
    assert state() == before
    assert outcome.hung == (ending == "hangs" and name != "handler")
    assert torch.empty(1).dtype == torch.float32
    assert torch.get_num_threads() == count
    sys.stdout.write("")  # is open


def test_a_tool_that_hangs_and_sets_state_again_and_again_ends_before_it_is_restored():
    def tool():
        while True:
            torch.set_default_dtype(torch.float64)
            random.seed(3)

    before = state()
    assert call(tool, {}, 0.1, KEY).hung
    time.sleep(0.2)
    assert state() == before


def test_concurrent_calls_restore_the_state_before_the_first():
    def tool(seconds: float):
        torch.set_default_dtype(torch.float64)
        os.environ["D1_TEST"] = str(seconds)
        time.sleep(seconds)

    before = state()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: call(tool, {"seconds": number / 50}, 20, KEY), (3, 1, 2, 5, 1)))
    assert state() == before


def test_random_numbers_of_a_tool_depend_on_the_key_of_its_call():
    """A resumed run makes a call with the numbers of the first time; other calls have others."""

    def roll():
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    first, other, again = (call(roll, {}, 20, key).text for key in (KEY, [5, 0, 2, 0], KEY))
    assert first == again
    assert not {*first.strip("[]").split(", ")} & {*other.strip("[]").split(", ")}
    random.seed(8)
    expected = random.random()
    random.seed(8)
    call(roll, {}, 20, KEY)
    assert random.random() == expected


class UnreadableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Endless(Exception):
    def __str__(self):
        return str(self)


class Unprintable:
    def __str__(self):
        raise OSError("no text")


def raises(error):
    def tool():
        raise error

    return tool


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (raises(UnreadableError()), "error: UnreadableError: its text cannot be read (RuntimeError)"),
        (raises(Endless()), "error: Endless: its text cannot be read (RecursionError)"),
        (lambda: Unprintable(), "error: OSError: no text"),
        (raises(ValueError(UnreadableError())), "error: ValueError: its text cannot be read (RuntimeError)"),
        (raises(ExceptionGroup("several", [UnreadableError()])), "error: ExceptionGroup: several (1 sub-exception)"),
        (raises(KeyboardInterrupt()), "error: KeyboardInterrupt: "),
        (raises(GeneratorExit()), "error: GeneratorExit: "),
        (raises(RuntimeError("\ud800")), "error: RuntimeError: \ufffd"),
    ],
)
def test_an_error_without_a_text_is_an_error_and_no_time_out(tool, said):
    started = time.perf_counter()
    assert call(tool, {}, 20, KEY) == (said, True, False)
    assert time.perf_counter() - started < 10
