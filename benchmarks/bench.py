"""Compare this library with the published code (`benchmarks/published.py`) and the bare transformer: speed and memory.

    python -m benchmarks.bench sampler --size goal
    python -m benchmarks.bench all

The first command prints one table. The second, which is `make bench`, runs all commands in `RESULTS.md` in less than
13 minutes on two idle cores. Weights are random. The benchmarks are

    sampler   one rollout: published, ours, and the transformer's forward passes alone
    blocks    one rollout of a block-causal model: with its cache, and with everything recomputed in each step
    scoring   old log-probs under mu masks; one update (loss and gradients)
    memory    peak bytes of published and ours, without the weights

Set OMP_NUM_THREADS=1 to measure one thread.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import published
from benchmarks.machine import as_markdown, multiply_adds, peak_bytes, race
from d1.models import prepare
from d1.models.head import backbone_and_head
from d1.ranges import COUNT
from d1.runs.cli import OneLineParser, run_script
from d1.sampling import generate, rollout
from d1.scoring import mean_field_logps

MASK = 3  # ids 0 to 3 are padding, <bos>, <eos> and the mask, as in the pocket tokenizers
SIZES = {  # vocabulary, hidden, feed-forward, layers, heads
    "tiny": (2048, 32, 64, 2, 4),
    "60m": (26_000, 512, 2048, 8, 8),
    "wide": (126_464, 64, 128, 1, 4),  # LLaDA's vocabulary with a very small transformer: for the memory of logits
    "goal": (126_464, 512, 2048, 8, 8),
    "small_head": (4870, 512, 2048, 8, 8),  # the backbone of "goal"; the head has LLaDA-8B's share of the work, 6.9%
    "llada": (126_464, 4096, 12_288, 32, 32),  # LLaDA-8B
}
Results = dict[str, dict[str, float]]
Runs = Mapping[str, Callable[[], Any]]  # the functions that are compared, by name


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


def random_prompts(model: Any, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask (rows, length), without padding or special tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
    return ids, torch.ones_like(ids)


def our_scores(model: Any, ids: Tensor, mask: Tensor, completion: Tensor, noise: Tensor, mask_token_id: int) -> Tensor:
    """Log-probs (rows, mu, completion) as the RL trainer computes them: one mask after the other."""
    options: dict[str, Any] = {"mask_token_id": mask_token_id, "gen_length": completion.shape[1]}
    parts = [mean_field_logps(model, ids, mask, completion, one, **options) for one in noise.unbind(1)]
    return torch.stack(parts, dim=1)


def samplers(model: Any, args: argparse.Namespace, **options: Any) -> Runs:
    """One rollout. `options` replace arguments of `generate`."""
    prompts = random_prompts(model, args.rows, args.prompt)
    lengths: dict[str, Any] = {"gen_length": args.length, "block_length": args.block, "steps": args.steps}
    ways = {"published": published.generate, "ours": generate}
    return {way: partial(run, model, *prompts, mask_token_id=MASK, **lengths | options) for way, run in ways.items()}


def scorers(model: Any, args: argparse.Namespace) -> tuple[Runs, Runs]:
    """Log-probs under mu masks without gradients; those under the first mask, and their gradients."""
    ids, mask = random_prompts(model, args.rows, args.prompt)
    completion, _ = random_prompts(model, args.rows, args.length)
    noise = torch.rand(args.rows, args.mu, args.prompt, generator=torch.Generator().manual_seed(2)) < 0.15
    noise = noise.to(ids.device)

    def update(score: Callable[..., Tensor]) -> None:
        score(model, ids, mask, completion, noise[:, :1], mask_token_id=MASK).sum().backward()
        model.zero_grad()  # or the next call would free these gradients, and its peak would be too low

    ways: dict[str, Callable[..., Tensor]] = {"published": published.score, "ours": our_scores}
    masks = {
        way: partial(torch.no_grad()(score), model, ids, mask, completion, noise, mask_token_id=MASK)
        for way, score in ways.items()
    }
    return masks, {way: partial(update, score) for way, score in ways.items()}


def race_work(runs: Runs, repeats: int, base: str) -> Results:
    """The times of `race`, and the multiplications."""
    results, work = race(runs, repeats, base), {name: multiply_adds(run) for name, run in runs.items()}
    return {name: row | {f"multiply-adds / {base}": work[name] / work[base]} for name, row in results.items()}


def race_samplers(args: argparse.Namespace) -> Results:
    """One greedy rollout each, compared with the transformer's forward passes alone."""
    model = random_model(args.size)
    ids, _ = random_prompts(model, args.rows, args.prompt)
    backbone, _ = backbone_and_head(model)
    canvas = torch.cat([ids, torch.full((args.rows, args.length), MASK, device=ids.device)], dim=1)

    @torch.no_grad()
    def bare() -> None:
        for _ in range(args.steps):
            backbone(canvas, None)

    runs = samplers(model, args)
    return race_work({"bare": bare, "ours": runs["ours"], "published": runs["published"]}, args.repeats, base="bare")


def race_blocks(args: argparse.Namespace) -> Results:
    """A model with own blocks of `block` tokens: time, tokens processed by the transformer, and multiplications."""
    model = random_model(args.size, block_size=args.block)
    prompts = random_prompts(model, args.rows, args.prompt)
    lengths = {"gen_length": args.length, "block_length": args.block, "steps": args.steps}
    sample = partial(rollout, model, *prompts, mask_token_id=MASK, **lengths)
    runs = {"recomputed": partial(sample, recompute=True), "cached": sample}
    tokens = {name: run().forward_tokens.double().mean().item() for name, run in runs.items()}
    counts = {
        name: {"tokens per row": count, "tokens / recomputed": count / tokens["recomputed"]}
        for name, count in tokens.items()
    }
    return {name: row | counts[name] for name, row in race_work(runs, args.repeats, base="recomputed").items()}


def race_scoring(args: argparse.Namespace) -> Results:
    """Old log-probs under mu masks without gradients, then one inner update's log-probs with them."""
    results: Results = {}
    for title, runs in zip(("mu masks", "update"), scorers(random_model(args.size), args), strict=True):
        named = {f"{way}, {title}": run for way, run in runs.items()}
        results |= race(named, args.repeats, base=f"published, {title}")
    return results


def measure_memory(args: argparse.Namespace) -> Results:
    """Peak bytes of sampling (greedy and at a temperature) and of scoring under mu masks, published and ours."""
    model, blocks = random_model(args.size), -(-args.length // args.block)
    tasks = {
        "sampler": samplers(model, args, steps=blocks),
        "sampler, drawing": samplers(model, args, steps=blocks, temperature=0.9),
        "scoring": scorers(model, args)[0],
    }
    results: Results = {}
    for task, runs in tasks.items():
        theirs, ours = map(peak_bytes, runs.values())
        results[task] = {"published": theirs, "ours": ours, "published / ours": theirs / ours}
    return results


BENCHMARKS: dict[str, Callable[[argparse.Namespace], Results]] = {
    "sampler": race_samplers,
    "blocks": race_blocks,
    "scoring": race_scoring,
    "memory": measure_memory,
}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", *BENCHMARKS])
    parser.add_argument("--size", choices=[*SIZES], default="tiny")
    parser.add_argument("--repeats", type=COUNT, default=5)
    parser.add_argument("--rows", type=COUNT, default=2)
    parser.add_argument("--prompt", type=COUNT, default=64, help="length of the prompt in tokens")
    parser.add_argument("--length", type=COUNT, default=64, help="length of the canvas in tokens")
    parser.add_argument("--block", type=COUNT, default=32)
    parser.add_argument("--steps", type=COUNT, default=32)
    parser.add_argument("--mu", type=COUNT, default=4, help="number of masks")
    return parser


def main(args: argparse.Namespace) -> None:
    if args.what != "all":
        sys.stdout.write(as_markdown(BENCHMARKS[args.what](args)) + "\n")
        return
    for line in Path(__file__).with_name("RESULTS.md").read_text().splitlines():
        if not line.startswith("python -m benchmarks.bench "):
            continue
        if "--size llada" not in line or torch.cuda.is_available():  # a model of LLaDA's size needs a GPU
            sys.stdout.write(f"{line}\n\n")
            main(make_parser().parse_args(line.split()[3:]))


if __name__ == "__main__":
    run_script("bench.py", lambda: main(make_parser().parse_args()))
