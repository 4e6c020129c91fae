"""What runs within the two sandboxes of a judged program, as `python -c`: it imports the standard library alone.

The program's side holds the program and knows no test. It answers calls with JSON. The tests' side runs the tests and
sends each call of the program's functions over a pipe. It reads plain values back, which it compares with its own, and
writes the numbers of the cases that passed to a pipe that the program's side does not have.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import resource
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING: to import typing takes as long as to start the interpreter
if TYPE_CHECKING:
    from typing import Any, NoReturn

MIB = 1 << 20
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def limit(limits: dict[str, Any]) -> None:
    """Limits this process and what it starts; without privileges no process can raise them again."""
    for name, value in (
        ("AS", limits["memory"] * MIB),
        ("CPU", limits["cpu_seconds"]),
        ("FSIZE", limits["files"] * MIB),
        ("NPROC", limits["processes"]),
        ("NOFILE", 64),
        ("CORE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def own_pipes() -> tuple[Any, Any]:
    """Standard input and output as (reader, writer); the standard streams themselves lead to /dev/null from now on."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.environ.clear()
    return pipes


def pack(value: Any, reference: Any) -> Any:
    """A value as JSON. What is no plain value becomes `reference(value)`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 62 else ["int", hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__, value.hex()]
    if isinstance(value, dict):
        return ["dict", [[pack(k, reference), pack(v, reference)] for k, v in value.items()]]
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [pack(item, reference) for item in value]]
    return ["reference", reference(value)]


def unpack(packed: Any, dereference: Any) -> Any:
    """The value that `pack` was given, as a plain built-in type."""
    if not isinstance(packed, list):
        return packed
    kind, *rest = packed
    if kind in CONTAINERS:
        return CONTAINERS[kind](unpack(item, dereference) for item in rest[0])
    if kind == "dict":
        return {unpack(k, dereference): unpack(v, dereference) for k, v in rest[0]}
    if kind == "int":
        return int(rest[0], 16)
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind).fromhex(rest[0])
    return complex(*rest) if kind == "complex" else dereference(rest[0])


# ---- the program's side

# None of them is an operator on two values: the other one could be what a test expects.
OPERATIONS: dict[str, Any] = {
    "call": lambda function, *given, **named: function(*given, **named),
    "attribute": getattr,
    "length": len,
    "item": operator.getitem,
    "iterate": iter,
    "next": next,
    "truth": bool,
    "holds": lambda kind, value: isinstance(value, kind),
}


def answer(limits: dict[str, Any]) -> None:
    """Runs the program, then answers calls until the pipe ends."""
    calls, replies = own_pipes()
    limit(limits)
    module = sys.modules["solution"] = type(sys)("solution")
    objects: list[Any] = [module]

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def reply(*message: Any) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    for number, line in enumerate(calls):
        message = json.loads(line)
        try:
            if number == 0:
                exec(compile(message, "solution.py", "exec"), vars(module))
                reply("value", None, [])
                continue
            operation, packed, named = message
            given = [unpack(item, objects.__getitem__) for item in packed]
            options = {name: unpack(item, objects.__getitem__) for name, item in named.items()}
            value = OPERATIONS[operation](*given, **options)
            changed = [pack(item, keep) for item in given[1:]] if operation == "call" else []
            reply("value", pack(value, keep), changed)
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            reply("error", names, str(error)[:1000])


# ---- the tests' side


class Remote:
    """An object of the program's side. It equals itself alone, and no operator on two values reaches the program."""

    def __init__(self, ask: Any, number: int) -> None:
        vars(self).update(ask=ask, number=number)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.ask("call", self, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.ask("attribute", self, name)

    def __len__(self) -> int:
        return self.ask("length", self)

    def __getitem__(self, key: Any) -> Any:
        return self.ask("item", self, key)

    def __iter__(self) -> Any:
        return self.ask("iterate", self)

    def __next__(self) -> Any:
        return self.ask("next", self)

    def __bool__(self) -> bool:
        return self.ask("truth", self)

    def __instancecheck__(self, value: Any) -> bool:
        return self.ask("holds", self, value)


def exception_of(names: list[str], message: str) -> Exception:
    """An error of the program as the nearest built-in exception."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:  # UnicodeDecodeError needs more than a message
                continue
    return Exception(message)


def update(value: Any, changed: Any) -> None:
    """Makes a list, dictionary or set what the program made of its copy."""
    if isinstance(value, list) and isinstance(changed, list):
        value[:] = changed
    elif isinstance(value, dict | set) and type(value) is type(changed):
        value.clear()
        value.update(changed)


class Program:
    """The other side, as the tests' side sees it: two pipes."""

    def __init__(self, calls: int, replies: int, longest: int) -> None:
        self.calls, self.replies, self.longest = os.fdopen(calls, "wb"), os.fdopen(replies, "rb"), longest

    def tell(self, message: Any) -> tuple[Any, list[Any]]:
        """Sends a message; returns the value of the reply, and what became of the arguments. A program that has ended,
        or that says too much, has passed nothing from here on, whatever the tests catch: this ends the process."""
        try:
            self.calls.write(json.dumps(message).encode() + b"\n")
            self.calls.flush()
            line = self.replies.readline(self.longest)
        except OSError:
            os._exit(0)
        if not line.endswith(b"\n"):
            os._exit(0)
        kind, value, more = json.loads(line)
        if kind == "error":
            raise exception_of(value, str(more))
        return unpack(value, self.remote), [unpack(item, self.remote) for item in more]

    def remote(self, number: int) -> Remote:
        return Remote(self.ask, number)

    def ask(self, operation: str, *given: Any, **named: Any) -> Any:
        packed = [pack(item, self.number_of) for item in given]
        options = {name: pack(item, self.number_of) for name, item in named.items()}
        value, changed = self.tell([operation, packed, options])
        for item, after in zip(given[1:], changed, strict=False):
            update(item, after)
        return value

    @staticmethod
    def number_of(value: Any) -> int:
        if not isinstance(value, Remote):
            raise TypeError(f"a test hands the program a {type(value).__name__}, which is no plain value")
        return int(value.number)


class Case:
    """`with case(3): ...` writes "3" once the block has ended without an exception; an exception ends the block."""

    def __init__(self, verdicts: Any, number: int) -> None:
        self.verdicts, self.number = verdicts, number

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            self.verdicts.write(b"%d\n" % self.number)
            self.verdicts.flush()
        return kind is None or issubclass(kind, Exception)


def examine(limits: dict[str, Any], calls: int, replies: int) -> None:
    """Runs the tests against the program."""
    orders, verdicts = own_pipes()
    limit(limits)
    given = json.loads(orders.readline())
    program = Program(calls, replies, limits["reply"] * MIB)
    program.tell(given["program"])
    module = program.remote(0)
    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(given["setup"], "setup.py", "exec"), names)
    names |= {name: module if name == "solution" else getattr(module, name) for name in given["names"]}
    names["__case__"] = lambda number: Case(verdicts, number)
    exec(compile(given["source"], "tests.py", "exec"), names)


def main() -> NoReturn:
    limits, *pipes = map(json.loads, sys.argv[1:])
    try:
        examine(limits, *pipes) if pipes else answer(limits)
    except BaseException:  # said by what was not written to the pipes
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
