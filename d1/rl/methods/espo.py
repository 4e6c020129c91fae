"""ESPO (arXiv 2512.03759): GRPO with one ratio per completion, of bounds of the log-probability.

    rho = exp((B - old) / G); penalty (B - ref)^2 / (2 G); B: the any-order bound from exact counts of hidden tokens

Release: ML-GSAI/ESPO@b5f2dac: recipes/train.yaml, recipes/run_gsm8k_llada.sh, espo/espo_trainer.py.
Differs: the counts x of hidden tokens are spread evenly over all rows of the rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d1.rl.losses import Penalty, require_logps
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import canvas, method

if TYPE_CHECKING:
    from torch import Tensor

    from d1.rl.losses import LossInputs


def k2_sequence(inputs: LossInputs, settings: Any) -> Tensor:
    """k2 of a completion's whole log-probability, divided by its length (ESPO, arXiv 2512.03759)."""
    log_d = ((require_logps(inputs.reference) - inputs.logps) * inputs.mask).sum(-1)
    return (log_d**2 / 2 / inputs.lengths).mean()


PENALTIES = {"k2_sequence": Penalty(k2_sequence, settings=(), per_row=True)}


# ESPO and GDSD: recipes/run_gsm8k_llada.sh, scripts/train_gdsd.yaml
ESPO_OPTIMIZER: dict[str, Any] = dict(weight_decay=0.01, warmup_steps=0.001)


METHOD = method(
    "ESPO, arXiv 2512.03759",
    trained=Trained(16, lora_r=128),  # in bf16; 8 GPUs x 3 x accumulation 4
    estimator="espo",  # x uniform on 0..G hidden, weight (G + 1) / (2 n x), and the complement
    p_mask_prompt=0.0,
    scored_tokens="canvas",
    loss_type="grpo",
    importance_sampling_level="sequence",  # exp((ELBO - old) / G)
    epsilon=0.2,  # train.yaml [0 on Countdown]
    kl="k2_sequence",  # (ELBO - ref)^2 / (2 G)
    beta=0.001,  # run_gsm8k_llada.sh [.003 on Countdown, .01 on Sudoku]
    advantage="leave_one_out",
    num_iterations=8,  # run_gsm8k_llada.sh NUM_ITER
    temperature=1.0,  # train.yaml generation_temperature
    num_views=2,  # run_gsm8k_llada.sh num_mc
    antithetic=True,  # train.yaml reduce_var
    stratified=True,
    # run_gsm8k_llada.sh [128 steps on Countdown and Sudoku]
    scale=dict(learning_rate=3e-06, num_generations=6, **ESPO_OPTIMIZER, **canvas(tokens=256, steps=256, block=32)),
    page=Page(
        paper="[2512.03759](https://arxiv.org/abs/2512.03759)",
        scores="ELBO, masks with complements; sequence ratio; k2",
        release="ML-GSAI/ESPO@b5f2dac",
        largest_difference="2e-07",
        differs="counts spread over all rows, the two of a row half a canvas apart",
    ),
)
