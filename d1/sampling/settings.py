"""Which sampler: exact, or with caches (`d1/caching.py`), parallel decoding (`d1/reveal.py`), or both."""

from __future__ import annotations

from dataclasses import dataclass

from d1.sampling.caching import CACHES
from d1.sampling.reveal import RULES

REMASKING = ("low_confidence", "random")
SAMPLERS = ("exact", "cached", "parallel", "cached+parallel")


@dataclass(frozen=True)
class Sampler:
    """How rollouts are sampled, from `choose_sampler`; the default is exact.

    Attributes:
        kv_cache: None, or how states are cached within a block (`d1/caching.py`).
        reveal: None for the schedule's counts, or a rule of `d1/reveal.py`, with its `reveal_level`.
    """

    kv_cache: str | None = None
    reveal: str | None = None
    reveal_level: float = 0.0


EXACT = Sampler()


def choose_sampler(
    name: str, *, kv_cache: str | None = None, reveal: str | None = None, reveal_level: float | None = None
) -> Sampler:
    """The sampler of a name in `SAMPLERS`.

    Args:
        kv_cache: for a cached sampler, "dual" (default) or "prefix".
        reveal: for a parallel sampler, "threshold" (default), "factor" or "entropy".
        reveal_level: the rule's level; by default that in `d1.sampling.reveal.RULES`.

    Raises:
        ValueError: an unknown name, or an option that the sampler would ignore.
    """
    if name not in SAMPLERS:
        raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {name!r}")
    parts = name.split("+")
    if "cached" not in parts and kv_cache is not None:
        raise ValueError(f"kv_cache={kv_cache!r} would be ignored by the sampler {name}: choose a cached one")
    if "parallel" not in parts and (reveal is not None or reveal_level is not None):
        raise ValueError(f"reveal and reveal_level would be ignored by the sampler {name}: choose a parallel one")
    if kv_cache is not None and kv_cache not in CACHES:
        raise ValueError(f"kv_cache must be one of {', '.join(CACHES)}, got {kv_cache!r}")
    if reveal is not None and reveal not in RULES:
        raise ValueError(f"reveal must be one of {', '.join(RULES)}, got {reveal!r}")
    cache = (kv_cache or "dual") if "cached" in parts else None
    if "parallel" not in parts:
        return Sampler(cache)
    rule = reveal or "threshold"
    level = RULES[rule][1] if reveal_level is None else reveal_level
    if not level >= 0:
        raise ValueError(f"reveal_level must be >= 0, got {level}")
    return Sampler(cache, rule, level)
