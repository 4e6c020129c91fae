"""The Hugging Face hub: whether it answers, and what a name that is nowhere may have meant. Imports nothing heavy."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from d1.ranges import nearest

logger = logging.getLogger(__name__)

HUB_SECONDS = 5.0  # to wait for the hub's answer


@functools.cache
def hub_problem() -> str:
    """Why the hub cannot be reached, or an empty string; asked once per process."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # the class depends on what fails: name, proxy, certificate, time
        return f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
    return ""


def no_hub() -> str:
    """Why nothing can be downloaded, or an empty string."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else hub_problem()


def use_cache(name: str, problem: str) -> None:
    """Read from the hub's cache from now on; its client would try to reach the hub for half a minute per name."""
    from huggingface_hub import constants

    if not constants.is_offline_mode():
        logger.warning("Network: %s, so %s is read from the cache.", problem, name)
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def is_path(name: str) -> bool:
    """Whether `name` can only be that of a file or folder: the hub has NAME and OWNER/NAME."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def closest(name: str, known: Iterable[str] = ()) -> str:
    """For a message: `nearest` of the names `known` and of those in the folder in which `name` would be."""
    folder = Path(name).parent
    there = [str(folder / path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return nearest(Path(name), [*known, *there], cutoff=0.75)
