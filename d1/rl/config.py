"""Settings of diffu-GRPO: TRL's GRPOConfig with d1's objective as defaults, plus what a diffusion model needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from trl import GRPOConfig

from d1.rl.advantages import ADVANTAGES
from d1.rl.choices import check_choices
from d1.rl.choose_method import check_names, find_method
from d1.rl.combinations import check_combination
from d1.rl.methods import METHODS, WITHOUT_REFERENCE
from d1.rl.objectives import OBJECTIVES, WITHOUT_OLD
from d1.rl.penalties import PENALTIES
from d1.runs.ranges import check_ranges
from d1.sampling.blocks import check_sampler
from d1.sampling.order import REMASKING
from d1.sampling.reveal import RULES
from d1.sampling.settings import CACHES, SAMPLERS, SamplingSettings
from d1.scoring import ESTIMATORS
from d1.scoring.replay import DRAW_STEPS
from d1.tasks import TASKS
from d1.tasks.protocols import PROTOCOLS


@dataclass
class DiffuGRPOConfig(GRPOConfig):
    """Arguments of `DiffuGRPOTrainer`. Defaults are d1's (arXiv 2504.12216, appendix), not TRL's, where they differ."""

    # What is trained, on what
    model_path: str | None = field(
        default=None,
        metadata={
            "aliases": ["--model_name"],
            "help": "Model to start from: a base or merged model, or the folder of an SFT adapter.",
        },
    )
    dataset: str = field(
        default="gsm8k",
        metadata={
            "aliases": ["--task"],
            "help": f"Task: {', '.join(TASKS)}, or the path of your own task file.",
        },
    )
    prompt_protocol: str = field(
        default="d1",
        metadata={"help": f"How problems are asked and answers rewarded: {', '.join(PROTOCOLS)}."},
    )
    data_file: str | None = field(
        default=None, metadata={"help": "Local json, jsonl, csv or parquet file to train on, in the task's schema."}
    )
    eval_data_file: str | None = field(
        default=None, metadata={"help": "Local file of validation problems, used when eval_strategy is not 'no'."}
    )
    eval_limit: int | None = field(default=None, metadata={"help": "Use only the first N validation problems."})

    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "aliases": ["--resume"],
            "nargs": "?",
            "const": "true",
            "help": "Continue from the last complete checkpoint (alone, or 'true'), or from the one in this folder.",
        },
    )
    report: bool = field(
        default=False, metadata={"help": "Write report.html at the end: curves, and completions before and after."}
    )

    max_compute_tokens: int | None = field(
        default=None, metadata={"help": "End the run at the first step with so many compute_tokens, or at max_steps."}
    )

    # Rollout
    max_prompt_length: int = field(default=200, metadata={"help": "Longest prompt in tokens; longer ones are refused."})
    truncate_prompts: bool = field(
        default=False, metadata={"help": "Cut the beginning off prompts longer than max_prompt_length instead."}
    )
    plain_chat_template: bool = field(
        default=False, metadata={"help": "Give a tokenizer without a chat template a plain one."}
    )
    block_length: int | None = field(
        default=None,
        metadata={"help": "Tokens a block; blocks are filled left to right. By default the model's own, or else 32."},
    )
    diffusion_steps: int | None = field(
        default=128, metadata={"help": "Forward passes a completion, spread over the blocks; one a token if unset."}
    )
    cfg_scale: float = field(default=0.0, metadata={"help": "Classifier-free guidance; 0 turns it off."})
    remasking: str = field(default="low_confidence", metadata={"help": f"One of {', '.join(REMASKING)}."})
    sampler: str = field(
        default="exact",
        metadata={"help": f"One of {', '.join(SAMPLERS)}; all but exact trade accuracy for speed."},
    )
    kv_cache: str | None = field(
        default=None, metadata={"help": f"What a cached sampler keeps: {', '.join(CACHES)} (dual if unset)."}
    )
    reveal: str | None = field(
        default=None, metadata={"help": f"A parallel sampler's rule: {', '.join(RULES)} (threshold if unset)."}
    )
    reveal_level: float | None = field(
        default=None, metadata={"help": f"The rule's level; if unset {', '.join(str(v) for _, v in RULES.values())}."}
    )
    eos_stop: bool | None = field(
        default=None,
        metadata={
            "help": "Leave out the blocks after a completion's EOS: less work, the same completions. Unset means on, "
            "save where processes must keep step."
        },
    )
    rollout_batch_size: int | None = field(
        default=None, metadata={"help": "Completions sampled at once on a device; the whole generation batch if unset."}
    )

    # Estimator and objective
    method: str = field(
        default="d1",
        metadata={
            "help": f"Sets the flags below as a published method has them: {', '.join(METHODS)}; or the path of your "
            "own file. Flags beside it win."
        },
    )
    estimator: str = field(
        default="one_step",
        metadata={"help": f"How log-probabilities are estimated: {', '.join(ESTIMATORS)}."},
    )
    num_views: int | None = field(
        default=None,
        metadata={"help": "Monte Carlo draws a row and update, for estimators that draw; replay scores all if unset."},
    )
    antithetic: bool = field(
        default=False, metadata={"help": "elbo: draws in pairs of opposite masks, which together hide every token."}
    )
    stratified: bool = field(
        default=False, metadata={"help": "elbo: the times of a row's draws lie one in each of equal parts of [0, 1)."}
    )
    segments: int | None = field(default=None, metadata={"help": "replay: merge a rollout's steps into this many."})
    segment_steps: int | None = field(default=None, metadata={"help": "replay: merge this many steps into one."})
    draw_steps: str = field(
        default="uniform", metadata={"help": f"replay with num_views: how steps are drawn: {', '.join(DRAW_STEPS)}."}
    )
    views_at_once: int = field(
        default=1, metadata={"help": "Views of a row in one forward pass: more take memory, and fill a fast device."}
    )
    objective: str = field(
        default="trl",
        metadata={"help": f"trl: TRL's loss_type and importance_sampling_level; or one of {', '.join(OBJECTIVES)}."},
    )
    kl: str = field(default="k3", metadata={"help": f"What beta weighs: {', '.join(PENALTIES)}."})
    advantage: str = field(
        default="trl", metadata={"help": f"trl: as scale_rewards says; or of that, {', '.join(ADVANTAGES)}."}
    )
    right_share: list[float] | None = field(
        default=None,
        metadata={"help": "Two shares: prompts with fewer or more right completions than these leave the loss."},
    )
    eubo_beta: float = field(default=1.5, metadata={"help": "spg: the exponent of its upper bound."})
    eubo_share: float = field(
        default=0.5, metadata={"help": "spg: the upper bound's share where the advantage is < 0."}
    )
    ratio_cap: float = field(default=5.0, metadata={"help": "stable_drl: the largest ratio of a completion."})
    sampling_weight_cap: float | None = field(
        default=None,
        metadata={
            "help": "Weight each token by how much likelier the trained policy finds it than the one that sampled, at "
            "most by this (truncated importance sampling); unset: no weights."
        },
    )
    p_mask_prompt: float = field(default=0.15, metadata={"help": "Probability that a prompt token is masked."})
    random_masking: bool = field(
        default=True, metadata={"help": "A fresh prompt mask for each inner update; false: one mask for all of them."}
    )
    protect_special_tokens: bool = field(
        default=False, metadata={"help": "Never mask the chat template's special tokens in the prompt."}
    )
    mask_id: int | None = field(default=None, metadata={"help": "Id of the mask token; the tokenizer's if unset."})

    # d1's objective and optimiser
    learning_rate: float = field(default=3e-6, metadata={"help": "Peak learning rate."})
    num_generations: int | None = field(default=6, metadata={"help": "Completions a prompt (the group)."})
    num_iterations: int = field(default=12, metadata={"help": "mu: optimiser passes over each rollout."})
    max_completion_length: int | None = field(default=256, metadata={"help": "Length of the canvas in tokens."})
    temperature: float = field(default=0.9, metadata={"help": "Gumbel temperature of the rollout."})
    beta: float = field(default=0.04, metadata={"help": "Weight of the KL term to the reference model."})
    epsilon: float = field(default=0.5, metadata={"help": "Clipping range of the probability ratio."})
    loss_type: str = field(default="bnpo", metadata={"help": "How token losses are averaged; d1's is TRL's 'bnpo'."})
    scale_rewards: str = field(default="none", metadata={"help": "d1 does not divide advantages by the group's std."})
    use_bias_correction_kl: bool = field(default=False, metadata={"help": "Importance-weight the KL term; d1: no."})
    bf16: bool | None = field(default=None, metadata={"help": "bf16 mixed precision; by default where there is a GPU."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every trained weight has a part in every loss; DDP need not look for others."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "A loss that is not finite ends the run; to look for it again would wait."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Without it the first ratio would not be 1."})
    router_aux_loss_coef: float | None = field(
        default=0.0, metadata={"help": "Of a mixture's load balancing; only 0: scores do not ask for router logits."}
    )

    def __post_init__(self) -> None:
        if self.diffusion_steps is None:
            self.diffusion_steps = self.max_completion_length
        check_ranges(vars(self))  # before TRL divides by some of them
        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available()
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # else torch warns that it cannot
        if self.generation_batch_size is not None:
            raise ValueError(
                "generation_batch_size means the completions of one rollout over all devices in TRL and those a device "
                "samples at once in d1. Use steps_per_generation for the first and rollout_batch_size for the second."
            )
        super().__post_init__()
        check_choices(self)
        self.sampling_settings()
        check_combination(self)

    @property
    def reads_old_logps(self) -> bool:
        """Whether the loss compares the policy with the one that sampled."""
        return self.objective not in WITHOUT_OLD or (self.beta != 0.0 and self.kl in WITHOUT_REFERENCE)

    @property
    def needs_old_logps(self) -> bool:
        """Whether it does, and updates come after the weights that sampled have changed: before, the ratio is 1."""
        cycle = int(self.steps_per_generation or 1) * self.num_iterations
        return self.reads_old_logps and self.gradient_accumulation_steps % cycle != 0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss asks for log-probs of a reference model."""
        return self.beta != 0.0 and self.kl not in WITHOUT_REFERENCE

    @property
    def has_trls_kl(self) -> bool:
        """Whether the KL term, if there is one, is TRL's own, of which TRL keeps the metrics."""
        return self.objective == "trl" and self.kl == "k3"

    def sampling_settings(self, model_config: Any = None) -> SamplingSettings:
        """How rollouts are sampled; of a given model its blocks become `block_length`, where none is set.

        Raises:
            ValueError: the settings make no sense, or the model cannot sample with them.
        """
        called = {"gen_length": "max_completion_length", "steps": "diffusion_steps"}
        settings = SamplingSettings.of(self, model_config, **called)
        settled = self.block_length is not None or model_config is not None
        if settled and settings.gen_length % settings.block_length:
            raise ValueError(
                f"max_completion_length ({settings.gen_length}) must be a multiple of block_length "
                f"({settings.block_length})"
            )
        if model_config is not None:
            check_sampler(settings, model_config)
            self.block_length = settings.block_length
        return settings


def with_method(fill: Callable[..., None]) -> Callable[..., None]:
    """A dataclass's `__init__` in which a method's values stand in for fields that are not given."""

    @functools.wraps(fill)
    def init(self: Any, *args: Any, **given: Any) -> None:
        method = find_method(given.get("method", "d1"))
        check_names(method, DiffuGRPOConfig.__dataclass_fields__.keys() - {"method"})
        fill(self, *args, **{**method.scale, **method.values, **given})

    return init


DiffuGRPOConfig.__init__ = with_method(DiffuGRPOConfig.__init__)  # type: ignore[method-assign]
