"""The reverse process: prompt -> completion, block by block (LLaDA, arXiv 2502.09992, section 2.4 and appendix B).

A canvas of `gen_length` mask tokens follows the prompt. Blocks are filled left to right; in each step the model
predicts every masked token of the current block and the most confident predictions are revealed. `rollout` is that
loop. How a step's states are got is in `d1/caching.py`, how many tokens it reveals in `d1/reveal.py`: the two axes of
the approximate samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Generator, Tensor

from d1.models.fast_cpu import joined, most_likely
from d1.models.head import logit_parts
from d1.sampling.caching import Passes
from d1.sampling.reveal import RULES, reveal_schedule
from d1.sampling.settings import EXACT, REMASKING, Sampler
from d1.scoring.views import token_entropies

CHUNK_ELEMENTS = 2**23  # logits alive at once, positions x vocabulary: 34 MB in fp32

Generators = Generator | Sequence[Generator] | None


@dataclass(frozen=True)
class Rollout:
    """What sampling gives, and what it took; a row's values do not depend on its batch.

    Attributes:
        ids: (rows, prompt + gen_length), without a mask token in the completion.
        logps: (rows, gen_length) fp32, each token's log-probability in the step that revealed it: of the sampler's own
            logits (cached, guided) at temperature 1, normalised over the whole vocabulary, as scoring does. 0 where the
            EOS stop filled.
        passes: (rows,) forward passes that the row took part in.
        tokens: (rows,) tokens that these fed through the body: of both sequences with guidance, without padding.
    """

    ids: Tensor
    logps: Tensor
    passes: Tensor
    tokens: Tensor


@dataclass
class Canvas:
    """The rows of a rollout in progress, (rows, prompt + gen_length) or (rows,) each."""

    ids: Tensor
    visible: Tensor
    prompt: Tensor
    logps: Tensor
    passes: Tensor
    tokens: Tensor


def uniform(shape: Sequence[int], generator: Generators, like: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Uniform numbers in [0, 1) of `like`'s dtype on its device; a list of generators gives each row its own.

    `counts` says for how many of its positions each row draws; the rest hold 0.5.
    """
    if generator is None or isinstance(generator, Generator):
        device = like.device if generator is None else generator.device
        return torch.rand(*shape, generator=generator, device=device, dtype=like.dtype).to(like.device)
    numbers = like.new_empty(tuple(shape))
    for row, own, count in zip(numbers, generator, counts or [shape[1]] * shape[0], strict=True):
        row[:count] = torch.rand(count, *shape[2:], generator=own, device=own.device, dtype=like.dtype)
        row[count:] = 0.5
    return numbers


def sample_tokens(
    logits: Tensor,
    temperature: float,
    generator: Generators = None,
    noise_dtype: torch.dtype = torch.float32,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """argmax(logits + temperature * Gumbel noise): a draw from softmax(logits / temperature); argmax at 0.

    Args:
        logits: (rows, positions, vocab).
        counts: with one generator a row, how many of its positions each row draws for; by default all.
        noise_dtype: float32 or float64. Lower precision truncates the noise's tail and sharpens the distribution
            (arXiv 2409.02908), so it is refused.
    """
    if noise_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"Gumbel noise must be drawn in float32 or float64, got {noise_dtype}")
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(noise_dtype)
    # torch.rand is a multiple of eps/2, zero included; half of one grid cell stands for zero, where the log diverges.
    grid = torch.finfo(noise_dtype).eps / 2
    exponential = uniform(logits.shape, generator, logits, counts).clamp_(min=grid / 2).neg_().log1p_().neg_()
    # On a CPU `max` finds the place in less than half of argmax's time.
    return exponential.log_().mul_(-temperature).add_(logits).max(-1).indices


def guided(parts: Iterable[tuple[int, Tensor]], views: int, scale: float) -> Iterator[tuple[int, Tensor]]:
    """fp32 logits of parts whose rows are those of one view, or of two: un + (scale + 1) (cond - un)."""
    for start, logits in parts:
        logits = logits.float().unflatten(0, (views, -1))
        yield start, logits[0] if views == 1 else logits[1] + (scale + 1) * (logits[0] - logits[1])


def predict(
    model: Any,
    states: Tensor,
    counts: Sequence[int],
    *,
    mask_token_id: int,
    temperature: float,
    cfg_scale: float,
    generator: Generators,
    noise_dtype: torch.dtype,
    with_entropies: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A token for each position, its log-probability and, if asked for, the entropy there: (rows, n) each.

    The head runs at a bounded number of positions at a time. Chunks hold whole rows, or parts of one row that depend on
    nothing else, so that a row's random numbers do not depend on its batch.

    Args:
        states: (views, rows, n, hidden); the views are the conditional and, with guidance, the unconditional one.
        counts: how many of its n positions each row has use for; it draws for no more.
    """
    rows, n = states.shape[1:3]
    at_once = max(1, CHUNK_ELEMENTS // model.config.vocab_size)
    rows_at_once = max(1, at_once // n)
    tokens = torch.empty(rows, n, dtype=torch.long, device=states.device)
    logps = torch.empty(rows, n, device=states.device)
    entropies = torch.empty_like(logps) if with_entropies else None
    for first in range(0, rows, rows_at_once):
        some = slice(first, first + rows_at_once)
        generators = generator[some] if isinstance(generator, Sequence) else generator
        for start in range(0, n, at_once):
            part = some, slice(start, start + at_once)
            parts = guided(logit_parts(model, states[:, *part].flatten(0, 1)), len(states), cfg_scale)
            if temperature == 0 and entropies is None:
                tokens[part], logps[part] = most_likely(parts, mask_token_id)
                continue
            drawn = [min(max(count - start, 0), at_once) for count in counts[some]]
            logits = joined(parts)
            log_normaliser = logits.logsumexp(-1)
            if entropies is not None:
                entropies[part] = token_entropies(logits)
            logits[..., mask_token_id] = -torch.inf  # a revealed token must be a token
            tokens[part] = sample_tokens(logits, temperature, generators, noise_dtype, drawn)
            logps[part] = logits.gather(-1, tokens[part].unsqueeze(-1)).squeeze(-1) - log_normaliser
            del logits  # before the next chunk's
    return tokens, logps, entropies


def check_settings(
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    temperature: float,
    cfg_scale: float,
    remasking: str,
    sampler: Sampler,
) -> list[list[int]]:
    """The schedule of `rollout`'s settings.

    Raises:
        ValueError: settings that make no sense, alone or together.
    """
    if remasking not in REMASKING:
        raise ValueError(f"remasking must be one of {', '.join(REMASKING)}, got {remasking!r}")
    if temperature < 0 or cfg_scale < 0:
        raise ValueError(f"temperature and cfg_scale must be >= 0, got {temperature} and {cfg_scale}")
    if sampler.reveal is not None and remasking != "low_confidence":
        raise ValueError("a parallel sampler reveals by confidence: it needs remasking low_confidence")
    return reveal_schedule(gen_length, block_length, steps)


@torch.no_grad()
def rollout(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    *,
    mask_token_id: int,
    gen_length: int,
    block_length: int,
    steps: int,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: str = "low_confidence",
    generator: Generators = None,
    noise_dtype: torch.dtype = torch.float32,
    eos_token_ids: Sequence[int] | None = None,
    sampler: Sampler = EXACT,
) -> Rollout:
    """Block-wise masked diffusion sampling.

    Args:
        model: from `d1.models.load_model`, in eval mode.
        prompt_ids: (rows, prompt) ids, padded on the left.
        attention_mask: (rows, prompt), 1 at real tokens. Padding is invisible: a greedy row is the same in any batch.
        gen_length: tokens to generate. Blocks and steps that do not divide it are spread evenly, none dropped.
        block_length: the longest a block may be; `gen_length` gives pure diffusion.
        steps: forward passes a row (over twice as many sequences with guidance). A parallel sampler takes fewer where
            its rule reveals more than the schedule, and never more: a row that falls behind reveals what is due.
        temperature: of the Gumbel noise; 0 is greedy.
        cfg_scale: 0 turns guidance off.
        remasking: which predictions are kept: the most likely ones ("low_confidence"), or "random" ones.
        generator: one for the batch, or one a row, which makes a row's draws independent of its batch.
        eos_token_ids: EOS stop: a row whose finished blocks hold one of these leaves the batch, its later blocks filled
            with the first of them. Changes no token up to a row's first EOS. Random draws then need one generator a
            row, or the rows that stay would get other numbers; so they do with a parallel sampler.
        sampler: from `choose_sampler`. Under a parallel one, a row that has filled its block waits outside the batch
            for the next.

    Raises:
        ValueError: an argument that makes no sense, before the first forward pass.
    """
    schedule = check_settings(
        gen_length=gen_length,
        block_length=block_length,
        steps=steps,
        temperature=temperature,
        cfg_scale=cfg_scale,
        remasking=remasking,
        sampler=sampler,
    )
    rows, prompt_length = prompt_ids.shape
    if isinstance(generator, Sequence) and len(generator) != rows:
        raise ValueError(f"sampling needs one generator a row: {len(generator)} for {rows} rows")
    draws = temperature > 0 or remasking == "random"
    if draws and not isinstance(generator, Sequence) and (eos_token_ids is not None or sampler.reveal is not None):
        raise ValueError("eos_token_ids or a parallel sampler with random draws needs a list of generators, one a row")
    passes = Passes(model, sampler.kv_cache, padded=not attention_mask.all())
    draw = partial(
        predict,
        model,
        mask_token_id=mask_token_id,
        temperature=temperature,
        cfg_scale=cfg_scale,
        noise_dtype=noise_dtype,
        with_entropies=sampler.reveal == "entropy",
    )
    canvas = start_canvas(prompt_ids, attention_mask, gen_length, mask_token_id)
    ends = canvas.ids.new_tensor(eos_token_ids or [])
    live, start = list(range(rows)), prompt_length
    for reveals in schedule:
        end = start + sum(reveals)
        fill_block(
            canvas,
            passes,
            draw,
            live,
            start,
            reveals,
            unprompted=mask_token_id if cfg_scale else None,
            at_random=remasking == "random",
            generator=generator,
            sampler=sampler,
        )
        start = end
        if eos_token_ids and end < canvas.ids.shape[1]:
            ended = torch.isin(canvas.ids[:, prompt_length:end], ends).any(1)
            canvas.ids[:, end:].masked_fill_(ended.unsqueeze(1), eos_token_ids[0])
            live = [row for row, done in enumerate(ended.tolist()) if not done]  # the block's one host sync
            if not live:
                break
    return Rollout(canvas.ids, canvas.logps[:, prompt_length:], canvas.passes, canvas.tokens)


def start_canvas(prompt_ids: Tensor, attention_mask: Tensor, gen_length: int, mask_token_id: int) -> Canvas:
    rows, device = len(prompt_ids), prompt_ids.device
    real, masks = attention_mask.long(), prompt_ids.new_full((rows, gen_length), mask_token_id)
    return Canvas(
        ids=torch.cat([prompt_ids, masks], dim=1),
        visible=torch.cat([real, torch.ones_like(masks)], dim=1),
        prompt=torch.cat([real, torch.zeros_like(masks)], dim=1).bool(),
        logps=torch.zeros(rows, prompt_ids.shape[1] + gen_length, device=device),
        passes=torch.zeros(rows, dtype=torch.long, device=device),
        tokens=torch.zeros(rows, dtype=torch.long, device=device),
    )


def fill_block(
    canvas: Canvas,
    passes: Passes,
    draw: Callable[..., tuple[Tensor, Tensor, Tensor | None]],
    live: list[int],
    start: int,
    reveals: list[int],
    *,
    unprompted: int | None,
    at_random: bool,
    generator: Generators,
    sampler: Sampler,
) -> None:
    """Reveals the block that begins at column `start` in the rows `live`; the others stay as they are.

    Args:
        draw: `predict`, but for states, counts and generators.
        reveals: the schedule's tokens a step.
        unprompted: the mask token, to hide the prompt behind in guidance's second view; None without guidance.
        at_random: reveal tokens at random places.
    """
    size, device = sum(reveals), canvas.ids.device
    passes.enter(start, start + size)
    # Those at work on the block, and how many of its tokens each still hides. The upload waits for nothing.
    rows = torch.tensor(live).to(device, non_blocking=True)
    left = [size] * len(live)
    hidden = torch.ones(len(live), size, dtype=torch.bool, device=device)
    for scheduled in accumulate(reveals):
        # Each row's hidden places, ascending; then, where it has fewer than another row, some that are revealed.
        slots = hidden.logical_not().byte().argsort(dim=1, stable=True)[:, : max(left)]
        places, at = start + slots, (rows.unsqueeze(1), start + slots)
        views = [canvas.ids[rows]]
        if unprompted is not None:
            views.append(views[0].masked_fill(canvas.prompt[rows], unprompted))
        visible = canvas.visible[rows].repeat(len(views), 1)
        states, fed = passes.states(torch.cat(views), visible, places.repeat(len(views), 1))
        canvas.passes[rows] += 1
        canvas.tokens[rows] += fed.unflatten(0, (len(views), -1)).sum(0)

        own = [generator[row] for row in live] if isinstance(generator, Sequence) else generator
        tokens, logps, entropies = draw(states.unflatten(0, (len(views), -1)), left, generator=own)
        confidence = uniform(logps.shape, own, logps) if at_random else logps
        # A stable sort breaks ties to the left whatever the batch; saturated confidences do tie.
        confidence = confidence.masked_fill(~hidden.gather(1, slots), -torch.inf)
        order = confidence.argsort(dim=-1, descending=True, stable=True)

        still = hidden.sum(1)
        counts = (still - (size - scheduled)).clamp(min=1)
        if sampler.reveal is not None:
            rule, _ = RULES[sampler.reveal]
            ranked = entropies if entropies is None else entropies.gather(1, order)
            counts = rule(confidence.gather(1, order), ranked, sampler.reveal_level).maximum(counts).minimum(still)
        chosen = order.argsort(dim=-1) < counts.unsqueeze(1)
        canvas.ids[at] = torch.where(chosen, tokens, canvas.ids[at])
        canvas.logps[at] = torch.where(chosen, logps, canvas.logps[at])
        hidden = hidden.scatter(1, slots, hidden.gather(1, slots) & ~chosen)

        if sampler.reveal is None:
            left = [size - scheduled] * len(live)  # known without asking the device
            continue
        left = hidden.sum(1).tolist()
        working = [i for i, count in enumerate(left) if count]
        if not working:
            return
        if len(working) < len(left):
            live, left = [live[i] for i in working], [left[i] for i in working]
            picked = torch.tensor(working, device=device)
            passes.keep(torch.cat([picked + view * len(rows) for view in range(len(views))]))
            rows, hidden = rows[picked], hidden[picked]


def generate(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    *,
    mask_token_id: int,
    gen_length: int,
    block_length: int,
    steps: int,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: str = "low_confidence",
    generator: Generators = None,
    **options: Any,
) -> Tensor:
    """The ids (rows, prompt + gen_length) of `rollout`, which see for the settings and the further `options`."""
    return rollout(
        model,
        prompt_ids,
        attention_mask,
        mask_token_id=mask_token_id,
        gen_length=gen_length,
        block_length=block_length,
        steps=steps,
        temperature=temperature,
        cfg_scale=cfg_scale,
        remasking=remasking,
        generator=generator,
        **options,
    ).ids
