"""Scoring in views, compared with logits computed state by state without padding, and what it costs and refuses."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import d1.models.head
from d1.commands.footprint import LiveStorages
from d1.models import load_model
from d1.scoring import Views, mean_field_logps, score, views_of_canvas
from d1.scoring.one_step import one_step_views
from tests.d1.released import CAUSAL
from tests.d1.scoring.enumeration import canvas_logits
from tests.rounding import LOGITS, TOKENS, assert_near, largest, rounding

MASK, CANVAS = 3, 8
PROMPT = [1, 5, 9, 10, 11, 6]
PROMPTS = torch.tensor([[0, 0, 1, 5, 9, 6], PROMPT, [0, 1, 20, 21, 22, 6]])
VISIBLE = (PROMPTS != 0).long()
NOISE = [True, False, True, False, True, False]
NOISES = torch.tensor([NOISE] * 3)  # noise on padding must not matter
COMPLETIONS = torch.tensor([[20, 21, 22, 23, 2], [24, 2, 0, 0, 0], [25, 26, 27, 28, 29]])
SCORED = torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [True] * 5])
OPTIONS = {"mask_token_id": MASK, "gen_length": CANVAS}


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return load_model(str(tiny_model_dir))


def scores(model, views, **options):
    return score(model, PROMPTS, VISIBLE, COMPLETIONS, views, **OPTIONS | options)


def drawn_views(count):
    """Any states and weights: noise in both prompt and canvas, a third of the weights 0."""
    generator = torch.Generator().manual_seed(count)
    noise = torch.rand(3, count, 6 + CANVAS, generator=generator) < 0.5
    weights = torch.rand(3, count, 5, generator=generator) + 0.5
    return Views(noise, weights * (torch.rand(3, count, 5, generator=generator) < 2 / 3))


def naive(model, views):
    """The formula, one row and view at a time, without padding: (rows, views, tokens) log-probs and entropies."""
    logps, entropies = torch.zeros(views.weights.shape), torch.zeros(views.weights.shape)
    for row, view in views.weights.any(-1).nonzero().tolist():
        text = torch.cat([PROMPTS[row], COMPLETIONS[row], torch.full((3,), MASK)])
        real = torch.cat([VISIBLE[row].bool(), torch.ones(CANVAS, dtype=torch.bool)])
        logits = canvas_logits(model, text[real], views.noise[row, view][real], CANVAS, MASK)[:5]
        some = views.weights[row, view] != 0
        each = logits.log_softmax(-1).gather(-1, COMPLETIONS[row].unsqueeze(-1)).squeeze(-1)
        logps[row, view] = torch.where(some, each, 0.0)
        entropies[row, view] = torch.where(some, torch.distributions.Categorical(logits=logits).entropy(), 0.0)
    return logps, entropies


def gradients(model, logps):
    model.zero_grad()
    (logps * torch.linspace(-1, 1, logps.numel()).reshape(logps.shape)).sum().backward()
    return {name: torch.zeros(1) if p.grad is None else p.grad for name, p in model.named_parameters()}


def test_gradients_of_passes_are_summed_in_fp32_in_mixed_precision(model):
    """As those of views that are scored one by one, each with its own backward pass, whose sum is that of `.grad`. One
    16-bit copy of the weights for all passes would sum in 16 bits."""
    views = drawn_views(16)
    noise, weights = views.noise[1:2], views.weights[1:2] + 0.5

    def score_row(part):
        with torch.autocast("cpu", torch.bfloat16):
            given = (PROMPTS[1:2], VISIBLE[1:2], COMPLETIONS[1:2], Views(noise[:, part], weights[:, part]))
            return score(model, *given, **OPTIONS, views_at_once=1).logps.sum()

    model.zero_grad()
    score_row(slice(None)).backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    for view in range(16):
        score_row(slice(view, view + 1)).backward()
    for name, weight in model.named_parameters():
        assert_near(found[name], weight.grad)


@pytest.mark.parametrize("views", [one_step_views(NOISES, SCORED, CANVAS), drawn_views(3)], ids=["one", "several"])
def test_values_and_gradients_in_chunks_are_those_of_the_formula(kind, kind_dirs, monkeypatch, views):
    """Chunks of other sizes: tests/d1/models/test_target_logps.py."""
    if kind == CAUSAL:
        pytest.skip("its states are written out in test_causal_context.py")
    model = load_model(kind_dirs[kind])
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", 3 * model.config.vocab_size)
    got = scores(model, views, with_entropies=True)
    logps, entropies = naive(model, views)
    assert_near(got.view_logps, logps, least=LOGITS)
    assert_near(got.logps, (views.weights * logps).sum(1), least=LOGITS)
    assert_near(got.entropies, (views.weights * entropies).sum(1), least=LOGITS)
    assert not got.entropies.requires_grad
    assert got.logps.dtype == torch.float32
    found, expected = gradients(model, got.logps), gradients(model, (views.weights * logps).sum(1))
    scale = largest([*expected.values()])
    for name, value in expected.items():
        assert_near(found[name], value, least=scale, terms=TOKENS, msg=lambda text, name=name: f"{name}: {text}")


def test_log_softmax_is_in_fp32_whatever_the_weights(kind_dirs):
    model = load_model(kind_dirs["llada"], torch.bfloat16)
    with torch.no_grad():
        logits = model(input_ids=torch.full((3, 14), MASK)).logits[:, 6:11].double()
    given = (torch.full_like(PROMPTS, MASK), torch.ones_like(VISIBLE), COMPLETIONS, NOISES)
    got = mean_field_logps(model, *given, **OPTIONS)
    expected = logits.log_softmax(-1).gather(-1, COMPLETIONS.unsqueeze(-1)).squeeze(-1)
    assert got.dtype == torch.float32
    assert_near(got.double(), expected, least=LOGITS)


# --- One view, the prompt alone ---------------------------------------------------------------------------------------


def mean_field(model, completion, left=0, gen_length=CANVAS, noise=NOISE):
    """Log-probs of one completion, with `left` positions of padding, or of several completions."""
    completions = torch.tensor(completion).view(-1, len(completion) if isinstance(completion[0], int) else 2)
    rows = len(completions)
    ids = torch.tensor([[0] * left + PROMPT]).expand(rows, -1)
    mask = torch.tensor([[0] * left + [1] * 6]).expand(rows, -1)
    hidden = torch.tensor([[True] * left + noise]).expand(rows, -1)
    return mean_field_logps(model, ids, mask, completions, hidden, mask_token_id=MASK, gen_length=gen_length)


def test_probabilities_of_all_completions_sum_to_one(model):
    # Brute force over the vocabulary: the mean-field distribution is a product of normalised distributions.
    first = mean_field(model, [[token, 5] for token in range(model.config.vocab_size)])
    assert first[:, 0].exp().sum().item() == pytest.approx(1.0, abs=rounding(LOGITS))
    assert first[:, 1].std().item() < 1e-6  # the second factor does not depend on the first token


def test_log_probs_and_gradients_ignore_padding_and_the_canvas_does_not_show_the_length(model):
    alone, padded = mean_field(model, [20, 21, 22, 2]), mean_field(model, [20, 21, 22, 2], left=5)
    assert_near(padded, alone, least=LOGITS)
    reference = gradients(model, alone)
    for name, value in gradients(model, padded).items():
        assert_near(value, reference[name], least=LOGITS)
    # The same first tokens get the same log-probs whatever follows, of any length: only the canvas is visible.
    for other in ([20, 21], [20, 21, 22, 2, 20, 21]):
        assert_near(mean_field(model, other)[:, :2], alone[:, :2], least=LOGITS)
    assert (mean_field(model, [20, 21, 22, 2], noise=[False] * 6) - alone).abs().max() > 1e-2


# --- Cost -------------------------------------------------------------------------------------------------------------


def test_nothing_scored_still_calls_the_head_so_that_every_weight_has_a_gradient(model):
    model.zero_grad()
    found = scores(model, one_step_views(NOISES, torch.zeros_like(SCORED), CANVAS)).logps
    assert not found.any()
    found.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_peak_memory_does_not_grow_with_the_views(model):
    prompt, visible = PROMPTS.repeat(1, 16), VISIBLE.repeat(1, 16)
    peaks = {}
    for count in (1, 4, 16, 64):
        views = drawn_views(count)
        views = Views(torch.cat([views.noise[..., :6].repeat(1, 1, 16), views.noise[..., 6:]], dim=-1), views.weights)
        with LiveStorages() as storages:
            score(model, prompt, visible, COMPLETIONS, views, **OPTIONS).logps.sum().backward()
        peaks[count] = storages.peak
    assert max(peaks.values()) < 1.1 * min(peaks.values()), peaks


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_shapes_and_models_that_do_not_fit_are_refused(model, tiny_model_dir):
    views = drawn_views(2)
    wrong = {
        "views.noise must be": Views(views.noise[:, :, 1:], views.weights),
        "views.weights must be": Views(views.noise, views.weights[:, :, :-1]),
        "2 views have noise and 1 have weights": Views(views.noise, views.weights[:, :1]),
        "bool noise and float weights, got torch.bool, torch.int64": Views(views.noise, views.weights.long()),
    }
    for message, some in wrong.items():
        with pytest.raises(ValueError, match=message):
            scores(model, some)
    ids, mask, completion = torch.zeros(2, 3).long(), torch.ones(2, 3).long(), torch.zeros(2, 2).long()
    for change in ({"prompt_ids": ids[:1]}, {"attention_mask": mask[:, :2]}, {"completion_ids": completion[:1]}):
        given = {"prompt_ids": ids, "attention_mask": mask, "completion_ids": completion, **change}
        with pytest.raises(ValueError, match="must have the same rows; got"):
            score(model, views=views, mask_token_id=3, gen_length=2, **given)
    with pytest.raises(ValueError, match="prompt's shape"):
        mean_field(model, [20, 21], noise=[True])
    with pytest.raises(ValueError, match="does not fit a canvas of 2"):
        mean_field(model, [20, 21, 22], gen_length=2)
    with pytest.raises(ValueError, match="not prepared for masked diffusion"):
        scores(AutoModelForCausalLM.from_pretrained(tiny_model_dir), views)


@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 3, 4), (2, 3), (3, 4), (2, 3, 2)])
def test_weights_of_a_canvas_that_would_be_broadcast_over_rows_or_views_are_refused(shape):
    seen, hidden = torch.zeros(2, 1, 5, dtype=torch.bool), torch.ones(2, 3, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"weights must be \(2, 3, 4\), one per view or token, got"):
        views_of_canvas(seen, hidden, hidden[:, 0], torch.ones(shape))
    each = views_of_canvas(seen, hidden, hidden[:, 0], torch.ones(2, 3, 1)).weights
    assert torch.equal(each, views_of_canvas(seen, hidden, hidden[:, 0], torch.ones(2, 3, 4)).weights)
