"""The published RL methods, as values of the one trainer's settings. A method is four choices, and a row here:

- `estimator`: which views of a completion are scored, with which weights (`d1/scoring/estimators.py`);
- `objective` with its `loss_type` (`d1/rl/objectives.py`; `trl` is TRL's own loss);
- `kl`, what `beta` weighs (`d1/rl/objectives.py`);
- `advantage`, what becomes of TRL's (`d1/rl/objectives.py`).

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


def estimator(name: str, *, p_mask_prompt: float = 0.0, **values: Any) -> dict[str, Any]:
    return {"estimator": name, "p_mask_prompt": p_mask_prompt, **values}


def loss(objective: str, loss_type: str, mu: int, *, epsilon: float = 0.2, beta: float = 0.0, **values: Any) -> dict:
    own = {"objective": objective, "loss_type": loss_type, "num_iterations": mu, "epsilon": epsilon, "beta": beta}
    return own | values


def advantage(name: str, scale_rewards: str = "none") -> dict[str, Any]:
    return {"advantage": name, "scale_rewards": scale_rewards}


def scale(learning_rate: float, num_generations: int) -> dict[str, Any]:
    return {"learning_rate": learning_rate, "num_generations": num_generations}


AGRPO = D1 | loss("clipped_views", "sum", 1)
METHODS: dict[str, Method] = {
    "d1": Method("d1, arXiv 2504.12216", D1, scale(3e-06, 6)),
    "wd1": Method(
        "wd1, arXiv 2507.08838",
        D1 | loss("reinforce", "sum", 12, epsilon=0.5) | advantage("signed_softmax"),
        scale(3e-06, 6),
    ),
    "coupled-grpo": Method(
        "DiffuCoder, arXiv 2506.20639",
        D1 | estimator("coupled") | loss("trl", "bnpo", 2, epsilon=0.5, beta=0.01) | advantage("leave_one_out"),
        scale(1e-06, 8),
    ),
    "espo": Method(
        "ESPO, arXiv 2512.03759",
        D1
        | estimator("espo", num_views=2, antithetic=True, stratified=True)
        | loss("trl", "grpo", 8, importance_sampling_level="sequence", kl="k2_sequence", beta=0.001)
        | advantage("leave_one_out"),
        scale(3e-06, 6),
    ),
    "spg": Method(
        "SPG, arXiv 2510.09541",
        D1
        | estimator("spg", p_mask_prompt=0.15, num_views=2)
        | loss("spg", "dapo", 4, epsilon=0.5, eubo_beta=1.5, eubo_share=0.5),
        scale(3e-06, 6),
    ),
    "agrpo": Method(
        "AGRPO, arXiv 2510.04019, steps drawn uniformly",
        AGRPO | estimator("replay", num_views=24, draw_steps="uniform"),
        scale(5e-06, 8),
    ),
    "agrpo-entropy": Method(
        "AGRPO, arXiv 2510.04019, steps drawn by entropy",
        AGRPO | estimator("replay", num_views=24, draw_steps="entropy"),
        scale(5e-06, 8),
    ),
    "cj-grpo": Method(
        "CJ-GRPO, arXiv 2509.23924",
        D1 | estimator("replay") | loss("trl", "grpo", 12) | advantage("trl", "group"),
        scale(3e-06, 6),
    ),
    "d2": Method(
        "d2-StepMerge, arXiv 2509.21474",
        D1 | estimator("replay", segments=16, num_views=1) | loss("clipped_views", "grpo", 12, epsilon=0.5, beta=0.04),
        scale(3e-06, 6),
    ),
    "tracerl": Method(
        "TraceRL, arXiv 2509.06949",
        D1
        | estimator("replay", segment_steps=8)
        | loss("trl", "dapo", 1, kl="k3_to_old", beta=0.01, right_share=[0.2, 0.8])
        | advantage("trl", "group"),
        scale(1e-06, 8),
    ),
    "just-grpo": Method(
        "JustGRPO, arXiv 2601.15165",
        D1
        | estimator("left_to_right")
        | loss("trl", "dr_grpo", 1, block_length=1, diffusion_steps=None)
        | advantage("trl", "group"),
        scale(5e-06, 16),
    ),
    "unigrpo": Method(
        "UniGRPO, of MMaDA, arXiv 2505.15809",
        D1 | estimator("random_masks") | loss("clipped_views", "grpo", 4, beta=0.04) | advantage("trl", "group"),
    ),
    "bgpo": Method(
        "BGPO, arXiv 2510.11683",
        D1 | estimator("elbo", num_views=16, stratified=True) | loss("bgpo", "sum", 1) | advantage("trl", "group"),
        scale(5e-07, 8),
    ),
    "stable-drl": Method(
        "StableDRL, arXiv 2603.06743",
        D1
        | estimator("spg", p_mask_prompt=0.15, num_views=2)
        | loss("stable_drl", "sum", 2, epsilon=0.5, eubo_beta=1.5, eubo_share=0.5, ratio_cap=5.0),
        scale(2e-06, 16),
    ),
    "reinforce": Method(
        "the policy gradient of LLaDA's bound, Williams 1992, arXiv 2502.09992",
        D1 | estimator("elbo", num_views=4, antithetic=True, stratified=True) | loss("reinforce", "grpo", 1),
    ),
}
