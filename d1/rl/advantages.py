"""Advantages, by name: what becomes of TRL's, which are rewards less their group's mean, over `scale_rewards`.

`advantage: trl`, the default, leaves them as they are. A new one is a function and a row of `ADVANTAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


ADVANTAGES: dict[str, Advantage] = {
    "trl": Advantage(None, centred=False),
    "leave_one_out": Advantage(leave_one_out),
    "signed_softmax": Advantage(signed_softmax),
}


class Everyone(NamedTuple):
    """The rows of all processes.

    Attributes:
        gather: rows here -> rows of all.
        first: which of all the first row here is.
    """

    gather: Callable[[Tensor], Tensor]
    first: int


def reshaped(advantages: Tensor, name: str, group: int, everyone: Everyone) -> Tensor:
    """The advantages (rows,) that `name` makes of TRL's, in groups of `group` rows, which may span processes."""
    if ADVANTAGES[name].of is None or group == 1:
        return advantages
    return ADVANTAGES[name](everyone.gather(advantages).view(-1, group)).flatten()[everyone.first :][: len(advantages)]


def keep_prompts(batch: dict[str, Any], shares: Sequence[float], group: int, everyone: Everyone) -> float:
    """Takes prompts with fewer or more right completions than `shares` out of the loss; returns the share kept."""
    right = everyone.gather(batch["completion_is_right"]).view(-1, group).nanmean(1)
    kept = (right >= shares[0]) & (right <= shares[1])
    rows = kept.repeat_interleave(group)[everyone.first :][: len(batch["advantages"])]
    batch["completion_mask"] = batch["completion_mask"] * rows.unsqueeze(1)
    batch["num_items_in_batch"] = everyone.gather(batch["completion_mask"].sum()).sum()
    return kept.float().mean().item()
