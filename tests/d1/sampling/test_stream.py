"""Sampling from a stream of prompts: what a fixed batch gives, by fewer passes, with the batch full."""

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import SamplingSettings, rollout, rollout_stream
from tests.d1.sampling.reference import MASK, SAMPLERS, make_prompts

WIDTHS = [9, 9, 8, 6, 5, 5, 3, 2, 1]
ENDS = list(range(4, 20))
FULL = [("llama", sampler) for sampler in SAMPLERS]
FULL += [("Dream", sampler) for sampler in SAMPLERS if "cached" in sampler["sampler"]]  # speaks of the next token
FULL += [(kind, SAMPLERS[0]) for kind in ("llada", "Dream", "gemma2", "bert")]
BLOCKS = [("sdar", sampler) for sampler in SAMPLERS if "cached" not in sampler["sampler"]]
BLOCKS += [("Fast_dLLM_Qwen", sampler) for sampler in SAMPLERS[0:4:3]]
CHOICES = [  # length and steps, settings beyond the sampler's, and what the EOS stop looks for
    ((11, 7), {}, None),
    ((12, 12), {"temperature": 0.8}, ENDS),
    ((11, 7), {"temperature": 0.8, "cfg_scale": 0.5}, ENDS),
    ((12, 6), {"temperature": 0.8, "remasking": "random"}, ENDS),
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
    model = load_model(kind_dirs[kind])
    model.get_output_embeddings().weight.data.mul_(4)  # surer, so that rules reveal several tokens
    own = getattr(model.config, "block_size", None)
    ids, mask = make_prompts(WIDTHS, 0)
    early = 0
    for (length, steps), fields, ends in CHOICES:
        if fields.get("remasking") and "parallel" in sampler["sampler"]:
            continue
        settings = SamplingSettings(length, own or 4, steps, **fields, **sampler)
        options = {"mask_token_id": MASK, "generator": generators(len(ids)), "eos_token_ids": ends}
        expected = rollout(model, ids, mask, settings, **options)
        got, _ = stream(model, ids, mask, settings, 4, ends)
        assert torch.equal(got["ids"], expected.ids[:, ids.shape[1] :]), settings
        for name in ("reveal_steps", "passes", "forward_tokens"):
            assert torch.equal(got[name], getattr(expected, name)), f"{name}: {settings}"
        for name in ("logps", "entropies"):
            torch.testing.assert_close(got[name], getattr(expected, name), rtol=0, atol=2e-5)
        early += len(got["passes"].unique()) > 1
    assert early, "no row ended before another: the test shows little"
