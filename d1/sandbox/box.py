"""Runs a program and its tests, each in a bubblewrap sandbox of its own (https://github.com/containers/bubblewrap).

A sandbox has its own user, process, network, IPC and host name namespaces, no capabilities, and no `/proc`. It sees
`/usr` and the Python installation read-only, an empty `/home`, a small `/tmp` in memory, and an empty environment. A
filter refuses some system calls (`seccomp_filter`). The limits on processes need Linux 5.14, which counts them per user
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

from d1.cpus import available_cpus
from d1.ranges import COUNT, POSITIVE, Range, check_ranges, ranges_of
from d1.sandbox.inside import READY, pack

T = TypeVar("T")
INSIDE = Path(__file__).with_name("inside.py")
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")  # next to /usr: links into it, or folders on older systems
NAMESPACES = ("user", "pid", "net", "ipc", "uts")
CPUS = available_cpus()
WORKERS = max(1, CPUS // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # programs that a process judges at a time
START_SECONDS = 30.0  # by the clock, until both interpreters run
PAUSES = (0.1, 0.4, 1.6, 6.4)  # seconds before a further try, if a sandbox did not start
MAX_VERDICT = 12  # bytes of a case's number and the blank after it
PERMANENT_ERRORS = (  # parts of messages: a further try would end in the same error
    "Unknown option",
    "Fatal Python error",
    *map(os.strerror, (errno.EPERM, errno.EACCES, errno.ENOENT)),
)
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
        | {"memfd_create": 319, "bpf": 321, "add_key": 248, "request_key": 249, "keyctl": 250},
    ),
    "aarch64": (
        0xC00000B7,
        {"mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199, "mmap": 222}
        | {"memfd_create": 279, "bpf": 280, "add_key": 217, "request_key": 218, "keyctl": 219},
    ),
}
COMMON_CALLS = {"io_uring_setup": 425, "memfd_secret": 447}  # with the same numbers on all machines
X32 = 0x40000000  # x86_64's other numbers for the same calls begin here
MAP_SHARED = 1  # also a bit of MAP_SHARED_VALIDATE
# linux/bpf_common.h and linux/seccomp.h
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
# Offsets in struct seccomp_data. Both machines are little-endian, so an argument begins with its lower half.
NUMBER, MACHINE, ARGUMENTS = 0, 4, (16, 24, 32, 40, 48, 56)


def seccomp_filter(machine: str) -> bytes:
    """The seccomp filter for a machine of `MACHINES`: an array of struct sock_filter.

    It refuses the calls that hold memory outside of any process, which RLIMIT_AS does not count (memfd_create, shared
    memory, queues and semaphores of System V and POSIX, io_uring, maps of BPF, and shared mappings, which keep their
    pages when they shrink), the keys of the kernel, which may be those of the user's login and which programs could
    leave for others, and sockets of all families but those in `FAMILIES`.
    """
    audit, numbers = MACHINES[machine]
    calls = numbers | COMMON_CALLS
    mmap = calls.pop("mmap")
    sockets = calls.pop("socket")
    socket_pair = calls.pop("socketpair")

    # A step is (code, steps to skip if the comparison is true, steps to skip if it is false, value).
    # Another machine, and x86_64's other numbers
    steps = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, audit), (RETURN, 0, 0, REFUSE)]
    steps += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE)]
    # The calls that are always refused
    for number in calls.values():
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    # Shared mappings
    steps += [(EQUAL, 0, 4, mmap), (LOAD, 0, 0, ARGUMENTS[3]), (ANY_BIT, 0, 1, MAP_SHARED)]
    steps += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    # Sockets of other families
    steps += [(EQUAL, 2, 0, sockets), (EQUAL, 1, 0, socket_pair), (RETURN, 0, 0, ALLOW)]
    steps += [(LOAD, 0, 0, ARGUMENTS[0])]
    for family in FAMILIES:
        steps += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    steps += [(RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


# ---- a program and its tests in two sandboxes


def sandbox_command(python: str, limits: Limits, filter_file: int) -> list[str]:
    """The command of bubblewrap with Python in it, up to the arguments of `inside.py`; `filter_file` is the descriptor
    of the filter."""
    words = [str(shutil.which("bwrap")), *(f"--unshare-{name}" for name in NAMESPACES), "--disable-userns"]
    words += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for folder in SYSTEM:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    prefix = Path(python).parents[1]
    if not prefix.is_relative_to("/usr"):
        for folder in (str(prefix / "bin"), str(prefix / "lib")):
            words += ["--ro-bind", folder, folder]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dev", "/dev", "--dir", "/home"]
    # Of what is mounted, only /tmp stays writable.
    words += ["--size", str(limits.files << 20), "--tmpfs", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    words += ["--chdir", "/tmp", "--die-with-parent", "--clearenv", "--seccomp", str(filter_file), "--"]
    if os.geteuid() == 0:  # the kernel limits no processes of root
        # Popen's `user` would copy this process first, which takes longer the larger it is.
        words = [*AS_NOBODY, *words]
    return [*words, python, "-I", "-S", "-B", "-c", INSIDE.read_text(), pack(asdict(limits), None)]


def run_sides(python: str, program: str, tests: Cases, limits: Limits) -> frozenset[int]:
    """The cases that a program passes. Raises SandboxError if no try started both sandboxes."""
    return retry_start(lambda: start_sides(python, program, tests, limits))


def retry_start(start: Callable[[], T]) -> T:
    """What `start` returns; it is tried again while it raises OSError. Raises SandboxError if no try succeeded."""
    for pause in (*PAUSES, None):
        try:
            return start()
        except OSError as error:
            message = str(error)
        if any(part in message for part in PERMANENT_ERRORS):
            raise unusable_error(message)
        if pause is not None:
            time.sleep(pause)
    raise unusable_error(f"{message}, at each of {len(PAUSES) + 1} tries")


def unusable_error(message: str) -> SandboxError:
    """The error for the last message of a sandbox, with what to do."""
    advice = "`d1 sandbox check` says more"
    for part, hint in HINTS.items():
        if part in message:
            advice = hint
            break
    return SandboxError(f"the sandbox does not work: {message}. {advice}")


def start_sides(python: str, program: str, tests: Cases, limits: Limits) -> frozenset[int]:
    """As `run_sides`, with one try. Raises OSError if a sandbox did not start."""
    with ExitStack() as processes, ExitStack() as files:

        def open_pipe() -> tuple[int, int]:
            """Descriptors to read from and to write to, which are closed with `files`."""
            descriptors = os.pipe()
            for descriptor in descriptors:
                files.callback(os.close, descriptor)
            return descriptors

        # bubblewrap writes a message in pieces, so each side has a file of its own for errors.
        judge_errors = memory_file(b"", processes)
        program_errors = memory_file(b"", processes)

        # The program's side reads calls and writes replies, and has no other pipe; only the tests' side gets the tests.
        read_calls, write_calls = open_pipe()
        read_replies, write_replies = open_pipe()
        orders = memory_file(pack({"program": program, **vars(tests)}, None).encode() + b"\n", files)
        launch(
            python,
            limits,
            arguments=(),
            pipes=(),
            files=files,
            processes=processes,
            stdin=read_calls,
            stdout=write_replies,
            stderr=program_errors,
        )
        judge = launch(
            python,
            limits,
            arguments=(str(write_calls), str(read_replies)),
            pipes=(write_calls, read_replies),
            files=files,
            processes=processes,
            stdin=orders,
            stdout=subprocess.PIPE,
            stderr=judge_errors,
        )
        files.close()

        # The tests' side says that both run, then writes the numbers of the cases that passed.
        pipe = wait_for_start(judge, (judge_errors, program_errors))
        most = MAX_VERDICT * (tests.count + 1)  # a test of a data file may write anything
        output, _ = read_output(pipe, most, time.monotonic() + seconds_now(limits))
    numbers = [int(word) for word in output[:most].split() if word.isdigit()]
    return frozenset(number for number in numbers if number < tests.count)


def wait_for_start(process: subprocess.Popen[bytes], errors: Sequence[int]) -> int:
    """The descriptor of a process's output, once it has said that its interpreter runs. Raises OSError if it does not,
    with the last line of the files `errors`."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    if not wait([pipe], START_SECONDS):
        raise OSError(last_line(errors, f"no interpreter ran after {START_SECONDS:g} s"))
    if process.stdout.readline() != READY:
        raise OSError(last_line(errors, NO_MESSAGE))
    return pipe


def read_output(pipe: int, most: int, deadline: float) -> tuple[bytes, bool]:
    """What comes from a pipe up to its end, more than `most` bytes, or a `deadline` by `time.monotonic`; and whether
    the deadline ended it."""
    output = b""
    while len(output) <= most:
        if not wait([pipe], max(0.0, deadline - time.monotonic())):
            return output, True
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        output += part
    return output, False


def launch(
    python: str,
    limits: Limits,
    arguments: Sequence[str],
    pipes: Sequence[int],
    files: ExitStack,
    processes: ExitStack,
    **streams: Any,
) -> subprocess.Popen[bytes]:
    """A sandbox that runs `inside.py` with these `arguments` and may use the descriptors `pipes`. It ends with
    `processes`; the file that it is started with is closed with `files`."""
    filter_file = memory_file(seccomp_filter(os.uname().machine), files)
    process = subprocess.Popen(
        [*sandbox_command(python, limits, filter_file), *arguments],
        pass_fds=(*pipes, filter_file),
        start_new_session=True,  # so that its processes are a group to kill, and Ctrl-C does not reach them
        bufsize=0,
        cwd="/",
        **streams,
    )
    processes.callback(kill_sandbox, process)
    return process


NO_MESSAGE = "it ended without a message"


def last_line(files: Sequence[int], default: str) -> str:
    """The last line of the first of these files that has one, else `default`."""
    texts = [os.pread(file, 1 << 16, 0).decode(errors="replace").strip() for file in files]
    for text in texts:
        if text:
            return text.splitlines()[-1]
    return default


def memory_file(data: bytes, files: ExitStack) -> int:
    """The descriptor of a file in memory with this content, which is closed with `files`."""
    file = os.memfd_create("d1")
    files.callback(os.close, file)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def output_of(program: str, max_length: int, limits: Limits = DEFAULT) -> str:
    """What a program prints, at most `max_length` characters of it, and its error if it ends with one. A program that
    prints more, or runs longer than it may, is ended. Raises SandboxError as `passed`."""
    python = working_python()
    return retry_start(lambda: start_alone(python, program, max_length, limits))


def start_alone(python: str, program: str, max_length: int, limits: Limits) -> str:
    """As `output_of`, with one try. Raises OSError if the sandbox did not start."""
    with ExitStack() as stack:
        errors = memory_file(b"", stack)
        orders = memory_file(pack(program, None).encode() + b"\n", stack)
        process = launch(
            python,
            limits,
            arguments=["show"],
            pipes=(),
            files=stack,
            processes=stack,
            stdin=orders,
            stdout=subprocess.PIPE,
            stderr=errors,
        )

        # Read what the program prints, up to its end or a limit.
        pipe = wait_for_start(process, [errors])
        deadline = time.monotonic() + seconds_now(limits)
        output, is_late = read_output(pipe, 4 * max_length, deadline)  # a character has at most four bytes
        if is_late:
            text = output.decode(errors="replace")[:max_length]
            return f"{text}\nTimeoutError: more than {limits.seconds:g} seconds"
        text = output.decode(errors="replace")[:max_length].strip()
        if len(output) > 4 * max_length:
            return text

        # The program has closed its output. It may still run.
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"{text}\nTimeoutError: more than {limits.seconds:g} seconds".strip()
        if status == 128 + signal.SIGKILL:
            return f"{text}\nTimeoutError: killed, after {limits.cpu_seconds} s of processor time or for memory".strip()
        if status != 0:
            return f"{text}\nSystemExit: it ended with status {status}".strip()
        return text


def kill_sandbox(process: subprocess.Popen[bytes]) -> None:
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
    return limits.seconds * min(max(os.getloadavg()[0] / CPUS, 1.0), 10.0)


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
    machine = os.uname().machine
    if machine not in MACHINES:
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
    raise problem or unusable_error("the tests of a small program did not pass")


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

    # Run each pair once.
    def run_pair(pair: tuple[str, Cases]) -> frozenset[int]:
        program, cases = pair
        return passed(program, cases, limits)

    different_pairs = list(dict.fromkeys((program, cases) for program, cases in pairs if program is not None))
    with ThreadPoolExecutor(WORKERS) as pool:
        verdicts = dict(zip(different_pairs, pool.map(run_pair, different_pairs), strict=True))

    # The share of cases of each program.
    shares = []
    for program, cases in pairs:
        if program is None:
            shares.append(0.0)
        else:
            shares.append(len(verdicts[program, cases]) / cases.count)
    return shares
