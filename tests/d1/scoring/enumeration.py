"""The reference for estimators: every state of completions of at most four tokens, and every draw with its probability.

Models have one or two layers, five ids and fp64; one is block-causal. The four rows of `SAMPLED` are a completion as
long as its canvas, one that ends before it, one that is only an EOS, and one that takes no part; two prompts have
padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from d1.masking import keyed_generator
from d1.models import prepare
from d1.models.distribution import MODEL_DISTRIBUTION, Distribution
from d1.models.kinds import block_size
from d1.scoring import Randomness, SampledRows, Views, ViewSettings, score
from d1.scoring.inputs import canvas_blocks
from tests.rounding import LOGITS, assert_near

EOS, MASK, CANVAS, PROMPT = 0, 4, 4, 3
COMPLETIONS = [[1, 3, 2, 1], [2, 1, EOS, 3], [EOS, 1, 2, 2], [3, 1, 2, 1]]
LENGTHS = [4, 3, 1, 0]
VISIBLE = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]])
SAMPLED = SampledRows(
    prompt_ids=torch.tensor([[0, 1, 2], [3, 1, 2], [0, 0, 3], [2, 2, 1]]),
    attention_mask=VISIBLE,
    maskable=VISIBLE.bool(),
    canvas_ids=torch.tensor(COMPLETIONS),
    scored=torch.arange(CANVAS) < torch.tensor(LENGTHS).unsqueeze(1),
    reveal_steps=torch.tensor([[0, 3, 1, 3], [2, 1, 0, 3], [1, 0, 2, -1], [1, 2, 0, 3]]),
    logps=torch.zeros(4, CANVAS),
    entropies=torch.tensor([[0.3, 0.0, 1.1, 0.6], [0.2, 0.9, 0.4, 7.0], [0.5, 3.0, 4.0, 0.0], [1.0, 1.0, 1.0, 1.0]]),
)


def settings(**changes: Any) -> ViewSettings:
    return replace(ViewSettings(gen_length=CANVAS, steps=4, block_length=2), **changes)


@cache
def tiny(layers: int, seed: int = 0, spread: float = 0.7, block: int | None = None) -> Any:
    """A model with normal random weights of standard deviation `spread`; `block` makes it block-causal."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=5,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=EOS,
        eos_token_id=EOS,
        initializer_range=spread,
        block_size=block,
    )
    return prepare(LlamaForCausalLM(config)).double().eval()


def every_model() -> list[Any]:
    """Models with one and two layers, and one with blocks of two tokens, some of which begin in a prompt."""
    return [tiny(1), tiny(2), tiny(2, block=2)]


def some_rows(sampled: SampledRows, which: Any) -> SampledRows:
    """The rows `which`, a slice or a list of numbers."""
    return SampledRows(**{name: of if of is None else of[which] for name, of in vars(sampled).items()})


def of_row(row: int, count: int) -> tuple[Tensor, Tensor]:
    """What the views of `count` draws of a row need: no noise in the prompt, and the scored tokens."""
    return torch.zeros(count, 1, PROMPT, dtype=torch.bool), SAMPLED.scored[row].expand(count, -1)


def subsets(positions: Any) -> list[tuple[int, ...]]:
    return [some for size in range(len(positions) + 1) for some in combinations(positions, size)]


def marked(positions: Any, width: int = CANVAS) -> Tensor:
    """(width,) bool, true at `positions`."""
    return torch.tensor([position in positions for position in range(width)])


def quadrature(low: float = 0.0, high: float = 1.0, parts: int = 1, points: int = 3) -> list[tuple[float, float]]:
    """Points and their weights in each of several equal parts of [low, high]. They are exact for polynomials of degree
    2 points - 1; the probabilities of a completion's sets have degree 4 at most."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    size = (high - low) / parts
    return [
        (low + (part + (x + 1) / 2) * size, w / 2 * size)
        for part in range(parts)
        for x, w in zip(nodes.tolist(), weights.tolist(), strict=True)
    ]


# --- States, one forward pass each -----------------------------------------------------------------------------------


def canvas_logits(model: Any, clean: Tensor, noise: Tensor, canvas: int, mask: int = MASK) -> Tensor:
    """(canvas, vocab) logits of the last tokens of a text `clean` (length,) without padding; `noise` says which are
    hidden.

    For a block-causal model, one forward pass per block: its own tokens and the prompt's are hidden, and the text ends
    there.
    """
    size, length = block_size(model.config), len(clean)
    if size is None:
        return model(input_ids=clean.masked_fill(noise, mask).unsqueeze(0)).logits[0, -canvas:]
    logits, prompt = [], torch.arange(length) < length - canvas
    for start in range((length - canvas) // size * size, length, size):
        hidden = noise & (prompt | (torch.arange(length) >= start))
        text = clean.masked_fill(hidden, mask)[: start + size]
        logits.append(model(input_ids=text.unsqueeze(0)).logits[0, start:])
    return torch.cat(logits)[-canvas:]


def state_logps(model: Any, row: int, hidden: Any, sampled: SampledRows = SAMPLED, prompt: Any = ()) -> Tensor:
    """(canvas,) log p of each token of a row in the state that hides the positions `hidden` of its canvas, and those of
    its prompt in `prompt`; the prompt without its padding, and the logits of every position."""
    real = sampled.attention_mask[row].bool()
    canvas = len(sampled.canvas_ids[row])
    noise = torch.cat([marked(prompt, len(real))[real], marked(hidden, canvas)])
    clean = torch.cat([sampled.prompt_ids[row][real], sampled.canvas_ids[row]])
    logits = canvas_logits(model, clean, noise, canvas)
    return logits.log_softmax(-1).gather(-1, sampled.canvas_ids[row].unsqueeze(-1)).squeeze(-1)


def after_end(row: int) -> tuple[int, ...]:
    """The canvas after a row's completion."""
    return tuple(range(LENGTHS[row], CANVAS))


def all_states(model: Any, row: int) -> dict[tuple[int, ...], Tensor]:
    """Hidden tokens of a row's completion -> (canvas,) log-probs; the tokens after the completion are hidden."""
    return {some: state_logps(model, row, some + after_end(row)) for some in subsets(range(LENGTHS[row]))}


def sum_over_sets(model: Any, weight: Callable[[int, int], float]) -> Tensor:
    """(rows, canvas): the sum over all sets of hidden tokens of `weight(their number, length)` x their log-probs."""
    rows = []
    for row, length in enumerate(LENGTHS):
        terms = [marked(some) * logps * weight(len(some), length) for some, logps in all_states(model, row).items()]
        rows.append(sum(terms, torch.zeros(CANVAS, dtype=torch.float64)))
    return torch.stack(rows)


def any_order_bound(model: Any) -> Tensor:
    """(rows, canvas): the sum over x = 1..L of E[log p of hidden tokens] / x, over all sets of x hidden tokens."""
    return sum_over_sets(model, lambda x, length: 1 / (x * comb(length, x)) if x else 0.0)


def blocks_bounds(model: Any, size: int) -> Tensor:
    """(rows, canvas): the sum over blocks of `size` tokens of each block's own bound, later blocks hidden."""
    rows = []
    for row, blocks in enumerate(canvas_blocks(SAMPLED.attention_mask, CANVAS, size).tolist()):
        total = torch.zeros(CANVAS, dtype=torch.float64)
        for block in set(blocks[: LENGTHS[row]]):
            own = [k for k in range(LENGTHS[row]) if blocks[k] == block]
            later = [k for k in range(CANVAS) if blocks[k] > block or k >= LENGTHS[row]]
            for some in subsets(own)[1:]:
                chance = 1 / (len(some) * comb(len(own), len(some)))
                total = total + chance * marked(some) * state_logps(model, row, [*some, *later])
        rows.append(total)
    return torch.stack(rows)


# --- Draws -----------------------------------------------------------------------------------------------------------


def merged(chances: Tensor, views: Views) -> Views:
    """The expectation over draws of one row, as views of that row: each state once, with the sum over draws of
    probability x weight.

    Args:
        chances: (draws,), which sum to 1.
        views: of the row in each draw, (draws, views, ...).
    """
    torch.testing.assert_close(chances.sum(), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-12)
    states, index = views.noise.flatten(0, 1).unique(dim=0, return_inverse=True)
    weights = (chances[:, None, None] * views.weights.double()).flatten(0, 1)
    total = weights.new_zeros(len(states), weights.shape[-1]).index_add(0, index, weights)
    return Views(states.unsqueeze(0), total.unsqueeze(0))


def stacked(rows: list[Views]) -> Views:
    """The rows' views as one batch; rows with fewer states than others get additional ones that score nothing."""
    most = max(views.noise.shape[1] for views in rows)

    def filled(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(1, most - values.shape[1], values.shape[2])], dim=1)

    return Views(torch.cat([filled(v.noise) for v in rows]), torch.cat([filled(v.weights) for v in rows]))


def scores(
    model: Any,
    views: Views,
    sampled: SampledRows = SAMPLED,
    views_at_once: int = 8,
    distribution: Distribution = MODEL_DISTRIBUTION,
) -> Any:
    """`score` of a batch."""
    given = (sampled.prompt_ids, sampled.attention_mask, sampled.canvas_ids, views)
    options = {"mask_token_id": MASK, "gen_length": sampled.gen_length, "views_at_once": views_at_once}
    return score(model, *given, distribution=distribution, **options)


def gradient(model: Any, values: Tensor) -> Tensor:
    """The gradient of a sum of differently weighted `values` with respect to all weights of the model."""
    total = (values * torch.linspace(0.5, 1.5, values.numel(), dtype=values.dtype).view(values.shape)).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()), retain_graph=True)])


def assert_same(model: Any, found: Tensor, expected: Tensor) -> None:
    """Checks that values and gradients are equal. Weights of views are fp32, everything else is fp64."""
    assert_near(found, expected, least=LOGITS)
    torch.testing.assert_close(gradient(model, found), gradient(model, expected), rtol=1e-5, atol=2e-6)


def assert_frequencies(counts: Tensor, chances: Tensor) -> None:
    """Checks that counts (cells,) fit independent draws with these probabilities: chi square within five deviations."""
    assert abs(float(chances.sum()) - 1) < 1e-6
    expected = chances.double() * counts.sum()
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert expected.min() > 4, "too few draws for the approximation"
    chi = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert chi < freedom + 5 * (2 * max(1, freedom)) ** 0.5, (chi, freedom)


def repeated(row: int, times: int) -> SampledRows:
    """A row of `SAMPLED`, repeated."""
    return some_rows(SAMPLED, [row] * times)


def randomness(rows: int, first: int = 0, total: int | None = None, seed: int = 0) -> Randomness:
    """The random numbers of `rows` rows, the first of which is row `first` of a rollout of `total`."""
    generators = [keyed_generator(seed, 1, row) for row in range(first, first + rows)]
    return Randomness(generators, keyed_generator(seed), first, total or rows)


def numbers_of(hidden: Tensor) -> Tensor:
    """Sets of tokens (..., n) bool as numbers: token k counts 2^k."""
    return (hidden * 2 ** torch.arange(hidden.shape[-1])).sum(-1)


def assert_sets(hidden: Tensor, chance: Callable[[int], float]) -> None:
    """Checks that each set of tokens, of the draws `hidden` (draws, n), is as frequent as the `chance` of its size."""
    count = 2 ** hidden.shape[-1]
    chances = torch.tensor([chance(some.bit_count()) for some in range(count)])
    assert_frequencies(numbers_of(hidden).bincount(minlength=count), chances)
