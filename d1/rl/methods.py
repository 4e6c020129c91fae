"""The published RL methods, as settings of the trainer. A method is a row here, with a few choices:

- `estimator`: which views of a completion are scored, with which weights (`d1/scoring/estimators.py`);
- `scored_tokens`: which of its tokens count in the loss (`d1/rl/batch.py`);
- `objective` and its `loss_type`, the divisor (`d1/rl/losses.py`; `trl` is TRL's own loss);
- `kl`: the penalty that `beta` weighs (`d1/rl/losses.py`);
- `advantage`: how TRL's advantages are changed (`d1/rl/losses.py`);
- the number of updates per rollout, and the sampling temperature.

`--method NAME` sets all values of the row; `docs/methods.md` gives the source of each value. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        paper: the method's name and where it is published.
        values: the settings that define the method. With `--method` on the command line they override a config file.
        scale: the paper's settings that depend on the size of its models. A config file overrides them.
    """

    paper: str
    values: dict[str, Any]
    scale: dict[str, Any] = field(default_factory=dict)

    def under(self, given: dict[str, Any]) -> dict[str, Any]:
        """The method's settings: `given` overrides `scale`, and `values` override `given`. The canvas is one setting,
        because its length, steps and blocks must fit each other: if one of them is given, the others are d1's."""
        canvas = {**CANVAS, "max_completion_length": None} if CANVAS.keys() & given.keys() else {}
        return {**self.scale, **canvas, **given, **self.values}


CANVAS = {"max_completion_length": 256, "diffusion_steps": 128, "block_length": None}  # d1's
# d1's own values, the defaults. Every other row starts from them, so that no value of a method chosen before is kept.
D1: dict[str, Any] = {
    "estimator": "one_step",
    "p_mask_prompt": 0.15,
    "scored_tokens": "ended",
    "score_as_sampled": False,
    "objective": "trl",
    "loss_type": "bnpo",
    "importance_sampling_level": "token",
    "epsilon": 0.5,
    "kl": "k3",
    "beta": 0.04,
    "advantage": "trl",
    "scale_rewards": "none",
    "num_iterations": 12,
    "split_views": False,
    "temperature": 0.9,
    "top_k": 0,
    "top_p": 1.0,
    "remasking": "low_confidence",
    "max_grad_norm": 0.2,
}


def estimator(name: str, scored: str = "ended", *, p_mask_prompt: float = 0.0, **values: Any) -> dict[str, Any]:
    return {"estimator": name, "scored_tokens": scored, "p_mask_prompt": p_mask_prompt, **values}


def loss(objective: str, loss_type: str, *, epsilon: float = 0.2, beta: float = 0.0, **values: Any) -> dict[str, Any]:
    return {"objective": objective, "loss_type": loss_type, "epsilon": epsilon, "beta": beta, **values}


def advantage(name: str, scale_rewards: str = "none") -> dict[str, Any]:
    return {"advantage": name, "scale_rewards": scale_rewards}


def run(mu: int, temperature: float = 0.9, max_grad_norm: float = 0.2, **values: Any) -> dict[str, Any]:
    return {"num_iterations": mu, "temperature": temperature, "max_grad_norm": max_grad_norm, **values}


def scale(learning_rate: float, num_generations: int, **values: Any) -> dict[str, Any]:
    return {"learning_rate": learning_rate, "num_generations": num_generations, **values}


def canvas(tokens: int, steps: int, block: int) -> dict[str, int]:
    return {"max_completion_length": tokens, "diffusion_steps": steps, "block_length": block}


FULL = {"weight_decay": 0.0, "lr_scheduler_type": "constant"}
DARE = {"weight_decay": 0.01, "lr_scheduler_type": "constant"}  # values of the framework DARE
Z, GROUP = advantage("trl", "group"), advantage("standardised")
MEAN_STEP = estimator("replay", "steps", num_views=24, mean_step=True) | loss("clipped_views", "sum")
AGRPO = D1 | MEAN_STEP | run(1, 0.6, 1.0, top_p=0.99, top_k=150, remasking="random", score_as_sampled=True)
AGRPO_SCALE = scale(5e-06, 8, weight_decay=0.01, lr_scheduler_type="cosine", warmup_steps=0.01) | canvas(384, 128, 12)
TRACERL = loss("clipped_views", "views", kl="k3_to_old", beta=0.01, right_share=[0.2, 0.8]) | GROUP
TRACERL |= run(4, 0.8, 1.0, split_views=True)
THRESHOLD = {"sampler": "parallel", "reveal": "threshold", "reveal_level": 0.9}
EGSPO = D1 | estimator("replay", "canvas", num_views=8, draw_steps="top") | run(4, split_views=True)
EGSPO |= loss("clipped_steps", "views", epsilon_high=0.5, kl="k3_steps", beta=0.04)
BOUNDS = {"eubo_beta": 1.5, "eubo_share": 0.5}

METHODS: dict[str, Method] = {
    "d1": Method("d1, arXiv 2504.12216", D1, scale(3e-06, 6)),
    "wd1": Method(
        "wd1, arXiv 2507.08838",
        D1 | loss("reinforce", "sum", epsilon=0.5) | advantage("signed_softmax"),
        scale(3e-06, 6),
    ),
    "coupled-grpo": Method(
        "DiffuCoder, arXiv 2506.20639",
        D1
        | estimator("coupled")
        | loss("trl", "bnpo", epsilon=0.5, beta=0.01)
        | advantage("leave_one_out")
        | run(2, 1.0, top_p=0.95, remasking="entropy"),
        scale(1e-06, 10, lr_scheduler_type="cosine") | canvas(256, 256, 256),
    ),
    "espo": Method(
        "ESPO, arXiv 2512.03759",
        D1
        | estimator("espo", "canvas", num_views=2, antithetic=True, stratified=True)
        | loss("trl", "grpo", importance_sampling_level="sequence", kl="k2_sequence", beta=0.001)
        | advantage("leave_one_out")
        | run(8, 1.0),
        scale(3e-06, 6, weight_decay=0.01) | canvas(256, 256, 32),
    ),
    "spg": Method(
        "SPG, arXiv 2510.09541",
        D1 | estimator("spg", p_mask_prompt=0.15, num_views=2) | loss("spg", "dapo", epsilon=0.5, **BOUNDS) | run(4),
        scale(3e-06, 6),
    ),
    "agrpo": Method("AGRPO, arXiv 2510.04019, steps drawn uniformly", AGRPO | {"draw_steps": "uniform"}, AGRPO_SCALE),
    "agrpo-entropy": Method(
        "AGRPO, arXiv 2510.04019, steps drawn by entropy, as released", AGRPO | {"draw_steps": "entropy"}, AGRPO_SCALE
    ),
    "cj-grpo": Method(
        "CJ-GRPO, arXiv 2509.23924, as in DARE",
        D1 | estimator("replay", "canvas") | loss("clipped_views", "views", delta=3.0) | Z | run(1, 0.6, 1.0),
        scale(5e-07, 8, **DARE) | canvas(256, 128, 32),
    ),
    "d2": Method(
        "d2-StepMerge, arXiv 2509.21474",
        D1
        | estimator("segments", p_mask_prompt=0.15, segments=16)
        | loss("clipped_views", "bnpo", epsilon=0.5, beta=0.04)
        | run(8, 0.3),
        scale(3e-06, 6) | canvas(128, 64, 32),
    ),
    "tracerl": Method(
        "TraceRL, arXiv 2509.06949",
        D1 | estimator("replay", "text", segment_steps=8) | TRACERL,
        scale(1e-06, 8, **FULL) | canvas(512, 512, 32),
    ),
    "just-grpo": Method(
        "JustGRPO, arXiv 2601.15165",
        D1
        | estimator("left_to_right", "canvas")
        | loss("clipped_views", "active", block_length=1, diffusion_steps=None)
        | Z
        | run(1, 1.0, 1.0),
        scale(5e-06, 16, **FULL),
    ),
    "unigrpo": Method(
        "UniGRPO, of MMaDA, arXiv 2505.15809",
        D1 | estimator("random_masks", "text", num_views=35) | TRACERL,
        scale(1e-06, 8, **FULL) | canvas(512, 512, 32),
    ),
    "bgpo": Method(
        "BGPO, arXiv 2510.11683, as in DARE",
        D1
        | estimator("counts", "canvas", num_views=16, stratified=True)
        | loss("bgpo", "sum", delta=3.0)
        | Z
        | run(1, 0.6, 1.0),
        scale(5e-07, 8, **DARE) | canvas(512, 256, 32),
    ),
    "stable-drl": Method(
        "StableDRL, arXiv 2603.06743",
        D1
        | estimator("spg", p_mask_prompt=0.15, num_views=2)
        | loss("stable_drl", "sum", epsilon=0.5, ratio_cap=5.0, **BOUNDS)
        | run(2),
        scale(1e-06, 16, lr_scheduler_type="linear"),
    ),
    "egspo": Method("EGSPO, arXiv 2603.12554", EGSPO, scale(3e-05, 8)),
    "egspo-sa": Method(
        "EGSPO with stepwise advantages, arXiv 2603.12554", EGSPO | {"state_reward": 0.5}, scale(3e-05, 8)
    ),
    "gdpo": Method(
        "GDPO, arXiv 2510.08554",
        D1 | estimator("gauss") | loss("trl", "grpo", epsilon=0.5, importance_sampling_level="sequence") | run(12),
        scale(3e-07, 6),
    ),
    "gdsd": Method(
        "GDSD, arXiv 2605.29398, as its code is written",
        D1
        | estimator("complements", "canvas", num_views=2, stratified=True)
        | loss("gdsd", "sum", epsilon=4e-4, kl="k2_draws", beta=0.001)
        | advantage("leave_one_out")
        | run(8, 1.0),
        scale(3e-06, 16, weight_decay=0.01) | canvas(256, 256, 32),
    ),
    "rldf": Method(
        "RLDF, of ant-research/Drift",
        D1
        | estimator("states", num_views=4)
        | loss("rldf", "sum", kl="k3_likely", beta=0.01)
        | advantage("floored")
        | run(1, 1.0, 1.0, **THRESHOLD),
        scale(1e-06, 4, **FULL) | canvas(256, 256, 32),
    ),
    "dipo": Method(
        "DiPO, of DiRL, for block-causal models",
        D1
        | estimator("replay")
        | loss("clipped_views", "bnpo", epsilon_high=0.28, beta=0.1, right_share=[1e-6, 1 - 1e-6])
        | GROUP
        | run(1, 1.0, 1.0, top_k=50),
        {"num_generations": 8},
    ),
    "ebpo": Method(
        "EBPO, of LLaDA2.1, for block-causal models, as in DARE",
        D1
        | estimator("counts", num_views=16, stratified=True)
        | loss("clipped_sequences", "sum")
        | Z
        | run(1, 0.6, 1.0),
        scale(5e-07, 8, **DARE),
    ),
    "trajectory": Method(
        "the sum over a trajectory's steps; AGRPO, arXiv 2510.04019, takes their mean",
        D1 | estimator("replay", num_views=24, draw_steps="entropy") | loss("clipped_views", "sum") | run(1),
        scale(5e-06, 8),
    ),
    "quick-replay": Method(
        "TraceRL's loss on the rollouts of RLDF; of this library, from studies/leaderboard",
        D1 | estimator("replay", "text", segment_steps=8, num_views=4) | TRACERL | THRESHOLD | {"temperature": 1.0},
        scale(1e-06, 8, **FULL) | canvas(256, 256, 32),
    ),
    "reinforce": Method(
        "the policy gradient of LLaDA's bound, Williams 1992, arXiv 2502.09992",
        D1 | estimator("elbo", num_views=4, antithetic=True, stratified=True) | loss("reinforce", "grpo") | run(1),
    ),
}
