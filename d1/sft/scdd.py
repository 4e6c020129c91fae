"""SFT with masks and uniform ids in one bound (SCDD, openreview.net/forum?id=zQKlzKB6I9), which teaches corrections.

The loss is that of NVIDIA's NeMo Automodel 0.7 (`SCDDLoss`, `SCDDStrategy`, `corrupt_mix`). Each row has one time t on
a grid of 1/1000, and each of its answer tokens is hidden, replaced or kept with the masses of `d1/sampling/scdd.py`. A
replacement is another id than the clean one, and no mask. With s = t - 1/1000, the K ids without the mask, the model's
distribution p over these, w = rho_t / rho_s and

    f(v) = log((1 - rho_s) / K + rho_s p(v))
    q(v) = [(1 - rho_s) / K + rho_s 1(v = x)] [(1 - w) / K + w 1(v = z)] / [(1 - rho_t) / K + rho_t 1(z = x)]

the loss of an answer token x that the model sees as z is

    z hidden:   -1000 (gamma_s - gamma_t) / (1 - gamma_t) [(1 - rho_s) / K sum_v f(v) + rho_s f(x)]
    z visible:  -1000 sum_v q(v) [f(v) - log((1 - rho_t) / K + rho_t p(z))]        kept tokens, too

and that of an optimizer step is their sum over all answer tokens, divided by the number of these. With m = 0 it is the
cross-entropy of the masks over t, the loss of plain SFT. The entropy of q is left out, as in Automodel, so the loss can
be negative. The model has no input for t.

Automodel computes the masses and the differences of logarithms in fp32, here they are fp64 and log1p: its loss of a
visible token is rounded by some 1e-3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from d1.masking import keyed_generator, noise_level
from d1.models.head import backbone_and_head, map_chunks, run_inside
from d1.runs.data import IGNORED
from d1.sampling.scdd import TINY, MixedNoise
from d1.sft.data import dLLMDataCollator, row_numbers, split_rows
from d1.sft.losses import hidden_states, token_positions
from d1.sft.trainer import dLLMTrainer

TIMES = 1000  # steps of the bound
REPLACEMENTS = 1  # the last part of a random generator's key


def grid_time(t: Tensor) -> Tensor:
    """The time of the grid, 2 to 999 thousandths in fp64, for t in [0, 1]. At 1000 nothing would be visible."""
    steps = (noise_level(t.double()) * TIMES).floor().long() + 1
    return steps.clamp(max=TIMES - 1).double() / TIMES


def scdd_losses(
    logits: Tensor, clean: Tensor, noised: Tensor, t: Tensor, noise: MixedNoise, mask_token_id: int
) -> Tensor:
    """The loss in nats of each answer token, by the formula above: (n,), in the data type of `logits`.

    Args:
        logits: (n, vocab), fp32 or fp64.
        clean: (n,) ids x, none of them the mask.
        noised: (n,) ids z, what the model sees.
        t: (n,) times of the grid, fp64.
    """
    dtype = logits.dtype
    ids = logits.shape[-1] - 1  # K
    s = t - 1 / TIMES
    rho_t = noise.rho(t)
    rho_s = noise.rho(s)
    base_t = (1 - rho_t) / ids
    base_s = (1 - rho_s) / ids
    keep = rho_t / rho_s
    jump = (1 - keep) / ids
    revealed = 1 - noise.stays_hidden(t, s)

    # f at every id, the clean one and the visible one. At the mask, which p excludes, f is log base_s.
    logps = logits.index_fill(-1, noised.new_tensor([mask_token_id]), -torch.inf).log_softmax(-1)
    log_base = base_s.clamp(min=TINY).log().to(dtype)
    terms = torch.logaddexp(log_base.unsqueeze(-1), rho_s.log().to(dtype).unsqueeze(-1) + logps)
    total = terms.sum(-1) - log_base
    at_clean = terms.gather(-1, clean.unsqueeze(-1)).squeeze(-1)
    at_noised = terms.gather(-1, noised.unsqueeze(-1)).squeeze(-1)

    hidden = noised == mask_token_id
    hidden_loss = -revealed.to(dtype) * (base_s.to(dtype) * total + rho_s.to(dtype) * at_clean)

    # The logarithm of the denominator of q under p, and f(z) minus it. The two are almost equal, so where they are, the
    # difference is a log1p: (1 - rho_s) / K - (1 - rho_t) / K = (rho_t - rho_s) / K.
    logp = logps.gather(-1, noised.unsqueeze(-1)).squeeze(-1).masked_fill(hidden, 0.0)
    p = logp.exp()
    denominator = base_t.to(dtype) + rho_t.to(dtype) * p
    log_denominator = torch.logaddexp(base_t.clamp(min=TINY).log().to(dtype), rho_t.log().to(dtype) + logp)
    change = (rho_s - rho_t).to(dtype) * (p - 1 / ids) / denominator.clamp(min=TINY)
    at_noised = torch.where(change.abs() < 0.5, change.clamp(-0.5, 0.5).log1p(), at_noised - log_denominator)

    # q in three parts: the same mass at every id, more at the clean one, and more at the visible one.
    unchanged = (noised == clean).double()
    q_denominator = (base_t + rho_t * unchanged).clamp(min=TINY)
    q_all = (base_s * jump / q_denominator).to(dtype)
    q_clean = (rho_s * jump / q_denominator).to(dtype)
    q_noised = (keep * (base_s + rho_s * unchanged) / q_denominator).to(dtype)
    visible_loss = -(
        q_all * (total - ids * log_denominator) + q_clean * (at_clean - log_denominator) + q_noised * at_noised
    )
    return TIMES * torch.where(hidden, hidden_loss, visible_loss)


class SCDDCollator(dLLMDataCollator):
    """`dLLMDataCollator` whose visible answer tokens are uniform ids in part.

    `t` is a time of the grid, in fp64. The masks are drawn by the same random numbers as those of plain SFT. Evaluation
    rows have the same noise.

    Args:
        vocabulary: number of ids of the model, with the mask.
    """

    def __init__(self, tokenizer: Any, noise: MixedNoise, vocabulary: int, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self.noise, self.vocabulary = noise, vocabulary

    def schedule(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """At times t, before the grid: the probability that an answer token is hidden; and 1 / grid time, its weight
        where there are no uniform ids."""
        t = grid_time(t)
        return self.noise.mask_mass(t), 1 / t

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        batch = super().__call__(features)
        batch["t"] = grid_time(batch["t"])
        noised_rows = split_rows(batch, "input_ids")
        label_rows = split_rows(batch, "labels")
        for row, noised, labels, t in zip(features, noised_rows, label_rows, batch["t"], strict=True):
            generator = keyed_generator(*row["key"], REPLACEMENTS)
            self.replace_visible(noised, labels, t, generator)
        return batch

    def replace_visible(self, noised: Tensor, labels: Tensor, t: Tensor, generator: Generator) -> None:
        """Replace answer tokens of `noised` (tokens,), a row with its masks, in place. A uniform id is the clean one
        with probability 1 / K; the others are drawn."""
        answer = labels != IGNORED
        ids = self.vocabulary - 1
        mask = self.mask_token_id
        visible_mass = 1 - self.noise.mask_mass(t)
        probability = float(self.noise.uniform_mass(t) * (ids - 1) / ids / visible_mass)
        numbers = torch.rand(int(answer.sum()), generator=generator)
        drawn = torch.randint(self.vocabulary - 2, (len(numbers),), generator=generator)
        clean = labels[answer].long()
        # The numbers skip the clean id and the mask, the lower of both first.
        drawn = drawn + (drawn >= clean.clamp(max=mask)).long()
        drawn = drawn + (drawn >= clean.clamp(min=mask)).long()
        replaced = (numbers < probability) & (noised[answer] != mask)
        noised[answer] = torch.where(replaced, drawn.to(noised.dtype), noised[answer])


class SCDDTrainer(dLLMTrainer):
    """`dLLMTrainer` for batches of `SCDDCollator`."""

    def row_losses(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """(rows,) sums of `scdd_losses` over each row's answer."""
        collator: Any = self.data_collator
        labels = inputs["labels"]
        mask_token_id = collator.mask_token_id
        # A mask token in the text has nothing to predict.
        scored = ((labels != IGNORED) & (labels != mask_token_id)).cpu()
        weight = float(scored.any())
        if not weight:  # score one token with weight 0, because every process has to call the head
            scored[0, 0] = True
        positions = token_positions(scored, labels.device)
        rows = row_numbers(inputs)[positions]
        clean = labels[positions].clamp(min=0)
        noised = inputs["input_ids"][positions]
        t = inputs["t"][rows]

        def compute_losses(inner: Any) -> Tensor:
            head = backbone_and_head(inner)[1]

            def chunk_losses(states: Tensor, clean: Tensor, noised: Tensor, t: Tensor) -> Tensor:
                logits = head(states)
                if logits.dtype != torch.float64:
                    logits = logits.float()
                return scdd_losses(logits, clean, noised, t, collator.noise, mask_token_id)

            states = hidden_states(inner, inputs, scored, positions)
            return torch.cat(map_chunks(inner, chunk_losses, states, clean, noised, t, tensors_per_logit=4))

        losses = run_inside(model, compute_losses)
        return losses.new_zeros(len(inputs["t"])).index_add(0, rows, losses * weight)
