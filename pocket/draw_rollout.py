"""Draw how a pocket model denoises one validation puzzle, as an animated SVG.

    python pocket/draw_rollout.py --model_path runs/demo/seed0/sft_grpo --output docs/denoise.svg

Every token appears in the step that revealed it, in the colour of the probability it had there. Greedy.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from make_tokenizer import CELLS, PROMPT_TOKENS

from d1.models import load_model, load_tokenizer
from d1.runs.entry import run_script
from d1.sampling import rollout
from d1.show.denoise import denoise_svg
from d1.show.film import Film
from d1.tasks import load_task

BLOCK = 8


def answer_places(tokens: list[str]) -> dict[int, int]:
    """Cell -> the token of the answer that fills it: the last that names it."""
    return {CELLS.index(token[0]): index for index, token in enumerate(tokens) if re.fullmatch("[a-p][1-4]", token)}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", "--model_name", required=True, help="a pocket model, e.g. of `make demo`")
    parser.add_argument("--problem", type=int, default=0, help="which validation puzzle, from 0")
    parser.add_argument("--gen_length", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("docs/denoise.svg"))
    return parser


def main(args: argparse.Namespace) -> None:
    rows = load_task("sudoku").load_rows("validation")
    if not 0 <= args.problem < len(rows):
        raise ValueError(f"--problem must be from 0 to {len(rows) - 1}, got {args.problem}")
    row, model, tokenizer = rows[args.problem], load_model(args.model_path), load_tokenizer(args.model_path)
    prompt = torch.tensor([tokenizer.apply_chat_template(row["prompt"], return_dict=False)])
    sampled: Any = rollout(
        model,
        prompt,
        torch.ones_like(prompt),
        mask_token_id=tokenizer.mask_token_id,
        gen_length=args.gen_length,
        block_length=BLOCK,
        steps=args.gen_length // 2,
    )
    tokens = [str(tokenizer.convert_ids_to_tokens(token)) for token in sampled.ids[0, PROMPT_TOKENS:].tolist()]
    puzzle = row["question"].strip()[-len(CELLS) :]
    record = (sampled.reveal_steps, sampled.logps, sampled.entropies)
    film = Film("", row["question"], "", tokens, *(numbers[0].tolist() for numbers in record))
    givens = ["" if digit == "0" else digit for digit in puzzle]
    picture = denoise_svg(film, givens, answer_places(tokens), line=BLOCK)
    args.output.write_text(picture)


if __name__ == "__main__":
    run_script("draw_rollout.py", lambda: main(make_parser().parse_args()))
