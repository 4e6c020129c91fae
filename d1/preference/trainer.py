"""DPO and KTO on bounds of log-probabilities, on Transformers' Trainer.

Policy and reference are scored in the same views, so that most of the noise of the two bounds cancels in their ratio.
The loss of an optimizer step is the mean over all its pairs or completions, of all micro-batches and processes, and so
is the mean that KTO subtracts: first all ratios of the step are computed without gradients, then each micro-batch's
gradient. Memory does not grow with the number of draws, because `d1.scoring.score` computes each forward pass again
in the backward pass.

TRL's DPOTrainer and KTOTrainer (1.16) do not fit. Their loss calls the model once, on the clean text, for log-probs of
the next token; their constructor puts a head into the model that does this alone, and loads the reference as a causal
model; they take means over a micro-batch, so accumulation and the number of processes change KTO's loss. Their formats
of rows, the names of what is logged, the preparation of a reference and (in the tests) their losses are used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import disable_dropout_in_model, use_adapter

from d1.models.attention import require_prepared
from d1.models.head import run_inside
from d1.preference.losses import LOSSES
from d1.preference.methods import Method
from d1.runs.data import IGNORED, GlobalBatchSampler
from d1.runs.trainer import SummingTrainer
from d1.scoring import Views, score


class PreferenceTrainer(SummingTrainer, Trainer):
    """Trainer with the loss of a row of `METHODS`.

    Args:
        method: the row.
        beta: weight of the ratios.
        mask_token_id: the id that hides a token.
        reference: the model to compare with, frozen; None: the trained model without its LoRA adapter.
        views_at_once: draws of a completion per forward pass.
        **kwargs: Trainer's; `train_dataset` is a `PreferenceDataset`, `data_collator` a `PreferenceCollator`.

    Raises:
        ValueError: the model was not prepared, or there is nothing to compare it with.
        FloatingPointError: from `train`, a loss that is not finite; names the file with its rows.
    """

    sums_file = "preference_sums.json"
    loss_is_scaled_for_ga = True  # compute_loss divides by the rows of the whole step

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
        self.method, self.beta, self.mask_token_id, self.views_at_once = method, beta, mask_token_id, views_at_once
        model: Any = self.model
        require_prepared(model)
        if reference is None and not hasattr(model, "peft_config"):
            raise ValueError("without a LoRA adapter to turn off, preference training needs a reference model")
        self.require_one_gpu()
        disable_dropout_in_model(model)  # or both models would not compute the same function at the start
        self.reference_model = reference if reference is None else self.prepared(reference)
        self.count_labels_of_step(shifted=False)
        self.sums: dict[str, Tensor] = {}
        self.compute = torch.zeros((), dtype=torch.long, device=self.args.device)

    def prepared(self, reference: Any) -> Any:
        """A frozen model, placed or split over processes like the trained one."""
        disable_dropout_in_model(reference)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(reference, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(reference, self.accelerator)
        return self.accelerator.prepare_model(reference.eval(), evaluation_mode=True)

    def train_sampler(self, dataset: Any) -> GlobalBatchSampler:
        return self.global_batches([0] * len(dataset))

    # --- Bounds -------------------------------------------------------------------------------------------------------

    def bounds(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """(rows,) estimated bounds of the completions' log-probabilities, in nats."""
        compute = partial(
            score,
            prompt_ids=batch["prompt_ids"],
            attention_mask=batch["prompt_mask"],
            completion_ids=batch["completion_ids"],
            views=Views(batch["noise"], batch["weights"]),
            mask_token_id=self.mask_token_id,
            gen_length=batch["completion_ids"].shape[1],
            views_at_once=self.views_at_once,
        )
        with self.compute_loss_context_manager():
            scores = run_inside(model, compute)
        self.compute += scores.compute
        return scores.logps.sum(-1)

    def ratios(self, bounds: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """(rows,) of bounds under the policy."""
        ratios = bounds - batch["reference"]
        return ratios / batch["completion_ids"].shape[1] if self.method.per_canvas_token else ratios

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """The reference model: a second one, or the trained one with its adapter off."""
        if self.reference_model is not None:
            yield self.reference_model
            return
        with use_adapter(self.accelerator.unwrap_model(self.model), adapter_name=None):
            yield self.model

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """The micro-batches of an optimizer step, with their `reference` bounds (rows,) and the step's mean ratio,
        `centre`, where the method subtracts it."""
        found, count = super().get_batch_samples(*args, **kwargs)
        batches = [self.on_device(batch) for batch in found]
        with torch.no_grad():
            with self.reference() as model:
                for batch in batches:
                    batch["reference"] = self.bounds(model, batch)
            total = torch.zeros((), device=self.args.device)
            for batch in batches if self.method.centred else []:
                ratios = self.ratios(self.bounds(self.model, batch), batch)
                total = total + ratios[batch["labels"] != IGNORED].sum()
            centre = self.accelerator.reduce(total, "sum") / count if batches else total
        return [batch | {"centre": centre} for batch in batches], count

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The batch's share of the step's loss, times the number of processes, over which gradients are averaged."""
        bounds, labels = self.bounds(model, inputs), inputs["labels"]
        ratios, real = self.ratios(bounds, inputs), inputs["labels"] != IGNORED
        losses = LOSSES[self.method.loss](ratios - inputs["centre"], labels, self.beta)
        items = real.sum() if num_items_in_batch is None else num_items_in_batch
        # An empty slot still has a path to the weights.
        loss = losses.where(real, 0.0).sum() / items * self.accelerator.num_processes
        self.require_finite(loss.detach(), lambda: self.rows_to_blame(inputs, bounds.detach()))
        self.count(inputs, bounds.detach(), ratios.detach(), real)
        return (loss, {"losses": losses}) if return_outputs else loss

    def rows_to_blame(self, batch: dict[str, Tensor], bounds: Tensor) -> list[dict[str, Any]]:
        tokenizer: Any = self.processing_class
        texts = tokenizer.batch_decode(torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1))
        columns = zip(texts, bounds.tolist(), batch["reference"].tolist(), strict=True)
        rows = [{"text": text, "bound": bound, "reference": reference} for text, bound, reference in columns]
        bad = [row for row in rows if not math.isfinite(row["bound"] - row["reference"])]
        return bad or rows

    # --- What is logged and saved -------------------------------------------------------------------------------------

    def count(self, batch: dict[str, Tensor], bounds: Tensor, ratios: Tensor, real: Tensor) -> None:
        """Adds a micro-batch to `sums`: by sides, and how often the desired side won."""
        signs = batch["labels"]
        if self.method.paired:
            chosen, rejected = ratios.chunk(2)
            right, real, signs = chosen > rejected, torch.cat([real, real]), torch.cat([signs, -signs])
            right = right & real[: len(right)]
        else:
            right = ((ratios - batch["centre"]) * signs > 0) & real
        found = {"right": right, "items": batch["labels"] != IGNORED}
        for side, sign in (("chosen", 1), ("rejected", -1)):
            here = (signs == sign) & real
            found |= {f"n/{side}": here, f"rewards/{side}": self.beta * ratios * here, f"logps/{side}": bounds * here}
        for name, values in found.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), dtype=torch.float64)) + values.double().sum().cpu()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.sums:  # a training log, which every process reaches
            sums = self.total_sums()
            for side in ("chosen", "rejected"):
                for kind in ("rewards", "logps"):
                    logs[f"{kind}/{side}"] = sums[f"{kind}/{side}"] / max(sums[f"n/{side}"], 1)
            logs["rewards/margins"] = logs["rewards/chosen"] - logs["rewards/rejected"]
            logs["rewards/accuracies"] = sums["right"] / max(sums["items"], 1)
            logs["compute_tokens"] = sums["compute"]
            self.sums = {}
        super().log(logs, start_time)
