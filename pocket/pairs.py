"""Pairs of a model's own completions of a task's training problems: a right answer against a wrong one.

    python -m pocket.pairs --model_path pocket/base --task sudoku --gen_length 32 --output runs/pairs.jsonl

Of each problem that the model answers both rightly and wrongly, the first answer of each kind. Everything is a function
of the seed. The model samples as a pocket model does in RL: blocks of 8, two tokens per step, temperature 0.9.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.tokenizer import encode_prompt, render_prompt
from d1.ranges import COUNT, SEED
from d1.runs.cli import OneLineParser, run_script
from d1.sampling import rollout
from d1.tasks import load_task

BLOCK, TEMPERATURE = 8, 0.9  # as in pocket.yaml


def sample_texts(
    model: Any, tokenizer: Any, prompts: Sequence[list[dict[str, str]]], gen_length: int, seed: int
) -> tuple[list[str], int]:
    """One completion per prompt (chat messages) up to its end, of `gen_length` tokens, two per step, and the tokens
    that the forward passes processed; generators are (seed, row)."""
    texts = [encode_prompt(tokenizer, render_prompt(tokenizer, prompt)) for prompt in prompts]
    longest = max(map(len, texts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    sampled = rollout(
        model.eval(),
        ids,
        mask,
        mask_token_id=tokenizer.mask_token_id,
        generator=[keyed_generator(seed, row) for row in range(len(texts))],
        gen_length=gen_length,
        block_length=BLOCK,
        steps=gen_length // 2,
        temperature=TEMPERATURE,
    )
    canvases = sampled.ids[:, longest:]
    completions = []
    for canvas in canvases.tolist():
        end = canvas.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in canvas else len(canvas)
        completions.append(tokenizer.decode(canvas[:end], skip_special_tokens=True))
    return completions, int(sampled.forward_tokens.sum())


def make_pairs(
    task: str, model_path: Path, length: int, problems: int, samples: int, seed: int, file: Path
) -> dict[str, int]:
    """Writes pairs in TRL's format, as chat messages.

    Args:
        length: tokens of the canvas.
        samples: completions of each problem.

    Returns:
        How many `pairs` there are, and what `sampling` cost in compute tokens (1 per token of a forward pass).
    """
    module, rng = load_task(task), random.Random(seed)
    model, tokenizer = load_model(str(model_path)), load_tokenizer(str(model_path))
    rows = module.load_rows("train")
    rows = rows.select(rng.sample(range(len(rows)), min(problems, len(rows))))
    drawn = [sample_texts(model, tokenizer, rows["prompt"], length, 1000 * seed + draw) for draw in range(samples)]
    lines = []
    for row, *texts in zip(rows, *(completions for completions, _ in drawn), strict=True):
        right = [next(iter(module.score(text, row).values())) == 1 for text in texts]
        if any(right) and not all(right):
            pair = {"chosen": texts[right.index(True)], "rejected": texts[right.index(False)]}
            turns = {name: [{"role": "assistant", "content": text}] for name, text in pair.items()}
            lines.append({"prompt": row["prompt"], **turns})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"pairs": len(lines), "sampling": sum(tokens for _, tokens in drawn)}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--gen_length", type=COUNT, required=True, help="tokens of the canvas")
    parser.add_argument("--problems", type=COUNT, default=256)
    parser.add_argument("--samples", type=COUNT, default=4, help="completions of each problem")
    parser.add_argument("--seed", type=SEED, default=0)
    parser.add_argument("--output", type=Path, required=True)
    return parser


def main(args: argparse.Namespace) -> None:
    given = args.task, args.model_path, args.gen_length, args.problems, args.samples, args.seed, args.output
    made = make_pairs(*given)
    sys.stdout.write(f"{made['pairs']} pairs of {args.problems} problems in {args.output}\n")


if __name__ == "__main__":
    run_script("pocket.pairs", lambda: main(make_parser().parse_args()))
