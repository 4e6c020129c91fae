"""RL's optimizer steps: the real trainer, the same with the published pieces, and the passes it cannot do without.

The trainer samples with `d1.sampling.rollout` and scores with `d1.scoring.score`. While it runs, both are replaced by
clocked ones: the library's own, or the published.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback

from benchmarks import published
from benchmarks.clock import Clock, ClockedTraining
from benchmarks.random_models import different_words, model_and_tokenizer, random_words
from d1.models.head import body_and_head
from d1.rl import trainer as diffu_grpo_trainer
from d1.rl import updates as update_views
from d1.rl.config import DiffuGRPOConfig
from d1.sampling import Rollout, rollout
from d1.sampling.reveal import reveal_schedule
from d1.sampling.settings import SamplingSettings
from d1.scoring import Scores, Views, score
from d1.tasks import load_task


class Scored(NamedTuple):
    """A call of `d1.scoring.score`: the model, the prompts' mask, the views' weights, and how it was to run."""

    model: Any
    prompt_mask: Tensor
    weights: Tensor
    views_at_once: int
    with_gradients: bool

    def passes(self) -> list[Tensor]:
        """The (row, view) pairs (n, 2) of each forward pass: those that score something, or all of a single view."""
        rows, views = self.weights.shape[:2]
        at = self.weights.ne(0).any(-1) if views > 1 else torch.ones(rows, 1, dtype=torch.bool)
        return list(at.nonzero().split(rows * self.views_at_once))


@dataclass
class Work:
    """What a trainer sampled (the prompts' mask, and the rollout) and scored, in order."""

    rollouts: list[tuple[Tensor, Rollout]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)


POCKET_PROMPT = 18  # tokens of the pocket model's prompts


def published_rollout(
    model: Any, prompt_ids: Tensor, attention_mask: Tensor, settings: SamplingSettings, *, mask_token_id: int, **_: Any
) -> Rollout:
    """The published sampler in the place of `d1.sampling.rollout`. The record, which d1 does not keep, is zeros."""
    names = ("gen_length", "block_length", "steps", "temperature", "cfg_scale", "remasking")
    options = {name: getattr(settings, name) for name in names}
    ids = published.generate(model, prompt_ids, attention_mask, mask_token_id=mask_token_id, **options)
    zeros = torch.zeros(len(ids), settings.gen_length, device=ids.device)
    steps = torch.full_like(ids[:, 0], settings.steps)
    return Rollout(ids, zeros, zeros.long(), zeros, steps, steps * ids.shape[1])


def published_score(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    completion_ids: Tensor,
    views: Views,
    with_entropies: bool = False,
    views_at_once: int = 1,
    **options: Any,
) -> Scores:
    """Full logits of all positions in the place of `d1.scoring.score`. Entropies, which d1 does not compute, are 0."""
    noise = views.noise[:, :, : prompt_ids.shape[1]]  # behind the prompt all is hidden
    logps = published.score(model, prompt_ids, attention_mask, completion_ids, noise, **options)
    summed = (views.weights * logps).sum(1)
    return Scores(summed, logps, torch.tensor(0), torch.zeros_like(summed) if with_entropies else None)


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ours": (rollout, score),
    "published": (published_rollout, published_score),
}


def train_rl(trainer: Any, way: str, clock: Clock) -> Work:
    """One rollout and its mu optimizer steps, sampled and scored in a way of `WAYS`, clocked; returns what was sampled
    and scored."""
    sample, log_probs = WAYS[way]
    work = Work()

    def recorded(model: Any, prompt_ids: Tensor, attention_mask: Tensor, *args: Any, **options: Any) -> Rollout:
        sampled = sample(model, prompt_ids, attention_mask, *args, **options)
        work.rollouts.append((attention_mask, sampled))
        return sampled

    def noted(model: Any, *, attention_mask: Tensor, views: Views, views_at_once: int, **options: Any) -> Scores:
        found = Scored(model, attention_mask, views.weights, views_at_once, torch.is_grad_enabled())
        work.scored.append(found)
        return log_probs(model, attention_mask=attention_mask, views=views, views_at_once=views_at_once, **options)

    clocked_score = clock.timed(noted, lambda: "update" if torch.is_grad_enabled() else "scoring")
    before = diffu_grpo_trainer.rollout, update_views.score
    diffu_grpo_trainer.rollout, update_views.score = clock.timed(recorded, "rollout"), clocked_score
    try:
        trainer.train()
    finally:
        diffu_grpo_trainer.rollout, update_views.score = before
    return work


def group_size(rows: int) -> int:
    """Completions a prompt in a rollout of `rows`: all of them, or about 8."""
    return rows // max(1, rows // 8)


def rewards_and_rows(args: Any, vocabulary: int) -> tuple[list[Callable], Dataset]:
    """Rewards and rows: of the pocket model's task, or of random words with prompts of `args.prompt` tokens."""
    if args.size == "pocket":
        task = load_task("sudoku")
        return task.REWARDS, task.load_rows("train")
    source = random.Random(0)
    questions = [random_words(args.prompt - 1, vocabulary, source) for _ in range(64)]  # and a <bos>
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    return [different_words], Dataset.from_list(rows)


def rl_trainer(args: Any, folder: Path, clock: Clock, **changes: Any) -> Any:
    """A trainer whose every `train()` is a rollout with its mu updates; `train_rl` clocks what this does not.

    Args:
        changes: settings of `DiffuGRPOConfig` in place of those of the benchmark.
    """
    model, tokenizer = model_and_tokenizer(args.size)
    rewards, rows = rewards_and_rows(args, model.config.vocab_size)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": args.rows,
        "num_generations": group_size(args.rows),
        "max_prompt_length": args.prompt,
        "max_completion_length": args.length,
        "block_length": args.block,
        "diffusion_steps": args.steps,
        "num_iterations": args.mu,
        "learning_rate": 1e-6,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **changes,
    }
    mu = settings["num_iterations"]
    config = DiffuGRPOConfig(output_dir=str(folder), max_steps=mu, logging_steps=mu, **settings)
    rewards = [clock.timed(reward, "rewards") for reward in rewards]
    trainer: Any = diffu_grpo_trainer.DiffuGRPOTrainer(
        model, rewards, config, rows, tokenizer, callbacks=[ClockedTraining(clock)]
    )
    trainer.remove_callback(PrinterCallback)
    clock.watch(trainer, "training_step", "bookkeeping")
    clock.watch(trainer, "compute_loss", "update")
    clock.watch(trainer.accelerator, "backward", "update")
    clock.watch(trainer.accelerator, "clip_grad_norm_", "optimizer")
    return trainer


def bare_rl(trainer: Any, work: Work, clock: Clock) -> None:
    """The passes that the trainer's last rollout and updates cannot do without, on rows of the same shape.

    Sampling: each step, the body over prompt and canvas, its last layer and the head at the positions still hidden in
    the block; with the EOS stop, of the rows that have not ended before it.
    Scoring: for every pass, body, and head at the positions that it scores.
    Updates: the same, and the backward pass from a given gradient of the logits. Of several passes in an update each is
    computed once without gradients, and again before its backward pass: else memory would grow with them.
    """
    args = trainer.args
    [(prompt_mask, sampled)] = work.rollouts
    prompt, ids = prompt_mask.shape[1], sampled.ids.clone()
    is_eos = ids[:, prompt:] == trainer.processing_class.eos_token_id
    lengths = (is_eos.cumsum(-1) - is_eos.long() == 0).sum(1)  # up to each row's EOS
    ids[:, prompt:] = trainer.mask_token_id
    passes = [([(pairs[:, 0], call.weights[*pairs.T].ne(0)) for pairs in call.passes()], call) for call in work.scored]

    def mask_of(prompt_mask: Tensor) -> Tensor | None:
        if prompt_mask.all():
            return None
        return torch.cat([prompt_mask, prompt_mask.new_ones(len(prompt_mask), ids.shape[1] - prompt)], dim=1)

    def logits(of: Any, rows: Tensor, scored: Tensor, mask: Tensor | None) -> Tensor:
        body, head = body_and_head(of)
        return head(body(ids[rows], None if mask is None else mask[rows])[:, prompt:][:, : scored.shape[1]][scored])

    mask = mask_of(prompt_mask)
    with clock.phase("rollout"), torch.no_grad(), trainer.accelerator.autocast():
        body, head = body_and_head(trainer.model)
        end = prompt
        for reveals in reveal_schedule(args.max_completion_length, args.block_length, args.diffusion_steps):
            live = lengths > end - prompt if trainer.eos_stop else torch.ones_like(lengths, dtype=torch.bool)
            if not live.any():
                break
            rows, visible = ids[live], None if mask is None else mask[live]
            end += sum(reveals)
            for left in itertools.accumulate(reveals[:-1], operator.sub, initial=sum(reveals)):
                states = body(rows, visible, torch.arange(end - left, end, device=ids.device).expand(len(rows), -1))
                head(states)
    with clock.phase("scoring"), torch.no_grad(), trainer.accelerator.autocast():
        for parts, call in passes:
            mask = mask_of(call.prompt_mask)
            for part in parts if not call.with_gradients else []:
                logits(call.model, *part, mask)
    with clock.phase("update"):
        for parts, call in passes:
            if not call.with_gradients:
                continue
            mask = mask_of(call.prompt_mask)
            if len(parts) > 1:
                with torch.no_grad(), trainer.accelerator.autocast():
                    for part in parts:
                        logits(call.model, *part, mask)
            for part in parts:
                with trainer.accelerator.autocast():
                    found = logits(call.model, *part, mask)
                found.backward(torch.ones_like(found))
            trainer.model.zero_grad()
