"""The mean-field estimator against probabilities computed token by token, and its invariances."""

import math

import pytest
import torch

from d1.models import load_model
from d1.scoring import mean_field_logps, token_entropies, token_logps

MASK = 3


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return load_model(str(tiny_model_dir))


PROMPT = [1, 5, 9, 10, 11, 6]
COMPLETION = [20, 21, 22, 2]
NOISE = [False, False, True, False, True, False]


def score(model, prompt=PROMPT, completion=COMPLETION, noise=NOISE, left=0, gen_length=8):
    ids = torch.tensor([[0] * left + prompt])
    mask = torch.tensor([[0] * left + [1] * len(prompt)])
    return mean_field_logps(
        model,
        ids,
        mask,
        torch.tensor([completion]),
        torch.tensor([[True] * left + noise]),  # noise on padding must not matter
        mask_token_id=MASK,
        gen_length=gen_length,
    )[0]


def test_each_token_is_scored_alone_from_an_all_mask_canvas(model):
    canvas = [MASK if hidden else token for token, hidden in zip(PROMPT, NOISE, strict=True)] + [MASK] * 8
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([canvas]), attention_mask=torch.ones(1, len(canvas))).logits[0]
    expected = []
    for k, token in enumerate(COMPLETION):
        row = logits[len(PROMPT) + k].double().tolist()
        top = max(row)
        expected.append(row[token] - top - math.log(math.fsum(math.exp(x - top) for x in row)))
    got = score(model)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5)


def test_probabilities_of_all_completions_sum_to_one(model):
    # Brute force over the vocabulary: the mean-field distribution is a product of normalised distributions.
    vocabulary = model.config.vocab_size
    first = torch.stack([score(model, completion=[token, 5]) for token in range(vocabulary)])
    assert first[:, 0].exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert first[:, 1].std().item() < 1e-6  # the second factor does not depend on the first token


def test_log_probs_and_gradient_ignore_left_padding_and_the_rest_of_the_batch(model):
    def gradient(logps):
        model.zero_grad()
        logps.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    alone, padded = score(model), score(model, left=5)
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-5)
    other = [1, 5, 33, 34, 35, 36, 37, 38, 6]
    ids = torch.tensor([[0] * 3 + PROMPT, other])
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    noise = torch.tensor([[False] * 3 + NOISE, [False] * 9])
    batch = mean_field_logps(
        model, ids, mask, torch.tensor([COMPLETION, COMPLETION]), noise, mask_token_id=MASK, gen_length=8
    )
    torch.testing.assert_close(batch[0], alone, rtol=0, atol=1e-5)
    reference = gradient(score(model))
    torch.testing.assert_close(gradient(score(model, left=5)), reference, rtol=0, atol=1e-5)
    batch = mean_field_logps(
        model, ids, mask, torch.tensor([COMPLETION, COMPLETION]), noise, mask_token_id=MASK, gen_length=8
    )
    torch.testing.assert_close(gradient(batch[0]), reference, rtol=0, atol=1e-5)


def test_the_canvas_does_not_leak_the_completions_length(model):
    # The same first tokens get the same log-probs whatever follows, however long: nothing but the canvas is seen.
    short, long = score(model, completion=COMPLETION[:2]), score(model, completion=[*COMPLETION, 20, 21])
    torch.testing.assert_close(short, long[:2], rtol=0, atol=1e-6)


def test_another_prompt_mask_gives_other_log_probs(model):
    assert (score(model) - score(model, noise=[False] * 6)).abs().max() > 1e-2


def test_entropy_and_log_probs_of_known_distributions():
    probabilities = torch.tensor([[[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]])
    logits = probabilities.log() + 7.0  # a constant shift changes nothing
    expected = torch.tensor([[1.5 * math.log(2), math.log(3)]])
    torch.testing.assert_close(token_entropies(logits), expected, rtol=0, atol=1e-6)
    ids = torch.tensor([[1, 0]])
    torch.testing.assert_close(token_logps(logits, ids).exp(), torch.tensor([[0.25, 1 / 3]]), rtol=0, atol=1e-6)


def test_shapes_that_do_not_fit_are_refused(model):
    with pytest.raises(ValueError, match="prompt's shape"):
        score(model, noise=[True])
    with pytest.raises(ValueError, match="does not fit a canvas of 2"):
        score(model, gen_length=2)
