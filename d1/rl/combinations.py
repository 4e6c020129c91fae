"""Which settings make no sense together, and which would do nothing: two tables, and the check that reads them.

A setting that would do nothing is refused where its value is neither the default nor the method's own, for then
somebody asked for it: `--method espo --estimator one_step` passes with the draws that ESPO's row left behind, and
`--method espo --estimator one_step --num_views 4` does not. What a user's own estimator or objective reads is not
known here, so nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d1.rl.choose_method import find_method
from d1.rl.objectives import MEANS, OVER_ALL_ROWS
from d1.scoring import ESTIMATORS

BOUNDS = ("spg", "stable_drl")  # objectives that make their bounds of means over hidden tokens
OF_LOGPS = ("trl", "reinforce", "clipped_views", "bgpo")  # objectives of sums of log-probabilities
OWN = (*OF_LOGPS[1:], *BOUNDS)  # those that are not TRL's
FIXED = ("one_step", "coupled", "random_masks", "left_to_right")  # estimators whose views have a fixed number
CONSTANT = ("constant", "constant_with_warmup")  # rates that do not ask how long a run is


def replays(settings: Any) -> bool:
    return ESTIMATORS[settings.estimator].replays


def draws_steps(settings: Any) -> bool:
    return settings.estimator == "replay" and settings.num_views is not None


def shares_are_off(shares: Any) -> bool:
    return shares is not None and not (len(shares) == 2 and shares[0] <= shares[1])


# What is wrong, and the reason, in which {name} stands for a setting's value.
CONTRADICTIONS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    # Estimator and objective
    (
        lambda s: s.objective == "trl" and s.importance_sampling_level == "sequence" and draws_steps(s),
        "a ratio of whole completions needs all of their tokens, and replay with num_views {num_views} scores those of "
        "a few drawn steps: leave num_views unset (--method {method} may set it), or take --objective clipped_views",
    ),
    (
        lambda s: s.objective == "trl" and draws_steps(s),
        "TRL's loss would raise each ratio to the power of a draw's weight, 1 / its chance: replay with num_views "
        "{num_views} needs --objective clipped_views or reinforce",
    ),
    (
        lambda s: s.objective == "trl" and s.estimator == "random_masks",
        "TRL's loss would raise each ratio to the power of a mask's weight: random_masks needs --objective "
        "clipped_views",
    ),
    (
        lambda s: not ESTIMATORS[s.estimator].linear and s.objective in OF_LOGPS,
        "the estimator {estimator} gives means over hidden tokens, no log-probabilities: it needs --objective spg or "
        "stable_drl, and {objective} another estimator",
    ),
    (
        lambda s: ESTIMATORS[s.estimator].linear and s.objective in BOUNDS,
        "the objective {objective} makes its bounds of means over hidden tokens: it needs --estimator spg",
    ),
    (
        lambda s: s.objective == "bgpo" and (s.estimator in (*FIXED, "replay") or s.antithetic),
        "bgpo takes the ratio of the bounds of single draws: it needs --estimator elbo or espo, and --antithetic false",
    ),
    (
        lambda s: s.objective in OVER_ALL_ROWS and s.gradient_accumulation_steps % s.steps_per_generation != 0,
        "{objective} weighs a row against all rows of its rollout, which must meet the same weights of the model: "
        "gradient_accumulation_steps ({gradient_accumulation_steps}) must be a multiple of steps_per_generation "
        "({steps_per_generation})",
    ),
    (
        lambda s: s.sampling_weight_cap is not None and s.objective in ("bgpo", *BOUNDS),
        "sampling_weight_cap weighs the tokens of a sum over tokens, and {objective} bounds whole completions: it "
        "needs --objective trl, clipped_views or reinforce",
    ),
    (
        lambda s: s.sampling_weight_cap is not None and s.objective == "trl" and s.loss_type == "vespo",
        "sampling_weight_cap would weigh each token of vespo, whose own weight is of whole completions: take another "
        "loss_type",
    ),
    # How the loss is averaged
    (
        lambda s: s.objective != "trl" and s.loss_type not in MEANS,
        "loss_type {loss_type} is a loss of TRL's own and needs --objective trl; the others take " + ", ".join(MEANS),
    ),
    (
        lambda s: s.objective == "trl" and s.loss_type == "sum",
        "loss_type sum is for objectives other than trl: with it take grpo, bnpo, dr_grpo or dapo",
    ),
    # The KL penalty
    (
        lambda s: s.beta != 0 and not ESTIMATORS[s.estimator].linear,
        "the estimator {estimator} gives bounds that are no sum of log-probabilities, and a KL of bounds means "
        "nothing: set --beta 0",
    ),
    (
        lambda s: s.beta != 0 and s.kl == "k3_to_old" and s.loss_type not in MEANS,
        "the penalty k3_to_old is averaged as loss_type says, and {loss_type} is none of " + ", ".join(MEANS),
    ),
    (
        lambda s: s.use_bias_correction_kl and not (s.objective == "trl" and s.kl == "k3"),
        "use_bias_correction_kl belongs to TRL's own KL: it needs --objective trl --kl k3",
    ),
    # The length of a run
    (
        lambda s: s.max_compute_tokens is not None and str(s.lr_scheduler_type.value) not in CONSTANT,
        "a rate that falls over max_steps would fall too little by the step at which max_compute_tokens ends the run: "
        "set --lr_scheduler_type constant or constant_with_warmup",
    ),
    # Mixtures of experts
    (
        lambda s: s.router_aux_loss_coef != 0,
        "router_aux_loss_coef {router_aux_loss_coef} needs the router's logits, and completions are scored without "
        "them: leave it at 0",
    ),
    # Advantages
    (
        lambda s: s.advantage != "trl" and s.scale_rewards != "none",
        "the advantage {advantage} is made of rewards less their group's mean: set --scale_rewards none",
    ),
    (
        lambda s: s.advantage != "trl" and s.multi_objective_aggregation != "sum_then_normalize",
        "the advantage {advantage} is made of rewards less their group's mean, which normalize_then_sum does not give: "
        "set --multi_objective_aggregation sum_then_normalize",
    ),
    (
        lambda s: shares_are_off(s.right_share),
        "right_share takes two shares, the smaller first, got {right_share}",
    ),
    # The states of replay
    (
        lambda s: replays(s) and s.cfg_scale > 0,
        "{estimator} scores tokens in the states the sampler was in, and with guidance these are no states of the "
        "model: set --cfg_scale 0",
    ),
    (
        lambda s: (replays(s) or s.estimator == "left_to_right") and s.p_mask_prompt > 0,
        "{estimator} scores tokens given the whole prompt, as it was sampled from: set --p_mask_prompt 0",
    ),
    (
        lambda s: bool(s.segments and s.segment_steps),
        "segments and segment_steps both say how steps are merged: keep one",
    ),
)


# Names of settings, when they do nothing, and why.
IGNORED: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("num_views",),
        lambda s: s.estimator in FIXED,
        "the number of views of {estimator} is fixed",
    ),
    (
        ("antithetic", "stratified"),
        lambda s: s.estimator in (*FIXED, "replay", "spg"),
        "it is for the draws of elbo and espo, and the estimator is {estimator}",
    ),
    (
        ("segments", "segment_steps", "draw_steps"),
        lambda s: s.estimator in (*FIXED, "elbo", "espo", "spg"),
        "it is for the steps of replay, and the estimator is {estimator}",
    ),
    (
        ("draw_steps",),
        lambda s: s.estimator == "replay" and s.num_views is None,
        "replay scores every step unless num_views says how many to draw",
    ),
    (
        ("eubo_beta", "eubo_share"),
        lambda s: s.objective in OF_LOGPS,
        "it is for the bounds of spg and stable_drl, and the objective is {objective}",
    ),
    (
        ("ratio_cap",),
        lambda s: s.objective in (*OF_LOGPS, "spg"),
        "it is for the weights of stable_drl, and the objective is {objective}",
    ),
    (
        ("epsilon", "epsilon_high"),
        lambda s: s.objective in ("reinforce", *BOUNDS),
        "the objective {objective} clips nothing",
    ),
    (
        ("loss_type",),
        lambda s: s.objective in ("bgpo", "stable_drl"),
        "the objective {objective} has an average of its own",
    ),
    (
        (
            "importance_sampling_level",
            "delta",
            "top_entropy_quantile",
            "entropy_coef",
            "use_adaptive_entropy",
            "off_policy_mask_threshold",
        ),
        lambda s: s.objective in OWN,
        "it belongs to TRL's loss, and the objective is {objective}",
    ),
    (("kl",), lambda s: s.beta == 0, "it says what beta weighs, and beta is 0"),
)


def asked_for(settings: Any, name: str) -> bool:
    """Whether a setting is neither at its default nor as the run's method has it."""
    method = find_method(settings.method)
    default = settings.__dataclass_fields__[name].default
    return getattr(settings, name) not in (default, method.values.get(name, default))


def check_combination(settings: Any) -> None:
    """Refuses settings of `DiffuGRPOConfig` that together mean nothing, or of which one would do nothing.

    Raises:
        ValueError: says why, and what would.
    """
    for wrong, reason in CONTRADICTIONS:
        if wrong(settings):
            raise ValueError(reason.format_map(vars(settings)))
    for names, ignored, reason in IGNORED:
        for name in names:
            if ignored(settings) and asked_for(settings, name):
                because = reason.format_map(vars(settings))
                raise ValueError(f"--{name} {getattr(settings, name)} would do nothing: {because}")
