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
from d1.models.diffusion_gemma import Context, decode, encode, soft_embeddings
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
    run_head = head.backbone_and_head(model)[1]
    elements = head.CHUNK_ELEMENTS // 4 * head.chunk_factor(states.device)  # fp64, and a sum as large
    at_once = max(1, elements // vocabulary(model.config))
    chunks_of_states, chunks_of_numbers = states.flatten(0, 1).split(at_once), numbers.flatten().split(at_once)
    candidates, logps, entropies, argmax_ids, embeddings = [], [], [], [], []
    for chunk_states, chunk_numbers in zip(chunks_of_states, chunks_of_numbers, strict=True):
        logits = run_head(chunk_states) / temperature  # (n, vocab)
        drawn = quantiles(logits, chunk_numbers)
        candidates.append(drawn)
        logps.append(head.token_logps(logits, drawn))
        entropies.append(head.token_entropies(logits))
        argmax_ids.append(logits.argmax(-1))
        if soft:
            embeddings.append(soft_embeddings(model, logits))

    # (rows, canvas) again
    shape = numbers.shape
    return Predicted(
        candidates=torch.cat(candidates).unflatten(0, shape),
        logps=torch.cat(logps).unflatten(0, shape),
        entropies=torch.cat(entropies).unflatten(0, shape),
        argmax_ids=torch.cat(argmax_ids).unflatten(0, shape),
        soft=torch.cat(embeddings).unflatten(0, shape) if soft else None,
    )


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
    eos_token_ids: Sequence[int],
    mask_token_id: None = None,
) -> Iterator[Step]:
    """One `Step` per pass of the decoder, and one before the first pass of each canvas, which writes its noise."""
    canvas = start_canvas(prompt_ids, attention_mask, settings.gen_length, 0)
    size, length = settings.block_length, canvas.ids.shape[1]
    active, context = list(range(len(prompt_ids))), None
    for first in range(prompt_ids.shape[1], length, size):
        # Encode the text before this canvas that is not in the context: the prompt, or the canvas before.
        rows = torch.tensor(active, device=canvas.ids.device)
        new = slice(0 if context is None else first - size, first)
        visible = canvas.visible[rows, new]
        context, _ = encode(model, canvas.ids[rows, new], visible, context)
        context.forget(model.config)
        canvas.forward_tokens[rows] += visible.sum(1)

        # Fill this canvas.
        at = slice(first, first + size)
        active_generators = [generators[row] for row in active]
        yield from denoise_canvas(model, canvas, rows, at, context, settings, active_generators)

        # The EOS stop: rows that have ended leave.
        if not eos_token_ids or at.stop == length:
            continue
        done = torch.isin(canvas.ids[rows, at], torch.tensor(eos_token_ids, device=rows.device)).any(1)
        canvas.ids[rows[done], at.stop :] = eos_token_ids[0]
        working = (~done).nonzero().squeeze(1)  # the canvas's one more host sync
        if not len(working):
            break
        active = rows[working].tolist()
        if len(working) < len(rows):
            context = context.rows(working)
    finite = canvas.sums.isfinite().tolist()
    if not all(finite):
        why = "in a pass over a canvas; which layer is at fault is unknown. Check the weights, or load it in float32"
        raise NotFiniteError(finite.index(False), why)


def denoise_canvas(
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
    canvas_positions = torch.arange(at.start, at.stop, device=device)
    # Positions of the tokens in their text, (rows, canvas)
    text_positions = context.visible.sum(1, keepdim=True) + torch.arange(size, device=device)
    active, active_generators = torch.arange(len(rows), device=device), list(generators)
    passes = settings.passes_per_block

    def write(ids: Tensor, numbers: Tensor, is_drawn: Tensor, logps: Tensor, entropies: Tensor) -> Step:
        active_rows = rows[active]
        canvas.ids[active_rows[:, None], canvas_positions] = ids
        canvas.sums.index_add_(0, active_rows, (logps + entropies).sum(1).float())
        return Step(
            rows=active_rows,
            numbers=numbers,
            positions=canvas_positions.expand_as(ids),
            revealed=is_drawn,
            ids=ids,
            logps=logps.float(),
            entropies=entropies.float(),
            canvas=canvas.ids,
            passes=canvas.passes,
            forward_tokens=canvas.forward_tokens,
            max_writes=passes + 1,
            noised=~is_drawn,
        )

    # The first noise.
    shown = torch.stack([uniform_ids(generator, size, vocab) for generator in active_generators]).to(device)
    nothing = torch.zeros(len(rows), size, dtype=torch.bool, device=device)
    zeros = torch.zeros(len(rows), size, device=device)
    yield write(shown, canvas.passes[rows], nothing, zeros, zeros)

    soft = likely = None
    for number in range(passes):
        # Predict: a candidate for each position, and the most likely id.
        numbers, noise = draw_numbers(active_generators, size, vocab)
        numbers, noise = numbers.to(device), noise.to(device)
        states = decode(
            model, shown, text_positions[active], text_positions[active, :1].expand(-1, size), context, soft
        )
        predicted = predict(model, states, settings.temperature_of(number), numbers, settings.self_conditioning)

        # Which rows have their last pass: those whose ids are stable and certain.
        if likely is None:
            is_stable = nothing[: len(active), 0]
        else:
            is_stable = (likely == predicted.argmax_ids).all(1)
        is_last = is_stable & (predicted.entropies.mean(1) < settings.stops_below)
        if number == passes - 1:
            is_last = torch.ones_like(is_last)

        # Choose: accepted candidates, and new noise elsewhere; after the last pass, the output.
        is_accepted = accepted(predicted.entropies, settings.level)
        if settings.output == "draw":
            output, is_drawn = predicted.candidates, is_accepted | is_last[:, None]
        else:
            output, is_drawn = predicted.argmax_ids, is_accepted & ~is_last[:, None]
        shown = torch.where(is_accepted, predicted.candidates, noise)
        shown = torch.where(is_last[:, None], output, shown)

        # Write.
        before = canvas.passes[rows[active]]
        canvas.passes[rows[active]] += 1
        canvas.forward_tokens[rows[active]] += size
        logps, entropies = predicted.logps.where(is_drawn, 0.0), predicted.entropies.where(is_drawn, 0.0)
        yield write(shown, before, is_drawn, logps, entropies)

        # Rows that have ended leave.
        soft, likely = predicted.soft, predicted.argmax_ids
        ended = is_last.tolist()  # the pass's one host sync
        if all(ended):
            return
        if any(ended):
            working = [row for row, has_ended in enumerate(ended) if not has_ended]
            active_generators = [active_generators[row] for row in working]
            kept = torch.tensor(working, device=device)
            active, shown, likely, context = active[kept], shown[kept], likely[kept], context.rows(kept)
            if soft is not None:
                soft = soft[kept]
