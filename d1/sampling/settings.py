"""The settings of a rollout: the only place that names and checks them. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from d1.models.distribution import OWN, Distribution
from d1.models.kinds import block_size
from d1.sampling.caches import CACHES
from d1.sampling.reveal import REMASKING, RULES, aligned_schedule, reveal_schedule

BLOCK_LENGTH = 32  # d1's
SAMPLERS = ("exact", "cached", "parallel", "cached+parallel")


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are sampled.

    Raises:
        ValueError: a setting is wrong, contradicts another, or would be ignored.
    """

    gen_length: int  # tokens to generate; if blocks or steps do not divide it, they are spread evenly
    block_length: int  # the largest length of a block; `gen_length` gives pure diffusion
    steps: int  # forward passes per row; guidance doubles the sequences per pass; a parallel sampler takes fewer passes
    temperature: float = 0.0  # of the Gumbel noise; 0 is greedy
    cfg_scale: float = 0.0  # classifier-free guidance; 0 turns it off
    remasking: str = "low_confidence"  # which predictions a step keeps, a name in `REMASKING`
    # "exact" is the published algorithm; "cached" reads keys and values from a cache, "parallel" reveals as many tokens
    # as a rule allows: both trade accuracy for speed. A block-causal model's own cache costs no accuracy, and every
    # sampler uses it.
    sampler: str = "exact"
    kv_cache: str | None = None  # for a cached sampler, a name in `CACHES`; None is "dual"
    reveal: str | None = None  # for a parallel sampler, a name in `RULES`; None is "threshold"
    reveal_level: float | None = None  # the level of that rule; None is the rule's own
    top_k: int = 0  # draw from the `top_k` most likely tokens; 0: from all
    top_p: float = 1.0  # draw from the most likely tokens whose probabilities sum to `top_p`
    record_as_sampled: bool = False  # record log-probabilities of the distribution drawn from, not of the model's own

    def __post_init__(self) -> None:
        for name in ("gen_length", "block_length", "steps"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be positive and whole, got {value!r}")
        for name in ("temperature", "cfg_scale", "reveal_level"):
            value = 0 if name == "reveal_level" and self.reveal_level is None else getattr(self, name)
            if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be >= 0 and finite, got {value!r}")
        tables = {"remasking": REMASKING, "sampler": SAMPLERS, "kv_cache": (None, *CACHES), "reveal": (None, *RULES)}
        for name, known in tables.items():
            if getattr(self, name) not in known:
                choices = ", ".join(filter(None, known))
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        orders = " or ".join(name for name, order in REMASKING.items() if order.by_confidence)
        ignored = f"would be ignored by the sampler {self.sampler}: choose a"
        of_rules = self.reveal is not None or self.reveal_level is not None
        wrong = {
            f"kv_cache={self.kv_cache!r} {ignored} cached one": self.kv_cache is not None and self.cache is None,
            f"reveal and reveal_level {ignored} parallel one": of_rules and self.rule is None,
            f"top_k must be whole and >= 0, got {self.top_k!r}": (
                not isinstance(self.top_k, Integral) or self.top_k < 0
            ),
            f"top_p must be above 0 and at most 1, got {self.top_p!r}": (
                not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1
            ),
            "top_k, top_p and record_as_sampled need a temperature above 0": (
                not self.temperature and (self.top_k, self.top_p, self.record_as_sampled) != (0, 1, False)
            ),
            f"a parallel sampler reveals by confidence: it needs remasking {orders}, got {self.remasking}": (
                self.rule is not None and not REMASKING[self.remasking].by_confidence
            ),
        }
        if any(wrong.values()):
            raise ValueError(next(message for message, is_so in wrong.items() if is_so))
        self.schedule()

    def _is(self, part: str) -> bool:
        return part in self.sampler.split("+")

    @classmethod
    def of(cls, source: Any, model_config: Any = None, **called: str) -> SamplingSettings:
        """The settings that `source` holds as attributes. `called` maps a field to its other name there. A
        `block_length` of None becomes the block size of the model with this config, or 32."""
        names = {field.name: called.get(field.name, field.name) for field in fields(cls)}
        values = {own: getattr(source, name) for own, name in names.items() if hasattr(source, name)}
        if values["block_length"] is None:
            values["block_length"] = block_size(model_config) or BLOCK_LENGTH
        return cls(**values)

    @property
    def cache(self) -> str | None:
        """The cache in use, or None."""
        return (self.kv_cache or "dual") if self._is("cached") else None

    @property
    def drawn_from(self) -> Distribution:
        """The distribution that tokens are drawn from; at temperature 0, the model's own."""
        return Distribution(self.temperature, self.top_k, self.top_p) if self.temperature else OWN

    @property
    def recorded(self) -> Distribution:
        """The distribution whose log-probabilities a rollout records."""
        return self.drawn_from if self.record_as_sampled else OWN

    @property
    def rule(self) -> str | None:
        """The reveal rule in use, or None if the schedule alone says how many tokens a step reveals."""
        return (self.reveal or "threshold") if self._is("parallel") else None

    @property
    def level(self) -> float:
        """The level of the rule in use; 0 without one."""
        if self.rule is None:
            return 0.0
        return RULES[self.rule].level if self.reveal_level is None else self.reveal_level

    @property
    def draws(self) -> bool:
        """Whether sampling draws random numbers; without them, all samples of a prompt are equal."""
        return self.temperature > 0 or REMASKING[self.remasking].draws

    def schedule(self, filled: int | None = None) -> list[list[int]]:
        """Tokens revealed in each step of each block, unless a rule reveals more: one list per block. In a block-causal
        model, `filled` is the number of prompt tokens in the block in which the prompt ends."""
        lengths = self.gen_length, self.block_length, self.steps
        return reveal_schedule(*lengths) if filled is None else aligned_schedule(*lengths, filled)
