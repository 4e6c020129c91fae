"""wd1 (arXiv 2507.08838): the policy gradient, weighted by softmaxes of the advantages.

    loss = -sum over a group of [softmax(A) - softmax(-A)] l

Release: xiaohangt/wd1@0898985 wd1: train.yaml, trainers/rev_grpo_trainer.py, run/wll_NP_*.sh.
Differs: the softmax is over the group; in the release, over the rows of a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.rl.losses import Advantage
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import method

if TYPE_CHECKING:
    from torch import Tensor


def signed_softmax(advantages: Tensor) -> Tensor:
    """softmax(A) - softmax(-A) over the group (wd1, arXiv 2507.08838, section 3), times the group's size: wd1 sums over
    a group and averages over groups, and the loss here is a mean over rows."""
    return (advantages.softmax(1) - (-advantages).softmax(1)) * advantages.shape[1]


ADVANTAGES = {"signed_softmax": Advantage(signed_softmax, settings=())}


METHOD = method(
    "wd1, arXiv 2507.08838",
    trained=Trained(8, lora_r=128, in_4bit=True),  # d1's on 4 GPUs: run/wll_NP_gsm8k.sh
    objective="reinforce",  # section 3: no ratio, no clip, no KL
    loss_type="sum",
    beta=0.0,
    advantage="signed_softmax",  # section 3: softmax(A) - softmax(-A)
    scale=dict(learning_rate=3e-06, num_generations=6),  # train.yaml; mu 12 of d1 is NUM_ITER [8 on Sudoku],
    page=Page(
        paper="[2507.08838](https://arxiv.org/abs/2507.08838)",
        scores="as d1; softmax-weighted log p",
        release="xiaohangt/wd1@0898985",
        largest_difference="1e-06",
        differs="softmax over the group",
    ),
)
