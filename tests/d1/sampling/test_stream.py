"""Sampling from a stream of prompts: what a fixed batch gives, by fewer passes, with the batch full."""

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import SamplingSettings, rollout, rollout_stream
from tests.d1.sampling.reference import MASK, SAMPLERS, make_prompts, sharper

WIDTHS = [9, 9, 8, 6, 5, 5, 3, 2, 1]
ENDS = list(range(4, 12))
WITHOUT_CACHE = [sampler for sampler in SAMPLERS if "cached" not in sampler["sampler"]]
FULL = [("llama", sampler) for sampler in SAMPLERS] + [("Dream", sampler) for sampler in SAMPLERS[:5]]
FULL += [(kind, SAMPLERS[0]) for kind in ("llada", "gemma2", "bert")]
BLOCKS = [(kind, sampler) for kind in ("sdar", "Fast_dLLM_Qwen") for sampler in WITHOUT_CACHE]
CHOICES = [  # settings beyond the sampler's, and what the EOS stop looks for
    ({}, None),
    ({"temperature": 0.8}, ENDS),
    ({"temperature": 0.8, "cfg_scale": 0.5}, ENDS),
    ({"temperature": 0.8, "remasking": "random"}, ENDS),
]


def generators(rows):
    return [keyed_generator(3, row) for row in range(rows)]


def stream(model, ids, mask, settings, batch_size, ends):
    """Every row's record, as one `rollout` of all rows would give it, and the order in which the rows ended."""
    prompts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
    taken = zip(prompts, generators(len(prompts)), strict=True)
    options = {"batch_size": batch_size, "mask_token_id": MASK, "eos_token_ids": ends}
    found = {}
    for numbers, part in rollout_stream(model, taken, settings, **options):
        for place, number in enumerate(numbers):
            found[number] = {name: values[place] for name, values in vars(part).items()}
            found[number]["ids"] = found[number]["ids"][part.ids.shape[1] - settings.gen_length :]
    assert sorted(found) == list(range(len(prompts)))
    return {name: torch.stack([found[row][name] for row in sorted(found)]) for name in found[0]}, list(found)


@pytest.mark.parametrize(("kind", "sampler"), [*FULL, *BLOCKS], ids=str)
def test_rows_are_those_of_a_fixed_batch(kind_dirs, kind, sampler):
    model = sharper(load_model(kind_dirs[kind]))
    own = getattr(model.config, "block_size", None)
    ids, mask = make_prompts(WIDTHS, 0)
    for fields, ends in CHOICES:
        if fields.get("remasking") and "parallel" in sampler["sampler"]:
            continue
        for length, block, steps in [(11, own or 4, 7), (12, own or 4, 12)]:
            settings = SamplingSettings(length, block, steps, **fields, **sampler)
            expected = rollout(
                model, ids, mask, settings, mask_token_id=MASK, generator=generators(len(ids)), eos_token_ids=ends
            )
            got, _ = stream(model, ids, mask, settings, 4, ends)
            case = f"{fields} {ends} {length}"
            assert torch.equal(got["ids"], expected.ids[:, ids.shape[1] :]), case
            for name in ("reveal_steps", "passes", "forward_tokens"):
                assert torch.equal(got[name], getattr(expected, name)), f"{name}: {case}"
            for name in ("logps", "entropies"):
                torch.testing.assert_close(got[name], getattr(expected, name), rtol=0, atol=2e-5)
            if ends:
                assert len(got["passes"].unique()) > 1, "no row ended before another: the test shows little"
