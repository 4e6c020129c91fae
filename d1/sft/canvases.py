"""SFT of models whose noise is uniform ids (DiffusionGemma): canvases instead of masks.

The loss is TRL's (huggingface/trl, sft_diffusion_gemma.py). One canvas of each row is chosen
uniformly. It begins a whole number of canvases after the prompt, and EOS fills it after the answer's end. Each of its
tokens is replaced by a uniform id with probability t', t' = .999 t + .001 and t ~ U(0, 1) per row. The loss is the sum
of two means over the whole optimizer step:

- the decoder's cross-entropy of all clean tokens of the canvases, replaced or not, without a weight;
- `causal_weight` times the encoder's cross-entropy of the next token, over the whole text.

With probability `self_conditioning`, a row is decoded twice: a pass without gradient first, whose distributions the
second pass sees.

What differs from TRL:

- t'. Here it is uniform on [.001, 1], as in the script's first version; later versions draw it from [.0001, .9999].
- The router of the experts. Later versions of the script freeze it always. Here LoRA leaves it as it is, also with
  `--lora_target_modules all-linear`, and a full fine-tune trains it.
- Layers with a window see the text as `generate` does, counted from the canvas's start (TRL: 1e-7 off below the window,
  up to 0.28 beyond).
- The EOS after an answer that was cut off is not trained on (TRL's first version trains on it).
- Means are over the step, not over a micro-batch. Draws come from the row's own generator.

The evaluation loss is the first mean, without self-conditioning, over a grid of t.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from d1.masking import keyed_generator, noise_level, token_ids
from d1.models import head
from d1.models.canvas import Context, decode, encode, soft_embeddings
from d1.models.kinds import vocabulary
from d1.runs.data import IGNORED
from d1.sft.data import dLLMDataCollator
from d1.sft.trainer import dLLMTrainer, positions_of

Losses = tuple[Tensor, Tensor]  # of the canvas and of the text, (rows,) sums of cross-entropy each


class CanvasCollator(dLLMDataCollator):
    """Pads rows on the right, chooses each row's canvas and replaces some of its tokens.

    Returns a batch of `input_ids` and `attention_mask` (rows, length), the clean text; `canvas_ids` (rows, canvas),
    what the decoder reads, and `labels`, its clean tokens (-100: not trained on); and (rows,) `starts`, the position
    where the canvas begins, `t`, and `conditioned`, bool.

    Args:
        size: tokens per canvas.
        vocab: number of ids, those of the model.
        self_conditioning: the probability that a training row is conditioned.
    """

    def __init__(self, tokenizer: Any, size: int, vocab: int, self_conditioning: float = 0.5) -> None:
        super().__init__(tokenizer, block_size=size)
        self.size, self.vocab, self.self_conditioning = size, vocab, self_conditioning
        self.eos_token_id = tokenizer.eos_token_id

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        texts = [token_ids(row["input_ids"]) for row in features]
        columns: dict[str, list[Tensor]] = {name: [] for name in ("canvas_ids", "labels", "starts", "t", "conditioned")}
        for row, text in zip(features, texts, strict=True):
            canvas = self.canvas_of(text, torch.as_tensor(row["answer"]), row["t"], row["key"])
            for name, value in zip(columns, canvas, strict=True):
                columns[name].append(value)
        batch = {"input_ids": pad_sequence(texts, True, self.pad_token_id)}
        batch["attention_mask"] = pad_sequence([torch.ones_like(text) for text in texts], True)
        return batch | {name: torch.stack(values) for name, values in columns.items()}

    def canvas_of(self, text: Tensor, answer: Tensor, t: float | None, key: tuple[int, ...]) -> list[Tensor]:
        """One row's columns of the batch. A canvas belongs to one turn, after which EOS fills it."""
        generator = keyed_generator(*key)
        drawn, of_block, coin = torch.rand(3, generator=generator)
        chosen = torch.rand(self.size, generator=generator)
        noise = torch.randint(self.vocab, (self.size,), generator=generator)
        turns = turns_of(answer) or [(len(text), len(text))]
        blocks = [(first, last) for start, last in turns for first in range(start, max(last, start + 1), self.size)]
        start, end = blocks[min(int(of_block * len(blocks)), len(blocks) - 1)]
        clean = torch.full((self.size,), self.eos_token_id)
        block = text[start : min(start + self.size, end)]
        clean[: len(block)] = block
        labels = clean.clone()
        if end == len(text) and (not answer.any() or text[-1] != self.eos_token_id):  # no row, or a cut answer
            labels[len(block) :] = IGNORED
        time = drawn if t is None else torch.tensor(t)
        canvas = torch.where(chosen < noise_level(time), noise, clean)
        conditioned = coin < self.self_conditioning if t is None else torch.tensor(False)
        return [canvas, labels, torch.tensor(start), time, conditioned]


class CanvasTrainer(dLLMTrainer):
    """`dLLMTrainer` for batches of `CanvasCollator`; `causal_weight` weighs the encoder's loss."""

    def __init__(self, causal_weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.causal_weight = causal_weight
        self.pairs: Tensor | None = None  # tokens of the step that have one before them, over all processes

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list, Any]:
        """Trainer's, whose count is that of `labels`; and the count of the encoder's loss."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.pairs = self.in_step(next_tokens(batch).sum() for batch in batches)
        return batches, items

    def losses(self, model: Any, inputs: dict[str, Any], causal: bool) -> Losses:
        """The sums of both losses; that of the text only if `causal`."""

        def compute(inner: Any) -> Losses:
            ids, labels = inputs["input_ids"], inputs["labels"]
            context, states = encode(inner, ids, inputs["attention_mask"])
            starts = inputs["starts"].unsqueeze(1).expand_as(labels)
            given = starts + torch.arange(labels.shape[1], device=ids.device), starts, context
            soft = self.conditioning(inner, inputs, *given) if inner.training else None
            canvas = summed(inner, decode(inner, inputs["canvas_ids"], *given, soft), labels, labels != IGNORED)
            if not causal:
                return canvas, torch.zeros_like(canvas)
            return canvas, summed(inner, states[:, :-1], ids[:, 1:], next_tokens(inputs))

        return head.run_inside(model, compute)

    def conditioning(
        self, model: Any, inputs: dict[str, Any], positions: Tensor, starts: Tensor, context: Context
    ) -> Tensor | None:
        """Soft embeddings (rows, canvas, hidden) of a first pass; 0 in rows that are not conditioned. As in TRL, only
        the table of embeddings gets a gradient, if it is trained."""
        conditioned = inputs["conditioned"]
        if not (conditioned.any() or head.runs_in_step(model)):
            return None
        run_head, at_once = (
            head.backbone_and_head(model)[1],
            max(1, head.CHUNK_ELEMENTS // 4 // vocabulary(model.config)),
        )
        with torch.no_grad():
            states = decode(model, inputs["canvas_ids"], positions, starts, context)
        parts = []
        for some in states.flatten(0, 1).split(at_once):
            with torch.no_grad():
                logits = run_head(some)
            parts.append(soft_embeddings(model, logits))
        soft = torch.cat(parts)
        return soft.view_as(states) * conditioned[:, None, None].to(soft.dtype)

    def row_losses(self, model: Any, inputs: dict[str, Any], masked_scale: Tensor | float = 1.0) -> Tensor:
        """(rows,) sums of the decoder's cross-entropy; `masked_scale` is for models with masks."""
        return self.losses(model, inputs, causal=False)[0]

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The batch's share of the step's loss, times the number of processes: gradients are averaged over them."""
        sums, of_text = self.losses(model, inputs, causal=self.causal_weight > 0)
        trained, items = (inputs["labels"] != IGNORED).sum(), num_items_in_batch
        if items is None or self.pairs is None:  # a call outside of training: this process's batch
            items, pairs, processes = trained, next_tokens(inputs).sum(), 1
        else:
            pairs, processes = self.pairs, self.accelerator.num_processes
        loss = sums.sum() / items + self.causal_weight * of_text.sum() / pairs.clamp(min=1)
        loss = loss * processes
        self.require_finite(loss, lambda: self.nonfinite_rows(sums + of_text, inputs))
        self.answers += trained
        return (loss, {"row_losses": sums}) if return_outputs else loss

    def nonfinite_rows(self, row_losses: Tensor, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        tokenizer: Any = self.processing_class
        columns = (inputs[name] for name in ("input_ids", "attention_mask", "t"))
        return [
            {"text": tokenizer.decode(ids[shown.bool()].tolist()), "t": t.item(), "loss": loss.item()}
            for loss, ids, shown, t in zip(row_losses, *columns, strict=True)
            if not torch.isfinite(loss)
        ]


def turns_of(answer: Tensor) -> list[tuple[int, int]]:
    """Where each turn that is trained on begins and ends; `answer` (tokens,) is bool."""
    edges = torch.diff(answer.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    firsts, lasts = ((edges == side).nonzero().flatten().tolist() for side in (1, -1))
    return list(zip(firsts, lasts, strict=True))


def next_tokens(inputs: dict[str, Tensor]) -> Tensor:
    """(rows, length - 1) bool: the tokens of a batch's texts, from the second column on, that have one before them."""
    visible = inputs["attention_mask"].bool()
    return visible[:, :-1] & visible[:, 1:]


def summed(model: Any, states: Tensor, targets: Tensor, chosen: Tensor) -> Tensor:
    """(rows,) sums of the cross-entropy of the `chosen` targets, (rows, n) bool each with a state."""
    at_host = chosen.cpu()
    weight = float(at_host.any())
    if not weight:  # score one token with weight 0, because every process has to call the head
        at_host[0, 0] = True
    at = positions_of(at_host, states.device)
    losses = -head.target_logps(model, states[at], targets[at].clamp(min=0))[0]
    return losses.new_zeros(len(states)).index_add(0, at[0], losses * weight)
