"""TraceRL (arXiv 2509.06949): replay with eight steps merged into one view, and a KL to the policy that sampled.

    loss = -min(rho A, clip(rho) A): the mean over a view's tokens, then over views; A = (r - m) / s
    + beta k3 to old: the sum over a view's tokens, the mean over views

Release: Gen-Verse/dLLM-RL@10b4fd1: configs/rl_llada.yaml, train/rl_llada.py, reward/rl_reward.py. Differs: views are
divided among updates at random; one optimizer for the run. Left out: the value model, and the rule that a completion
within 5 tokens of the limit is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d1.rl.losses import Penalty, k3_of, require_logps
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import CONSTANT, canvas, method

if TYPE_CHECKING:
    from torch import Tensor

    from d1.rl.losses import LossInputs


def k3_to_old(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 to the policy that sampled: summed over a view's tokens, averaged over views (TraceRL, arXiv 2509.06949)."""
    per_token_RVT = k3_of(require_logps(inputs.view_old) - inputs.view_logps)
    return (per_token_RVT * inputs.scored).sum() / inputs.scoring_views


PENALTIES = {
    "k3_to_old": Penalty(k3_to_old, to="old", settings=(), by_view=True, weighs_views=False),
}


TRACERL: dict[str, Any] = dict(
    p_mask_prompt=0.0,
    scored_tokens="text",  # post_num 0: <|endoftext|> is not scored, <|eot_id|> is
    objective="clipped_views",
    loss_type="views",  # the mean over a view's tokens, then over views
    epsilon=0.2,  # eps
    kl="k3_to_old",  # use_kl_estimator_k3: summed over a view's tokens, averaged over views
    beta=0.01,
    advantage="standardised",  # (r - m) / s, where s divides by n
    num_iterations=4,  # optimizer steps per rollout; in the release, one per 256 views (2 x 128)
    split_views=True,  # each view is used once
    max_grad_norm=1.0,
)
RIGHT_SHARE = [0.2, 0.8]  # rl_reward.py: prompts with fewer or more correct completions are dropped
# rl_llada.yaml: num_response_per_task 8; its cosine with min_lr_scale 1.0 is constant
TRACERL_SCALE = dict(learning_rate=1e-06, num_generations=8, **CONSTANT)


METHOD = method(
    "TraceRL, arXiv 2509.06949",
    trained=Trained(256 / 64 / 8),  # 256 views per step, 64 per completion of 512 tokens; 32 prompts per rollout
    **TRACERL,
    estimator="replay",
    temperature=0.8,  # rl_llada.yaml
    segment_steps=8,  # shrink
    right_share=RIGHT_SHARE,
    scale=dict(**TRACERL_SCALE, **canvas(tokens=512, steps=512, block=32)),
    page=Page(
        paper="[2509.06949](https://arxiv.org/abs/2509.06949)",
        scores="replay, 8 steps per view; token ratio; k3 to old",
        release="Gen-Verse/dLLM-RL@10b4fd1",
        largest_difference="2e-07",
        differs=(
            "4 optimizer steps per rollout of 32 x 8, not one per 256 views; exact sampler and step maps; nothing "
            "scored after the first EOS; no value model, no rule on length"
        ),
    ),
)
