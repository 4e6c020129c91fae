"""What runs within the two sandboxes of a judged program, or the one of a program alone, as `python -c`: it imports the
standard library alone.

The program's side holds the program and knows no test. It answers calls. The tests' side runs the tests and sends each
call of the program's functions over a pipe. It reads plain values back, which it compares with its own, and writes the
numbers of the cases that passed to a pipe that the program's side does not have. Each side first says that it is ready:
a sandbox that did not start is no verdict. Values travel as words (`pack`): to import json or typing takes longer than
to start the interpreter.
"""

from __future__ import annotations

import builtins
import operator
import os
import resource
import sys

TYPE_CHECKING = False  # read by type checkers like typing.TYPE_CHECKING
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MIB = 1 << 20
MODULE = "__solution__"  # the name of the program as a module, for the tests
READY = b"ready\n"  # what each side writes before it runs any code of a program or a test
# letter -> type, how a value is written, how its text is read; bool stands before int, its base class
PLAIN: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "n": (type(None), lambda _: "", lambda _: None),
    "b": (bool, lambda value: f"{value:d}", lambda text: text == "1"),
    "i": (int, lambda value: f"{int(value):x}", lambda text: int(text, 16)),
    "f": (float, lambda value: float(value).hex(), float.fromhex),
    "c": (
        complex,
        lambda value: f"{value.real.hex()},{value.imag.hex()}",
        lambda text: complex(*map(float.fromhex, text.split(","))),
    ),
    "u": (
        str,
        lambda value: str.encode(value, "utf-8", "surrogatepass").hex(),  # `str(value)` of an Enum is another text
        lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    ),
    "y": (bytes, lambda value: value.hex(), bytes.fromhex),
    "a": (bytearray, lambda value: value.hex(), bytearray.fromhex),
}
CONTAINERS: dict[str, Any] = {"d": dict, "l": list, "t": tuple, "s": set, "z": frozenset}


def set_limits(limits: dict[str, Any]) -> None:
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


def detach_pipes() -> tuple[Any, Any]:
    """Standard input and output as (reader, writer); the standard streams themselves lead to /dev/null from now on."""
    reader = os.fdopen(os.dup(0), "rb")
    writer = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.environ.clear()
    return reader, writer


def execute(source: str, file: str, names: dict[str, Any]) -> None:
    """Runs source code with its own `from __future__` imports, not with those of this file."""
    exec(compile(source, file, "exec", dont_inherit=True), names)


def pack(value: Any, reference: Any) -> str:
    """A value as one line of words: a letter for the type, then the value itself or the number of values that follow.
    Anything but a plain value becomes the number `reference(value)`."""
    words: list[str] = []
    write_value(value, words.append, reference)
    return " ".join(words)


def write_value(value: Any, add: Callable[[str], None], reference: Any) -> None:
    for letter, (kind, write, _) in PLAIN.items():
        if isinstance(value, kind):
            add(letter + write(value))
            return
    for letter, kind in CONTAINERS.items():
        if isinstance(value, kind):
            add(f"{letter}{len(value)}")
            parts = value
            if letter == "d":
                parts = (part for pair in value.items() for part in pair)
            for part in parts:
                write_value(part, add, reference)
            return
    add(f"r{reference(value):d}")


def unpack(line: str, dereference: Any) -> Any:
    """The value that `pack` was given, as a plain built-in type. Raises some Exception for any other line."""
    return read_value(iter(line.split()), dereference)


def read_value(words: Iterator[str], dereference: Any) -> Any:
    word = next(words, "")
    letter, text = word[:1], word[1:]
    if letter == "d":
        return {read_value(words, dereference): read_value(words, dereference) for _ in range(int(text))}
    if letter in CONTAINERS:
        return CONTAINERS[letter]([read_value(words, dereference) for _ in range(int(text))])
    if letter == "r":
        return dereference(int(text))
    _, _, read = PLAIN[letter]
    return read(text)


# ---- the program's side

# None of them is an operator on two values: the other one could be what a test expects.
OPERATIONS: dict[str, Any] = {
    "call": lambda function, /, *arguments, **named: function(*arguments, **named),
    "attribute": getattr,
    "length": len,
    "item": operator.getitem,
    "iterate": iter,
    "next": next,
    "truth": bool,
    "holds": lambda kind, value: isinstance(value, kind),
}


def answer_calls(limits: dict[str, Any]) -> None:
    """Runs the program, then answers calls until the pipe ends."""
    calls, replies = detach_pipes()
    set_limits(limits)
    replies.write(READY)
    replies.flush()
    module = type(sys)("solution")
    sys.modules["solution"] = module
    objects: list[Any] = [module]

    def store_object(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def reply(*message: Any) -> None:
        replies.write(pack(message, store_object).encode() + b"\n")
        replies.flush()

    # The first message is the program's source; each later one is [operation, arguments, named arguments].
    for number, line in enumerate(calls):
        message = unpack(line.decode(), objects.__getitem__)
        try:
            if number == 0:
                execute(message, "solution.py", vars(module))
                reply("value", None, [])
                continue
            operation, arguments, named = message
            value = OPERATIONS[operation](*arguments, **named)
            reply("value", value, [arguments[1:], named] if operation == "call" else [[], {}])
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            reply("error", names, str(error)[:1000])


# ---- a program alone


def run_alone(limits: dict[str, Any]) -> None:
    """Runs a program, whose prints and last error go to standard output."""
    orders, output = detach_pipes()
    set_limits(limits)
    program = unpack(orders.readline().decode(), None)
    output.write(READY)
    output.flush()
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    os.dup2(output.fileno(), 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the kernel may end the process
    try:
        execute(program, "program.py", vars(module))
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stdout.write(f"{end.code}\n")
    except BaseException as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    sys.stdout.flush()


# ---- the tests' side


class Remote:
    """An object of the program's side. It equals itself alone, and no operator on two values reaches the program. Its
    own two attributes have names that no attribute of a program has."""

    def __init__(self, ask: Any, number: int) -> None:
        vars(self).update({"<ask>": ask, "<number>": number})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self)["<ask>"]("attribute", self, name)


def make_method(operation: str) -> Any:
    """A method that asks the program's side for an operation on its object."""
    return lambda self, /, *arguments, **named: vars(self)["<ask>"](operation, self, *arguments, **named)


for _name, _operation in {
    "__call__": "call",
    "__len__": "length",
    "__getitem__": "item",
    "__iter__": "iterate",
    "__next__": "next",
    "__bool__": "truth",
    "__instancecheck__": "holds",
}.items():
    setattr(Remote, _name, make_method(_operation))


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
    """Gives a list, dictionary or set the content that the program gave to its copy."""
    if isinstance(value, list) and isinstance(changed, list):
        value[:] = changed
    elif isinstance(value, dict | set) and type(value) is type(changed):
        value.clear()
        value.update(changed)


class Program:
    """The other side, as the tests' side sees it: two pipes."""

    def __init__(self, calls: int, replies: int, max_reply: int) -> None:
        self.calls = os.fdopen(calls, "wb")
        self.replies = os.fdopen(replies, "rb")
        self.max_reply = max_reply  # bytes

    def send(self, message: Any) -> tuple[Any, list[Any]]:
        """Sends a message; returns the value of the reply, and the arguments as the call has changed them: those by
        position, and those by name."""
        words = pack(message, self.number_of)
        # A program that has ended, or that says too much, passes nothing from here on, whatever the tests catch.
        try:
            self.calls.write(words.encode() + b"\n")
            self.calls.flush()
            line = self.replies.readline(self.max_reply)
        except OSError:
            os._exit(0)
        if not line.endswith(b"\n"):
            os._exit(0)
        kind, value, detail = unpack(line.decode(), self.remote)
        if kind == "error":
            raise exception_of(value, str(detail))
        return value, detail

    def remote(self, number: int) -> Remote:
        return Remote(self.ask, number)

    def ask(self, operation: str, /, *arguments: Any, **named: Any) -> Any:
        value, (changed_arguments, changed_named) = self.send([operation, [*arguments], named])
        for argument, changed in zip(arguments[1:], changed_arguments, strict=False):
            update(argument, changed)
        for name, changed in changed_named.items():
            update(named[name], changed)
        return value

    @staticmethod
    def number_of(value: Any) -> int:
        if not isinstance(value, Remote):
            raise TypeError(f"a test hands the program a {type(value).__name__}, which is no plain value")
        return int(vars(value)["<number>"])


class Case:
    """`with case(3): ...` writes "3" once the block has ended without an exception; an exception ends the block."""

    def __init__(self, verdicts: Any, number: int) -> None:
        self.verdicts = verdicts
        self.number = number

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            self.verdicts.write(b"%d\n" % self.number)
            self.verdicts.flush()
        return kind is None or issubclass(kind, Exception)


def run_tests(limits: dict[str, Any], calls: int, replies: int) -> None:
    """Runs the tests against the program."""
    orders, verdicts = detach_pipes()
    set_limits(limits)
    order = unpack(orders.readline().decode(), None)
    program = Program(calls, replies, 2 * limits["reply"] * MIB)  # a letter of a text takes two
    if program.replies.readline(len(READY)) != READY:  # its sandbox did not start: no verdict
        os._exit(1)
    verdicts.write(READY)
    verdicts.flush()
    program.send(order["program"])
    module = program.remote(0)
    # The setup runs first, so that it cannot replace what the program defines.
    names: dict[str, Any] = {"__name__": "tests"}
    execute(order["setup"], "setup.py", names)
    for name in order["names"]:
        names[name] = module if name == MODULE else getattr(module, name)
    names["__case__"] = lambda number: Case(verdicts, number)
    execute(order["source"], "tests.py", names)


def main() -> None:
    limits = unpack(sys.argv[1], None)
    arguments = sys.argv[2:]
    try:
        if arguments == ["show"]:
            run_alone(limits)
            return  # the interpreter waits for the program's threads, which may print
        if arguments:
            run_tests(limits, *map(int, arguments))
        else:
            answer_calls(limits)
    except BaseException:  # the caller sees it: something is missing in the pipes
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
