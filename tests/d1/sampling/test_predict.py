"""The distribution that tokens are drawn from, and what is recorded of it."""

from types import SimpleNamespace

import pytest
import torch

import d1.sampling.predict
from d1.masking import keyed_generator
from d1.sampling import rollout
from d1.sampling.predict import draw_ids
from tests.d1.sampling.reference import MASK
from tests.d1.scoring.enumeration import assert_frequencies

VOCAB = 8


class Fixed:
    """A model with fixed logits that records, for each call, the hidden tokens of each row and the tokens scored."""

    config = SimpleNamespace(model_type="llama", vocab_size=VOCAB)
    d1_prepared = True

    def __init__(self, logits):
        self.logits, self.hidden, self.scored = logits, [], []

    def base_model(self, input_ids, attention_mask):
        self.hidden.append(input_ids == MASK)
        return SimpleNamespace(last_hidden_state=self.logits.expand(len(input_ids), -1, -1).clone())

    def lm_head(self, states):
        self.scored.append(states.shape[0] * states.shape[1])
        return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_sampling_draws_from_the_tempered_softmax(dtype):
    logits = torch.tensor([[[0.0, 1.0, 2.0, -1.0]]]).expand(1, 40_000, 4)
    for temperature in (0.5, 1.0, 2.0):
        tokens = draw_ids(logits, temperature, keyed_generator(9), dtype)
        assert_frequencies(tokens.flatten().bincount(minlength=4), torch.softmax(logits[0, 0] / temperature, -1))
    with pytest.raises(ValueError, match="float32 or float64"):
        draw_ids(logits, 1.0, noise_dtype=torch.bfloat16)


def test_the_smallest_uniform_number_gives_no_freak_noise(monkeypatch):
    # torch.rand returns exactly 0 once in 2^24 draws; unguarded, that token would win with Gumbel noise of +87 or inf.
    def smallest(shape, generator, like, counts=None):
        return torch.tensor([[[0.0, 0.5]]], dtype=like.dtype)

    monkeypatch.setattr(d1.sampling.predict, "uniform", smallest)
    assert draw_ids(torch.tensor([[[0.0, 20.0]]]), 1.0).item() == 1


# --- Which positions a step predicts and reveals, with fixed logits ---------------------------------------------------


def complete(logits, prompt, **options):
    """The model after sampling, and the ids."""
    model, prompt = Fixed(logits), torch.tensor(prompt)
    got = rollout(model, prompt, torch.ones_like(prompt), mask_token_id=MASK, **options)
    return model, got.ids


def test_forward_passes_and_revealed_tokens_are_as_scheduled():
    logits = torch.randn(1, 2 + 13, VOCAB, generator=keyed_generator(1))
    logits[..., MASK] = 50.0  # the mask token is never revealed
    model, ids = complete(logits, [[0, MASK], [1, 2]], gen_length=13, block_length=5, steps=8)
    # Blocks of 5, 4 and 4 tokens with 3, 3 and 2 steps; the head runs only on what the block still hides.
    assert model.scored == [2 * n for n in [5, 3, 1, 4, 2, 1, 4, 2]]
    assert [hidden[1].sum() for hidden in model.hidden] == [13, 11, 9, 8, 6, 5, 4, 2]
    assert not (ids[:, 2:] == MASK).any()
    assert ids[:, :2].tolist() == [[0, MASK], [1, 2]]  # a prompt may contain the mask token


def test_saturated_confidences_reveal_left_to_right():
    logits = torch.full((1, 6, VOCAB), -1e4)
    logits[..., 5] = 1e4  # every position is certain
    model, _ = complete(logits, [[0, 1]], gen_length=4, block_length=4, steps=4)
    assert [hidden[0, 2:].tolist() for hidden in model.hidden] == [[i >= n for i in range(4)] for n in range(4)]


def test_random_remasking_reveals_every_position_first_equally_often():
    logits = torch.zeros(1, 6, VOCAB)
    logits[..., 5] = 3.0
    options = {"gen_length": 4, "block_length": 4, "steps": 4, "remasking": "random", "generator": keyed_generator(4)}
    model, _ = complete(logits, [[0, 1]] * 400, **options)
    first = (~model.hidden[1][:, 2:]).nonzero()[:, 1]
    assert_frequencies(first.bincount(minlength=4), torch.full((4,), 0.25))
