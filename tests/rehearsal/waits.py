"""Every allowed wait for the device: place, number and reason. Any other wait is an error.

The host waits if it learns a number, a tensor or a shape from the device, or if an upload returns only after it has
finished. No wait is inside a loop over steps, except that of a parallel sampler.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Wait(NamedTuple):
    place: str
    times: int
    per: str
    why: str


FINITE = "d1/sampling/loop.py Sampler.checked"
SAMPLING = [
    Wait(FINITE, 1, "rollout", "after the last pass: are all log-probs and entropies finite?"),
    Wait("d1/sampling/loop.py rollout_steps", 1, "rollout", "is there padding? attention is fastest without a mask"),
    Wait("d1/sampling/loop.py tokens_inside", 1, "rollout of blocks", "which rows' blocks begin and end together"),
    Wait("d1/sampling/loop.py Batch.finished", 1, "block", "under the EOS stop: which rows have ended and leave"),
    Wait(
        "d1/sampling/loop.py Sampler.step", 1, "parallel step", "which rows have more to reveal; is a step to follow?"
    ),
]
INFILL = [
    Wait(FINITE, 1, "fill", "after the last pass: are all log-probs and entropies finite?"),
    Wait("d1/sampling/infill.py fill_steps", 2, "fill", "what is hidden and what is padding, before the first pass"),
]
SCORING = [
    Wait("d1/models/attention.py padding_mask", 1, "scoring", "is there padding? attention is fastest without a mask"),
    Wait("d1/scoring/views.py score", 1, "scoring", "which views score which tokens, for all its passes"),
    Wait("d1/scoring/rollouts.py SampledRows.to", 1, "column", "views are drawn where the generators are"),
]
LOADING = "transformers/modeling_utils.py PreTrainedModel.to"  # weights are uploaded, once each, before a run
LOSSES = [
    Wait("d1/rl/losses.py share", 1, "loss with clipping", "the share of clipped ratios, for the log"),
    Wait("d1/rl/losses.py stable_drl", 1, "loss with a metric", "the largest weight, for the log"),
    Wait("d1/rl/losses.py rldf", 1, "loss with a metric", "the share of likely tokens, for the log"),
]
SFT = [
    Wait("d1/sft/trainer.py dLLMTrainer.row_losses", 1, "batch", "which tokens are hidden: the head is for these"),
    Wait("d1/runs/trainer.py RunTrainer.require_finite", 1, "batch", "a loss that is not finite ends the run"),
    Wait("d1/sft/trainer.py dLLMTrainer.log", 1, "log", "tokens, for the log"),
    Wait(
        "transformers/masking_utils.py _ignore_bidirectional_mask_sdpa",
        1,
        "batch of full attention",
        "is there padding?",
    ),
    Wait("accelerate/utils/operations.py send_to_device", 5, "batch", "uploads the batch, a column each"),
]
RL = [
    *SAMPLING,
    *SCORING,
    Wait("d1/rl/trainer.py total_compute", 1, "log", "tokens processed, for the log"),
    Wait("d1/rl/batch.py recorded", 1, "rollout", "passes, for the log"),
    Wait("d1/rl/batch.py texts_of", 1, "rollout", "the completions"),
    Wait("d1/runs/trainer.py RunTrainer.require_finite", 1, "batch", "a loss that is not finite"),
    Wait("d1/rl/bridge.py CanvasGRPOTrainer._calculate_rewards", 1, "rollout", "the rewards, made on the host"),
    Wait("d1/rl/batch.py updates_are_alike", 1, "rollout", "are equal views to be scored once?"),
    Wait("d1/rl/batch.py prompt_masked", 1, "rollout", "for the log"),
    Wait("d1/rl/batch.py sampling_gap", 2, "batch of a first update", "for the log"),
    Wait("d1/rl/batch.py largest_ratio", 1, "batch", "for the log"),
    Wait("d1/rl/batch.py mean_entropy", 1, "batch with a loss of ours", "for the log"),
    Wait("d1/rl/losses.py stable_drl", 1, "batch with a loss of ours", "for the log"),
]
# Waits in the libraries' own code, for their logs. Both trainers' settings turn off
# `logging_nan_inf_filter`, two waits a batch.
TRANSFORMERS = [
    Wait("transformers/trainer.py Trainer._inner_training_loop", 1, "run", "uploads the sum of losses, 0"),
    Wait("transformers/trainer.py Trainer._maybe_log_save_evaluate", 2, "step", "the loss and the gradient's norm"),
    Wait("transformers/trainer.py Trainer._finalize_training", 1, "run", "the sum of losses"),
]
TRL = [
    Wait(
        "trl/trainer/grpo_trainer.py GRPOTrainer._calculate_rewards",
        2,
        "rollout",
        "uploads rewards; is any row without?",
    ),
    Wait("trl/trainer/grpo_trainer.py GRPOTrainer._generate", 12, "rollout", "lengths of the completions, for the log"),
    Wait(
        "trl/trainer/grpo_trainer.py GRPOTrainer._generate_and_score_completions",
        15,
        "rollout",
        "uploads; rewards' log",
    ),
    Wait("trl/trainer/utils.py shuffle_sequence_dict.permute", 1, "shuffled column", "uploads the order of a shuffle"),
    Wait(
        "trl/trainer/grpo_trainer.py GRPOTrainer._compute_loss", 2, "batch with TRL's loss", "clip ratios, for the log"
    ),
    Wait(
        "trl/trainer/grpo_trainer.py GRPOTrainer._compute_loss.global_masked_mean",
        5,
        "batch with TRL's loss",
        "means, for the log",
    ),
    Wait("trl/trainer/utils.py nanmin", 2, "batch with TRL's loss", "the lowest clip ratio, for the log"),
    Wait("trl/trainer/utils.py nanmax", 2, "batch with TRL's loss", "the highest clip ratio, for the log"),
]


def expected(allowed: list[Wait], counts: dict[str, int]) -> Counter[str]:
    """The number of waits at each place, given the number of each unit by which waits are counted."""
    waits = Counter[str]()
    for wait in allowed:
        waits[wait.place] += wait.times * counts.get(wait.per, 0)
    return +waits


def places(allowed: list[Wait]) -> set[str]:
    return {wait.place for wait in allowed}
