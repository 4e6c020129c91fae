"""Masked SFT on Transformers' Trainer, with LLaDA's loss over a whole optimizer step (arXiv 2502.09992, algorithm 2).

The loss is the sum over hidden answer tokens of cross-entropy / t', divided by the number of answer tokens. Both are
computed over the whole optimizer step, so splitting it into micro-batches and processes changes neither the loss nor
its gradient. In a model with blocks, each block has its own t', and the noised blocks follow the clean text (BD3-LM,
arXiv 2503.09573). With a causal context, the clean text is trained, too (`CausalLoss`).
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, get_peft_model
from torch import Tensor
from torch.utils.data import Sampler
from transformers import EvalPrediction, Trainer, TrainingArguments

from d1.models.attention import Blocks, has_causal_context, require_prepared
from d1.models.head import CHUNK_ELEMENTS, backbone_and_head, calls_in_step, run_inside, target_logps
from d1.models.kinds import block_size
from d1.models.packing import packed_two_stream_states, take_packed_rows, two_stream_states
from d1.runs.data import IGNORED
from d1.runs.trainer import RunTrainer, check_arguments, loaded_model, tokenizer_of
from d1.sft.config import CausalLoss
from d1.sft.data import by_row, row_numbers
from d1.sft.data import dLLMDataCollator as dLLMDataCollator  # d1's users import these from here
from d1.sft.data import dLLMSFTDataset as dLLMSFTDataset
from d1.sft.editing import GOLDEN, drawn_ids

LOSS_SUMS = "loss_sums.json"  # a checkpoint's file with the sums of losses so far
EDITS_AND_CONTEXT = "--edit_noise trains edits of visible tokens, which no sampler of a causal context makes"
Positions = tuple[Tensor, Tensor]  # rows and positions, (n,) each, of n tokens of a batch


def check_data(data_collator: Any, datasets: dict[str, Any]) -> None:
    """Refuse (ValueError) a collator or rows of Transformers or TRL, which have no noise."""
    if data_collator is not None and not hasattr(data_collator, "schedule"):
        kind = type(data_collator).__name__
        raise ValueError(f"data_collator is {kind}: leave it out, or use d1.sft.dLLMDataCollator(tokenizer)")
    for name, rows in datasets.items():
        for part in rows.values() if isinstance(rows, dict) else [rows]:
            if part is not None and not hasattr(part, "lengths"):
                todo = "rows, _ = preprocess_dataset(data, tokenizer, max_length, test_split=0) of d1.sft and use "
                todo += "dLLMSFTDataset(rows, tokenizer, max_length)"
                raise ValueError(f"{name} is {type(part).__name__}, not dLLMSFTDataset: call {todo}")


def default_collator(tokenizer: Any, config: Any) -> dLLMDataCollator:
    """The collator with its defaults for a model of this config."""
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
        if args is not None:
            args.remove_unused_columns = False  # Trainer would drop the columns that the model does not take
        check_data(data_collator, {name: kwargs.get(name) for name in ("train_dataset", "eval_dataset")})
        path, model = model, loaded_model(model)
        if data_collator is None and model is not None:
            processing_class = tokenizer_of(processing_class, path)
            data_collator = default_collator(processing_class, model.config)
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
        arguments = {"model": model, "args": args, "data_collator": data_collator, "processing_class": processing_class}
        super().__init__(compute_metrics=mean_loss, **arguments, **kwargs)
        require_prepared(self.model)
        model = cast(Any, self.model)
        noised, size = getattr(self.data_collator, "block_size", None), block_size(model.config)
        if noised != size:
            raise ValueError(
                f"the collator has noise for blocks of {noised} tokens, but this {model.config.model_type} has blocks "
                f"of {size}: use dLLMDataCollator(tokenizer, block_size={size})"
            )
        causal = getattr(self.data_collator, "causal", None)
        if has_causal_context(model.config) != (causal is not None):
            has, use = (
                ("no", "leave out causal=") if causal else ("a", "use dLLMDataCollator(..., causal=CausalLoss())")
            )
            raise ValueError(f"this {model.config.model_type} has {has} causal context: {use}")
        if causal and getattr(self.data_collator, "edits", None):
            raise ValueError(EDITS_AND_CONTEXT)
        if getattr(self.data_collator, "packed", False):
            take_packed_rows(model)
        self.require_one_gpu()
        self.count_labels_of_step(shifted=False)
        self.start_counting()

    def train_sampler(self, dataset: Any) -> Sampler:
        return self.global_batches(dataset.lengths, fill=dataset.eos_padding == "batch")

    def row_losses(self, model: Any, inputs: dict[str, Any], masked_scale: Tensor | float = 1.0) -> Tensor:
        """(rows,) sums of cross-entropy / t' over each row's hidden tokens, with `EditNoise` also over visible ones.
        With `CausalLoss`, they are weighed, also by `masked_scale`, and those of the clean text are added, weighed,
        too."""
        collator: Any = self.data_collator
        t = inputs["t"].double()
        weights = collator.schedule(t if t.dim() == 2 else t[row_numbers(inputs)])[1]  # t per token with blocks
        if "edited" in inputs:
            return self.edit_losses(model, inputs, weights)
        masked = inputs["masked"].cpu()  # the only wait for the device
        if collator.causal is not None:
            return self.context_losses(model, inputs, masked, weights * collator.causal.masked_weight * masked_scale)
        return self.weighted_losses(model, inputs, masked, weights)

    def context_losses(self, model: Any, inputs: dict[str, Any], masked: Tensor, weights: Tensor) -> Tensor:
        """Sum over each row's `masked` tokens of their weights x cross-entropy, and over its answer of that of the
        clean text, where the state of a token predicts the next one: no state predicts the first token of a text."""
        labels, predicts = inputs["labels"], torch.zeros_like(masked)
        predicts[:, :-1] = (labels != IGNORED)[:, 1:].cpu()
        for end in itertools.accumulate(inputs.get("lengths", ())):
            predicts[0, end - 1] = False
        if not (masked.any() or predicts.any()):  # as in `weighted_losses`
            masked[0, 0], weights = True, torch.zeros_like(weights)
        clean, at = positions_of(predicts, labels.device), positions_of(masked, labels.device)
        targets = torch.cat([labels[clean[0], clean[1] + 1], labels[at]]).clamp(min=0)

        def losses_of(inner: Any) -> Tensor:
            return -target_logps(inner, context_states(inner, inputs, predicts, clean, masked, at), targets)[0]

        losses = run_inside(model, losses_of)
        causal: CausalLoss = cast(Any, self.data_collator).causal
        each = torch.cat([torch.full_like(clean[0], causal.causal_weight, dtype=weights.dtype), weights[at]])
        rows = torch.cat([row_numbers(inputs)[clean], row_numbers(inputs)[at]])
        return losses.new_zeros(len(by_row(inputs, "labels"))).index_add(0, rows, losses * each.to(losses.dtype))

    def edit_losses(self, model: Any, inputs: dict[str, Any], weights: Tensor) -> Tensor:
        """`row_losses` of a batch with replaced tokens, the mean over turns."""
        collator: Any = self.data_collator
        noise, edited, labels = collator.edits, inputs["edited"], inputs["labels"]
        weights = torch.where(inputs["masked"], weights, torch.where(edited, noise.weight, noise.keep_weight))
        scored, replaced = torch.stack([(labels != IGNORED) & (weights > 0), edited]).cpu().unbind()
        if not replaced.any():
            replaced[0, 0] = True  # every process has to call the model; without `edited`, its draw is not used
        at, turns = positions_of(replaced, labels.device), []
        for turn in range(noise.turns):
            if turn or noise.kind == "draft":
                inputs = self.drafted(model, inputs, replaced, at, turn)
            turns.append(self.weighted_losses(model, inputs, scored, weights))
        return torch.stack(turns).mean(0)

    @torch.no_grad()
    def drafted(self, model: Any, inputs: dict[str, Any], replaced: Tensor, at: Positions, turn: int) -> dict[str, Any]:
        """The batch with the model's own draws, without dropout, as its `replaced` tokens (rows, length)."""
        mask = cast(Any, self.data_collator).mask_token_id

        def draw(inner: Any) -> Tensor:
            states = states_of(inner, inputs, replaced, at)
            draws = ((inputs["draws"][at] + turn * GOLDEN) % 1).double()
            at_once = max(1, CHUNK_ELEMENTS // 4 // inner.config.vocab_size)  # fp64, and a sum as large
            calls, head = calls_in_step(inner, -(-len(states) // at_once)), backbone_and_head(inner)[1]
            parts = zip(states.tensor_split(calls), draws.tensor_split(calls), strict=True)
            return torch.cat([drawn_ids(head(some).double(), numbers, mask) for some, numbers in parts])

        training = model.training
        model.eval()
        ids = run_inside(model, draw)
        model.train(training)
        noised = inputs["input_ids"].clone()
        noised[at] = torch.where(inputs["edited"][at], ids, noised[at])
        return inputs | {"input_ids": noised}

    def weighted_losses(self, model: Any, inputs: dict[str, Any], scored: Tensor, weights: Tensor) -> Tensor:
        """Sum over each row's `scored` tokens, (rows, length) bool on the CPU, of their weights x cross-entropy."""
        labels = inputs["labels"]
        if not scored.any():  # score one token with weight 0, because every process has to call the head
            scored[0, 0], weights = True, torch.zeros_like(weights)
        at = positions_of(scored, labels.device)

        def losses_of(inner: Any) -> Tensor:
            states = states_of(inner, inputs, scored, at)
            return -target_logps(inner, states, labels[at].clamp(min=0))[0]

        losses = run_inside(model, losses_of)
        sums = losses.new_zeros(len(by_row(inputs, "labels")))
        return sums.index_add(0, row_numbers(inputs)[at], losses * weights[at].to(losses.dtype))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The batch's share of the step's loss, times the number of processes: gradients are averaged over them."""
        answers = inputs["labels"] != IGNORED
        row_losses = self.row_losses(model, inputs, self.masked_scale(inputs, num_items_in_batch))
        if num_items_in_batch is None:  # a call outside of training: the mean of this process's batch
            loss = row_losses.sum() / answers.sum()
        else:
            loss = row_losses.sum() / num_items_in_batch * self.accelerator.num_processes
        self.require_finite(loss, lambda: self.nonfinite_rows(row_losses, inputs))
        self.answers += answers.sum()
        return (loss, {"row_losses": row_losses}) if return_outputs else loss

    def get_batch_samples(self, *args: Any) -> Any:
        """Trainer's batches of an optimizer step and their number of labels; counts their hidden tokens, too."""
        batches, labels = super().get_batch_samples(*args)
        if getattr(self.data_collator, "per_row", False):
            self.hidden_in_step = self.in_step(batch["masked"].sum() for batch in batches)
        return batches, labels

    def in_step(self, counts: Iterable[Tensor]) -> Tensor:
        """The sum of the counts of all batches of an optimizer step, over all processes."""
        local_count = sum(counts, torch.zeros((), dtype=torch.long))
        return self.accelerator.reduce(local_count.to(self.args.device), "sum")  # type: ignore[no-any-return]

    def masked_scale(self, inputs: dict[str, Tensor], answers: Tensor | int | None) -> Tensor | float:
        """What divides the loss of masks by the hidden tokens of the step, not by its `answers`, as `CausalLoss` with
        `row_noise` does; None: those of this batch, in a call outside of training."""
        if not getattr(self.data_collator, "per_row", False):
            return 1.0
        hidden = inputs["masked"].sum() if answers is None else self.hidden_in_step
        return ((inputs["labels"] != IGNORED).sum() if answers is None else answers) / hidden.clamp(min=1)

    def nonfinite_rows(self, row_losses: Tensor, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Text, time and loss of the rows whose loss is not finite."""
        tokenizer: Any = self.processing_class
        columns = (by_row(inputs, name) for name in ("input_ids", "labels", "attention_mask", "t"))
        rows = []
        for row_loss, noised, labels, shown, t in zip(row_losses, *columns, strict=True):
            if not torch.isfinite(row_loss):
                clean = torch.where(labels == IGNORED, noised, labels)[shown.bool()].tolist()
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
        self.require_finite(losses.sum(), lambda: self.nonfinite_rows(losses, inputs))
        answers = torch.stack([(labels != IGNORED).sum() for labels in by_row(inputs, "labels")])
        return None, losses.double(), answers.double()

    def start_counting(self) -> None:
        self.answers = torch.zeros((), dtype=torch.long, device=self.args.device)
        self.counting_since = time.perf_counter()

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


def positions_of(chosen: Tensor, device: torch.device) -> Positions:
    """Those of a batch's `chosen` tokens (rows, length), on `device`."""
    rows, positions = chosen.nonzero().to(device, non_blocking=True).unbind(1)
    return rows, positions


def states_of(model: Any, inputs: dict[str, Any], chosen: Tensor, at: Positions) -> Tensor:
    """Last hidden states (n, hidden size) of a batch's `chosen` tokens, row by row; `at` are their `positions_of`.

    With `chosen` on the CPU, neither pass waits for the device; a boolean index on the device would. A block-causal
    model also reads the clean rows; the noised rows follow them, from the first block with a chosen token on.
    """
    noised, labels, visible = inputs["input_ids"], inputs["labels"], inputs["attention_mask"]
    (rows, positions), size, lengths = at, block_size(model.config), inputs.get("lengths")
    if size is None and lengths is not None:
        texts = [(length, 0) for length in lengths]
        return backbone_and_head(model)[0](noised, None, positions.unsqueeze(0), segments=texts)[0]
    if size is None:
        return backbone_and_head(model)[0](noised, visible)[rows, positions]
    clean = torch.where(labels == IGNORED, noised, labels)
    if lengths is not None:
        return packed_two_stream_states(model, clean, noised, lengths, chosen)
    first = int(chosen.any(0).int().argmax()) // size * size
    return two_stream_states(model, clean, noised[:, first:], visible)[rows, positions - first]


def context_states(
    model: Any, inputs: dict[str, Any], predicts: Tensor, clean: Positions, masked: Tensor, at: Positions
) -> Tensor:
    """Last hidden states (n, hidden size) of the clean tokens that `predicts` chooses, and then of the `masked` ones,
    row by row; `clean` and `at` are their `positions_of`. As in `states_of`, nothing waits for the device."""
    noised, labels, size = inputs["input_ids"], inputs["labels"], block_size(model.config) or 1
    text, lengths, starts = torch.where(labels == IGNORED, noised, labels), inputs.get("lengths"), inputs["starts"]
    if lengths is not None:
        blocks = [Blocks(size, start) for start in starts]
        return packed_two_stream_states(model, text, noised, lengths, masked, blocks=blocks, clean_at=predicts)
    origin = torch.tensor(starts).unsqueeze(1).to(text.device, non_blocking=True)
    first = max(0, int(masked.any(0).int().argmax()) - size + 1)  # at or before the first block with a hidden token
    most = int(predicts.sum(1).max())
    chosen = predicts.logical_not().byte().argsort(dim=1, stable=True)[:, :most].to(text.device, non_blocking=True)
    ranks = (predicts.cumsum(1) - 1)[predicts].to(text.device, non_blocking=True)
    options: dict[str, Any] = {"blocks": Blocks(size, origin), "clean_at": chosen}
    states = two_stream_states(model, text, noised[:, first:], inputs["attention_mask"], **options)
    return torch.cat([states[clean[0], ranks], states[at[0], most + at[1] - first]])


def mean_loss(prediction: EvalPrediction) -> dict[str, float]:
    """The loss over all evaluation draws."""
    losses, answers = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    return {"loss": float(losses.sum() / answers.sum())}
