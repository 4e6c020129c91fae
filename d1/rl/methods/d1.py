"""d1 (arXiv 2504.12216): GRPO with log-probabilities from one view, in which the whole canvas is hidden.

    loss = -min(rho A, clip(rho) A) + beta k3 per token, rho = exp(l - old); A = r - m; the mean over a micro-batch

Release: dllm-reasoning/d1@837888f diffu-grpo: slurm_scripts/train.yaml, diffu_grpo_trainer.py, diffu_grpo_config.py.
Differs: the prompt mask of a row depends on the update, not on the micro-step. All differences: docs/differences.md
"""

from __future__ import annotations

from typing import Any

from d1.rl.methods.entry import Method, Page, Trained

# These are the defaults, too. Every entry starts from them, so that no value of a method chosen before is kept.
D1: dict[str, Any] = {
    "estimator": "one_step",  # paper, section 3: one view in which the whole canvas is hidden
    "p_mask_prompt": 0.15,  # train.yaml
    "scored_tokens": "ended",
    "score_as_sampled": False,
    "objective": "trl",  # -min(rho A, clip(rho) A) with rho = exp(l - old) of each token
    "loss_type": "bnpo",  # diffu_grpo_trainer.py: the mean over the tokens of a micro-batch
    "importance_sampling_level": "token",
    "epsilon": 0.5,  # train.yaml
    "kl": "k3",  # to the reference, per token
    "beta": 0.04,  # train.yaml
    "advantage": "trl",
    "hints": "none",
    "scale_rewards": "none",  # A = r - m, where m is the group's mean
    "num_iterations": 12,  # train.yaml [8 on Countdown and Sudoku]
    "split_views": False,
    "temperature": 0.9,  # the default of diffu_grpo_config.py
    "top_k": 0,
    "top_p": 1.0,
    "remasking": "low_confidence",
    "max_grad_norm": 0.2,  # train.yaml
}
D1_OPTIMIZER: dict[str, Any] = {  # train.yaml
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 0.0001,  # a share of all steps
    "weight_decay": 0.1,
    "adam_beta2": 0.99,
}


# train.yaml: NF4; 8 GPUs x 6 completions x accumulation 2 = 16 prompts x 6
D1_TRAINED = Trained(16, lora_r=128, in_4bit=True)


METHOD = Method(
    "d1, arXiv 2504.12216",
    values=D1,
    scale=D1_OPTIMIZER | dict(learning_rate=3e-06, num_generations=6),  # train.yaml
    trained=D1_TRAINED,
    page=Page(
        paper="[2504.12216](https://arxiv.org/abs/2504.12216)",
        scores="one view, all hidden; token ratio; k3",
        release="dllm-reasoning/d1@837888f",
        largest_difference="1e-07",
        differs="prompt mask per update, not per micro-step ([all](differences.md))",
    ),
)
