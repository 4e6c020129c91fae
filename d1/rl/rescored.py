"""Score a sampled row again: whether a server's or an engine's log-probabilities are the trainer's own.

Of each rollout that another program sampled, one row per process is scored in some of the states that it was sampled
in, in one forward pass. The row and the states change from rollout to rollout. Nothing is drawn, the model and the
batch do not change, and the cost is not part of `compute_tokens`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from d1.models.kinds import block_size
from d1.rl.updates import Batch, evaluating, score_batch
from d1.scoring import SampledRows, Views
from d1.scoring.replay import Written, replay_views
from d1.scoring.rollouts import blocks_of

logger = logging.getLogger(__name__)

STATES = 8  # that a row is scored in
EXACT = 1e-2  # nats between log-probabilities in fp32, the largest difference: their rounding is 1e-5 to 1e-3
CLOSE = 0.5  # nats, the median difference: what another data type changes is about 0.02


def check_servers(trainer: Any, batch: Batch, sources: Sequence[str]) -> None:
    """`check_scores` of a rollout whose rows these servers sampled."""
    dtypes = {server.url: server.dtype for server in trainer.servers.servers}
    stale = trainer.mode == "train" and trainer.ahead is not None and bool(trainer.ahead.behind)
    fp32 = trainer.accelerator.mixed_precision == "no" and trainer.model.dtype == torch.float32
    exact = fp32 and {dtypes[url] for url in sources} == {"float32"}

    def where(row: int) -> str:
        number = trainer.accelerator.process_index * len(sources) + row
        return f"{sources[row]}, row {row} (id {'-'.join(map(str, (*trainer.key('rollout')[1:], number)))}): "

    check_scores(trainer, batch, range(len(sources)), where, exact, certain=not stale)


def check_engine(trainer: Any, given: dict[str, Sequence[Any]], record: Batch) -> None:
    """`check_scores` of what a `rollout_func` returned. A canvas that is cut is left out: its states are not known."""
    rows = [row for row, ids in enumerate(given["completion_ids"]) if len(ids) == record["canvas_ids"].shape[1]]
    ids, mask = trainer.padded([[*prompt] for prompt in given["prompt_ids"]])
    batch = {"prompt_ids": ids, "prompt_mask": mask} | record
    check_scores(trainer, batch, rows, lambda row: f"rollout_func, row {row}: ", exact=False, certain=True)


def check_scores(
    trainer: Any, batch: Batch, rows: Sequence[int], where: Callable[[int], str], exact: bool, certain: bool
) -> None:
    """Scores one of the `rows` of a rollout again.

    Args:
        batch: `prompt_ids` and `prompt_mask` (rows, prompt), and the record of the rollout (rows, canvas):
            `canvas_ids`, `reveal_steps`, `rollout_logps` and, if known, `rollout_entropies`.
        where: from the number of a row, who sampled it.
        exact: both programs compute in fp32.
        certain: the weights are those that sampled. Then, unless the sampler approximates (a cache, or 4-bit weights in
            the trainer), a difference is an error; else a warning.

    Raises:
        ValueError: log-probabilities or entropies are not those of the model in the states that the steps say.
    """
    sampling = trainer.sampling
    if not rows or sampling.cfg_scale:  # guidance samples from other log-probabilities
        return
    certain &= sampling.cache is None and not getattr(trainer.model, "is_loaded_in_4bit", False)
    number = trainer.rollout_number if trainer.mode == "train" else trainer.evaluation_rollouts
    row = rows[number % len(rows)]
    one = {name: batch[name][row : row + 1] for name in batch}
    views = states_of(one, trainer.model.config, number)
    with trainer.without_checkpointing(), evaluating(trainer.model), trainer.accelerator.autocast():
        options = {"mask_token_id": trainer.mask_token_id, "distribution": sampling.recorded}
        scores = score_batch(trainer.model, one, views, views_at_once=STATES, with_entropies=True, **options)
    scored = views.weights.ne(0).any(1)
    pairs = {"log-probabilities": (one["rollout_logps"], scores.logps)}
    if "rollout_entropies" in one and scores.entropies is not None:
        pairs["entropies"] = one["rollout_entropies"], scores.entropies
    for what, (told, own) in pairs.items():
        gaps = (own.float() - told)[scored].abs().cpu()
        at = int(gaps.argmax())
        if gaps.median() <= CLOSE and not (exact and certain and gaps[at] > EXACT):
            continue
        place = int(scored[0].nonzero()[at])
        message = (
            f"{where(row)}the {what} are not those of this run's model, which scored {len(gaps)} tokens again: the "
            f"difference is {gaps.median():.3g} nats in the median, and at token {place} they are "
            f"{told[0, place]:.4g} and {own[0, place]:.4g}"
        )
        if certain:
            raise ValueError(f"{message}: other weights, settings or tokens than those of the rows sampled them")
        if not trainer.warned_of_scores:
            logger.warning("%s. The sampler approximates, or its weights are older; this is said once.", message)
            trainer.warned_of_scores = True


def states_of(one: Batch, config: Any, number: int) -> Views:
    """Up to `STATES` views of one row, evenly spaced over its steps: the states in which it was sampled, and the tokens
    that were revealed there."""
    prompts, canvas = one["prompt_mask"], one["canvas_ids"]
    sampled = SampledRows(
        prompt_ids=one["prompt_ids"],
        attention_mask=prompts,
        maskable=prompts.bool(),
        completion_ids=canvas,
        scored=one["reveal_steps"] >= 0,
        reveal_steps=one["reveal_steps"],
        logps=one["rollout_logps"],
        entropies=one["rollout_logps"],
        blocks=blocks_of(prompts, canvas.shape[1], block_size(config)),
    )
    written = Written.of(sampled)
    steps = int(written.steps.max()) + 1
    count = min(STATES, steps)
    chosen = (torch.arange(count, device=canvas.device) * steps // count + number) % steps
    weights = torch.ones(1, count, device=canvas.device)
    return replay_views(torch.zeros_like(prompts, dtype=torch.bool).unsqueeze(1), written, chosen.unsqueeze(0), weights)
