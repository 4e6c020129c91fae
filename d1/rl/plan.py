"""The plan of a diffu-GRPO run: how many steps, rollouts, views and forward passes it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from d1.rl.config import DiffuGRPOConfig
from d1.rl.objectives import OBJECTIVES
from d1.rl.penalties import PENALTIES
from d1.scoring import ESTIMATORS


def drawn_views(args: DiffuGRPOConfig, block_size: int | None) -> int:
    """Maximum number of views per row in one draw. A block-causal model with blocks of `block_size` tokens scores one
    step of every block in one view."""
    settings = args.view_settings()
    if block_size is not None:
        sampling = args.sampling_settings()
        schedules = [sampling.schedule(filled) for filled in range(block_size)]
        steps = max(len(block) for schedule in schedules for block in schedule) + sampling.post_steps
        settings = replace(settings, gen_length=block_size, steps=steps)
    return ESTIMATORS[args.estimator].views(settings)


def most_views(args: DiffuGRPOConfig, block_size: int | None) -> int:
    """Maximum number of views per row in an update: all that are drawn, or with `split_views` the update's share."""
    return -(-drawn_views(args, block_size) // (args.num_iterations if args.split_views else 1))


def idle(args: DiffuGRPOConfig) -> tuple[str, ...]:
    """The settings that do nothing because each rollout has one optimizer step: the policy that is trained is always
    the one that sampled, and every ratio is 1."""
    if not args.is_on_policy:
        return ()
    to_old = args.beta and not args.has_trls_kl and PENALTIES[args.kl].to == "old"
    clip = OBJECTIVES[args.objective].idle if args.loss_type != "cispo" else ()  # cispo also clips ratios of 1
    return clip + (("beta", "kl") if to_old else ())


def plan(args: DiffuGRPOConfig, num_prompts: int, block_size: int | None = None) -> dict[str, Any]:
    """The plan, name -> number, which the console shows; `block_size` is that of a block-causal model.

    Passes are the maximum per row, over a rollout and all updates on it. There are fewer if a completion ends early, a
    parallel sampler reveals more tokens per step, or a view hides no scored token.

    Raises:
        ValueError: there are too few training problems for one rollout.
    """
    completions = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    rollout = args.per_device_train_batch_size * args.world_size * int(args.steps_per_generation or 1)
    cycle = int(args.steps_per_generation or 1) * args.num_iterations  # micro-steps that share one rollout
    groups = rollout // int(args.num_generations or 1)
    rollouts_an_epoch = num_prompts // groups
    if not rollouts_an_epoch:
        raise ValueError(
            f"a rollout needs {groups} prompts and there are {num_prompts}: lower per_device_train_batch_size or "
            "steps_per_generation (by default gradient_accumulation_steps), or add problems"
        )
    steps_an_epoch = math.ceil(rollouts_an_epoch * cycle / args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_an_epoch)
    epochs, rest = divmod(steps, steps_an_epoch)  # the last step of an epoch may be short of micro-steps
    rollouts = epochs * rollouts_an_epoch + math.ceil(rest * args.gradient_accumulation_steps / cycle)
    views = most_views(args, block_size)
    return {
        "processes": args.world_size,
        "prompts per optimizer step": completions / int(args.num_generations or 1),
        "completions per optimizer step": completions,
        "completions per rollout": rollout,
        "optimizer steps": steps,
        "rollouts": rollouts,
        "updates per rollout (mu)": args.num_iterations,
        "views per completion and update (maximum)": views,
        **{f"passes per completion (maximum): {what}": count for what, count in passes(args, views).items()},
    }


def passes(args: DiffuGRPOConfig, views: float) -> dict[str, float]:
    """Passes per row, over a rollout and all updates on it: purpose -> number; `views` is per update."""
    every = args.num_iterations * views
    # Views that every update shares are scored once.
    drawn_anew = args.random_masking and ESTIMATORS[args.estimator].draws(args.view_settings())
    before = every if drawn_anew or args.split_views else views
    # In an update, the backward pass recomputes all views if they do not fit into one pass, and with gradient
    # checkpointing the layers.
    times = 1 + (views > args.views_at_once) + bool(args.gradient_checkpointing)
    counts = {
        "sampling": args.sampling_settings().most_passes() * (2 if args.cfg_scale else 1),
        "old log-probs": before if args.needs_old_logps and not args.old_as_sampled else 0,
        "reference log-probs": before if args.needs_reference else 0,
        "weights of rows, before each later update": every - views if OBJECTIVES[args.objective].over_group else 0,
        "rewards of states": every if args.state_reward else 0,
        "updates, forward": every * times,
        "updates, backward": every,
    }
    return {what: count for what, count in counts.items() if count}
