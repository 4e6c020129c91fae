"""Truncated importance weights between the policy that sampled and the one that is trained.

The two differ where a sampler takes shortcuts (a cache), and wherever an estimator scores a token in another state than
the one it was revealed in. Each token's part of the policy gradient is then weighted by how much likelier the trained
policy finds it, at most `cap` times: truncated importance sampling (Ionides 2008), TRL's `token_truncate` for rollouts
of another engine. The weights have no gradient, and a KL penalty is not weighted.
"""

from __future__ import annotations

from torch import Tensor

from d1.rl.rows import LossInputs


def where_scored(inputs: LossInputs) -> Tensor:
    """(rows, tokens) bool, the completion's tokens that some view scores."""
    return inputs.mask.bool() & (inputs.weights.sum(1) > 0)


def mean_logps(logps: Tensor, inputs: LossInputs) -> Tensor:
    """(rows, tokens) log-probs as means over the views that score a token, of `logps`, their sums over views with the
    views' weights."""
    return logps / inputs.weights.sum(1).where(where_scored(inputs), 1.0)


def truncated_weights(sampled: Tensor, old: Tensor, inputs: LossInputs, cap: float) -> Tensor:
    """(rows, tokens) min(exp(old - sampled), cap), and 1 where a token is not scored.

    Args:
        sampled: (rows, tokens) log-probs that the sampler recorded as it revealed the tokens.
        old: (rows, tokens) the estimator's log-probs in the views of the update at hand, under the policy before the
            first update on the rollout, so that weight times ratio is the policy at hand over the one that sampled, up
            to the cap. Of an objective without a ratio, under the policy at hand.
    """
    gap = mean_logps(old, inputs) - sampled
    return gap.masked_fill(~where_scored(inputs), 0.0).exp().clamp(max=cap)
