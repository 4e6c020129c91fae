"""diffu-GRPO (d1, arXiv 2504.12216) in one file: no trainer, one device, all weights trained.

    python -m examples.rl_loop --model_path pocket/base --task sudoku --rollouts 20

It reads from top to bottom: sample a group of completions for each prompt, reward them, estimate their
log-probabilities, and take mu optimizer steps on them. `d1.rl` adds processes, LoRA, accumulation, checkpoints, logs,
other methods and samplers; without these, its updates are the ones below (`tests/examples/test_loops.py`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from d1.masking import draw_masks, keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.tokenizer import end_ids
from d1.sampling import SamplingSettings, eos_cut, rollout
from d1.scoring import mean_field_logps
from d1.tasks import load_task

VIEWS, ROLLOUT = 0, 1  # streams of random numbers, numbered as in `d1.rl.trainer`
Reward = Callable[..., list[float]]


@dataclass(frozen=True)
class Settings:
    """d1's objective with the pocket model's sizes; `d1.rl.config` explains each field."""

    prompts: int = 8  # per rollout
    num_generations: int = 8  # completions per prompt: a group
    num_iterations: int = 4  # mu: optimizer steps per rollout
    gen_length: int = 32
    block_length: int = 8
    diffusion_steps: int = 16
    temperature: float = 0.9
    p_mask_prompt: float = 0.15
    epsilon: float = 0.5
    beta: float = 0.04
    learning_rate: float = 1e-4
    max_grad_norm: float = 0.2
    seed: int = 0


def encode(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Prompt ids and attention mask, (rows, prompt) each, padded on the left."""
    chats = [row["prompt"] for row in rows]
    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    batch = tokenizer.apply_chat_template(chats, **options)
    return batch["input_ids"], batch["attention_mask"]


def group_advantages(rewards: Tensor, size: int) -> Tensor:
    """(rows,) each reward minus the mean of its group of `size` rows; d1 does not divide by the standard deviation."""
    groups = rewards.view(-1, size)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def clipped_loss(
    logps: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, mask: Tensor, s: Settings
) -> Tensor:
    """GRPO's loss: PPO's clipped ratio and k3 to the reference per token, averaged over all tokens that count.

    Args:
        logps, old, reference: (rows, tokens), of the policy, of the policy that sampled, and of the reference model.
        advantages: (rows,).
        mask: (rows, tokens) bool.
    """
    ratio, gain = (logps - old).exp(), advantages.unsqueeze(1)
    policy = -torch.min(ratio * gain, ratio.clamp(1 - s.epsilon, 1 + s.epsilon) * gain)
    gap = reference - logps
    kl = gap.exp() - gap - 1  # k3, which is never negative
    return ((policy + s.beta * kl) * mask).sum() / mask.sum()


def train(
    model: Any, reference: Any, tokenizer: Any, rewards: Sequence[Reward], batches: Sequence[list[dict]], s: Settings
) -> Iterator[dict[str, float]]:
    """Trains `model` on one rollout per batch of rows; yields the metrics of each rollout.

    Args:
        reference: a frozen copy of the model that training starts from.
        rewards: TRL's signature, `f(completions=..., **columns)`; their sum is the reward.
        batches: `s.prompts` rows each, with a `prompt` and the columns that the rewards read.
    """
    optimizer = torch.optim.AdamW(model.parameters(), s.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    settings = SamplingSettings(s.gen_length, s.block_length, s.diffusion_steps, s.temperature)
    end, mask_token_id = end_ids(tokenizer), tokenizer.mask_token_id
    for number, batch in enumerate(batches):
        step = number * s.num_iterations  # optimizer steps so far; random numbers are keyed by it and by the row
        rows = [row for row in batch for _ in range(s.num_generations)]
        ids, attention_mask = encode(tokenizer, rows)

        # Sample. Each row has its own random numbers, so it does not depend on its neighbours.
        generators = [keyed_generator(s.seed, ROLLOUT, step, row) for row in range(len(rows))]
        options = {"mask_token_id": mask_token_id, "generator": generators, "eos_token_ids": end}
        canvas_ids = rollout(model.eval(), ids, attention_mask, settings, **options).ids[:, ids.shape[1] :]
        mask = eos_cut(canvas_ids, end)  # (rows, canvas) bool: up to and including the first end token

        # Reward.
        texts = [
            tokenizer.decode(row[keep], skip_special_tokens=True) for row, keep in zip(canvas_ids, mask, strict=True)
        ]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        columns["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
        reward = torch.tensor([reward(**columns) for reward in rewards]).sum(0)
        advantages = group_advantages(reward, s.num_generations)

        # Score. d1's estimate hides the whole completion in every update, and a new random part of the prompt.
        generators = [keyed_generator(s.seed, VIEWS, step, row) for row in range(len(rows))]
        noises = [draw_masks(attention_mask.bool(), s.p_mask_prompt, generators) for _ in range(s.num_iterations)]
        given: dict[str, Any] = {"prompt_ids": ids, "attention_mask": attention_mask, "completion_ids": canvas_ids}
        scores: Callable[..., Tensor] = partial(
            mean_field_logps, **given, mask_token_id=mask_token_id, gen_length=s.gen_length
        )
        with torch.no_grad():
            old = [scores(model, prompt_noise=noise) for noise in noises]
            anchor = [scores(reference, prompt_noise=noise) for noise in noises]

        # Learn: mu optimizer steps on the same completions. In the first one, every ratio is 1.
        model.train()
        for update, noise in enumerate(noises):
            loss = clipped_loss(scores(model, prompt_noise=noise), old[update], anchor[update], advantages, mask, s)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
            optimizer.step()
        yield {"rollout": number, "reward": reward.mean().item(), "length": mask.sum(1).float().mean().item()}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default="pocket/base", help="folder or hub name")
    parser.add_argument("--task", default="sudoku", help="a task's name, or your own task file")
    parser.add_argument("--rollouts", type=int, default=20)
    return parser


def main(args: argparse.Namespace) -> None:
    s, task = Settings(), load_task(args.task)
    model, reference = load_model(args.model_path), load_model(args.model_path).eval()
    rows = task.load_rows("train").shuffle(seed=s.seed).to_list()
    rows = rows * math.ceil(args.rollouts * s.prompts / len(rows))  # again from the first row after the last one
    batches = [rows[start : start + s.prompts] for start in range(0, args.rollouts * s.prompts, s.prompts)]
    for metrics in train(model, reference, load_tokenizer(args.model_path), task.REWARDS, batches, s):
        sys.stdout.write("  ".join(f"{name} {value:.3g}" for name, value in metrics.items()) + "\n")


if __name__ == "__main__":
    main(make_parser().parse_args())
