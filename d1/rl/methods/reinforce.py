"""A reference method: the policy gradient (Williams 1992) of LLaDA's bound (arXiv 2502.09992).

loss = -A ELBO / L, without ratio, clip or KL
"""

from __future__ import annotations

from d1.rl.methods.shared import LINEAR, method

METHOD = method(
    "the policy gradient of LLaDA's bound, Williams 1992, arXiv 2502.09992",
    estimator="elbo",
    p_mask_prompt=0.0,
    objective="reinforce",
    loss_type="grpo",
    epsilon=0.2,  # not read: there is no ratio
    beta=0.0,
    num_iterations=1,
    num_views=4,  # with their complements, at stratified times
    antithetic=True,
    stratified=True,
    scale=LINEAR,
)
