"""The distribution that tokens are drawn from, and what is recorded of it."""

import math
from types import SimpleNamespace

import pytest
import torch

import d1.sampling.predict
from d1.masking import keyed_generator
from d1.sampling import rollout
from d1.sampling.predict import draw_ids
from tests.d1.sampling.reference import MASK, left_of
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


@pytest.mark.parametrize("mask_logit", [-60.0, 9.0])
@pytest.mark.parametrize(
    "chosen",
    [{}, {"top_k": 2}, {"top_k": 1}, {"top_p": 0.8}, {"top_p": 1e-6}, {"top_k": 4, "top_p": 0.9, "temperature": 0.5}],
    ids=str,
)
def test_tokens_are_drawn_from_what_is_left_and_recorded_with_these_chances(chosen, mask_logit):
    """The mask token is never chosen. If it is the most likely token (in no trained model), only the record includes
    it."""
    count, words = 3000, [0.0, 1.0, 0.5, mask_logit, 1.4, -1.0, -0.5, 0.2]
    chosen = {"temperature": 1.3, **chosen}
    prompt = torch.ones(count, 1, dtype=torch.long)
    options = {"mask_token_id": MASK, "gen_length": 1, "block_length": 1, "steps": 1}
    model = Fixed(torch.tensor(words).expand(1, 2, VOCAB))
    got, own = (
        rollout(model, prompt, prompt, generator=keyed_generator(5), **options | chosen | {"record_as_sampled": record})
        for record in (True, False)
    )
    of = [chosen.get(name, default) for name, default in (("temperature", 1), ("top_k", 0), ("top_p", 1.0))]
    left = left_of([-math.inf if token == MASK else word for token, word in enumerate(words)], *of)
    often = got.ids[:, 1].bincount(minlength=VOCAB)
    assert set(often.nonzero().flatten().tolist()) == set(left) - {MASK}
    chances = torch.tensor([left.get(token, 0.0) for token in range(VOCAB)])
    assert_frequencies(often, chances)
    assert got.logps.isfinite().all()
    if mask_logit < 0:
        torch.testing.assert_close(got.logps[:, 0].exp(), chances[got.ids[:, 1]])
    assert torch.equal(own.ids, got.ids)
    torch.testing.assert_close(own.logps[:, 0], torch.tensor(words).log_softmax(-1)[got.ids[:, 1]])


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
