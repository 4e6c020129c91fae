"""Rewards of the states of a completion, by which views get advantages of their own (EGSPO-SA, arXiv 2603.12554)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d1.rl.batch import Batch, RankView, completion_ids_of, evaluating
from d1.rl.bridge import REWARD
from d1.rl.sources import RolloutSource, SourceWrapper
from d1.sampling import SamplingSettings
from d1.sampling.predict import predict
from d1.scoring.forward import hidden_states, tokens_of_pass
from d1.scoring.inputs import CanvasBlocks


class StateRewards(SourceWrapper):
    """A source whose views have advantages of their own. `weight` is the setting `state_reward`."""

    def __init__(self, source: RolloutSource, weight: float) -> None:
        super().__init__(source)
        self.weight = weight

    def after_scoring(self, batch: Batch, ranks: RankView) -> None:
        """Adds `view_advantages`."""
        super().after_scoring(batch, ranks)
        batch["view_advantages"] = self.view_advantages(batch, ranks)

    def view_advantages(self, batch: Batch, ranks: RankView) -> Tensor:
        """(rows, views) advantages of the states of all updates' views, 0 where a view scores nothing.

        A view's share of the reward is [r + lam (r - r_v)] / (1 + lam), with lam = `state_reward`. Here r is the
        completion's reward, and r_v the reward of the completion in which each token hidden by the view is the most
        likely one. The advantage is this share minus its mean over the prompt's completions in the view with the same
        number. If no reward applies to the completion or to the one of its state, the advantage is 0, and the means
        leave it out. For a block-causal model, the state of a block contains the earlier blocks in their final form.
        """
        trainer = self.trainer
        scoring = batch["view_weights"].ne(0).any(-1).any(1)  # (rows, views)

        # Processes may have drawn different numbers of views, and their rewards are gathered: a process that has fewer
        # computes its last view again.
        local_views = scoring.shape[1]
        all_views = trainer.accelerator.gather(torch.tensor([local_views], device=scoring.device))
        views = int(all_views.max())
        scoring = F.pad(scoring, (0, views - local_views))

        # The reward of each view's state: that of the completion which one pass makes of it.
        rewards = []
        with trainer.sampling_model() as model, evaluating(model), trainer.accelerator.autocast():
            for view in range(views):
                local_view = min(view, local_views - 1)
                ids, tokens = finished_in_one_pass(model, batch, local_view, trainer.mask_token_id, trainer.blocks)
                trainer.computed_tokens = trainer.computed_tokens + tokens
                completions = completion_ids_of(ids, trainer.eos_token_ids)
                rewards.append(trainer.rewards_and_accuracy(completions)[0])
        state_rewards = torch.stack(rewards, dim=1).to(scoring.device)

        # Each view's share, (rows, views).
        reward = batch[REWARD].unsqueeze(1)
        mixed = (reward + self.weight * (reward - state_rewards)) / (1 + self.weight)

        # Minus the mean over the prompt's completions, (prompts, group, views).
        groups = ranks.all_gather(mixed.masked_fill(~scoring, torch.nan)).unflatten(0, (-1, trainer.group))
        centred = (groups - groups.nanmean(1, keepdim=True)).flatten(0, 1)
        return ranks.local_slice(centred, len(reward))[:, :local_views].nan_to_num(0.0)


@torch.no_grad()
def finished_in_one_pass(
    model: Any, batch: Batch, view: int, mask_token_id: int, blocks: CanvasBlocks | None = None
) -> tuple[Tensor, Tensor]:
    """The canvas (rows, canvas) with the most likely token wherever a view hides one, and the number of tokens
    processed."""
    prompt_ids, canvas_ids = batch["prompt_ids"], batch["canvas_ids"]
    rows, gen_length = canvas_ids.shape
    visible = F.pad(batch["prompt_mask"], (0, gen_length), value=1)

    # What the view hides and shows. (rows, updates, views, tokens): with `state_reward`, all updates hide the same
    # tokens (`about_updates`).
    hidden = batch["view_noise"][:, 0, view] & visible.bool()
    shown_canvas = canvas_ids
    if "view_shown" in batch:
        shown_canvas = batch["view_shown"][:, 0, view]
    states = hidden_states(
        model,
        torch.cat([prompt_ids, canvas_ids], dim=1),
        hidden,
        visible,
        gen_length=gen_length,
        mask_token_id=mask_token_id,
        shown=torch.cat([prompt_ids, shown_canvas], dim=1),
        blocks=blocks,
    )

    # The most likely token of every position; only those of hidden positions are used.
    greedy = SamplingSettings(gen_length=gen_length, block_length=gen_length, steps=gen_length)
    ids, *_ = predict(
        model,
        states[None, :, -gen_length:],
        [gen_length] * rows,
        greedy,
        mask_token_id=mask_token_id,
        generator=None,
        noise_dtype=torch.float32,
    )
    finished = torch.where(hidden[:, -gen_length:], ids, shown_canvas)
    return finished, tokens_of_pass(model, visible, gen_length)
