"""How much the gradient of an optimizer step varies with each way of drawing its noise.

    python sft_noise_variance.py --model_name ../pocket/base --train_data ../dataset/sudoku_sft.jsonl

Every way spends the same forward and backward passes: a global batch has --batch_size rows, of which antithetic masks
take half as many twice. Prints a Markdown table of variances, relative to independent noise, with standard errors.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from sft_data import load_rows, preprocess_dataset
from sft_trainer import GlobalBatchSampler, dLLMDataCollator, dLLMSFTDataset, dLLMTrainer
from torch import Tensor
from tqdm import tqdm
from transformers import TrainingArguments

from d1.models import load_model, load_tokenizer

WAYS: dict[str, dict[str, bool]] = {
    "independent": {},
    "--stratified_t": {"stratified_t": True},
    "--antithetic_masks": {"antithetic_masks": True},
    "--stratified_t --antithetic_masks": {"stratified_t": True, "antithetic_masks": True},
}


def step_gradients(trainer: dLLMTrainer, options: dict[str, bool], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The loss (1,) and the gradient, as one vector, of one global batch after another, without end."""
    dataset: Any = trainer.train_dataset
    model: Any = trainer.model
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for epoch in itertools.count():
        slots = list(GlobalBatchSampler(dataset.lengths, batch_size, batch_size, 0, partial(int, epoch), **options))
        for first in range(0, len(slots) - batch_size, batch_size):  # the last batch may not be whole
            batch = trainer.data_collator([dataset[slot] for slot in slots[first : first + batch_size]])
            loss = trainer.compute_loss(model, batch)
            yield loss.detach()[None], torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])


def variances(trainer: dLLMTrainer, options: dict[str, bool], pairs: int, batch_size: int) -> Tensor:
    """(loss, gradient) x (trace of the covariance, its standard error), from half the squared distance of pairs."""
    steps = step_gradients(trainer, options, batch_size)
    squares = [
        torch.stack([(one - other).pow(2).sum() / 2 for one, other in zip(next(steps), next(steps), strict=True)])
        for _ in tqdm(range(pairs), desc=" ".join(options) or "independent", leave=False)
    ]
    table = torch.stack(squares)
    return torch.stack([table.mean(0), table.std(0) / pairs**0.5], dim=1)


def variance_table(trainer: dLLMTrainer, pairs: int, batch_size: int) -> str:
    found = {name: variances(trainer, options, pairs, batch_size) for name, options in WAYS.items()}
    base = found[next(iter(WAYS))][:, :1]
    lines = ["| noise | variance of the loss | variance of the gradient |", "| --- | --- | --- |"]
    for name, table in found.items():
        cells = [f"{variance:.2f} ± {error:.2f}" for variance, error in (table / base).tolist()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", default="../pocket/base")
    parser.add_argument("--train_data", default="../dataset/sudoku_sft.jsonl")
    parser.add_argument("--max_length", type=int, default=4096)
    parser.add_argument("--eos_padding", type=int, default=32, help="answer tokens, EOS included, at least")
    parser.add_argument("--batch_size", type=int, default=16, help="rows of an optimizer step")
    parser.add_argument("--pairs", type=int, default=300, help="pairs of global batches")
    return parser


def main(args: argparse.Namespace) -> str:
    tokenizer = load_tokenizer(args.model_name)
    rows, _ = preprocess_dataset(load_rows(args.train_data), tokenizer, args.max_length, test_split=0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = dLLMTrainer(
            model=load_model(args.model_name),
            args=TrainingArguments(output_dir=folder, report_to="none", remove_unused_columns=False),
            data_collator=dLLMDataCollator(tokenizer),
            train_dataset=dLLMSFTDataset(rows, tokenizer, args.max_length, eos_padding=args.eos_padding),
        )
        return variance_table(trainer, args.pairs, args.batch_size)


if __name__ == "__main__":
    sys.stdout.write(main(make_parser().parse_args()) + "\n")
