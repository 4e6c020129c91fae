"""Servers of rollouts side by side: tokens per second of the same rows on each, and how many of their tokens agree.

    python -m benchmarks.engines --model_path JetLM/SDAR-1.7B-Chat --gen_length 256 \\
        --urls http://127.0.0.1:30000 http://127.0.0.1:30001

The servers run already, with the model's own weights: `d1 serve`, SGLang with the plugin, or both (docs/engines.md has
the commands). Each gets all rows in one request, once to warm up and then `--repeats` times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from d1.masking import keyed_generator
from d1.models import load_tokenizer
from d1.models.kinds import block_size, native_config
from d1.ranges import COUNT
from d1.runs.cli import OneLineParser, run_script
from d1.sampling import Rollout
from d1.sampling.settings import add_sampling_flags, sampling_settings
from d1.serve.client import FRESH, Prompts, RolloutServer, Weights


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--urls", nargs="+", required=True)
    parser.add_argument("--rows", type=COUNT, default=64)
    parser.add_argument("--prompt_tokens", type=COUNT, default=128)
    parser.add_argument("--repeats", type=COUNT, default=3)
    add_sampling_flags(parser)
    return parser


def timed(server: RolloutServer, prompts: Prompts, repeats: int) -> tuple[Rollout, list[float]]:
    """The rows, and the seconds of each repetition after the first."""
    seconds, weights = [], Weights("", FRESH, Path())
    for _ in range(repeats + 1):
        began = time.perf_counter()
        found = server.sample(prompts, weights)
        seconds.append(time.perf_counter() - began)
    return found, seconds[1:]


def main(args: argparse.Namespace) -> None:
    config, _ = native_config(args.model_path)
    settings, mask_token_id = sampling_settings(vars(args), config), load_tokenizer(args.model_path).mask_token_id
    shape = args.rows, args.prompt_tokens
    ids = torch.randint(4, config.vocab_size - 1, shape, generator=keyed_generator(0))
    ids[ids == mask_token_id] = 4
    keys = [(0, 0, 0, row) for row in range(args.rows)]
    of_model = block_size(config) is not None, config.vocab_size, mask_token_id
    prompts = Prompts(ids, torch.ones_like(ids), keys, settings, (), *of_model)
    first: Rollout | None = None
    sys.stdout.write(
        "| server | tokens per second | passes per row | tokens as the first server |\n| --- | --- | --- | --- |\n"
    )
    for url in args.urls:
        server = RolloutServer(url)
        server.prepare(mask_token_id, None)
        found, seconds = timed(server, prompts, args.repeats)
        first = first or found
        rates = [args.rows * settings.gen_length / one for one in seconds]
        same = (found.ids == first.ids)[:, args.prompt_tokens :].float().mean().item()
        rate = f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"
        sys.stdout.write(f"| {url} | {rate} | {found.passes.float().mean().item():.1f} | {same:.1%} |\n")


if __name__ == "__main__":
    run_script("engines", lambda: main(make_parser().parse_args()))
