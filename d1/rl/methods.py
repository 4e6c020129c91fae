"""The published RL methods, as values of the one trainer's settings. A method is four choices, and a row here:

- `estimator`: which views of a completion are scored, with which weights (`d1/scoring/estimators.py`);
- `objective` with its `loss_type` (`d1/rl/objectives.py`; `trl` is TRL's own loss);
- `kl`, what `beta` weighs (`d1/rl/penalties.py`);
- `advantage`, what becomes of TRL's (`d1/rl/advantages.py`).

`--method NAME` sets all that the row has; `docs/methods.md` says where each value comes from. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        paper: its name and where it is published.
        values: settings that make the method. Named on a command line, it puts them above those of a config file.
        scale: settings the paper gives that belong to the size of its models. A config file's own win.
    """

    paper: str
    values: dict[str, Any]
    scale: dict[str, Any] = field(default_factory=dict)


# d1's own, the defaults. Every other row says where it differs, so that choosing one leaves nothing of another.
D1: dict[str, Any] = {
    "estimator": "one_step",
    "p_mask_prompt": 0.15,
    "objective": "trl",
    "loss_type": "bnpo",
    "importance_sampling_level": "token",
    "epsilon": 0.5,
    "kl": "k3",
    "beta": 0.04,
    "advantage": "trl",
    "scale_rewards": "none",
    "num_iterations": 12,
}


def row(paper: str, scale: dict[str, Any] | None = None, /, **values: Any) -> Method:
    return Method(paper, D1 | values, scale or {})


def scale(learning_rate: float, num_generations: int) -> dict[str, Any]:
    return {"learning_rate": learning_rate, "num_generations": num_generations}


AGRPO: dict[str, Any] = {
    "estimator": "replay",
    "p_mask_prompt": 0.0,
    "objective": "clipped_views",
    "loss_type": "sum",
    "epsilon": 0.2,
    "beta": 0.0,
    "num_iterations": 1,
    "num_views": 24,
}
METHODS: dict[str, Method] = {
    "d1": row("d1, arXiv 2504.12216", scale(3e-06, 6)),
    "wd1": row(
        "wd1, arXiv 2507.08838",
        scale(3e-06, 6),
        objective="reinforce",
        loss_type="sum",
        beta=0.0,
        advantage="signed_softmax",
    ),
    "coupled-grpo": row(
        "DiffuCoder, arXiv 2506.20639",
        scale(1e-06, 8),
        estimator="coupled",
        p_mask_prompt=0.0,
        beta=0.01,
        advantage="leave_one_out",
        num_iterations=2,
    ),
    "espo": row(
        "ESPO, arXiv 2512.03759",
        scale(3e-06, 6),
        estimator="espo",
        p_mask_prompt=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=0.2,
        kl="k2_sequence",
        beta=0.001,
        advantage="leave_one_out",
        num_iterations=8,
        num_views=2,
        antithetic=True,
        stratified=True,
    ),
    "spg": row(
        "SPG, arXiv 2510.09541",
        scale(3e-06, 6),
        estimator="spg",
        objective="spg",
        loss_type="dapo",
        beta=0.0,
        num_iterations=4,
        num_views=2,
        eubo_beta=1.5,
        eubo_share=0.5,
    ),
    "agrpo": row("AGRPO, arXiv 2510.04019, steps drawn uniformly", scale(5e-06, 8), **AGRPO, draw_steps="uniform"),
    "agrpo-entropy": row(
        "AGRPO, arXiv 2510.04019, steps drawn by entropy", scale(5e-06, 8), **AGRPO, draw_steps="entropy"
    ),
    "cj-grpo": row(
        "CJ-GRPO, arXiv 2509.23924",
        scale(3e-06, 6),
        estimator="replay",
        p_mask_prompt=0.0,
        loss_type="grpo",
        epsilon=0.2,
        beta=0.0,
        scale_rewards="group",
    ),
    "d2": row(
        "d2-StepMerge, arXiv 2509.21474",
        scale(3e-06, 6),
        estimator="replay",
        p_mask_prompt=0.0,
        objective="clipped_views",
        loss_type="grpo",
        segments=16,
        num_views=1,
    ),
    "tracerl": row(
        "TraceRL, arXiv 2509.06949",
        scale(1e-06, 8),
        estimator="replay",
        p_mask_prompt=0.0,
        loss_type="dapo",
        epsilon=0.2,
        kl="k3_to_old",
        beta=0.01,
        scale_rewards="group",
        num_iterations=1,
        segment_steps=8,
        right_share=[0.2, 0.8],
    ),
    "just-grpo": row(
        "JustGRPO, arXiv 2601.15165",
        scale(5e-06, 16),
        estimator="left_to_right",
        p_mask_prompt=0.0,
        loss_type="dr_grpo",
        epsilon=0.2,
        beta=0.0,
        scale_rewards="group",
        num_iterations=1,
        block_length=1,
        diffusion_steps=None,
    ),
    "unigrpo": row(
        "UniGRPO, of MMaDA, arXiv 2505.15809",
        estimator="random_masks",
        p_mask_prompt=0.0,
        objective="clipped_views",
        loss_type="grpo",
        epsilon=0.2,
        scale_rewards="group",
        num_iterations=4,
    ),
    "bgpo": row(
        "BGPO, arXiv 2510.11683",
        scale(5e-07, 8),
        estimator="elbo",
        p_mask_prompt=0.0,
        objective="bgpo",
        loss_type="sum",
        epsilon=0.2,
        beta=0.0,
        scale_rewards="group",
        num_iterations=1,
        num_views=16,
        stratified=True,
    ),
    "stable-drl": row(
        "StableDRL, arXiv 2603.06743",
        scale(2e-06, 16),
        estimator="spg",
        objective="stable_drl",
        loss_type="sum",
        beta=0.0,
        num_iterations=2,
        num_views=2,
        eubo_beta=1.5,
        eubo_share=0.5,
        ratio_cap=5.0,
    ),
    "reinforce": row(
        "the policy gradient of LLaDA's bound, Williams 1992, arXiv 2502.09992",
        estimator="elbo",
        p_mask_prompt=0.0,
        objective="reinforce",
        loss_type="grpo",
        epsilon=0.2,
        beta=0.0,
        num_iterations=1,
        num_views=4,
        antithetic=True,
        stratified=True,
    ),
}
