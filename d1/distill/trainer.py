"""Distillation from traces, on Transformers' Trainer.

Before an optimizer step, all of its micro-batches are prepared without gradients: the states of their traces, and where
the model already finds the trace's tokens most likely. The counts that the loss divides by are summed over all
micro-batches and processes. Then each micro-batch adds its part of the loss. So neither accumulation nor the number of
processes changes a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from d1.distill.config import DistillConfig
from d1.distill.losses import (
    NoisedTexts,
    ReadLogits,
    ScoredPositions,
    certainty_loss,
    count_positions,
    is_most_likely,
    read_certainty,
    read_positions,
)
from d1.distill.states import Traces, halves
from d1.distill.traces import TraceSampler
from d1.masking import keyed_generator
from d1.models.attention import left_pad
from d1.models.head import run_inside
from d1.runs.data import IGNORED, BatchRow
from d1.runs.trainer import SummingTrainer

STATE_DRAWS = 7  # the second part of the key of the states' random numbers


class TraceDataset(torch.utils.data.Dataset):
    """A row is its `BatchRow`: the trainer looks up its prompt and trace."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, chosen: BatchRow) -> BatchRow:
        return chosen


def collate(rows: list[BatchRow]) -> dict[str, Any]:
    """The `batch_rows`, and `labels` (rows,), which Trainer counts."""
    return {"batch_rows": rows, "labels": torch.tensor([IGNORED if batch_row.row < 0 else 1 for batch_row in rows])}


class DistillTrainer(SummingTrainer, Trainer):
    """Trainer with the loss of dParallel; `train` raises FloatingPointError for a loss that is not finite.

    Args:
        sampler: of traces, and the prompts.
        rows: the numbers of the prompts that are trained on.
        traces: of these rows.
        **kwargs: `computed_tokens`, what sampling these traces processed; and Trainer's.
    """

    sums_file = "distill_sums.json"

    def __init__(
        self, settings: DistillConfig, sampler: TraceSampler, rows: list[int], traces: Traces, **kwargs: Any
    ) -> None:
        super().__init__(data_collator=collate, train_dataset=TraceDataset(len(rows)), **kwargs)
        self.settings: Any = settings  # with the method's values where the user gave none
        self.sampler, self.rows, self.traces = sampler, rows, traces
        self.totals: Tensor = torch.zeros(())

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """The prepared micro-batches of an optimizer step, and its number of rows over all processes."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        prepared = [self.prepare_batch(batch) for batch in batches]
        if prepared:
            totals = sum(count_positions(batch["scored"]) for batch in prepared)
            self.totals = self.accelerator.reduce(totals, "sum")
        return prepared, count

    def prepare_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A micro-batch with its states, and which tokens of the traces are the most likely ones there."""
        batch_rows, labels = batch["batch_rows"], batch["labels"]
        indices = [max(batch_row.row, 0) for batch_row in batch_rows]  # an empty row stands for the first: labels tell
        rows = [self.rows[index] for index in indices]

        # The states of the traces.
        generators = []
        for batch_row, row in zip(batch_rows, rows, strict=True):
            generators.append(keyed_generator(self.settings.seed, STATE_DRAWS, batch_row.epoch, row, 0))
        traces = self.traces.at(torch.tensor(indices))
        states = halves(traces, generators, self.settings.tail)
        is_trained = (labels.cpu() != IGNORED).view(-1, 1, 1)  # to multiply (rows, states, canvas)
        positions = states.positions & is_trained

        # What a pass needs, on the device.
        device = self.args.device
        prompts = [self.sampler.prompts.ids[row] for row in rows]
        prompt_ids, prompt_mask = left_pad(prompts, self.sampler.tokenizer.pad_token_id)
        texts = NoisedTexts(
            ids=torch.cat([prompt_ids, states.ids], dim=1).to(device),
            visible=torch.cat([prompt_mask, torch.ones_like(states.ids)], dim=1).to(device),
            noise=states.noise.to(device),
            positions=positions,
        )
        row, state, position = positions.nonzero().unbind(1)  # (n,) each, in the order in which passes read them
        ids = states.ids[row, position].to(device, non_blocking=True)
        with torch.no_grad():
            (right,) = self.read(self.model, texts, is_most_likely, (ids,))
        scored = ScoredPositions(state.to(device, non_blocking=True), ids, right)
        return {"labels": labels, "texts": texts, "scored": scored, "rows": rows}

    def read(self, model: Any, texts: NoisedTexts, read: ReadLogits, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`read_positions`; counts its compute."""

        def compute(model: Any) -> tuple[tuple[Tensor, ...], Tensor]:
            return read_positions(
                model,
                texts,
                read,
                columns,
                mask_token_id=self.sampler.tokenizer.mask_token_id,
                states_at_once=self.settings.views_at_once,
            )

        with self.compute_loss_context_manager():
            results, tokens = run_inside(model, compute)
        self.computed_tokens += tokens.detach()
        return results

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The batch's part of the step's loss, times the number of processes, over which gradients are averaged."""
        scored: ScoredPositions = inputs["scored"]
        read = partial(read_certainty, temperature=self.settings.entropy_temperature)
        logps, entropies = self.read(model, inputs["texts"], read, (scored.ids,))
        loss = certainty_loss(scored, logps, entropies, self.totals, self.settings.entropy_weight)
        loss = loss * self.accelerator.num_processes
        self.require_finite(loss.detach(), lambda: self.texts_of(inputs))
        self.add_means({"logps/own": logps.detach(), "right": scored.right, "entropy": entropies.detach()})
        return (loss, {}) if return_outputs else loss

    def texts_of(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        texts = self.sampler.tokenizer.batch_decode(inputs["texts"].ids)
        return [{"prompt": row, "text": text} for row, text in zip(inputs["rows"], texts, strict=True)]

    def add_means(self, values: dict[str, Tensor]) -> None:
        """Add values to the means of the next log."""
        for name, tensor in values.items():
            self.add(name, tensor)
            self.add(f"n/{name}", torch.tensor(tensor.numel()))

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        return {name: sums[name] / max(sums[f"n/{name}"], 1) for name in sums if f"n/{name}" in sums}
