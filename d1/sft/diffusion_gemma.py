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
- Layers with a window see the text as `generate` does, counted from the canvas's start. TRL encodes the whole text and
  keeps its end, so its logits are off by up to 0.28 where the text is longer than the window (by 1e-7 elsewhere).
- The EOS after an answer that was cut off is not trained on (TRL's first version trains on it).
- Means are over the step, not over a micro-batch. Draws come from the row's own generator.

The evaluation loss is the first mean, without self-conditioning, over a grid of t.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from d1.masking import keyed_generator, noise_level, token_ids
from d1.models import head
from d1.models.diffusion_gemma import Context, decode, encode, soft_embeddings
from d1.models.kinds import vocabulary
from d1.runs.data import IGNORED
from d1.sft.data import dLLMDataCollator
from d1.sft.losses import token_positions
from d1.sft.trainer import dLLMTrainer

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
        self.size = size
        self.vocab = vocab
        self.self_conditioning = self_conditioning
        self.eos_token_id = tokenizer.eos_token_id

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        texts = [token_ids(row["input_ids"]) for row in features]
        canvases = []
        for row, text in zip(features, texts, strict=True):
            canvases.append(self.draw_canvas(text, torch.as_tensor(row["answer"]), row["t"], row["key"]))
        batch = {
            "input_ids": pad_sequence(texts, True, self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], True),
        }
        for name in canvases[0]:
            batch[name] = torch.stack([canvas[name] for canvas in canvases])
        return batch

    def draw_canvas(self, text: Tensor, answer: Tensor, t: float | None, key: tuple[int, ...]) -> dict[str, Tensor]:
        """One row's tensors of the batch. A canvas belongs to one turn, after which EOS fills it."""
        generator = keyed_generator(*key)
        drawn_t, canvas_draw, conditioned_draw = torch.rand(3, generator=generator)
        token_draws = torch.rand(self.size, generator=generator)
        noise = torch.randint(self.vocab, (self.size,), generator=generator)

        # All canvases of the row; one is chosen.
        canvases = []
        for start, end in find_turns(answer) or [(len(text), len(text))]:
            for canvas_start in range(start, max(end, start + 1), self.size):
                canvases.append((canvas_start, end))
        start, end = canvases[min(int(canvas_draw * len(canvases)), len(canvases) - 1)]

        # Its clean tokens, and those that are trained on.
        clean = torch.full((self.size,), self.eos_token_id)
        answer_ids = text[start : min(start + self.size, end)]
        clean[: len(answer_ids)] = answer_ids
        labels = clean.clone()
        is_cut_off = end == len(text) and text[-1] != self.eos_token_id
        is_empty = end == len(text) and not answer.any()
        if is_cut_off or is_empty:
            labels[len(answer_ids) :] = IGNORED

        # The noise. An evaluation fixes t and has no self-conditioning.
        time = drawn_t if t is None else torch.tensor(t)
        conditioned = torch.tensor(False) if t is not None else conditioned_draw < self.self_conditioning
        return {
            "canvas_ids": torch.where(token_draws < noise_level(time), noise, clean),
            "labels": labels,
            "starts": torch.tensor(start),
            "t": time,
            "conditioned": conditioned,
        }


class CanvasTrainer(dLLMTrainer):
    """`dLLMTrainer` for batches of `CanvasCollator`; `causal_weight` weighs the encoder's loss."""

    def __init__(self, causal_weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.causal_weight = causal_weight
        self.pairs: Tensor | None = None  # tokens of the step that have one before them, over all processes

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list, Any]:
        """Trainer's, whose count is that of `labels`; and the count of the encoder's loss."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.pairs = self.sum_over_step(next_tokens(batch).sum() for batch in batches)
        return batches, items

    def losses(self, model: Any, inputs: dict[str, Any], causal: bool) -> Losses:
        """The sums of both losses; that of the text only if `causal`."""

        def compute(inner: Any) -> Losses:
            ids, labels = inputs["input_ids"], inputs["labels"]
            context, states = encode(inner, ids, inputs["attention_mask"])
            starts = inputs["starts"].unsqueeze(1).expand_as(labels)
            positions = starts + torch.arange(labels.shape[1], device=ids.device)
            soft = None
            if inner.training:
                soft = self.conditioning(inner, inputs, positions, starts, context)
            canvas_states = decode(inner, inputs["canvas_ids"], positions, starts, context, soft)
            canvas_losses = sum_cross_entropy(inner, canvas_states, labels, labels != IGNORED)
            if not causal:
                return canvas_losses, torch.zeros_like(canvas_losses)
            text_losses = sum_cross_entropy(inner, states[:, :-1], ids[:, 1:], next_tokens(inputs))
            return canvas_losses, text_losses

        return head.run_inside(model, compute)

    def conditioning(
        self, model: Any, inputs: dict[str, Any], positions: Tensor, starts: Tensor, context: Context
    ) -> Tensor | None:
        """Soft embeddings (rows, canvas, hidden) of a first pass; 0 in rows that are not conditioned. As in TRL, only
        the table of embeddings gets a gradient, if it is trained."""
        conditioned = inputs["conditioned"]
        if not (conditioned.any() or head.runs_in_step(model)):
            return None
        with torch.no_grad():
            states = decode(model, inputs["canvas_ids"], positions, starts, context)

        # Chunks of tokens bound the memory of their logits.
        run_head = head.backbone_and_head(model)[1]
        chunk_size = max(1, head.CHUNK_ELEMENTS // 4 // vocabulary(model.config))
        embeddings = []
        for chunk in states.flatten(0, 1).split(chunk_size):
            with torch.no_grad():
                logits = run_head(chunk)
            embeddings.append(soft_embeddings(model, logits))
        soft = torch.cat(embeddings).view_as(states)
        return soft * conditioned[:, None, None].to(soft.dtype)

    def row_losses(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """(rows,) sums of the decoder's cross-entropy."""
        return self.losses(model, inputs, causal=False)[0]

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The batch's share of the step's loss, times the number of processes: gradients are averaged over them."""
        canvas_losses, text_losses = self.losses(model, inputs, causal=self.causal_weight > 0)
        trained = (inputs["labels"] != IGNORED).sum()
        if num_items_in_batch is None or self.pairs is None:  # a call outside of training: this process's batch
            items: Tensor | int = trained
            pairs = next_tokens(inputs).sum()
            processes = 1
        else:
            items = num_items_in_batch
            pairs = self.pairs
            processes = self.accelerator.num_processes
        loss = canvas_losses.sum() / items + self.causal_weight * text_losses.sum() / pairs.clamp(min=1)
        loss = loss * processes
        self.require_finite(loss, partial(self.nonfinite_rows, canvas_losses + text_losses, inputs))
        self.answers += trained
        if return_outputs:
            return loss, {"row_losses": canvas_losses}
        return loss

    def nonfinite_rows(self, row_losses: Tensor, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Text (ids without a tokenizer), time and loss of the rows whose loss is not finite."""
        tokenizer: Any = self.processing_class
        rows = []
        for row in (~torch.isfinite(row_losses)).nonzero().flatten().tolist():
            visible = inputs["attention_mask"][row].bool()
            ids = inputs["input_ids"][row][visible].tolist()
            text = ids if tokenizer is None else tokenizer.decode(ids)
            rows.append({"text": text, "t": inputs["t"][row].item(), "loss": row_losses[row].item()})
        return rows


def find_turns(answer: Tensor) -> list[tuple[int, int]]:
    """Where each turn that is trained on begins and ends; `answer` (tokens,) is bool."""
    zero = torch.zeros(1, dtype=torch.int)
    edges = torch.diff(answer.int(), prepend=zero, append=zero)
    starts = (edges == 1).nonzero().flatten().tolist()
    ends = (edges == -1).nonzero().flatten().tolist()
    return list(zip(starts, ends, strict=True))


def next_tokens(inputs: dict[str, Tensor]) -> Tensor:
    """(rows, length - 1) bool: the tokens of a batch's texts, from the second on, that have one before them."""
    visible = inputs["attention_mask"].bool()
    return visible[:, :-1] & visible[:, 1:]


def sum_cross_entropy(model: Any, states: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
    """(rows,) sums of the cross-entropy of the targets that `tokens` chooses, (rows, n) bool each with a state."""
    tokens = tokens.cpu()
    weight = float(tokens.any())
    if not weight:  # score one token with weight 0, because every process has to call the head
        tokens[0, 0] = True
    rows, positions = token_positions(tokens, states.device)
    logps, _ = head.target_logps(model, states[rows, positions], targets[rows, positions].clamp(min=0))
    return logps.new_zeros(len(states)).index_add(0, rows, -logps * weight)
