"""Programs that attack the sandbox or its judge: none passes a test that it does not earn, none does harm."""

import ctypes
import os
import resource
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d1.commands import sandbox
from d1.sandbox import Cases, Limits, SandboxError, box, passed, shares_passed, working_python
from d1.sandbox.box import seconds_now
from d1.sandbox.inside import pack, unpack
from tests import forks
from tests.faults import NO_PROCESS, failing_sandbox
from tests.sandbox import skip_without_sandbox

skip_without_sandbox()

LIMITS = Limits(seconds=3.0625, cpu_seconds=1, memory=256, processes=6, files=4)
MARK = (3.0625).hex()  # in the command line of every process of these sandboxes


def cases(*checks: str, names: tuple[str, ...] = ("f",)) -> Cases:
    sources = [f"with __case__({number}):\n    assert {check}" for number, check in enumerate(checks)]
    return Cases("\n".join(sources), names, len(sources))


SQUARES = cases("f(2) == 5", "f(3) == 10", "f(-4) == 17", "not f(0) != 1", "f(10) > 100")
RIGHT = "def f(x):\n    return x * x + 1"
# Some hold the right function, too, so that what they do on the way decides.
ATTACKS = {
    "fork_bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "endless_loop": "def f(x):\n    while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "memory": f"held = bytearray(10 << 30)\n{RIGHT}",
    "output": """
import os
while True:
    for stream in range(20):
        try: os.write(stream, b"x" * (1 << 20))
        except OSError: pass
""",
    "long_reply": "def f(x):\n    return 'x' * (1 << 24)",
    "deep_reply": "def f(x):\n    value = []\n    for _ in range(900): value = [value]\n    return value",
    "files": f"for n in range(10_000):\n    open(f'/tmp/{{n}}', 'wb').write(bytes(1 << 20))\n{RIGHT}",
    "sys_exit": f"import sys\n{RIGHT}\nsys.exit(0)",
    "os_exit_in_a_call": "import os\ndef f(x):\n    os._exit(0)",
    # These end the sandbox as a failed start does, but after it has started: a verdict, not an error.
    "os_exit": "import os\nos._exit(1)",
    "killed": "import os\nos.kill(os.getpid(), 9)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\natexit.register(print, 0)\ndef f(x):\n    return None",
    "print_a_pass": """
import os
for stream in range(64):
    try: os.write(stream, b"0\\n1\\n2\\n3\\n4\\n")
    except OSError: pass
print("0\\n1\\n2\\n3\\n4\\n5 passed")
""",
    "patch_assert": """
import builtins, sys
builtins.AssertionError = type("Never", (Exception,), {})
sys.excepthook = lambda *_: None
def f(x): return None
""",
    "patch_the_judge": """
import sys
main = sys.modules["__main__"]
for name in ("Case", "Program", "Remote", "unpack", "examine"):
    setattr(main, name, lambda *_: True)
def f(x): return None
""",
    "equal_to_all": """
class Yes:
    def __eq__(self, _): return True
    __ne__ = __gt__ = __lt__ = __ge__ = __le__ = __eq__
    def __bool__(self): return True
def f(x): return Yes()
""",
    "number_equal_to_all": """
class Yes(int):
    def __eq__(self, _): return True
    __gt__ = __lt__ = __eq__
    __hash__ = int.__hash__
def f(x): return Yes()
""",
    "read_the_frames": """
import gc, sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [frame.f_globals, frame.f_locals]
        frame = frame.f_back
    held = str([item for item in gc.get_objects() + seen if isinstance(item, (dict, list, str))])
    return {2: 5, 3: 10, -4: 17, 0: 1, 10: 101}[x] if "f(2) == " + "5" in held else None
""",
    "forge_replies": """
import os
def f(x):
    for stream in range(3, 20):
        try: os.write(stream, b'["pass"]\\n' + b'["error", ["StopIteration"], ""]\\n' * 20)
        except OSError: pass
""",
    "shadow_the_tests_names": """
import contextlib
def __case__(number): return contextlib.suppress(Exception)
def f(x): return None
""",
    "no_python": "this is no Python",
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, float]:
    shares = shares_passed(ATTACKS.values(), [SQUARES] * len(ATTACKS), LIMITS)
    return dict(zip(ATTACKS, shares, strict=True))


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_scores_nothing(attack: str, verdicts: dict[str, float]) -> None:
    assert verdicts[attack] == 0


def test_every_attack_is_a_program_and_the_check_of_the_command_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """So no attack fails for a slip of its own. What `d1 sandbox check` tries: network, processes, files, memory."""
    for name in ATTACKS.keys() - {"no_python"}:
        compile(ATTACKS[name], name, "exec")
    sandbox.run(sandbox.SandboxFlags(action="check"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["bubblewrap", *["ok"] * len(sandbox.PROBES), "limits"]


def test_what_is_right_passes_and_what_is_partly_right_passes_in_part() -> None:
    programs = [RIGHT, "def f(x):\n    return 5", "def f(x):\n    return x * x + 1 if x > 0 else 1 / 0", "", None]
    assert shares_passed(programs, [SQUARES] * 5) == [1.0, 0.2, 0.6, 0.0, 0.0]


def processes() -> list[str]:
    """Command lines on this machine that hold these limits."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found += [line for line in [path.read_text(errors="replace")] if MARK in line]
    return found


def wait_until_none_is_left() -> None:
    for _ in range(100):
        if not processes():
            return
        time.sleep(0.1)
    raise AssertionError(f"{len(processes())} processes are left")


def test_nothing_is_left_of_the_attacks(verdicts: dict[str, float]) -> None:
    wait_until_none_is_left()


def test_children_that_sleep_end_with_their_program() -> None:
    sleep = (
        "import os, time\nfor _ in range(3):\n    if not os.fork():\n        os.setsid()\n        time.sleep(1000)\n"
    )
    assert passed(sleep + RIGHT, SQUARES, LIMITS) == {0, 1, 2, 3, 4}
    wait_until_none_is_left()


def facts(program: str, *checks: str) -> None:
    """All of these must hold of f, which tells what a program could do in the sandbox."""
    assert passed(program, cases(*checks), LIMITS) == {*range(len(checks))}


def test_no_key_no_environment_and_no_other_process_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "key"
    secret.write_text("secret")
    secret.chmod(0o644)
    monkeypatch.setenv("API_KEY", "secret")
    program = """
import os
def f(path=None):
    if path:
        return os.path.exists(path)
    return [len(os.environ), os.listdir("/home"), os.path.exists("/proc"), os.getuid()]
"""
    paths = [secret, Path.home() / ".ssh", "/etc/passwd", "/etc/shadow", "/var", "/sys", "/run", Path(__file__)]
    facts(program, "f() == [0, [], False, 65534]", *(f"not f({str(path)!r})" for path in paths))


def test_no_address_can_be_reached() -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local:
        server.bind(("0.0.0.0", 0))
        server.listen()
        server.setblocking(False)
        local.bind("\0d1-sandbox-test")
        local.listen()
        program = """
import socket
def f(host, port):
    try:
        socket.create_connection((host, port), 1)
    except OSError as error:
        return type(error).__name__
def g():
    try:
        socket.socket(socket.AF_UNIX).connect("\\0d1-sandbox-test")
    except OSError as error:
        return type(error).__name__
"""
        port = server.getsockname()[1]
        own = socket.gethostbyname(socket.gethostname())
        checks = [f"f({host!r}, {port})" for host in ("127.0.0.1", own, "1.1.1.1", "::1")]
        tests = cases(*checks, "g() == 'ConnectionRefusedError'", names=("f", "g"))
        assert passed(program, tests, LIMITS) == {*range(5)}
        with pytest.raises(BlockingIOError):
            server.accept()


def test_nothing_can_be_killed_and_no_limit_raised() -> None:
    """Signals reach the sandbox's own processes alone; the tests' side is in another one."""
    program = """
import ctypes, os, resource, signal
def f():
    killed = []
    for process in (os.getppid(), 1, OUTSIDE):
        try:
            os.kill(process, signal.SIGKILL)
            killed.append(process)
        except OSError:
            pass
    return os.getppid(), killed
def raises():
    for name in ("NPROC", "AS", "CPU", "FSIZE"):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (-1, -1))
        except (ValueError, OSError):
            continue
        return name
    return "none"
def namespaces():
    return ctypes.CDLL(None).unshare(0x10000000)
""".replace("OUTSIDE", str(os.getpid()))
    tests = cases("raises() == 'none'", "namespaces() == -1", "f() == (1, [1, 1])", names=("f", "raises", "namespaces"))
    assert {0, 1} <= passed(program, tests, LIMITS)  # with its first process a sandbox may end
    assert not passed("import os\nos.kill(-1, 9)\n" + RIGHT, SQUARES, LIMITS)


def test_no_key_of_the_kernel_can_be_read_or_left() -> None:
    """A keyring may hold the tickets of the user's login, and outlives a sandbox."""
    program = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
CALLS = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[os.uname().machine]
def f():
    add, request, control = CALLS
    found = []
    for call in ((add, b"user", b"d1", b"text", 4, -3), (request, b"user", b"d1", None, 0), (control, 0, -3, 0)):
        found.append((libc.syscall(*call), ctypes.get_errno() == errno.EPERM))
    return found
"""
    facts(program, "f() == [(-1, True)] * 3")


@pytest.mark.parametrize("text", ["x 1 99 ", "0 " * 10])
def test_what_a_test_writes_for_its_verdict_is_limited(text: str) -> None:
    """A data file's test may write to all descriptors; the caller reads no more than the numbers of cases."""
    flood = f"""
with __case__(0):
    import os
    while True:
        for descriptor in range(3, 20):
            try:
                os.write(descriptor, {text.encode()!r} * 1000)
            except OSError:
                pass
"""
    tests = Cases(source=flood, names=("f",), count=1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert passed("def f(): pass", tests, Limits(seconds=1.0)) <= {0}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10  # KiB


def test_no_memory_is_held_outside_of_processes_and_no_socket_reaches_the_host() -> None:
    """The limit on memory is one per process: 4 processes of 64 MiB held 841 MiB in files of memfd_create."""
    program = """
import ctypes, mmap, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def error_of(act, *given):
    try:
        return "works" if act(*given) != -1 else os.strerror(ctypes.get_errno())
    except OSError as error:
        return error.strerror
def memfd(): return error_of(os.memfd_create, "held")
def shared(): return error_of(mmap.mmap, -1, 1 << 20)
def zero(): return error_of(mmap.mmap, os.open("/dev/zero", os.O_RDWR), 1 << 20, mmap.MAP_SHARED)
def private(): return error_of(mmap.mmap, -1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def system_v(call): return error_of(getattr(libc, call), 0, 1 << 20, 0o1600)
def queue(): return error_of(libc.mq_open, b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None)
def numbered(call): return error_of(libc.syscall, call, 8, 0)
def family(number): return error_of(socket.socket, number, socket.SOCK_STREAM)
def pair(): return error_of(socket.socketpair)
"""
    refused = ["memfd()", "shared()", "zero()", "queue()", *(f"numbered({call})" for call in (425, 447))]
    refused += [f"system_v({name!r})" for name in ("shmget", "semget", "msgget")]
    refused += [f"family({number})" for number in (17, 38, 40)]  # AF_PACKET, AF_ALG, AF_VSOCK
    if os.uname().machine == "x86_64":
        refused += ["numbered(0x40000000 | 41)"]  # socket of x32
    works = ["private()", "pair()", *(f"family({number})" for number in (1, 2))]
    checks = [f"{call} == {os.strerror(1)!r}" for call in refused] + [f"{call} == 'works'" for call in works]
    names = ("memfd", "shared", "zero", "private", "system_v", "queue", "numbered", "family", "pair")
    tests = cases(*checks, names=names)
    found = passed(program, tests, LIMITS)
    assert [check for number, check in enumerate(checks) if number not in found] == []


def test_nothing_outside_can_be_written(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    outside.chmod(0o666)
    program = """
import os
def f(path):
    link = "/tmp/link"
    if os.path.lexists(link):
        os.unlink(link)
    os.symlink(path, link)
    written = 0
    for target in (path, link, "/tmp/../" + path):
        try:
            with open(target, "w") as file:
                written += file.write("x")
        except OSError:
            pass
    return written
"""
    paths = [outside, "/usr/bin/python3", "/dev/shm/x", "/x", "/home/x", "/etc/ld.so.cache"]
    facts(program, *(f"f({str(path)!r}) == 0" for path in paths))
    assert outside.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["outside"]


# ---- what tests may do


def test_objects_of_the_program_mutations_and_exceptions_reach_the_tests() -> None:
    program = """
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item, *, twice=False): self.items += [item] * (1 + twice)
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
    def __iter__(self): return iter(self.items)
class Missing(KeyError): pass
def fill(given, names, seen): given.append(4); names["a"] = {1: (2, b"x")}; seen.discard(1)
def lose(): raise Missing("key")
def count(): yield from (1, 2)
"""
    source = """
with __case__(0):
    stack = Stack([1])
    stack.push(2, twice=True)
    assert len(stack) == 3 and stack[-1] == 2 and list(stack) == [1, 2, 2] and isinstance(stack, Stack)
with __case__(1):
    given, names, seen = [3], {}, {1, 2}
    fill(given, names, seen)
    assert (given, names, seen) == ([3, 4], {"a": {1: (2, b"x")}}, {2})
with __case__(2):
    try:
        lose()
    except KeyError as error:
        assert "key" in str(error)
    else:
        raise AssertionError
with __case__(3):
    assert list(count()) == [1, 2]
with __case__(4):
    assert Stack([1]) == Stack([1])
with __case__(5):
    assert __solution__.Stack([5])[0] == 5
"""
    names = ("Stack", "fill", "lose", "count", "__solution__")
    assert passed(program, Cases(source, names, 6)) == {0, 1, 2, 3, 5}  # no program says what equals what


def test_no_name_of_the_program_is_one_of_the_pipes() -> None:
    """Functions, attributes and keywords with names that this library's own functions have."""
    program = """
def number(n): return n + 1
def ask(function, operation, self): return function - operation * self
class Point:
    def __init__(self, number, ask): self.number, self.ask = number, ask
def extend(items, more): items += more; more.clear()
"""
    source = """
with __case__(0):
    assert number(1) == __solution__.number(1) == 2
with __case__(1):
    assert ask(function=7, operation=2, self=3) == 1
with __case__(2):
    point = Point(3, ask=4)
    assert (point.number, point.ask) == (3, 4)
with __case__(3):
    items, more = [1], [2]
    extend(items=items, more=more)
    assert (items, more) == ([1, 2], [])
"""
    names = ("number", "ask", "Point", "extend", "__solution__")
    assert passed(program, Cases(source, names, 4)) == {0, 1, 2, 3}


def test_a_program_that_has_ended_passes_nothing_that_the_tests_catch() -> None:
    source = (
        "with __case__(0):\n    assert f(1) == 2\nwith __case__(1):\n    try: f(0)\n    except BaseException: pass\n"
    )
    source += "with __case__(2):\n    pass"
    program = "import os\ndef f(x):\n    return 2 if x else os._exit(0)"
    assert passed(program, Cases(source, ("f",), 3)) == {0}


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
LEAVES |= st.complex_numbers(allow_nan=False) | st.binary().map(bytearray)
PLAIN = (
    st.sets(st.integers() | st.text())
    | st.frozensets(st.integers())
    | st.recursive(
        LEAVES,
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=10,
    )
)


def typed(value: Any) -> Any:
    """A value with the types of all that is in it, so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return dict, [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(part) for part in value]
    return type(value), value


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert typed(unpack(pack(value, None), None)) == typed(value)


def test_a_program_has_no_future_imports_that_it_does_not_make() -> None:
    assert passed("def f(x: List[int]):\n    return 3", cases("f([1]) == 3")) == set()  # a NameError in Python, too
    program = "from dataclasses import dataclass, fields\n@dataclass\nclass A:\n    x: int\n"
    program += "def f():\n    return fields(A)[0].type is int"
    assert passed(program, cases("f()")) == {0}
    assert passed(f"from __future__ import annotations\n{program}", cases("not f()")) == {0}


def test_a_text_of_a_class_of_its_own_comes_back_as_the_text_that_it_equals() -> None:
    """Its `__str__` says something else: "C.RED"."""
    program = "from enum import Enum\nclass C(str, Enum):\n    RED = 'red'\ndef f():\n    return C.RED"
    assert passed(program, cases("f() == 'red'")) == {0}


# ---- without a sandbox


def test_without_bubblewrap_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match=r"there is no `bwrap` here: `apt-get install bubblewrap`"):
        working_python.__wrapped__()


def test_a_bubblewrap_that_fails_is_quoted_with_what_to_do() -> None:
    said = r"uid map: Permission denied\. allow bubblewrap to make user namespaces"
    failure = "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1"
    with failing_sandbox(None, failure), pytest.raises(SandboxError, match=said):
        working_python.__wrapped__()


# ---- a sandbox that does not start


@pytest.mark.parametrize("failure", [NO_PROCESS, "exit 0", "kill -9 $$"], ids=["EAGAIN", "ends", "killed"])
def test_a_start_that_fails_is_no_verdict(failure: str) -> None:
    programs = [f"{RIGHT}  # {failure}{number}" for number in range(8)]
    with failing_sandbox(6, failure):
        assert shares_passed(programs, [SQUARES] * 8, LIMITS) == [1.0] * 8
    wait_until_none_is_left()


def test_a_sandbox_that_never_starts_is_an_error_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "PAUSES", (0.01, 0.01))
    program = f"{RIGHT}  # in vain"
    with failing_sandbox(None), pytest.raises(SandboxError, match=r"unavailable, at each of 3 tries\. Free memory"):
        passed(program, SQUARES, LIMITS)
    with failing_sandbox(None, "exit 1"), pytest.raises(SandboxError, match=r"ended without a message, at each of 3"):
        shares_passed([program], [SQUARES], LIMITS)
    assert passed(program, SQUARES, LIMITS) == {0, 1, 2, 3, 4}


def test_a_sandbox_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "PAUSES", (0.01,))
    monkeypatch.setattr(box, "START_SECONDS", 0.5)
    with failing_sandbox(None, "sleep 1000"), pytest.raises(SandboxError, match=r"no interpreter ran after 0\.5 s"):
        passed(f"{RIGHT}  # hangs", SQUARES, LIMITS)
    wait_until_none_is_left()


def test_nothing_is_left_if_the_interpreter_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that was killed while bubblewrap set it up waited for ever."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        for folder in ("bin", "lib"):
            (Path(name) / folder).mkdir(mode=0o700)
        python = str(Path(name, "bin", "python3"))
        Path(python).write_text("")

        def start(_: int) -> None:
            with pytest.raises(SandboxError, match=r"execvp .*(No such file|Permission denied)"):
                box.run_sides(python, RIGHT, SQUARES, LIMITS)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(start, range(200)))
    wait_until_none_is_left()


def children_after_judging() -> None:
    """For a process of its own: to it come orphans, as to the first process of a container."""
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    assert passed(f"{RIGHT}  # in a container", SQUARES, LIMITS) == {0, 1, 2, 3, 4}
    assert passed(ATTACKS["sleep"], SQUARES, Limits(seconds=0.5)) == frozenset()
    with pytest.raises(ChildProcessError):  # neither running nor waiting to be reaped
        os.waitpid(-1, os.WNOHANG)


def test_nothing_is_left_for_the_first_process_of_a_container_to_reap(tmp_path: Path) -> None:
    log = tmp_path / "log"
    forks.finish(forks.start(children_after_judging, log=log, folder=tmp_path), log)


@pytest.mark.parametrize(("name", "value"), [("seconds", 0), ("memory", 8), ("processes", 1.5), ("files", 0)])
def test_limits_have_ranges(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"out of range: --{name} {value} \(must be"):
        Limits(**{name: value})


@pytest.mark.parametrize(("load", "seconds"), [(0.5, 2), (1.5, 3), (40, 20)])
def test_a_loaded_machine_allows_more_seconds(load: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load * box.CPUS, 0, 0))
    assert seconds_now(Limits(seconds=2)) == seconds
