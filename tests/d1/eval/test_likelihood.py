"""The bound of given answers, compared with all masks and with a plain loop over the same draws; LLaDA's greedy
check."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from d1.eval.harness import are_greedy, check_likelihood, llada_views, log_likelihoods, seed_of
from d1.masking import keyed_generator
from d1.models import prepare

MASK, PAD = 4, 0
IDS = {"mask_token_id": MASK, "pad_token_id": PAD}
PAIRS = [([1, 2, 3], [1, 3, 2, 1]), ([3], [2]), ([1, 1], [3, 3]), ([2, 3, 1, 1], [1, 2, 3]), ([2], [1, 1, 3, 2])]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=5, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    config = LlamaConfig(**sizes, num_hidden_layers=2, max_position_embeddings=32, initializer_range=0.7)
    return prepare(LlamaForCausalLM(config)).double().eval()


@torch.no_grad()
def hidden_logps(model: Any, pair: tuple[list[int], list[int]], hidden: Any) -> float:
    """The sum of log p of the hidden tokens of an answer, in one forward pass over the sequence alone."""
    prompt, answer = pair
    ids = torch.tensor([prompt + [MASK if k in hidden else token for k, token in enumerate(answer)]])
    logps = model(input_ids=ids).logits[0, len(prompt) :].log_softmax(-1)
    return sum(float(logps[k, answer[k]]) for k in hidden)


def bound(model: Any, pair: tuple[list[int], list[int]]) -> float:
    """LLaDA's bound, over every set of hidden tokens."""
    length = len(pair[1])
    sets = [some for size in range(1, length + 1) for some in combinations(range(length), size)]
    return sum(hidden_logps(model, pair, some) / (len(some) * comb(length, len(some))) for some in sets)


def test_estimates_approach_the_bound_over_every_mask_and_are_exact_for_one_token(model):
    found = dict(log_likelihoods(model, PAIRS, **IDS, draws=40_000, batch_size=3))
    assert [found[i] for i in range(len(PAIRS))] == pytest.approx([bound(model, pair) for pair in PAIRS], rel=5e-3)
    one = dict(log_likelihoods(model, PAIRS[1:2], **IDS, draws=3))
    assert one[0] == pytest.approx(hidden_logps(model, PAIRS[1], (0,)), abs=2e-7)


def test_an_estimate_is_the_weighted_sum_over_its_own_draws_whatever_its_batch(model):
    def direct(pair: tuple[list[int], list[int]]) -> float:
        views = llada_views(len(pair[1]), 6, keyed_generator(7, seed_of(pair)))
        total = 0.0
        for noise, weights in zip(views.noise[0], views.weights[0], strict=True):
            assert not weights[~noise].any()
            (weight,) = {*weights[noise].tolist()}  # all hidden tokens of a mask have the same weight
            total += weight * hidden_logps(model, pair, noise.nonzero().flatten().tolist())
        return total

    expected = [direct(pair) for pair in PAIRS]
    for batch_size in (1, 2, 32):
        for order in (PAIRS, PAIRS[::-1]):
            found = dict(log_likelihoods(model, order, **IDS, draws=6, seed=7, batch_size=batch_size))
            assert [found[order.index(pair)] for pair in PAIRS] == pytest.approx(expected, rel=1e-6)
    assert dict(log_likelihoods(model, PAIRS, **IDS, draws=6, seed=8))[0] != pytest.approx(expected[0], rel=1e-3)


def test_the_counts_of_llada_are_spread_evenly_and_weigh_l_over_the_count():
    generator = keyed_generator(3)
    views = llada_views(5, 10, generator)
    counts = views.noise[0].sum(-1)
    shares = {int(count): float(views.weights[0][counts == count].sum() / count) for count in counts.unique()}
    assert shares == pytest.approx({count: 2 / 10 * 5 / count for count in range(1, 6)})  # two of ten draws each


@torch.no_grad()
def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """Reveals the most probable token of all hidden positions, one at a time."""
    answer: Tensor = torch.full((length,), MASK)
    while (answer == MASK).any():
        logps = (
            model(input_ids=torch.cat([torch.tensor(prompt), answer])[None]).logits[0, len(prompt) :].log_softmax(-1)
        )
        logps[:, MASK] = -torch.inf
        logps[answer != MASK] = -torch.inf
        place, token = divmod(int(logps.argmax()), logps.shape[1])
        answer[place] = token
    return answer.tolist()


def test_an_answer_is_greedy_where_the_surest_token_first_gives_it(model):
    own = [(prompt, greedy(model, prompt, len(answer))) for prompt, answer in PAIRS]
    changed = [(prompt, [*answer[:-1], (answer[-1] + 1) % 4]) for prompt, answer in own]
    pairs = [*own, *changed, ([1], [])]
    for batch_size in (1, 4):
        found = dict(are_greedy(model, pairs, **IDS, batch_size=batch_size))
        assert [found[i] for i in range(len(pairs))] == [True] * 5 + [False] * 5 + [True]
    assert dict(log_likelihoods(model, [([1], [])], **IDS, draws=2)) == {0: 0.0}


def test_a_block_causal_model_is_refused():
    with pytest.raises(ValueError, match="this sdar fills blocks of 4 tokens from left to right"):
        check_likelihood(type("Config", (), {"model_type": "sdar", "block_size": 4}))
