"""Distillation from traces, on Transformers' Trainer.

Before an optimizer step, all of its micro-batches are prepared without gradients: the states of their traces, and the
teacher's target there. The counts that the loss divides by are summed over all micro-batches and processes. Then each
micro-batch adds its part of the loss. So neither accumulation nor the number of processes changes a step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from d1.distill.config import DistillConfig
from d1.distill.losses import DIVERGENCES, TARGETS, Compared, Seen, read_positions
from d1.distill.methods import METHODS
from d1.distill.states import STATES, States, Traces
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
    return {"batch_rows": rows, "labels": torch.tensor([IGNORED if one.row < 0 else 1 for one in rows])}


class DistillTrainer(SummingTrainer, Trainer):
    """Trainer with an entry of `METHODS`; `train` raises FloatingPointError for a loss that is not finite.

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
        self.settings, self.sampler, self.rows, self.traces = settings, sampler, rows, traces
        self.method = METHODS[settings.method]
        self.divergence = DIVERGENCES[self.method.divergence]
        self.totals: Tensor = torch.zeros(())

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """The prepared micro-batches of an optimizer step, and its number of rows over all processes."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        found = [self.prepared(batch) for batch in batches]
        if found:
            self.totals = self.accelerator.reduce(sum(self.divergence.totals(one["compared"]) for one in found), "sum")
        return found, count

    def prepared(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A micro-batch with its states and the teacher's target."""
        chosen, labels = batch["batch_rows"], batch["labels"]
        rows = [self.rows[max(one.row, 0)] for one in chosen]
        keys = [(self.settings.seed, STATE_DRAWS, one.epoch, row, 0) for one, row in zip(chosen, rows, strict=True)]
        traces = self.traces.at(torch.tensor([max(one.row, 0) for one in chosen]))
        states = STATES[self.method.states](traces, [keyed_generator(*key) for key in keys], self.settings)
        trained = (labels.cpu() != IGNORED).view(-1, 1, 1)  # to multiply (rows, states, canvas)
        seen, compared = self.seen(states, states.positions & trained, rows)
        with torch.no_grad():
            target = self.read(self.model, seen, partial(TARGETS[self.method.target], self.settings), (compared.ids,))
        return {"labels": labels, "seen": seen, "compared": replace(compared, target=target), "rows": rows}

    def seen(self, states: States, positions: Tensor, rows: list[int]) -> tuple[Seen, Compared]:
        """What a pass needs on the device, and the positions in the order in which passes read them."""
        device, sampler = self.args.device, self.sampler
        prompts, visible = left_pad([sampler.prompts.ids[row] for row in rows], sampler.tokenizer.pad_token_id)
        ids = torch.cat([prompts, states.ids], dim=1)
        visible = torch.cat([visible, torch.ones_like(states.ids)], dim=1)
        row, state, at = positions.nonzero().unbind(1)  # (n,) each
        columns = {"row": row, "state": state, "ids": states.ids[row, at]}
        there: dict[str, Any] = {name: column.to(device, non_blocking=True) for name, column in columns.items()}
        seen = Seen(ids.to(device), visible.to(device), states.noise.to(device), positions)
        return seen, Compared(**there)

    def read(self, model: Any, seen: Seen, read: Any, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`read_positions`; counts its compute."""
        options = {"mask_token_id": self.sampler.tokenizer.mask_token_id, "states_at_once": self.settings.views_at_once}
        compute = partial(read_positions, seen=seen, read=read, columns=columns, **options)
        with self.compute_loss_context_manager():
            found, tokens = run_inside(model, compute)
        self.computed_tokens += tokens.detach()
        return found

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The batch's part of the step's loss, times the number of processes, over which gradients are averaged."""
        compared: Compared = inputs["compared"]
        read = partial(self.divergence.read, self.settings)
        columns = self.read(model, inputs["seen"], read, (compared.ids, *compared.target))
        loss, logged = self.divergence.loss(compared, columns, self.totals, self.settings)
        loss = loss * self.accelerator.num_processes
        self.require_finite(loss.detach(), lambda: self.texts_of(inputs))
        self.add_means({name: values.detach() for name, values in logged.items()})
        return (loss, {}) if return_outputs else loss

    def texts_of(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        texts = self.sampler.tokenizer.batch_decode(inputs["seen"].ids)
        return [{"prompt": row, "text": text} for row, text in zip(inputs["rows"], texts, strict=True)]

    def add_means(self, values: dict[str, Tensor]) -> None:
        """Add values to the means of the next log."""
        for name, each in values.items():
            self.add(name, each)
            self.add(f"n/{name}", torch.tensor(each.numel()))

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        return {name: sums[name] / max(sums[f"n/{name}"], 1) for name in sums if f"n/{name}" in sums}
