"""Runs a program and its tests, each in a bubblewrap sandbox of its own (https://github.com/containers/bubblewrap).

A sandbox has its own user, process, network, IPC and host name namespaces, no capabilities, and no `/proc`. It sees
`/usr` and the Python installation read-only, an empty `/home`, a small `/tmp` in memory, and an empty environment. The
limits on processes need Linux 5.14, which counts them per user namespace.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from d1.ranges import COUNT, POSITIVE, Range, check_ranges, ranges_of
from d1.sandbox.inside import pack

INSIDE = Path(__file__).with_name("inside.py")
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")  # next to /usr: links into it, or folders on older systems
PARTS = ("user", "pid", "net", "ipc", "uts")  # the namespaces
WORKERS = os.cpu_count() or 1  # programs judged at a time
INSTALL = "`apt-get install bubblewrap` (Debian 12, Ubuntu 24.04 or newer), `dnf install bubblewrap` (Fedora, RHEL)"
HINTS = {  # part of bubblewrap's message -> what to do
    "Unknown option": f"bubblewrap 0.8 or newer is needed: {INSTALL}",
    "uid map": "allow bubblewrap to make user namespaces: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or "
    "an AppArmor profile for it",
    "namespace": "allow user namespaces: `sysctl kernel.unprivileged_userns_clone=1`, or, in a container, run it with "
    "`--security-opt seccomp=unconfined --security-opt systempaths=unconfined`",
}


class SandboxError(OSError):
    """There is no sandbox on this machine, or it does not work."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: by the clock, for the program with all its tests; see `seconds_now`.
        cpu_seconds: processor time of each process.
        memory: MiB of each process.
        processes: processes and threads of one sandbox, two of which are bubblewrap's and the program itself.
        files: MiB of all files in `/tmp`.
        reply: MiB of what a function returns, as text.
    """

    seconds: Annotated[float, POSITIVE] = 10.0
    cpu_seconds: Annotated[int, COUNT] = 4
    memory: Annotated[int, Range(64, integer=True)] = 512
    processes: Annotated[int, Range(3, integer=True)] = 8
    files: Annotated[int, COUNT] = 16
    reply: Annotated[int, COUNT] = 1

    def __post_init__(self) -> None:
        check_ranges(vars(self), ranges_of(Limits))

    def __str__(self) -> str:
        return (
            f"{self.seconds:g} s, {self.cpu_seconds} s of processor time and {self.memory} MiB per process, "
            f"{self.processes} processes, {self.files} MiB of files"
        )


@dataclass(frozen=True)
class Cases:
    """Tests of a program.

    Attributes:
        source: Python, in which `with __case__(0): ...` to `with __case__(count - 1): ...` are what can pass.
        names: of the program, for the tests: its functions, or "solution", the program as a module.
        setup: Python that runs before the program's names are set.
        count: how many cases there are.
    """

    source: str
    names: tuple[str, ...]
    count: int
    setup: str = ""


DEFAULT = Limits()
PROBE = "def double(x):\n    return 2 * x"
PROBE_TESTS = Cases("with __case__(0):\n    assert double(21) == 42", ("double",), 1)


def command(python: str, limits: Limits) -> list[str]:
    """bubblewrap with Python in it; what follows are the arguments of `inside.py`."""
    words = [str(shutil.which("bwrap")), *(f"--unshare-{part}" for part in PARTS), "--disable-userns"]
    words += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for folder in SYSTEM:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    prefix = Path(python).parents[1]
    for folder in () if prefix.is_relative_to("/usr") else (str(prefix / "bin"), str(prefix / "lib")):
        words += ["--ro-bind", folder, folder]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dev", "/dev", "--dir", "/home"]
    words += ["--size", str(limits.files << 20), "--tmpfs", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    words += ["--chdir", "/tmp", "--die-with-parent", "--new-session", "--clearenv", "--"]
    return [*words, python, "-I", "-S", "-B", "-c", INSIDE.read_text(), pack(asdict(limits), None)]


def run_sides(python: str, program: str, tests: Cases, limits: Limits) -> tuple[frozenset[int], str]:
    """Runs a program and its tests in two sandboxes; returns the cases that passed, and what the second one printed to
    stderr."""
    words = command(python, limits)
    if os.geteuid() == 0:  # the kernel limits no processes of root
        words = [
            *AS_NOBODY,
            *words,
        ]  # Popen's `user` would copy this process first, which takes longer the larger it is
    orders = pack({"program": program, **vars(tests)}, None)
    calls, replies = os.pipe(), os.pipe()  # each (to read, to write)
    started: list[subprocess.Popen[bytes]] = []

    def start(more: Sequence[int], **streams: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([*words, *map(str, more)], pass_fds=more, **streams, cwd="/"))
        return started[-1]

    try:
        start((), stdin=calls[0], stdout=replies[1], stderr=subprocess.DEVNULL)
        three = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        judge = start((calls[1], replies[0]), **three)
        for end in (*calls, *replies):
            os.close(end)
        try:
            said, errors = judge.communicate(orders.encode() + b"\n", seconds_now(limits))
        except subprocess.TimeoutExpired:
            judge.kill()
            said, errors = judge.communicate()
    finally:
        for process in started:  # with bubblewrap all that it started ends
            process.kill()
            process.wait()
    return frozenset(map(int, said.split())), errors.decode(errors="replace").strip()


def seconds_now(limits: Limits) -> float:
    """`limits.seconds`, times the load of each core above 1, at most 10: a right program may wait for a core."""
    return limits.seconds * min(max(os.getloadavg()[0] / WORKERS, 1.0), 10.0)


@functools.cache
def working_python() -> str:
    """The interpreter to run programs with: this one, or the system's where the sandbox cannot read this one.

    Raises:
        SandboxError: there is no sandbox here; the message says what to do.
    """
    if not shutil.which("bwrap"):
        raise SandboxError(f"programs run in bubblewrap only, and there is no `bwrap` here: {INSTALL}")
    if os.geteuid() == 0 and not shutil.which("setpriv"):
        raise SandboxError("programs do not run as root, and there is no `setpriv` here: install util-linux")
    said = ""
    for python in dict.fromkeys((os.path.realpath(sys.executable), os.path.realpath("/usr/bin/python3"))):
        if not Path(python).is_file():
            continue
        cases, errors = run_sides(python, PROBE, PROBE_TESTS, DEFAULT)
        if cases:
            return python
        said = errors or said or "the tests of a small program did not pass"
    hint = next((hint for part, hint in HINTS.items() if part in said), "`d1 sandbox check` says more")
    raise SandboxError(f"the sandbox does not work: {said.splitlines()[-1]}. {hint}")


@functools.lru_cache(maxsize=1 << 14)
def passed(program: str, tests: Cases, limits: Limits = DEFAULT) -> frozenset[int]:
    """The numbers of the cases that a program passes; a program and its tests are run once per process.

    Raises:
        SandboxError: there is no sandbox here.
    """
    return run_sides(working_python(), program, tests, limits)[0]


def shares_passed(programs: Iterable[str | None], tests: Iterable[Cases], limits: Limits = DEFAULT) -> list[float]:
    """The share of its cases that each program passes, 0 for None, several programs at a time."""
    pairs = list(zip(programs, tests, strict=True))
    different = list(dict.fromkeys((program, of) for program, of in pairs if program is not None))
    with ThreadPoolExecutor(WORKERS) as pool:
        found = dict(zip(different, pool.map(lambda pair: passed(*pair, limits), different), strict=True))
    return [len(found[program, of]) / of.count if program is not None else 0.0 for program, of in pairs]
