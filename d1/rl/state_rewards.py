"""Advantages per state of a rollout, from the reward of the completion that the model would finish there in one pass.

With lam = `state_reward`, a view's share of the reward is [r + lam (r - r_v)] / (1 + lam). Here r is the completion's
reward, and r_v the reward of the completion in which each token hidden by the view is the most likely one. The
advantage is this share minus its mean over the prompt's completions in the view with the same number (EGSPO-SA, arXiv
2603.12554). For a block-causal model, the state of a block contains the earlier blocks in their final form.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d1.rl.bridge import REWARD
from d1.rl.updates import Batch, Everyone, evaluating, texts_of
from d1.sampling import SamplingSettings
from d1.sampling.predict import predict
from d1.scoring.views import hidden_states


def compare_states(trainer: Any, batch: Batch, group: int, everyone: Everyone) -> Tensor:
    """(rows, views) advantages of the states of all updates' views, relative to the `group` rows of each prompt."""
    scoring = batch["view_weights"].ne(0).any(-1).any(1)
    rewards = []
    with trainer.sampling_model() as model, evaluating(model), trainer.accelerator.autocast():
        for view in range(scoring.shape[1]):
            ids, fed = finished_in_one_pass(model, batch, view, trainer.mask_token_id)
            trainer.compute = trainer.compute + fed
            rewards.append(trainer.rewards_of(texts_of(ids, trainer.eos_token_ids)))
    at_states = torch.stack(rewards, dim=1).to(scoring.device)
    return state_advantages(batch[REWARD], at_states, scoring, trainer.args.state_reward, group, everyone)


@torch.no_grad()
def finished_in_one_pass(model: Any, batch: Batch, view: int, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """The canvas (rows, canvas) with the most likely token wherever a view hides one, and the number of tokens
    processed."""
    canvas, visible = batch["canvas_ids"], F.pad(batch["prompt_mask"], (0, batch["canvas_ids"].shape[1]), value=1)
    hidden = batch["view_noise"][:, 0, view] & visible.bool()
    clean, length = torch.cat([batch["prompt_ids"], canvas], dim=1), canvas.shape[1]
    if "view_shown" in batch:
        canvas = batch["view_shown"][:, 0, view]
    shown = torch.cat([batch["prompt_ids"], canvas], dim=1)
    options = {"gen_length": length, "mask_token_id": mask_token_id, "shown": shown}
    states = hidden_states(model, clean, hidden, visible, **options)
    ids, *_ = predict(
        model,
        states[None, :, -length:],
        [length] * len(canvas),
        SamplingSettings(gen_length=length, block_length=length, steps=length),
        mask_token_id=mask_token_id,
        generator=None,
        noise_dtype=torch.float32,
    )
    return torch.where(hidden[:, -length:], ids, canvas), visible.sum()


def state_advantages(
    rewards: Tensor, at_states: Tensor, scoring: Tensor, lam: float, group: int, everyone: Everyone
) -> Tensor:
    """The advantages (rows, views), 0 where a view scores nothing.

    Args:
        rewards: (rows,), of the completions.
        at_states: (rows, views), of the completions finished in one pass. All processes have the same number of views.
        scoring: (rows, views) bool, the views that score something.
        group: rows per prompt.
    """
    mixed = (rewards.unsqueeze(1) + lam * (rewards.unsqueeze(1) - at_states)) / (1 + lam)
    groups = everyone.gather(mixed.masked_fill(~scoring, torch.nan)).unflatten(0, (-1, group))
    centred = (groups - groups.nanmean(1, keepdim=True)).flatten(0, 1)
    return centred[everyone.first :][: len(rewards)].nan_to_num(0.0)
