"""Complete the problems of a pocket task greedily with a sampler, and count what it solved and what it took."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from d1.sampling import Rollout, eos_cut, rollout
from d1.tasks import load_task
from pocket.recipes import RECIPES

BATCH = 128


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Tensor,
    length: int,
    *,
    block: int = 8,
    steps: int | None = None,
    sampler: str = "exact",
    **options: Any,
) -> list[Rollout]:
    return [
        rollout(
            model,
            rows,
            torch.ones_like(rows),
            mask_token_id=tokenizer.mask_token_id,
            gen_length=length,
            block_length=block,
            steps=steps or length // 2,
            eos_token_ids=[tokenizer.eos_token_id],
            sampler=sampler,
            **options,
        )
        for rows in prompts.split(BATCH)
    ]


def solved(rollouts: list[Rollout], tokenizer: Any, width: int, rows: Any, task: str = "sudoku") -> list[float]:
    """1 for each problem whose completion, up to its end, solves it."""
    texts = [
        tokenizer.decode(ids).split(tokenizer.eos_token)[0] for part in rollouts for ids in part.ids[:, width:].tolist()
    ]
    return [load_task(RECIPES[task].task).score(text, row)["accuracy"] for text, row in zip(texts, rows, strict=True)]


def work_of(parts: list[Rollout]) -> tuple[float, float]:
    """Forward passes and tokens processed by the model, per problem."""
    counts = torch.cat([torch.stack([part.passes, part.forward_tokens]) for part in parts], dim=1).double().mean(1)
    return counts[0].item(), counts[1].item()


def prompts_of(rows: Any, tokenizer: Any, device: str) -> Tensor:
    """(rows, prompt) ids: all prompts of a pocket task have the same length."""
    ids = tokenizer.apply_chat_template(list(rows["prompt"]), add_generation_prompt=True, return_dict=False)
    return torch.tensor(ids, device=device)


@torch.no_grad()
def measured(
    model: Any, tokenizer: Any, rows: Any, task: str, length: int, samplers: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """For each sampler (name -> options of `sample`): whether each problem was solved, as a text of 0 and 1, and per
    problem forward passes, tokens of the completion up to its EOS, tokens that the model computed, and seconds of
    processor time."""
    prompts, found = prompts_of(rows, tokenizer, model.device), {}
    width = prompts.shape[1]
    for name, options in samplers.items():
        began = time.process_time()
        parts = sample(model, tokenizer, prompts, length, **options)
        seconds = time.process_time() - began
        own = sum(int(eos_cut(part.ids[:, width:], [tokenizer.eos_token_id]).sum()) for part in parts)
        passes, computed = work_of(parts)
        right = solved(parts, tokenizer, width, rows, task)
        found[name] = {
            "solved": "".join(str(int(one)) for one in right),
            "passes": round(passes, 4),
            "tokens": round(own / len(rows), 4),
            "computed": round(computed, 2),
            "seconds": round(seconds / len(rows), 6),
        }
    return found
