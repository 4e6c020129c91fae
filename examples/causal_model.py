"""A small autoregressive Llama, to try `d1 a2d` on: next-token training on Sudoku answers, a minute on one CPU core.

    python -m examples.causal_model --output_dir runs/causal

It has the tokenizer of the pocket model without a mask token, and causal attention, like a model from the hub.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from d1.masking import keyed_generator
from d1.models import load_tokenizer
from examples.sft_loop import encode

BATCH, LEARNING_RATE, SEED = 64, 2e-3, 0  # rows per optimizer step


def new_model(tokenizer: Any) -> Any:
    """A causal decoder of 0.2M parameters with random weights."""
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"vocab_size": len(tokenizer), "intermediate_size": 192, "max_position_embeddings": 256}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def next_token_loss(model: Any, ids: Tensor, answer: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' tokens, each given the tokens before it; both inputs are (rows, tokens)."""
    logits = model(input_ids=ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits[answer[:, 1:]], ids[:, 1:][answer[:, 1:]])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_data", default="dataset/sudoku_sft.jsonl", help="JSON lines, as examples.sft_loop")
    parser.add_argument("--output_dir", default="runs/causal")
    parser.add_argument("--steps", type=int, default=300)
    return parser


def main(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer("pocket/base")
    with open(args.train_data, encoding="utf-8") as file:
        rows = [encode(tokenizer, json.loads(line), 40) for line in file]  # all of one length
    ids, answer = (torch.stack(part) for part in zip(*rows, strict=True))  # (rows, tokens) each
    model, random = new_model(tokenizer), keyed_generator(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for step in range(args.steps):
        chosen = torch.randint(len(ids), (BATCH,), generator=random)
        loss = next_token_loss(model, ids[chosen], answer[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            sys.stdout.write(f"step {step + 1}  loss {loss.item():.4f}\n")
    tokenizer.mask_token = None  # an autoregressive model has none
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main(make_parser().parse_args())
