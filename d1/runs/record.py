"""What a run records about itself in run.json: settings, how they changed on a resume, versions, hardware."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from d1.runs.fingerprint import CONTENTS, ROWS, of_setting
from d1.runs.output_dir import write_atomically

logger = logging.getLogger(__name__)

RECORD = "run.json"
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes")


@dataclass(frozen=True)
class Past:
    """A resumed run up to the step of its checkpoint: its settings, without nesting, and how they had changed."""

    step: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class OnResume:
    """What a resume may change in the settings of a stage. A setting in neither table may change, and is recorded.

    The fingerprint of what a setting names (`contents of SETTING`, `rows of SETTING`) may change if the setting may.
    Records of older versions have none, and then nothing is compared.

    Args:
        fixed: for a setting, what must stay the same of its value: `whole` of it, or whether a weight is 0.
        free: patterns of names that do not affect the model (output, logging, speed); changes are not recorded.
    """

    fixed: Mapping[str, Callable[[Any], Any]]
    free: Sequence[str]

    def changes(self, past: Past, settings: Mapping[str, Any], folder: Path) -> dict[str, list[Any]]:
        """The settings that a resume changes, without free ones: {name: [before, now]}. ValueError for fixed ones."""
        before, now = past.settings, flat(settings)
        both = {name: [before[name], now[name]] for name in now if name in before and before[name] != now[name]}
        other = [
            f"{name} {both[name][0]} (now {both[name][1]})"
            for setting, part in self.fixed.items()
            for name in (setting, CONTENTS + setting, ROWS + setting)
            if name in both and part(both[name][0]) != part(both[name][1])
        ]
        if other:
            raise ValueError(
                f"{folder} holds another run, of {', '.join(other)}: continue it with its own settings and files, "
                "or choose another output_dir"
            )
        return {name: values for name, values in both.items() if name in self.fixed or not self.is_free(name)}

    def is_free(self, name: str) -> bool:
        return any(fnmatch(of_setting(name), pattern) for pattern in self.free)


def whole(value: Any) -> Any:
    return value


def cpu_model() -> str:
    """The processor's name, such as "AMD EPYC 7763 64-Core Processor", or its architecture if the name is unknown."""
    file = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.*\S)", file.read_text() if file.is_file() else "", re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def run_record() -> dict[str, Any]:
    """Versions and hardware, to be saved with results."""
    import torch  # imported late, because `eval.py --help` imports this module

    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES if find_spec(name)},
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cpu": {"machine": platform.machine(), "model": cpu_model(), "cores": os.cpu_count()},
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def save_record(folder: Path, settings: Mapping[str, Any], past: Past, changed: Mapping[str, list[Any]]) -> None:
    """Write `run.json`: the resolved settings of a run, `run_record()`, and what a resume changed, which is logged."""
    for name, (old, new) in changed.items():
        flag = name if of_setting(name) != name else f"--{name}"
        logger.warning("From step %d on, %s is %s (before: %s).", past.step, flag, new, old)
    changes = [*past.changes, *([{"step": past.step, **changed}] if changed else [])]
    record = {"settings": settings, "changes": changes, "resumed_at": past.step} | run_record()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECORD, json.dumps(record, indent=1, default=str) + "\n")


def history(checkpoint: Path | None) -> Past:
    """The past of a checkpoint, from the run.json next to it (without settings if there is none).

    Changes after the checkpoint do not count: a run may continue from an earlier checkpoint than its last.
    """
    if checkpoint is None:
        return Past()
    from d1.runs.checkpoints import read_state  # imported late: `eval.py --help` needs no Transformers

    file, step = checkpoint.parent / RECORD, read_state(checkpoint).global_step
    if not file.is_file():
        return Past(step)
    try:
        record = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error!r}): delete it to continue without a record") from error
    settings, changes = flat(record["settings"]), record.get("changes", [])
    for change in reversed(changes):
        if change["step"] >= step:
            settings |= {name: values[0] for name, values in change.items() if name != "step"}
    return Past(step, settings, [change for change in changes if change["step"] < step])


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the types of JSON; those under "model" move to the top level."""
    known = json.loads(json.dumps(settings, default=str))
    inner = known.pop("model", None)
    return known | (inner or {})
