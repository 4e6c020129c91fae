"""What becomes of TRL's advantages, which `advantage` names: functions (groups, completions of a prompt) -> the same.

TRL's are rewards less their group's mean, over `scale_rewards`. A new one is a function and a row of `ADVANTAGES`, here
or in a file of yours.
"""

from __future__ import annotations

from torch import Tensor

from d1.rl.rows import Advantage


def leave_one_out(advantages: Tensor) -> Tensor:
    """A reward less the mean of the others in its group (RLOO, arXiv 2402.14740)."""
    generations = advantages.shape[1]
    return advantages * generations / (generations - 1)


def signed_softmax(advantages: Tensor) -> Tensor:
    """softmax(A) - softmax(-A) over the group (wd1, arXiv 2507.08838, section 3), times its size: the loss is a mean
    over rows, and wd1's is a mean over groups of sums."""
    return (advantages.softmax(1) - (-advantages).softmax(1)) * advantages.shape[1]


def standardised(advantages: Tensor) -> Tensor:
    """Over the group's standard deviation, the one that divides by n and with nothing added; 0 where it is 0."""
    return (advantages / advantages.std(1, correction=0, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)


def floored(advantages: Tensor) -> Tensor:
    """Over the group's standard deviation, or 0.01 if that is larger (RLDF)."""
    return advantages / advantages.std(1, keepdim=True).clamp(min=0.01)


ADVANTAGES: dict[str, Advantage] = {
    "trl": Advantage(None, centred=False),
    "leave_one_out": Advantage(leave_one_out),
    "signed_softmax": Advantage(signed_softmax),
    "standardised": Advantage(standardised),
    "floored": Advantage(floored),
}
