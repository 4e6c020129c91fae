"""Work for the benchmarks: models with random weights, random ids, and the functions that are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import published
from d1 import sampling
from d1.models import prepare
from d1.scoring import mean_field_logps

MASK = 3  # ids 0 to 3 are padding, <bos>, <eos> and the mask, as in the pocket tokenizers
SIZES = {  # vocabulary, hidden, feed-forward, layers, heads
    "tiny": (2048, 32, 64, 2, 4),
    "60m": (26_000, 512, 2048, 8, 8),
    "wide": (126_464, 64, 128, 1, 4),  # LLaDA's vocabulary with a very small transformer: for the memory of logits
    "goal": (126_464, 512, 2048, 8, 8),
    "small_head": (4870, 512, 2048, 8, 8),  # the body of "goal"; the head has LLaDA-8B's share of the work, 6.9%
    "llada": (126_464, 4096, 12_288, 32, 32),  # LLaDA-8B
}


def random_model(size: str, block_size: int | None = None) -> Any:
    """A Llama of a size in `SIZES` with random weights: bidirectional, or block-causal if there is a block size; in
    bf16 on a GPU if there is one."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape: dict[str, Any] = dict(zip(names, SIZES[size], strict=True))
    shape |= {"max_position_embeddings": 4096, "is_causal": False, "block_size": block_size}
    config = LlamaConfig(**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):  # created on its device: a large model may not fit elsewhere
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    return prepare(model).eval()


def random_prompts(model: Any, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask (rows, length), without padding or special tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
    return ids, torch.ones_like(ids)


def scoring_inputs(model: Any, args: Any) -> tuple[torch.Tensor, ...]:
    """Prompts and their mask (rows, prompt), completions (rows, length), and prompt noise (rows, mu, prompt)."""
    ids, mask = random_prompts(model, args.rows, args.prompt)
    completion, _ = random_prompts(model, args.rows, args.length)
    noise = torch.rand(args.rows, args.mu, args.prompt, generator=torch.Generator().manual_seed(2)) < 0.15
    return ids, mask, completion, noise.to(ids.device)


def our_scores(model: Any, ids: torch.Tensor, mask: torch.Tensor, completion: torch.Tensor, noise: torch.Tensor) -> Any:
    """Log-probs (rows, mu, completion) as the RL trainer computes them: one mask after the other."""
    options: dict[str, Any] = {"mask_token_id": MASK, "gen_length": completion.shape[1]}
    parts = [mean_field_logps(model, ids, mask, completion, one, **options) for one in noise.unbind(1)]
    return torch.stack(parts, dim=1)


def update(model: Any, score: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
    """The log-probs under the first mask, and their gradients."""
    score(model, *inputs[:3], inputs[3][:, :1]).sum().backward()
    model.zero_grad()  # or the next call would free these gradients, and its peak would be too low


def ways(model: Any, args: Any, **options: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """The functions to compare, by task: the published one first, then ours.

    Args:
        options: arguments of `generate` that replace those of the benchmark.
    """
    inputs = scoring_inputs(model, args)
    lengths = {"gen_length": args.length, "block_length": args.block, "steps": args.steps}
    settings: dict[str, Any] = {"mask_token_id": MASK, **lengths, **options}
    samplers = {"published": published.generate, "ours": sampling.generate}
    theirs: Callable[..., torch.Tensor] = functools.partial(published.score, mask_token_id=MASK)
    scores = {"published": theirs, "ours": our_scores}
    return {
        "rollout": {way: functools.partial(run, model, *inputs[:2], **settings) for way, run in samplers.items()},
        "scoring": {way: functools.partial(torch.no_grad()(score), model, *inputs) for way, score in scores.items()},
        "update": {way: functools.partial(update, model, score, inputs) for way, score in scores.items()},
    }
