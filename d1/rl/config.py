"""Settings of diffu-GRPO: TRL's GRPOConfig with d1's objective as defaults, plus what a diffusion model needs; and the
plan of a run with them: how many steps, rollouts, views and forward passes it takes."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from trl import GRPOConfig

from d1.models.kinds import block_size, max_positions
from d1.ranges import (
    AMOUNT,
    BELOW_ONE,
    COUNT,
    NATURAL,
    NUMBER,
    POSITIVE,
    SEED,
    SHARE,
    Range,
    check_ranges,
    ranges_of,
    setting,
)
from d1.rl.batch import LOSS_MASKS
from d1.rl.checks import (
    UNSUPPORTED,
    check_settings,
    check_unsupported,
    set_by_user,
    try_entries,
)
from d1.rl.hints import HINTS
from d1.rl.losses import ADVANTAGES, OBJECTIVES, PENALTIES
from d1.rl.methods import CANVAS, METHODS
from d1.rl.tables import check_names, find_method
from d1.runs.turns import FORMAT_NAMES, TOOL_NAMES, TurnSettings
from d1.sampling.caches import CACHES
from d1.sampling.reveal import REMASKING, RULES
from d1.sampling.settings import (
    BLOCK_LENGTH,
    EDITING,
    FIRST_TOKENS,
    OUTPUTS,
    POST_STEPS_RANGE,
    SAMPLERS,
    STOP_ENTROPY,
    SamplingSettings,
    check_sampler,
    default_steps,
    equal_blocks,
)
from d1.scoring import ESTIMATORS, ViewSettings
from d1.scoring.replay import DRAW_STEPS
from d1.tasks import PROTOCOLS, TASKS
from d1.transformers_bridge import RECOMPUTE

logger = logging.getLogger(__name__)

# Ranges of the numeric settings inherited from Transformers and TRL. Settings that are always refused are left out.
STEPS = Range(0, 1, open_low=True, open_high=True) | COUNT  # a share of all steps, or a number of steps
INHERITED_BY_RANGE: dict[Range, tuple[str, ...]] = {
    COUNT: (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("ref_model_sync_steps", "ddp_timeout", "lora_r", "lora_alpha"),
    ),
    COUNT | None: (
        *("steps_per_generation", "num_generations_eval", "eval_accumulation_steps", "torch_empty_cache_steps"),
        *("save_total_limit", "num_completions_to_print", "ddp_bucket_cap_mb", "dataloader_prefetch_factor"),
    ),
    COUNT | None | "auto" | "none" | "null": ("pad_to_multiple_of",),
    COUNT | -1: ("max_steps",),
    STEPS: ("logging_steps", "save_steps"),
    STEPS | None: ("eval_steps",),
    NATURAL: ("dataloader_num_workers", "top_k"),
    Range(0, 1, open_low=True): ("top_p",),
    Range(-1, integer=True): ("local_rank",),
    SEED: ("seed",),
    POSITIVE: ("num_train_epochs", "sapo_temperature_neg", "sapo_temperature_pos"),
    POSITIVE | None: ("delta",),
    AMOUNT: (
        *("warmup_steps", "weight_decay", "adam_epsilon", "max_grad_norm", "eval_delay"),
        *("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"),
    ),
    AMOUNT | None: ("neftune_noise_alpha", "epsilon_high", "off_policy_mask_threshold"),
    BELOW_ONE: ("adam_beta1", "adam_beta2", "lora_dropout"),
    SHARE: ("ref_model_mixup_alpha", "top_entropy_quantile"),
    replace(NUMBER, many=True) | None: ("reward_weights",),
}
BATCHES = {"per_device_train_batch_size": False, "per_device_eval_batch_size": True}  # name -> whether for evaluation
OUTPUT_DIR = "runs/rl"
TRAINERS_BATCH = 8  # the Trainer's default
INHERITED = {name: limits for limits, names in INHERITED_BY_RANGE.items() for name in names}
Count = Annotated[int, COUNT]
OptionalCount = Annotated[int | None, COUNT | None]
Amount = Annotated[float, AMOUNT]


@dataclass
class DiffuGRPOConfig(GRPOConfig):
    """Arguments of `DiffuGRPOTrainer`. Where TRL's defaults differ from d1's (arXiv 2504.12216, appendix), d1's win."""

    # What is trained, on what
    model_path: str | None = setting(None, "Base or merged model, or SFT adapter.", aliases=["--model_name"])
    dataset: str = setting("gsm8k", f"Task: {', '.join(TASKS)}, or the path of your own task file.", aliases=["--task"])
    prompt_protocol: str = setting("d1", f"How problems are asked and answers rewarded: {', '.join(PROTOCOLS)}.")
    few_shot: Annotated[int | None, NATURAL | None] = setting(
        None, "Solved training problems shown before each prompt; unset: the protocol's number."
    )
    reward_file: str | None = setting(None, "A .py file whose functions are rewards, in addition to the task's.")
    data_file: str | None = setting(
        None,
        "Local json, jsonl, csv or parquet file to train on, in the task's schema; gsm8k, math, code: or a hub name.",
    )
    eval_data_file: str | None = setting(None, "Local file of validation problems, for eval_strategy other than 'no'.")
    eval_limit: OptionalCount = setting(None, "Use only the first N validation problems.")
    resume_from_checkpoint: str | None = setting(
        None,
        "Continue from the last complete checkpoint (alone, or 'true'), or from the one in this folder (with "
        "DeepSpeed, one of your own: it unpickles its files).",
        aliases=["--resume"],
        nargs="?",
        const="true",
    )
    report: bool = setting(False, "Write report.html at the end: curves, and the same problems before and after.")
    max_compute_tokens: OptionalCount = setting(
        None, "End the run when compute_tokens reaches this number; a linear learning rate falls to 0 with this budget."
    )
    save_at_compute: Annotated[list[float] | None, replace(SHARE, open_low=True, many=True) | None] = setting(
        None, "Also save the model at these shares of max_compute_tokens, to OUTPUT_DIR/at_SHARE."
    )

    # Rollout
    max_prompt_length: Count = setting(200, "Maximum prompt length in tokens; longer ones are refused.")
    truncate_prompts: bool = setting(False, "Cut the beginning off prompts longer than max_prompt_length instead.")
    plain_chat_template: bool = setting(False, "Give a plain chat template to a tokenizer without one.")
    block_length: OptionalCount = setting(
        None, "Tokens per block; by default the model's own, or at most 32 in equal blocks."
    )
    diffusion_steps: OptionalCount = setting(
        128, "Forward passes per completion; by default half of max_completion_length, or as the method says."
    )
    cfg_scale: Amount = setting(0.0, "Classifier-free guidance; 0 turns it off.")
    remasking: str = setting("low_confidence", f"One of {', '.join(REMASKING)}.")
    sampler: str = setting("exact", f"One of {', '.join(SAMPLERS)}; all but exact trade accuracy for speed.")
    kv_cache: str | None = setting(
        None, f"What a cached sampler keeps: {', '.join(CACHES)} (dual if unset); none: not the method's."
    )
    reveal: str | None = setting(
        None, f"Rule of a parallel sampler: {', '.join(RULES)} (threshold if unset); none: not the method's."
    )
    reveal_level: Annotated[float | None, AMOUNT | None] = setting(
        None, f"Level of the rule; defaults, by rule: {', '.join(str(rule.level) for rule in RULES.values())}."
    )
    edit_threshold: Annotated[float | None, BELOW_ONE | None] = setting(
        None, "With a parallel sampler, replace revealed tokens where another one is predicted with more than this."
    )
    max_post_steps: Annotated[int | None, POST_STEPS_RANGE | None] = setting(
        None, "With editing, passes per block after its last mask, at most; 16 if unset."
    )
    first_token: str | None = setting(
        None,
        f"With a causal context, how a block's first token is predicted: {' (the default) or '.join(FIRST_TOKENS)}.",
    )
    editing: str | None = setting(None, f"Published levels of reveal and edit_threshold: {', '.join(EDITING)}.")
    end_temperature: Annotated[float | None, POSITIVE | None] = setting(
        None, "With uniform noise, the temperature falls linearly from --temperature to this in each block."
    )
    self_conditioning: bool = setting(True, "With uniform noise, passes see the distributions of the pass before.")
    output: str = setting("argmax", f"With uniform noise, what the last pass of a block leaves: {', '.join(OUTPUTS)}.")
    stop_entropy: Annotated[float | None, AMOUNT | None] = setting(
        None, f"With uniform noise, a block may end below this mean entropy; {STOP_ENTROPY} if unset, 0: never."
    )
    eos_stop: bool | None = setting(
        None, "Skip the blocks after a completion's EOS. Unset: on, unless they are scored or other processes wait."
    )
    rollout_batch_size: OptionalCount = setting(
        None, "Completions sampled at once (servers: per request); all if unset."
    )
    compile: str = setting(
        "none", "How rollouts run forward passes: none; layers (torch.compile); graphs (CUDA graphs, for few tokens)."
    )
    merged_rollouts: bool | None = setting(
        None,
        "Sample from a copy of the weights with the adapter merged. Unset: 16-bit weights on a GPU with room for it.",
    )
    rollout_mode: str = setting("trainer", "Where rollouts are sampled: trainer, or server (`d1 serve`).")
    rollout_server_base_url: list[str] | None = setting(None, "Addresses of the servers of rollout_mode server.")
    rollout_server_timeout: Annotated[float, POSITIVE] = setting(
        240.0, "Seconds to wait while no rollout server answers; then the run ends."
    )
    rollout_own_batch: bool | None = setting(
        None, "`d1 serve` samples a request alone, as the trainer would to the bit. Unset: if it computes in float32."
    )
    rollout_staleness: Annotated[int, NATURAL] = setting(
        0, "Of rollout_mode server: sample with the weights of this many rollouts ago, while the trainer learns."
    )

    # Turns with tools
    tools: list[str] | None = setting(None, f"Tools of the model: {', '.join(TOOL_NAMES)}, or .py files of functions.")
    max_turns: OptionalCount = setting(None, "Canvases per episode; 2 with tools if unset.")
    tool_format: str | None = setting(
        None, f"How calls are written: {', '.join(FORMAT_NAMES)}; by the chat template if unset."
    )
    calls_per_turn: Count = setting(
        TurnSettings.calls_per_turn, "Calls per canvas, which is cut after the last of them."
    )
    tool_seconds: Annotated[float, POSITIVE] = setting(TurnSettings.tool_seconds, "Seconds per call.")
    result_length: Count = setting(TurnSettings.result_length, "Tokens of a result that the model reads.")
    max_turn_prompt: OptionalCount = setting(
        None, "Longest prompt of a later turn, in tokens; unset: what the model's positions leave."
    )
    log_tool_results: bool = setting(
        False, "Keep results in OUTPUT_DIR for a resumed run, which then makes no call again: for tools with chance."
    )

    # Estimator and objective
    method: str = setting("d1", f"Sets a method's values; other flags win: {', '.join(METHODS)}, or a .py path.")
    estimator: str = setting("one_step", f"How log-probabilities are estimated: {', '.join(ESTIMATORS)}.")
    num_views: OptionalCount = setting(None, "Monte Carlo draws per row and update; replay scores all steps if unset.")
    antithetic: bool = setting(False, "elbo, espo: draws in pairs of opposite masks, which together hide every token.")
    stratified: bool = setting(
        False, "elbo, espo, counts, complements: spread times or counts evenly over all draws of a rollout."
    )
    segments: OptionalCount = setting(None, "segments: number of segments of a canvas's steps; one per step if unset.")
    segment_steps: OptionalCount = setting(None, "replay: merge this number of steps into one; 1 suits fast samplers.")
    draw_steps: str = setting("uniform", f"replay with num_views: how steps are chosen: {', '.join(DRAW_STEPS)}.")
    mean_step: bool = setting(False, "replay with num_views: estimate the mean over steps instead of their sum.")
    branches: Annotated[list[int] | None, replace(Range(2, integer=True), many=True) | None] = setting(
        None, "Completions of a prompt are the leaves of a tree: children of a node of each level, such as 4 4."
    )
    sibling_weight: Amount = setting(
        0.003, "clipped_edges: weight of the distillation of better siblings at the end of a run, from 0 at its start."
    )
    split_views: bool = setting(False, "Divide a rollout's views among its num_iterations updates.")
    scored_tokens: str = setting("ended", f"Tokens in the loss (ended: up to the EOS): {', '.join(LOSS_MASKS)}.")
    score_as_sampled: bool = setting(
        False, "Score under the distribution that is sampled from (temperature, top_k, top_p), not the model's own."
    )
    views_at_once: Count = setting(1, "Views of a row per forward pass; more need more memory.")
    objective: str = setting("trl", f"One of {', '.join(OBJECTIVES)}; trl is TRL's loss, by loss_type.")
    kl: str = setting("k3", f"KL penalty, which beta weighs: {', '.join(PENALTIES)}.")
    advantage: str = setting("trl", f"One of {', '.join(ADVANTAGES)}; trl is what scale_rewards gives.")
    state_reward: Amount = setting(
        0.0, "clipped_steps: weight of (completion's reward - its reward if finished in one pass from a view's state)."
    )
    right_share: Annotated[list[float] | None, replace(SHARE, many=True) | None] = setting(
        None, "Drop prompts whose fraction of correct completions is outside these two bounds."
    )
    min_speed_spread: Amount = setting(
        0.0, "Drop prompts whose completions' tokens per forward pass differ by less than this."
    )
    accuracy_reward: bool = setting(False, "The task's strict accuracy is the reward, instead of the task's rewards.")
    speed_reward: Amount = setting(0.0, "Weight of tokens per forward pass as a further reward; 0: no such reward.")
    refills: Annotated[int, NATURAL] = setting(
        0,
        "right_share or min_speed_spread: at most this many more batches of prompts, sampled to replace those that are "
        "dropped.",
    )
    hints: str = setting(
        "none",
        f"In groups that are all wrong, sample again with parts of the row's solution given: {', '.join(HINTS)}.",
    )
    hint_rows: Count = setting(4, "hints: at most this many right completions with hints replace rows of such a group.")
    prompt_share: Annotated[float, Range(0, 1, open_low=True)] = setting(
        1.0,
        "Keep this share of a rollout's prompts: those whose rewards differ, then the solved, then the unsolved with "
        "most steps.",
    )
    reward_temperature: Annotated[float, POSITIVE] = setting(
        0.04, "dmpo: what divides the rewards in the softmax of its advantages."
    )
    eubo_beta: Annotated[float, POSITIVE] = setting(1.5, "spg, stable_drl: the exponent of the upper bound.")
    eubo_share: Annotated[float, SHARE] = setting(
        0.5, "spg, stable_drl: the upper bound's share where the advantage is < 0."
    )
    ratio_cap: Annotated[float, POSITIVE] = setting(5.0, "stable_drl: largest probability ratio of a completion.")
    nll_weight: Amount = setting(0.1, "clipped_views_nll: weight of -log p of right completions.")
    sampling_weight_cap: Annotated[float | None, POSITIVE | None] = setting(
        None, "Truncated importance sampling: largest weight of a token (trained probability / sampling probability)."
    )
    p_mask_prompt: Annotated[float, BELOW_ONE] = setting(0.15, "Probability that a prompt token is masked.")
    random_masking: bool = setting(True, "A fresh prompt mask for each update; false: one mask for all of them.")
    protect_special_tokens: bool = setting(False, "Never mask the chat template's special tokens in the prompt.")
    mask_id: Annotated[int | None, NATURAL | None] = setting(None, "Id of the mask token; the tokenizer's if unset.")

    # d1's objective and optimizer
    learning_rate: Amount = setting(3e-6, "Peak learning rate.")
    num_generations: Annotated[int | None, Range(2, integer=True)] = setting(6, "Completions per prompt (the group).")
    num_iterations: Count = setting(12, "mu: updates on each rollout.")
    num_mini_batches: Count = setting(
        1, "Parts of a rollout, each with its own optimizer step; steps_per_generation is that many accumulations."
    )
    max_completion_length: Annotated[int | None, COUNT] = setting(
        None,
        "Length of the canvas in tokens; by default max_new_tokens of the model's generation_config.json, or "
        f"{CANVAS['max_completion_length']}, or less if a model has no room.",
    )
    temperature: Amount = setting(0.9, "Gumbel temperature of the rollout.")
    top_k: int = setting(0, "Sample among the k most likely tokens; 0: all.")
    top_p: float = setting(1.0, "Sample among the most likely tokens whose probabilities add up to this.")
    lr_scheduler_type: str = setting(  # type: ignore[assignment]
        "constant_with_warmup", "Schedule of the learning rate; another one has no warm-up unless it is given."
    )
    warmup_steps: float = setting(0.0001, "Steps of warm-up; below 1, a share of all steps.")
    weight_decay: float = setting(0.1, "Weight decay of AdamW.")
    adam_beta2: float = setting(0.99, "AdamW's second beta.")
    max_grad_norm: float = setting(0.2, "Largest norm of the gradient; 0: no limit.")
    beta: Amount = setting(0.04, "Weight of the KL term to the reference model.")
    epsilon: Amount = setting(0.5, "Clipping range of the probability ratio.")
    loss_type: str = setting("bnpo", "How token losses are averaged; d1's is TRL's 'bnpo'.")
    scale_rewards: str = setting("none", "d1 does not divide advantages by the group's std.")
    use_bias_correction_kl: bool = setting(False, "Importance-weight the KL term; d1: no.")
    bf16: bool | None = setting(None, "bf16 mixed precision; by default on if there is a GPU, or as in SFT on a CPU.")
    ddp_find_unused_parameters: bool | None = setting(False, "Not needed: every trained weight is part of every loss.")
    logging_nan_inf_filter: bool = setting(False, "Not needed: a loss that is not finite ends the run.")
    disable_dropout: bool = setting(True, "Turn dropout off, so that the first probability ratio of a rollout is 1.")
    num_completions_to_print: int | None = setting(
        4, "log_completions: completions of a rollout to print; none: all. The files in completions/ have all."
    )
    router_aux_loss_coef: Annotated[float | None, AMOUNT | None] = setting(0.0, "Load balancing; only 0 is supported.")
    # None stands for a number that `resolve_batch_sizes` sets.
    per_device_train_batch_size: int = setting(  # type: ignore[assignment]
        None, "Completions per device and micro-batch; unset: 8, or num_generations where 8 make no whole groups."
    )
    per_device_eval_batch_size: int = setting(None, "The same in evaluations.")  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_unsupported(self, UNSUPPORTED)  # before TRL sets some of them
        for name in ("kv_cache", "reveal"):  # a flag cannot be None
            if getattr(self, name) == "none":
                setattr(self, name, None)
        self.output_dir: str | None = self.output_dir or OUTPUT_DIR
        self.resolve_mini_batches()
        self.resolve_batch_sizes()
        self.canvas_is_unset = self.max_completion_length is None
        self.blocks_before = self.block_length, self.first_token
        self.settled_blocks: tuple[int | None, str | None] | None = None  # of a model, in place of `blocks_before`
        self.step_per_token = self.diffusion_steps is None
        if self.max_completion_length is None:
            self.max_completion_length = CANVAS["max_completion_length"]
        if self.diffusion_steps is None:
            self.diffusion_steps = self.max_completion_length
        check_ranges(vars(self), INHERITED | ranges_of(type(self)))  # before TRL divides by some of them
        self.bf16_is_unset = self.bf16 is None
        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available()
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # else torch warns that it cannot
        self.check_groups()
        for part in ("", "_kwargs"):  # Transformers warns of the old names, of which TRL sets the first
            if getattr(self, f"{RECOMPUTE}{part}") is None:
                setattr(self, f"{RECOMPUTE}{part}", getattr(self, f"gradient_checkpointing{part}"))
        try:
            super().__post_init__()
        except ValueError as error:
            if "assign use_cpu" not in str(error):
                raise
            raise ValueError(
                "these settings are for a GPU (bf16), and PyTorch finds none on this machine: check `nvidia-smi`, or "
                "train a small model on the CPU with --use_cpu true, in float32 with --bf16 false --dtype float32"
            ) from error
        check_settings(self)
        try_entries(self)

    def to_dict(self) -> dict[str, Any]:
        """That of Transformers, which takes every setting whose name ends in _token for a secret and hides it."""
        return {**super().to_dict(), "first_token": self.first_token}

    def group_and_batches(self, evaluates: bool) -> tuple[int | None, int]:
        """Completions per prompt, None where nothing is evaluated; and batches in a rollout, over all processes."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if not evaluates:
            return self.num_generations, processes * (self.steps_per_generation or self.gradient_accumulation_steps)
        eval_strategy = getattr(self.eval_strategy, "value", self.eval_strategy)
        if eval_strategy == "no":
            return None, processes
        return self.num_generations_eval or self.num_generations, processes

    def resolve_mini_batches(self) -> None:
        """Sets `steps_per_generation` to `num_mini_batches` times the accumulation, or, if it is given, the number of
        mini-batches to what follows from it. Raises ValueError if both are given and differ."""
        accumulation, parts = self.gradient_accumulation_steps, self.num_mini_batches
        inherited: Any = self  # whose fields of TRL have no types
        steps = inherited.steps_per_generation
        numbers = [accumulation, parts]
        if steps is not None:
            numbers.append(steps)
        if not all(isinstance(number, int) and number > 0 for number in numbers):  # their ranges are checked later
            return
        if steps is None:
            if parts > 1:
                inherited.steps_per_generation = parts * accumulation
            return
        from_steps = max(1, steps // accumulation)
        if parts != from_steps and set_by_user(self, "num_mini_batches"):
            raise ValueError(
                f"--num_mini_batches {parts} x --gradient_accumulation_steps {accumulation} is not "
                f"--steps_per_generation {steps}: give one of them"
            )
        self.num_mini_batches = from_steps

    def resolve_batch_sizes(self) -> None:
        """Sets the batch sizes that are not given, so that they make whole groups."""
        for name, evaluates in BATCHES.items():
            if getattr(self, name) is not None:
                continue
            group, batches = self.group_and_batches(evaluates)
            size = TRAINERS_BATCH
            if group and TRAINERS_BATCH * batches % group:
                size = group
            setattr(self, name, size)

    def check_groups(self) -> None:
        """Raises ValueError if a rollout is no whole number of groups."""
        method = find_method(self.method)
        values = {"num_generations": DiffuGRPOConfig.num_generations, **method.scale, **method.values}
        default_group = values["num_generations"]
        for name, evaluates in BATCHES.items():
            (group, batches), size = self.group_and_batches(evaluates), getattr(self, name)
            if group and size * batches % group:
                of_group, default = "num_generations", ""
                if evaluates and self.num_generations_eval:
                    of_group = "num_generations_eval"
                elif group == default_group:
                    default = f", the default of method {self.method}"
                times = f" x {batches} batches of a rollout" if batches > 1 else ""
                raise ValueError(f"--{name} {size}{times} must be divisible by {of_group} {group}{default}")

    @property
    def drops_prompts(self) -> bool:
        """Whether some prompts leave the loss, by what their completions are like."""
        return self.right_share is not None or self.min_speed_spread > 0

    @property
    def reads_old_logps(self) -> bool:
        """Whether the loss compares the policy with the one that sampled, as the objective or the penalty says."""
        return OBJECTIVES[self.objective].reads_old or (self.beta != 0.0 and PENALTIES[self.kl].to == "old")

    @property
    def needs_old_logps(self) -> bool:
        """True if the loss reads old log-probs and some update follows the first optimizer step; before it, they equal
        the policy's own."""
        return self.reads_old_logps and not self.is_on_policy

    @property
    def is_on_policy(self) -> bool:
        """Whether all updates on a rollout are in one optimizer step, by the policy that sampled it: every ratio is 1.
        An update has `steps_per_generation` micro-batches, an optimizer step `gradient_accumulation_steps`."""
        return (
            not self.old_as_sampled
            and self.gradient_accumulation_steps % (int(self.steps_per_generation or 1) * self.num_iterations) == 0
        )

    @property
    def old_as_sampled(self) -> bool:
        """Whether old log-probs are those that the sampler noted, because an older policy sampled
        (`rollout_staleness`). Otherwise they are scored before the first update."""
        exact = ESTIMATORS[self.estimator].as_sampled(self.view_settings())
        return bool(self.rollout_staleness and exact and self.reads_old_logps and self.sampling_weight_cap is None)

    @property
    def loss_reads_reference(self) -> bool:
        """Whether the loss reads log-probs of a reference model."""
        return self.beta != 0.0 and PENALTIES[self.kl].to == "reference"

    @property
    def needs_reference(self) -> bool:
        """Whether the run has a reference model: for the loss or for the advantages."""
        return self.loss_reads_reference or "reference" in ADVANTAGES[self.advantage].reads

    @property
    def has_trls_kl(self) -> bool:
        """Whether the KL term, if there is one, is TRL's own; TRL then logs its metrics."""
        return OBJECTIVES[self.objective].own_kl == self.kl

    def check_method(self) -> None:
        """Raises ValueError if `method` was assigned after the config was made, whose values are another method's."""
        if self.method != self.method_of_values:
            raise ValueError(
                f"method was set to {self.method} after the values of {self.method_of_values} were filled in: make a "
                f"new DiffuGRPOConfig(method={self.method!r})"
            )

    def sampling_settings(self, model_config: Any = None) -> SamplingSettings:
        """How rollouts are sampled; `block_length`, if unset, becomes that of the given model. Raises ValueError for
        settings that contradict each other, or that the model cannot sample with."""
        if model_config is not None and self.settled_blocks == (self.block_length, self.first_token):
            self.block_length, self.first_token = self.blocks_before  # an earlier model's blocks were no choice
        settings = SamplingSettings.from_attributes(
            self,
            model_config,
            gen_length="max_completion_length",
            steps="diffusion_steps",
            record_as_sampled="score_as_sampled",
        )
        if self.block_length is None and block_size(model_config) is None:
            settings = replace(settings, block_length=equal_blocks(settings.gen_length))
        settled = self.block_length is not None or model_config is not None
        if settled:
            settings.require_whole_blocks("max_completion_length")
        if model_config is not None:
            check_sampler(settings, model_config)
            self.blocks_before = self.block_length, self.first_token
            self.block_length, self.first_token = settings.block_length, settings.first_token
            self.settled_blocks = self.block_length, self.first_token
        return settings

    def resolve_canvas(self, model_config: Any, default_gen_length: int | None = None) -> None:
        """Sets the length of a canvas that nobody gave: `default_gen_length`, which the model's folder names, or else
        the default if the model has room for it, or else the blocks that fit after prompts of `max_prompt_length`
        tokens. Steps that nobody gave follow."""
        if not self.canvas_is_unset:
            return
        room, default = max_positions(model_config), int(self.max_completion_length or 0)
        block = self.block_length or block_size(model_config) or BLOCK_LENGTH
        length, why = default, ""
        if default_gen_length is not None:
            length, why = default_gen_length, "max_new_tokens of the model's generation_config.json"
        elif room is not None and room <= default:
            length = (room - self.max_prompt_length) // block * block
            why = (
                f"after {self.max_prompt_length} tokens of a prompt (max_prompt_length), the model's {room} positions "
                f"have no room for the default of {default}"
            )
        if length <= 0 or length == default:
            return
        self.max_completion_length = length
        if self.step_per_token:
            self.diffusion_steps = length
        elif self.diffusion_steps == default_steps(default, block):
            self.diffusion_steps = default_steps(length, block)
        logger.warning("max_completion_length is %d and diffusion_steps %d: %s.", length, self.diffusion_steps, why)

    @property
    def views_per_draw(self) -> int:
        """`Estimator.views_per_draw` with these settings."""
        return ESTIMATORS[self.estimator].views_per_draw(self.view_settings())

    def turn_settings(self, config: Any) -> TurnSettings:
        """The limits of an episode with tools, for a model of this config."""
        return TurnSettings.from_attributes(self, int(self.max_completion_length or 0), config)

    def view_settings(self) -> ViewSettings:
        """The settings that estimators read."""
        sampling = self.sampling_settings()
        return ViewSettings(
            gen_length=sampling.gen_length,
            steps=sampling.max_passes(),
            block_length=sampling.block_length,
            p_mask_prompt=self.p_mask_prompt,
            num_views=self.num_views,
            antithetic=self.antithetic,
            stratified=self.stratified,
            segments=self.segments,
            segment_steps=self.segment_steps,
            draw_steps=self.draw_steps,
            mean_step=self.mean_step,
            branches=self.branches,
            sampling=sampling,
        )


def with_method(dataclass_init: Callable[..., None]) -> Callable[..., None]:
    """Wraps a dataclass's `__init__`: fields that are not given take the method's values."""

    @functools.wraps(dataclass_init)
    def init(self: Any, *args: Any, **given: Any) -> None:
        method = find_method(given.get("method", "d1"))
        check_names(method, DiffuGRPOConfig.__dataclass_fields__.keys() - {"method"})
        values = method.under(given) | given
        dataclass_init(self, *args, **values)
        self.method_of_values = self.method

    return init


# `dataclass` has written `__init__` by now.
DiffuGRPOConfig.__init__ = with_method(DiffuGRPOConfig.__init__)  # type: ignore[method-assign]


# --- The plan of a run ------------------------------------------------------------------------------------------------


def drawn_views(args: DiffuGRPOConfig, block: int | None) -> int:
    """Maximum number of views per row in one draw. A block-causal model scores one step of every block, of `block`
    tokens, in one view."""
    settings = args.view_settings()
    if block is not None:
        sampling = args.sampling_settings()
        schedules = [sampling.schedule(filled) for filled in range(block)]
        steps = max(len(filled) for schedule in schedules for filled in schedule) + sampling.post_steps
        settings = replace(settings, gen_length=block, steps=steps)
    return ESTIMATORS[args.estimator].views(settings)


def max_views(args: DiffuGRPOConfig, block: int | None) -> int:
    """Maximum number of views per row in an update: all that are drawn, or with `split_views` the update's share."""
    views = drawn_views(args, block)
    if args.split_views:
        views = -(-views // args.num_iterations)
    return views


def inactive_settings(args: DiffuGRPOConfig) -> tuple[str, ...]:
    """The settings that do nothing because each rollout has one optimizer step: the policy that is trained is always
    the one that sampled, and every ratio is 1."""
    if not args.is_on_policy:
        return ()
    inactive: tuple[str, ...] = ()
    if args.loss_type != "cispo":  # which also clips ratios of 1
        inactive += OBJECTIVES[args.objective].idle
    if args.beta and not args.has_trls_kl and PENALTIES[args.kl].to == "old":
        inactive += ("beta", "kl")
    return inactive


def count_rollouts(num_prompts: int, prompts_per_rollout: int) -> int:
    """Rollouts per epoch. Raises ValueError if there are too few prompts for one."""
    if num_prompts < prompts_per_rollout:
        raise ValueError(
            f"a rollout needs {prompts_per_rollout} prompts and there are {num_prompts}: lower "
            "per_device_train_batch_size or steps_per_generation (by default gradient_accumulation_steps), or add "
            "problems"
        )
    return num_prompts // prompts_per_rollout


def plan(args: DiffuGRPOConfig, num_prompts: int, block: int | None = None) -> dict[str, Any]:
    """The plan, name -> number, which the console shows; `block` is the tokens per block of a block-causal model.

    Passes are the maximum per row, over a rollout and all updates on it. There are fewer if a completion ends early, a
    parallel sampler reveals more tokens per step, or a view hides no scored token.

    Raises:
        ValueError: there are too few training problems for one rollout.
    """
    completions = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    rollout = args.per_device_train_batch_size * args.world_size * int(args.steps_per_generation or 1)
    cycle = int(args.steps_per_generation or 1) * args.num_iterations  # micro-steps that share one rollout
    rollouts_per_epoch = count_rollouts(num_prompts, rollout // int(args.num_generations or 1))
    steps_per_epoch = math.ceil(rollouts_per_epoch * cycle / args.gradient_accumulation_steps)
    steps = args.max_steps
    if steps <= 0:
        steps = math.ceil(args.num_train_epochs * steps_per_epoch)
    epochs, rest = divmod(steps, steps_per_epoch)  # the last step of an epoch may be short of micro-steps
    rollouts = epochs * rollouts_per_epoch + math.ceil(rest * args.gradient_accumulation_steps / cycle)
    views = max_views(args, block)
    numbers = {
        "processes": args.world_size,
        "prompts per optimizer step": completions / int(args.num_generations or 1),
        "completions per optimizer step": completions,
        "completions per rollout": rollout,
        "optimizer steps": steps,
        "rollouts": rollouts,
        "updates per rollout (mu)": args.num_iterations,
        "views per completion and update (maximum)": views,
    }
    for what, count in passes(args, views).items():
        numbers[f"passes per completion (maximum): {what}"] = count
    return numbers


def passes(args: DiffuGRPOConfig, views: float) -> dict[str, float]:
    """Passes per row, over a rollout and all updates on it: purpose -> number; `views` is per update."""
    objective, all_updates = OBJECTIVES[args.objective], args.num_iterations * views

    # Sampling, with two branches under guidance.
    sampling = args.sampling_settings().max_passes()
    if args.cfg_scale:
        sampling *= 2
    counts: dict[str, float] = {"sampling": sampling}
    if args.hints != "none":
        counts["sampling with hints"] = sampling

    # Before the updates. Views that every update shares are scored once; bounds have one draw, which is not divided
    # among the updates.
    drawn_anew = args.random_masking and ESTIMATORS[args.estimator].draws(args.view_settings())
    before = all_updates if drawn_anew or args.split_views else views
    bounds = all_updates if args.split_views else views
    if args.needs_old_logps and not args.old_as_sampled:
        counts["old log-probs"] = before
    if args.loss_reads_reference:
        counts["reference log-probs"] = before
    counts["bounds that advantages read"] = bounds * len(ADVANTAGES[args.advantage].reads)
    if objective.over_group:
        counts["weights of rows, before each later update"] = all_updates - views
    if args.hints != "none" and objective.reads_given:
        counts["entropies of given tokens"] = views
    if args.state_reward:
        counts["rewards of states"] = all_updates

    # In an update, the backward pass recomputes all views if they do not fit into one pass, and with gradient
    # checkpointing the layers.
    times = 1 + (views > args.views_at_once) + bool(args.gradient_checkpointing)
    counts["updates, forward"] = all_updates * times
    counts["updates, backward"] = all_updates

    # Of a completion with tools, each of its turns.
    turns = 1
    if args.tools:
        turns = args.max_turns or 2
    return {what: count * turns for what, count in counts.items() if count}
