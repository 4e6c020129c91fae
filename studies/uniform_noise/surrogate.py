"""The surrogate for the log-probability of a model with uniform noise, as a method file (`--method`).

The completion is corrupted once: t ~ U(.1, 1), and each token is replaced by a uniform id with probability t. The sum
of the log-probabilities of the clean tokens at the corrupted places stands for the log-probability of the completion
(Rhine-AI-Lab/diffusion-gemma-sft@26e764d, `num_mc` 1). It is no likelihood: neither the sampler's states nor its
temperatures occur, and the expected number of terms is .55 per token. All updates of a rollout draw anew, and old
log-probabilities are scored in the same draw.
"""

from __future__ import annotations

import torch

from d1.scoring import Estimator, Randomness, SampledRows, Views, ViewSettings
from pocket.tokenizer import build_tokenizer

LEAST_TIME = 0.1
VOCABULARY = len(build_tokenizer("sudoku"))


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """One view per row."""
    times = LEAST_TIME + (1 - LEAST_TIME) * random.uniform(1)
    corrupted = random.uniform(sampled.gen_length) < times
    noise = torch.stack([torch.randint(VOCABULARY, (sampled.gen_length,), generator=one) for one in random.rows])
    hidden = torch.zeros(len(times), 1, sampled.prompt_ids.shape[1] + sampled.gen_length, dtype=torch.bool)
    return Views(
        noise=hidden,
        weights=(corrupted & sampled.scored).float().unsqueeze(1),
        shown=torch.where(corrupted, noise, sampled.canvas_ids).unsqueeze(1),
    )


METHOD = {"estimator": "corrupted"}
ESTIMATORS = {"corrupted": Estimator(draw, uniform_noise=True, clean_prompt=True, settings=())}
