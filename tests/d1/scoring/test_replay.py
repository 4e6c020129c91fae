"""Replay, compared with the rollout's own record, with every sampler and every sampling distribution."""

from copy import deepcopy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from d1.masking import keyed_generator
from d1.models import prepare
from d1.models.distribution import OWN
from d1.models.kinds import block_size
from d1.sampling import SamplingSettings, rollout
from d1.scoring import ESTIMATORS, Randomness, SampledRows
from d1.scoring.rollouts import blocks_of
from tests.d1.scoring.enumeration import scores, settings

REPLAY = ESTIMATORS["replay"]


def randomness(rows, seed=0):
    return Randomness([keyed_generator(0)] * rows, keyed_generator(seed), 0, rows)


VOCAB, MASK, LENGTH = 12, 4, 11
PROMPTS = torch.tensor([[0, 0, 1, 2, 3], [3, 2, 1, 2, 3], [0, 1, 5, 6, 7], [5, 1, 5, 1, 5], [0, 0, 0, 0, 9]])
ENDS = [6, 7]  # of twelve ids: most rows end somewhere within
SAMPLERS = [
    *({"sampler": "exact", "remasking": name} for name in ("low_confidence", "random")),
    {"sampler": "parallel", "reveal": "threshold", "reveal_level": 0.4},
    {"sampler": "parallel", "reveal": "factor", "reveal_level": 1.5},
    {"sampler": "parallel", "reveal": "entropy", "reveal_level": 0.8},
]


@pytest.fixture(scope="module", params=[None, 4], ids=["full", "blocks"])
def model(request):
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return prepare(
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.6, block_size=request.param, **shape))
    ).eval()


def generators_of():
    return [keyed_generator(2, row) for row in range(len(PROMPTS))]


def sample(model, eos_stop=False, **options):
    """A rollout of 11 tokens in blocks of 4, 4 and 3, in 7 steps, and the part of it that estimators may use."""
    options = {"gen_length": LENGTH, "block_length": 4, "steps": 7, "mask_token_id": MASK, "temperature": 0.0} | options
    visible = (PROMPTS != 0).long()
    ends = ENDS if eos_stop else None
    taken = rollout(model, PROMPTS, visible, generator=generators_of(), eos_token_ids=ends, **options)
    ids = taken.ids[:, PROMPTS.shape[1] :]
    is_end = torch.isin(ids, torch.tensor(ENDS))
    scored = is_end.cumsum(-1) - is_end.long() == 0
    blocks = blocks_of(visible, LENGTH, block_size(model.config))
    record = (taken.reveal_steps, taken.logps, taken.entropies, blocks)
    return SampledRows(PROMPTS, visible, visible.bool(), ids, scored, *record)


def replayed(model, sampled, views, distribution=OWN):
    """`score`; this model's mask token is the tiny one's, too."""
    with torch.no_grad():
        return scores(model, views, sampled, views_at_once=4, distribution=distribution)


@pytest.mark.parametrize("eos_stop", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_replayed_log_probs_are_those_the_sampler_recorded(model, sampler, temperature, eos_stop):
    sampled = sample(model, eos_stop, temperature=temperature, **sampler)
    lengths = sampled.scored.sum(-1)
    assert lengths.min() < LENGTH  # some end early
    expected = sampled.logps * sampled.scored
    views = REPLAY(sampled, randomness(5), settings())
    assert torch.equal((views.weights != 0).sum(1), sampled.scored.long())  # each token once
    most = 4 if block_size(model.config) else LENGTH  # a view shows a step of every block
    assert views.noise.shape[1] <= most
    torch.testing.assert_close(replayed(model, sampled, views).logps, expected, rtol=0, atol=1e-5)
    for draw_steps in ("uniform", "entropy"):  # wherever a drawn view scores a token
        views = REPLAY(sampled, randomness(5), settings(num_views=3, draw_steps=draw_steps))
        found, seen = replayed(model, sampled, views).view_logps, views.weights != 0
        assert seen.any()
        torch.testing.assert_close(found[seen], expected.unsqueeze(1).expand_as(found)[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", [None], indirect=True)
@pytest.mark.parametrize(
    ("estimator", "chosen"),
    [
        ("replay", {}),
        ("replay", {"segment_steps": 2}),
        ("replay", {"num_views": 2, "mean_step": True}),
        ("replay", {"num_views": 2, "draw_steps": "top"}),
        ("segments", {"segments": 3, "steps": 7}),
        ("states", {"num_views": 2, "steps": 7}),
    ],
)
def test_the_eos_stop_changes_no_view(model, estimator, chosen):
    """Steps after a completion's end are left out; no view shows or draws from them."""
    for sampler in SAMPLERS:
        whole, stopped = (sample(model, stop, temperature=0.9, **sampler) for stop in (False, True))
        assert (stopped.reveal_steps < 0).any()
        assert torch.equal(whole.scored, stopped.scored)
        views, fewer = (ESTIMATORS[estimator](some, randomness(5), settings(**chosen)) for some in (whole, stopped))
        scoring = fewer.weights.any(-1)
        assert torch.equal(views.noise[scoring], fewer.noise[scoring])
        assert torch.equal(views.weights, fewer.weights)


@pytest.mark.parametrize("segments", [1, 3, 7])
def test_segments_score_each_token_once_whatever_steps_its_block_took(model, segments):
    """In a block-causal model each block has its own segments; its share of the steps is not a whole number here."""
    chosen = settings(gen_length=LENGTH, steps=7, block_length=4, segments=segments)
    for sampler in SAMPLERS:
        sampled = sample(model, eos_stop=True, temperature=0.9, **sampler)
        weights = ESTIMATORS["segments"](sampled, randomness(5), chosen).weights
        assert weights.shape[1] <= ESTIMATORS["segments"].views(chosen)
        assert torch.equal(weights.sum(1), sampled.scored.float())


TRUNCATED = [
    {"temperature": 0.6},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 1},
]


@pytest.mark.parametrize("remasking", ["random", "entropy"])
@pytest.mark.parametrize("chosen", TRUNCATED, ids=str)
def test_what_was_recorded_as_sampled_is_replayed_under_the_same_distribution(model, chosen, remasking):
    """So ratios start at 1. For the model's own distribution the record is different, for the same tokens. In fp64,
    because in fp32 the cache of a block-causal model changes logits slightly, and a temperature below 1 amplifies
    that."""
    model = deepcopy(model).double()
    options = {"remasking": remasking, **chosen}
    recorded = SamplingSettings(LENGTH, 4, 7, record_as_sampled=True, **options).record_distribution
    sampled = sample(model, record_as_sampled=True, **options)
    views = REPLAY(sampled, randomness(5), settings())
    found = replayed(model, sampled, views, recorded)
    torch.testing.assert_close(found.logps, sampled.logps.double() * sampled.scored, rtol=0, atol=1e-5)
    own = sample(model, **options)
    assert torch.equal(own.canvas_ids, sampled.canvas_ids)
    found = replayed(model, own, views)
    torch.testing.assert_close(found.logps, own.logps.double() * own.scored, rtol=0, atol=1e-5)
    assert (own.logps - sampled.logps).abs().max() > 0.1
