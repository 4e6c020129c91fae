"""The caches by name. This module imports no torch.

A new cache is a subclass of `d1.sampling.passes.Passes`, in any module, and an entry in `CACHES`; `rollout`
and `rollout_stream` both use it. From outside: `CACHES["mine"] = Cache(MyPasses)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from d1.models.kinds import block_size, windowed


@dataclass(frozen=True)
class Cache:
    """An entry of the table."""

    passes: Callable[..., Any]  # makes the `Passes` from a model and the arguments of that class
    together: bool = True  # whether all rows of `rollout_stream` begin their blocks in the same pass


def lazy_passes(name: str, module: str = "d1.sampling.passes", **options: Any) -> Callable[..., Any]:
    """A class of `d1/sampling/passes.py` or another module, which is imported on first use, because it needs torch."""
    return lambda *args, **arguments: getattr(import_module(module), name)(*args, **options, **arguments)


CACHES: dict[str, Cache] = {
    "prefix": Cache(lazy_passes("Windows", to_end=True)),
    "dual": Cache(lazy_passes("Windows", to_end=False)),
    "delayed": Cache(lazy_passes("DelayedPasses", lasts=False)),
    "lasting": Cache(lazy_passes("DelayedPasses", lasts=True)),
}
NO_CACHE = Cache(lazy_passes("Passes"), together=False)
PACKED_TEXTS = Cache(lazy_passes("PackedPasses", "d1.sampling.packed"), together=False)  # the same, for flash attention
FINISHED_BLOCKS = Cache(lazy_passes("FinishedBlocks"))  # exact: block-causal models use it with every sampler
# The same for models with a causal context, and what it is compared with.
CAUSAL_CONTEXT = Cache(lazy_passes("CausalContext"))
RECOMPUTED_CONTEXT = Cache(lazy_passes("RecomputedContext"))


def cache_of(config: Any, name: str | None, recompute: bool = False) -> Cache:
    """The entry for a model's config and the cache `name` of the settings; `recompute` turns the exact cache off."""
    if name is not None:
        return CACHES[name]
    if not block_size(config):
        from d1.transformers_bridge import attention_kernel

        is_flash = (attention_kernel(config) or "").startswith("flash_attention")
        if is_flash and not windowed(config):
            return PACKED_TEXTS
        return NO_CACHE
    from d1.models.attention import has_causal_context

    if has_causal_context(config):
        return RECOMPUTED_CONTEXT if recompute else CAUSAL_CONTEXT
    return NO_CACHE if recompute else FINISHED_BLOCKS
