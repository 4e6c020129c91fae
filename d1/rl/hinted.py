"""Rollouts with hints: where all completions of a prompt are wrong, some are replaced by right ones that were given
parts of a worked solution (`hints.py`). IGPO (arXiv 2509.10396) trains on them.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Generator, Tensor

from d1.masking import keyed_generator
from d1.rl.batch import (
    Batch,
    RankView,
    completion_ids_of,
    count_scored_tokens,
    evaluating,
    has_equal_rewards,
    mean_entropies,
    pad_batch,
    record_and_costs,
    replace_rows,
    views_of,
)
from d1.rl.bridge import ACCURACY, EQUAL_REWARDS, REWARD
from d1.rl.hints import HINTS, TRACE
from d1.rl.losses import OBJECTIVES
from d1.rl.rewards import SPEED
from d1.rl.sources import RolloutSource, SourceWrapper
from d1.sampling import RolloutStart, eos_cut

# The last part of a row's key, after its number: the draw of its hints, and its rollout with them.
HINTS_DRAWN, HINTED = 1, 2


class HintedRollouts(SourceWrapper):
    """The source of a run with hints. `source` also samples with them; evaluations have none."""

    def __init__(self, source: RolloutSource, hints: str, hint_rows: int) -> None:
        super().__init__(source)
        self.hint, self.hint_rows = HINTS[hints], hint_rows

    def before_views(self, batch: Batch, ranks: RankView) -> None:
        """Replaces rows of groups without a right completion by right ones that were sampled with hints, and sets the
        advantages of these groups anew."""
        super().before_views(batch, ranks)
        trainer, group = self.trainer, self.trainer.group
        if trainer.mode == "eval":
            return
        rows, length = len(batch["canvas_ids"]), trainer.sampling.gen_length
        is_right = ranks.all_gather(batch[ACCURACY]).view(-1, group)
        unsolved = is_right.nansum(1).eq(0)
        trainer.log_metric("hints/unsolved", unsolved.float().mean().item())
        if not unsolved.any():
            return

        # What belongs to a completion. TRL's completions are as wide as the canvas from here on.
        wide = pad_batch(batch, batch["prompt_ids"].shape[1], length, trainer.text_tokenizer.pad_token_id)
        names = ("completion_ids", "completion_mask", ACCURACY, REWARD, *trainer.record)
        old = {name: wide[name] for name in ("advantages", *names)}
        old["given"] = torch.zeros_like(batch["canvas_ids"], dtype=torch.bool)

        # Sample the rows of these groups once more, each from its own hints and with its own random numbers.
        new = {name: value.clone() for name, value in old.items()}
        local_rows = ranks.local_slice(unsolved.repeat_interleave(group), rows).nonzero().squeeze(1)
        if len(local_rows):
            self.sample_hinted(batch, local_rows, new)

        # Reward them; the other rows keep their completions. All processes call the rewards with all of their rows.
        completions = completion_ids_of(new["canvas_ids"], trainer.eos_token_ids)
        new[REWARD], new[ACCURACY] = trainer.rewards_and_accuracy(completions)

        # Right ones replace rows of their group.
        hinted_is_right = ranks.all_gather(new[ACCURACY]).view(-1, group).eq(1)
        total_rows = rows * trainer.accelerator.num_processes
        generator = keyed_generator(*trainer.key("rollout"), total_rows, HINTED)
        source_rows = choose_replacements(unsolved, hinted_is_right, self.hint_rows, generator)
        batch.update(wide)
        batch.update(replace_rows(old, source_rows, new, ranks))
        batch["num_items_in_batch"] = count_scored_tokens(batch, ranks)

        # The advantages of these groups: rewards minus their mean, 0 for completions without a reward.
        changed = source_rows.view(-1, group).ge(0).any(1)
        rewards = ranks.all_gather(batch[REWARD]).view(-1, group)
        centred = (rewards - rewards.nanmean(1, keepdim=True)).nan_to_num(0.0)
        centred = torch.where(changed.unsqueeze(1), centred, torch.nan)
        new_advantages = ranks.local_slice(centred.flatten(), rows)
        batch["advantages"] = torch.where(new_advantages.isnan(), batch["advantages"], new_advantages)
        # TRL counted the groups with equal rewards before some of their rows were replaced.
        trainer.replace_metric(EQUAL_REWARDS, has_equal_rewards(rewards).float().mean().item())
        trainer.log_metric("hints/solved", changed.sum().item() / unsolved.sum().item())
        trainer.log_metric("hints/rows", source_rows.ge(0).float().mean().item())

    def sample_hinted(self, batch: Batch, rows: Tensor, new: Batch) -> None:
        """Puts rollouts of these `rows` of this process, with hints, into the same rows of `new`."""
        trainer, length = self.trainer, self.trainer.sampling.gen_length
        keys = trainer.row_keys("rollout", len(batch["canvas_ids"]))

        # The hints, (rows, canvas); -1 where a token is to be sampled.
        hints = []
        for row in rows.tolist():
            trace = trainer.text_tokenizer(trainer.rows[row][TRACE], add_special_tokens=False)["input_ids"]
            hints.append(self.hint(trace, length, keyed_generator(*keys[row], HINTS_DRAWN)))
        given_ids = torch.stack(hints).to(rows.device)

        # The rollout.
        sampled = trainer.sample(
            batch["prompt_ids"][rows],
            batch["prompt_mask"][rows],
            keys=[(*keys[row], HINTED) for row in rows.tolist()],
            start=RolloutStart.from_ids(torch.where(given_ids >= 0, given_ids, trainer.mask_token_id)),
        )
        record, _, passes = record_and_costs(sampled)
        canvas_ids = record["canvas_ids"]
        completions = completion_ids_of(canvas_ids, trainer.eos_token_ids)
        for row, completion, pass_count in zip(rows.tolist(), completions, passes, strict=True):
            speed = len(completion) / max(pass_count, 1)
            trainer.rollout_fields[SPEED][row] = speed
            if SPEED in new:  # with `min_speed_spread`
                new[SPEED][row] = speed

        # Its place in the batch.
        for name, values in record.items():
            new[name][rows] = cast(Tensor, values)
        new["completion_ids"][rows] = canvas_ids
        counted = eos_cut(canvas_ids, trainer.eos_token_ids)
        if trainer.args.mask_truncated_completions:  # by TRL's rule for other rows
            ends = (*trainer.eos_token_ids, trainer.text_tokenizer.pad_token_id)
            is_complete = [completion[-1] in ends for completion in completions]
            counted = counted & torch.tensor(is_complete, device=counted.device).unsqueeze(1)
        new["completion_mask"][rows] = counted.to(new["completion_mask"].dtype)
        new["given"][rows] = canvas_ids == given_ids  # the EOS stop may have overwritten some

    def after_scoring(self, batch: Batch, ranks: RankView) -> None:
        """Adds `old_entropies`, of the policy that sampled, if there are given tokens and the objective reads them."""
        super().after_scoring(batch, ranks)
        trainer = self.trainer
        if "given" not in batch or not OBJECTIVES[trainer.args.objective].reads_given:
            return
        score_rows = trainer.row_scorer()
        with trainer.without_checkpointing(), evaluating(trainer.model):
            views = views_of(batch, 0)
            scores = score_rows(trainer.model, batch, views, with_entropies=True)
        assert scores.entropies is not None
        batch["old_entropies"] = mean_entropies(scores.entropies, views.weights)


def choose_replacements(unsolved: Tensor, is_right: Tensor, max_rows: int, generator: Generator) -> Tensor:
    """(rows,) of all processes, the row that replaces each row; -1: the row stays. In each `unsolved` group (prompts,),
    at most `max_rows` of the rows with `is_right` (prompts, group), at random, replace the first ones."""
    prompts, group = is_right.shape
    source_rows = torch.full((prompts, group), -1, dtype=torch.long)
    for prompt, is_candidate in enumerate((is_right & unsolved.unsqueeze(1)).cpu()):
        candidates = is_candidate.nonzero().squeeze(1)
        chosen = candidates[torch.randperm(len(candidates), generator=generator)][:max_rows]
        source_rows[prompt, : len(chosen)] = prompt * group + chosen
    return source_rows.flatten().to(is_right.device)
