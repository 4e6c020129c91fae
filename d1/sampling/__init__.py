"""The reverse process: from a prompt to a completion. Imports torch only where a name that needs it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d1.sampling.loop import Rollout as Rollout
    from d1.sampling.loop import Step as Step
    from d1.sampling.loop import generate as generate
    from d1.sampling.loop import rollout as rollout
    from d1.sampling.loop import steps as steps
    from d1.sampling.settings import SamplingSettings as SamplingSettings

MODULES = {
    "Rollout": "loop",
    "Step": "loop",
    "generate": "loop",
    "rollout": "loop",
    "steps": "loop",
    "SamplingSettings": "settings",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
