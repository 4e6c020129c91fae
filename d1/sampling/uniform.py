"""The sampler of models with uniform noise (DiffusionGemma; Transformers 5.24, `generation_diffusion_gemma.py`).

Canvas after canvas is filled from uniform ids. In a pass, each position has a distribution d, that of the logits at the
pass's temperature, and a candidate drawn from it. The positions with the lowest entropies of d are *accepted*, while
the sum of their entropies, without the largest, is at most the level of the rule "entropy". The next pass sees their
candidates, and new uniform ids at all other positions, also where a token was accepted before. With
self-conditioning, it also sees the mean embedding of d.

A canvas ends when the most likely ids have not changed since the pass before and the mean entropy is below
`stop_entropy`, or after its share of `steps`. It becomes the most likely ids of its last pass (`output` "argmax"), or
the candidates of that pass ("draw"), which have a probability.

Which positions are accepted depends on no draw. So only accepted candidates matter, and a pass has the probability
prod of d(candidate) over accepted positions x vocabulary^-(other positions): see `d1/scoring/accepted.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from d1.models import head
from d1.models.canvas import Context, decode, encode, soft_embeddings
from d1.models.head import NotFiniteError
from d1.models.kinds import vocabulary
from d1.sampling.record import Canvas, Step, start_canvas
from d1.sampling.reveal import entropy_bound
from d1.sampling.settings import SamplingSettings


class Predicted(NamedTuple):
    """What a pass says of each position, (rows, canvas) each."""

    candidates: Tensor
    logps: Tensor  # their log-probabilities under d, in nats
    entropies: Tensor  # of d, in nats
    argmax_ids: Tensor  # the most likely ids
    soft: Tensor | None  # (rows, canvas, hidden) mean embeddings of d


def quantiles(logits: Tensor, numbers: Tensor) -> Tensor:
    """(n,) ids: of each distribution of `logits` (n, vocab) the quantile `numbers` (n,), uniform in [0, 1); in fp64."""
    summed = logits.double().softmax(-1).cumsum(-1)
    ids = torch.searchsorted(summed, (numbers.double() * summed[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    return ids.clamp(max=logits.shape[-1] - 1)


def predict(model: Any, states: Tensor, temperature: float, numbers: Tensor, soft: bool) -> Predicted:
    """From the decoder's states (rows, canvas, hidden) and a uniform number per candidate (rows, canvas)."""
    run_head, parts = head.backbone_and_head(model)[1], []
    elements = head.CHUNK_ELEMENTS // 4 * head.chunk_factor(states.device)  # fp64, and a sum as large
    at_once = max(1, elements // vocabulary(model.config))
    for chunk, chunk_numbers in zip(states.flatten(0, 1).split(at_once), numbers.flatten().split(at_once), strict=True):
        logits = run_head(chunk) / temperature
        drawn = quantiles(logits, chunk_numbers)
        values = drawn, head.token_logps(logits, drawn), head.token_entropies(logits), logits.argmax(-1)
        parts.append((*values, soft_embeddings(model, logits)) if soft else values)
    columns = [torch.cat(column).unflatten(0, numbers.shape) for column in zip(*parts, strict=True)]
    drawn, logps, entropies, likely, *rest = columns
    return Predicted(drawn, logps, entropies, likely, rest[0] if soft else None)


def accepted(entropies: Tensor, level: float) -> Tensor:
    """(..., canvas) bool: the positions with the lowest `entropies`, as many as the rule "entropy" counts, not 0."""
    ordered, order = entropies.sort(dim=-1, stable=True)
    return order.argsort(dim=-1) < entropy_bound(ordered, ordered, level).unsqueeze(-1)


def draw_numbers(generators: Sequence[Generator], size: int, vocab: int) -> tuple[Tensor, Tensor]:
    """From each row's generator: a uniform number per candidate, in fp64, and a uniform id, (rows, size) each."""
    numbers, noise = [], []
    for generator in generators:
        numbers.append(torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64))
        noise.append(uniform_ids(generator, size, vocab))
    return torch.stack(numbers), torch.stack(noise)


def uniform_ids(generator: Generator, size: int, vocab: int) -> Tensor:
    """(size,) uniform ids."""
    return torch.randint(vocab, (size,), generator=generator, device=generator.device)


@torch.no_grad()
def uniform_steps(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    settings: SamplingSettings,
    generators: Sequence[Generator],
    ends: Sequence[int],
    mask_token_id: None = None,
) -> Iterator[Step]:
    """One `Step` per pass of the decoder, and one before the first pass of each canvas, which writes its noise."""
    canvas = start_canvas(prompt_ids, attention_mask, settings.gen_length, 0)
    size, active, context = settings.block_length, [*range(len(prompt_ids))], None
    for first in range(prompt_ids.shape[1], canvas.ids.shape[1], size):
        rows = torch.tensor(active, device=canvas.ids.device)
        new = slice(0 if context is None else first - size, first)  # the prompt, or the canvas before
        read = canvas.visible[rows, new]
        context, _ = encode(model, canvas.ids[rows, new], read, context)
        context.forget(model.config)
        canvas.forward_tokens[rows] += read.sum(1)
        active_generators = [generators[row] for row in active]
        yield from fill_canvas(model, canvas, rows, slice(first, first + size), context, settings, active_generators)
        if not ends or first + size == canvas.ids.shape[1]:
            continue
        done = torch.isin(canvas.ids[rows, first : first + size], torch.tensor(ends, device=rows.device)).any(1)
        canvas.ids[rows[done], first + size :] = ends[0]
        kept = (~done).nonzero().squeeze(1)  # the canvas's one more host sync
        if not len(kept):
            break
        active = rows[kept].tolist()
        context = context if len(kept) == len(rows) else context.rows(kept)
    finite = canvas.sums.isfinite().tolist()
    if not all(finite):
        why = "in a pass over a canvas; which layer is at fault is unknown. Check the weights, or load it in float32"
        raise NotFiniteError(finite.index(False), why)


def fill_canvas(
    model: Any,
    canvas: Canvas,
    rows: Tensor,
    at: slice,
    context: Context,
    settings: SamplingSettings,
    generators: Sequence[Generator],
) -> Iterator[Step]:
    """Fill one canvas of `rows`, at the positions `at`, whose text before is `context`."""
    device, size, vocab = canvas.ids.device, at.stop - at.start, vocabulary(model.config)
    columns = torch.arange(at.start, at.stop, device=device)
    positions = context.visible.sum(1, keepdim=True) + torch.arange(size, device=device)
    active, active_generators = torch.arange(len(rows), device=device), list(generators)
    passes = settings.passes_per_block
    none = torch.zeros(len(rows), size, dtype=torch.bool, device=device)

    def step(numbers: Tensor, ids: Tensor, written: Tensor, logps: Tensor, entropies: Tensor) -> Step:
        chosen = rows[active]
        canvas.ids[chosen[:, None], columns] = ids
        canvas.sums.index_add_(0, chosen, (logps + entropies).sum(1).float())
        predicted = written, ids, logps.float(), entropies.float(), canvas.ids, canvas.passes, canvas.forward_tokens
        return Step(chosen, numbers, columns.expand_as(ids), *predicted, passes + 1, noised=~written)

    shown = torch.stack([uniform_ids(generator, size, vocab) for generator in active_generators]).to(device)
    zeros = torch.zeros(len(rows), size, device=device)
    yield step(canvas.passes[rows], shown, none, zeros, zeros)
    soft = likely = None
    for number in range(passes):
        numbers, noise = (values.to(device) for values in draw_numbers(active_generators, size, vocab))
        states = decode(model, shown, positions[active], positions[active, :1].expand(-1, size), context, soft)
        predicted = predict(model, states, settings.temperature_of(number), numbers, settings.self_conditioning)
        stable = none[: len(active), 0] if likely is None else (likely == predicted.argmax_ids).all(1)
        last = stable & (predicted.entropies.mean(1) < settings.stops_below)
        if number == passes - 1:
            last = torch.ones_like(last)
        takes = accepted(predicted.entropies, settings.level)
        if settings.output == "draw":
            output, written = predicted.candidates, takes | last[:, None]
        else:
            output, written = predicted.argmax_ids, takes & ~last[:, None]
        shown = torch.where(last[:, None], output, torch.where(takes, predicted.candidates, noise))
        before = canvas.passes[rows[active]]
        canvas.passes[rows[active]] += 1
        canvas.forward_tokens[rows[active]] += size
        yield step(before, shown, written, predicted.logps.where(written, 0.0), predicted.entropies.where(written, 0.0))
        soft, likely = predicted.soft, predicted.argmax_ids
        ended = last.tolist()  # the pass's one host sync
        if all(ended):
            return
        if any(ended):
            kept = torch.tensor([row for row, is_over in enumerate(ended) if not is_over], device=device)
            active, shown, likely = active[kept], shown[kept], likely[kept]
            soft, context = None if soft is None else soft[kept], context.rows(kept)
            active_generators = [active_generators[row] for row in kept.tolist()]
