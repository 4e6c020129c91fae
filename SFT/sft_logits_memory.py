"""Rows of logits and peak memory of a training step, beside the usual way of computing all logits.

    python sft_logits_memory.py --length 1024

A narrow model with LLaDA's vocabulary, so that the logits are what fills the memory; half of each row is the answer and
half of the answer is hidden, as on average. Each way runs in a process of its own. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from d1.models import prepare
from d1.models.head import body_and_head, target_logps
from d1.show.tables import markdown_table

LLADA_VOCABULARY = 126464


def measure(way: str, rows: int, length: int, vocabulary: int) -> tuple[int, int, int]:
    """Rows of logits computed in all, rows at one time, and bytes that forward and backward add to the peak."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    config.is_causal = False
    model: Any = prepare(LlamaForCausalLM(config))
    model.to(device)
    calls: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda head, states: calls.append(states[0].shape[:-1].numel()))
    for parameter in model.parameters():  # a step's gradients are there either way
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(vocabulary, (rows, length), device=device)
    hidden = torch.zeros(rows, length, dtype=torch.bool, device=device)
    hidden[:, length // 2 :: 2] = True
    before = peak_bytes()
    if way == "chunks":
        losses = -target_logps(model, body_and_head(model)[0](ids)[hidden], ids[hidden])[0]
    else:
        logits = model(input_ids=ids).logits
        losses = F.cross_entropy(logits[hidden].float(), ids[hidden], reduction="none")
    losses.sum().backward()
    return sum(calls), max(calls), peak_bytes() - before


def peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=LLADA_VOCABULARY)
    return parser


def main(args: argparse.Namespace) -> str:
    rows = []
    for way, name in (("all", "all logits"), ("chunks", "hidden answer tokens, in chunks")):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            total, at_once, peak = pool.apply(measure, (way, args.rows, args.length, args.vocabulary))
        rows.append([name, str(total), str(at_once), f"{peak / 2**20:.0f} MiB"])
    table = markdown_table(["", "rows of logits computed", "at one time", "peak"], rows)
    return f"{args.rows} x {args.length} tokens, vocabulary {args.vocabulary}\n\n{table}"


if __name__ == "__main__":
    sys.stdout.write(main(make_parser().parse_args()))
