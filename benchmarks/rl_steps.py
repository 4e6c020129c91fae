"""RL's optimizer steps: the real trainer, the same with the published pieces, and the passes it cannot do without.

The trainer samples with `d1.sampling.rollout` and scores with `d1.scoring.score`. While it runs, both are replaced by
clocked ones: the library's own, or the published.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("", "diffu-grpo"))

import canvas_rollout
import diffu_grpo_trainer
import update_views
from diffu_grpo_config import DiffuGRPOConfig

from benchmarks import published
from benchmarks.clock import Clock, ClockedTraining
from benchmarks.random_models import ROOT, random_model
from benchmarks.words import different_words, random_words, word_tokenizer
from d1.models import load_model, load_tokenizer
from d1.models.head import body_and_head, logit_parts
from d1.sampling import Rollout, rollout
from d1.sampling.reveal import reveal_schedule
from d1.sampling.settings import SamplingSettings
from d1.scoring import Scores, Views, score
from d1.tasks import load_task

Rollouts = list[tuple[Tensor, Tensor]]  # of each rollout, the prompts' mask (rows, prompt), and ids (rows, tokens)

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


@contextlib.contextmanager
def sampling_and_scoring(way: str, clock: Clock, rollouts: Rollouts) -> Iterator[None]:
    """Inside, trainers sample and score in a way of `WAYS`, clocked; `rollouts` holds what is sampled."""
    sample, log_probs = WAYS[way]

    def recorded(model: Any, prompt_ids: Tensor, attention_mask: Tensor, *args: Any, **options: Any) -> Rollout:
        sampled = sample(model, prompt_ids, attention_mask, *args, **options)
        rollouts.append((attention_mask, sampled.ids))
        return sampled

    clocked_score = clock.timed(log_probs, lambda: "update" if torch.is_grad_enabled() else "scoring")
    before = canvas_rollout.rollout, update_views.score
    canvas_rollout.rollout, update_views.score = clock.timed(recorded, "rollout"), clocked_score
    try:
        yield
    finally:
        canvas_rollout.rollout, update_views.score = before


def train_rl(trainer: Any, way: str, clock: Clock) -> Rollouts:
    """One rollout and its mu optimizer steps; returns the rollout."""
    rollouts: Rollouts = []
    with sampling_and_scoring(way, clock, rollouts):
        trainer.train()
    return rollouts


def group_size(rows: int) -> int:
    """Completions a prompt in a rollout of `rows`: all of them, or about 8."""
    return rows // max(1, rows // 8)


def pocket_job() -> tuple[Any, Any, list[Callable], Dataset]:
    """The pocket model, its tokenizer, and rewards and rows of its task."""
    path, task = str(ROOT / "pocket" / "base"), load_task("sudoku")
    return load_model(path), load_tokenizer(path), task.REWARDS, task.load_rows("train")


def random_job(args: Any) -> tuple[Any, Any, list[Callable], Dataset]:
    """A random model, its tokenizer, a reward, and rows with prompts of `args.prompt` tokens."""
    model, source = random_model(args.size), random.Random(0)
    vocabulary = model.config.vocab_size
    questions = [random_words(args.prompt - 1, vocabulary, source) for _ in range(64)]  # and a <bos>
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": question}]} for question in questions])
    return model, word_tokenizer(vocabulary), [different_words], rows


def rl_trainer(args: Any, folder: Path, clock: Clock) -> Any:
    """A trainer whose every `train()` is a rollout with its mu updates; `train_rl` clocks what this does not."""
    model, tokenizer, rewards, rows = pocket_job() if args.size == "pocket" else random_job(args)
    config = DiffuGRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=args.rows,
        num_generations=group_size(args.rows),
        max_prompt_length=args.prompt,
        max_completion_length=args.length,
        block_length=args.block,
        diffusion_steps=args.steps,
        num_iterations=args.mu,
        max_steps=args.mu,
        learning_rate=1e-6,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=args.mu,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
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


def bare_rl(trainer: Any, rollouts: Rollouts, clock: Clock) -> None:
    """The passes that the trainer's last rollout and updates cannot do without, on the same rows.

    Sampling: each step, the body over prompt and canvas, its last layer and the head at the positions still hidden in
    the block; with the EOS stop, of the rows that have not ended before it.
    Scoring: body, and head at the positions up to each row's EOS, mu times for the policy and mu for the reference.
    Updates: the same mu times, and the backward pass from a given gradient of the logits.
    """
    args = trainer.args
    [(prompt_mask, ids)] = rollouts
    prompt = prompt_mask.shape[1]
    is_eos = ids[:, prompt:] == trainer.processing_class.eos_token_id
    hidden = is_eos.cumsum(-1) - is_eos.long() == 0  # up to each row's EOS
    ids = ids.clone()
    ids[:, prompt:] = trainer.mask_token_id
    mask = None
    if not prompt_mask.all():
        mask = torch.cat([prompt_mask, prompt_mask.new_ones(hidden.shape)], dim=1)

    def logits(of: Any) -> Tensor:
        body, head = body_and_head(of)
        return head(body(ids, mask)[:, prompt:][hidden])

    with clock.phase("rollout"), torch.no_grad(), trainer.accelerator.autocast():
        body, _ = body_and_head(trainer.model)
        end, lengths = prompt, hidden.sum(1)
        for reveals in reveal_schedule(args.max_completion_length, args.block_length, args.diffusion_steps):
            live = lengths > end - prompt if trainer.eos_stop else torch.ones_like(lengths, dtype=torch.bool)
            if not live.any():
                break
            rows, visible = ids[live], None if mask is None else mask[live]
            end += sum(reveals)
            for left in itertools.accumulate(reveals[:-1], operator.sub, initial=sum(reveals)):
                states = body(rows, visible, torch.arange(end - left, end, device=ids.device).expand(len(rows), -1))
                for _ in logit_parts(trainer.model, states):  # as the sampler takes them: the faster way
                    pass
    with clock.phase("scoring"), torch.no_grad(), trainer.accelerator.autocast():
        for scored in [trainer.model, trainer.ref_model] * args.num_iterations:
            logits(scored)
    with clock.phase("update"):
        for _ in range(args.num_iterations):
            with trainer.accelerator.autocast():
                found = logits(trainer.model)
            found.backward(torch.ones_like(found))
            trainer.model.zero_grad()
