"""Masked SFT on Transformers' Trainer, with LLaDA's loss over a whole optimizer step (arXiv 2502.09992, algorithm 2).

The loss is the sum over hidden answer tokens of cross-entropy / t', divided by the number of answer tokens, as in d1
(LLaDA divides each row by that of its own answer). Both are computed over the whole optimizer step, so splitting it
into micro-batches and processes changes neither the loss nor its gradient. In a model with blocks, each block has its
own t', and the noised blocks follow the clean text (BD3-LM, arXiv 2503.09573). With a causal context, the clean text is
trained, too (`CausalLoss`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import Sampler
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import PredictionOutput

from d1.models.attention import has_causal_context, require_prepared
from d1.models.kinds import block_size, require_masks
from d1.models.packing import enable_packed_rows
from d1.runs.data import IGNORED
from d1.runs.trainer import RunTrainer, check_arguments, check_own_parts, loaded_model, tokenizer_of
from d1.sft.causal_context import context_losses, masked_scale
from d1.sft.config import CausalLoss
from d1.sft.data import dLLMDataCollator, row_numbers, split_rows
from d1.sft.editing import edit_losses
from d1.sft.losses import weighted_losses

LOSS_SUMS = "loss_sums.json"  # a checkpoint's file with the sums of losses so far
EDITS_AND_CONTEXT = "--edit_noise trains edits of visible tokens, which no sampler of a causal context makes"


def check_data(data_collator: Any, datasets: dict[str, Any]) -> None:
    """Refuse (ValueError) a collator or rows of Transformers or TRL, which have no noise, and rows to evaluate on that
    have the noise of training."""
    if data_collator is not None and not hasattr(data_collator, "schedule"):
        kind = type(data_collator).__name__
        raise ValueError(f"data_collator is {kind}: leave it out, or use d1.sft.dLLMDataCollator(tokenizer)")
    for name, dataset in datasets.items():
        parts = dataset.values() if isinstance(dataset, dict) else [dataset]
        for part in parts:
            if part is not None and not hasattr(part, "lengths"):
                raise ValueError(
                    f"{name} is {type(part).__name__}, not dLLMSFTDataset: call rows, _ = preprocess_dataset(data, "
                    "tokenizer, max_length, test_split=0) of d1.sft and use dLLMSFTDataset(rows, tokenizer, max_length)"
                )
            if name == "eval_dataset" and getattr(part, "eval", None) is False:
                raise ValueError(
                    "eval_dataset has one random time per row, as in training, not the fixed grid of times of an "
                    "evaluation: use dLLMSFTDataset(rows, tokenizer, max_length, eval=True)"
                )


def default_collator(tokenizer: Any, config: Any) -> dLLMDataCollator:
    """The collator with its defaults for a model of this config. ValueError if the model has no mask token."""
    require_masks(config, "dLLMDataCollator")
    causal = CausalLoss() if has_causal_context(config) else None
    return dLLMDataCollator(tokenizer, block_size=block_size(config), causal=causal)


class dLLMTrainer(RunTrainer, Trainer):
    """Trainer with LLaDA's masked loss and an evaluation loss that can be compared between checkpoints.

    Args:
        model: from `load_model`, or a path or hub name.
        args: `transformers.TrainingArguments`.
        data_collator: a `dLLMDataCollator`; None: one with its defaults for this model.
        processing_class: the tokenizer; None: that of the model's path.
        peft_config: of an adapter to train, such as `peft.LoraConfig`.
        **kwargs: Trainer's; `train_dataset` and `eval_dataset` are `dLLMSFTDataset`.

    Raises:
        ValueError: an argument is of another class, the model was not prepared (`d1.models.prepare`), its block size
            differs from the collator's, or its attention cannot separate the rows that the collator packs.
        FloatingPointError: a loss (the message names a file with the rows to blame) or a saved weight is not finite.
    """

    loss_is_scaled_for_ga = True  # compute_loss divides by the answer tokens of the whole step

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        *,
        processing_class: Any = None,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(args)
        check_own_parts(kwargs)
        check_data(
            data_collator,
            {"train_dataset": kwargs.get("train_dataset"), "eval_dataset": kwargs.get("eval_dataset")},
        )
        path = model
        model = loaded_model(model)
        if data_collator is None and model is not None:
            processing_class = tokenizer_of(processing_class, path)
            data_collator = default_collator(processing_class, model.config)
        if peft_config is not None:
            if isinstance(model, PeftModel):
                raise ValueError(
                    "the model has an adapter already, so a new one would not be saved with it: leave out peft_config "
                    "to train that one, or merge it (`d1 merge`)"
                )
            set_seed(TrainingArguments.seed if args is None else args.seed)  # its first weights are drawn
            model = get_peft_model(model, peft_config)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            processing_class=processing_class,
            compute_metrics=mean_loss,
            **kwargs,
        )

        # The collator's noise has to be that of the model.
        require_prepared(self.model)
        model = cast(Any, self.model)
        size = block_size(model.config)
        collator_size = getattr(self.data_collator, "block_size", None)
        if collator_size != size:
            raise ValueError(
                f"the collator has noise for blocks of {collator_size} tokens, but this {model.config.model_type} has "
                f"blocks of {size}: use dLLMDataCollator(tokenizer, block_size={size})"
            )
        causal = getattr(self.data_collator, "causal", None)
        if has_causal_context(model.config) != (causal is not None):
            if causal:
                has, use = "no", "leave out causal="
            else:
                has, use = "a", "use dLLMDataCollator(..., causal=CausalLoss())"
            raise ValueError(f"this {model.config.model_type} has {has} causal context: {use}")
        if causal and getattr(self.data_collator, "edits", None):
            raise ValueError(EDITS_AND_CONTEXT)
        if getattr(self.data_collator, "packed", False):
            enable_packed_rows(model)

        self.require_one_gpu()
        self.count_labels_of_step()
        self.hidden_in_step: Tensor | None = None  # with `row_noise`, over all processes
        self.start_counting()

    def train_sampler(self, dataset: Any) -> Sampler:
        return self.global_batches(dataset.lengths, fill=dataset.eos_padding == "batch")

    def row_losses(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """(rows,) sums of cross-entropy / t' over each row's hidden tokens; with `EditNoise` or `CausalLoss`, those of
        `edit_losses` or `context_losses`."""
        collator: Any = self.data_collator
        t = inputs["t"].double()
        if t.dim() == 1:  # one per row; with blocks, it is per token already
            t = t[row_numbers(inputs)]
        _, weights = collator.schedule(t)
        if "edited" in inputs:
            return edit_losses(model, inputs, weights, collator.edits, collator.mask_token_id)
        if collator.causal is not None:
            return context_losses(model, inputs, weights, collator.causal)
        masked = inputs["masked"].cpu()  # the only wait for the device
        return weighted_losses(model, inputs, masked, weights)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The batch's share of the step's loss, times the number of processes: gradients are averaged over them."""
        answers = inputs["labels"] != IGNORED
        if getattr(self.data_collator, "row_noise", False):
            inputs = inputs | {"masked_scale": masked_scale(inputs, num_items_in_batch, self.hidden_in_step)}
        row_losses = self.row_losses(model, inputs)
        if num_items_in_batch is None:  # a call outside of training: the mean of this process's batch
            loss = row_losses.sum() / answers.sum()
        else:
            loss = row_losses.sum() / num_items_in_batch * self.accelerator.num_processes
        self.require_finite(loss, partial(self.nonfinite_rows, row_losses, inputs))
        self.answers += answers.sum()
        if return_outputs:
            return loss, {"row_losses": row_losses}
        return loss

    def get_batch_samples(self, *args: Any) -> Any:
        """Trainer's batches of an optimizer step and their number of labels; counts their hidden tokens, too."""
        batches, labels = super().get_batch_samples(*args)
        if getattr(self.data_collator, "row_noise", False):
            self.hidden_in_step = self.sum_over_step(batch["masked"].sum() for batch in batches)
        return batches, labels

    def sum_over_step(self, counts: Iterable[Tensor]) -> Tensor:
        """The sum of the counts of all batches of an optimizer step, over all processes."""
        local_sum = sum(counts, torch.zeros((), dtype=torch.long))
        return self.accelerator.reduce(local_sum.to(self.args.device), "sum")  # type: ignore[no-any-return]

    def nonfinite_rows(self, row_losses: Tensor, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Text, time and loss of the rows whose loss is not finite."""
        tokenizer: Any = self.processing_class
        rows = []
        for row_loss, noised, labels, visible, t in zip(
            row_losses,
            split_rows(inputs, "input_ids"),
            split_rows(inputs, "labels"),
            split_rows(inputs, "attention_mask"),
            split_rows(inputs, "t"),
            strict=True,
        ):
            if not torch.isfinite(row_loss):
                clean = torch.where(labels == IGNORED, noised, labels)[visible.bool()].tolist()
                text = clean if tokenizer is None else tokenizer.decode(clean)
                rows.append({"text": text, "t": t.tolist(), "loss": row_loss.item()})
        return rows

    def prediction_step(
        self, model: Any, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, Tensor, Tensor]:
        """Each row's loss sum and answer tokens, for `mean_loss`."""
        inputs = self.on_device(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            losses = self.row_losses(model, inputs)
        self.require_finite(losses.sum(), partial(self.nonfinite_rows, losses, inputs))
        answers = torch.stack([(labels != IGNORED).sum() for labels in split_rows(inputs, "labels")])
        return None, losses.double(), answers.double()

    def start_counting(self) -> None:
        self.answers = torch.zeros((), dtype=torch.long, device=self.args.device)
        self.counting_since = time.perf_counter()

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """Leave the time inside out of `answer_tokens_per_second`. It may be nested."""
        counted = time.perf_counter() - self.counting_since
        yield
        self.counting_since = time.perf_counter() - counted

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not isinstance(eval_dataset, str):  # the name of one that the constructor got
            check_data(None, {"eval_dataset": eval_dataset})
        with self.not_counted():
            return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> PredictionOutput:
        check_data(None, {"eval_dataset": test_dataset})
        return super().predict(test_dataset, *args, **kwargs)

    @contextlib.contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        with self.not_counted(), super().saving_checkpoint():
            yield

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a log of training, which every process reaches
            answers = self.accelerator.reduce(self.answers, "sum").item()
            logs["answer_tokens_per_second"] = answers / (time.perf_counter() - self.counting_since)
            self.start_counting()
        super().log(logs, start_time)

    def save_extra(self, folder: Path) -> None:
        sums = self.loss_sums()
        if self.args.should_save:
            (folder / LOSS_SUMS).write_text(json.dumps(sums))

    def load_extra(self, folder: Path) -> None:
        self.set_loss_sums(json.loads((folder / LOSS_SUMS).read_text()))


def mean_loss(prediction: EvalPrediction) -> dict[str, float]:
    """The loss over all evaluation draws."""
    losses = torch.as_tensor(prediction.predictions)
    answers = torch.as_tensor(prediction.label_ids)
    return {"loss": float(losses.sum() / answers.sum())}
