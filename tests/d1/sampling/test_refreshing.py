"""The two caches of the trial: they equal the slow reference, whatever the batch, and compute what they say."""

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import SamplingSettings, rollout, rollout_stream
from d1.sampling.caches import CACHES
from studies.samplers.refreshing import REFRESHING
from tests.d1.sampling import reference
from tests.d1.sampling.reference import MASK, make_prompts, sharper

WIDTHS = [6, 1, 4]


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for name, cache in REFRESHING.items():
        monkeypatch.setitem(CACHES, name, cache)


@pytest.mark.parametrize("cache", REFRESHING)
@pytest.mark.parametrize("kind", ["llada", "Dream"])  # Dream's logits predict the next token
@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
def test_rows_of_a_padded_batch_and_of_a_stream_equal_the_reference(kind_dirs, kind, cache, cfg_scale):
    model = sharper(load_model(kind_dirs[kind]))
    ids, mask = make_prompts(WIDTHS, 3)
    rule = {"sampler": "cached+parallel", "kv_cache": cache, "reveal": "factor", "reveal_level": 1.5}
    settings = SamplingSettings(15, 4, 15, temperature=0.8, cfg_scale=cfg_scale, **rule)
    prompts = [ids[row, 6 - width :].tolist() for row, width in enumerate(WIDTHS)]
    alone = [reference.sample(model, prompt, settings, keyed_generator(3, i)) for i, prompt in enumerate(prompts)]
    assert len({row.passes for row in alone}) > 1, "all rows take as many passes: the test shows less"
    got = rollout(model, ids, mask, settings, mask_token_id=MASK, generator=[keyed_generator(3, i) for i in range(3)])
    for row, width in enumerate(WIDTHS):
        reference.check_row(got, row, width, alone[row])
    asked = [(prompt, keyed_generator(3, i)) for i, prompt in enumerate(prompts)]
    for numbers, found in rollout_stream(model, asked, settings, batch_size=2, mask_token_id=MASK):
        for row, number in enumerate(numbers):
            reference.check_row(found, row, WIDTHS[number], alone[number])


def test_tokens_are_those_of_lasting_and_what_is_refreshed(kind_dirs):
    model = load_model(kind_dirs["llada"])
    ids, mask = make_prompts([6], 0)
    lengths = {"mask_token_id": MASK, "gen_length": 16, "block_length": 4, "steps": 8, "sampler": "cached"}
    tokens = {
        c: rollout(model, ids, mask, kv_cache=c, **lengths).forward_tokens.item() for c in ("lasting", *REFRESHING)
    }
    assert tokens["lasting+prompt"] == tokens["lasting"] + 3 * 6  # each block but the first
    assert tokens["lasting+whole"] == tokens["lasting"] + 22 - (2 + 4)  # the third block
    exact = rollout(model, ids, mask, **lengths | {"sampler": "exact"})
    assert torch.all(exact.forward_tokens == 8 * 22)
