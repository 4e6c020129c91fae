"""Settings that are one name of a few, and those of autoregressive decoding, which must stay off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trl import GRPOConfig

from d1.rl.advantages import ADVANTAGES
from d1.rl.objectives import OBJECTIVES
from d1.rl.penalties import PENALTIES
from d1.scoring import ESTIMATORS
from d1.scoring.replay import DRAW_STEPS

# Settings of autoregressive decoding and the value that means "off". Any other value would silently do nothing here.
AUTOREGRESSIVE_ONLY = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "cache_implementation": None,
    "generation_kwargs": None,
    "use_vllm": False,
    "use_transformers_continuous_batching": False,
    "max_tool_calling_iterations": None,
    **{name: field.default for name, field in GRPOConfig.__dataclass_fields__.items() if name.startswith("vllm_")},
}

# Settings that are one name of a few: TRL 1.16 looks at its own only at the first loss. Tables are asked when settings
# are checked: rows count that were added until then.
CHOICES: dict[str, Iterable[str]] = {
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("none", "group", "batch"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "draw_steps": DRAW_STEPS,
    "estimator": ESTIMATORS,
    "objective": OBJECTIVES,
    "kl": PENALTIES,
    "advantage": ADVANTAGES,
}


def check_choices(settings: Any) -> None:
    """Raises ValueError for a setting that is none of its names, or that belongs to autoregressive decoding."""
    for name, off in AUTOREGRESSIVE_ONLY.items():
        if getattr(settings, name) != off:
            raise ValueError(
                f"{name}={getattr(settings, name)!r} belongs to autoregressive decoding and would be ignored here; "
                f"leave it at {off!r}. Rollouts are shaped by temperature, diffusion_steps, block_length, "
                "remasking and cfg_scale."
            )
    for name, choices in CHOICES.items():
        if getattr(settings, name) not in choices:
            raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {getattr(settings, name)!r}")
