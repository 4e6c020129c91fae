"""The flags of every command that loads a model and samples, and the settings they choose. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from d1.ranges import AMOUNT, BELOW_ONE, COUNT, SEED
from d1.sampling.caches import CACHES
from d1.sampling.reveal import REMASKING, RULES
from d1.sampling.settings import (
    BLOCK_LENGTH,
    EDITING,
    POST_STEPS,
    POST_STEPS_RANGE,
    SAMPLERS,
    SamplingSettings,
)

DTYPES = ("float32", "bfloat16", "float16")
MODEL_FLAGS: dict[str, dict[str, Any]] = {  # name -> the arguments of argparse's `add_argument`
    "model_path": {"required": True, "help": "folder or hub name of a model, or folder of an adapter"},
    "checkpoint_path": {"help": "LoRA adapter to put on the model"},
    "dtype": {"choices": DTYPES, "help": "data type of the weights (default: bfloat16 on a GPU, float32 on a CPU)"},
    "attn_implementation": {"help": "sdpa, eager or flash_attention_2"},
    "plain_chat_template": {"action": "store_true", "help": "use a plain template if the tokenizer has none"},
}
LEVELS = ", ".join(f"{name} {rule.level}" for name, rule in RULES.items())
FLAGS: dict[str, dict[str, Any]] = {  # flags of sampling; name -> the arguments of `add_argument`
    "gen_length": {"type": COUNT, "default": 128, "help": "tokens per completion (default: %(default)s)"},
    "block_length": {
        "type": COUNT,
        "help": f"tokens per block; blocks are filled left to right (default: the model's own, or {BLOCK_LENGTH})",
    },
    "diffusion_steps": {"type": COUNT, "help": "forward passes per completion (default: gen_length / 2)"},
    "temperature": {"type": AMOUNT, "default": 0.0, "help": "sampling temperature; 0, the default, is greedy"},
    "cfg_scale": {"type": AMOUNT, "default": 0.0, "help": "classifier-free guidance; 0, the default, is off"},
    "remasking": {
        "choices": REMASKING,
        "default": "low_confidence",
        "help": "which tokens are revealed first (default: %(default)s)",
    },
    "seed": {"type": SEED, "default": 0, "help": "seed of the random draws (default: %(default)s)"},
    "sampler": {
        "choices": SAMPLERS,
        "default": "exact",
        "help": "all but exact trade accuracy for speed (default: %(default)s)",
    },
    "kv_cache": {"choices": CACHES, "help": "cache of a cached sampler (default: dual)"},
    "reveal": {"choices": RULES, "help": "reveal rule of a parallel sampler (default: threshold)"},
    "reveal_level": {"type": AMOUNT, "help": f"level of the rule (default: {LEVELS})"},
    "edit_threshold": {
        "type": BELOW_ONE,
        "help": "with a parallel sampler, replace a revealed token of the block where another is predicted with more "
        "than this probability; 0: with any (default: revealed tokens stay)",
    },
    "max_post_steps": {
        "type": POST_STEPS_RANGE,
        "help": f"with editing, passes per block after its last mask, at most (default: {POST_STEPS})",
    },
    "editing": {"choices": EDITING, "help": "LLaDA2.1's levels of reveal and edit_threshold (default: no editing)"},
}
ALIASES = {"model_name": "model_path", "steps": "diffusion_steps"}  # second names of flags


def add_flags(
    table: Mapping[str, dict[str, Any]], group: Any, leave_out: Collection[str] = (), **changes: dict[str, Any]
) -> None:
    """Add the flags of a table to a parser or a group; `changes` override arguments of the named flags."""
    for name in (name for name in table if name not in leave_out):
        names = [name, *(alias for alias, flag in ALIASES.items() if flag == name)]
        group.add_argument(*(f"--{one}" for one in names), **table[name] | changes.get(name, {}))


add_model_flags = partial(add_flags, MODEL_FLAGS)
add_sampling_flags = partial(add_flags, FLAGS)


def sampling_settings(flags: Mapping[str, Any], model_config: Any = None) -> SamplingSettings:
    """The settings that parsed flags choose, with defaults for steps and block length if they are not given.

    Raises:
        ValueError: a flag is wrong, contradicts another or, with a `model_config`, does not suit that kind of model.
    """
    steps = max(flags["gen_length"] // 2, 1) if flags["diffusion_steps"] is None else flags["diffusion_steps"]
    settings = SamplingSettings.of(SimpleNamespace(**flags, steps=steps), model_config)
    if model_config is not None:
        from d1.sampling.blocks import check_sampler

        check_sampler(settings, model_config)
    return settings
