"""The process in which math-verify compares answers: `d1.tasks.maths` starts this file as a script.

It reads one request per line, a pair [gold, answer] as JSON, and replies with one byte: "1" if they are the same, "0"
if not, "?" if a limit ended the comparison. Where Python cannot interrupt a comparison, the kernel ends the process by
its processor time.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

_MEMORY = 4 << 30  # bytes
_CONFIG = [LatexExtractionConfig()]  # the library's other config passes text to Python's eval


class _OutOfTime(BaseException):
    """Not an Exception, so that no handler within sympy swallows it."""


def _stop(*_: object) -> None:
    raise _OutOfTime


def _parse(latex: str) -> list[object]:
    return parse(rf"\boxed{{{latex}}}", _CONFIG, fallback_mode="no_fallback", parsing_timeout=0)


def _same(gold: str, answer: str) -> bool:
    parsed = _parse(gold), _parse(answer)
    return all(parsed) and verify(*parsed, timeout_seconds=None)


def _limit_processor_time(seconds: float) -> None:
    """Ends this process after `seconds` more of processor time, rounded up to whole seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    end = int(used.ru_utime + used.ru_stime + seconds) + 1
    if most != resource.RLIM_INFINITY:
        end = min(end, most)
    resource.setrlimit(resource.RLIMIT_CPU, (end, most))


def _reply(request: bytes, time_limit: float) -> bytes:
    _limit_processor_time(2 * time_limit)
    try:
        signal.setitimer(signal.ITIMER_PROF, time_limit)
        same = _same(*json.loads(request))
    except (_OutOfTime, MemoryError):
        return b"?"
    except Exception:  # math-verify cannot read one of the two
        return b"0"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return b"1" if same else b"0"


def main(time_limit: float) -> None:
    """Replies to each line until the input ends; `time_limit` is in seconds of processor time per line."""
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _stop)
    # The parser's tables and late imports are made now, so that the time of the first answer does not include them.
    _same("(x+1)^2", "x^2+2x+1")
    sys.stdout.buffer.write(b"!")
    sys.stdout.buffer.flush()
    for request in sys.stdin.buffer:
        sys.stdout.buffer.write(_reply(request, time_limit))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
