"""Score a completion in chosen views: the contract of all estimators of log-probabilities.

A *view* is a state to score in: it says which tokens of prompt and canvas are hidden. Each view has a weight for each
token of the completion, and the log-probability of token k is the weighted sum over the views,

    sum over v of weights[v, k] x log p(token k | prompt and canvas with noise[v] hidden).

A view may show other ids than the completion's and score others: the drafts that a sampler corrected later.

An estimator (`d1/scoring/estimators.py`) is a way to draw views. They are plain tensors: drawn once per rollout, they
are stored, shuffled, split and saved with their samples.

With full attention, views cannot share the states of the prompt: every position attends to all others, hidden or not.

A block-causal model scores each block given the finished blocks before it, as in sampling: a view hides tokens of the
token's own block, and earlier blocks are clean. All blocks of a view share one forward pass over two streams, the clean
text and the noised canvas (`d1/models/packing.py`).

With a causal context, the clean text of this pass also scores the first token of every block, if the sampler took it
from there: it is never hidden from the other tokens of its block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d1.models.attention import (
    Blocks,
    count_positions,
    has_causal_context,
    over_queries,
    padding_mask,
    require_prepared,
    takes_masks_over_queries,
)
from d1.models.canvas import canvas_states
from d1.models.distribution import OWN, Distribution
from d1.models.head import CHUNK_ELEMENTS, body_and_head, calls_in_step, target_logps, token_entropies
from d1.models.kinds import block_size, has_masks, vocabulary
from d1.models.packing import two_stream_states
from d1.scoring.rollouts import CanvasBlocks


@dataclass(frozen=True)
class Views:
    """The states in which a batch of completions is scored.

    Attributes:
        noise: (rows, views, prompt + canvas) bool, the tokens that each view hides; values at padding are ignored. If
            completions are shorter than the canvas, the rest of the canvas is masked in every view.
        weights: (rows, views, tokens) float; a token with weight 0 is not scored in that view and costs nothing.
        shown: (rows, views, canvas) ids that each view shows of the canvas where it hides nothing; None: the
            completions. In a block-causal model, later blocks see the completions all the same.
        targets: (rows, views, tokens) ids that each view scores; None: the completions.
        sampled_logps: (rows, views, tokens) fp32, what the sampler noted for these targets; None: not known, or that of
            the completions' tokens.
        temperatures: (rows, views) that the logits of each view are divided by; None: 1.
        accepted: (rows, views, canvas) bool, for models with uniform noise, what a rule chose in each state.
    """

    noise: Tensor
    weights: Tensor
    shown: Tensor | None = None
    targets: Tensor | None = None
    sampled_logps: Tensor | None = None
    temperatures: Tensor | None = None
    accepted: Tensor | None = None

    @property
    def scoring(self) -> Tensor:
        """(rows, views) bool, whether a view scores anything in a row."""
        return self.weights.ne(0).any(-1)

    def only(self, where: Tensor) -> Views:
        """The same views, which score nothing except `where` (rows, views) is true."""
        return replace(self, weights=self.weights * where.unsqueeze(-1))

    def each(self, change: Callable[[Tensor], Tensor]) -> Views:
        """Views of which every tensor is changed: moved to a device, or cut to some rows."""
        changed: dict[str, Any] = {name: of if of is None else change(of) for name, of in vars(self).items()}
        return Views(**changed)

    def check(self, rows: int, text: int, tokens: int, canvas: int) -> None:
        """Raise ValueError unless these are views of `rows` texts of `text` tokens, the last `canvas` of which were
        sampled, with weights for `tokens`."""
        for name, width in (("noise", text), ("weights", tokens)):
            found = tuple(getattr(self, name).shape)
            if len(found) != 3 or (found[0], found[2]) != (rows, width):
                raise ValueError(f"views.{name} must be ({rows}, views, {width}), got {found}")
        if self.noise.shape[1] != self.weights.shape[1]:
            raise ValueError(f"{self.noise.shape[1]} views have noise and {self.weights.shape[1]} have weights")
        if self.noise.dtype != torch.bool or not self.weights.is_floating_point():
            raise ValueError(f"views need bool noise and float weights, got {self.noise.dtype}, {self.weights.dtype}")
        ids = {name: (width, torch.long) for name, width in (("shown", canvas), ("targets", tokens))}
        for name, (width, dtype) in {**ids, "sampled_logps": (tokens, torch.float)}.items():
            found, shape = getattr(self, name), (*self.noise.shape[:2], width)
            if found is not None and (found.shape != shape or found.dtype != dtype):
                raise ValueError(f"views.{name} must be {shape} of {dtype}, got {tuple(found.shape)} of {found.dtype}")
        if (given := self.temperatures) is not None and given.shape != self.noise.shape[:2]:
            raise ValueError(f"views.temperatures must be {tuple(self.noise.shape[:2])}, got {tuple(given.shape)}")


def views_of_canvas(prompt_noise: Tensor, hidden: Tensor, scored: Tensor, weights: Tensor) -> Views:
    """Views that hide `prompt_noise` (rows, views or 1, prompt) and, of the canvas, `hidden` (rows, views, canvas).

    Tokens after a completion's end are hidden in every view: visible ones would tell the model where the end is.

    Args:
        scored: (rows, canvas) bool, the tokens up to and including the first EOS.
        weights: (rows, views, canvas), or (rows, views, 1) for all tokens of a view; they only count where a view
            hides a scored token.

    Raises:
        ValueError: the weights have another shape; one weight for all views or rows would be silently wrong.
    """
    if weights.shape not in (hidden.shape, (*hidden.shape[:2], 1)):
        raise ValueError(f"weights must be {tuple(hidden.shape)}, one per view or token, got {tuple(weights.shape)}")
    prompt_noise = prompt_noise.expand(-1, hidden.shape[1], -1)
    counts = hidden & scored.unsqueeze(1)
    return Views(torch.cat([prompt_noise, hidden | ~scored.unsqueeze(1)], dim=-1), torch.where(counts, weights, 0.0))


class Scores(NamedTuple):
    """The result of `score`.

    Attributes:
        logps: (rows, tokens) fp32, the weighted sum of log-probabilities; 0 where every weight is 0. Differentiable.
        view_logps: (rows, views, tokens), each view's log-probabilities before weighting, 0 where not scored.
            Differentiable.
        compute: scalar, the cost of the scores in tokens: 1 per token of a forward pass and 2 for its backward pass, so
            3 with gradients. Padding does not count, nor does the recomputation of a pass for its backward pass
            (`views_at_once`), nor a pass that scores nothing and only keeps processes in step. The sampler counts in
            the same way, 1 per token of a forward pass (`Rollout.forward_tokens`).
        entropies: (rows, tokens), the same weighted sum of the entropies, in nats, of the model's own distributions,
            without gradients; None unless asked for.
        canvas_entropies: (rows, views, canvas), with the `temperatures` of the views, at all positions; None without
            these, or unless entropies were asked for.
    """

    logps: Tensor
    view_logps: Tensor
    compute: Tensor
    entropies: Tensor | None = None
    canvas_entropies: Tensor | None = None


def score(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    completion_ids: Tensor,
    views: Views,
    *,
    mask_token_id: int | None,
    gen_length: int,
    with_entropies: bool = False,
    views_at_once: int = 1,
    distribution: Distribution = OWN,
    blocks: CanvasBlocks | None = None,
    padded: bool | None = None,
) -> Scores:
    """Log-probabilities of completions: the weighted sum over views.

    Views that score nothing in a row are not computed for it. With gradients and several passes, the backward pass
    recomputes each pass, so memory does not grow with the number of views (except for one more copy of all gradients).

    Args:
        model: from `d1.models.load_model`.
        prompt_ids, attention_mask: (rows, prompt), padded on the left.
        completion_ids: (rows, tokens), tokens <= gen_length.
        gen_length: length of the canvas the completion was sampled on; a shorter one would reveal the completion's end.
        views_at_once: views of each row per forward pass, on average.
        distribution: the distribution, made from the model's logits, whose log-probabilities are returned.
        blocks: with a causal context, those of the sampler; None: as it samples by default.
        padded: give attention a mask. A GPU's kernels with and without one differ by rounding, so rows that are scored
            in several batches need the same choice; it must be true if there is padding. None: if there is padding.

    Raises:
        ValueError: the model was not prepared, or shapes do not match.
    """
    require_prepared(model)
    rows, width = completion_ids.shape
    if width > gen_length:
        raise ValueError(f"a completion of {width} tokens does not fit a canvas of {gen_length}")
    views.check(len(prompt_ids), prompt_ids.shape[1] + gen_length, width, gen_length)
    if mask_token_id is None and (width < gen_length or views.shown is None):
        raise ValueError("a model with uniform noise is scored on whole canvases, in views that say what they show")

    # The text of each row: prompt, completion, and the rest of the canvas, which every view hides.
    rest = prompt_ids.new_full((rows, gen_length - width), mask_token_id or 0)
    clean = torch.cat([prompt_ids, completion_ids, rest], dim=1)
    visible = torch.cat([attention_mask, attention_mask.new_ones(rows, gen_length)], dim=1)
    if padded is None:  # even a mask that hides nothing excludes the fastest attention kernels
        padded = padding_mask(visible) is not None

    # The passes are planned on the host's copy: a boolean index on the device would wait for the device in every pass.
    scored = views.weights.ne(0).cpu()

    def upload(values: Tensor) -> Tensor:
        return values.to(clean.device, non_blocking=True)

    # One pass, of n (row, view) pairs (n, 2): log-probs and entropies (n, tokens), 0 except at the flat indices `at`;
    # and the entropies at all positions (n, canvas).
    def compute(pairs: Tensor, at: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # Hide what each view hides, and run the transformer.
        row, view = pairs.unbind(1)
        hidden = views.noise[row, view] & visible[row].bool()
        text = clean[row]
        shown = None if views.shown is None else torch.cat([text[:, :-gen_length], views.shown[row, view]], dim=1)
        states = run_body(text, hidden, visible[row] if padded else None, shown=shown)
        canvas = states[:, -gen_length:]

        # Run the head at the scored tokens alone.
        states = canvas[:, :width].flatten(0, 1)[at]
        options: dict[str, Any] = {"with_entropies": with_entropies, "distribution": distribution}
        if views.temperatures is not None:
            temperatures = views.temperatures[row, view].unsqueeze(1)
            options["temperatures"] = temperatures.expand(-1, width).flatten()[at]
        targets = completion_ids[row] if views.targets is None else views.targets[row, view]
        logps, entropies = target_logps(model, states, targets.flatten()[at], **options)

        def placed(values: Tensor) -> Tensor:
            return values.new_zeros(len(row) * width).index_put((at,), values).view(len(row), width)

        if entropies is None:
            return placed(logps), None, None
        everywhere = None if views.temperatures is None else tempered_entropies(model, canvas, temperatures)
        return placed(logps), placed(entropies), everywhere

    # The passes: `views_at_once` views of each row, of the pairs that score something.
    run_body = partial(hidden_states, model, gen_length=gen_length, mask_token_id=mask_token_id, blocks=blocks)
    pairs = pairs_to_score(scored)
    passes = list(pairs.split(rows * views_at_once))
    passes += [pairs[-1:]] * (calls_in_step(model, len(passes)) - len(passes))  # keep processes in step; cut off below
    recompute = torch.is_grad_enabled() and len(passes) > 1
    run: Callable[..., Any] = partial(checkpoint, compute, use_reentrant=False) if recompute else compute
    # A pass takes the head only at tokens with a weight: their indices in its flattened (pairs, tokens).
    computed = []
    for some in passes:
        at = scored[some.unbind(1)].flatten().nonzero().squeeze(1)
        computed.append(run(upload(some), upload(at)))
    logps, entropies, everywhere = zip(*computed, strict=True)
    pairs = upload(pairs)

    # The weighted sum over each row's views.
    def by_view(values: tuple[Tensor, ...]) -> Tensor:
        all_values = torch.cat(values)[: len(pairs)]
        shape = (*views.weights.shape[:2], *all_values.shape[1:])
        return all_values.new_zeros(shape).index_put(pairs.unbind(1), all_values)

    view_logps = by_view(logps)
    summed = (views.weights * by_view(entropies)).sum(1) if with_entropies else None

    # The cost: the real tokens of each pair and, for a block-causal model, of its second stream. A pair that only gives
    # the loss a path to the weights costs nothing.
    each = 3 if torch.is_grad_enabled() else 1
    paid = pairs[:, 0] if scored.any() else pairs[:0, 0]
    fed = visible[paid].sum()
    if again := noised_tokens(model, gen_length):
        fed = fed + visible[paid, -again:].sum()
    at_all = by_view(everywhere) if everywhere[0] is not None else None
    return Scores((views.weights * view_logps).sum(1), view_logps, each * fed, summed, at_all)


@torch.no_grad()
def tempered_entropies(model: Any, states: Tensor, temperatures: Tensor) -> Tensor:
    """(n, canvas) entropies in nats of the distributions of `states` (n, canvas, hidden) at `temperatures` (n, 1)."""
    head, flat = body_and_head(model)[1], temperatures.expand(states.shape[:2]).flatten()
    at_once = max(1, CHUNK_ELEMENTS // vocabulary(model.config))
    calls = calls_in_step(model, -(-len(flat) // at_once))
    parts = zip(states.detach().flatten(0, 1).tensor_split(calls), flat.tensor_split(calls), strict=True)
    return torch.cat([token_entropies(head(some) / own.unsqueeze(1)) for some, own in parts]).view(states.shape[:2])


def noised_tokens(model: Any, gen_length: int) -> int:
    """For a model with blocks, how many of the last tokens of a text are processed again with noise: the canvas and,
    without a causal context, prompt tokens that may share its first block; 0 for other models."""
    size = block_size(model.config)
    if not has_masks(model.config):
        return gen_length - (size or 0)  # the encoder does not read the last canvas
    return 0 if size is None else gen_length + (0 if has_causal_context(model.config) else size - 1)


def hidden_states(
    model: Any,
    clean: Tensor,
    hidden: Tensor,
    visible: Tensor | None,
    *,
    gen_length: int,
    mask_token_id: Any,
    shown: Tensor | None = None,
    blocks: CanvasBlocks | None = None,
) -> Tensor:
    """States (rows, n, hidden) of texts whose `hidden` tokens are masked and whose other tokens are those of `shown`
    (None: of `clean`); the last states are those of the canvas. `blocks` as for `score`."""
    if not has_masks(model.config):
        return canvas_states(model, clean, (clean if shown is None else shown)[:, -gen_length:], visible)
    noised = (clean if shown is None else shown).masked_fill(hidden, mask_token_id)
    again = noised_tokens(model, gen_length)
    if not again:
        if visible is None or not takes_masks_over_queries(model.config):
            return body_and_head(model)[0](noised, visible)
        mask = over_queries(visible, visible.shape[1])  # with this mask, a pass does not wait for the device
        return body_and_head(model)[0](noised, mask, position_ids=count_positions(visible))
    # Two streams: finished blocks with the prompt as the view shows it, and the canvas with what the view hides.
    finished = torch.cat([noised[:, :-gen_length], clean[:, -gen_length:]], dim=1)
    if not has_causal_context(model.config):
        return two_stream_states(model, finished, noised[:, -again:], visible)
    size, _, causal_first = blocks or CanvasBlocks.of(model.config)
    assert size is not None
    prompt = clean.shape[1] - gen_length
    seen = torch.ones_like(clean) if visible is None else visible
    own, canvas = Blocks(size, seen[:, :prompt].sum(1, keepdim=True)), noised[:, prompt:]
    if not causal_first:
        return two_stream_states(model, finished, canvas, visible, blocks=own)
    firsts = torch.arange(0, gen_length, size, device=clean.device)
    canvas = canvas.index_copy(1, firsts, (clean if shown is None else shown)[:, prompt + firsts])
    before = (prompt - 1 + firsts).expand(len(clean), -1)
    states = two_stream_states(model, finished, canvas, visible, blocks=own, clean_at=before)
    return states[:, len(firsts) :].index_copy(1, firsts, states[:, : len(firsts)])


def pairs_to_score(scored: Tensor) -> Tensor:
    """The (row, view) pairs (n, 2) that need a forward pass: those that score something, by `scored` (rows, views,
    tokens). There is at least one pair, because every loss needs a path to the weights."""
    pairs = scored.any(-1).nonzero()
    return pairs if len(pairs) else pairs.new_zeros(1, 2)
