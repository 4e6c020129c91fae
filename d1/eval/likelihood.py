"""Log-likelihoods of given answers: LLaDA's lower bound of log p(answer | prompt), and whether it is the greedy answer.

For an answer of L tokens the bound is E[L / l x the sum of log p over the hidden tokens]. Here l is uniform on 1..L,
and l of the L tokens are hidden; the prompt never is (LLaDA, arXiv 2502.09992, equation 14 and appendix B.5). The bound
is estimated from `draws` masks. An answer of one token has only one mask, and the estimate is log p itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from d1.masking import keyed_generator
from d1.models.head import NotFiniteError, why_not_finite
from d1.models.kinds import block_size
from d1.sampling import SamplingSettings, rollout_steps
from d1.scoring import Views, score
from d1.scoring.rollouts import rotation

Pair = tuple[list[int], list[int]]  # the ids of a prompt and of an answer


def llada_views(length: int, draws: int, generator: Generator) -> Views:
    """The masks of one answer of `length` tokens, on a canvas of the same length: (1, views, length) each.

    The counts l of the draws are spread evenly, as in LLaDA's code. Equal masks become one view with the sum of their
    weights.
    """
    even = rotation(1, draws, torch.rand((), generator=generator, dtype=torch.float64))
    ranks = torch.rand(1, draws, length, generator=generator).argsort(dim=-1, stable=True).argsort(-1)
    counts = 1 + (even * length).long()
    drawn = (ranks < counts.unsqueeze(-1))[0]
    hidden, same = drawn.unique(dim=0, return_inverse=True)
    weights = torch.zeros(hidden.shape).index_add(0, same, drawn * (length / (draws * counts)).float().T)
    return Views(hidden.unsqueeze(0), weights.unsqueeze(0))


def seed_of(pair: Pair) -> int:
    """A number that depends only on the pair's ids, so that the pair's draws depend on nothing else."""
    return int.from_bytes(hashlib.sha256(json.dumps(pair).encode()).digest()[:8], "big")


def batches(
    pairs: Sequence[Pair], batch_size: int, pad_token_id: int, device: Any
) -> Iterator[tuple[list[int], Tensor, Tensor, Tensor]]:
    """The numbers of the pairs, at most `batch_size` at a time, ids and attention mask of their left-padded prompts,
    and their answers. Answers in a batch have equal lengths; the longest come first, and empty ones are left out."""
    order = sorted(
        (i for i, pair in enumerate(pairs) if pair[1]), key=lambda i: [-len(part) for part in pairs[i][::-1]]
    )
    while order:
        length = len(pairs[order[0]][1])
        same = [i for i in order[:batch_size] if len(pairs[i][1]) == length]
        prompts, answers = zip(*(pairs[i] for i in same), strict=True)
        width = max(map(len, prompts))
        ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        yield same, ids.to(device), mask.to(device), torch.tensor(answers, device=device)
        order = order[len(same) :]


def check_likelihood(config: Any) -> None:
    """Raises ValueError if the bound does not hold for this model."""
    if size := block_size(config):
        raise ValueError(
            f"this {config.model_type} fills blocks of {size} tokens from left to right, but the bound is for models "
            "that reveal tokens in any order: use tasks that generate"
        )


@torch.no_grad()
def log_likelihoods(
    model: Any,
    pairs: Sequence[Pair],
    *,
    mask_token_id: int,
    pad_token_id: int,
    draws: int,
    seed: int = 0,
    batch_size: int = 1,
) -> Iterator[tuple[int, float]]:
    """The estimated bound of each pair in nats, as (number of the pair, bound), in the order of computation.

    In fp32 an estimate depends only on `draws`, `seed` and its own pair.

    Args:
        model: from `d1.models.load_model`, in eval mode.
        draws: masks per answer, each with a forward pass; equal masks share one.
        batch_size: sequences per forward pass.

    Raises:
        NotFiniteError: a pair's log-probabilities are not finite.
    """
    yield from ((i, 0.0) for i, (_, answer) in enumerate(pairs) if not answer)
    for places, ids, mask, answers in batches(pairs, batch_size, pad_token_id, model.device):
        length = answers.shape[1]
        own = [llada_views(length, draws, keyed_generator(seed, seed_of(pairs[i]))) for i in places]
        views = joined(own, ids.shape[1])
        scores = score(
            model,
            ids,
            mask,
            answers,
            views.each(partial(torch.Tensor.to, device=ids.device)),
            mask_token_id=mask_token_id,
            gen_length=length,
            views_at_once=max(batch_size // len(places), 1),
        )
        bounds = scores.logps.double().sum(-1).tolist()
        for place, bound in zip(places, bounds, strict=True):
            if not math.isfinite(bound):
                raise fault(model, place, pairs[place], mask_token_id)
        yield from zip(places, bounds, strict=True)


def fault(model: Any, number: int, pair: Pair, mask_token_id: int) -> NotFiniteError:
    """The error for a pair; it names the layer."""
    prompt, answer = pair
    texts = torch.tensor([[*prompt, *([mask_token_id] * len(answer))], [*prompt, *answer]], device=model.device)
    return NotFiniteError(number, why_not_finite(model, texts))


def joined(rows: Sequence[Views], prompt: int) -> Views:
    """The views of several answers as one batch, after prompts of `prompt` tokens; missing views get weight 0."""
    noise, weights = (
        pad_sequence([getattr(views, name)[0] for views in rows], batch_first=True) for name in ("noise", "weights")
    )
    return Views(torch.nn.functional.pad(noise, (prompt, 0)), weights)


def are_greedy(
    model: Any, pairs: Sequence[Pair], *, mask_token_id: int, pad_token_id: int, batch_size: int
) -> Iterator[tuple[int, bool]]:
    """Whether greedy sampling gives the answer, as (number of the pair, bool), on a canvas of the answer's length, with
    one token per step, the most probable first. A batch ends as soon as each of its rows has revealed a wrong token.

    This is LLaDA's own check (`suffix_greedy_prediction` in its evaluation code). Raises NotFiniteError, as
    `log_likelihoods`.
    """
    yield from ((i, True) for i, (_, answer) in enumerate(pairs) if not answer)
    for places, ids, mask, wanted in batches(pairs, batch_size, pad_token_id, model.device):
        length = wanted.shape[1]
        settings = SamplingSettings(gen_length=length, block_length=length, steps=length)
        right, finite = torch.ones(2, len(places), dtype=torch.bool, device=ids.device)
        for step in rollout_steps(model, ids, mask, settings, mask_token_id=mask_token_id):
            other = step.ids != wanted[step.rows].gather(1, step.positions - ids.shape[1])
            right[step.rows] &= ~(other & step.revealed).any(1)
            finite[step.rows] &= (step.logps.isfinite() | ~step.revealed).all(1)
            if not right.any():
                break
        for place, is_finite in zip(places, finite.tolist(), strict=True):
            if not is_finite:
                raise fault(model, place, pairs[place], mask_token_id)
        yield from zip(places, right.tolist(), strict=True)
