"""What a run of diffu-GRPO is about to do, in numbers."""

from __future__ import annotations

import math
from typing import Any

from diffu_grpo_config import DiffuGRPOConfig


def plan(args: DiffuGRPOConfig, num_prompts: int) -> dict[str, Any]:
    """The plan: name -> number, as the console shows it.

    Raises:
        ValueError: the training problems are too few for one rollout.
    """
    completions = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    rollout = args.per_device_train_batch_size * args.world_size * int(args.steps_per_generation or 1)
    cycle = int(args.steps_per_generation or 1) * args.num_iterations  # micro-steps that share one rollout
    groups = rollout // int(args.num_generations or 1)
    rollouts_an_epoch = num_prompts // groups
    if not rollouts_an_epoch:
        raise ValueError(
            f"a rollout takes {groups} prompts and there are {num_prompts}: lower per_device_train_batch_size or "
            "steps_per_generation (by default gradient_accumulation_steps), or add problems"
        )
    steps_an_epoch = math.ceil(rollouts_an_epoch * cycle / args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_an_epoch)
    epochs, rest = divmod(steps, steps_an_epoch)  # the last step of an epoch may be short of micro-steps
    rollouts = epochs * rollouts_an_epoch + math.ceil(rest * args.gradient_accumulation_steps / cycle)
    scored = args.num_iterations * (2 if args.beta else 1)
    return {
        "processes": args.world_size,
        "prompts an optimizer step": completions / int(args.num_generations or 1),
        "completions an optimizer step": completions,
        "completions a rollout": rollout,
        "optimizer steps": steps,
        "rollouts": rollouts,
        "forward passes a rollout (sampling + old and reference log-probs)": int(args.diffusion_steps or 0) + scored,
        "updates on each rollout (mu)": args.num_iterations,
    }
