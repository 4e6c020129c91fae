"""From a method's name, or a user's file, to the settings it stands for; and which settings make no sense together."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from advantages import ADVANTAGES
from objectives import MEANS, OBJECTIVES, OVER_ALL_ROWS
from penalties import PENALTIES

from d1.methods import METHODS, Method
from d1.scoring import ESTIMATORS

# What a user's own file may define beside `METHOD`: rows of these tables.
TABLES: dict[str, dict[str, Any]] = {
    "ESTIMATORS": ESTIMATORS,
    "OBJECTIVES": OBJECTIVES,
    "PENALTIES": PENALTIES,
    "ADVANTAGES": ADVANTAGES,
}


def find_method(name: str) -> Method:
    """The row of a name in `METHODS`, or what a user's `.py` file defines; its rows of the tables are added.

    Raises:
        ValueError: no such method; the file has no `METHOD`, or takes a name that stands for something else.
        FileNotFoundError: no such file.
    """
    if name in METHODS:
        return METHODS[name]
    if not name.endswith(".py"):
        raise ValueError(f"--method must be one of {', '.join(METHODS)}, or a path to a .py file, got {name!r}")
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no method file {path}")
    module_name = f"d1_user_method_{path.stem}"
    if getattr(sys.modules.get(module_name), "__file__", None) != str(path):
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None  # always so for a path that ends with .py
        assert spec.loader is not None
        sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module_name])
    module = sys.modules[module_name]
    if not isinstance(getattr(module, "METHOD", None), dict):
        raise ValueError(f"method file {path} does not define METHOD, a dictionary of settings: METHOD = {{...}}")
    for table, rows in TABLES.items():
        own = getattr(module, table, {})
        taken = [row for row, value in own.items() if rows.get(row, value) is not value]
        if taken:
            raise ValueError(f"method file {path}: {table} has {', '.join(taken)} already; choose another name")
        rows.update(own)
    return Method(str(path), module.METHOD)


def check_combination(settings: Any) -> None:
    """Refuses settings of `DiffuGRPOConfig` that together mean nothing.

    Raises:
        ValueError: says why, and what would.
    """
    estimator = ESTIMATORS[settings.estimator]
    sequence = settings.importance_sampling_level == "sequence" and settings.objective == "trl"
    drawn = settings.estimator == "replay" and settings.num_views is not None
    faults = [
        (
            sequence and drawn,
            "a ratio of whole completions needs all of their tokens, and replay with num_views scores those of a few "
            "drawn steps: leave num_views unset, or take --importance_sampling_level token",
        ),
        (
            settings.objective == "trl" and drawn,
            "TRL's loss would raise each ratio to the power of a draw's weight, 1 / its chance: replay with num_views "
            "needs --objective clipped_views or reinforce",
        ),
        (
            settings.objective == "trl" and settings.estimator == "random_masks",
            "TRL's loss would raise each ratio to the power of a mask's weight: random_masks needs --objective "
            "clipped_views",
        ),
        (
            settings.beta != 0 and not estimator.linear,
            f"the estimator {settings.estimator} gives bounds that are no sum of log-probabilities, and a KL of bounds "
            "means nothing: set --beta 0",
        ),
        (
            not estimator.linear and settings.objective not in ("spg", "stable_drl"),
            f"the estimator {settings.estimator} gives means over hidden tokens, for the bounds of --objective spg or "
            "stable_drl",
        ),
        (
            estimator.linear and settings.objective in ("spg", "stable_drl"),
            f"the objective {settings.objective} makes its bounds of --estimator spg",
        ),
        (
            settings.objective == "bgpo" and (settings.estimator not in ("elbo", "espo") or settings.antithetic),
            "bgpo takes the ratio of bounds of single draws: it needs --estimator elbo or espo, not antithetic",
        ),
        (
            settings.objective != "trl" and settings.loss_type not in MEANS,
            f"loss_type {settings.loss_type} is a loss of TRL's own and needs --objective trl; the others take "
            f"{', '.join(MEANS)}",
        ),
        (
            settings.objective == "trl" and settings.loss_type == "sum",
            "loss_type sum is for objectives other than trl",
        ),
        (
            settings.objective != "trl" and settings.importance_sampling_level != "token",
            f"importance_sampling_level would be ignored by the objective {settings.objective}: leave it at token",
        ),
        (
            settings.use_bias_correction_kl and not (settings.objective == "trl" and settings.kl == "k3"),
            "use_bias_correction_kl belongs to TRL's own KL: it needs --objective trl --kl k3",
        ),
        (
            settings.advantage != "trl" and settings.scale_rewards != "none",
            f"the advantage {settings.advantage} is made of rewards less their group's mean: set --scale_rewards none",
        ),
        (
            estimator.replays and (settings.cfg_scale > 0 or "cached" in settings.sampler),
            f"{settings.estimator} scores tokens in the states the sampler was in, and with guidance or an approximate "
            "cache these are no states of the model: set --cfg_scale 0 and --sampler exact or parallel",
        ),
        (
            (estimator.replays or settings.estimator == "left_to_right") and settings.p_mask_prompt > 0,
            f"{settings.estimator} scores tokens given the whole prompt, as it was sampled from: set --p_mask_prompt 0",
        ),
        (
            bool(settings.segments and settings.segment_steps),
            "segments and segment_steps both say how steps are merged: keep one",
        ),
        (
            settings.right_share is not None
            and not (len(settings.right_share) == 2 and settings.right_share[0] <= settings.right_share[1]),
            f"right_share takes two shares, the smaller first, got {settings.right_share}",
        ),
        (
            settings.objective in OVER_ALL_ROWS
            and settings.gradient_accumulation_steps % int(settings.steps_per_generation or 1) != 0,
            f"{settings.objective} weighs a row against all rows of its rollout, which must meet the same weights of "
            "the model: gradient_accumulation_steps must be a multiple of steps_per_generation",
        ),
    ]
    for wrong, reason in faults:
        if wrong:
            raise ValueError(reason)
