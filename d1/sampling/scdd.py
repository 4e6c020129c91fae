"""SCDD: noise of masks and uniform ids, and the sampler that corrects visible tokens.

Self-Correcting Discrete Diffusion, openreview.net/forum?id=zQKlzKB6I9. At time t in [0, 1] a token x is itself, a
uniform id of the K that are not the mask, or the mask, with the masses

    c = B sqrt(t (1 - t)),  B = 2 m / (1 - m)
    clean (1 - t) / (1 + c),  uniform c / (1 + c),  mask t / (1 + c)

where m is the `uniform_ratio`: the largest uniform mass is m, at t = 1/2. gamma = 1 - mask is the mass of visible
tokens, rho = clean / gamma the share of them that was not redrawn. With m = 0 the noise is masks alone.

The sampler goes from t to any s < t by the posterior of this process under the model's distribution p. With
w = rho_t / rho_s and the candidate's distribution f(v) = (1 - rho_s) / K + rho_s p(v),

    a mask       stays with probability (1 - gamma_s) / (1 - gamma_t)
    a visible z  stays with probability w f(z) / [(1 - rho_t) / K + rho_t p(z)]

and what does not stay becomes a draw from f, which may be z again. So masks never return, and visible tokens may change
in every pass.

A block of n passes takes n - 1 such steps, evenly from t = 1 to `END`. Its last pass writes the most likely id at every
position, as the authors' release does (laaaarrywang/Self-Correcting-Discrete-Diffusion, `_scdd_update`). Their p is cut
to a nucleus: the most likely ids whose probabilities sum to at most `nucleus_p`, but at least one. Their model has no
prompt and one block; here the text before a block is given, and later blocks are hidden, as in plain sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from d1.models import head
from d1.models.head import NotFiniteError, why_not_finite
from d1.models.kinds import vocabulary
from d1.sampling.caches import cache_of
from d1.sampling.record import Canvas, Step, start_canvas
from d1.sampling.settings import SamplingSettings
from d1.sampling.uniform import quantiles

END = 1e-5  # the last time, as released
TINY = 1e-30  # keeps a quotient of 0 and 0 finite: at t = 1 nothing is visible, and without uniform ids nothing changes


@dataclass(frozen=True)
class MixedNoise:
    """The marginals of the forward process, as functions of times (...), best in fp64."""

    uniform_ratio: float

    def bump(self, t: Tensor) -> Tensor:
        """c(t)."""
        return 2 * self.uniform_ratio / (1 - self.uniform_ratio) * (t * (1 - t)).sqrt()

    def mask_mass(self, t: Tensor) -> Tensor:
        """1 - gamma(t)."""
        return t / (1 + self.bump(t))

    def uniform_mass(self, t: Tensor) -> Tensor:
        c = self.bump(t)
        return c / (1 + c)

    def rho(self, t: Tensor) -> Tensor:
        return (1 - t) / (1 - t + self.bump(t)).clamp(min=TINY)

    def stays_hidden(self, t: Tensor, s: Tensor) -> Tensor:
        """The probability that a mask at time t is one at time s < t, too."""
        return self.mask_mass(s) / self.mask_mass(t)


# --- One step from time t to time s -----------------------------------------------------------------------------------


def nucleus(p: Tensor, nucleus_p: float) -> Tensor:
    """p (n, vocab) cut to its most likely ids, whose probabilities sum to at most `nucleus_p`, but at least one."""
    if nucleus_p >= 1:
        return p
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    kept = ordered.cumsum(-1) <= nucleus_p
    kept[..., 0] = True
    ordered = ordered * kept
    return torch.zeros_like(p).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))


def candidate_distribution(p: Tensor, s: Tensor, noise: MixedNoise, mask_token_id: int) -> Tensor:
    """f: (n, vocab), from p (n, vocab), which is 0 at the mask."""
    rho = noise.rho(s)
    f = (1 - rho) / (p.shape[-1] - 1) + rho * p
    f[..., mask_token_id] = 0
    return f


def stay_probability(p: Tensor, z: Tensor, t: Tensor, s: Tensor, noise: MixedNoise, mask_token_id: int) -> Tensor:
    """(n,) the probability that the tokens z (n,) stay as they are from time t to time s < t."""
    ids = p.shape[-1] - 1
    rho_t, rho_s = noise.rho(t), noise.rho(s)
    p_z = p.gather(-1, z.unsqueeze(-1)).squeeze(-1)
    before = (1 - rho_t) / ids + rho_t * p_z
    after = (1 - rho_s) / ids + rho_s * p_z
    visible = torch.where(before > TINY, rho_t / rho_s * after / before.clamp(min=TINY), 1.0)
    return torch.where(z == mask_token_id, noise.stays_hidden(t, s), visible)


class Predicted(NamedTuple):
    """What a pass writes at each position, (rows, n) each."""

    ids: Tensor  # as before where a token stays
    logps: Tensor  # of these ids under the model's own distribution, in nats
    entropies: Tensor  # of that, in nats


def predict(
    model: Any,
    states: Tensor,
    shown: Tensor,
    numbers: Tensor | None,
    times: tuple[Tensor, Tensor],
    settings: SamplingSettings,
    noise: MixedNoise,
    mask_token_id: int,
) -> Predicted:
    """One step of the positions that show the ids `shown` (rows, n); the head runs on a bounded number at a time.

    Args:
        states: (rows, n, hidden).
        numbers: uniform numbers (2, rows, n), which decide what stays and choose candidates; None: the last pass.
        times: t and s, fp64.
    """
    run_head = head.backbone_and_head(model)[1]
    at_once = max(1, head.CHUNK_ELEMENTS // 8 // vocabulary(model.config))  # fp64, in four tensors
    flat_states, flat_shown = states.flatten(0, 1), shown.flatten()
    t, s = times
    ids, logps, entropies = [], [], []
    for start in range(0, len(flat_states), at_once):
        chunk = slice(start, start + at_once)
        z = flat_shown[chunk]
        logits = run_head(flat_states[chunk]).float()  # (n, vocab)
        without_mask = logits.index_fill(-1, z.new_tensor([mask_token_id]), -torch.inf)
        if numbers is None:
            chunk_ids = without_mask.argmax(-1)
        else:
            stay_numbers, candidate_numbers = numbers.flatten(1)[:, chunk]
            p = nucleus((without_mask.double() / settings.temperature).softmax(-1), settings.nucleus)
            stays = stay_numbers < stay_probability(p, z, t, s, noise, mask_token_id)
            f = candidate_distribution(p, s, noise, mask_token_id)
            chunk_ids = torch.where(stays, z, quantiles(f.log(), candidate_numbers))
        ids.append(chunk_ids)
        logps.append(head.token_logps(logits, chunk_ids))
        entropies.append(head.token_entropies(logits))
    return Predicted(
        ids=torch.cat(ids).view(shown.shape),
        logps=torch.cat(logps).view(shown.shape),
        entropies=torch.cat(entropies).view(shown.shape),
    )


# --- The sampler ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def scdd_steps(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    settings: SamplingSettings,
    generators: Sequence[Generator],
    eos_token_ids: Sequence[int],
    mask_token_id: int,
) -> Iterator[Step]:
    """One `Step` per forward pass over the whole canvas. All rows fill their blocks together; a row leaves with the EOS
    stop."""
    canvas = start_canvas(prompt_ids, attention_mask, settings.gen_length, mask_token_id)
    active, first = list(range(len(prompt_ids))), prompt_ids.shape[1]
    needs_attention_mask = not bool(attention_mask.all())
    max_writes = max(2, *(len(block) for block in settings.schedule()))
    for block in settings.schedule():
        at = slice(first, first + sum(block))
        rows = torch.tensor(active, device=canvas.ids.device)
        yield from fill_block(
            model,
            canvas,
            rows,
            at,
            passes=len(block),
            settings=settings,
            generators=[generators[row] for row in active],
            mask_token_id=mask_token_id,
            max_writes=max_writes,
            needs_attention_mask=needs_attention_mask,
        )

        # The EOS stop: rows that have ended leave.
        first = at.stop
        if not eos_token_ids or first == canvas.ids.shape[1]:
            continue
        ended = torch.isin(canvas.ids[rows, at], torch.tensor(eos_token_ids, device=rows.device)).any(1)
        canvas.ids[rows[ended], first:] = eos_token_ids[0]
        active = rows[~ended].tolist()  # the block's host sync
        if not active:
            break
    finite = canvas.sums.isfinite().tolist()
    if not all(finite):
        number = finite.index(False)
        text = canvas.ids[number][canvas.visible[number].bool()]
        hidden = torch.full_like(text, mask_token_id)
        raise NotFiniteError(number, why_not_finite(model, [text, hidden]))


def fill_block(
    model: Any,
    canvas: Canvas,
    rows: Tensor,
    at: slice,
    passes: int,
    settings: SamplingSettings,
    generators: Sequence[Generator],
    mask_token_id: int,
    max_writes: int,
    needs_attention_mask: bool,
) -> Iterator[Step]:
    """Fill the positions `at` of `rows`, which are hidden, in `passes` forward passes."""
    device, noise = canvas.ids.device, MixedNoise(model.config.uniform_ratio)
    positions = torch.arange(at.start, at.stop, device=device).expand(len(rows), -1)
    visible = canvas.visible[rows]
    whole_text = cache_of(model.config, None, False).passes(
        model,
        branches=1,
        mask_token_id=mask_token_id,
        device=device,
        needs_attention_mask=needs_attention_mask,
        aligned=True,
    )
    all_times = torch.linspace(1, END, max(passes, 2), device=device, dtype=torch.float64)
    for number in range(passes):
        before = canvas.passes[rows]
        shown = canvas.ids[rows, at]

        # Random numbers (2, rows, n) and the times of the step; the last pass draws nothing.
        numbers, times = None, (all_times[-1], all_times[-1])
        if number < passes - 1:
            drawn = []
            for generator in generators:
                size = (2, at.stop - at.start)
                drawn.append(torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64))
            numbers = torch.stack(drawn, dim=1).to(device)
            times = all_times[number], all_times[number + 1]

        # Predict.
        states, forward_tokens = whole_text.states(canvas.ids[rows], visible, positions)
        predicted = predict(model, states, shown, numbers, times, settings, noise, mask_token_id)

        # Write.
        written = predicted.ids != shown
        canvas.ids[rows, at] = predicted.ids
        canvas.passes[rows] += 1
        canvas.forward_tokens[rows] += forward_tokens
        canvas.sums.index_add_(0, rows, (predicted.logps + predicted.entropies).where(written, 0.0).sum(1))
        yield Step(
            rows=rows,
            numbers=before,
            positions=positions,
            revealed=written,
            ids=predicted.ids,
            logps=predicted.logps,
            entropies=predicted.entropies,
            canvas=canvas.ids,
            passes=canvas.passes,
            forward_tokens=canvas.forward_tokens,
            max_writes=max_writes,
        )
