"""The caches by name. This module imports no torch.

A new cache is a subclass of `d1.sampling.passes.Passes`, in any module, and an entry in `CACHES`; `rollout`
and `rollout_stream` both use it. From outside: `CACHES["mine"] = Cache(MyPasses)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from d1.models.kinds import block_size


@dataclass(frozen=True)
class Cache:
    """An entry of the table."""

    passes: Callable[..., Any]  # makes the `Passes` from a model and the arguments of that class
    together: bool = True  # whether all rows of `rollout_stream` begin their blocks in the same pass


def of(name: str, **options: Any) -> Callable[..., Any]:
    """A class of `d1/sampling/passes.py`, which is imported on first use, because it needs torch."""
    return lambda *args, **given: getattr(import_module("d1.sampling.passes"), name)(*args, **options, **given)


CACHES: dict[str, Cache] = {
    "prefix": Cache(of("Windows", to_end=True)),
    "dual": Cache(of("Windows", to_end=False)),
    "delayed": Cache(of("DelayedPasses", lasts=False)),
    "lasting": Cache(of("DelayedPasses", lasts=True)),
}
NO_CACHE = Cache(of("Passes"), together=False)
FINISHED_BLOCKS = Cache(of("FinishedBlocks"))  # exact: block-causal models use it with every sampler


def cache_of(config: Any, name: str | None, recompute: bool = False) -> Cache:
    """The entry for a model's config and the cache `name` of the settings; `recompute` turns the exact cache off."""
    if name is not None:
        return CACHES[name]
    return FINISHED_BLOCKS if block_size(config) and not recompute else NO_CACHE
