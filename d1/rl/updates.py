"""The views of each inner update on a rollout: drawn once, stored with their samples, scored when they are used.

A batch is a dictionary of tensors, made by TRL, to which are added
- `canvas_ids` (rows, canvas): the whole sampled canvas, including what follows a completion's end;
- `view_noise` (rows, mu, views, prompt + canvas) and `view_weights` (rows, mu, views, canvas): [:, k] are the views of
  inner update k; so are `view_shown` and `view_targets` where views have these;
- `write_ids`, `write_steps`, `write_logps` and `write_entropies` (rows, canvas, writes), of a sampler that edits;
- `old_view_logps` and `ref_view_logps` (rows, mu, views, canvas), where the loss needs them;
- `view_advantages` (rows, views), with `state_reward`;
- `scoring_views` (rows, mu) and `active_rows` (rows,): their numbers in the whole rollout, the same for each row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from d1.models.head import run_inside
from d1.models.kinds import block_size
from d1.rl.advantages import ADVANTAGES
from d1.rl.rows import LossInputs
from d1.sampling import Rollout, eos_cut
from d1.scoring import Estimator, Randomness, SampledRows, Scores, Views, ViewSettings, score
from d1.scoring.rollouts import blocks_of, within_blocks

Batch = dict[str, Any]
VIEWS = tuple(field.name for field in fields(Views))


def draw_updates(
    sampled: SampledRows,
    random: Randomness,
    updates: int,
    estimator: Estimator,
    settings: ViewSettings,
    shared: bool = False,
    split: Everyone | None = None,
) -> Batch:
    """`view_noise`, `view_weights` and what else views have, of each update. With `shared`, all updates have the same
    views; with `split`, which knows the rows of all processes, one draw of views is divided among the updates.

    They are drawn on the CPU, where the generators are: on a device, an estimator would wait for it for each row.
    """
    device, sampled = sampled.scored.device, sampled.to("cpu")
    if split:
        views = estimator(sampled, random, settings)
        counts = views.weights.ne(0).any(-1).sum(1)
        everyones = split.gather(counts.to(device)).cpu()
        before = (everyones.cumsum(0) - everyones)[split.first :][: len(counts)]
        drawn = shared_out(views, updates, random.rows, before.tolist())
    else:
        draws = 1 if shared else updates
        drawn = [estimator(sampled, random, settings) for _ in range(draws)] * (updates // draws)
    return {
        f"view_{name}": torch.stack([getattr(views, name) for views in drawn], dim=1).to(device, non_blocking=True)
        for name in VIEWS
        if getattr(drawn[0], name) is not None
    }


def shared_out(views: Views, updates: int, generators: Sequence[torch.Generator], before: Sequence[int]) -> list[Views]:
    """The views of each update: every view that scores something belongs to one update, at random. The rollout's rows
    deal out their views in turn, each after the `before` views of earlier rows, so the numbers of views per update
    differ by at most one."""
    turn = torch.full(views.weights.shape[:2], -1)
    for row, (scoring, generator) in enumerate(zip(views.weights.ne(0).any(-1), generators, strict=True)):
        places = scoring.nonzero().squeeze(1)
        places = places[torch.randperm(len(places), generator=generator)]
        turn[row, places] = (torch.arange(len(places)) + before[row]) % updates
    return [replace(views, weights=views.weights * (turn == update).unsqueeze(-1)) for update in range(updates)]


def count(batch: Batch, everyone: Everyone) -> Batch:
    """`scoring_views` and `active_rows`, counted over the rows that are part of the loss."""
    width, rows = batch["view_weights"].shape[-1], len(batch["canvas_ids"])
    mask = fitted(batch["completion_mask"], width)[:, None, None]
    views = (batch["view_weights"] * mask).ne(0).any(-1).sum((0, 2))
    active = (batch["advantages"].ne(0) & batch["completion_mask"].any(-1)).sum()
    *views, active = everyone.gather(torch.cat([views, active.unsqueeze(0)])).view(-1, len(views) + 1).sum(0)
    return {"scoring_views": torch.stack(views).expand(rows, -1), "active_rows": active.expand(rows)}


def views_of(batch: Batch, update: int) -> Views:
    """The views of an inner update."""
    return Views(**{name: batch[f"view_{name}"][:, update] for name in VIEWS if f"view_{name}" in batch})


def updates_are_alike(batch: Batch, gather: Callable[[Tensor], Tensor]) -> bool:
    """Whether all updates have the same views, on all processes: with split weights, all processes must make the same
    number of forward passes. Waits for the device."""
    columns = [batch[f"view_{name}"] for name in VIEWS if f"view_{name}" in batch]
    alike = torch.stack([(column == column[:, :1]).all() for column in columns]).all()
    return bool(gather(alike.int()).all())


def score_updates(
    model: Any, batch: Batch, score_one: Callable[[Any, Batch, Views], Scores], only_first: bool
) -> Tensor:
    """Log-probs (rows, mu, views, canvas) in the views of every update, without dropout. With `only_first`, the first
    update's are used for all."""
    updates = batch["view_noise"].shape[1]
    with evaluating(model):
        scored = [score_one(model, batch, views_of(batch, k)).view_logps for k in range(1 if only_first else updates)]
    return torch.stack(scored, dim=1).expand(-1, updates, -1, -1)


def score_batch(
    model: Any, batch: Batch, views: Views, *, size: int | None = None, with_entropies: bool = False, **options: Any
) -> Scores:
    """`score` of a batch, `size` rows at a time (default: all), by a model with its wrappers for training."""
    rows, gen_length = batch["canvas_ids"].shape
    parts = []
    for start in range(0, rows, size or rows):
        some = slice(start, start + (size or rows))
        compute = partial(
            score,
            prompt_ids=batch["prompt_ids"][some],
            attention_mask=batch["prompt_mask"][some],
            completion_ids=batch["canvas_ids"][some],
            views=views.each(itemgetter(some)),
            gen_length=gen_length,
            with_entropies=with_entropies,
            **options,
        )
        parts.append(run_inside(model, compute))
    logps, view_logps, tokens, entropies = zip(*parts, strict=True)
    all_entropies = torch.cat(entropies) if with_entropies else None
    return Scores(torch.cat(logps), torch.cat(view_logps), torch.stack(tokens).sum(), all_entropies)


def loss_inputs(
    batch: Batch,
    scores: Scores,
    update: int,
    parts: int = 1,
    reads_old: bool = True,
    sampling_weight_cap: float | None = None,
    views_per_draw: int = 1,
    block: int | None = None,
) -> LossInputs:
    """The inputs of an objective in inner update `update`: tensors as wide as the completions of `batch`.

    Args:
        parts: number of micro-batches of the rollout, over all processes.
        reads_old: the loss reads old log-probs; if none are stored, the policy is still the one that sampled.
        sampling_weight_cap: `cap` of `truncated_weights`; None: no weights.
        views_per_draw: `Estimator.views_per_draw`.
        block: tokens per block of a block-causal model, where a view contains one step of every block.
    """
    width = batch["completion_mask"].shape[1]
    steps = within_blocks(batch["reveal_steps"], blocks_of(batch["prompt_mask"], batch["reveal_steps"].shape[1], block))

    def stored(name: str) -> Tensor | None:
        return fitted(batch[name][:, update], width) if name in batch else None

    view_logps, view_old = fitted(scores.view_logps, width), stored("old_view_logps")
    if view_old is None and reads_old:
        view_old = view_logps.detach()
    inputs = LossInputs(
        view_logps=view_logps,
        view_old=view_old,
        view_reference=stored("ref_view_logps"),
        weights=fitted(batch["view_weights"][:, update], width),
        advantages=batch["advantages"],
        mask=batch["completion_mask"],
        # At least 1 in the whole rollout; the average per micro-batch may be below 1.
        tokens=batch["num_items_in_batch"].clamp(min=1) / parts,
        views=batch["scoring_views"][0, update].clamp(min=1) / parts,
        active=batch["active_rows"][0].clamp(min=1) / parts,
        views_per_draw=views_per_draw,
        reveal_steps=fitted(steps, width),
        view_advantages=batch.get("view_advantages"),
        log_ratios=batch.get("log_ratios"),
    )
    if sampling_weight_cap is None:
        return inputs
    old = inputs.logps.detach() if view_old is None else inputs.old
    weights = truncated_weights(fitted(batch["rollout_logps"], width), old, inputs, sampling_weight_cap)
    return replace(inputs, sampling_weights=weights)


def fitted(values: Tensor, width: int) -> Tensor:
    """`values` (..., canvas) cut or zero-padded to `width` columns: TRL pads completions to the longest of their batch,
    and `pad_to_multiple_of` can make this wider than the canvas."""
    return F.pad(values, (0, width - values.shape[-1]))


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Puts the model into evaluation mode (no dropout) inside, and restores its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def texts_of(canvas_ids: Tensor, eos_token_ids: Sequence[int]) -> list[list[int]]:
    """The ids of each row of canvases (rows, canvas) up to and including its first EOS."""
    ids = canvas_ids.cpu()
    return [row[keep].tolist() for row, keep in zip(ids, eos_cut(ids, eos_token_ids), strict=True)]


def in_parts(
    sample: Callable[..., Rollout], ids: Tensor, mask: Tensor, generators: Sequence[torch.Generator], size: int
) -> Rollout:
    """The rollout of prompts (rows, prompt), `size` rows at a time."""
    parts = [slice(start, start + size) for start in range(0, len(ids), size)]
    return Rollout.joined([sample(ids[part], mask[part], generator=generators[part]) for part in parts])


def special_tokens(prompt_ids: Tensor, tokenizer: Any) -> Tensor:
    """(rows, prompt) bool, the tokenizer's special tokens."""
    # Special tokens without a named role, such as LLaDA's header tokens, are only flagged.
    flagged = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    return torch.isin(prompt_ids, torch.tensor([*tokenizer.all_special_ids, *flagged], device=prompt_ids.device))


def sampled_rows(batch: Batch, config: Any, protect_specials_of: Any | None = None) -> SampledRows:
    """A batch as estimators see it, sampled by a model of this config. The special tokens of `protect_specials_of`, a
    tokenizer, are never hidden. Log-probs and entropies that the rollout lacks are NaN."""
    maskable = batch["prompt_mask"].bool()
    if protect_specials_of is not None:
        maskable &= ~special_tokens(batch["prompt_ids"], protect_specials_of)
    unknown = torch.full(batch["canvas_ids"].shape, torch.nan, device=batch["canvas_ids"].device)
    return SampledRows(
        prompt_ids=batch["prompt_ids"],
        attention_mask=batch["prompt_mask"],
        maskable=maskable,
        completion_ids=batch["canvas_ids"],
        scored=fitted(batch["completion_mask"], batch["canvas_ids"].shape[1]).bool(),
        reveal_steps=batch["reveal_steps"],
        logps=batch.get("rollout_logps", unknown),
        entropies=batch.get("rollout_entropies", unknown),
        blocks=blocks_of(batch["prompt_mask"], batch["canvas_ids"].shape[1], block_size(config)),
        **{name: batch.get(name) for name in ("write_ids", "write_steps", "write_entropies")},
    )


def where_scored(inputs: LossInputs) -> Tensor:
    """(rows, tokens) bool, the completion's tokens that at least one view scores."""
    return inputs.mask.bool() & (inputs.weights.sum(1) > 0)


def mean_logps(logps: Tensor, inputs: LossInputs) -> Tensor:
    """(rows, tokens) `logps`, weighted sums over views, turned into means over the views that score a token."""
    return logps / inputs.weights.sum(1).where(where_scored(inputs), 1.0)


def truncated_weights(sampled: Tensor, old: Tensor, inputs: LossInputs, cap: float) -> Tensor:
    """Truncated importance weights (rows, tokens): min(exp(old - sampled), cap), and 1 for tokens that are not scored
    (Ionides 2008; TRL's `token_truncate`).

    The policy that sampled differs from the one that is trained if the sampler approximates (a cache), or if the
    estimator scores a token in another state than the one in which it was revealed. The weights have no gradient, and a
    KL penalty is not weighted.

    Args:
        sampled: (rows, tokens) log-probs that the sampler recorded when it revealed the tokens.
        old: (rows, tokens) the estimator's log-probs in the views of the current update, under the policy before the
            first update on the rollout; for an objective without a ratio, under the current policy.
    """
    gap = mean_logps(old, inputs) - sampled
    return gap.masked_fill(~where_scored(inputs), 0.0).exp().clamp(max=cap)


class Everyone(NamedTuple):
    """Access to the rows of all processes: a function that gathers tensors, and the number of this process's first
    row."""

    gather: Callable[[Tensor], Tensor]
    first: int


def reshaped(advantages: Tensor, name: str, group: int, everyone: Everyone) -> Tensor:
    """TRL's advantages (rows,) as changed by `ADVANTAGES[name]`; a group has `group` rows and may span processes."""
    if ADVANTAGES[name].of is None or group == 1:
        return advantages
    return ADVANTAGES[name](everyone.gather(advantages).view(-1, group)).flatten()[everyone.first :][: len(advantages)]


def keep_prompts(batch: dict[str, Any], shares: Sequence[float], group: int, everyone: Everyone) -> float:
    """Drops prompts whose fraction of correct completions is outside `shares` (lower, upper bound) from the loss;
    returns the share of prompts kept."""
    right = everyone.gather(batch["completion_is_right"]).view(-1, group).nanmean(1)
    kept = (right >= shares[0]) & (right <= shares[1])
    rows = kept.repeat_interleave(group)[everyone.first :][: len(batch["advantages"])]
    batch["completion_mask"] = batch["completion_mask"] * rows.unsqueeze(1)
    batch["num_items_in_batch"] = everyone.gather(batch["completion_mask"].sum()).sum()
    return kept.float().mean().item()
