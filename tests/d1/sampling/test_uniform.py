"""The sampler with uniform noise: Transformers' own `generate` with the same draws, batches, records and refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.attention import left_pad
from d1.models.diffusion_gemma import canvas_states
from d1.models.head import backbone_and_head, token_entropies, token_logps
from d1.sampling import SamplingSettings, rollout, rollout_steps, rollout_stream
from d1.sampling.settings import check_sampler
from d1.sampling.uniform import accepted, quantiles
from tests.d1.diffusion_gemma import CANVAS, VOCAB, needs_class, tiny, write_tiny
from tests.rounding import LOGITS, assert_near

EOS, PASSES = 1, 4
PROMPTS = [[5, 9, 3], [4, 8, 15, 16, 23, 2, 7, 9, 11, 3], [12, 13, 14, 6, 20]]  # the second is beyond the window
RELEASED = {"sampler": "parallel", "reveal": "entropy", "temperature": 0.8, "end_temperature": 0.4}


def settings(canvases=3, **changes):
    own = RELEASED | {"reveal_level": 3.0, "stop_entropy": 1.6} | changes
    return SamplingSettings(canvases * CANVAS, CANVAS, canvases * PASSES, **own)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_tiny(tmp_path_factory.mktemp("gemma"), eos_token_id=EOS))


def sample(model, prompts, how, numbers=None, **options):
    ids, mask = left_pad(prompts, 0)
    own = [keyed_generator(7, number) for number in numbers or range(len(prompts))]
    return rollout(model, ids, mask, how, mask_token_id=None, generator=own, **options)


def generate(monkeypatch, prompts, how, numbers):
    """Transformers' `generate` whose draws come from one generator per row, as here."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    own, randint = [keyed_generator(7, number) for number in numbers], torch.randint

    def multinomial(probabilities, num_samples):
        draws = [torch.rand(CANVAS, generator=one, dtype=torch.float64) for one in own]
        return quantiles(probabilities.log(), torch.cat(draws)).unsqueeze(-1)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    monkeypatch.setattr(
        torch,
        "randint",
        lambda low, high, size, device: torch.stack([randint(low, high, size[1:], generator=one) for one in own]),
    )
    ids, mask = left_pad(prompts, 0)
    fields = {"max_new_tokens": how.gen_length, "max_denoising_steps": PASSES, "t_min": how.end_temperature}
    fields["t_max"] = how.temperature
    fields |= {"sampler_config": EntropyBoundSamplerConfig(how.level), "confidence_threshold": how.stops_below}
    found = tiny().generate(
        ids, attention_mask=mask, stability_threshold=1, eos_token_id=[EOS], pad_token_id=0, **fields
    )
    monkeypatch.undo()
    return found


@needs_class
@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_several_canvases_equal_generate(model, monkeypatch, row):
    how = settings()
    found = generate(monkeypatch, [PROMPTS[row]], how, [row])
    ours = sample(model, [PROMPTS[row]], how, [row], eos_token_ids=[EOS])
    text = found.sequences[0, len(PROMPTS[row]) :].tolist()
    end = text.index(EOS) + 1 if EOS in text else len(text)
    assert ours.ids[0, len(PROMPTS[row]) :].tolist()[:end] == text[:end]
    tokens = found.sequences[0, len(PROMPTS[row]) :].ne(0).sum()
    assert ours.passes.item() == pytest.approx((tokens / found.tokens_per_forward[0]).item())


@needs_class
def test_a_padded_batch_whose_rows_end_at_different_passes_equals_generate(model, monkeypatch):
    # So cold that argmaxes repeat; the prompts differ in length and in the pass that ends their canvas.
    how = settings(1, temperature=0.02, end_temperature=0.01, reveal_level=99.0, stop_entropy=9.0)
    prompts = [[20, 9, 2, 7, 29, 27], [20, 18, 25, 5, 4], *PROMPTS]
    found = generate(monkeypatch, prompts, how, range(5))
    ours = sample(model, prompts, how)
    assert torch.equal(ours.ids[:, -CANVAS:].where(found.sequences[:, -CANVAS:] != 0, 0), found.sequences[:, -CANVAS:])
    assert len({*ours.passes.tolist()}) > 1


@needs_class
@pytest.mark.parametrize("output", ["argmax", "draw"])
def test_rows_do_not_depend_on_their_batch_and_a_stream_gives_the_same(model, output):
    how = settings(output=output)
    together = sample(model, PROMPTS, how, eos_token_ids=[EOS])
    stream = rollout_stream(
        model,
        [(ids, keyed_generator(7, number)) for number, ids in enumerate(PROMPTS)],
        how,
        batch_size=2,
        mask_token_id=None,
        eos_token_ids=[EOS],
    )
    streamed = {number: (part, row) for numbers, part in stream for row, number in enumerate(numbers)}
    for row, prompt in enumerate(PROMPTS):
        alone = sample(model, [prompt], how, [row], eos_token_ids=[EOS])
        part, at = streamed[row]
        for one, index in ((together, row), (part, at)):
            assert torch.equal(one.ids[index, -how.gen_length :], alone.ids[0, -how.gen_length :])
            for name in ("reveal_steps", "passes", "forward_tokens"):
                assert torch.equal(getattr(one, name)[index], getattr(alone, name)[0])
            assert_near(one.logps[index], alone.logps[0], least=4 * LOGITS)  # guidance and temperature enlarge it


@needs_class
@torch.no_grad()
@pytest.mark.parametrize("output", ["argmax", "draw"])
def test_the_record_has_every_state_and_scored_anew_gives_its_numbers(model, output):
    how = settings(output=output, self_conditioning=False)
    ids, mask = left_pad(PROMPTS, 0)
    found = sample(model, PROMPTS, how)
    writes, blocks = found.writes, torch.arange(how.gen_length) // CANVAS
    starts = writes.steps[:, :, 0]
    assert (starts == -2).all()
    assert writes.ids.max() < VOCAB
    visible = torch.cat([mask, torch.ones_like(found.ids[:, ids.shape[1] :])], dim=1)
    for number in range(int(found.max_writes.max()) - 1):
        logits = backbone_and_head(model)[1](canvas_states(model, found.ids, writes.ids[..., number], visible))
        logits = logits / how.temperature_of(number)
        entropies = token_entropies(logits)
        for block in range(3):
            own = blocks == block
            steps = writes.steps[:, own, number + 1]
            for row in (steps != -1).all(1).nonzero().flatten().tolist():
                last = number == PASSES - 1 or (writes.steps[row, own, number + 2] == -1).all()
                takes = accepted(entropies[row, own], how.level)
                drawn = steps[row] >= 0
                expected = torch.full_like(takes, output == "draw") if last else takes
                assert torch.equal(drawn, expected)
                logps = token_logps(logits[row, own], writes.ids[row, own, number + 1]).where(drawn, 0)
                assert_near(writes.logps[row, own, number + 1], logps, least=4 * LOGITS)
                shown = found.ids[row, -how.gen_length :][own]
                if last:
                    assert torch.equal(writes.ids[row, own, number + 1], shown)
                    assert output == "draw" or torch.equal(logits[row, own].argmax(-1), shown)
    assert found.passes.tolist() == [
        sum((writes.steps[row, blocks == block] != -1).any(0).sum().item() - 1 for block in range(3))
        for row in range(3)
    ]


@needs_class
def test_steps_change_one_canvas_at_a_time(model):
    how, ids = settings(), torch.tensor(PROMPTS[:1])
    own = [keyed_generator(7, 0)]
    steps = rollout_steps(model, ids, torch.ones_like(ids), how, mask_token_id=None, generator=own)
    texts = [(step.canvas.clone(), step.positions[0].tolist()) for step in steps]
    for (before, _), (after, columns) in pairwise(texts):
        assert {*(before != after)[0].nonzero().flatten().tolist()} <= {*columns}


def test_accepted_positions_are_those_of_the_rule_in_any_order():
    entropies = torch.tensor([[0.5, 0.01, 0.3, 0.08, 0.02], [2.0, 1.0, 3.0, 4.0, 5.0]])
    # .01 + .02 + .08 + .3, without the largest, is .11 > .1; and one position always.
    assert accepted(entropies, 0.1).tolist() == [[False, True, False, True, True], [False, True, False, False, False]]


def test_quantiles_are_the_inverse_of_the_distribution_function():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(6, -1)
    numbers = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 0.999999])
    assert quantiles(logits, numbers).tolist() == [0, 0, 1, 1, 2, 2]


@needs_class
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sampler": "exact", "reveal": None, "reveal_level": None}, "entropy bound alone"),
        ({"temperature": 0.0}, "tempered"),
        ({"cfg_scale": 1.0}, "guidance"),
        ({"top_k": 2}, "top_k"),
        ({"edit_threshold": 0.6}, "renoises"),
        ({"steps": 7}, "multiple of 3"),
        ({"gen_length": 10, "steps": 6}, "whole blocks"),
        ({"block_length": 2}, "block_length must be 4"),
        ({"sampler": "cached+parallel"}, "cached sampler"),
    ],
)
def test_settings_that_this_sampler_lacks_are_refused(model, changes, problem):
    fields = {"gen_length": 12, "block_length": CANVAS, "steps": 12, **RELEASED} | changes
    with pytest.raises(ValueError, match=problem):
        check_sampler(SamplingSettings(**fields), model.config)


@pytest.mark.parametrize(
    "change", [{"output": "draw"}, {"self_conditioning": False}, {"stop_entropy": 0.1}, {"end_temperature": 0.4}]
)
def test_models_with_masks_refuse_the_settings_of_uniform_noise(kind_dirs, change):
    config = load_model(kind_dirs["llama"]).config
    with pytest.raises(ValueError, match="uniform noise"):
        check_sampler(SamplingSettings(8, 8, 4, temperature=1.0, **change), config)
