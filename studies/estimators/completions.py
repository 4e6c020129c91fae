"""Completions of a pocket model for the measurements, sampled as in RL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from d1.masking import keyed_generator
from d1.models.tokenizer import encode_prompt, render_prompt
from d1.sampling import rollout
from d1.scoring import ESTIMATORS, SampledRows, ViewSettings, score
from d1.scoring.rollouts import Randomness

BLOCK, TEMPERATURE = 8, 0.9  # as in pocket.yaml


class Sampled(NamedTuple):
    """Completions, and the tokens that their forward passes processed."""

    rows: SampledRows
    tokens: int


def sample_rows(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[dict[str, str]]],
    gen_length: int,
    seed: int,
    eos_stop: bool = False,
) -> Sampled:
    """One completion per prompt (chat messages), of `gen_length` tokens, two per step; generators are (seed, row).
    With `eos_stop`, which is on in RL, blocks after a completion's EOS are not computed."""
    texts = [encode_prompt(tokenizer, render_prompt(tokenizer, prompt)) for prompt in prompts]
    longest = max(map(len, texts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    sampled = rollout(
        model.eval(),
        ids,
        mask,
        mask_token_id=tokenizer.mask_token_id,
        generator=[keyed_generator(seed, row) for row in range(len(texts))],
        gen_length=gen_length,
        block_length=BLOCK,
        steps=gen_length // 2,
        temperature=TEMPERATURE,
        eos_token_ids=[tokenizer.eos_token_id] if eos_stop else None,
    )
    canvas = sampled.ids[:, longest:]
    ends = canvas == tokenizer.eos_token_id
    rows = SampledRows(
        prompt_ids=ids,
        attention_mask=mask,
        maskable=mask.bool(),
        canvas_ids=canvas,
        scored=ends.cumsum(-1) - ends.long() == 0,  # up to and including the first EOS
        reveal_steps=sampled.reveal_steps,
        logps=sampled.logps,
        entropies=sampled.entropies,
    )
    return Sampled(rows, int(sampled.forward_tokens.sum()))


def texts_of(sampled: SampledRows, tokenizer: Any) -> list[str]:
    """The text of each completion up to its end."""
    rows = zip(sampled.canvas_ids, sampled.scored, strict=True)
    return [tokenizer.decode(ids[scored], skip_special_tokens=True) for ids, scored in rows]


@torch.no_grad()
def trajectory_logps(model: Any, sampled: SampledRows, mask_token_id: int) -> Tensor:
    """(rows, canvas) log p of each token in the state in which it was revealed, perhaps by another model: replay of
    every step (`d1/scoring/replay.py`). 0 after a completion's end."""
    nothing = Randomness([], torch.Generator(), 0, 0)  # replay of every step draws nothing
    views = ESTIMATORS["replay"](sampled, nothing, ViewSettings(steps=sampled.gen_length))
    given = (sampled.prompt_ids, sampled.attention_mask, sampled.canvas_ids, views)
    return score(model.eval(), *given, mask_token_id=mask_token_id, gen_length=sampled.gen_length).logps


def divergence(of: Any, start: Any, tokenizer: Any, prompts: Sequence[list[dict[str, str]]], gen_length: int) -> float:
    """The KL of `of` to `start` in nats per token, on completions that `of` samples: the mean difference of their
    log-probabilities of each token in the state in which it was revealed."""
    sampled = sample_rows(of, tokenizer, prompts, gen_length, seed=0).rows
    other = trajectory_logps(start, sampled, tokenizer.mask_token_id)
    return ((sampled.logps - other) * sampled.scored).sum().item() / int(sampled.scored.sum())
