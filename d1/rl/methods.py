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


METHODS: dict[str, Method] = {
    "d1": Method("d1, arXiv 2504.12216", D1, {"learning_rate": 3e-06, "num_generations": 6}),
    "wd1": Method(
        "wd1, arXiv 2507.08838",
        {
            **D1,
            "objective": "reinforce",
            "loss_type": "sum",
            "beta": 0.0,
            "advantage": "signed_softmax",
        },
        {"learning_rate": 3e-06, "num_generations": 6},
    ),
    "coupled-grpo": Method(
        "DiffuCoder, arXiv 2506.20639",
        {
            **D1,
            "estimator": "coupled",
            "p_mask_prompt": 0.0,
            "beta": 0.01,
            "advantage": "leave_one_out",
            "num_iterations": 2,
        },
        {"learning_rate": 1e-06, "num_generations": 8},
    ),
    "espo": Method(
        "ESPO, arXiv 2512.03759",
        {
            **D1,
            "estimator": "espo",
            "p_mask_prompt": 0.0,
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.2,
            "kl": "k2_sequence",
            "beta": 0.001,
            "advantage": "leave_one_out",
            "num_iterations": 8,
            "num_views": 2,
            "antithetic": True,
            "stratified": True,
        },
        {"learning_rate": 3e-06, "num_generations": 6},
    ),
    "spg": Method(
        "SPG, arXiv 2510.09541",
        {
            **D1,
            "estimator": "spg",
            "objective": "spg",
            "loss_type": "dapo",
            "beta": 0.0,
            "num_iterations": 4,
            "num_views": 2,
            "eubo_beta": 1.5,
            "eubo_share": 0.5,
        },
        {"learning_rate": 3e-06, "num_generations": 6},
    ),
    "agrpo": Method(
        "AGRPO, arXiv 2510.04019, steps drawn uniformly",
        {
            **D1,
            "estimator": "replay",
            "p_mask_prompt": 0.0,
            "objective": "clipped_views",
            "loss_type": "sum",
            "epsilon": 0.2,
            "beta": 0.0,
            "num_iterations": 1,
            "num_views": 24,
            "draw_steps": "uniform",
        },
        {"learning_rate": 5e-06, "num_generations": 8},
    ),
    "agrpo-entropy": Method(
        "AGRPO, arXiv 2510.04019, steps drawn by entropy",
        {
            **D1,
            "estimator": "replay",
            "p_mask_prompt": 0.0,
            "objective": "clipped_views",
            "loss_type": "sum",
            "epsilon": 0.2,
            "beta": 0.0,
            "num_iterations": 1,
            "num_views": 24,
            "draw_steps": "entropy",
        },
        {"learning_rate": 5e-06, "num_generations": 8},
    ),
    "cj-grpo": Method(
        "CJ-GRPO, arXiv 2509.23924",
        {
            **D1,
            "estimator": "replay",
            "p_mask_prompt": 0.0,
            "loss_type": "grpo",
            "epsilon": 0.2,
            "beta": 0.0,
            "scale_rewards": "group",
        },
        {"learning_rate": 3e-06, "num_generations": 6},
    ),
    "d2": Method(
        "d2-StepMerge, arXiv 2509.21474",
        {
            **D1,
            "estimator": "replay",
            "p_mask_prompt": 0.0,
            "objective": "clipped_views",
            "loss_type": "grpo",
            "segments": 16,
            "num_views": 1,
        },
        {"learning_rate": 3e-06, "num_generations": 6},
    ),
    "tracerl": Method(
        "TraceRL, arXiv 2509.06949",
        {
            **D1,
            "estimator": "replay",
            "p_mask_prompt": 0.0,
            "loss_type": "dapo",
            "epsilon": 0.2,
            "kl": "k3_to_old",
            "beta": 0.01,
            "scale_rewards": "group",
            "num_iterations": 1,
            "segment_steps": 8,
            "right_share": [0.2, 0.8],
        },
        {"learning_rate": 1e-06, "num_generations": 8},
    ),
    "just-grpo": Method(
        "JustGRPO, arXiv 2601.15165",
        {
            **D1,
            "estimator": "left_to_right",
            "p_mask_prompt": 0.0,
            "loss_type": "dr_grpo",
            "epsilon": 0.2,
            "beta": 0.0,
            "scale_rewards": "group",
            "num_iterations": 1,
            "block_length": 1,
            "diffusion_steps": None,
        },
        {"learning_rate": 5e-06, "num_generations": 16},
    ),
    "unigrpo": Method(
        "UniGRPO, of MMaDA, arXiv 2505.15809",
        {
            **D1,
            "estimator": "random_masks",
            "p_mask_prompt": 0.0,
            "objective": "clipped_views",
            "loss_type": "grpo",
            "epsilon": 0.2,
            "scale_rewards": "group",
            "num_iterations": 4,
        },
    ),
    "bgpo": Method(
        "BGPO, arXiv 2510.11683",
        {
            **D1,
            "estimator": "elbo",
            "p_mask_prompt": 0.0,
            "objective": "bgpo",
            "loss_type": "sum",
            "epsilon": 0.2,
            "beta": 0.0,
            "scale_rewards": "group",
            "num_iterations": 1,
            "num_views": 16,
            "stratified": True,
        },
        {"learning_rate": 5e-07, "num_generations": 8},
    ),
    "stable-drl": Method(
        "StableDRL, arXiv 2603.06743",
        {
            **D1,
            "estimator": "spg",
            "objective": "stable_drl",
            "loss_type": "sum",
            "beta": 0.0,
            "num_iterations": 2,
            "num_views": 2,
            "eubo_beta": 1.5,
            "eubo_share": 0.5,
            "ratio_cap": 5.0,
        },
        {"learning_rate": 2e-06, "num_generations": 16},
    ),
    "reinforce": Method(
        "the policy gradient of LLaDA's bound, Williams 1992, arXiv 2502.09992",
        {
            **D1,
            "estimator": "elbo",
            "p_mask_prompt": 0.0,
            "objective": "reinforce",
            "loss_type": "grpo",
            "epsilon": 0.2,
            "beta": 0.0,
            "num_iterations": 1,
            "num_views": 4,
            "antithetic": True,
            "stratified": True,
        },
    ),
}
