"""python -m d1 sandbox check: whether programs can be judged on this machine, and what to install where they cannot."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from d1.ranges import setting
from d1.sandbox import WORKERS, Cases, Limits, SandboxError, passed, working_python
from d1.sandbox.box import FAMILIES

WRITES = """
import contextlib
def f():
    found = []
    for folder in ("/", "/usr", "/home", "/dev", "/dev/shm", "/tmp"):
        with contextlib.suppress(OSError):
            open(folder + "/written", "w").close()
            found.append(folder)
    return found
"""
FORKS = """
import os, time
def f():
    for count in range(1000):
        try:
            if not os.fork():
                time.sleep(100)
        except OSError:
            return count
"""
FILLS = """
import contextlib
def f():
    with open("/tmp/file", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)) == 1 << 20: pass
        return file.tell()
"""
HOLDS = """
def f(size):
    try: return len(bytearray(size))
    except MemoryError: return 0
"""
HIDES = """
import contextlib, mmap, os
def f():
    found = []
    for hide in (lambda: os.memfd_create("held"), lambda: mmap.mmap(-1, 4096)):
        with contextlib.suppress(PermissionError):
            found.append(type(hide()).__name__)
    return found
"""
SOCKETS = """
import socket
def f():
    found = []
    for family in range(1, 60):
        try:
            socket.socket(family, socket.SOCK_DGRAM).close()
            found.append(family)
        except OSError as error:
            found += [] if isinstance(error, PermissionError) else [family]
    return found
"""
EMPTY = "import os\ndef f(): return len(os.environ), os.listdir('/home')"
PROBES = {  # what must be true -> a program and a test of it
    "no network": ("import socket\ndef f(): return [name for _, name in socket.if_nameindex()]", "f() == ['lo']"),
    "no other process": ("import os\ndef f(): return os.getpid(), os.path.exists('/proc')", "f() == (2, False)"),
    "an empty environment and home": (EMPTY, "f() == (0, [])"),
    "no file but in /tmp can be written": (WRITES, "f() == ['/tmp']"),
    "files are limited": (FILLS, "0 < f() <= {files} << 20"),
    # A program can hold half of its memory limit, and not all of it: the interpreter needs some.
    "memory is limited": (HOLDS, "f({memory} << 19) and not f({memory} << 20)"),
    "no memory outside of processes": (HIDES, "f() == []"),
    "no socket of another family": (SOCKETS, f"f() == {sorted(map(int, FAMILIES))}"),
    "processes are limited": (FORKS, "0 < f() < {processes}"),
}


@dataclass(frozen=True, kw_only=True)
class SandboxFlags:
    action: str = setting(
        help="start programs in the sandbox and report what they could do", positional=True, choices=["check"]
    )


def run(args: SandboxFlags) -> None:
    """Prints a line for each probe.

    Raises:
        SandboxError: there is no sandbox, or a probe fails.
    """
    python, limits = working_python(), Limits()
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    sys.stdout.write(f"{version}, Python {python}, {WORKERS} programs at a time\n")
    faults = []
    for name, (program, test) in PROBES.items():
        source = f"with __case__(0):\n    assert {test.format(**vars(limits))}"
        ok = bool(passed(program, Cases(source, ("f",), 1), limits))
        sys.stdout.write(f"{'ok    ' if ok else 'FAILED'} {name}\n")
        faults += [name] * (not ok)
    if faults:
        needed = "Linux 5.14 and bubblewrap 0.8 or newer are needed"
        raise SandboxError(f"not so in this sandbox: {'; '.join(faults)}. {needed}")
    # A program and its tests have a sandbox each.
    most = WORKERS * 2 * limits.processes * limits.memory / 1024
    sys.stdout.write(f"limits per program: {limits}; at most {most:g} GiB of main memory in all\n")
