"""The sampler of SCDD: its step against Bayes' rule and published numbers, batches, records and refusals."""

from itertools import pairwise

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.attention import left_pad
from d1.models.head import token_logps
from d1.sampling import SamplingSettings, infill, rollout, rollout_steps, rollout_stream
from d1.sampling.scdd import MixedNoise, candidate_distribution, nucleus, predict, stay_probability
from d1.sampling.settings import check_sampler, refuse_scdd
from tests.d1.sft.test_scdd import marginal, transition
from tests.rounding import LOGITS, assert_near

VOCAB, MASK = 60, 3
PROMPTS = [[5, 9, 7], [4, 8, 15, 16, 23, 42], [12, 13, 14, 6]]
NOISE = MixedNoise(0.1)


def times(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def step_of(p, t, s, ratio=0.1):
    """(ids + 1, ids + 1) what the sampler's step does to each visible id and to the mask, the last one."""
    noise, (t, s), ids = MixedNoise(ratio), times(t, s), len(p)
    z = torch.arange(ids + 1)
    p = torch.cat([p, torch.zeros(1)]).double().expand(ids + 1, -1)
    stays = stay_probability(p, z, t, s, noise, ids)
    moves = candidate_distribution(p, s, noise, ids)
    return torch.diag(stays) + (1 - stays).unsqueeze(1) * moves


def test_numbers_of_five_ids():
    uniform = step_of(torch.full((5,), 0.2, dtype=torch.float64), 0.5, 0.25)
    assert uniform[5, 5].item() == pytest.approx(0.50679, abs=5e-6)  # a mask stays
    assert uniform[0, 0].item() == pytest.approx(0.93852, abs=5e-6)  # a visible token is kept
    sure = step_of(torch.tensor([0.9, 0.02, 0.08 / 3, 0.08 / 3, 0.08 / 3], dtype=torch.float64), 0.5, 0.25)
    assert sure[1, 0].item() == pytest.approx(0.23913, abs=5e-6)  # to the id that the model is sure of


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.6])
@pytest.mark.parametrize(("t", "s"), [(1.0, 0.7), (0.9, 0.4), (0.5, 0.499), (0.2, 1e-5)])
def test_a_step_is_bayes_rule_under_the_model(ratio, t, s):
    """p(z_s | z_t) = sum over x of p(x) q(z_s | x) q(z_t | z_s) / sum over x of p(x) q(z_t | x), by matrices."""
    ids = 4
    p = torch.randn(ids, generator=torch.Generator().manual_seed(3)).double().mul(2).softmax(-1)
    before, after = (p @ marginal(time, ratio, ids)[:ids] for time in (s, t))
    if t < 1:
        forward = transition(s, t, ratio, ids)
    else:  # all becomes the mask, and that marginal has no inverse
        forward = torch.zeros(ids + 1, ids + 1, dtype=torch.float64)
        forward[:, ids] = 1
    seen = after > 0
    expected = (before.unsqueeze(1) * forward / after).T[seen]
    result = step_of(p, t, s, ratio)[seen]
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
    assert (result[:, ids][: seen.sum() - 1] == 0).all()  # masks never return


def test_steps_compose_to_the_marginals_of_the_model():
    """From masks alone at t = 1 through any times, a token that the model does not change its mind about has the
    marginal of the forward process; two steps are not one, because each asks the model anew."""
    ids = 4
    p = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    for path in ((1.0, 0.4), (1.0, 0.8, 0.4), (1.0, 0.9, 0.75, 0.5, 0.4)):
        state = torch.zeros(ids + 1, dtype=torch.float64)
        state[ids] = 1
        for t, s in pairwise(path):
            state = state @ step_of(p, t, s)
        torch.testing.assert_close(state, p @ marginal(0.4, 0.1, ids)[:ids], rtol=0, atol=1e-12)


@pytest.mark.parametrize("x", range(4))
def test_steps_compose_for_a_certain_model(x):
    """If p is one id, the steps are those of the process given this id: t -> s -> r is t -> r."""
    p = torch.eye(4, dtype=torch.float64)[x]
    both = step_of(p, 0.9, 0.5) @ step_of(p, 0.5, 0.2)
    torch.testing.assert_close(both, step_of(p, 0.9, 0.2), rtol=0, atol=1e-12)


def test_without_uniform_ids_visible_tokens_stay():
    result = step_of(torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), 0.6, 0.3, ratio=0.0)
    assert torch.equal(result[:3, :3], torch.eye(3, dtype=torch.float64))
    assert result[3].tolist() == pytest.approx([0.25, 0.25, 0.0, 0.5])


def test_the_nucleus_is_that_of_the_release():
    p = torch.tensor([[0.1, 0.5, 0.25, 0.15], [0.95, 0.03, 0.02, 0.0]], dtype=torch.float64)
    assert nucleus(p, 0.76).tolist() == [pytest.approx([0, 2 / 3, 1 / 3, 0]), [1, 0, 0, 0]]
    assert nucleus(p, 1.0) is p


def test_draws_have_the_probabilities_of_the_step(model):
    """`predict` on many equal states: masks, a likely and an unlikely visible id, with temperature and nucleus."""
    settings = SamplingSettings(4, 4, 2, sampler="scdd", temperature=0.7, nucleus_p=0.95)
    states = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(1)) * 2
    logits = model.lm_head(states)[0, 0].detach()
    p = logits.index_fill(-1, torch.tensor([MASK]), -torch.inf).double().div(0.7).softmax(-1)[None]
    p, (t, s), count = nucleus(p, 0.95), times(0.6, 0.2), 20_000
    for z in (MASK, int(p.argmax()), 17):
        shown = torch.full((1, count), z)
        numbers = torch.rand(2, 1, count, generator=torch.Generator().manual_seed(z), dtype=torch.float64)
        given = states.expand(1, count, -1), shown, numbers, (t, s), settings, NOISE, MASK
        found = predict(model, *given)
        stays = stay_probability(p, torch.tensor([z]), t, s, NOISE, MASK)
        expected = (1 - stays) * candidate_distribution(p, s, NOISE, MASK)[0]
        expected[z] += stays[0]
        shares = found.ids[0].bincount(minlength=VOCAB) / count
        assert ((shares - expected).abs() < 5 * (expected / count).sqrt() + 5 / count).all()
        assert_near(found.logps[0, :9], token_logps(logits.expand(9, -1), found.ids[0, :9]), least=LOGITS)


# --- Rollouts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    model = load_model(str(tiny_model_dir))
    model.config.uniform_ratio = 0.1
    return model


def settings_of(length=12, block=6, steps=8, **changes):
    return SamplingSettings(length, block, steps, **{"sampler": "scdd", "temperature": 1.0} | changes)


def sample(model, prompts, settings, numbers=None, **options):
    ids, mask = left_pad(prompts, 0)
    generators = [keyed_generator(7, number) for number in numbers or range(len(prompts))]
    return rollout(model, ids, mask, settings, mask_token_id=MASK, generator=generators, **options)


@pytest.mark.parametrize("options", [{}, {"eos_token_ids": list(range(20))}])
def test_rows_do_not_depend_on_their_batch_and_a_stream_gives_the_same(model, options):
    settings = settings_of()
    together = sample(model, PROMPTS, settings, **options)
    prompts = [(ids, keyed_generator(7, number)) for number, ids in enumerate(PROMPTS)]
    stream = rollout_stream(model, prompts, settings, batch_size=2, mask_token_id=MASK, **options)
    streamed = {number: (part, row) for numbers, part in stream for row, number in enumerate(numbers)}
    assert (together.ids != MASK).all()
    for row, prompt in enumerate(PROMPTS):
        alone = sample(model, [prompt], settings, [row], **options)
        part, at = streamed[row]
        for one, index in ((together, row), (part, at)):
            assert torch.equal(one.ids[index, -12:], alone.ids[0, -12:])
            for name in ("reveal_steps", "passes", "forward_tokens", "edits"):
                assert torch.equal(getattr(one, name)[index], getattr(alone, name)[0])
            assert_near(one.logps[index], alone.logps[0], least=LOGITS)
    if options:
        assert together.passes.min() < 8  # the EOS stop


def test_masks_never_return_visible_tokens_change_and_the_last_pass_is_the_argmax(model):
    settings = settings_of(12, 6, 12, nucleus_p=1.0)
    ids = torch.tensor(PROMPTS[:1])
    options = {"mask_token_id": MASK, "generator": [keyed_generator(1, 0)]}
    texts, passes, changes = [], [], 0
    for step in rollout_steps(model, ids, torch.ones_like(ids), settings, **options):
        texts.append(step.canvas[0].clone())
        passes.append(step.positions[0])
    start = torch.tensor([*PROMPTS[0], *[MASK] * 12])
    assert len(texts) == 12
    for before, after, positions in zip([start, *texts], texts, passes, strict=False):
        assert not ((before != MASK) & (after == MASK)).any()
        outside = torch.ones_like(before, dtype=torch.bool)
        outside[positions] = False
        assert torch.equal(before[outside], after[outside])
        changes += int(((before != MASK) & (before != after)).sum())
    assert changes
    for number in (5, 11):
        logits = model(input_ids=texts[number - 1][None]).logits[0, passes[number]]
        logits[:, MASK] = -torch.inf
        assert torch.equal(texts[number][passes[number]], logits.argmax(-1))


def test_the_record_has_every_write(model):
    settings = settings_of(12, 6, 12, nucleus_p=1.0)
    ids = torch.tensor(PROMPTS[:1])
    found = sample(model, PROMPTS[:1], settings)
    options = {"mask_token_id": MASK, "generator": [keyed_generator(7, 0)]}
    before = torch.full((12,), MASK)
    writes = [[] for _ in range(12)]
    for number, step in enumerate(rollout_steps(model, ids, torch.ones_like(ids), settings, **options)):
        after = step.canvas[0, -12:].clone()
        for position in (before != after).nonzero().flatten().tolist():
            writes[position].append((number, int(after[position])))
        before = after
    for position, expected in enumerate(writes):
        steps, written = found.writes.steps[0, position], found.writes.ids[0, position]
        count = len(expected)
        assert [*zip(steps[:count].tolist(), written[:count].tolist(), strict=True)] == expected
        assert (steps[count:] == -1).all()
        assert found.reveal_steps[0, position] == expected[-1][0]
    assert found.edits.item() == sum(len(each) - 1 for each in writes) > 0
    assert found.passes.item() == 12
    assert found.forward_tokens.item() == 12 * (len(PROMPTS[0]) + 12)


def test_one_pass_per_block_is_the_argmax_of_the_masks(model):
    found = sample(model, PROMPTS[:1], settings_of(6, 6, 1))
    text = torch.tensor([*PROMPTS[0], *[MASK] * 6])
    logits = model(input_ids=text[None]).logits[0, -6:]
    logits[:, MASK] = -torch.inf
    assert torch.equal(found.ids[0, -6:], logits.argmax(-1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "draws from the model's distribution: set --temperature"),
        ({"remasking": "random"}, "leave remasking out"),
        ({"cfg_scale": 1.0}, "no guidance"),
        ({"top_k": 2}, "nucleus_p"),
        ({"record_as_sampled": True}, "record_as_sampled"),
        ({"output": "draw"}, "uniform noise"),
        ({"first_token": "causal"}, "causal context"),
    ],
)
def test_settings_that_do_nothing_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        check_sampler(settings_of(**changes), model.config)


@pytest.mark.parametrize("name", ["kv_cache", "reveal", "reveal_level", "edit_threshold", "editing"])
def test_settings_of_other_samplers_are_refused(name):
    value = {"kv_cache": "dual", "reveal": "threshold", "editing": "quality"}.get(name, 0.5)
    with pytest.raises(ValueError, match=f"{name}.* would be ignored by the sampler scdd"):
        settings_of(**{name: value})
    with pytest.raises(ValueError, match=r"nucleus_p=0\.5 would be ignored by the sampler exact: choose scdd"):
        SamplingSettings(8, 8, 4, nucleus_p=0.5)


def test_other_models_and_other_ways_to_sample_are_refused(model, tiny_model_dir, tiny_block_dir):
    plain = load_model(str(tiny_model_dir)).config
    for ratio in (None, "half", 1.0):
        plain.uniform_ratio = ratio
        with pytest.raises(ValueError, match=r"is for models of SFT with --noise scdd.* has uniform_ratio"):
            check_sampler(settings_of(), plain)
    with pytest.raises(ValueError, match="needs full attention, and llama has block-causal"):
        check_sampler(settings_of(block=4), load_model(str(tiny_block_dir)).config)
    with pytest.raises(ValueError, match="a server has no sampler scdd"):
        refuse_scdd(settings_of(), "a server")
    text, hidden = torch.tensor([[5, 9, 7, 4]]), torch.tensor([[False, True, True, False]])
    with pytest.raises(ValueError, match="filling in has no sampler scdd"):
        infill(model, text, hidden, mask_token_id=MASK, sampler="scdd", temperature=1.0)
    ids = torch.tensor(PROMPTS[:1])
    with pytest.raises(ValueError, match="need a list of generators"):
        rollout(model, ids, torch.ones_like(ids), settings_of(), mask_token_id=MASK)


@pytest.mark.parametrize("option", [{"stops": len}, {"cache_rows": [None]}])
def test_ends_within_a_completion_and_an_earlier_cache_are_refused(model, option):
    ids = torch.tensor([[5, 9, 7]])
    generators = [keyed_generator(1)]
    with pytest.raises(
        ValueError, match="the sampler scdd has no stops within a completion and no cache of an earlier"
    ):
        rollout(model, ids, torch.ones_like(ids), settings_of(), mask_token_id=MASK, generator=generators, **option)
