"""What a run needs of its machine, checked within seconds: before processes connect and before DeepSpeed compiles."""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_default_build_root

from d1.models.adapters import adapter_chain
from d1.runs.console import log_to_console

logger = logging.getLogger(__name__)


def check_start(model: str) -> None:
    """Check that the model can be read, then GPU and DeepSpeed; the first process logs a line for what slows the run.

    Raises:
        FileNotFoundError: the model is no folder, not in the hub's cache, and cannot be downloaded.
        ValueError: DeepSpeed is asked for and not installed; or a killed build of an extension left its lock, for which
            it would wait forever.
    """
    log_to_console()
    adapter_chain(model, None)
    lines = [] if torch.cuda.is_available() else ["GPU: none, so training runs on the CPU."]
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        if find_spec("deepspeed") is None:
            raise ValueError(
                'the launch configuration asks for DeepSpeed, which is not installed: pip install "deepspeed==0.19.*", '
                "or launch with launch/ddp.yaml, launch/fsdp2.yaml or launch/single_gpu.yaml"
            )
        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
        mine = ("*", f"py{sys.version_info.major}{sys.version_info.minor}*/*")  # of this Python, one per extension
        folders = [folder for pattern in mine for folder in root.glob(pattern)]
        for lock in (folder / "lock" for folder in folders):
            if lock.exists() and not is_open(lock) and lock.exists():  # a build may end meanwhile
                raise ValueError(f"{lock} is left from a build that was killed, and DeepSpeed waits for it: delete it")
        if lines and not any(any(folder.glob("deepspeed_shm_comm*.so")) for folder in folders):
            lines += [f"DeepSpeed: without a GPU it first compiles an extension, once, to {root}: this takes minutes."]
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            logger.info(line)


def is_open(file: Path) -> bool:
    """Whether a process of this user has the file open, as a running build has its lock; True on systems without
    `/proc`."""
    links = Path("/proc").glob("[0-9]*/fd/*")
    return not Path("/proc/self/fd").is_dir() or any(points_to(link, file.resolve()) for link in links)


def points_to(link: Path, file: Path) -> bool:
    try:
        return link.readlink() == file
    except OSError:  # closed meanwhile
        return False
