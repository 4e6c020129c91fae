"""Masked SFT on Transformers' Trainer: the rows, their noise, and LLaDA's loss over a whole optimizer step.

The loss is the sum over hidden answer tokens of cross-entropy / t', divided by the answer tokens (LLaDA, arXiv
2502.09992, algorithm 2), both taken over every micro-batch and process of an optimizer step. The noise is keyed by
(seed, epoch, row): neither order, batch split, number of processes nor a resume changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from sft_data import preprocess_dataset as preprocess_dataset  # d1's users import it from here
from torch import Tensor
from torch.utils.data import Sampler
from transformers import DefaultDataCollator, EvalPrediction, PreTrainedTokenizerBase, Trainer
from transformers.trainer_pt_utils import get_length_grouped_indices

from d1.masking import draw_noise, keyed_generator, noise_level
from d1.models.head import body_and_head, run_inside, target_logps
from d1.runs.checkpoints import staged_checkpoint

TRAIN_NOISE, EVAL_NOISE, ORDER, STRATA, EVAL_TIMES = range(5)  # second part of a generator's key: one a purpose
EVAL_BANDS = 5  # the evaluation loss is also given by fifths of t
IGNORED = -100  # the label of a token that is not trained on


class Slot(NamedTuple):
    """A place in a global batch: which row, and what its place says of its noise and its padding."""

    row: int  # -1: nothing, to make the last batch as long as the others
    epoch: int = 0
    low: float = 0.0  # t's stratum
    high: float = 1.0
    mirror: bool = False
    length: int = 0  # EOS fills the row up to this many tokens


class dLLMSFTDataset(torch.utils.data.Dataset):
    """Completion-only rows: `input_ids`, `answer` (bool, what is trained on) and what their noise is drawn from.

    Training rows are asked for by a `Slot`; a plain number is that row in epoch 0. With `eval`, every row appears
    `eval_draws` times, its times spread over [0, 1] so that all draws together lie on an even grid; rows come sorted by
    length, so that batches need little padding.

    Args:
        rows: a data set of `sft_data.preprocess_dataset`.
        eos_padding: how far complete answers are filled with EOS, which is trained on like any token: an int N (at
            least N answer tokens, the answer's own EOS included), "batch" (to the longest row of the global batch;
            evaluation rows, whose loss must not depend on a batch, then keep their own EOS only), or "max"
            (to `max_length`, as in d1).
    """

    def __init__(
        self,
        rows: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        eval: bool = False,
        *,
        eos_padding: int | str = "batch",
        seed: int = 42,
        eval_draws: int = 4,
    ) -> None:
        self.rows, self.eos_token_id, self.max_length = rows, tokenizer.eos_token_id, max_length
        self.eval, self.eos_padding, self.seed, self.eval_draws = eval, eos_padding, seed, eval_draws
        self.lengths = [
            self.filled_length(length, start, status)
            for length, start, status in zip(rows["length"], rows["start"], rows["status"], strict=True)
        ]
        if eval:
            self.order = sorted(range(len(rows)), key=self.lengths.__getitem__)
            self.place = torch.randperm(len(rows), generator=keyed_generator(seed, EVAL_TIMES)).tolist()

    def filled_length(self, length: int, start: int, status: str) -> int:
        """Tokens of a row once EOS fills it, as far as the row alone decides."""
        if status == "truncated" or self.eos_padding == "batch":
            return length
        target = self.max_length if self.eos_padding == "max" else start + int(self.eos_padding)
        return max(length, min(target, self.max_length))

    def __len__(self) -> int:
        return len(self.rows) * (self.eval_draws if self.eval else 1)

    def __getitem__(self, place: Slot | int) -> dict[str, Any]:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[Slot | int]) -> list[dict[str, Any]]:
        """A batch, as DataLoader asks for it: its rows are read at once, which takes a third of the time."""
        slots = [place if isinstance(place, Slot) else self.slot(place) for place in places]
        rows = self.rows.__getitems__([max(slot.row, 0) for slot in slots])
        return [self.item(*both) for both in zip(slots, rows, strict=True)]

    def slot(self, place: int) -> Slot:
        """A row as in epoch 0; with `eval`, the row and t of a draw, whose number stands in the epoch's place."""
        if not self.eval:
            return Slot(range(len(self))[place])
        position, draw = divmod(place, self.eval_draws)
        row = self.order[position]
        t = (draw + (self.place[row] + 0.5) / len(self.rows)) / self.eval_draws
        return Slot(row, draw, t, t)

    def item(self, slot: Slot, row: dict[str, Any]) -> dict[str, Any]:
        key = (EVAL_NOISE, slot.row, slot.epoch) if self.eval else (TRAIN_NOISE, slot.epoch, max(slot.row, 0))
        noise = {"key": (self.seed, *key), "low": slot.low, "high": slot.high, "mirror": slot.mirror}
        if slot.row < 0:
            return {"input_ids": [self.eos_token_id], "answer": [False]} | noise
        filled = max(self.lengths[slot.row], slot.length) if row["status"] == "ok" else 0
        missing = max(0, filled - len(row["input_ids"]))
        return {
            "input_ids": row["input_ids"] + [self.eos_token_id] * missing,
            "answer": row["answer"] + [True] * missing,
        } | noise


class GlobalBatchSampler(Sampler[Slot]):
    """Cuts an epoch into the batches of an optimizer step, the same ones however they are split over processes.

    Args:
        lengths: tokens of each row.
        batch_size: rows of an optimizer step: per device x accumulation x processes.
        multiple: per device x processes; the epoch is brought to a multiple of it with empty slots, so that no row
            counts twice.
        epoch: the epoch to sample, asked for when it begins.
        stratified_t: the rows of a batch share [0, 1] out evenly.
        antithetic_masks: every row comes twice in its batch, the second time with the opposite noise.
        fill: rows are filled to the longest of their batch.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        multiple: int,
        seed: int,
        epoch: Callable[[], int],
        *,
        group_by_length: bool = False,
        stratified_t: bool = False,
        antithetic_masks: bool = False,
        fill: bool = False,
    ) -> None:
        self.lengths, self.batch_size, self.multiple, self.seed, self.epoch = lengths, batch_size, multiple, seed, epoch
        self.group_by_length, self.stratified_t, self.fill = group_by_length, stratified_t, fill
        self.copies = 2 if antithetic_masks else 1
        if batch_size % self.copies:
            raise ValueError(f"antithetic masks need an even number of rows an optimizer step, got {batch_size}")

    def __len__(self) -> int:
        return -(-len(self.lengths) * self.copies // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[Slot]:
        epoch, per_batch = self.epoch(), self.batch_size // self.copies
        generator = keyed_generator(self.seed, ORDER, epoch)
        if self.group_by_length:
            order = get_length_grouped_indices(self.lengths, per_batch, generator=generator)
        else:
            order = torch.randperm(len(self.lengths), generator=generator).tolist()
        for number, first in enumerate(range(0, len(order), per_batch)):
            rows = order[first : first + per_batch]
            yield from self.batch(rows, epoch, number)
        yield from [Slot(-1)] * (len(self) - len(order) * self.copies)

    def batch(self, rows: list[int], epoch: int, number: int) -> Iterator[Slot]:
        strata = torch.randperm(len(rows), generator=keyed_generator(self.seed, STRATA, epoch, number)).tolist()
        width = 1 / (len(rows) * self.copies)
        length = max(self.lengths[row] for row in rows) if self.fill else 0
        for row, stratum in zip(rows, strata, strict=True):
            low, high = (stratum * width, (stratum + 1) * width) if self.stratified_t else (0.0, 1.0)
            for mirror in (False, True)[: self.copies]:
                yield Slot(row, epoch, low, high, mirror, length)


class dLLMDataCollator(DefaultDataCollator):
    """Pads rows to the longest of the batch, draws each row's t and mask, and hides the masked tokens.

    Returns a batch of (rows, length) tensors `input_ids` (noised), `labels` (the clean answer, -100 elsewhere) and
    `attention_mask` (0 on padding), and `t` (rows,).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mask_token_id: int | None = None) -> None:
        super().__init__()
        self.mask_token_id = tokenizer.mask_token_id if mask_token_id is None else mask_token_id
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Tensor]:
        lengths = [len(row["input_ids"]) for row in features]
        longest = max(lengths)

        def filled(rows: Sequence[list], filling: int | bool) -> Tensor:
            return torch.from_numpy(np.array([row + [filling] * (longest - len(row)) for row in rows]))

        clean = filled([row["input_ids"] for row in features], self.pad_token_id)
        answer = filled([row["answer"] for row in features], False)
        visible = (torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)).long()
        times: list[Tensor] = []
        hidden: list[Tensor] = []
        for row, maskable in zip(features, answer, strict=True):
            span = {"low": row["low"], "high": row["high"], "mirror": row["mirror"]}
            t, mask = draw_noise(maskable, keyed_generator(*row["key"]), **span)
            times.append(t)
            hidden.append(mask)
        return {
            "input_ids": clean.masked_fill(torch.stack(hidden), self.mask_token_id),
            "labels": clean.masked_fill(~answer, IGNORED),
            "attention_mask": visible,
            "t": torch.stack(times),
        }


class dLLMTrainer(Trainer):
    """Trainer with LLaDA's masked loss, exact over the optimizer step, and an evaluation that checkpoints can share.

    Args:
        stratified_t, antithetic_masks, group_by_length: see `GlobalBatchSampler`.
        **kwargs: Trainer's; `train_dataset` and `eval_dataset` are `dLLMSFTDataset`, `data_collator` a
            `dLLMDataCollator`.
    """

    loss_is_scaled_for_ga = True  # compute_loss divides by the answer tokens of the whole step

    def __init__(
        self,
        *,
        stratified_t: bool = False,
        antithetic_masks: bool = False,
        group_by_length: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(compute_metrics=band_losses, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError("one process a GPU, please: start with `accelerate launch`, or show it a single GPU")
        if not self.args.average_tokens_across_devices:
            raise ValueError("the loss is over all processes: leave average_tokens_across_devices on")
        self.model_accepts_loss_kwargs = True  # makes Trainer count the step's labels and hand the count over
        self._loss_shifts_labels = False  # logits score the token AT a position: the first label counts as well
        self.sampling = {
            "stratified_t": stratified_t,
            "antithetic_masks": antithetic_masks,
            "group_by_length": group_by_length,
        }
        self.start_counting()

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        multiple = self.args.per_device_train_batch_size * self.args.world_size
        return GlobalBatchSampler(
            dataset.lengths,
            multiple * self.args.gradient_accumulation_steps,
            multiple,
            self.args.seed,
            lambda: int(self.state.epoch or 0),
            fill=dataset.eos_padding == "batch",
            **self.sampling,
        )

    def row_losses(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Sum over each row's hidden tokens of cross-entropy / t': (rows,)."""
        labels = inputs["labels"]
        hidden = (inputs["input_ids"] != labels) & (labels != IGNORED)
        weights = 1 / noise_level(inputs["t"].double()).unsqueeze(1).expand(labels.shape)
        if not hidden.any():  # the output layer still has to take part, with nothing to say
            hidden[0, 0], weights = True, torch.zeros_like(weights)

        def hidden_losses(inner: Any) -> Tensor:
            states = body_and_head(inner)[0](inputs["input_ids"], inputs["attention_mask"])
            return -target_logps(inner, states[hidden], labels[hidden].clamp(min=0))[0]

        losses = run_inside(model, hidden_losses)
        rows = hidden.nonzero()[:, 0]
        return losses.new_zeros(len(labels)).index_add(0, rows, losses * weights[hidden].to(losses.dtype))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The batch's share of the step's loss, times the number of processes, whose gradients are then averaged."""
        row_losses = self.row_losses(model, inputs)
        answers = inputs["labels"] != IGNORED
        if num_items_in_batch is None:
            loss = row_losses.sum() / answers.sum()
        else:
            loss = row_losses.sum() / num_items_in_batch * self.accelerator.num_processes
        visible = inputs["attention_mask"]
        self.counts += torch.stack([answers.sum(), visible.sum(), torch.tensor(visible.numel(), device=visible.device)])
        return (loss, {"row_losses": row_losses}) if return_outputs else loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with staged_checkpoint(self):  # a run killed while it saves leaves no half checkpoint
            super()._save_checkpoint(model, trial)

    def start_counting(self) -> None:
        self.counts = torch.zeros(3, dtype=torch.long, device=self.args.device)
        self.counting_since = time.perf_counter()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training log, which every process reaches
            answers, visible, all_tokens = self.accelerator.reduce(self.counts, "sum").tolist()
            logs["padding_share"] = 1 - visible / max(all_tokens, 1)
            logs["answer_tokens_per_second"] = answers / (time.perf_counter() - self.counting_since)
            self.start_counting()
        super().log(logs, start_time)

    def prediction_step(
        self, model: Any, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, Tensor, Tensor]:
        """Each row's loss sum, answer tokens and t, for `band_losses`."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            losses = self.row_losses(model, inputs)
        answers = (inputs["labels"] != IGNORED).sum(-1)
        return None, torch.stack([losses.double(), answers.double()], dim=1), inputs["t"]


def band_losses(prediction: EvalPrediction) -> dict[str, float]:
    """The loss of all evaluation draws, and of those in each band of t."""
    table, t = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    metrics = {"loss": float(table[:, 0].sum() / table[:, 1].sum())}
    for band in range(EVAL_BANDS):
        rows = table[(t * EVAL_BANDS).long().clamp(max=EVAL_BANDS - 1) == band]
        if len(rows):
            metrics[f"loss_t{band / EVAL_BANDS:.1f}-{(band + 1) / EVAL_BANDS:.1f}"] = float(
                rows[:, 0].sum() / rows[:, 1].sum()
            )
    return metrics
