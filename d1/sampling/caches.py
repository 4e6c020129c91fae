"""The caches by name. This module imports no torch.

A new cache is a subclass of `d1.sampling.passes.Passes`, in any module, and a line in `CACHES`; `rollout` and
`rollout_stream` both use it. From outside: `CACHES["mine"] = Cache(MyPasses)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from d1.models.kinds import block_size


@dataclass(frozen=True)
class Cache:
    """A row of the table."""

    passes: Callable[..., Any]  # makes the `Passes` from a model and the arguments of that class
    together: bool = True  # whether all rows of `rollout_stream` begin their blocks in the same pass


def of(module: str, name: str, **options: Any) -> Callable[..., Any]:
    """A class in a module of this package; the module is imported on first use."""
    return lambda *args, **given: getattr(import_module(f"d1.sampling.{module}"), name)(*args, **options, **given)


CACHES: dict[str, Cache] = {
    "prefix": Cache(of("windows", "Windows", to_end=True)),
    "dual": Cache(of("windows", "Windows", to_end=False)),
    "delayed": Cache(of("delayed", "DelayedPasses", lasts=False)),
    "lasting": Cache(of("delayed", "DelayedPasses", lasts=True)),
}
NO_CACHE = Cache(of("passes", "Passes"), together=False)
FINISHED_BLOCKS = Cache(of("windows", "FinishedBlocks"))  # exact: block-causal models use it with every sampler


def cache_of(config: Any, name: str | None, recompute: bool = False) -> Cache:
    """The row for a model's config and the cache `name` of the settings; `recompute` turns the exact cache off."""
    if name is not None:
        return CACHES[name]
    return FINISHED_BLOCKS if block_size(config) and not recompute else NO_CACHE
