"""Pretrain a pocket base model on one CPU core: python -m pocket.make_base --task sudoku --seed 0

A bidirectional Llama of 0.2M to 0.5M parameters learns a task by masked diffusion (LLaDA, arXiv 2502.09992), only on
problems drawn from the solutions or numbers of the training set. Stage 1 trains on careful answers and learns to solve
the task. Stage 2 trains on answers of mixed quality, like web text, and so hides that ability.
The same seed gives the same weights. The share of validation problems solved is printed after each stage.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from d1.masking import draw_mask, keyed_generator, noise_level
from d1.models import prepare
from d1.models.attention import Blocks, has_causal_context
from d1.models.head import backbone_and_head
from d1.models.kinds import block_size
from d1.models.packing import two_stream_states
from d1.ranges import COUNT
from d1.runs.cli import OneLineParser, run_script
from d1.sampling import eos_cut, generate
from d1.sft.config import CausalLoss
from d1.tasks import load_task
from pocket.answers import Draw
from pocket.recipes import RECIPES, ROOT, STAGES, Recipe
from pocket.tokenizer import build_tokenizer

WARMUP_STEPS = 50
CANVAS = 32  # tokens: one of the lengths that every recipe trains on, and the default of commands that sample


def build_model(
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    hidden_size: int = 64,
    block_size: int | None = None,
    causal_context: bool = False,
) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.is_causal = False  # Transformers then attends in both directions, also when the saved config is loaded
    if block_size is not None:
        config.block_size = block_size
    if causal_context:
        config.attention_pattern = "causal-context"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = prepare(LlamaForCausalLM(config))
    model.generation_config.max_new_tokens = CANVAS
    return model


def draw_batch(tokenizer: PreTrainedTokenizerBase, recipe: Recipe, draw: Draw, key: tuple[int, int, int]) -> Tensor:
    """Ids of prompts and answers, (batch, prompt + one of the recipe's completion lengths), a function of `key`: the
    seed, the stage and the step."""
    rng = np.random.default_rng(key)
    length = recipe.prompt_tokens + rng.choice(recipe.completion_tokens)
    conversations = [
        [
            {"role": "user", "content": recipe.traces.question(*problem)},
            {"role": "assistant", "content": recipe.write(key[1], problem, rng)},
        ]
        for problem in draw(recipe.batch_size, rng)
    ]
    ids = torch.full((recipe.batch_size, length), tokenizer.eos_token_id)
    for row, tokens in enumerate(tokenizer.apply_chat_template(conversations, return_dict=False)):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return ids


def diffusion_loss(
    model: LlamaForCausalLM,
    ids: Tensor,
    prompt_tokens: int,
    mask_token_id: int,
    key: tuple[int, ...],
    least_noise: float = 0.0,
) -> Tensor:
    """LLaDA's loss: cross-entropy / t' of the masked answer tokens, divided by the number of all answer tokens. For a
    model with blocks, each block has its own t' (BD3-LM, arXiv 2503.09573). With a causal context: `CausalLoss`."""
    generator = keyed_generator(*key)
    rows, length = ids.shape
    causal = has_causal_context(model.config)
    start = prompt_tokens if causal else 0  # of the first block
    block = (torch.arange(length) - start).clamp(min=0) // (block_size(model.config) or length)
    # Each row's u is uniform, but the batch covers (0, 1) evenly, which takes noise out of the loss.
    u = (torch.rand(1, int(block[-1]) + 1, generator=generator) + torch.arange(rows).unsqueeze(1) / rows) % 1
    p = noise_level(least_noise + (1 - least_noise) * u)[:, block]
    answer = (torch.arange(length) >= prompt_tokens).expand(rows, -1)
    masked = draw_mask(answer, p, generator)
    noised = ids.masked_fill(masked, mask_token_id).to(model.device)
    logits = answer_logits(model, ids.to(model.device), noised, prompt_tokens).cpu()
    targets, hidden, p = (of[:, prompt_tokens:] for of in (ids, masked, p))
    answers = targets.numel()
    if causal:  # the clean text predicts the same tokens
        every = torch.ones_like(p)
        targets = targets.repeat(1, 2)
        hidden, p = torch.cat([every, CausalLoss.masked_weight * hidden], dim=1), torch.cat([every, p], dim=1)
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (losses * hidden / p).sum() / answers


def answer_logits(model: LlamaForCausalLM, clean: Tensor, noised: Tensor, prompt_tokens: int) -> Tensor:
    """Logits (rows, answer, vocabulary) of noised answers; with blocks, they follow the clean text. With a causal
    context, those that the clean text gives for the same tokens come first: (rows, 2 x answer, vocabulary)."""
    size, length = block_size(model.config), noised.shape[1]
    if size is None:
        return model(input_ids=noised, logits_to_keep=torch.arange(prompt_tokens, length)).logits
    if has_causal_context(model.config):
        before = torch.arange(prompt_tokens - 1, length - 1).expand(len(clean), -1)
        options: dict[str, Any] = {"blocks": Blocks(size, prompt_tokens), "clean_at": before}
        return backbone_and_head(model)[1](two_stream_states(model, clean, noised[:, prompt_tokens:], None, **options))
    states = two_stream_states(model, clean, noised[:, prompt_tokens // size * size :], None)
    return backbone_and_head(model)[1](states[:, prompt_tokens % size :])


def solve_rate(model: Any, tokenizer: PreTrainedTokenizerBase, task_name: str, gen_length: int) -> float:
    """Share of a task's validation problems solved: greedy, blocks of 8, gen_length / 2 steps."""
    task = load_task(task_name)
    rows = task.load_rows("validation")
    prompts = torch.tensor(tokenizer.apply_chat_template(list(rows["prompt"]), return_dict=False))
    options: dict[str, Any] = {"gen_length": gen_length, "block_length": 8, "steps": gen_length // 2}
    prompts = prompts.to(model.device)
    ids = generate(model.eval(), prompts, torch.ones_like(prompts), mask_token_id=tokenizer.mask_token_id, **options)
    completions = ids[:, prompts.shape[1] :].cpu()
    ended = ~eos_cut(completions, [tokenizer.eos_token_id])  # what follows the first EOS is no answer
    texts = tokenizer.batch_decode(completions.masked_fill(ended, tokenizer.eos_token_id), skip_special_tokens=True)
    return sum(task.score(text, row)["accuracy"] for text, row in zip(texts, rows, strict=True)) / len(texts)


def optimized(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    draw: Draw,
    key: tuple[int, int],
    rates: Iterable[float],
) -> Iterator[float]:
    """Takes one optimizer step per learning rate, and gives the loss of each; `key` is the seed and the stage."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.1)
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        ids = draw_batch(tokenizer, recipe, draw, (*key, step))
        masking = recipe.prompt_tokens, tokenizer.mask_token_id, (*key, step), recipe.least_noise
        loss = diffusion_loss(model.train(), ids, *masking)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def pretrain(
    recipe: Recipe,
    draw: Draw,
    steps: Sequence[int],
    seed: int,
    blocks: int | None = None,
    causal_context: bool = False,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model after both stages of `steps` steps, on the problems that `draw` gives; and its tokenizer."""
    tokenizer = build_tokenizer(recipe.task)
    model = build_model(tokenizer, seed, recipe.hidden_size, blocks, causal_context)
    with tqdm(total=sum(steps), unit="step") as bar:
        for stage, (name, peak_lr, count) in enumerate(zip(STAGES, recipe.peak_lr, steps, strict=True)):
            bar.set_description(name)
            # A linear warm-up times a cosine that ends at 0.
            shares = (
                min(1.0, (i + 1) / WARMUP_STEPS) * (0.5 * (1 + math.cos(math.pi * i / count))) for i in range(count)
            )
            rates = (peak_lr * share for share in shares)
            for loss in optimized(model, tokenizer, recipe, draw, (seed, stage), rates):
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            solved = {length: solve_rate(model, tokenizer, recipe.task, length) for length in recipe.lengths}
            bar.write(f"after {name}: solve rate on validation problems {solved}")
    return model, tokenizer


def widened(recipe: Recipe, hidden_size: int | None) -> Recipe:
    """The recipe for a model of another width, at learning rates that are proportional to 1 / width (as in Tensor
    Programs V, arXiv 2203.03466, for Adam)."""
    if hidden_size is None:
        return recipe
    first, second = (rate * recipe.hidden_size / hidden_size for rate in recipe.peak_lr)
    return replace(recipe, hidden_size=hidden_size, peak_lr=(first, second))


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*RECIPES], default="sudoku")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block_size", type=COUNT, help="make a block-causal model with blocks of this many tokens")
    parser.add_argument("--causal_context", action="store_true", help="with blocks, read clean text from left to right")
    parser.add_argument("--hidden_size", type=COUNT, help="width, a multiple of 8; default: the recipe's")
    parser.add_argument("--output_dir", type=Path, help="default: the task's folder in pocket/, for a model as there")
    return parser


def main(args: argparse.Namespace) -> None:
    if args.causal_context and args.block_size is None:
        raise ValueError("--causal_context needs --block_size")
    folder = ROOT / "pocket" / RECIPES[args.task].base
    if args.output_dir is None and (args.block_size or args.hidden_size):
        raise ValueError(f"a model with --block_size or --hidden_size would replace {folder}: give --output_dir")
    torch.set_num_threads(1)  # more than 2 threads slow so small a model down
    recipe = widened(RECIPES[args.task], args.hidden_size)
    draw = recipe.traces.problems(ROOT / "dataset" / recipe.training_file)
    for part in pretrain(recipe, draw, recipe.steps, args.seed, args.block_size, args.causal_context):
        part.save_pretrained(args.output_dir or folder)


if __name__ == "__main__":
    run_script("make_base.py", lambda: main(make_parser().parse_args()))
