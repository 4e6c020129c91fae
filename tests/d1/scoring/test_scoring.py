"""The mean-field estimator, compared with probabilities computed token by token, and its invariances."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import d1.models.head
from d1.models import load_model
from d1.models.fit import LiveStorages
from d1.models.head import token_entropies, token_logps
from d1.scoring import Views, mean_field_logps
from d1.scoring import score as score_views
from d1.scoring.masks import one_step_views
from d1.scoring.views import views_of_canvas
from tests.d1.scoring.enumeration import canvas_logits

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
    # The same first tokens get the same log-probs whatever follows, of any length: only the canvas is visible.
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


PROMPTS = torch.tensor([[0, 0, 1, 5, 9, 6], PROMPT, [0, 1, 20, 21, 22, 6]])
VISIBLE = (PROMPTS != 0).long()
NOISES = torch.tensor([[True, False, True, False, True, False]] * 3)
COMPLETIONS = torch.tensor([[20, 21, 22, 23, 2], [24, 2, 0, 0, 0], [25, 26, 27, 28, 29]])
SCORED = torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [True] * 5])


def unpadded(row, hidden):
    """A row's prompt, completion and the masks after it, and which tokens are hidden, without padding: (length,)
    each."""
    text = torch.cat([PROMPTS[row], COMPLETIONS[row], torch.full((3,), MASK)])
    real = torch.cat([VISIBLE[row].bool(), torch.ones(8, dtype=torch.bool)])
    return text[real], hidden[real]


def naive(model):
    """Log-probs and entropies, one row at a time."""
    hidden = torch.cat([NOISES, torch.ones(3, 8, dtype=torch.bool)], dim=1)
    logits = torch.stack([canvas_logits(model, *unpadded(row, hidden[row]), 8, MASK) for row in range(3)])[:, :5]
    logps = logits.log_softmax(-1)
    chosen = torch.stack([logps[r, k, COMPLETIONS[r, k]] for r in range(3) for k in range(5)]).reshape(3, 5)
    return chosen * SCORED, torch.distributions.Categorical(logits=logits).entropy() * SCORED


def in_chunks(model, scored=SCORED):
    views = one_step_views(NOISES, scored, 8)
    arguments = (PROMPTS, VISIBLE, COMPLETIONS, views)
    scores = score_views(model, *arguments, mask_token_id=MASK, gen_length=8, with_entropies=True)
    return scores.logps, scores.entropies


def gradients(model, logps):
    model.zero_grad()
    (logps * torch.linspace(-1, 1, logps.numel()).reshape(logps.shape)).sum().backward()
    return {name: torch.zeros(1) if p.grad is None else p.grad for name, p in model.named_parameters()}


def test_values_and_gradients_in_chunks_equal_the_naive_ones(kind, kind_dirs, monkeypatch):
    """Chunks of other sizes: tests/d1/models/test_target_logps.py."""
    model = load_model(kind_dirs[kind])
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", 3 * model.config.vocab_size)
    (logps, entropies), (expected, expected_entropies) = in_chunks(model), naive(model)
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-5)
    assert not entropies.requires_grad
    got = gradients(model, logps)
    for name, value in gradients(model, expected).items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_log_softmax_is_in_fp32_whatever_the_weights(kind_dirs):
    model = load_model(kind_dirs["llada"], torch.bfloat16)
    with torch.no_grad():
        logits = model(input_ids=torch.full((3, 14), MASK)).logits[:, 6:11].double()
    arguments = (torch.full_like(PROMPTS, MASK), torch.ones_like(VISIBLE), COMPLETIONS, NOISES)
    got = mean_field_logps(model, *arguments, mask_token_id=MASK, gen_length=8)
    expected = logits.log_softmax(-1).gather(-1, COMPLETIONS.unsqueeze(-1)).squeeze(-1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


class HeadCalls(TorchDispatchMode):
    """Positions in each product with the head's weight (vocab, 32), and in the largest tensor over the vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.positions, self.largest = vocabulary, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            if out.shape[-1:] == (self.vocabulary,) and out.shape != (32, self.vocabulary):  # not the weight itself
                self.largest = max(self.largest, out.numel() // self.vocabulary)
            if func is torch.ops.aten.mm.default and out.shape[-1] == self.vocabulary:
                self.positions.append(out.shape[0])
        return out


def test_the_head_runs_on_scored_positions_only_and_never_on_more_than_a_chunk(model, monkeypatch):
    vocabulary = model.config.vocab_size
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", 6 * vocabulary)
    with HeadCalls(vocabulary) as forward:
        logps, _ = in_chunks(model)
    with HeadCalls(vocabulary) as backward:
        logps.sum().backward()
    assert forward.positions == [6, 6]  # 12 of 15 positions
    assert backward.positions == [6]  # the last chunk was kept
    assert max(forward.largest, backward.largest) == 6
    with HeadCalls(vocabulary) as unbounded:
        model(input_ids=torch.full((3, 14), MASK))
    assert unbounded.largest == 3 * 14


def test_nothing_scored_still_calls_the_head_so_that_every_weight_has_a_gradient(model):
    with HeadCalls(model.config.vocab_size) as calls:
        scores, _ = in_chunks(model, torch.zeros_like(SCORED))
    assert calls.positions == [0]
    assert not scores.any()
    scores.sum().backward()
    assert model.lm_head.weight.grad is not None


# --- Several views ---------------------------------------------------------------------------------------------------


def drawn_views(count):
    """Any states and weights: noise in both prompt and canvas, a third of the weights 0."""
    generator = torch.Generator().manual_seed(count)
    noise = torch.rand(3, count, 6 + 8, generator=generator) < 0.5
    weights = torch.rand(3, count, 5, generator=generator) + 0.5
    return Views(noise, weights * (torch.rand(3, count, 5, generator=generator) < 2 / 3))


def one_forward_pass_a_token(model, views):
    """The formula, token by token and view by view, without padding: (rows, views, tokens)."""
    total = torch.zeros(views.weights.shape)
    for row, view, token in views.weights.nonzero().tolist():
        logits = canvas_logits(model, *unpadded(row, views.noise[row, view]), 8, MASK)
        total[row, view, token] = logits[token].log_softmax(-1)[COMPLETIONS[row, token]]
    return total


def test_several_views_are_summed_with_their_weights(kind, kind_dirs):
    model = load_model(kind_dirs[kind])
    views = drawn_views(3)
    got = score_views(model, PROMPTS, VISIBLE, COMPLETIONS, views, mask_token_id=MASK, gen_length=8)
    with torch.no_grad():
        expected = one_forward_pass_a_token(model, views)
    torch.testing.assert_close(got.view_logps, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.logps, (views.weights * expected).sum(1), rtol=0, atol=1e-5)
    assert got.entropies is None


def test_gradients_of_several_views_are_the_formulas(model):
    views = drawn_views(3)
    got = score_views(model, PROMPTS, VISIBLE, COMPLETIONS, views, mask_token_id=MASK, gen_length=8).logps
    found = gradients(model, got)
    for name, value in gradients(model, (views.weights * one_forward_pass_a_token(model, views)).sum(1)).items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_views_that_are_copies_weigh_as_one(model):
    one = one_step_views(NOISES, SCORED, 8)
    halves = Views(one.noise.expand(-1, 4, -1), one.weights.expand(-1, 4, -1) / 4)
    options = {"mask_token_id": MASK, "gen_length": 8, "with_entropies": True}
    whole, parts = (score_views(model, PROMPTS, VISIBLE, COMPLETIONS, views, **options) for views in (one, halves))
    torch.testing.assert_close(parts.logps, whole.logps, rtol=0, atol=1e-5)
    torch.testing.assert_close(parts.entropies, whole.entropies, rtol=0, atol=1e-5)


def test_peak_memory_does_not_grow_with_the_views(model):
    prompt, visible = PROMPTS.repeat(1, 16), VISIBLE.repeat(1, 16)
    peaks = {}
    for count in (1, 4, 16, 64):
        views = drawn_views(count)
        views = Views(torch.cat([views.noise[..., :6].repeat(1, 1, 16), views.noise[..., 6:]], dim=-1), views.weights)
        with LiveStorages() as storages:
            logps = score_views(model, prompt, visible, COMPLETIONS, views, mask_token_id=MASK, gen_length=8)
            logps.logps.sum().backward()
        peaks[count] = storages.peak
    assert max(peaks.values()) < 1.1 * min(peaks.values()), peaks


def test_shapes_of_views_that_do_not_fit_are_refused(model):
    views = drawn_views(2)
    wrong = {
        "views.noise must be": Views(views.noise[:, :, 1:], views.weights),
        "views.weights must be": Views(views.noise, views.weights[:, :, :-1]),
        "2 views have noise and 1 have weights": Views(views.noise, views.weights[:, :1]),
        "bool noise and float weights, got torch.bool, torch.int64": Views(views.noise, views.weights.long()),
    }
    for message, views in wrong.items():
        with pytest.raises(ValueError, match=message):
            score_views(model, PROMPTS, VISIBLE, COMPLETIONS, views, mask_token_id=MASK, gen_length=8)


@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 3, 4), (2, 3), (3, 4), (2, 3, 2)])
def test_weights_of_a_canvas_that_would_be_broadcast_over_rows_or_views_are_refused(shape):
    seen, hidden = torch.zeros(2, 1, 5, dtype=torch.bool), torch.ones(2, 3, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"weights must be \(2, 3, 4\), one per view or token, got"):
        views_of_canvas(seen, hidden, hidden[:, 0], torch.ones(shape))
    each = views_of_canvas(seen, hidden, hidden[:, 0], torch.ones(2, 3, 1)).weights
    assert torch.equal(each, views_of_canvas(seen, hidden, hidden[:, 0], torch.ones(2, 3, 4)).weights)


def test_a_model_that_was_not_prepared_is_refused(tiny_model_dir):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(ValueError, match="not prepared for masked diffusion"):
        score(plain)
