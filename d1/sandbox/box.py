"""Runs a program and its tests, each in a bubblewrap sandbox of its own (https://github.com/containers/bubblewrap).

A sandbox has its own user, process, network, IPC and host name namespaces, no capabilities, and no `/proc`. It sees
`/usr` and the Python installation read-only, an empty `/home`, a small `/tmp` in memory, and an empty environment. A
filter refuses some system calls (`refusals`). The limits on processes need Linux 5.14, which counts them per user
namespace.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated, Any, TypeVar

from d1.ranges import COUNT, POSITIVE, Range, check_ranges, ranges_of
from d1.sandbox.inside import READY, pack

T = TypeVar("T")
INSIDE = Path(__file__).with_name("inside.py")
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")  # next to /usr: links into it, or folders on older systems
PARTS = ("user", "pid", "net", "ipc", "uts")  # the namespaces
WORKERS = os.cpu_count() or 1  # programs judged at a time
START_SECONDS = 30.0  # by the clock, until both interpreters run
PAUSES = (0.1, 0.4, 1.6, 6.4)  # seconds before a further try, if a sandbox did not start
LASTING = ("Unknown option", "Fatal Python error", *map(os.strerror, (errno.EPERM, errno.EACCES, errno.ENOENT)))
INSTALL = "`apt-get install bubblewrap` (Debian 12, Ubuntu 24.04 or newer), `dnf install bubblewrap` (Fedora, RHEL)"
HINTS = {  # part of bubblewrap's message -> what to do
    **dict.fromkeys(
        map(os.strerror, (errno.EAGAIN, errno.ENOMEM)),
        "Free memory or processes (`ulimit -u`, or the limits of the container), then start again",
    ),
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
        processes: processes and threads of one sandbox; two of them are bubblewrap and the program itself.
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
        source: Python, whose blocks `with __case__(0): ...` to `with __case__(count - 1): ...` are the cases.
        names: what the tests use of the program: its functions, or "__solution__", the program as a module.
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

# ---- the filter of system calls

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)  # a network namespace confines these
MACHINES = {  # name in uname -> AUDIT_ARCH_* of linux/audit.h, and the numbers of system calls
    "x86_64": (
        0xC000003E,
        {"mmap": 9, "shmget": 29, "socket": 41, "socketpair": 53, "semget": 64, "msgget": 68, "mq_open": 240}
        | {"memfd_create": 319, "bpf": 321},
    ),
    "aarch64": (
        0xC00000B7,
        {"mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199, "mmap": 222}
        | {"memfd_create": 279, "bpf": 280},
    ),
}
EVERYWHERE = {"io_uring_setup": 425, "memfd_secret": 447}
X32 = 0x40000000  # x86_64's other numbers for the same calls begin here
MAP_SHARED = 1  # also a bit of MAP_SHARED_VALIDATE
# linux/bpf_common.h and linux/seccomp.h
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
# Offsets in struct seccomp_data. Both machines are little-endian, so an argument begins with its lower half.
NUMBER, MACHINE, ARGUMENTS = 0, 4, (16, 24, 32, 40, 48, 56)


def refusals(machine: str) -> bytes:
    """The seccomp filter for a machine of `MACHINES`: an array of struct sock_filter.

    It refuses the calls that hold memory outside of any process, which RLIMIT_AS does not count (memfd_create, shared
    memory, queues and semaphores of System V and POSIX, io_uring, maps of BPF, and shared mappings, which keep their
    pages when they shrink), and sockets of all families but those in `FAMILIES`.
    """
    audit, numbers = MACHINES[machine]
    calls = numbers | EVERYWHERE
    shared, families = calls.pop("mmap"), (calls.pop("socket"), calls.pop("socketpair"))
    # (code, steps to skip if it is so, else, value)
    steps = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, audit), (RETURN, 0, 0, REFUSE)]
    steps += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE)]
    for number in calls.values():
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    steps += [(EQUAL, 0, 4, shared), (LOAD, 0, 0, ARGUMENTS[3]), (ANY_BIT, 0, 1, MAP_SHARED)]
    steps += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    steps += [(EQUAL, 2, 0, families[0]), (EQUAL, 1, 0, families[1]), (RETURN, 0, 0, ALLOW)]
    steps += [(LOAD, 0, 0, ARGUMENTS[0])]
    for family in FAMILIES:
        steps += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    steps += [(RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


# ---- a program and its tests in two sandboxes


def command(python: str, limits: Limits, rules: int) -> list[str]:
    """bubblewrap with Python in it, before the arguments of `inside.py`; `rules` is the descriptor of the filter."""
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
    # Of what is mounted, only /tmp stays writable.
    words += ["--size", str(limits.files << 20), "--tmpfs", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    words += ["--chdir", "/tmp", "--die-with-parent", "--clearenv", "--seccomp", str(rules), "--"]
    if os.geteuid() == 0:  # the kernel limits no processes of root
        # Popen's `user` would copy this process first, which takes longer the larger it is.
        words = [*AS_NOBODY, *words]
    return [*words, python, "-I", "-S", "-B", "-c", INSIDE.read_text(), pack(asdict(limits), None)]


def run_sides(python: str, program: str, tests: Cases, limits: Limits) -> frozenset[int]:
    """The cases that a program passes. Raises SandboxError if no try started both sandboxes."""
    return started(lambda: start_sides(python, program, tests, limits))


def started(start: Callable[[], T]) -> T:
    """What `start` returns; it is tried again while it raises OSError. Raises SandboxError if no try succeeded."""
    for pause in (*PAUSES, None):
        try:
            return start()
        except OSError as error:
            said = str(error)
        if any(words in said for words in LASTING):  # another try would say the same
            raise unusable(said)
        if pause is not None:
            time.sleep(pause)
    raise unusable(f"{said}, at each of {len(PAUSES) + 1} tries")


def unusable(said: str) -> SandboxError:
    """The error for what a sandbox said last, with what to do."""
    hint = next((hint for part, hint in HINTS.items() if part in said), "`d1 sandbox check` says more")
    return SandboxError(f"the sandbox does not work: {said}. {hint}")


def start_sides(python: str, program: str, tests: Cases, limits: Limits) -> frozenset[int]:
    """As `run_sides`, with one try. Raises OSError if a sandbox did not start."""
    with ExitStack() as processes, ExitStack() as ours:

        def pipe() -> tuple[int, int]:  # its ends, to read and to write
            ends = os.pipe()
            for descriptor in ends:
                ours.callback(os.close, descriptor)
            return ends

        def start(pipes: Sequence[int], **streams: Any) -> subprocess.Popen[bytes]:
            return launch(python, limits, [*map(str, pipes)], pipes, ours, processes, **streams)

        # The program's side reads calls and writes replies, and has no other pipe; only the tests' side gets the tests.
        errors = [holding(b"", processes) for _ in range(2)]  # bubblewrap writes a message in pieces: one file each
        calls, replies = pipe(), pipe()
        orders = holding(pack({"program": program, **vars(tests)}, None).encode() + b"\n", ours)
        start((), stdin=calls[0], stdout=replies[1], stderr=errors[1])
        judge = start((calls[1], replies[0]), stdin=orders, stdout=subprocess.PIPE, stderr=errors[0])
        ours.close()
        assert judge.stdout is not None
        in_time = bool(wait([judge.stdout.fileno()], START_SECONDS))
        if not in_time or judge.stdout.readline() != READY:
            raise OSError(last_words(errors, SILENT if in_time else f"no interpreter ran after {START_SECONDS:g} s"))
        try:
            said, _ = judge.communicate(timeout=seconds_now(limits))
        except subprocess.TimeoutExpired:
            end(judge)
            said, _ = judge.communicate()
    return frozenset(map(int, said.split()))


def launch(
    python: str,
    limits: Limits,
    words: Sequence[str],
    pipes: Sequence[int],
    files: ExitStack,
    processes: ExitStack,
    **streams: Any,
) -> subprocess.Popen[bytes]:
    """A sandbox that runs `inside.py` with these `words` and may use the descriptors `pipes`. It ends with `processes`;
    the file that it is started with is closed with `files`."""
    rules = holding(refusals(os.uname().machine), files)
    # A session of its own is a group of processes to kill, and Ctrl-C does not reach it.
    options: Any = {"pass_fds": (*pipes, rules), "start_new_session": True, "bufsize": 0, "cwd": "/", **streams}
    process = subprocess.Popen([*command(python, limits, rules), *words], **options)
    processes.callback(end, process)
    return process


SILENT = "it ended without a message"


def last_words(errors: Sequence[int], otherwise: str) -> str:
    """The last line of the first of these files that has one."""
    texts = [os.pread(file, 1 << 16, 0).decode(errors="replace").strip() for file in errors]
    return next((text.splitlines()[-1] for text in texts if text), otherwise)


def holding(data: bytes, until: ExitStack) -> int:
    """The descriptor of a file in memory, which is closed with `until`."""
    file = os.memfd_create("d1")
    until.callback(os.close, file)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def output_of(program: str, most: int, limits: Limits = DEFAULT) -> str:
    """What a program prints, at most `most` characters of it, and its error if it ends with one. A program that prints
    more, or runs longer than it may, is ended. Raises SandboxError as `passed`."""
    python = working_python()
    return started(lambda: start_alone(python, program, most, limits))


def start_alone(python: str, program: str, most: int, limits: Limits) -> str:
    """As `output_of`, with one try. Raises OSError if the sandbox did not start."""
    with ExitStack() as ours:
        errors, orders = holding(b"", ours), holding(pack(program, None).encode() + b"\n", ours)
        streams: Any = {"stdin": orders, "stdout": subprocess.PIPE, "stderr": errors}
        process = launch(python, limits, ["show"], (), ours, ours, **streams)
        assert process.stdout is not None
        pipe, said, until = process.stdout.fileno(), b"", time.monotonic() + START_SECONDS
        running = False
        while len(said) <= 4 * most:  # a character has at most four bytes
            if not wait([pipe], max(0.0, until - time.monotonic())):
                if running:
                    return f"{said.decode(errors='replace')[:most]}\nTimeoutError: more than {limits.seconds:g} seconds"
                raise OSError(f"no interpreter ran after {START_SECONDS:g} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                break
            said += part
            if not running and said.startswith(READY):
                running, said, until = True, said[len(READY) :], time.monotonic() + seconds_now(limits)
        if not running:
            raise OSError(last_words([errors], SILENT))
        text = said.decode(errors="replace")[:most].strip()
        if len(said) > 4 * most:
            return text
        # The program has closed its output. It may still run.
        try:
            status = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"{text}\nTimeoutError: more than {limits.seconds:g} seconds".strip()
        if status == 128 + signal.SIGKILL:
            return f"{text}\nTimeoutError: killed, after {limits.cpu_seconds} s of processor time or for memory".strip()
        if status != 0:
            return f"{text}\nSystemExit: it ended with status {status}".strip()
        return text


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a sandbox and its child, which would wait for ever if bubblewrap had not set it up yet."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with suppress(ChildProcessError):  # orphans become children of the first process of a container, if this is it
        while os.waitpid(-process.pid, 0):
            pass


def seconds_now(limits: Limits) -> float:
    """`limits.seconds` times the load per core, from 1 to 10: a correct program may have to wait for a core."""
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
    if (machine := os.uname().machine) not in MACHINES:
        raise SandboxError(f"programs are judged on {' and '.join(MACHINES)} only, and this machine is {machine}")
    problem = None
    for python in dict.fromkeys((os.path.realpath(sys.executable), os.path.realpath("/usr/bin/python3"))):
        if not Path(python).is_file():
            continue
        try:
            if run_sides(python, PROBE, PROBE_TESTS, DEFAULT):
                return python
        except SandboxError as error:
            problem = error
    raise problem or unusable("the tests of a small program did not pass")


@functools.lru_cache(maxsize=1 << 14)
def passed(program: str, tests: Cases, limits: Limits = DEFAULT) -> frozenset[int]:
    """The numbers of the cases that a program passes; a program and its tests are run once per process.

    Raises:
        SandboxError: there is no sandbox here, or none started for this program, which is no verdict.
    """
    return run_sides(working_python(), program, tests, limits)


def shares_passed(programs: Iterable[str | None], tests: Iterable[Cases], limits: Limits = DEFAULT) -> list[float]:
    """The share of its cases that each program passes, 0 for None, several programs at a time."""
    pairs = list(zip(programs, tests, strict=True))
    different = list(dict.fromkeys((program, of) for program, of in pairs if program is not None))
    with ThreadPoolExecutor(WORKERS) as pool:
        found = dict(zip(different, pool.map(lambda pair: passed(*pair, limits), different), strict=True))
    return [len(found[program, of]) / of.count if program is not None else 0.0 for program, of in pairs]
