"""Choose a run's source of rollouts: the one that samples, and its wrappers for trees, hints and state rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from d1 import extensions
from d1.rl.checks import check_trees
from d1.rl.sources import LocalRollouts, RolloutSource, require_continuing
from d1.sampling import SamplingSettings

if TYPE_CHECKING:
    from d1.rl.config import DiffuGRPOConfig


def rollout_source(
    args: DiffuGRPOConfig, rollout_func: Callable[..., Any] | None, config: Any, settings: SamplingSettings
) -> RolloutSource:
    """The source that the arguments of a trainer choose, for a model of this config and these settings of the sampler;
    it is not connected yet. Raises ValueError if they contradict each other."""
    source = sampling_source(args, rollout_func, config)
    if args.branches is not None:
        from d1.rl.tree import TreeRollouts

        require_continuing(source, settings, config, "--branches")
        check_trees(config)
        source = TreeRollouts(source, args.branches)
    if args.hints != "none":
        from d1.rl.hinted import HintedRollouts

        require_continuing(source, settings, config, f"--hints {args.hints}")
        source = HintedRollouts(source, args.hints, args.hint_rows)
    if args.state_reward:
        from d1.rl.state_rewards import StateRewards

        source = StateRewards(source, args.state_reward)
    return source


def sampling_source(args: DiffuGRPOConfig, rollout_func: Callable[..., Any] | None, config: Any) -> RolloutSource:
    """Who samples: the trainer, servers, or a user's function."""
    if rollout_func is not None and args.merged_rollouts:
        raise ValueError("--merged_rollouts true: a rollout_func samples, not the trainer: leave it out")
    if rollout_func is not None:
        return extensions.UserRollouts(rollout_func, args, config)
    if args.rollout_mode == "server":
        if args.rollout_staleness:
            return extensions.PrefetchedRollouts()
        return extensions.ServerRollouts()
    return LocalRollouts()
