"""DPO and KTO on bounds of log-probabilities, on Transformers' Trainer.

Policy and reference are scored in the same views, so that most of the noise of the two bounds cancels in their ratio.
The loss of an optimizer step is the mean over all its pairs or completions, of all micro-batches and processes. Memory
does not grow with the number of draws, because `d1.scoring.score` recomputes each forward pass in the backward pass.

TRL's DPOTrainer and KTOTrainer (1.16) do not fit: their loss calls the model once, on the clean text, for log-probs of
the next token, their constructor loads the reference as a causal model, and they take means over a micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import use_adapter

from d1.models.head import run_inside
from d1.preference.methods import Method
from d1.runs.data import IGNORED
from d1.runs.trainer import SummingTrainer, disable_dropout
from d1.scoring import Views, score


def dpo(ratios: Tensor, signs: Tensor, beta: float) -> Tensor:
    """DPO (arXiv 2305.18290, equation 7), (pairs,): -log sigmoid(beta (chosen ratio - rejected ratio)).

    `ratios` are (2 pairs,), all chosen completions before all rejected ones, so `signs` are not read.
    """
    chosen, rejected = ratios.chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected))


def kto(ratios: Tensor, signs: Tensor, beta: float) -> Tensor:
    """KTO's value function (arXiv 2402.01306, equation 8), weights of 1: 1 - sigmoid(+-beta ratio), for centred ratios.

    All are (completions,); `signs` are 1 for desirable ones and -1 for others.
    """
    return 1 - (beta * signs * ratios).sigmoid()


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {"dpo": dpo, "kto": kto}  # differentiable


class PreferenceTrainer(SummingTrainer, Trainer):
    """Trainer with the loss of an entry of `METHODS`.

    Args:
        reference: the model to compare with, frozen; None: the trained model without its LoRA adapter.
        views_at_once: draws of a completion per forward pass.
        **kwargs: Trainer's; `train_dataset` is a `PreferenceDataset`, `data_collator` a `PreferenceCollator`.

    Raises:
        ValueError: the model was not prepared, or there is nothing to compare it with.
        FloatingPointError: from `train`, a loss that is not finite; names the file with its rows.
    """

    sums_file = "preference_sums.json"

    def __init__(
        self,
        method: Method,
        beta: float,
        mask_token_id: int,
        reference: Any | None = None,
        views_at_once: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.method = method
        self.beta = beta
        self.mask_token_id = mask_token_id
        self.views_at_once = views_at_once
        if reference is None and not hasattr(self.model, "peft_config"):
            raise ValueError("without a LoRA adapter to turn off, preference training needs a reference model")
        self.reference_model = None if reference is None else self.prepare_reference(reference)

    def prepare_reference(self, reference: Any) -> Any:
        """A frozen model, placed or split over processes like the trained one."""
        disable_dropout(reference)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(reference, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(reference, self.accelerator)
        return self.accelerator.prepare_model(reference.eval(), evaluation_mode=True)

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """The reference model: a second one, or the trained one with its adapter off."""
        if self.reference_model is not None:
            yield self.reference_model
            return
        with use_adapter(self.accelerator.unwrap_model(self.model), adapter_name=None):
            yield self.model

    def bounds(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """(rows,) estimated bounds of the completions' log-probabilities, in nats."""
        compute = partial(
            score,
            prompt_ids=batch["prompt_ids"],
            attention_mask=batch["prompt_mask"],
            completion_ids=batch["canvas_ids"],
            views=Views(batch["noise"], batch["weights"]),
            mask_token_id=self.mask_token_id,
            gen_length=batch["canvas_ids"].shape[1],
            views_at_once=self.views_at_once,
        )
        with self.compute_loss_context_manager():
            scores = run_inside(model, compute)
        self.computed_tokens += scores.compute
        return scores.logps.sum(-1)

    def ratios(self, bounds: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """(rows,) the policy's `bounds` less the reference's, per token of the canvas if the method says so."""
        ratios = bounds - batch["reference"]
        if self.method.per_canvas_token:
            return ratios / batch["canvas_ids"].shape[1]
        return ratios

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """The step's micro-batches, with `reference` bounds (rows,) and the `centre` that the method subtracts."""
        host_batches, count = super().get_batch_samples(*args, **kwargs)
        batches = [self.on_device(batch) for batch in host_batches]
        if not batches:
            return batches, count
        with torch.no_grad(), self.reference() as model:
            for batch in batches:
                batch["reference"] = self.bounds(model, batch)

        # KTO's centre is the mean over the whole step, so it takes a pass of its own over all micro-batches.
        total = torch.zeros((), device=self.args.device)
        if self.method.centred:
            for batch in batches:
                with torch.no_grad():
                    ratios = self.ratios(self.bounds(self.model, batch), batch)
                total = total + ratios[batch["labels"] != IGNORED].sum()
        centre = self.accelerator.reduce(total, "sum") / count
        return [batch | {"centre": centre} for batch in batches], count

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The batch's share of the step's loss, times the number of processes, over which gradients are averaged."""
        labels = inputs["labels"]
        is_row = labels != IGNORED
        bounds = self.bounds(model, inputs)
        ratios = self.ratios(bounds, inputs)
        losses = LOSSES[self.method.loss](ratios - inputs["centre"], labels, self.beta)

        # An empty row has a loss of 0, but a path to the weights: DDP needs every gradient.
        items = is_row.sum() if num_items_in_batch is None else num_items_in_batch
        loss = losses.where(is_row, 0.0).sum() / items * self.accelerator.num_processes

        self.require_finite(loss.detach(), lambda: self.nonfinite_rows(inputs, bounds.detach()))
        self.add_metrics(inputs, bounds.detach(), ratios.detach(), is_row)
        return (loss, {"losses": losses}) if return_outputs else loss

    def nonfinite_rows(self, batch: dict[str, Tensor], bounds: Tensor) -> list[dict[str, Any]]:
        tokenizer: Any = self.processing_class
        texts = tokenizer.batch_decode(torch.cat([batch["prompt_ids"], batch["canvas_ids"]], dim=1))
        columns = zip(texts, bounds.tolist(), batch["reference"].tolist(), strict=True)
        rows = [{"text": text, "bound": bound, "reference": reference} for text, bound, reference in columns]
        return [row for row in rows if not math.isfinite(row["bound"] - row["reference"])] or rows

    def add_metrics(self, batch: dict[str, Tensor], bounds: Tensor, ratios: Tensor, is_row: Tensor) -> None:
        """Add a micro-batch to `sums`: each side's rewards and bounds, and how often the preferred side won."""
        signs = batch["labels"]
        self.add("items", is_row)
        if self.method.paired:
            chosen, rejected = ratios.chunk(2)
            self.add("right", (chosen > rejected) & is_row)
            # The rejected completions follow the chosen ones.
            is_row = torch.cat([is_row, is_row])
            signs = torch.cat([signs, -signs])
        else:
            self.add("right", ((ratios - batch["centre"]) * signs > 0) & is_row)
        for side, sign in (("chosen", 1), ("rejected", -1)):
            on_side = (signs == sign) & is_row
            self.add(f"n/{side}", on_side)
            self.add(f"rewards/{side}", self.beta * ratios * on_side)
            self.add(f"logps/{side}", bounds * on_side)

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        logs = {}
        for side in ("chosen", "rejected"):
            completions = sums[f"n/{side}"]
            if completions:  # a log of a few completions with labels may have one side alone
                logs[f"rewards/{side}"] = sums[f"rewards/{side}"] / completions
                logs[f"logps/{side}"] = sums[f"logps/{side}"] / completions
        if "rewards/chosen" in logs and "rewards/rejected" in logs:
            logs["rewards/margins"] = logs["rewards/chosen"] - logs["rewards/rejected"]
        return logs | {"rewards/accuracies": sums["right"] / max(sums["items"], 1)}
