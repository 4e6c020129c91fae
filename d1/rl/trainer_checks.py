"""What `DiffuGRPOTrainer` refuses, and what it warns of, when it is made."""

from __future__ import annotations

import logging
from typing import Any

from d1.models.kinds import block_size
from d1.sampling import SamplingSettings

logger = logging.getLogger(__name__)


def refuse_tools(options: dict[str, Any]) -> None:
    """Raises ValueError for arguments of TRL's that sample in turns."""
    for name in ("tools", "rollout_func", "environment_factory"):
        if options.get(name):
            raise ValueError(f"{name} is not supported: diffusion rollouts are sampled as one canvas")


def check_trainer(trainer: Any) -> None:
    """Raises ValueError for settings that do not go with its rewards, or with how its processes share weights."""
    args = trainer.args
    warn_of_approximation(trainer.sampling)
    if args.right_share and not getattr(trainer.reward_funcs[-1], "only_watched", False):
        raise ValueError("right_share asks which completions are right: the last reward must be `accuracy_of(task)`")
    if args.sync_ref_model and trainer.weights_are_split:
        raise ValueError(
            "sync_ref_model keeps a reference that no folder holds, and under ZeRO-3 or FSDP a checkpoint cannot "
            "carry it: use DDP or ZeRO-2, or leave sync_ref_model off"
        )
    blocks = block_size(trainer.model.config)
    if trainer.samples_in_step and (trainer.sampling.rule or args.eos_stop or blocks):
        raise ValueError(
            "a parallel sampler, eos_stop and a block-causal model take as many forward passes as texts ask for, but "
            "processes that each hold a part of the weights must take equally many: use DDP, ZeRO-2, or ZeRO-3 with "
            "ds3_gather_for_generation, or leave the first two off"
        )


def warn_of_approximation(settings: SamplingSettings) -> None:
    """Says where completions come from another distribution than any estimator scores."""
    means = [name for name, used in (("a cache", settings.cache), ("guidance", settings.cfg_scale)) if used]
    if means:
        logger.warning(
            "Completions are sampled with %s, so from another policy than the one that is trained: "
            "sampling/logp_difference_abs and sampling/ratio_max say how far it is.",
            " and ".join(means),
        )
