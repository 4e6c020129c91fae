"""The batch of a rollout on its way to the loss: record, scored tokens, views of the updates, their scores, metrics.

A batch is a dictionary of tensors, made by TRL. Shapes: R rows, U updates, V views, P tokens of the prompt, T tokens of
the canvas, W writes. To TRL's keys are added
- `canvas_ids` R T and the other tensors of a `RolloutRecord`;
- `completion_reward` and, if the last reward is an accuracy, `completion_is_right`, R each (`bridge.py`);
- `view_noise` R U V P+T and `view_weights` R U V T; where views have them, `view_shown`, `view_targets`,
  `view_sampled_logps` R U V T, and the other fields of `Views`. The views of update k are [:, k];
- `padded` R, whether any prompt of the rollout is padded, the same for each row;
- `old_view_logps` and `ref_view_logps` R U V T, where the loss needs them;
- `view_advantages` R V, with `state_reward` or a tree of rollouts; of a tree also `start_steps` R, and what
  `d1/rl/tree.py` adds: `sibling_advantages` R V S, `sibling_ids` R V S T and `sibling_positions` R U, and `is_end` R T
  until its views are drawn;
- after a rollout with hints, `given` R T and, for `Objective.reads_given`, `old_entropies` R T;
- `mini_batch` R, if a rollout has several: the number of the one that a row belongs to;
- `group` R, the number of a row's prompt, and `log_ratios` R x (rows per prompt), for `Objective.over_group`;
- `scoring_views`, `scored_pairs` and `repeated_tokens` R U and `active_rows` R: counts over the whole rollout, the same
  for each row.

A completion may be several rows, which follow each other: the turns of an episode (`d1/tools/trainer.py`). The batch
then also has `maskable` R P, the prompt tokens that may be hidden; without it, all may be.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from d1.models.head import run_inside
from d1.rl.losses import ADVANTAGES, AdvantageInputs, LossInputs, require_logps
from d1.sampling import Rollout, eos_cut
from d1.scoring import Estimator, Randomness, SampledRows, Scores, Views, ViewSettings, score
from d1.scoring.inputs import CanvasBlocks, canvas_blocks, steps_in_blocks

Batch = dict[str, Any]
VIEWS = tuple(field.name for field in fields(Views))


class RolloutRecord(TypedDict, total=False):
    """What a rollout notes of its canvases, as keys of a batch. Log-probs and entropies are those that `Rollout`
    documents; a user's `rollout_func` may leave them out. A sampler that edits also notes all of its writes."""

    canvas_ids: Tensor  # R T, int64: the whole canvas, including what follows a completion's end
    reveal_steps: Tensor  # R T, int64; -1 where the EOS stop filled in
    rollout_logps: Tensor  # R T, fp32
    rollout_entropies: Tensor  # R T, fp32
    tokens_per_forward_pass: Tensor  # R, fp32; only with `min_speed_spread`
    write_ids: Tensor  # R T W, int64
    write_steps: Tensor  # R T W, int64; -1 where nothing was written
    write_logps: Tensor  # R T W, fp32
    write_entropies: Tensor  # R T W, fp32
    start_steps: Tensor  # R, int64: as in `Rollout`


class RankView(NamedTuple):
    """One process's view of the rows of all.

    Attributes:
        all_gather: concatenates a tensor of each process along the rows, in the order of the ranks.
        rank_offset: the number of this process's first row among those of all processes.
    """

    all_gather: Callable[[Tensor], Tensor]
    rank_offset: int

    def local_slice(self, gathered: Tensor, rows: int) -> Tensor:
        """The `rows` of this process among the gathered ones."""
        return gathered[self.rank_offset :][:rows]


def pad_to_width(values: Tensor, width: int, padding: int = 0) -> Tensor:
    """`values` (..., canvas) cut to `width` tokens, or filled with `padding`: TRL pads completions to the longest of
    their batch, and `pad_to_multiple_of` can make this wider than the canvas."""
    return F.pad(values, (0, width - values.shape[-1]), value=padding)


def strip_padding(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The ids of prompts (rows, prompt), without their padding."""
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Puts the model into evaluation mode (no dropout) inside, and restores its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


# --- Record -----------------------------------------------------------------------------------------------------------


def record_and_costs(sampled: Rollout) -> tuple[RolloutRecord, dict[str, float], list[int]]:
    """The record of a rollout, what sampling took per row on average, and each row's forward passes. Waits for the
    device."""
    counts = [sampled.passes, sampled.forward_tokens, sampled.edits, sampled.max_writes]
    passes, tokens, edits, max_writes = torch.stack(counts).cpu()  # one wait for all numbers
    costs = {
        "sampling/forward_passes": passes.float().mean().item(),
        "sampling/forward_tokens": tokens.float().mean().item(),
    }
    record = RolloutRecord(
        canvas_ids=sampled.ids[:, -sampled.logps.shape[1] :],
        reveal_steps=sampled.reveal_steps,
        rollout_logps=sampled.logps,
        rollout_entropies=sampled.entropies,
    )
    if sampled.writes is not None:
        writes = int(max_writes.max())
        record["write_ids"] = sampled.writes.ids[..., :writes]
        record["write_steps"] = sampled.writes.steps[..., :writes]
        record["write_logps"] = sampled.writes.logps[..., :writes]
        record["write_entropies"] = sampled.writes.entropies[..., :writes]
        costs["sampling/edits"] = edits.float().mean().item()
    if sampled.start_steps is not None:
        record["start_steps"] = sampled.start_steps
    return record, costs, passes.tolist()


def completion_ids_of(canvas_ids: Tensor, eos_token_ids: Sequence[int]) -> list[list[int]]:
    """The ids of each row of canvases (rows, canvas) up to and including its first EOS."""
    ids = canvas_ids.cpu()
    is_kept = eos_cut(ids, eos_token_ids)
    return [row[row_is_kept].tolist() for row, row_is_kept in zip(ids, is_kept, strict=True)]


def view_logps_as_sampled(batch: Batch) -> Tensor:
    """R U V T, the sampler's log-prob of each token that a view scores, 0 elsewhere: old log-probs of an estimator that
    scores tokens in the states in which they were revealed."""
    return torch.where(batch["view_weights"] != 0, batch["rollout_logps"][:, None, None], 0.0)


def sampled_logps(batch: Batch, update: int) -> Tensor:
    """R T, the sampler's log-prob of each token. For a position that was written several times: the weighted mean over
    the writes that the views of this update score, or, if these score what was written last, that of this."""
    if "view_sampled_logps" not in batch:
        return batch["rollout_logps"]
    weights_RVT = batch["view_weights"][:, update]
    logps_RVT = batch["view_sampled_logps"][:, update]
    total_RT = weights_RVT.sum(1)
    return (weights_RVT * logps_RVT).sum(1) / total_RT.where(total_RT != 0, 1.0)


# --- Scored tokens and advantages -------------------------------------------------------------------------------------
# The setting `scored_tokens` names the tokens of a canvas that count in the loss: methods differ in what they do with
# those after the first EOS. A new choice is a function and an entry of `LOSS_MASKS`.


class SampledCanvases(NamedTuple):
    """The sampled canvases and their special tokens, (rows, canvas) each.

    Attributes:
        ids: token ids of the whole canvas.
        ended: bool, the tokens up to and including the first EOS.
        steps: the step that revealed each token; -1 for tokens that were not revealed.
        is_end: bool, the tokens that end a text.
        is_padding: bool, the tokenizer's padding token, which may also end a text.
    """

    ids: Tensor
    ended: Tensor
    steps: Tensor
    is_end: Tensor
    is_padding: Tensor


@dataclass(frozen=True)
class LossMask:
    """An entry of `LOSS_MASKS`.

    Attributes:
        select: the tokens (rows, canvas) bool that count in the loss.
        after_the_end: it may count tokens after the first EOS, so that the whole canvas must be sampled.
        rest_of_block: it counts tokens after the first EOS that were sampled all the same, in its block.
        reads_steps: it reads `SampledCanvases.steps`.
        has_gaps: tokens that count may lie after others that do not.
    """

    select: Callable[[SampledCanvases], Tensor]
    after_the_end: bool = False
    rest_of_block: bool = False
    reads_steps: bool = False
    has_gaps: bool = False


def until_the_end(sampled: SampledCanvases) -> Tensor:
    return sampled.ended


def text_until_the_end(sampled: SampledCanvases) -> Tensor:
    return sampled.ended & ~sampled.is_padding


def drawn(sampled: SampledCanvases) -> Tensor:
    return sampled.steps >= 0


def unpadded(sampled: SampledCanvases) -> Tensor:
    return ~sampled.is_padding


def whole_canvas(sampled: SampledCanvases) -> Tensor:
    return torch.ones_like(sampled.ended)


def to_the_last_text(sampled: SampledCanvases) -> Tensor:
    """All tokens revealed up to the step that revealed the last token other than EOS (AGRPO, as released)."""
    last = torch.where(sampled.is_end, -1, sampled.steps).amax(-1, keepdim=True)
    return (sampled.steps >= 0) & (sampled.steps <= last)


LOSS_MASKS: dict[str, LossMask] = {
    "ended": LossMask(until_the_end),
    "text": LossMask(text_until_the_end, has_gaps=True),
    "drawn": LossMask(drawn, rest_of_block=True, reads_steps=True),
    "steps": LossMask(to_the_last_text, after_the_end=True, reads_steps=True, has_gaps=True),
    "unpadded": LossMask(unpadded, after_the_end=True, has_gaps=True),
    "canvas": LossMask(whole_canvas, after_the_end=True),
}


def set_loss_mask(
    batch: Batch,
    name: str,
    end_ids: Sequence[int],
    pad_id: int | None,
    ranks: RankView,
) -> None:
    """Makes the tokens of `LOSS_MASKS[name]` the batch's completions; rows that are out of the loss stay out."""
    ids, mask = batch["canvas_ids"], batch["completion_mask"]
    scored = LOSS_MASKS[name].select(
        SampledCanvases(
            ids=ids,
            ended=pad_to_width(mask, ids.shape[1]).bool(),
            steps=batch["reveal_steps"],
            is_end=torch.isin(ids, torch.tensor(end_ids, device=ids.device)),
            is_padding=ids == (-1 if pad_id is None else pad_id),
        )
    )
    batch["completion_ids"] = ids
    batch["completion_mask"] = (scored & mask.any(-1, keepdim=True)).to(mask.dtype)
    batch["num_items_in_batch"] = count_scored_tokens(batch, ranks)


def count_scored_tokens(batch: Batch, ranks: RankView) -> Tensor:
    """The number of tokens that count in the loss, of all processes: TRL's `num_items_in_batch`."""
    return ranks.all_gather(batch["completion_mask"].sum()).sum()


def transform_advantages(
    advantages: Tensor,
    name: str,
    group: int,
    ranks: RankView,
    bounds: Mapping[str, Tensor] | None = None,
    settings: Any = None,
    in_loss: Tensor | None = None,
    missing: Tensor | None = None,
) -> Tensor:
    """TRL's advantages (rows,) as changed by `ADVANTAGES[name]`; a group has `group` rows and may span processes.

    Args:
        bounds: the other fields of `AdvantageInputs` that the entry reads, (rows,) each.
        settings: those of the run.
        in_loss: (rows,) bool, the rows that count in the loss; None: all of them.
        missing: (rows,) bool, the rows to which no reward applies, whose advantages are 0; None: there are none.
    """
    entry = ADVANTAGES[name]
    if entry.of is None or group == 1:
        return advantages

    # What the entry reads, of all processes: (groups, rows of a group) each.
    fields = {"advantages": ranks.all_gather(advantages).view(-1, group)}
    for field, values in (bounds or {}).items():
        fields[field] = ranks.all_gather(values).view(-1, group)

    # The groups that it gets: all of them, or those with a row in the loss.
    selected: Tensor | None = None
    if entry.kept_only and in_loss is not None:
        selected = ranks.all_gather(in_loss).view(-1, group).any(1)

    # A group in which some rows have no reward is changed alone, without these rows.
    changed = torch.zeros_like(fields["advantages"])
    is_missing = None
    if missing is not None:
        is_missing = ranks.all_gather(missing).view(-1, group)
        if selected is None:
            selected = torch.ones_like(is_missing[:, 0])
        if entry.over_rollout:
            fields["advantages"] = fields["advantages"].masked_fill(is_missing, torch.nan)
        else:
            is_incomplete = is_missing.any(1)
            for number in (selected & is_incomplete).nonzero().squeeze(1).tolist():
                rewarded = ~is_missing[number]
                if rewarded.sum() < 2:
                    continue
                group_fields = {field: values[number, rewarded].unsqueeze(0) for field, values in fields.items()}
                changed[number, rewarded] = entry(AdvantageInputs(**group_fields), settings).squeeze(0)
            selected = selected & ~is_incomplete

    # The other groups, all at once.
    if selected is None:
        changed = entry(AdvantageInputs(**fields), settings)
    elif selected.any():
        selected_fields = {field: values[selected] for field, values in fields.items()}
        changed[selected] = entry(AdvantageInputs(**selected_fields), settings)
    if is_missing is not None:
        changed = changed.masked_fill(is_missing, 0.0)
    return ranks.local_slice(changed.flatten(), len(advantages))


def has_equal_rewards(rewards: Tensor) -> Tensor:
    """(groups,) bool, whether the rewards (groups, completions per prompt) of a group are equal; NaN does not count.

    They are compared with each other: the mean of equal rewards may differ from them by rounding (0.3 for eight rows).
    """
    is_missing = rewards.isnan()
    highest = rewards.masked_fill(is_missing, -torch.inf).amax(1)
    lowest = rewards.masked_fill(is_missing, torch.inf).amin(1)
    return highest <= lowest


def prompt_filter(
    batch: Batch, shares: Sequence[float] | None, group: int, ranks: RankView, min_speed_spread: float = 0.0
) -> Tensor:
    """(prompts,) bool, of all processes: whether the fraction of correct completions is within `shares` (lower, upper
    bound), and their tokens per forward pass lie at least `min_speed_spread` apart. Only what is given is asked for,
    at least one of the two. Completions without a reward do not count."""
    filters = []
    if shares is not None:
        filters.append(solve_rate_filter(batch, shares, group, ranks))
    if min_speed_spread:
        local_speeds = batch["tokens_per_forward_pass"].masked_fill(batch["completion_reward"].isnan(), torch.nan)
        speeds = ranks.all_gather(local_speeds).view(-1, group)
        fastest, slowest = speeds.nan_to_num(-torch.inf).amax(1), speeds.nan_to_num(torch.inf).amin(1)
        filters.append(fastest - slowest >= min_speed_spread)
    return torch.stack(filters).all(0)


def solve_rate_filter(batch: Batch, shares: Sequence[float], group: int, ranks: RankView) -> Tensor:
    """(prompts,) bool, of all processes: whether the fraction of correct completions is within `shares`."""
    right = ranks.all_gather(batch["completion_is_right"]).view(-1, group).nanmean(1)
    return (right >= shares[0]) & (right <= shares[1])


def pad_batch(batch: Batch, prompt: int, canvas: int, pad: int) -> Batch:
    """The batch with TRL's tensors padded to `prompt` and `canvas` tokens; of what is wider, only padding is cut."""
    wide = dict(batch)
    for name, value in (("prompt_ids", pad), ("prompt_mask", 0)):
        wide[name] = F.pad(batch[name], (prompt - batch[name].shape[1], 0), value=value)
    for name, value in (("completion_ids", pad), ("completion_mask", 0)):
        wide[name] = F.pad(batch[name], (0, canvas - batch[name].shape[1]), value=value)
    return wide


def replace_filtered_groups(
    batch: Batch, kept: Tensor, more: Batch, new: Tensor, group: int, ranks: RankView
) -> tuple[Batch, Tensor]:
    """The batch in which those prompts of `more` that are kept, `new`, replace in their order those of `batch` that are
    not, and which prompts it keeps; (prompts,) bool each, of all processes. All tensors have equal shapes there."""
    # Which prompt of `more` replaces which of `batch`, as many as there are of both.
    dropped, candidates = (~kept).nonzero().squeeze(1), new.nonzero().squeeze(1)
    count = min(len(dropped), len(candidates))
    dropped, candidates = dropped[:count], candidates[:count]

    # The same of their rows.
    source_prompts = torch.full_like(kept, -1, dtype=torch.long).index_copy(0, dropped, candidates)
    rows_of_group = torch.arange(group, device=kept.device)
    source_rows = source_prompts.unsqueeze(1) * group + rows_of_group  # negative: the row stays
    return replace_rows(batch, source_rows.flatten(), more, ranks), kept.index_fill(0, dropped, True)


def replace_rows(batch: Batch, source: Tensor, more: Batch, ranks: RankView) -> Batch:
    """The batch in which row n, counted over all processes, is row `source[n]` of `more`; a row with a negative number
    stays. All tensors have equal shapes on all processes."""
    source_rows = ranks.local_slice(source, len(batch["advantages"]))
    replaced = dict(batch)
    for name, value in batch.items():
        if value.dim() > 0:
            is_replaced = (source_rows >= 0).view([-1] + [1] * (value.dim() - 1))
            replaced[name] = torch.where(is_replaced, ranks.all_gather(more[name])[source_rows], value)
    return replaced


def select_prompt_share(
    batch: Batch,
    share: float,
    group: int,
    ranks: RankView,
    generator: torch.Generator,
    candidates: Tensor | None = None,
) -> Tensor:
    """(prompts,) bool, of all processes: this share of all prompts, rounded up, as far as there are `candidates`
    (prompts,) bool (None: all are): first those whose rewards differ, then those whose equal rewards are above 0, both
    in random order; then the others, by decreasing mean number of steps (RLDF).

    `generator` is in the same state on all processes."""
    local_values = torch.stack([batch["completion_reward"], scored_steps(batch)], dim=1)
    rewards, steps = ranks.all_gather(local_values).unbind(1)
    rewards, steps = rewards.view(-1, group), steps.view(-1, group).mean(1)

    # 2: rewards differ; 1: they are equal and above 0; 0: the others. Completions without a reward do not count, and a
    # prompt without any reward is one of the others. Within a kind, order by a number below 1.
    kinds = torch.where(has_equal_rewards(rewards), (rewards.nanmean(1) > 0).long(), 2)
    drawn = torch.rand(len(kinds), generator=generator).to(steps.device)
    order = kinds + torch.where(kinds == 0, steps / (1 + steps.max()), drawn)
    if candidates is None:
        candidates = torch.ones_like(kinds, dtype=torch.bool)
    position = order.masked_fill(~candidates, -1.0).argsort(descending=True).argsort()
    return candidates & (position < math.ceil(share * len(kinds)))


def scored_steps(batch: Batch) -> Tensor:
    """(rows,) number of steps that revealed a scored token."""
    scored = pad_to_width(batch["completion_mask"], batch["reveal_steps"].shape[1]).bool()
    steps = torch.where(scored, batch["reveal_steps"], -1).sort(1).values
    return F.pad(steps, (1, 0), value=-1).diff(dim=1).ne(0).sum(1).float()


def filter_groups(batch: Batch, prompts: Tensor, group: int, ranks: RankView) -> float:
    """Drops all prompts but those of `prompts` (bool, those of all processes) from the loss; returns their share."""
    rows = ranks.local_slice(prompts.repeat_interleave(group), len(batch["advantages"]))
    batch["completion_mask"] = batch["completion_mask"] * rows.unsqueeze(1)
    batch["num_items_in_batch"] = count_scored_tokens(batch, ranks)
    return prompts.float().mean().item()


# --- Mini-batches -----------------------------------------------------------------------------------------------------


def draw_mini_batches(rows: int, parts: int, generator: torch.Generator) -> Tensor:
    """(rows,) the mini-batch of each of the `rows` of a rollout, over all processes: of every `parts` consecutive rows,
    one at random is in each mini-batch. So a mini-batch has as many rows of each process, and the same rows for every
    number of processes."""
    order = torch.rand(rows // parts, parts, generator=generator).argsort(dim=1)
    return order.flatten()


def sort_into_mini_batches(batches: Sequence[Batch]) -> list[Batch]:
    """The rows of a rollout's micro-batches, sorted by their `mini_batch`; rows of one keep their order."""
    order = torch.cat([batch["mini_batch"] for batch in batches]).argsort(stable=True)
    rows = len(batches[0]["mini_batch"])
    sorted_batches: list[Batch] = [{} for _ in batches]
    for name, value in batches[0].items():
        parts: Sequence[Any] = [value] * len(batches)
        if isinstance(value, Tensor) and value.dim() > 0:
            values = torch.cat([batch[name] for batch in batches])
            parts = values[order].split(rows)
        for batch, part in zip(sorted_batches, parts, strict=True):
            batch[name] = part
    return sorted_batches


# --- Views of the updates ---------------------------------------------------------------------------------------------


def special_tokens(prompt_ids: Tensor, tokenizer: Any) -> Tensor:
    """(rows, prompt) bool, the tokenizer's special tokens."""
    # Special tokens without a named role, such as LLaDA's header tokens, are only flagged.
    flagged = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    special_ids = torch.tensor([*tokenizer.all_special_ids, *flagged], device=prompt_ids.device)
    return torch.isin(prompt_ids, special_ids)


def maskable_tokens(batch: Batch) -> Tensor:
    """(rows, prompt) bool, the prompt tokens that views may hide."""
    if "maskable" in batch:
        return batch["maskable"].bool()
    return batch["prompt_mask"].bool()


def sampled_rows(batch: Batch, blocks: CanvasBlocks, protect_specials_of: Any | None = None) -> SampledRows:
    """A batch as estimators see it, sampled by a model with these blocks. The special tokens of `protect_specials_of`,
    a tokenizer, are never hidden. Log-probs and entropies that the rollout lacks are NaN."""
    canvas_ids = batch["canvas_ids"]
    rows, gen_length = canvas_ids.shape
    maskable = maskable_tokens(batch)
    if protect_specials_of is not None:
        maskable = maskable & ~special_tokens(batch["prompt_ids"], protect_specials_of)
    unknown = torch.full((rows, gen_length), torch.nan, device=canvas_ids.device)
    return SampledRows(
        prompt_ids=batch["prompt_ids"],
        attention_mask=batch["prompt_mask"],
        maskable=maskable,
        canvas_ids=canvas_ids,
        scored=pad_to_width(batch["completion_mask"], gen_length).bool(),
        reveal_steps=batch["reveal_steps"],
        logps=batch.get("rollout_logps", unknown),
        entropies=batch.get("rollout_entropies", unknown),
        blocks=canvas_blocks(batch["prompt_mask"], gen_length, blocks.size, blocks.causal_context),
        write_ids=batch.get("write_ids"),
        write_steps=batch.get("write_steps"),
        write_entropies=batch.get("write_entropies"),
        write_logps=batch.get("write_logps"),
        is_end=batch.get("is_end"),
        start_steps=batch.get("start_steps"),
    )


def draw_updates(
    sampled: SampledRows,
    random: Randomness,
    updates: int,
    estimator: Estimator,
    settings: ViewSettings,
    shared: bool = False,
    split: RankView | None = None,
) -> Batch:
    """`view_noise`, `view_weights` and what else views have, of each update. With `shared`, all updates have the same
    views; with `split`, which knows the rows of all processes, one draw of views is divided among the updates.

    Views are drawn on the CPU, where the generators are: on a device, an estimator would wait once per row.
    """
    device, sampled = sampled.scored.device, sampled.to("cpu")
    if split:
        # One draw, whose views are divided among the updates.
        views = estimator(sampled, random, settings)
        counts = views.scoring.sum(1)
        gathered = split.all_gather(counts.to(device)).cpu()
        before = split.local_slice(gathered.cumsum(0) - gathered, len(counts))  # number of views of earlier rows
        views_of_updates = divide_views(views, updates, random.generators, before.tolist())
    else:
        # A draw per update, or one for all of them.
        draws = 1 if shared else updates
        state = random.shared.get_state()
        views_of_updates = []
        for update in range(draws):
            of_rollout = torch.Generator()
            of_rollout.set_state(state)
            of_update = replace(random, update=update, updates=draws, of_rollout=of_rollout)
            views_of_updates.append(estimator(sampled, of_update, settings))
        views_of_updates = views_of_updates * (updates // draws)

    fields: Batch = {}
    for name in VIEWS:
        if getattr(views_of_updates[0], name) is not None:
            values = torch.stack([getattr(views, name) for views in views_of_updates], dim=1)
            fields[f"view_{name}"] = values.to(device, non_blocking=True)
    return fields


def divide_views(
    views: Views, updates: int, generators: Sequence[torch.Generator], before: Sequence[int]
) -> list[Views]:
    """The views of each update: every view that scores something belongs to one update, at random. The rollout's rows
    deal out their views in turn, each after the `before` views of earlier rows, so the numbers of views per update
    differ by at most one."""
    turn = torch.full(views.weights.shape[:2], -1)  # (rows, views), the update of each view; -1: of none
    for row, (scoring, generator) in enumerate(zip(views.scoring, generators, strict=True)):
        scoring_views = scoring.nonzero().squeeze(1)
        scoring_views = scoring_views[torch.randperm(len(scoring_views), generator=generator)]
        turn[row, scoring_views] = (torch.arange(len(scoring_views)) + before[row]) % updates
    return [views.only(turn == update) for update in range(updates)]


def count_scored(batch: Batch, ranks: RankView, rows_per_completion: int) -> Batch:
    """`scoring_views`, `scored_pairs`, `repeated_tokens` and `active_rows`, counted over the rows that are part of the
    loss."""
    rows, updates, _, width = batch["view_weights"].shape
    mask_R11T = pad_to_width(batch["completion_mask"], width)[:, None, None]
    scored_RUVT = (batch["view_weights"] * mask_R11T).ne(0)
    scoring_RUV = scored_RUVT.any(-1)

    # Of this process: views, tokens that they score, and tokens of the rows that they score, (updates,) each; and
    # completions: a completion of several turns is active if its first row is.
    views, pairs = scoring_RUV.sum((0, 2)), scored_RUVT.sum((0, 2, 3))
    lengths = batch["completion_mask"].sum(1)
    repeats = (scoring_RUV.sum(2) * lengths.unsqueeze(1)).sum(0)
    is_active = batch["advantages"].ne(0) & batch["completion_mask"].any(-1)
    active = is_active[::rows_per_completion].sum()

    # Of all processes.
    local_counts = torch.cat([views, pairs, repeats, active.unsqueeze(0)])
    counts = ranks.all_gather(local_counts).view(-1, len(local_counts)).sum(0)
    views, pairs, repeats, active = counts.split([updates, updates, updates, 1])
    return {
        "scoring_views": views.expand(rows, -1),
        "scored_pairs": pairs.expand(rows, -1),
        "repeated_tokens": repeats.expand(rows, -1),
        "active_rows": active.expand(rows),
    }


def views_of(batch: Batch, update: int) -> Views:
    """The views of an update."""
    fields = {name: batch[f"view_{name}"][:, update] for name in VIEWS if f"view_{name}" in batch}
    return Views(**fields)


def first_equal_updates(batch: Batch, gather: Callable[[Tensor], Tensor]) -> list[int]:
    """For each update, the first of the updates before it that have the same views one after the other, on all
    processes: with split weights, all processes must make the same number of forward passes. Waits for the device."""
    tensors = [batch[f"view_{name}"] for name in VIEWS if f"view_{name}" in batch]
    if tensors[0].shape[1] == 1:
        return [0]

    # (updates - 1,) whether an update has the views of the one before it.
    is_equal = []
    for tensor in tensors:  # (rows, updates, ...)
        same = tensor[:, 1:] == tensor[:, :-1]
        is_equal.append(same.transpose(0, 1).flatten(1).all(1))
    local_repeats = torch.stack(is_equal).all(0).int()
    repeats = gather(local_repeats.unsqueeze(0)).amin(0).tolist()
    firsts = [0]
    for update, repeats_last in enumerate(repeats, start=1):
        firsts.append(firsts[-1] if repeats_last else update)
    return firsts


# --- Scores and the inputs of the loss --------------------------------------------------------------------------------


def score_updates(
    model: Any, batch: Batch, score_one: Callable[[Any, Batch, Views], Scores], firsts: Sequence[int]
) -> Tensor:
    """Log-probs (rows, mu, views, canvas) in the views of every update, without dropout. Update k has those of update
    `firsts[k]`."""
    with evaluating(model):
        logps = {k: score_one(model, batch, views_of(batch, k)).view_logps for k in sorted({*firsts})}
    if len(logps) == 1:
        return logps[firsts[0]].unsqueeze(1).expand(-1, len(firsts), -1, -1)
    return torch.stack([logps[k] for k in firsts], dim=1)


def completion_bounds(view_logps: Tensor, batch: Batch) -> Tensor:
    """(rows,) the weighted sum over views and tokens of log-probs (rows, 1, views, canvas), in one draw of views."""
    return (batch["view_weights"] * view_logps).sum((1, 2, 3))


def score_batch(
    model: Any, batch: Batch, views: Views, *, size: int | None = None, with_entropies: bool = False, **options: Any
) -> Scores:
    """`score` of a batch, `size` rows at a time (default: all), by a model with its wrappers for training."""
    rows, gen_length = batch["canvas_ids"].shape
    size = size or rows
    padded = None
    if "padded" in batch:
        padded = bool(batch["padded"].any())
    parts: list[Scores] = []
    for start in range(0, rows, size):
        part = slice(start, start + size)
        compute = partial(
            score,
            prompt_ids=batch["prompt_ids"][part],
            attention_mask=batch["prompt_mask"][part],
            completion_ids=batch["canvas_ids"][part],
            views=views.each(itemgetter(part)),
            gen_length=gen_length,
            with_entropies=with_entropies,
            padded=padded,
            **options,
        )
        parts.append(run_inside(model, compute))

    # All rows. Entropies are there for all of them or for none.
    logps, view_logps, compute_of_parts, entropies, canvas_entropies = zip(*parts, strict=True)
    return Scores(
        logps=torch.cat(logps),
        view_logps=torch.cat(view_logps),
        compute=torch.stack(compute_of_parts).sum(),
        entropies=None if entropies[0] is None else torch.cat(entropies),
        canvas_entropies=None if canvas_entropies[0] is None else torch.cat(canvas_entropies),
    )


def loss_inputs(
    batch: Batch,
    scores: Scores,
    update: int,
    parts: int = 1,
    reads_old: bool = True,
    sampling_weight_cap: float | None = None,
    views_per_draw: int = 1,
    blocks: CanvasBlocks | None = None,
    turns: int = 1,
    progress: float = 0.0,
) -> LossInputs:
    """The inputs of an objective in update number `update`: tensors as wide as the completions of `batch`.

    Args:
        parts: number of micro-batches of the rollout, over all processes.
        reads_old: the loss reads old log-probs; if none are stored, the policy is still the one that sampled.
        sampling_weight_cap: `cap` of `truncated_weights`; None: no weights.
        views_per_draw: `Estimator.views_per_draw`.
        blocks: those of a model with blocks, where a view contains one step of every block.
        turns: rows per completion.
        progress: as in `LossInputs`.
    """
    width = batch["completion_mask"].shape[1]

    # Reveal steps, in a model with blocks counted from the first step of each block.
    blocks = blocks or CanvasBlocks()
    gen_length = batch["reveal_steps"].shape[1]
    block_numbers = canvas_blocks(batch["prompt_mask"], gen_length, blocks.size, blocks.causal_context)
    reveal_steps = steps_in_blocks(batch["reveal_steps"], block_numbers)

    # Log-probs of the policy, of the old one and of the reference.
    def stored_logps(name: str) -> Tensor | None:
        if name not in batch:
            return None
        return pad_to_width(batch[name][:, update], width)

    view_logps, view_old = pad_to_width(scores.view_logps, width), stored_logps("old_view_logps")
    if view_old is None and reads_old:
        view_old = view_logps.detach()

    # What not every rollout has.
    def stored_tokens(name: str, padding: int = 0) -> Tensor | None:
        if name not in batch:
            return None
        return pad_to_width(batch[name], width, padding)

    def mean_count(name: str) -> Tensor | None:  # at least 1 in the whole rollout, so that it may be below 1
        if name not in batch:
            return None
        return batch[name][0, update].clamp(min=1) / parts

    is_right = None
    if "completion_is_right" in batch:
        is_right = batch["completion_is_right"] == 1
    inputs = LossInputs(
        view_logps=view_logps,
        view_old=view_old,
        view_reference=stored_logps("ref_view_logps"),
        weights=pad_to_width(batch["view_weights"][:, update], width),
        advantages=batch["advantages"],
        mask=batch["completion_mask"],
        tokens=batch["num_items_in_batch"].clamp(min=1) / parts,
        views=mean_count("scoring_views"),
        pairs=mean_count("scored_pairs"),
        repeats=mean_count("repeated_tokens"),  # a rollout in a checkpoint of an earlier version has none
        active=batch["active_rows"][0].clamp(min=1) / parts,
        views_per_draw=views_per_draw,
        reveal_steps=pad_to_width(reveal_steps, width),
        view_advantages=batch.get("view_advantages"),
        log_ratios=batch.get("log_ratios"),
        sibling_advantages=batch.get("sibling_advantages"),
        sibling_ids=stored_tokens("sibling_ids", -1),
        sibling_positions=mean_count("sibling_positions"),
        progress=progress,
        is_right=is_right,
        turns=turns,
        given=stored_tokens("given"),
        old_entropies=stored_tokens("old_entropies"),
    )
    if sampling_weight_cap is None:
        return inputs

    # Importance weights, from the old policy or, for an objective without a ratio, from the current one.
    old = inputs.logps.detach() if view_old is None else inputs.old
    sampled = pad_to_width(batch["rollout_logps"], width)
    weights = truncated_weights(sampled, old, inputs, sampling_weight_cap)
    return replace(inputs, sampling_weights=weights)


def where_scored(inputs: LossInputs) -> Tensor:
    """(rows, tokens) bool, the completion's tokens that were sampled and that at least one view scores."""
    scored = inputs.mask.bool() & (inputs.weights.sum(1) > 0)
    if inputs.given is not None:
        scored = scored & ~inputs.given
    return scored


def mean_logps(logps: Tensor, inputs: LossInputs) -> Tensor:
    """(rows, tokens) weighted means over the views that score a token, from `logps`, the weighted sums."""
    return logps / inputs.weights.sum(1).where(where_scored(inputs), 1.0)


def mean_entropies(entropies: Tensor, weights: Tensor) -> Tensor:
    """(rows, canvas) weighted means over the views that score a token, 0 where none does, from `entropies`, the
    weighted sums, and the views' `weights` (rows, views, canvas)."""
    totals = weights.sum(1)
    return entropies / totals.where(totals > 0, 1.0)


def truncated_weights(sampled: Tensor, old: Tensor, inputs: LossInputs, cap: float) -> Tensor:
    """Truncated importance weights (rows, tokens): min(exp(old - sampled), cap), and 1 for tokens that are not scored
    (Ionides 2008; TRL's `token_truncate`).

    The policy that sampled differs from the one that is trained if the sampler approximates (a cache), or if the
    estimator scores a token in another state than the one in which it was revealed. The weights have no gradient, and a
    KL penalty is not weighted.

    Args:
        sampled: (rows, tokens) log-probs that the sampler noted when it revealed the tokens.
        old: (rows, tokens) the estimator's log-probs in the views of the current update, under the policy before the
            first update on the rollout; for an objective without a ratio, under the current policy.
    """
    gap = mean_logps(old, inputs) - sampled
    return gap.masked_fill(~where_scored(inputs), 0.0).exp().clamp(max=cap)


# --- Metrics ----------------------------------------------------------------------------------------------------------


def prompt_masked(batch: Batch) -> float:
    """The share of prompt tokens that are hidden, over the views of all updates; with tools, of the first prompts."""
    hidden_RUVL = batch["view_noise"]
    prompt_RP = maskable_tokens(batch)
    hidden_in_prompt = hidden_RUVL[..., : prompt_RP.shape[1]].sum()
    updates_and_views = hidden_RUVL.shape[1:3].numel()
    return (hidden_in_prompt / (prompt_RP.sum() * updates_and_views)).item()


def largest_ratio(inputs: LossInputs, gather: Callable[[Tensor], Tensor]) -> float:
    """The largest ratio of new to old probabilities of a token, over all views that score it and all processes."""
    ratios = (inputs.view_logps - require_logps(inputs.view_old)).detach().exp().masked_fill(~inputs.scored, 0.0)
    return gather(ratios.max()).max().item()


def mean_entropy(inputs: LossInputs, entropies: Tensor | None, gather: Callable[[Tensor], Tensor]) -> float:
    """The policy's mean entropy in nats over scored tokens; `entropies` (rows, canvas) are already weighted."""
    assert entropies is not None
    sums = torch.stack([entropies.sum(), inputs.weights.sum()])
    total, weight = gather(sums).view(-1, 2).sum(0).tolist()
    if not weight:
        return 0.0
    return total / weight


def sampling_gap(
    sampled: Tensor, inputs: LossInputs, gather: Callable[[Tensor], Tensor], cap: float | None = None
) -> dict[str, float]:
    """The difference between the policy that sampled, with log-probs `sampled` (rows, canvas), and the one that is
    trained, before the first update.

    A token's log-prob is the mean over the views that score it. The mean difference estimates the KL between the two
    (Schulman's k1). For the exact sampler it is zero under replay, but not under d1's estimator, which scores each
    token alone. If there are sampling weights, their mean and the share of capped tokens are returned, too.
    """
    scored, logps = where_scored(inputs), mean_logps(inputs.logps.detach(), inputs)
    gap = (pad_to_width(sampled, logps.shape[1]) - logps).masked_fill(~scored, 0.0)
    sums = {"sampling/logp_difference_mean": gap.sum(), "sampling/logp_difference_abs": gap.abs().sum()}
    if inputs.sampling_weights is not None and cap is not None:
        sums["sampling/weight_mean"] = (inputs.sampling_weights * scored).sum()
        sums["sampling/weight_capped"] = ((inputs.sampling_weights >= cap) & scored).sum()
    local_sums = torch.stack([*sums.values(), scored.sum()])
    *totals, count = gather(local_sums).view(-1, len(local_sums)).sum(0).tolist()
    metrics = {name: total / max(count, 1) for name, total in zip(sums, totals, strict=True)}
    local_ratio = (-gap).masked_fill(~scored, -torch.inf).max().exp()
    metrics["sampling/ratio_max"] = gather(local_ratio).max().item()
    return metrics


def nonfinite_rows(batch: Batch, logps: Tensor, decode: Callable[[Tensor], str]) -> list[dict[str, Any]]:
    """The rows that made a loss not finite: those with such numbers; all rows if only their sum overflowed."""
    is_bad = ~(torch.isfinite(logps).all(-1) & torch.isfinite(batch["advantages"]))
    if not is_bad.any():
        is_bad = torch.ones_like(is_bad)
    rows = []
    for row in is_bad.nonzero().flatten().tolist():
        prompt_ids = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        completion_ids = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        rows.append(
            {
                "prompt": decode(prompt_ids),
                "completion": decode(completion_ids),
                "advantage": batch["advantages"][row].item(),
                "logps": logps[row].tolist(),
            }
        )
    return rows


def peak_memory_gb() -> float:
    """This process's peak memory so far in GiB: of its GPU if there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, kibibytes on Linux
