"""What one of two processes raises is raised in both, so that none waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from d1.runs.cli import RunError, from_rank_0, raise_together
from tests import forks


class Lost(ConnectionError):
    pass


class Unsendable(Exception):
    def __init__(self, one: str, two: str) -> None:  # cannot be made again from its message
        super().__init__(f"{one} {two}")


def raised(error: Exception | None) -> None:
    if error is not None:
        raise error


def worker() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert from_rank_0(lambda: {"rank": rank}) == {"rank": 0}
    with pytest.raises(FileNotFoundError, match=r"^no rows$"):
        from_rank_0(lambda: raised(FileNotFoundError("no rows")))
    with pytest.raises(Unsendable if rank else RunError, match=r"^two words$"), raise_together():
        raised(Unsendable("two", "words") if rank else None)
    with pytest.raises(Lost if rank else ValueError, match=r"^a server$" if rank else r"^another$"), raise_together():
        raise Lost("a server") if rank else ValueError("another")
    dist.destroy_process_group()


def test_two_processes_raise_together(tmp_path: Path) -> None:
    log = tmp_path / "log"
    forks.finish(forks.start(worker, log=log, folder=tmp_path, processes=2), log)


def test_one_process_raises_its_own_error() -> None:
    with pytest.raises(KeyError), raise_together():
        raise KeyError
    assert from_rank_0(lambda: 3) == 3
