"""Score a completion in chosen views: the contract of all estimators of log-probabilities.

A *view* is a state to score in: it says which tokens of prompt and canvas are hidden. Each view has a weight for each
token of the completion, and the log-probability of token k is the weighted sum over the views,

    sum over v of weights[v, k] x log p(token k | prompt and canvas with noise[v] hidden).

A view may show other ids than the completion's and score others: the drafts that a sampler corrected later.

An estimator (`d1/scoring/estimators.py`) is a way to draw views. They are plain tensors: drawn once per rollout, they
are stored, shuffled, split and saved with their samples.

How a view's states are computed depends on the kind of model: `forward.py`, and a file for each other kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d1.models.attention import padding_mask, require_prepared
from d1.models.distribution import MODEL_DISTRIBUTION, Distribution
from d1.models.head import CHUNK_ELEMENTS, backbone_and_head, calls_in_step, target_logps, token_entropies
from d1.models.kinds import vocabulary
from d1.scoring.forward import hidden_states, tokens_of_pass
from d1.scoring.inputs import CanvasBlocks


@dataclass(frozen=True)
class Views:
    """The states in which a batch of completions is scored.

    Attributes:
        noise: (rows, views, prompt + canvas) bool, the mask of hidden positions: true where a view hides the token.
            Values at padding are ignored. If completions are shorter than the canvas, the rest of the canvas is hidden
            in every view.
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
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            changed[name] = None if value is None else change(value)
        return Views(**changed)

    def check(self, rows: int, text: int, tokens: int, canvas: int) -> None:
        """Raise ValueError unless these are views of `rows` texts of `text` tokens, the last `canvas` of which were
        sampled, with weights for `tokens`."""
        for name, width in (("noise", text), ("weights", tokens)):
            actual = tuple(getattr(self, name).shape)
            if len(actual) != 3 or (actual[0], actual[2]) != (rows, width):
                raise ValueError(f"views.{name} must be ({rows}, views, {width}), got {actual}")
        if self.noise.shape[1] != self.weights.shape[1]:
            raise ValueError(f"{self.noise.shape[1]} views have noise and {self.weights.shape[1]} have weights")
        if self.noise.dtype != torch.bool or not self.weights.is_floating_point():
            raise ValueError(f"views need bool noise and float weights, got {self.noise.dtype}, {self.weights.dtype}")
        optional = {
            "shown": (canvas, torch.long),
            "targets": (tokens, torch.long),
            "sampled_logps": (tokens, torch.float),
        }
        for name, (width, dtype) in optional.items():
            actual, shape = getattr(self, name), (*self.noise.shape[:2], width)
            if actual is not None and (actual.shape != shape or actual.dtype != dtype):
                wrong = f"{tuple(actual.shape)} of {actual.dtype}"
                raise ValueError(f"views.{name} must be {shape} of {dtype}, got {wrong}")
        if self.temperatures is not None and self.temperatures.shape != self.noise.shape[:2]:
            expected, shape = tuple(self.noise.shape[:2]), tuple(self.temperatures.shape)
            raise ValueError(f"views.temperatures must be {expected}, got {shape}")


def views_of_canvas(prompt_noise: Tensor, hidden: Tensor, scored: Tensor, weights: Tensor) -> Views:
    """Views that hide `prompt_noise` (rows, views or 1, prompt) and, of the canvas, `hidden` (rows, views, canvas).

    Tokens after a completion's end are hidden in every view: visible ones would tell the model where the end is.

    Args:
        scored: (rows, canvas) bool, the tokens that count: those up to and including the first EOS, unless the run's
            `scored_tokens` says otherwise.
        weights: (rows, views, canvas), or (rows, views, 1) for all tokens of a view; they only count where a view
            hides a scored token.

    Raises:
        ValueError: the weights have another shape; one weight for all views or rows would be silently wrong.
    """
    if weights.shape not in (hidden.shape, (*hidden.shape[:2], 1)):
        raise ValueError(f"weights must be {tuple(hidden.shape)}, one per view or token, got {tuple(weights.shape)}")
    hidden_prompt = prompt_noise.expand(-1, hidden.shape[1], -1)
    is_scored = scored.unsqueeze(1)  # (rows, 1, canvas)
    return Views(
        noise=torch.cat([hidden_prompt, hidden | ~is_scored], dim=-1),
        weights=torch.where(hidden & is_scored, weights, 0.0),
    )


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
    distribution: Distribution = MODEL_DISTRIBUTION,
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
    if prompt_ids.shape != attention_mask.shape or len(prompt_ids) != rows:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (prompt_ids, attention_mask, completion_ids))
        raise ValueError(f"prompt_ids, attention_mask and completion_ids must have the same rows; got {shapes}")
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

    # The passes: `views_at_once` views of each row, of those that score something. They are planned on the host's copy:
    # a boolean index on the device would wait for the device in every pass.
    scored = views.weights.ne(0).cpu()
    pairs = pairs_to_score(scored)
    passes = list(pairs.split(rows * views_at_once))
    # The last pass is repeated to keep processes in step; the repetitions are cut off below.
    passes += [pairs[-1:]] * (calls_in_step(model, len(passes)) - len(passes))

    # Run them. With several passes, the backward pass recomputes each of them.
    compute: Callable[..., PairScores] = partial(
        score_pairs,
        model,
        clean=clean,
        visible=visible,
        completion_ids=completion_ids,
        views=views,
        gen_length=gen_length,
        mask_token_id=mask_token_id,
        with_entropies=with_entropies,
        distribution=distribution,
        blocks=blocks,
        padded=padded,
    )
    trains_in_passes = torch.is_grad_enabled() and len(passes) > 1
    if trains_in_passes:
        compute = partial(checkpoint, compute, use_reentrant=False)
    computed = []
    for pass_pairs in passes:
        if trains_in_passes:  # a copy of the weights in 16 bits that passes share would sum their gradients in 16 bits
            torch.clear_autocast_cache()
        # A pass takes the head only at tokens with a weight: their indices in its flattened (pairs, tokens).
        at = scored[pass_pairs.unbind(1)].flatten().nonzero().squeeze(1)
        computed.append(compute(upload(pass_pairs, clean.device), upload(at, clean.device)))
    logps, entropies, canvas_entropies = zip(*computed, strict=True)

    # Sort the pairs' values by row and view, and sum each row's views with their weights.
    pairs = upload(pairs, clean.device)
    gather = partial(gather_views, pairs=pairs, shape=views.weights.shape[:2])
    view_logps = gather(logps)  # (rows, views, tokens)
    weighted_logps = (views.weights * view_logps).sum(1)
    weighted_entropies = all_entropies = None
    if with_entropies:
        weighted_entropies = (views.weights * gather(entropies)).sum(1)
    if canvas_entropies[0] is not None:
        all_entropies = gather(canvas_entropies)

    # The cost: the tokens of each pair. A pair that only gives the loss a path to the weights costs nothing.
    paid = pairs[:, 0] if scored.any() else pairs[:0, 0]
    tokens = tokens_of_pass(model, visible[paid], gen_length)
    cost_per_token = 3 if torch.is_grad_enabled() else 1
    return Scores(
        logps=weighted_logps,
        view_logps=view_logps,
        compute=cost_per_token * tokens,
        entropies=weighted_entropies,
        canvas_entropies=all_entropies,
    )


class PairScores(NamedTuple):
    """The result of one pass over n (row, view) pairs: log-probs and entropies (n, tokens), 0 where nothing is scored;
    entropies at all positions (n, canvas)."""

    logps: Tensor
    entropies: Tensor | None
    canvas_entropies: Tensor | None


def score_pairs(
    model: Any,
    pairs: Tensor,
    at: Tensor,
    *,
    clean: Tensor,
    visible: Tensor,
    completion_ids: Tensor,
    views: Views,
    gen_length: int,
    mask_token_id: int | None,
    with_entropies: bool,
    distribution: Distribution,
    blocks: CanvasBlocks | None,
    padded: bool,
) -> PairScores:
    """One forward pass of `score`, over the (row, view) `pairs` (n, 2), which scores the tokens with the flat indices
    `at`. `clean` and `visible` are the rows' texts (rows, prompt + canvas); the rest is as for `score`."""
    row, view = pairs.unbind(1)
    width = completion_ids.shape[1]

    # Show what each view shows, hide what it hides, and run the transformer.
    text = clean[row]
    shown = None
    if views.shown is not None:
        shown = torch.cat([text[:, :-gen_length], views.shown[row, view]], dim=1)
    states = hidden_states(
        model,
        text,
        views.noise[row, view] & visible[row].bool(),
        visible[row] if padded else None,
        gen_length=gen_length,
        mask_token_id=mask_token_id,
        shown=shown,
        blocks=blocks,
    )
    canvas = states[:, -gen_length:]

    # Run the head at the scored tokens alone.
    if views.targets is None:
        targets = completion_ids[row]
    else:
        targets = views.targets[row, view]
    temperatures = target_temperatures = None
    if views.temperatures is not None:
        temperatures = views.temperatures[row, view].unsqueeze(1)  # (n, 1)
        target_temperatures = temperatures.expand(-1, width).flatten()[at]
    logps, entropies = target_logps(
        model,
        canvas[:, :width].flatten(0, 1)[at],
        targets.flatten()[at],
        with_entropies=with_entropies,
        distribution=distribution,
        temperatures=target_temperatures,
    )

    # Put the values back at their tokens.
    shape = len(row), width
    logps = scatter_tokens(logps, at, shape)
    if entropies is None:
        return PairScores(logps=logps, entropies=None, canvas_entropies=None)
    canvas_entropies = None
    if temperatures is not None:
        canvas_entropies = tempered_entropies(model, canvas, temperatures)
    entropies = scatter_tokens(entropies, at, shape)
    return PairScores(logps=logps, entropies=entropies, canvas_entropies=canvas_entropies)


def scatter_tokens(values: Tensor, at: Tensor, shape: tuple[int, int]) -> Tensor:
    """(n, tokens), with `values` at the flat indices `at` and 0 elsewhere."""
    return values.new_zeros(math.prod(shape)).index_put((at,), values).view(shape)


def gather_views(values: tuple[Tensor, ...], pairs: Tensor, shape: Sequence[int]) -> Tensor:
    """(rows, views, ...), with the `values` of all passes at their `pairs` (n, 2), and 0 at the other pairs."""
    of_pairs = torch.cat(values)[: len(pairs)]
    return of_pairs.new_zeros(*shape, *of_pairs.shape[1:]).index_put(pairs.unbind(1), of_pairs)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it."""
    return values.to(device, non_blocking=True)


@torch.no_grad()
def tempered_entropies(model: Any, states: Tensor, temperatures: Tensor) -> Tensor:
    """(n, canvas) entropies in nats of the distributions of `states` (n, canvas, hidden) at `temperatures` (n, 1)."""
    run_head = backbone_and_head(model)[1]
    flat_states = states.detach().flatten(0, 1)
    flat_temperatures = temperatures.expand(states.shape[:2]).flatten()
    at_once = max(1, CHUNK_ELEMENTS // vocabulary(model.config))
    calls = calls_in_step(model, -(-len(flat_states) // at_once))
    chunks = zip(flat_states.tensor_split(calls), flat_temperatures.tensor_split(calls), strict=True)
    entropies = []
    for chunk_states, chunk_temperatures in chunks:
        logits = run_head(chunk_states) / chunk_temperatures.unsqueeze(1)
        entropies.append(token_entropies(logits))
    return torch.cat(entropies).view(states.shape[:2])


def pairs_to_score(scored: Tensor) -> Tensor:
    """The (row, view) pairs (n, 2) that need a forward pass: those that score something, by `scored` (rows, views,
    tokens). There is at least one pair, because every loss needs a path to the weights."""
    pairs = scored.any(-1).nonzero()
    if not len(pairs):
        return pairs.new_zeros(1, 2)
    return pairs
