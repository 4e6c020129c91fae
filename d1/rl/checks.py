"""The checks of RL's settings, nearly all of them before a model is loaded.

The sections: one trial call of each chosen entry of the tables; settings that are no choice, contradict each other or
do nothing; what a resume may change; and what the model, the prompts and the trainer do not allow. Each message is next
to its condition.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, ModelConfig

from d1.masking import keyed_generator
from d1.models.attention import has_causal_context
from d1.models.distribution import MODEL_DISTRIBUTION
from d1.models.kinds import block_size, check_room, has_masks, vocabulary
from d1.ranges import nearest
from d1.rl.batch import LOSS_MASKS
from d1.rl.hints import HINTS, TRACE
from d1.rl.losses import (
    ADVANTAGES,
    MEANS,
    OBJECTIVES,
    PENALTIES,
    TRLS_PER_ROW,
    TRLS_SETTINGS,
    Advantage,
    AdvantageInputs,
    LossInputs,
    Objective,
    Penalty,
)
from d1.rl.tables import PAPERS, find_method, may_combine, shared_parts
from d1.runs.record import OnResume, identity
from d1.runs.turns import TurnSettings
from d1.sampling.settings import COMPILE, OUTPUTS, SamplingSettings, check_start, refuse_scdd
from d1.scoring import ESTIMATORS, Randomness, SampledRows, Views
from d1.scoring.entry import describe_function
from d1.scoring.replay import DRAW_STEPS

logger = logging.getLogger(__name__)
Settings = Any  # a `DiffuGRPOConfig`, whose module imports this one

# --- A trial of the chosen entries ------------------------------------------------------------------------------------
#
# Each function is called on three completions of random numbers before any model is loaded. So a mistake in a user's
# function is one line at the start, not a traceback after the first rollout. What this trial cannot show is checked
# whenever an entry is called (`d1/rl/losses.py`, `d1/scoring/estimators.py`).

TRIAL_PROMPT, TRIAL_CANVAS = 3, 8  # tokens
LENGTHS = torch.tensor([8, 3, 0])  # scored tokens per row; the last row is not part of the loss
TRIED = torch.arange(TRIAL_CANVAS) < LENGTHS.unsqueeze(1)


@contextmanager
def explain_errors(entry: str, function: object) -> Iterator[None]:
    """Turns an error of an entry's function, or the entry's complaint about what it returned, into one line."""
    try:
        yield
    except Exception as error:
        message = str(error).partition("\n")[0]
        function_name = describe_function(function)
        if not isinstance(error, ValueError):
            # The last line of the traceback in the function's own file
            line: int | str | None = "?"
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename in function_name:
                    line = frame.lineno
            message = f"{type(error).__name__} in line {line}: {message}"
        if function_name not in message:
            message = f"{function_name}: {message}"
        raise ValueError(f"{entry}: {message}") from error


def try_entries(settings: Settings) -> None:
    """Calls the estimator, the objective, the penalty, the advantage and the hints of a `DiffuGRPOConfig` once. Raises
    ValueError, which says which of them returned what, and what was expected."""
    estimator = ESTIMATORS[settings.estimator]
    objective = OBJECTIVES[settings.objective]
    penalty = PENALTIES[settings.kl]
    advantage = ADVANTAGES[settings.advantage]
    hint = HINTS[settings.hints]

    # Rows on a small canvas of two blocks
    rows = noised_rows() if estimator.uniform_noise else left_to_right_rows()
    block_length = TRIAL_CANVAS // 2
    view_settings = settings.view_settings()
    sampling = replace(view_settings.sampling, gen_length=TRIAL_CANVAS, steps=TRIAL_CANVAS, block_length=block_length)
    view_settings = replace(
        view_settings, gen_length=TRIAL_CANVAS, steps=TRIAL_CANVAS, block_length=block_length, sampling=sampling
    )
    loss_settings = copy(settings)
    loss_settings.block_length = block_length  # by default that of the model, which is not known here

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        with explain_errors(f"ESTIMATORS[{settings.estimator!r}]", estimator.draw):
            random = Randomness([keyed_generator(0, row) for row in range(3)], keyed_generator(0), 0, 3)
            views = estimator(rows, random, view_settings)
            max_views = estimator.views(view_settings)
            count = views.noise.shape[1]
            if count > max_views:
                raise ValueError(
                    f"gave {count} views, but its entry says at most {max_views}: set Estimator(..., views=)"
                )

        if objective.loss is not None:
            with explain_errors(f"OBJECTIVES[{settings.objective!r}]", objective.loss):
                inputs = random_inputs(views, objective.reads_old, settings.loss_reads_reference)
                inputs = replace(inputs, views_per_draw=estimator.views_per_draw(view_settings))
                if objective.over_group:
                    inputs = replace(inputs, log_ratios=torch.zeros(len(LENGTHS), settings.num_generations))
                if objective.reads_given:
                    given = (torch.arange(TRIAL_CANVAS) < 2).expand_as(TRIED)
                    inputs = replace(inputs, given=given, old_entropies=torch.ones(TRIED.shape))
                loss, _ = objective(inputs, loss_settings)
                if not loss.isfinite():
                    raise ValueError(f"the loss is {loss.item()}; `views_per_draw` is 0 if all views are one draw")
                loss.backward()

        if adds_kl(settings):
            with explain_errors(f"PENALTIES[{settings.kl!r}]", penalty.value):
                inputs = random_inputs(views, penalty.to == "old", penalty.to == "reference")
                penalty(inputs, loss_settings).backward()

        if hint.draw is not None:
            with explain_errors(f"HINTS[{settings.hints!r}]", hint.draw):
                hint(range(2 * TRIAL_CANVAS), TRIAL_CANVAS, keyed_generator(3))

        if advantage.of is not None:
            with explain_errors(f"ADVANTAGES[{settings.advantage!r}]", advantage.of):
                advantage(random_groups(advantage, settings.num_generations), settings)


def left_to_right_rows() -> SampledRows:
    """Three completions that a sampler filled from left to right; the first prompt is padded."""
    positions = torch.arange(TRIAL_CANVAS).repeat(len(LENGTHS), 1)
    visible = torch.arange(TRIAL_PROMPT) >= torch.tensor([1, 0, 0]).unsqueeze(1)
    return SampledRows(
        prompt_ids=torch.ones_like(visible, dtype=torch.long),
        attention_mask=visible.long(),
        maskable=visible,
        canvas_ids=positions,
        scored=TRIED,
        reveal_steps=positions,
        logps=-torch.ones(positions.shape),
        entropies=torch.ones(positions.shape),
    )


def noised_rows() -> SampledRows:
    """The same completions of a sampler with uniform noise, whose passes accept the next token of each block."""
    block_length = TRIAL_CANVAS // 2
    positions = torch.arange(TRIAL_CANVAS).unsqueeze(1)
    steps = torch.where(positions % block_length == torch.arange(block_length), positions, -2)
    steps = torch.cat([torch.full_like(positions, -2), steps], dim=1)
    write_steps = steps.repeat(len(LENGTHS), 1, 1)  # (rows, canvas, writes)
    return replace(
        left_to_right_rows(),
        write_ids=torch.ones_like(write_steps),
        write_steps=write_steps,
        write_entropies=torch.ones(write_steps.shape),
    )


def random_inputs(views: Views, old: bool, reference: bool) -> LossInputs:
    """Random inputs of a loss under these views, with or without old and reference log-probabilities."""
    generator = keyed_generator(1)

    def random_logps() -> Tensor:
        return -torch.rand(views.weights.shape, generator=generator) * (views.weights != 0)

    return LossInputs(
        view_logps=random_logps().requires_grad_() * 1.0,  # not a leaf, like a model's output
        view_old=random_logps() if old else None,
        view_reference=random_logps() if reference else None,
        weights=views.weights,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        mask=TRIED.long(),
        tokens=LENGTHS.sum(),
        reveal_steps=torch.arange(TRIAL_CANVAS).repeat(len(LENGTHS), 1),
        is_right=torch.tensor([True, False, True]),
    )


def random_groups(advantage: Advantage, group: int) -> AdvantageInputs:
    """Three groups of `group` completions, with random bounds as far as the advantage reads them."""
    generator = keyed_generator(2)
    advantages = torch.linspace(-1, 1, 3 * group).view(3, -1)
    inputs = AdvantageInputs(advantages)
    if advantage.reads:
        inputs = replace(inputs, lengths=torch.full_like(advantages, TRIAL_CANVAS))
    for model in advantage.reads:
        bounds = -torch.rand(advantages.shape, generator=generator)
        if model == "old":
            inputs = replace(inputs, old_bounds=bounds)
        else:
            inputs = replace(inputs, reference_bounds=bounds)
    return inputs


# --- Settings that nothing reads, are no choice or contradict each other ----------------------------------------------

# Settings of TRL that nothing here reads, with the value that means "off": any other would silently do nothing.
UNSUPPORTED: dict[str, Any] = {
    "min_p": None,
    "repetition_penalty": 1.0,
    "cache_implementation": None,
    "generation_kwargs": None,
    "generation_batch_size": None,  # ambiguous: completions of a rollout, or that a device samples at once
    "use_vllm": False,
    "use_transformers_continuous_batching": False,
    "max_tool_calling_iterations": None,
    "model_init_kwargs": None,
    "cast_lm_head_to_fp32": False,
    "trust_remote_code": False,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "data_seed": None,
    "label_smoothing_factor": 0.0,
    "train_sampling_strategy": "random",
    "length_column_name": "length",
}
for field_name, field in GRPOConfig.__dataclass_fields__.items():
    if field_name.startswith(("vllm_", "transformers_continuous_batching_")):
        UNSUPPORTED[field_name] = field.default
UNSUPPORTED_IN_MODEL = {  # the same, of `ModelConfig`
    "model_name_or_path": None,  # it is --model_path here
    "model_revision": "main",
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": None,
}

METRICS_ONLY = "entropies are computed for metrics, without a gradient"
# What to set instead of one of these
INSTEAD = {
    "generation_batch_size": "rollout_batch_size says how many completions a device samples at once, as in d1; "
    "steps_per_generation says how many batches make a rollout, as in TRL",
    "min_p": "top_k and top_p cut off unlikely tokens",
    "use_vllm": "rollout_mode server samples on servers of `d1 serve` or SGLang",
    "vllm_server_base_url": "rollout_mode server and rollout_server_base_url name servers of `d1 serve` or SGLang",
    "max_tool_calling_iterations": "max_turns limits the canvases of an episode",
    "model_init_kwargs": "dtype, attn_implementation and load_in_4bit are flags of their own",
    "trust_remote_code": "all formats run on classes of Transformers, without code from the hub",
    "model_name_or_path": "model_path names the model",
    "model_revision": "model_path can be a folder with that revision",
    "load_in_8bit": "load_in_4bit loads NF4",
    "bnb_4bit_quant_type": "load_in_4bit loads NF4",
    "bnb_4bit_quant_storage": "load_in_4bit loads NF4",
    "cast_lm_head_to_fp32": "the head has the dtype of the model",
    "entropy_coef": METRICS_ONLY,
    "use_adaptive_entropy": METRICS_ONLY,
    "entropy_coef_min": METRICS_ONLY,
    "entropy_coef_max": METRICS_ONLY,
    "entropy_coef_delta": METRICS_ONLY,
    "entropy_target": METRICS_ONLY,
    "data_seed": "seed also orders the prompts",
    "label_smoothing_factor": "the losses of RL have no labels",
    "train_sampling_strategy": "shuffle_dataset says whether prompts come in random order",
    "length_column_name": "prompts are not sorted by length",
}

# Settings with a list of choices. TRL 1.16 checks its own only at the first loss. Entries that are added later count.
CHOICES: dict[str, Iterable[str]] = {
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("none", "group", "batch"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "rollout_mode": ("trainer", "server"),
    "compile": COMPILE,
    "draw_steps": DRAW_STEPS,
    "output": OUTPUTS,
    "estimator": ESTIMATORS,
    "objective": OBJECTIVES,
    "kl": PENALTIES,
    "advantage": ADVANTAGES,
    "scored_tokens": LOSS_MASKS,
    "hints": HINTS,
}


def check_unsupported(settings: Settings | ModelConfig, unsupported: dict[str, Any]) -> None:
    """Raises ValueError for a setting that nothing reads."""
    for name, default in unsupported.items():
        value = getattr(settings, name)
        if value != default:
            advice = INSTEAD.get(
                name,
                "rollouts read temperature, top_k, top_p, diffusion_steps, block_length, remasking, "
                "steps_per_generation and rollout_batch_size",
            )
            raise ValueError(f"{name}={value!r} would be ignored here: leave it at {default!r}; {advice}")


def check_settings(settings: Settings) -> None:
    """Raises ValueError for settings of a `DiffuGRPOConfig` that are no choice, contradict each other or do nothing.

    A setting that would do nothing is refused only if its value is neither the default nor the method's own, because
    then somebody asked for it. So `--method espo --estimator one_step` is accepted, although ESPO's number of draws is
    not used, and `--method espo --estimator one_step --num_views 4` is refused."""
    for name, choices in CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            hint = nearest(value, choices)
            if name == "output" and not hint:
                hint = " (the run's folder is --output_dir)"
            raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {value!r}{hint}")
    for about in CONTRADICTIONS:
        for reason in about(settings):
            raise ValueError(reason)
    for name, reason in unused_settings(settings):
        if set_by_user(settings, name):
            raise ValueError(f"--{name} {getattr(settings, name)} would do nothing: {reason}")


def set_by_user(settings: Settings, name: str) -> bool:
    """Whether a setting has neither its default nor the value of the run's method."""
    method = find_method(settings.method)
    default = settings.__dataclass_fields__[name].default
    return getattr(settings, name) not in (default, method.values.get(name, default))


def names_where(table: Mapping[str, Any], **attributes: bool) -> str:
    """The names of the entries whose attributes are true or false as given: "a, b, c"."""
    names = []
    for name, entry in table.items():
        if all(bool(getattr(entry, attribute)) == value for attribute, value in attributes.items()):
            names.append(name)
    return ", ".join(names)


def readers(name: str, table: dict[str, Any] = OBJECTIVES) -> str:
    """The names of the entries that say that they read a setting."""
    return ", ".join(entry_name for entry_name, entry in table.items() if name in (entry.settings or ()))


def adds_kl(settings: Settings) -> bool:
    """Whether a penalty of `PENALTIES` is added to the objective."""
    return bool(settings.beta) and not settings.has_trls_kl


# Each of these functions yields the contradictions between settings on one subject.


def about_merged_rollouts(settings: Settings) -> Iterator[str]:
    if settings.merged_rollouts and settings.rollout_mode == "server":
        yield "--merged_rollouts true: rollout servers get merged weights anyway: leave it out"


def about_servers(settings: Settings) -> Iterator[str]:
    urls = settings.rollout_server_base_url or ()
    limit = settings.rollout_server_timeout
    if (settings.rollout_mode == "server") != bool(urls):
        yield "--rollout_mode server needs --rollout_server_base_url URL [URL ...], and no other mode has any"
    if len({*urls}) < len(urls) or not all(url.startswith(("http://", "https://")) for url in urls):
        yield f"--rollout_server_base_url takes addresses http://HOST:PORT, each once: {' '.join(urls)}"
    if settings.rollout_mode == "server" and settings.compile != "none":
        yield f"--compile {settings.compile} compiles what the trainer samples: give it to `d1 serve` instead"
    if settings.rollout_mode == "server" and limit >= settings.ddp_timeout:
        yield (
            f"--rollout_server_timeout {limit:g} must be below --ddp_timeout {settings.ddp_timeout}, when processes "
            "give up"
        )


def about_staleness(settings: Settings) -> Iterator[str]:
    """Rollouts that are sampled ahead of the updates."""
    if settings.rollout_staleness and settings.rollout_mode != "server":
        yield "--rollout_staleness: only servers sample while the trainer learns: set --rollout_mode server"
    if settings.rollout_staleness and settings.sampling_weight_cap is None and not settings.old_as_sampled:
        views = settings.view_settings()
        exact = ", ".join(name for name, entry in ESTIMATORS.items() if entry.as_sampled(views))
        yield (
            f"--rollout_staleness {settings.rollout_staleness} needs a correction: set --sampling_weight_cap (3, say), "
            f"which {readers('sampling_weight_cap')} read, or --estimator {exact} with an objective that reads old "
            "log-probs"
        )


def about_estimator(settings: Settings) -> Iterator[str]:
    """An estimator, and the objective that reads its log-probabilities."""
    # Before the sampler's own check, which has another name for it.
    if settings.score_as_sampled and not settings.temperature:
        yield "score_as_sampled: at temperature 0 each token has probability 1; set another --temperature"
    estimator = ESTIMATORS[settings.estimator]
    objective = OBJECTIVES[settings.objective]
    views = settings.view_settings()
    if estimator.partial(views) and objective.reads_old and not objective.per_view:
        able = []
        for name, entry in OBJECTIVES.items():
            is_suited = entry.linear and (entry.per_view or not entry.reads_old)
            if is_suited and may_combine({"estimator": settings.estimator, "objective": name}):
                able.append(name)
        yield (
            f"{settings.objective} would raise each ratio to the power of a draw's weight, the inverse of its "
            f"probability: {settings.estimator} needs --objective {', '.join(able)}"
        )
    if estimator.linear != objective.linear:
        estimators = names_where(ESTIMATORS, linear=False)
        objectives = names_where(OBJECTIVES, linear=False)
        yield (
            f"--estimator {settings.estimator} does not go with --objective {settings.objective}: estimators of bounds "
            f"({estimators}) give no log-probabilities, and go with objectives of bounds alone ({objectives})"
        )
    if estimator.contiguous and LOSS_MASKS[settings.scored_tokens].has_gaps:
        yield (
            f"{settings.estimator} takes the first tokens of a canvas for the completion, and scored_tokens "
            f"{settings.scored_tokens} may leave out some between them: use --scored_tokens "
            f"{names_where(LOSS_MASKS, has_gaps=False)}"
        )
    reads_quantile = "top_entropy_quantile" in (objective.settings or ())
    if reads_quantile and settings.top_entropy_quantile < 1 and not estimator.covers(views):
        able = [name for name, entry in ESTIMATORS.items() if entry.covers(views) and entry.linear]
        yield (
            f"top_entropy_quantile {settings.top_entropy_quantile:g} compares the entropies of all tokens, and the "
            f"views of {settings.estimator} may leave some out: set --top_entropy_quantile 1, or use --estimator "
            f"{', '.join(able)}"
        )
    if objective.per_draw and not estimator.views_per_draw(views):
        able = []
        for name, alternative in ESTIMATORS.items():
            if alternative.views_per_draw(views) and may_combine({"estimator": name, "objective": settings.objective}):
                able.append(name)
        yield (
            f"{settings.objective} takes each draw as an estimate of the whole completion: it needs --estimator "
            f"{', '.join(able)}"
        )


def about_draws(settings: Settings) -> Iterator[str]:
    """An estimator that draws some of all views, whose weights are the inverse of their probabilities."""
    estimator, views = ESTIMATORS[settings.estimator], settings.view_settings()
    objective, penalty = OBJECTIVES[settings.objective], PENALTIES[settings.kl]
    if estimator.partial(views) and adds_kl(settings) and not penalty.by_view:
        yield (
            f"the penalty {settings.kl} is not known to use each view's log-probabilities, and in weighted sums "
            f"the weights of {settings.estimator}'s draws are inverse probabilities: use --kl "
            f"{names_where(PENALTIES, by_view=True)}, set --beta 0, or, for your own, say Penalty(f, by_view=True)"
        )
    if not estimator.unequal(views):
        return
    why = f"counts all views alike, and {settings.estimator} draws them with unequal probabilities: set --draw_steps"
    if not objective.weighs_views:
        able = names_where(OBJECTIVES, weighs_views=True, per_view=True, linear=True)
        yield f"the objective {settings.objective} {why} uniform, or use --objective {able}"
    if adds_kl(settings) and not penalty.weighs_views:
        able = names_where(PENALTIES, weighs_views=True, by_view=True)
        yield f"the penalty {settings.kl} {why} uniform, or use --kl {able}, or set --beta 0"
    reads_loss_type = "loss_type" in (objective.settings or ())
    if adds_kl(settings) and "loss_type" in (penalty.settings or ()):
        reads_loss_type = True
    if reads_loss_type and settings.loss_type in MEANS and not MEANS[settings.loss_type].weighs_views:
        able = names_where(MEANS, weighs_views=True)
        yield f"loss_type {settings.loss_type} {why} uniform, or use --loss_type {able}"


def about_updates(settings: Settings) -> Iterator[str]:
    """The updates on a rollout, which may share its views."""
    objective = OBJECTIVES[settings.objective]
    if objective.over_group and settings.gradient_accumulation_steps % settings.steps_per_generation:
        yield (
            f"{settings.objective} weighs a row against the others of its prompt, all under the same weights of the "
            f"model: gradient_accumulation_steps ({settings.gradient_accumulation_steps}) must be a multiple of "
            f"steps_per_generation ({settings.steps_per_generation})"
        )
    averaged: list[tuple[str, Objective | Penalty]] = [(settings.objective, objective)]
    if adds_kl(settings):
        averaged.append((settings.kl, PENALTIES[settings.kl]))
    for name, entry in averaged:
        over_views = entry.by_view and ("loss_type" not in (entry.settings or ()) or settings.loss_type == "views")
        if settings.split_views and not over_views:
            yield (
                f"split_views gives each update some of a row's views, but {name} with loss_type {settings.loss_type} "
                f"needs all of them: use --objective {names_where(OBJECTIVES, by_view=True)} (with --loss_type views "
                f"where it is read), and --kl {names_where(PENALTIES, by_view=True)}"
            )
    reads_state_reward = objective.settings is None or "state_reward" in objective.settings
    # It costs forward passes and rewards, so even the method's own value is refused; `unused_settings` refuses a value
    # that the user set.
    if settings.state_reward and not reads_state_reward and not set_by_user(settings, "state_reward"):
        yield (
            f"state_reward {settings.state_reward:g} of method {settings.method} finishes and rewards every state, "
            f"and the objective {settings.objective} reads none of it: set --state_reward 0 or --objective "
            f"{readers('state_reward')}"
        )
    if settings.state_reward and settings.num_iterations > 1 and not settings.split_views:
        yield "state_reward needs one draw of views for all updates: set --split_views true or --num_iterations 1"


def about_trees(settings: Settings) -> Iterator[str]:
    """Rollouts that are trees."""
    objective = OBJECTIVES[settings.objective]
    reads_trees = "branches" in (ESTIMATORS[settings.estimator].settings or ())
    if settings.branches is None:
        if reads_trees:
            yield f"the estimator {settings.estimator} scores the edges of a tree: set --branches, such as 4 4"
        return
    levels = len(settings.branches)
    leaves = math.prod(settings.branches)
    text = " ".join(map(str, settings.branches))
    if settings.num_generations != leaves:
        yield (
            f"--branches {text} gives each prompt {leaves} completions, and num_generations is "
            f"{settings.num_generations}: set --num_generations {leaves}, or branches whose product is "
            f"{settings.num_generations}"
        )
    if settings.sampling_settings().steps < levels:
        yield f"--branches {text} has {levels} levels, and diffusion_steps is {settings.diffusion_steps}: raise it"
    if not reads_trees and not set_by_user(settings, "branches"):  # `unused_settings` refuses one that was asked for
        able = readers("branches", ESTIMATORS)
        yield (
            f"branches {text} of method {settings.method} samples trees, which {settings.estimator} does not score: "
            f"use {able}"
        )
    if reads_trees and not objective.view_advantages:
        able = names_where(OBJECTIVES, view_advantages=True)
        yield f"the edges of a tree have advantages of their own, which {settings.objective} does not read: use {able}"
    trees = f"--branches {text} makes trees of rollouts"
    if settings.state_reward:
        yield f"{trees}, and state_reward gives views other advantages: set it to 0"
    if settings.tools or (settings.max_turns or 1) > 1:
        yield f"{trees}, and tools make rows of turns: leave them out"
    if settings.hints != "none":
        yield f"{trees}, and hints replace rows of a group: set --hints none"
    if settings.mask_truncated_completions:
        yield (
            f"{trees}, and mask_truncated_completions would also drop the edges that a truncated completion shares "
            "with others: leave it out"
        )
    if settings.rollout_mode == "server":
        yield f"{trees}, and rollout_mode server cannot continue rollouts: leave it out"


def about_loss(settings: Settings) -> Iterator[str]:
    """The tokens, the mean, the penalty and the learning rate of a loss."""
    objective = OBJECTIVES[settings.objective]
    penalty = PENALTIES[settings.kl]
    schedule = str(settings.lr_scheduler_type.value)
    if LOSS_MASKS[settings.scored_tokens].after_the_end and settings.eos_stop:
        yield (
            f"scored_tokens {settings.scored_tokens} counts tokens after an EOS, which eos_stop skips: set --eos_stop "
            "false"
        )
    if settings.sampling_weight_cap is not None and settings.loss_type == "vespo":
        yield "sampling_weight_cap weighs single tokens and vespo weighs completions: use another loss_type"
    if settings.loss_type not in objective.loss_types:
        known = ", ".join(objective.loss_types)
        yield f"the objective {settings.objective} has no loss_type {settings.loss_type}: use one of {known}"
    if settings.beta and not ESTIMATORS[settings.estimator].linear:
        yield f"the estimator {settings.estimator} gives bounds, and no KL can be computed from bounds: set --beta 0"
    if adds_kl(settings) and settings.loss_type not in MEANS and "loss_type" in (penalty.settings or ()):
        yield (
            f"the penalty {settings.kl} is averaged by loss_type, and {settings.loss_type} is not one of "
            f"{', '.join(MEANS)}"
        )
    if settings.sync_ref_model and not settings.needs_reference:
        yield (
            "sync_ref_model changes a reference model, and this run has none: set it to false, or use a KL to "
            "one, with --beta above 0"
        )
    if settings.use_bias_correction_kl and not settings.has_trls_kl:
        yield "use_bias_correction_kl belongs to TRL's own KL: it needs --objective trl --kl k3"
    if settings.router_aux_loss_coef:
        yield (
            f"router_aux_loss_coef {settings.router_aux_loss_coef} needs the router's logits, which are not computed: "
            "set 0"
        )
    if settings.max_compute_tokens is not None and schedule not in ("constant", "constant_with_warmup", "linear"):
        yield f"max_compute_tokens ends a run, but lr_scheduler_type {schedule} needs max_steps: use constant or linear"
    if settings.max_compute_tokens is not None and schedule == "linear" and settings.warmup_steps:
        yield "warmup_steps: a linear learning rate with max_compute_tokens has no warm-up; set --warmup_steps 0"


def about_advantages(settings: Settings) -> Iterator[str]:
    scaling = settings.scale_rewards, settings.multi_objective_aggregation
    if ADVANTAGES[settings.advantage].centred and scaling != ("none", "sum_then_normalize"):
        yield (
            f"the advantage {settings.advantage} is computed from rewards minus their group's mean: set "
            "--scale_rewards none --multi_objective_aggregation sum_then_normalize"
        )
    if settings.right_share is not None and (
        len(settings.right_share) != 2 or settings.right_share[0] > settings.right_share[1]
    ):
        yield f"right_share needs two shares, the smaller first, got {settings.right_share}"
    if settings.drops_prompts and settings.refills:
        refills = f"refills {settings.refills} replaces prompts: set --refills 0"
        if settings.rollout_staleness:
            yield f"rollout_staleness samples before it is known which prompts are dropped, and {refills}"
        if settings.state_reward:
            yield f"state_reward reads the rows of one batch, and {refills}"
        if settings.scale_rewards == "batch":
            yield f"scale_rewards batch scales the advantages of one batch together, and {refills}"
        if settings.multi_objective_aggregation == "normalize_then_sum":
            yield (
                "multi_objective_aggregation normalize_then_sum scales the advantages of one batch together, and "
                f"{refills}"
            )
        if settings.sampling_settings().edits is not None:
            yield f"edit_threshold has records of different sizes, and {refills}"


def about_hints(settings: Settings) -> Iterator[str]:
    """Rollouts that are given parts of a solution."""
    if settings.hints == "none":
        return
    flag = f"--hints {settings.hints}"
    if ESTIMATORS[settings.estimator].replays:
        able = names_where(ESTIMATORS, replays=False)
        yield f"{flag}: no step revealed the given tokens, which {settings.estimator} replays: use --estimator {able}"
    if (settings.scale_rewards, settings.multi_objective_aggregation) != ("none", "sum_then_normalize"):
        yield (
            f"{flag} computes advantages of changed groups as rewards minus their mean: set --scale_rewards none "
            "--multi_objective_aggregation sum_then_normalize"
        )
    if settings.refills:
        yield f"{flag} reads the rows of one batch, and refills {settings.refills} replaces prompts: set --refills 0"
    if settings.rollout_mode == "server":
        yield f"{flag} continues from canvases with tokens, which rollout servers do not take: leave rollout_mode out"


def about_papers(settings: Settings) -> Iterator[str]:
    """Parts of two papers, which combine only where a published method, a study or a test has them together."""
    chosen = {
        "estimator": settings.estimator,
        "objective": settings.objective,
        "advantage": settings.advantage,
        "hints": settings.hints,
    }
    if adds_kl(settings):
        chosen["kl"] = settings.kl
    for first, second in combinations(chosen, 2):
        parts = {first: chosen[first], second: chosen[second]}
        if may_combine(parts):
            continue
        belong = " and ".join(f"--{kind} {name} belongs to {PAPERS[kind][name]}" for kind, name in parts.items())
        able = "; ".join(f"--{kind} {shared_parts(kind)}" for kind in parts)
        yield f"{belong}, and no study or test has both: replace one of them by a part of no single paper ({able})"


def about_replay(settings: Settings) -> Iterator[str]:
    """An estimator that scores tokens in the sampler's own states; and a sampler that replaces revealed tokens."""
    estimator = ESTIMATORS[settings.estimator]
    edit_threshold = settings.sampling_settings().edits
    if estimator.replays and settings.cfg_scale:
        yield f"{settings.estimator} scores tokens in the sampler's states but without guidance: set --cfg_scale 0"
    if estimator.clean_prompt and settings.p_mask_prompt:
        yield f"{settings.estimator} scores tokens given the whole prompt, as the sampler saw it: set --p_mask_prompt 0"
    if edit_threshold is None:
        return
    if edit_threshold < 0.5:
        yield (
            f"edit_threshold {edit_threshold:g}: below 0.5 more than one token can replace a revealed one, so the "
            "probability that it stayed is not known from one candidate: in RL set --edit_threshold to 0.5 or more"
        )
    if settings.rollout_mode == "server":
        yield "edit_threshold: a rollout server does not send what edits replaced: leave rollout_mode server out"
    if estimator.replays and not estimator.replays_writes:
        able = names_where(ESTIMATORS, replays_writes=True)
        yield (
            f"{settings.estimator} replays what was written last, and edit_threshold writes more than once: take {able}"
        )
    if OBJECTIVES[settings.objective].reads_steps:
        yield (
            f"{settings.objective} reads the one step that revealed a token, and edit_threshold has several: leave it "
            "out"
        )
    if estimator.replays and settings.sampling_weight_cap is not None:
        yield (
            f"sampling_weight_cap: {settings.estimator} scores in the sampler's states, so leave it out with "
            "edit_threshold"
        )


def about_turns(settings: Settings) -> Iterator[str]:
    """Episodes of several turns, where a row is a turn and a completion is several rows."""
    if settings.tools or (settings.max_turns or 1) > 1:
        yield from against_turns(settings)


def against_turns(settings: Settings) -> Iterator[str]:
    """What contradicts episodes of several turns."""
    if ADVANTAGES[settings.advantage].reads:
        able = names_where(ADVANTAGES, reads=False)
        yield (
            f"with tools, the advantage {settings.advantage} would read bounds of single canvases: use --advantage "
            f"{able}"
        )
    if settings.hints != "none":
        yield (
            f"--hints {settings.hints} are given on single canvases, and with tools there are several: set --hints none"
        )
    if settings.max_turns == 1:
        return
    turns = "with tools, each turn of an episode is a row"
    if OBJECTIVES[settings.objective].per_row:
        able = names_where(OBJECTIVES, per_row=False)
        yield f"{turns}, and the objective {settings.objective} has a ratio or bound per row: use --objective {able}"
    if adds_kl(settings) and PENALTIES[settings.kl].per_row:
        able = names_where(PENALTIES, per_row=False)
        yield f"{turns}, and the penalty {settings.kl} has a ratio or bound per row: use --kl {able}"
    if settings.objective == "trl" and (
        settings.loss_type in TRLS_PER_ROW or settings.importance_sampling_level != "token"
    ):
        yield (
            f"{turns}, and {settings.loss_type} or importance_sampling_level {settings.importance_sampling_level} "
            "weighs whole rows"
        )
    if settings.objective == "trl" and settings.off_policy_mask_threshold is not None:
        yield f"{turns}, and off_policy_mask_threshold drops single rows: leave it out"
    loss_mask = LOSS_MASKS[settings.scored_tokens]
    if loss_mask.after_the_end or loss_mask.rest_of_block:
        able = names_where(LOSS_MASKS, after_the_end=False, rest_of_block=False)
        yield f"scored_tokens {settings.scored_tokens} counts what follows a call, which is cut off: use {able}"
    for name in SPEED_SETTINGS:
        if getattr(settings, name):
            yield f"{name} needs the forward passes of a single canvas: leave it out"
    if settings.state_reward:
        yield "state_reward finishes single canvases, which are turns of an episode: set --state_reward 0"
    if settings.prompt_share < 1:
        yield f"prompt_share {settings.prompt_share:g} counts the steps of single canvases: set --prompt_share 1"
    if settings.refills:
        yield f"refills {settings.refills} replaces single canvases: set --refills 0"
    if settings.rollout_staleness:
        yield "rollout_staleness samples ahead of the trainer, which makes the calls: set it to 0"
    if settings.truncate_prompts:
        yield "truncate_prompts would cut what a later turn needs: raise max_prompt_length"
    if settings.sampling_settings().edits is not None:
        yield "edit_threshold: editing with tools is not supported: leave it out"


SPEED_SETTINGS = ("speed_reward", "min_speed_spread")  # settings that read the tokens per forward pass of a completion

CONTRADICTIONS: list[Callable[[Settings], Iterator[str]]] = [
    about_merged_rollouts,
    about_servers,
    about_staleness,
    about_estimator,
    about_draws,
    about_updates,
    about_trees,
    about_loss,
    about_advantages,
    about_hints,
    about_replay,
    about_turns,
    about_papers,
]


def unused_settings(settings: Settings) -> Iterator[tuple[str, str]]:
    """The settings that no chosen entry reads, each with the reason."""
    if not settings.beta:
        yield "kl", "it says what beta weighs, and beta is 0"
        yield "use_bias_correction_kl", "it changes the KL that beta weighs, and beta is 0"
    if not settings.sync_ref_model:
        for name in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
            yield name, "it says how the reference model follows the policy, and sync_ref_model is false"
    if settings.num_views is None and "draw_steps" in (ESTIMATORS[settings.estimator].settings or ()):
        for name in ("draw_steps", "mean_step"):
            yield name, f"{settings.estimator} scores every step unless num_views says how many to draw"
    elif settings.draw_steps == "top":
        yield "mean_step", "the steps of highest entropy are not drawn, so there is no probability to divide by"
    if settings.sampling_settings().draw_distribution == MODEL_DISTRIBUTION:
        yield "score_as_sampled", "at temperature 1, without top_k and top_p, that is the model's own distribution"
    if settings.max_compute_tokens is None:
        yield "save_at_compute", "its shares are of max_compute_tokens, which is not set"
    if not settings.drops_prompts:
        yield "refills", "it replaces the prompts that right_share or min_speed_spread drops, and neither is set"
    if settings.hints == "none":
        yield "hint_rows", "it counts completions with hints, and hints is none"
    if settings.num_iterations == 1:
        yield "split_views", "there is one update on each rollout, num_iterations 1"
    if settings.rollout_mode != "server":
        for name in ("rollout_own_batch", "rollout_server_timeout"):
            yield name, f"it is for servers, and rollout_mode is {settings.rollout_mode}"
    if not settings.p_mask_prompt and ESTIMATORS[settings.estimator].settings is not None:
        yield "protect_special_tokens", "no token of a prompt is masked, p_mask_prompt 0"
    if OBJECTIVES[settings.objective].loss is None and settings.loss_type in TRLS_SETTINGS:
        loss_type = settings.loss_type
        for name in dict.fromkeys(name for names in TRLS_SETTINGS.values() for name in names):
            if name not in TRLS_SETTINGS[loss_type]:
                able = ", ".join(other for other, names in TRLS_SETTINGS.items() if name in names)
                yield name, f"loss_type {loss_type} does not read it; {able} would"
        if loss_type == "cispo" and settings.epsilon_high is not None:
            yield "epsilon", "cispo has no lower bound of ratios, and its upper one is epsilon_high"

    # Settings that other entries of the same table read. A penalty reads settings of a loss, too.
    loss_parts: list[Objective | Penalty] = [OBJECTIVES[settings.objective]]
    if adds_kl(settings):
        loss_parts.append(PENALTIES[settings.kl])
    used: list[tuple[str, dict[str, Any], list[Any]]] = [
        ("estimator", ESTIMATORS, [ESTIMATORS[settings.estimator]]),
        ("objective", OBJECTIVES, loss_parts),
        ("advantage", ADVANTAGES, [ADVANTAGES[settings.advantage]]),
    ]
    for kind, table, entries in used:
        if any(entry.settings is None for entry in entries):  # a user's entry that does not say
            continue
        read: set[str] = set()
        for entry in entries:
            read.update(entry.settings)
        for name in dict.fromkeys(name for entry in table.values() for name in entry.settings or ()):
            if name not in read:
                yield name, f"the {kind} {getattr(settings, kind)} does not read it; {readers(name, table)} would"


# --- What a resume may change -----------------------------------------------------------------------------------------

ON_RESUME = OnResume(
    fixed=dict.fromkeys(
        (
            # The task, the order of its rows, and random numbers
            "dataset",
            "data_file",
            "prompt_protocol",
            "few_shot",
            "seed",
            "shuffle_dataset",
            "world_size",
            # The rollout in the checkpoint and its position in the cycle of updates
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "steps_per_generation",
            "num_mini_batches",
            "num_generations",
            "num_iterations",
            "max_completion_length",
            "block_length",
            "mask_id",
            "rollout_staleness",
            "method",
            "estimator",
            "num_views",
            "antithetic",
            "stratified",
            "segments",
            "segment_steps",
            "draw_steps",
            "mean_step",
            "split_views",
            "scored_tokens",
            "score_as_sampled",
            "state_reward",
            "branches",
            "p_mask_prompt",
            "random_masking",
            "protect_special_tokens",
            "objective",
            "kl",
            "advantage",
            "scale_rewards",
            "right_share",
            "refills",
            "prompt_share",
            "hints",
            "hint_rows",
            "min_speed_spread",
            "accuracy_reward",
            "speed_reward",
            "tools",
            "max_turns",
            "tool_format",
            "calls_per_turn",
            "result_length",
            "max_turn_prompt",
            # The weights in the checkpoint
            "model_path",
            "use_peft",
            "load_in_4bit",
            "sync_ref_model",
            "lora_r",
            "lora_alpha",
            "use_rslora",
            "use_dora",
            "lora_target_modules",
            "lora_target_parameters",
            "lora_modules_to_save",
            # The state of its optimizer and scheduler, where a new value would have no effect
            "optim",
            "optim_args",
            "optim_target_modules",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "lr_scheduler_type",
            "lr_scheduler_kwargs",
        ),
        identity,
    )
    # Only whether it is 0 is fixed: then the rollout has no reference log-probs.
    | {"beta": bool}
    # Only whether it is "masked" is fixed: the model decides between the other values, and older records hide them
    # (`DiffuGRPOConfig.to_dict`).
    | {"first_token": lambda value: value == "masked"},
    free=(
        "output_dir",
        "resume_from_checkpoint",
        "run_name",
        "report*",
        "project",
        "trackio_*",
        "disable_tqdm",
        "log*",
        "num_completions_to_print",
        "skip_memory_metrics",
        "include_*",
        "debug",
        "do_*",
        "prediction_loss_only",
        "save_*",
        "eval_*",
        "per_device_eval_batch_size",
        "num_generations_eval",
        "batch_eval_metrics",
        "push_to_hub",
        "hub_*",
        "restore_callback_states_from_checkpoint",
        "enable_jit_checkpoint",
        "local_rank",
        "dataloader_*",
        "ddp_*",
        "accelerator_config",
        "torch_empty_cache_steps",
        "remove_unused_columns",
        "label_names",
        "activation_checkpointing*",
        "gradient_checkpointing*",
        "ds3_gather_for_generation",
        "views_at_once",
        "generation_batch_size",
        "pad_to_multiple_of",
        "use_cpu",
        "eos_stop",
        "rollout_*",
        "merged_rollouts",
        "compile",
        "tool_seconds",
        "log_tool_results",
    ),
)


def resume_rules(settings: Settings) -> OnResume:
    """What a resume may change in a run with these settings: `ON_RESUME`; with `score_as_sampled`, no setting of the
    distribution that tokens are drawn from. The later updates on a rollout are scored under that distribution, and the
    old log-probabilities in the checkpoint are, too: under another one, the ratio of an equal policy is not 1."""
    if not settings.score_as_sampled:
        return ON_RESUME
    return replace(ON_RESUME, fixed={**ON_RESUME.fixed, **dict.fromkeys(("temperature", "top_k", "top_p"), identity)})


# --- What the model, the prompts and the trainer do not allow ---------------------------------------------------------


def check_model_settings(args: Settings, model_args: ModelConfig) -> None:
    """Refuses model settings that contradict each other or that nothing here reads."""
    check_unsupported(model_args, UNSUPPORTED_IN_MODEL)
    if not args.model_path:
        raise ValueError("--model_path is missing: a hub id or a folder, e.g. --model_path ../pocket/base")
    if model_args.load_in_4bit and not model_args.use_peft:
        raise ValueError("--load_in_4bit (NF4) needs --use_peft: 4-bit weights are not trained themselves")
    if model_args.load_in_4bit and args.rollout_mode == "server":
        raise ValueError(
            "rollout_mode server samples with weights of 16 or 32 bits, which are another policy than 4-bit ones: add "
            "--load_in_4bit false, or sample in the trainer"
        )
    if args.merged_rollouts:
        advice = "leave out --merged_rollouts true"
        if not model_args.use_peft:
            raise ValueError(f"--merged_rollouts true: without --use_peft there is no adapter to merge: {advice}")
        if model_args.load_in_4bit:
            raise ValueError(f"--merged_rollouts true: 4-bit weights cannot absorb an adapter: {advice}")
    if model_args.attn_implementation == "flex_attention" and not torch.cuda.is_available():
        raise ValueError("--attn_implementation flex_attention trains on a GPU only: use sdpa or eager on a CPU")
    if args.sync_ref_model and model_args.use_peft:
        raise ValueError(
            "sync_ref_model needs a reference model in memory, and with LoRA the reference is the model without its "
            "adapter: train fully, or leave sync_ref_model off"
        )


def check_config(config: Any, prompt: int, args: Settings) -> int | None:
    """Refuses settings that contradict the model's config, for prompts of up to `prompt` tokens.

    Returns the tokens per block of a model with blocks, which become `block_length` if it is not set."""
    sampling = args.sampling_settings(config)
    refuse_scdd(sampling, "rl")
    if args.branches is not None:
        check_continuing(sampling, config, "--branches")
        check_trees(config)
    if args.hints != "none":
        check_continuing(sampling, config, f"--hints {args.hints}")
    check_first_token(sampling, args)
    check_noise(config, args)
    if args.mask_id is not None and args.mask_id >= vocabulary(config):
        raise ValueError(
            f"--mask_id {args.mask_id}: {args.model_path} has {vocabulary(config)} tokens, numbered from 0"
        )
    by_default = f" (its default is {args.max_completion_length})" if args.canvas_is_unset else ""
    check_room(config, prompt, int(args.max_completion_length or 0), f": lower --max_completion_length{by_default}")
    return sampling.block_length if has_causal_context(config) else block_size(config)


def check_continuing(sampling: SamplingSettings, config: Any, what: str) -> None:
    """Raises ValueError if the sampler or the model cannot continue from canvases with tokens, which `what` needs."""
    try:
        check_start(sampling, config)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def check_trees(config: Any) -> None:
    """Raises ValueError for a model that has no trees of rollouts."""
    if block_size(config) is not None:
        raise ValueError(
            f"--branches scores edges in the state of their parent, and this {config.model_type} sees finished blocks "
            "instead of it: use a model with full attention"
        )


def check_first_token(sampling: SamplingSettings, args: Settings) -> None:
    """Refuses estimators whose views hide the first token of a block, where samplers take it from the clean text."""
    if sampling.first_token == "causal" and not ESTIMATORS[args.estimator].causal_first:
        able = names_where(ESTIMATORS, causal_first=True)
        raise ValueError(
            f"--estimator {args.estimator} hides the first token of a block, which this model takes from the clean "
            f"text: use {able}, or --first_token masked"
        )


def check_datasets(train_dataset: Any, eval_dataset: Any) -> None:
    """Raise ValueError for data that the trainer cannot go through, or that has no prompts."""
    from d1.runs.data import require_dataset  # here, because the help of RL needs no data

    data = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict):
        data.update(eval_dataset)
    else:
        data["eval_dataset"] = eval_dataset
    for name, rows in data.items():
        if rows is None:  # TRL says whether it may be missing
            continue
        require_dataset(name, rows)
        if "prompt" not in rows.column_names:
            raise ValueError(f"{name} has the columns {', '.join(rows.column_names)}: name the one with prompts prompt")


def check_trace_column(train_dataset: Any, args: Settings) -> None:
    """Raises ValueError if a run takes hints from a column that the training rows do not have, or that has something
    else than texts."""
    if args.hints == "none" or train_dataset is None:
        return
    if TRACE not in train_dataset.column_names:
        raise ValueError(
            f"--hints {args.hints} takes hints from the column {TRACE!r} of train_dataset, a worked solution in the "
            f"form of a completion; its columns are {', '.join(train_dataset.column_names)}"
        )
    for number, trace in enumerate(train_dataset[TRACE][:]):
        if not isinstance(trace, str):
            raise ValueError(
                f"row {number}, column {TRACE!r}: {trace!r:.40} is no text: write the row's worked solution, or leave "
                "the row out"
            )


def check_noise(config: Any, args: Settings) -> None:
    """Refuses an estimator for another kind of noise, and what RL of a model with uniform noise does not have."""
    name = args.estimator
    kind = config.model_type
    is_uniform = not has_masks(config)
    if ESTIMATORS[name].uniform_noise != is_uniform:
        able = names_where(ESTIMATORS, uniform_noise=is_uniform)
        noise = "uniform ids for noise" if is_uniform else "mask tokens"
        raise ValueError(f"--estimator {name} does not fit {kind}, which has {noise}: use {able}")
    if not is_uniform:
        return
    if args.hints != "none":
        raise ValueError(f"--hints {args.hints} keeps given tokens on a canvas, which uniform noise overwrites")
    if args.self_conditioning:
        raise ValueError(f"{name} scores passes without self-conditioning: set --self_conditioning false")
    if args.rollout_mode == "server":
        raise ValueError("--rollout_mode server: a server sends no states of uniform noise")
    if args.sampling_weight_cap is not None:
        raise ValueError(f"--sampling_weight_cap: {name} scores in the sampler's states")
    if OBJECTIVES[args.objective].reads_steps:
        raise ValueError(
            f"--objective {args.objective} reads the one step that revealed a token, and here a token is accepted in "
            "several"
        )
    if args.state_reward:
        raise ValueError("--state_reward finishes a state by filling its mask tokens")
    if args.mask_id is not None:
        raise ValueError(f"--mask_id {args.mask_id}: {kind} has no mask token")
    if args.tools:
        raise ValueError("--tools: a canvas is written as a whole, and cannot end with a call")


def check_prompts(lengths: Sequence[int], args: Settings) -> int:
    """Refuses prompts longer than `max_prompt_length`; with `truncate_prompts`, warns that the trainer will cut them.

    Takes the lengths of all prompts in tokens, and returns that of the longest one, once cut."""
    too_long = [row for row, length in enumerate(lengths) if length > args.max_prompt_length]
    if not too_long:
        return max(lengths)
    if not args.truncate_prompts:
        raise ValueError(
            f"{len(too_long)} of {len(lengths)} prompts are longer than max_prompt_length={args.max_prompt_length} "
            f"tokens (the first is row {too_long[0]}, the longest has {max(lengths)}): raise max_prompt_length, or "
            "pass --truncate_prompts true to keep only the end of them"
        )
    logger.warning("The beginning of %d of %d prompts will be cut off.", len(too_long), len(lengths))
    return args.max_prompt_length


# What else says how calls of tools are read and made. These are checked with the trainer, whose tools need no --tools.
CALL_SETTINGS = ["tool_format", "log_tool_results", *(field.name for field in fields(TurnSettings))]
CALL_SETTINGS.remove("max_turns")  # which has a message of its own


def check_single_turn(args: Settings) -> None:
    """Raises ValueError for settings of episodes, if the trainer has no tools."""
    needed = "tools: --tools, or the trainer's tools=[...] or environment_factory"
    if args.tools:
        raise ValueError(
            f"tools {' '.join(args.tools)}: d1 rl reads these names; give the trainer functions, tools=[...]"
        )
    if (args.max_turns or 1) > 1:
        raise ValueError(f"max_turns above 1 needs {needed}")
    for name in CALL_SETTINGS:
        if set_by_user(args, name):
            raise ValueError(f"--{name} {getattr(args, name)} would do nothing: it needs {needed}")


def check_episodes(args: Settings, has_rollout_func: bool, environments: Any) -> None:
    """Raises ValueError if the tools or environments of a trainer contradict its other arguments."""
    for reason in against_turns(args):
        raise ValueError(reason)
    if has_rollout_func:
        raise ValueError("rollout_func samples whole completions: with it, leave tools and environment_factory out")
    if environments and args.log_tool_results:
        raise ValueError("log_tool_results: an environment changes with each call, so its results cannot be replayed")


def check_trainer(
    args: Settings,
    sampling: SamplingSettings,
    rewards: Sequence[Any],
    block_causal: bool,
    weights_are_split: bool,
    samples_in_step: bool,
) -> None:
    """Raises ValueError for settings that do not fit the trainer's rewards, or the way its processes share weights.
    Warns if completions are sampled from a distribution that no estimator scores.

    Args:
        weights_are_split: each process holds a part of the weights (ZeRO-3, FSDP).
        samples_in_step: and all of them must make the same number of forward passes in sampling.
    """
    check_first_token(sampling, args)
    unscored = []
    if sampling.cache:
        unscored.append("a cache")
    if sampling.cfg_scale:
        unscored.append("guidance")
    if unscored:
        logger.warning(
            "Completions are sampled with %s, so the policy that samples is not the one that is trained: "
            "sampling/logp_difference_abs and sampling/ratio_max log the difference.",
            " and ".join(unscored),
        )
    if not getattr(rewards[-1], "is_accuracy", False):
        reason = "to know which completions are right: the last reward must be `accuracy_of`"
        if args.right_share:
            raise ValueError(f"right_share needs {reason}")
        if args.hints != "none":
            raise ValueError(f"hints need {reason}")
        if OBJECTIVES[args.objective].reads_right:
            raise ValueError(f"objective {args.objective} needs {reason}")
    if args.hints != "none" and weights_are_split:
        raise ValueError(
            f"--hints {args.hints}: a process samples with hints what its own prompts need, which processes that each "
            "hold a part of the weights cannot: use DDP or ZeRO-2"
        )
    if args.branches is not None and weights_are_split:
        raise ValueError(
            "--branches: processes make different numbers of forward passes, which processes that each hold a part of "
            "the weights cannot: use DDP or ZeRO-2"
        )
    if args.sync_ref_model and weights_are_split:
        raise ValueError(
            "sync_ref_model changes the reference, which no checkpoint stores under ZeRO-3 or FSDP: use DDP or ZeRO-2"
        )
    if args.compile != "none" and weights_are_split:
        raise ValueError(f"--compile {args.compile}: each process holds only a part of the weights: use DDP or ZeRO-2")
    if samples_in_step and (sampling.rule or args.eos_stop or block_causal):
        raise ValueError(
            "processes that each hold a part of the weights must make the same number of forward passes, which with a "
            "parallel sampler, eos_stop or a block-causal model depends on the texts: use DDP, ZeRO-2, or ZeRO-3 with "
            "ds3_gather_for_generation, or turn the parallel sampler and eos_stop off"
        )
