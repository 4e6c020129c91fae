"""The probability of a step: which tokens it drew, and which places it wrote to.

In each step, every hidden place i of a block draws a token y from q_i (temperature, truncation, no mask token), and its
confidence is log p_i(y), of the model's own distribution. The set S of places that are revealed depends on these draws,
also on those that are thrown away, which are summed out:

    P(S, y_S | state) = product over S of q_i(y_i) x F,

where F is the probability of S given its tokens. By confidence, with c the least confident place of S, every other
place must have drawn a token that comes after c: with a smaller log-probability or, in a tie, further right. A reveal
rule that would have accepted one more token excludes some more. So F is a product of masses of q, or, if the rule reads
entropies, a sum of such products over the place that comes next. With noise on the order, F is the probability of
exponential clocks (Plackett-Luce), and with a threshold that of the clocks that have rung before it.

F is exact for given logits, but membership in S changes in steps: where confidences cross, the probability of a set of
tokens jumps, which no gradient of log F contains. With noise on the order it is smooth.

A place is a position of the canvas that a step decides on. Confidences are compared as in `loop.keep`, ties included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d1.models import head
from d1.models.distribution import Distribution
from d1.sampling.reveal import REMASKING, RULES
from d1.sampling.settings import SamplingSettings


class Steps(NamedTuple):
    """The places that some steps decide on, step after step and each from left to right: (places,) tensors.

    Attributes:
        counts: places of each step.
        hidden: bool, whether the place was hidden before the step; other places can be edited.
        written: bool, whether the step wrote there.
        ids: what it wrote there, or else what stood there.
        ranks: of an order with noise, as in `Rollout.ranks`; ignored by others.
        more: (steps,) bool, whether the step revealed more than its schedule asked for.
    """

    counts: Sequence[int]
    hidden: Tensor
    written: Tensor
    ids: Tensor
    ranks: Tensor
    more: Tensor

    def some(self, first: int, last: int) -> Steps:
        """The steps from number `first` on, before `last`."""
        start, end = sum(self.counts[:first]), sum(self.counts[:last])
        own = [of[start:end] for of in (self.hidden, self.written, self.ids, self.ranks)]
        return Steps(self.counts[first:last], own[0], own[1], own[2], own[3], self.more[first:last])


class Layout:
    """Where the places of steps lie in a table (steps, places): sums, extremes and tables of values (places,)."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.shape = len(counts), max(counts, default=0)
        numbers = torch.tensor([*counts], dtype=torch.long)
        step = torch.arange(len(counts)).repeat_interleave(numbers)
        column = torch.arange(len(step)) - (numbers.cumsum(0) - numbers)[step]
        self.step, self.column = (of.to(device, non_blocking=True) for of in (step, column))

    def table(self, values: Tensor, empty: float) -> Tensor:
        """(steps, places, ...), with `empty` where a step has fewer places."""
        blank = values.new_full((*self.shape, *values.shape[1:]), empty)
        return blank.index_put((self.step, self.column), values)

    def sum(self, values: Tensor) -> Tensor:
        """(steps,) sums."""
        return values.new_zeros(self.shape[0]).index_add(0, self.step, values)

    def least(self, values: Tensor, empty: float) -> Tensor:
        """(steps,) the smallest value of each step, at most `empty`."""
        return values.new_full(self.shape[:1], empty).scatter_reduce(0, self.step, values, "amin")


def log_mass(logq: Tensor, allowed: Tensor) -> Tensor:
    """The log-probability (...) that a draw from exp(`logq`) (..., vocab) is `allowed`; -inf, without gradient, if
    nothing is."""
    some = (allowed & logq.isfinite()).any(-1)
    mass = logq.masked_fill(~allowed & some.unsqueeze(-1), -torch.inf).logsumexp(-1)
    return mass.where(some, -torch.inf)


def step_logps(
    logits: Tensor, steps: Steps, settings: SamplingSettings, distribution: Distribution
) -> tuple[Tensor, Tensor]:
    """Log q of what each place's step wrote there (places,), 0 where it wrote nothing, and log F (steps,), -inf where
    the step is impossible.

    Args:
        logits: (places, vocab), of the model.
        settings: of the sampler; `unknown_places` must be "".
        distribution: `settings.drawn`: q, and the mask token.
    """
    order = REMASKING[settings.remasking]
    layout = Layout(steps.counts, logits.device)
    own = logits - logits.logsumexp(-1, keepdim=True)  # the sum and the difference of `predict_from`
    certain = own.detach()
    assert distribution.excluded is not None
    mask_token = steps.ids.new_full((1,), distribution.excluded)
    best = certain.index_fill(-1, mask_token, -torch.inf).max(-1).indices  # never truncated
    logq = distribution.logits(logits, steps.ids.where(steps.written, best)).log_softmax(-1)
    tokens = logq.gather(-1, steps.ids.unsqueeze(-1)).squeeze(-1).where(steps.written, 0.0)
    best_logps = own.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    if order.noisy:
        log_f = clocks(best_logps, logits, steps, layout, settings)
    elif order.law == "confidence":
        log_f = by_confidence(logits, certain, logq, steps, layout, settings)
    elif order.law == "state":
        entropies = layout.table(head.token_entropies(logits.detach()), 0.0)
        scores = order.scores(layout.table(best_logps.detach(), 0.0), entropies, no_draws)[layout.step, layout.column]
        better = comes_before(scores.unsqueeze(-1), scores, steps, layout).squeeze(-1)
        log_f = torch.zeros_like(scores).masked_fill(better & steps.hidden & ~steps.written, -torch.inf)
        log_f = layout.least(log_f, 0.0)
    else:
        n, k = (layout.sum(of.to(logits.dtype)) for of in (steps.hidden, steps.hidden & steps.written))
        log_f = (k + 1).lgamma() + (n - k + 1).lgamma() - (n + 1).lgamma()  # 1 / (n choose k)
    if settings.rule is None:
        log_f = log_f.where(~steps.more, -torch.inf)
    if settings.edits is None:
        return tokens, log_f
    # Of the visible places, each kept its token or drew another one that is probable enough.
    current = torch.arange(logits.shape[-1], device=logits.device) == steps.ids.unsqueeze(-1)
    above = certain.exp() > torch.tensor(settings.edits)
    stays = log_mass(logq, current | ~above)
    edited = torch.zeros_like(stays).masked_fill(~(current & above).any(-1), -torch.inf)
    visible = edited.where(steps.written, stays).where(~steps.hidden, 0.0)
    return tokens, log_f + layout.sum(visible)


def no_draws() -> Tensor:
    raise ValueError("an order whose choice of places goes by the state draws no numbers of its own: see `Order.law`")


def comes_before(values: Tensor, scores: Tensor, steps: Steps, layout: Layout) -> Tensor:
    """Whether `values` (places, n), at each place, would be chosen before the last one of the places that a step
    revealed, which have these `scores` (places,): higher or, in a tie, further left."""
    revealed = steps.hidden & steps.written
    least = layout.least(scores.where(revealed, torch.inf), torch.inf)[layout.step]
    last = revealed & (scores == least)
    column = -layout.least(torch.where(last, -layout.column, 1), 1)[layout.step]
    least, left = least.unsqueeze(-1), (layout.column < column).unsqueeze(-1)
    return (values > least) | ((values == least) & left)


def by_confidence(
    logits: Tensor, certain: Tensor, logq: Tensor, steps: Steps, layout: Layout, settings: SamplingSettings
) -> Tensor:
    """log F (steps,) where the most confident tokens are revealed, as many as the schedule and a rule say."""
    revealed, rivals = steps.hidden & steps.written, steps.hidden & ~steps.written
    scores = certain.gather(-1, steps.ids.unsqueeze(-1)).squeeze(-1)
    allowed = ~comes_before(certain, scores, steps, layout)
    if settings.rule is None:
        return layout.sum(log_mass(logq, allowed).where(rivals, 0.0))
    rule, level = RULES[settings.rule], settings.level
    assert rule.accepts is not None
    number = layout.sum(revealed.long())
    entropies = head.token_entropies(logits.detach())
    total = layout.sum(entropies.where(revealed, 0.0))
    largest = -layout.least((-entropies).where(revealed, torch.inf), torch.inf)
    bound = total[layout.step] + entropies - largest[layout.step].maximum(entropies)  # with one place more
    accepted = rule.accepts(certain, (number[layout.step] + 1).unsqueeze(-1), bound.unsqueeze(-1), level)
    least = layout.least(scores.where(revealed, torch.inf), torch.inf)
    possible = ~steps.more | rule.accepts(least, number, total - largest, level)
    if rule.by_place:
        refused = allowed & ~accepted & rivals.unsqueeze(-1)
        log_f = next_refused(certain, logq.exp(), refused, rivals, layout)
        log_f = log_f.where(layout.sum(rivals.long()) > 0, 0.0)
    else:  # refused the most confident one, and so all
        log_f = layout.sum(log_mass(logq, allowed & ~accepted).where(rivals, 0.0))
    return log_f.where(possible, -torch.inf)


def next_refused(certain: Tensor, q: Tensor, refused: Tensor, rivals: Tensor, layout: Layout) -> Tensor:
    """log of the probability (steps,) that the most confident draw of a step's `rivals` is `refused` (places, vocab):
    the sum, over these draws, of their probability times that of less confident draws at all other rivals."""
    confidence, q, refused = (layout.table(of, 0) for of in (certain, q, refused))
    rivals = layout.table(rivals, 0)
    _, count, vocab = confidence.shape
    ascending, order = confidence.sort(-1)
    below = torch.nn.functional.pad(q.gather(-1, order).cumsum(-1), (1, 0))  # of the n least confident tokens
    # (steps, places, places x vocab): at each place, how many tokens come after each draw, at each place.
    draws = confidence.flatten(1).unsqueeze(1).expand(-1, count, -1).contiguous()
    columns = torch.arange(count, device=q.device)
    right = columns.unsqueeze(1) > columns.repeat_interleave(vocab)  # in a tie, the left one is chosen first
    after = [torch.searchsorted(ascending, draws, right=also_equal) for also_equal in (False, True)]
    mass = below.gather(-1, torch.where(right, after[1], after[0]))
    other = rivals.unsqueeze(-1) & (columns.unsqueeze(1) != columns.repeat_interleave(vocab))
    total = (mass.where(other, 1.0).prod(1) * (q * refused).flatten(1)).sum(-1)
    return total.where(total > 0, 1.0).log().where(total > 0, -torch.inf)


def clocks(best: Tensor, logits: Tensor, steps: Steps, layout: Layout, settings: SamplingSettings) -> Tensor:
    """log F (steps,) of an order with noise. With g the scores and t the temperature, place i has a clock that rings
    after an exponential time of rate exp(g_i / t): its score with Gumbel noise is -t times the logarithm of that time.
    So scores above a rule's cutoff are those of clocks that ring before a fixed time, independently of each other, and
    the places of ranks 1, 2, ... are the first among the other clocks, which begin anew at that time."""
    order = REMASKING[settings.remasking]
    entropies = head.token_entropies(logits)
    scores = order.scores(layout.table(best, 0.0), layout.table(entropies, 0.0), no_draws) / settings.noise
    hidden = layout.table(steps.hidden, False)
    ranks = layout.table(steps.ranks.where(steps.written, 2**30), -1).masked_fill(~hidden, -1)
    found = scores.new_zeros(len(scores))
    if settings.rule is not None and (cutoff := RULES[settings.rule].cutoff) is not None:
        # log(rate x time); from 80 on, in fp32, the clock has certainly rung.
        log_rates = (scores - cutoff(settings.level) / settings.noise).clamp(max=80.0)
        rates = log_rates.exp()
        rung = torch.where(log_rates < -30, log_rates, (-(-rates.clamp(min=1e-14)).expm1()).log())
        found = found + torch.where(ranks == 0, rung, (-rates).where(ranks > 0, 0.0)).sum(-1)
    # From the last place to the first one: the others (a rank of 2^30), then the ranks down to 1, then those that rung.
    ranks, descending = ranks.sort(-1, descending=True)
    scores = scores.gather(-1, descending)
    return found + (scores - scores.logcumsumexp(-1)).where((ranks > 0) & (ranks < 2**30), 0.0).sum(-1)


def score_steps(
    model: Any, states: Tensor, steps: Steps, settings: SamplingSettings, distribution: Distribution
) -> tuple[Tensor, Tensor, Tensor]:
    """`step_logps`, and the entropies (places,) in nats without gradients, from states (places, hidden): whole steps at
    a time, so that at most one chunk of logits is in memory. All chunks but the last are recomputed in the backward
    pass."""
    run_head = head.body_and_head(model)[1]

    def compute(states: Tensor, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
        logits = run_head(states)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        tokens, log_f = step_logps(logits, steps, settings, distribution)
        with torch.no_grad():
            return tokens, log_f, head.token_entropies(logits)

    parts = list(chunks(steps, model.config.vocab_size, settings))
    # Under ZeRO-3, all processes call the head equally often.
    parts = [(len(steps.counts),) * 2] * (head.calls_in_step(model, len(parts)) - len(parts)) + parts
    ends = [0, *accumulate(steps.counts)]
    run: Callable[..., Any] = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    given = [(states[ends[first] : ends[last]], steps.some(first, last)) for first, last in parts]
    done = [(run if torch.is_grad_enabled() else compute)(*of) for of in given[:-1]] + [compute(*given[-1])]
    tokens, log_f, entropies = (torch.cat(of) for of in zip(*done, strict=True))
    return tokens, log_f, entropies


def chunks(steps: Steps, vocab: int, settings: SamplingSettings) -> Iterator[tuple[int, int]]:
    """The first step and the one after the last step of each chunk."""
    rule = None if settings.rule is None else RULES[settings.rule]
    squared = rule is not None and rule.by_place  # a table of places x places x vocabulary
    sizes = [count * vocab * (count if squared else 1) for count in steps.counts]
    cuts, room = [0], head.CHUNK_ELEMENTS
    for number, size in enumerate(sizes):
        if size > room and number > cuts[-1]:
            cuts.append(number)
            room = head.CHUNK_ELEMENTS
        room -= size
    return pairwise([*cuts, len(sizes)])
