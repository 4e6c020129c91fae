"""What one of two processes raises is raised in both, so that none waits; and what must be equal in all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from d1.runs import cli
from d1.runs.cli import RunError, from_rank_0, raise_together, require_equal, require_shared
from tests import forks
from tests.commands import ROOT


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


def machine(folder: Path) -> None:
    """One of two processes, each with a working folder of its own."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    require_equal(3, "not reached")
    with pytest.raises(ValueError, match=r"^pass --dtype$"):
        require_equal(rank, "pass --dtype")
    (folder / "shared").touch()
    require_shared(folder / "shared", "not reached")
    if rank == 0:
        Path("first").touch()
    cli.SHARED_SECONDS = 0.1
    with pytest.raises(ValueError, match=r"^first of the first process is not there on \S+: share the folder$"):
        require_shared(Path("first"), "share the folder")
    dist.destroy_process_group()


def in_own_folder(work: Callable[..., object], folder: Path, *given: object) -> None:
    """Run `work` in a folder of this process, as on another machine."""
    own = folder / os.environ["RANK"]
    own.mkdir()
    os.chdir(own)
    work(*given)


def test_two_machines_must_share_a_folder_and_agree(tmp_path: Path) -> None:
    log = tmp_path / "log"
    given = (in_own_folder, machine, tmp_path, tmp_path)
    forks.finish(forks.start(*given, log=log, folder=tmp_path, processes=2), log)


@pytest.mark.parametrize("program", ["SFT/sft_train.py", "eval/eval.py"])
def test_a_run_whose_machines_do_not_share_its_folder_ends_before_it_starts(
    program: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(40 * '{"prompt": "1+1", "completion": "=2!"}\n')
    flags = {
        "SFT/sft_train.py": ["--model_name", tiny_model_dir, "--train_data", rows, "--debugging"],
        "eval/eval.py": ["--model_path", tiny_model_dir, "--dataset", "sudoku", "--gen_length", 8, "--limit", 2],
    }[program]
    log = tmp_path / "log"
    words = [str(ROOT / program), *map(str, flags), "--output_dir", "out"]
    started = forks.start(
        in_own_folder, soon, tmp_path, *words, log=log, folder=tmp_path, processes=2, ACCELERATE_USE_CPU="true"
    )
    said = forks.finish(started, log, status=1, timeout=120)
    assert re.search(r"out/\S+ of the first process is not there on \S+: all machines .* share", said)
    assert "Traceback" not in said
    assert not list(tmp_path.glob("**/checkpoint-*"))


def soon(*words: str) -> None:
    """The script, which waits for a shared file for a moment only."""
    cli.SHARED_SECONDS = 0.1
    forks.script(*words)


def test_one_process_raises_its_own_error() -> None:
    with pytest.raises(KeyError), raise_together():
        raise KeyError
    assert from_rank_0(lambda: 3) == 3
