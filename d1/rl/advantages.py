"""How TRL's advantages are changed; the setting `advantage` names one of these functions of (groups, completions per
prompt), which return the same shape.

TRL's advantages are rewards minus their group's mean, divided as `scale_rewards` says. A new advantage is a function
and a row of `ADVANTAGES`, here or in a file of yours.
"""

from __future__ import annotations

from torch import Tensor

from d1.rl.rows import Advantage


def leave_one_out(advantages: Tensor) -> Tensor:
    """A reward minus the mean of the other rewards in its group (RLOO, arXiv 2402.14740)."""
    generations = advantages.shape[1]
    return advantages * generations / (generations - 1)


def signed_softmax(advantages: Tensor) -> Tensor:
    """softmax(A) - softmax(-A) over the group (wd1, arXiv 2507.08838, section 3), times the group's size: wd1 sums over
    a group and averages over groups, and the loss here is a mean over rows."""
    return (advantages.softmax(1) - (-advantages).softmax(1)) * advantages.shape[1]


def standardised(advantages: Tensor) -> Tensor:
    """Advantages divided by the group's standard deviation (divisor n, no epsilon); 0 where the deviation is 0."""
    return (advantages / advantages.std(1, correction=0, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)


def floored(advantages: Tensor) -> Tensor:
    """Advantages divided by the group's standard deviation, or by 0.01 if that is larger (RLDF)."""
    return advantages / advantages.std(1, keepdim=True).clamp(min=0.01)


ADVANTAGES: dict[str, Advantage] = {
    "trl": Advantage(None, centred=False),
    "leave_one_out": Advantage(leave_one_out),
    "signed_softmax": Advantage(signed_softmax),
    "standardised": Advantage(standardised),
    "floored": Advantage(floored),
}
