"""The flags of every command that samples, and the settings they choose. Needs no torch to be imported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from d1.sampling.order import REMASKING
from d1.sampling.reveal import RULES
from d1.sampling.settings import BLOCK_LENGTH, CACHES, SAMPLERS, SamplingSettings

LEVELS = ", ".join(f"{rule} {level}" for rule, (_, level) in RULES.items())
FLAGS: dict[str, dict[str, Any]] = {  # name -> the options of argparse's `add_argument`
    "gen_length": {"type": int, "default": 128, "help": "tokens of a completion (default: %(default)s)"},
    "block_length": {
        "type": int,
        "help": f"tokens filled before moving right (default: the model's own blocks, or {BLOCK_LENGTH})",
    },
    "diffusion_steps": {"type": int, "help": "forward passes a completion (default: gen_length / 2)"},
    "temperature": {"type": float, "default": 0.0, "help": "0 is greedy, the default"},
    "cfg_scale": {"type": float, "default": 0.0, "help": "classifier-free guidance; 0 is off, the default"},
    "remasking": {
        "choices": REMASKING,
        "default": "low_confidence",
        "help": "which tokens are revealed first (default: %(default)s)",
    },
    "seed": {"type": int, "default": 0, "help": "of the random draws (default: %(default)s)"},
    "sampler": {
        "choices": SAMPLERS,
        "default": "exact",
        "help": "all but exact trade accuracy for speed (default: %(default)s)",
    },
    "kv_cache": {"choices": CACHES, "help": "what a cached sampler keeps (default: dual)"},
    "reveal": {"choices": RULES, "help": "a parallel sampler's rule (default: threshold)"},
    "reveal_level": {"type": float, "help": f"the rule's level (default: {LEVELS})"},
}
ALIASES = {"steps": "diffusion_steps"}  # second names of flags


def add_sampling_flags(group: Any, leave_out: Collection[str] = (), **changes: dict[str, Any]) -> None:
    """Adds `FLAGS` to a parser or a group of one.

    Args:
        changes: by a flag's name, options that replace or join those in the table.
    """
    for name in (name for name in FLAGS if name not in leave_out):
        names = [name, *(alias for alias, flag in ALIASES.items() if flag == name)]
        group.add_argument(*(f"--{one}" for one in names), **FLAGS[name] | changes.get(name, {}))


def sampling_settings(flags: Mapping[str, Any], model_config: Any = None) -> SamplingSettings:
    """The settings that parsed flags choose; steps and blocks that they leave open are filled in.

    Args:
        flags: those of `FLAGS`, but for the seed; others are ignored.
        model_config: of the model that is to sample, whose kind must go with the sampler. None leaves that unchecked,
            and `block_length` where it is None at d1's.

    Raises:
        ValueError: they make no sense, alone, beside each other or for the kind of model.
    """
    steps = max(flags["gen_length"] // 2, 1) if flags["diffusion_steps"] is None else flags["diffusion_steps"]
    settings = SamplingSettings.of(SimpleNamespace(**flags, steps=steps), model_config)
    if model_config is not None:
        from d1.sampling.blocks import check_sampler

        check_sampler(settings, model_config)
    return settings
