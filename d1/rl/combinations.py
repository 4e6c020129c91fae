"""Refuse settings that contradict each other or that would do nothing, as the chosen rows of the tables say.

A setting that would do nothing is refused only if its value is neither the default nor the method's own, because then
somebody asked for it. So `--method espo --estimator one_step` is accepted, although ESPO's number of draws is not used,
and `--method espo --estimator one_step --num_views 4` is refused. `state_reward` costs forward passes and rewards, so
the method's own is refused, too, where no row reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trl import GRPOConfig

from d1.models.distribution import OWN
from d1.ranges import nearest
from d1.rl.advantages import ADVANTAGES
from d1.rl.choose_method import find_method
from d1.rl.objectives import OBJECTIVES
from d1.rl.penalties import PENALTIES
from d1.rl.rows import MEANS, Objective, Penalty
from d1.rl.scored import SCORED
from d1.scoring import ESTIMATORS
from d1.scoring.replay import DRAW_STEPS

# Settings of autoregressive decoding and the value that means "off". Any other value would silently do nothing here.
AUTOREGRESSIVE_ONLY = {
    "min_p": None,
    "repetition_penalty": 1.0,
    "cache_implementation": None,
    "generation_kwargs": None,
    "use_vllm": False,
    "use_transformers_continuous_batching": False,
    "max_tool_calling_iterations": None,
    **{name: field.default for name, field in GRPOConfig.__dataclass_fields__.items() if name.startswith("vllm_")},
}

# Settings with a list of choices: TRL 1.16 checks its own only at the first loss. Rows added later count, too.
CHOICES: dict[str, Iterable[str]] = {
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("none", "group", "batch"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "rollout_mode": ("trainer", "server"),
    "rollout_weights": ("disk", "broadcast"),
    "draw_steps": DRAW_STEPS,
    "estimator": ESTIMATORS,
    "objective": OBJECTIVES,
    "kl": PENALTIES,
    "advantage": ADVANTAGES,
    "scored_tokens": SCORED,
}

CONSTANT = ("constant", "constant_with_warmup")  # learning rates that do not depend on the length of the run


def names(table: dict[str, Any], **needed: Any) -> str:
    """The names of the rows that have these properties: "a, b or c"."""
    *most, last = [name for name, row in table.items() if all(getattr(row, key) == needed[key] for key in needed)]
    return f"{', '.join(most)} or {last}" if most else last


def about_edits(s: Any) -> Iterator[str]:
    """The reasons why the settings make no sense with a sampler that edits."""
    estimator, above = ESTIMATORS[s.estimator], s.sampling_settings().edits
    if above is None:
        return
    if above < 0.5:
        yield (
            f"edit_threshold {above:g}: below 0.5 more than one token can replace a revealed one, so the probability "
            "that it stayed is not known from one candidate: in RL set --edit_threshold to 0.5 or more"
        )
    if s.rollout_mode == "server":
        yield "edit_threshold: a rollout server does not send what edits replaced: leave rollout_mode server out"
    if estimator.replays and not estimator.replays_writes:
        able = names(ESTIMATORS, replays=True, replays_writes=True)
        yield f"{s.estimator} replays what was written last, and edit_threshold writes more than once: take {able}"
    if OBJECTIVES[s.objective].reads_steps:
        yield f"{s.objective} reads the one step that revealed a token, and edit_threshold has several: leave it out"
    if estimator.replays and s.sampling_weight_cap is not None:
        yield f"sampling_weight_cap: {s.estimator} scores in the sampler's states, so leave it out with edit_threshold"


def about_staleness(s: Any) -> Iterator[str]:
    """The reasons why rollouts cannot be sampled ahead of the updates."""
    if not s.rollout_staleness:
        return
    if s.rollout_mode != "server":
        yield "--rollout_staleness: only servers sample while the trainer learns: set --rollout_mode server"
    if s.old_as_sampled or s.sampling_weight_cap is not None:
        return
    objective = OBJECTIVES[s.objective]
    if ESTIMATORS[s.estimator].as_sampled(s.view_settings()):
        why = f"{s.objective} reads no old log-probs"
    else:
        why = f"{s.estimator} scores tokens in other states than those they were sampled in"
    if "sampling_weight_cap" in (objective.settings or ("sampling_weight_cap",)):
        what = "set --sampling_weight_cap (3, say), which weighs tokens by trained / sampling probability"
    else:
        exact = ", ".join(name for name, row in ESTIMATORS.items() if row.as_sampled(s.view_settings()))
        able = ", ".join(name for name, row in OBJECTIVES.items() if "sampling_weight_cap" in (row.settings or ()))
        what = f"and {s.objective} cannot weigh tokens: take an objective of {able}" + (
            f", or --estimator {exact}" if objective.reads_old else ""
        )
    yield f"--rollout_staleness {s.rollout_staleness} needs a correction: {why}; {what}"


def contradictions(s: Any) -> Iterator[str]:
    """The reasons why the settings contradict each other."""
    if (s.rollout_mode == "server") != bool(s.rollout_server_base_url):
        yield "--rollout_mode server needs --rollout_server_base_url URL [URL ...], and no other mode has any"
    if s.rollout_weights != "disk" and s.rollout_mode != "server":
        yield f"--rollout_weights {s.rollout_weights} says how servers get weights: set --rollout_mode server"
    urls = s.rollout_server_base_url or ()
    if len({*urls}) < len(urls) or not all(url.startswith(("http://", "https://")) for url in urls):
        yield f"--rollout_server_base_url takes addresses http://HOST:PORT, each once: {' '.join(urls)}"
    if s.rollout_mode == "server" and s.rollout_server_timeout >= s.ddp_timeout:
        yield (
            f"--rollout_server_timeout {s.rollout_server_timeout:g}: processes wait for each other for --ddp_timeout "
            f"{s.ddp_timeout} seconds, so it must be smaller"
        )
    yield from about_staleness(s)
    if s.score_as_sampled and not s.temperature:
        yield "score_as_sampled: at temperature 0 each token has probability 1; set another --temperature"
    estimator, objective, penalty = ESTIMATORS[s.estimator], OBJECTIVES[s.objective], PENALTIES[s.kl]
    views, adds_kl = s.view_settings(), bool(s.beta) and not s.has_trls_kl
    if estimator.partial(views) and objective.reads_old and not objective.per_view:
        if s.importance_sampling_level == "sequence":
            yield (
                f"a ratio of whole completions needs all of their tokens, but {s.estimator} draws some of them: use "
                f"--objective {names(OBJECTIVES, per_view=True, linear=True)}, or leave replay's num_views unset"
            )
        yield (
            f"{s.objective} would raise each ratio to the power of a draw's weight, the inverse of its probability: "
            f"{s.estimator} needs --objective {names(OBJECTIVES, per_view=True, linear=True)}, or one without old "
            "log-probs, such as reinforce"
        )
    if objective.linear and not estimator.linear:
        yield (
            f"the estimator {s.estimator} gives means over hidden tokens, not log-probabilities: it needs --objective "
            f"{names(OBJECTIVES, linear=False)}, and {s.objective} needs another estimator"
        )
    if estimator.linear and not objective.linear:
        yield (
            f"the objective {s.objective} computes its bounds from means over hidden tokens: it needs --estimator "
            f"{names(ESTIMATORS, linear=False)}"
        )
    if objective.per_draw and not estimator.views_per_draw(views):
        able = ", ".join(name for name, row in ESTIMATORS.items() if row.views_per_draw(views))
        yield f"{s.objective} takes each draw as an estimate of the whole completion: it needs --estimator {able}"
    if objective.over_group and s.gradient_accumulation_steps % s.steps_per_generation:
        yield (
            f"{s.objective} weighs a row against the others of its prompt, all under the same weights of the model: "
            f"gradient_accumulation_steps ({s.gradient_accumulation_steps}) must be a multiple of "
            f"steps_per_generation ({s.steps_per_generation})"
        )
    averaged: list[tuple[str, Objective | Penalty]] = [(s.objective, objective)]
    for name, row in averaged + [(s.kl, penalty)] * adds_kl:
        over_views = row.by_view and ("loss_type" not in (row.settings or ()) or s.loss_type == "views")
        if s.split_views and not over_views:
            yield (
                f"split_views gives each update some of a row's views, but {name} with loss_type {s.loss_type} needs "
                f"all of them: use --objective clipped_views --loss_type views, clipped_steps or rldf, and "
                f"--kl {names(PENALTIES, by_view=True)}"
            )
    reads = objective.settings is None or "state_reward" in objective.settings
    if s.state_reward and not reads and not asked_for(s, "state_reward"):
        able = ", ".join(name for name, row in OBJECTIVES.items() if "state_reward" in (row.settings or ()))
        yield (
            f"state_reward {s.state_reward:g} of method {s.method} finishes and rewards every state, and the objective "
            f"{s.objective} reads none of it: set --state_reward 0 or --objective {able}"
        )
    if s.state_reward and s.num_iterations > 1 and not s.split_views:
        yield "state_reward needs one draw of views for all updates: set --split_views true or --num_iterations 1"
    if SCORED[s.scored_tokens].behind_the_end and s.eos_stop:
        yield f"scored_tokens {s.scored_tokens} counts tokens after an EOS, which eos_stop skips: set --eos_stop false"
    if s.sampling_weight_cap is not None and s.loss_type == "vespo":
        yield "sampling_weight_cap weighs single tokens and vespo weighs completions: use another loss_type"
    if s.loss_type not in objective.loss_types:
        known = ", ".join(objective.loss_types)
        yield f"the objective {s.objective} has no loss_type {s.loss_type}: use one of {known}"
    if s.beta and not estimator.linear:
        yield f"the estimator {s.estimator} gives bounds, and no KL can be computed from bounds: set --beta 0"
    if adds_kl and s.loss_type not in MEANS and "loss_type" in (penalty.settings or ()):
        yield f"the penalty {s.kl} is averaged by loss_type, and {s.loss_type} is not one of {', '.join(MEANS)}"
    if s.use_bias_correction_kl and not s.has_trls_kl:
        yield "use_bias_correction_kl belongs to TRL's own KL: it needs --objective trl --kl k3"
    if s.max_compute_tokens is not None:
        kind = str(s.lr_scheduler_type.value)
        if kind not in (*CONSTANT, "linear"):
            yield (
                f"lr_scheduler_type {kind} changes the learning rate over max_steps, but max_compute_tokens ends the "
                "run: use constant, or linear, which falls to 0 with the budget"
            )
        if kind == "linear" and s.warmup_steps:
            yield "warmup_steps: a linear learning rate with max_compute_tokens has no warm-up; set --warmup_steps 0"
    if s.router_aux_loss_coef:
        yield f"router_aux_loss_coef {s.router_aux_loss_coef} needs the router's logits, which are not computed: set 0"
    if ADVANTAGES[s.advantage].centred:
        made = f"the advantage {s.advantage} is computed from rewards minus their group's mean"
        if s.scale_rewards != "none":
            yield f"{made}: set --scale_rewards none"
        if s.multi_objective_aggregation != "sum_then_normalize":
            yield f"{made}, which normalize_then_sum does not give: use sum_then_normalize"
    if s.right_share is not None and (len(s.right_share) != 2 or s.right_share[0] > s.right_share[1]):
        yield f"right_share needs two shares, the smaller first, got {s.right_share}"
    if estimator.replays and s.cfg_scale:
        yield f"{s.estimator} scores tokens in the sampler's states but without guidance: set --cfg_scale 0"
    yield from about_edits(s)
    if estimator.clean_prompt and s.p_mask_prompt:
        yield f"{s.estimator} scores tokens given the whole prompt, as the sampler saw it: set --p_mask_prompt 0"


def unread(s: Any) -> Iterator[tuple[str, str]]:
    """The settings that no chosen row reads, each with the reason."""
    if not s.beta:
        yield "kl", "it says what beta weighs, and beta is 0"
    if s.num_views is None and "draw_steps" in (ESTIMATORS[s.estimator].settings or ()):
        for name in ("draw_steps", "mean_step"):
            yield name, f"{s.estimator} scores every step unless num_views says how many to draw"
    elif s.draw_steps == "top":
        yield "mean_step", "the steps of highest entropy are not drawn, so there is no probability to divide by"
    if s.sampling_settings().drawn_from == OWN:
        yield "score_as_sampled", "at temperature 1, without top_k and top_p, that is the model's own distribution"
    if s.max_compute_tokens is None:
        yield "save_at_compute", "its shares are of max_compute_tokens, which is not set"
    if s.num_iterations == 1:
        yield "split_views", "there is one update on each rollout, num_iterations 1"
    penalties = [PENALTIES[s.kl]] if s.beta and not s.has_trls_kl else []
    tables: list[tuple[str, dict[str, Any], list[Any]]] = [
        ("estimator", ESTIMATORS, [ESTIMATORS[s.estimator]]),
        ("objective", OBJECTIVES, [OBJECTIVES[s.objective], *penalties]),
    ]
    for kind, table, used in tables:
        read = [row.settings for row in used]
        if None in read:  # a user's row that does not say
            continue
        for name in dict.fromkeys(name for row in table.values() for name in row.settings or ()):
            if not any(name in settings for settings in read):
                readers = ", ".join(other for other, row in table.items() if name in (row.settings or ()))
                yield name, f"the {kind} {getattr(s, kind)} does not read it; {readers} would"


def asked_for(settings: Any, name: str) -> bool:
    """Whether a setting has neither its default nor the value of the run's method."""
    method = find_method(settings.method)
    default = settings.__dataclass_fields__[name].default
    return getattr(settings, name) not in (default, method.values.get(name, default))


def check_combination(settings: Any) -> None:
    """Raises ValueError if settings of `DiffuGRPOConfig` contradict each other, or if one of them does nothing."""
    for reason in contradictions(settings):
        raise ValueError(reason)
    for name, reason in unread(settings):
        if asked_for(settings, name):
            raise ValueError(f"--{name} {getattr(settings, name)} would do nothing: {reason}")


def check_choices(settings: Any) -> None:
    """Raises ValueError for a setting that is not one of its choices, or that belongs to autoregressive decoding."""
    for name, off in AUTOREGRESSIVE_ONLY.items():
        if getattr(settings, name) != off:
            raise ValueError(
                f"{name}={getattr(settings, name)!r} belongs to autoregressive decoding and would be ignored here; "
                f"leave it at {off!r}. Rollouts are shaped by temperature, diffusion_steps, block_length, "
                "remasking and cfg_scale."
            )
    for name, choices in CHOICES.items():
        if getattr(settings, name) not in choices:
            value = getattr(settings, name)
            raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {value!r}{nearest(value, choices)}")
