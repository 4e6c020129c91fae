"""Sampling from a stream of prompts: the results of a fixed batch, with fewer passes, because the batch stays full."""

import pytest
import torch

from d1.masking import keyed_generator
from d1.sampling import SamplingSettings, rollout, rollout_stream
from d1.sampling.stream import RowRequest, Stream
from tests.d1.sampling.reference import EDITORS, MASK, SAMPLERS, SHARP_LOGITS, WITHOUT_CACHE, make_prompts
from tests.rounding import rounding

WIDTHS = [9, 9, 8, 6, 5, 5, 3, 2, 1]
ENDS = list(range(4, 20))
FULL = [("llama", sampler) for sampler in SAMPLERS]
FULL += [("Dream", sampler) for sampler in SAMPLERS if "cached" in sampler["sampler"]]  # predicts the next token
FULL += [(kind, SAMPLERS[0]) for kind in ("llada", "Dream", "gemma2", "bert")]
FULL += [(kind, editor) for kind in ("llama", "Dream") for editor in EDITORS[1:4]]
BLOCKS = [("sdar", sampler) for sampler in WITHOUT_CACHE]
BLOCKS += [("Fast_dLLM_Qwen", sampler) for sampler in (*SAMPLERS[0:4:3], EDITORS[1])]
CHOICES = [  # length and steps, further settings of the sampler, and the EOS tokens to stop at
    ((11, 7), {}, None),
    ((12, 12), {"temperature": 0.8}, ENDS),
    ((11, 7), {"temperature": 0.8, "cfg_scale": 0.5}, ENDS),
    ((12, 6), {"temperature": 0.8, "remasking": "random"}, ENDS),
]


def generators(rows):
    return [keyed_generator(3, row) for row in range(rows)]


def assert_row(taken, row, expected, number):
    """What two rollouts say of a completion is equal; log-probs and entropies up to rounding."""
    length, names = expected.logps.shape[1], ("ids", "reveal_steps", "logps", "entropies")
    pairs = {name: [getattr(taken, name)[row, -length:], getattr(expected, name)[number, -length:]] for name in names}
    for name in ("passes", "forward_tokens", "edits"):
        pairs[name] = [getattr(taken, name)[row], getattr(expected, name)[number]]
    if expected.writes is not None:
        most = expected.writes.ids.shape[-1]
        for name in ("ids", "steps"):
            written = getattr(taken.writes, name)[row, -length:, :most], getattr(expected.writes, name)[number]
            pairs[f"{name} of writes"] = [*written]
    for name, pair in pairs.items():
        torch.testing.assert_close(
            *pair, rtol=0, atol=2.5 * rounding(SHARP_LOGITS) if name in ("logps", "entropies") else 0
        )


@pytest.mark.parametrize(("kind", "sampler"), [*FULL, *BLOCKS], ids=str)
def test_rows_are_those_of_a_fixed_batch(load, kind, sampler):
    model = load(kind)
    own = getattr(model.config, "block_size", None)
    ids, mask = make_prompts(WIDTHS, 0)
    early = 0
    for (length, steps), fields, ends in CHOICES:
        if fields.get("remasking") and "parallel" in sampler["sampler"]:
            continue
        settings = SamplingSettings(length, own or 4, steps, **fields, **sampler)
        options = {"mask_token_id": MASK, "eos_token_ids": ends}
        expected = rollout(model, ids, mask, settings, generator=generators(len(ids)), **options)
        prompts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
        asked = zip(prompts, generators(len(ids)), strict=True)
        ended = []
        for numbers, part in rollout_stream(model, asked, settings, batch_size=4, **options):
            ended += numbers
            for index, number in enumerate(numbers):
                assert_row(part, index, expected, number)
        assert sorted(ended) == list(range(len(ids)))
        early += len(expected.passes.unique()) > 1
    assert early, "no row ended before another: the test shows little"


def test_the_batch_is_full_until_no_prompt_is_left_and_no_wider_than_its_prompts(load):
    model = load("llama")
    ids, mask = make_prompts(sorted(WIDTHS * 4, reverse=True), 1)
    settings = SamplingSettings(12, 4, 12, temperature=0.8, **SAMPLERS[3])
    computed, working, left = [], {}, list(range(len(ids)))

    def prompts():
        while left:
            row = left.pop(0)
            working[row] = int(mask[row].sum())
            assert len(working) <= 5, "a prompt was taken before there was room for it"
            yield ids[row][mask[row].bool()].tolist(), keyed_generator(3, row)

    def count(backbone, args, kwargs):
        computed.append(tuple(kwargs["input_ids"].shape))
        if left:
            assert computed[-1] == (5, max(working.values()) + 12)

    options = {"mask_token_id": MASK, "eos_token_ids": ENDS}
    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    order = []
    for numbers, _ in rollout_stream(model, prompts(), settings, batch_size=5, **options):
        order += numbers
        for number in numbers:
            del working[number]
    assert order != sorted(order) == list(range(len(ids)))
    hook.remove()


def test_what_makes_no_sense_is_refused(load):
    model, given = load("sdar"), {"batch_size": 2, "mask_token_id": MASK}
    with pytest.raises(ValueError, match="block_length must be 4, not 3"):
        rollout_stream(model, [], SamplingSettings(6, 3, 6), **given)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        rollout_stream(model, [], SamplingSettings(8, 4, 8), **given | {"batch_size": 0})
    asked = [([5], keyed_generator(0)), ([6], None)]
    with pytest.raises(ValueError, match="prompt 1 of the stream has no generator"):
        list(rollout_stream(model, asked, SamplingSettings(8, 4, 8, temperature=1.0), **given))


EDITING_FIELDS = ("edit_threshold", "max_post_steps")  # which caches refuse
# Length, steps and what else rows of one stream differ in, but for the cache and guidance.
MIXED = [
    ((12, 12), {"temperature": 0.8}, ENDS),
    ((5, 3), {"temperature": 0.8, "top_k": 7, "record_as_sampled": True}, None),
    ((9, 6), {}, ENDS[3:]),
    ((16, 10), {"temperature": 1.3, "sampler": "parallel", "reveal": "factor"}, ENDS[:2]),
    ((4, 4), {"temperature": 0.5, "remasking": "random"}, None),
    ((13, 13), {"sampler": "parallel"}, ENDS),
    ((10, 7), {"temperature": 0.9, "remasking": "entropy"}, None),
    ((14, 9), {"sampler": "parallel", "reveal_level": 0.3, "edit_threshold": 0.2, "max_post_steps": 2}, ENDS),
]


@pytest.mark.parametrize("guidance", [0.0, 0.5])
@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        *((k, None) for k in ("llama", "Dream", "bert", "sdar", "Fast_dLLM_Qwen")),
        *(("Dream", cache) for cache in ("dual", "prefix", "delayed", "lasting")),
    ],
)
def test_rows_of_any_lengths_and_settings_share_a_batch(load, kind, cache, guidance):
    """Each is what `rollout` gives for it alone, also where others arrive and are dropped in the meantime."""
    model = load(kind)
    own = getattr(model.config, "block_size", None)
    ids, mask = make_prompts(WIDTHS * 3, 0)
    asked = []
    for number, (row, real) in enumerate(zip(ids, mask, strict=True)):
        (length, steps), fields, ends = MIXED[number % len(MIXED)]
        sampler = {"exact": "cached", "parallel": "cached+parallel"} if cache else {}
        name = fields.get("sampler", "exact")
        fields = {field: value for field, value in fields.items() if not cache or field not in EDITING_FIELDS}
        fields = fields | {"sampler": sampler.get(name, name), "kv_cache": cache, "cfg_scale": guidance}
        settings = SamplingSettings(length, own or 2 + number % 4, steps, **fields)
        prompt, generator = row[real.bool()].tolist(), keyed_generator(3, number)
        asked.append(RowRequest(number, prompt, settings, generator, tuple(ends or ())))
    stream, found, left = Stream(model, mask_token_id=MASK, cache=cache, guided=guidance > 0), {}, [*asked]
    dropped, turns = {4, 17}, 0
    while left or len(stream):
        if done := stream.pop_finished(dropped if turns > 6 else ()):
            found |= {number: (done[1], index) for index, number in enumerate(done[0])}
        stream.add_rows([left.pop(0) for _ in range(min(len(left), turns % 3, 5 - len(stream)))])
        # The record is as wide as the rows at work need, also after a row with editing has left.
        needed = max((asked[row.number].settings.max_writes for row in stream.rows), default=1)
        assert stream.record.shape[-1] == needed
        for _ in stream.steps() if len(stream) else ():
            if not stream.cache.together:
                break  # after any step
        turns += 1
    assert {*range(len(asked))} - {*found} <= dropped
    for number, (part, index) in found.items():
        one, own = asked[number], [keyed_generator(3, number)]
        options = {"mask_token_id": MASK, "generator": own, "eos_token_ids": one.eos_token_ids or None}
        prompt = torch.tensor([one.ids])
        alone = rollout(model, prompt, torch.ones_like(prompt), one.settings, **options)
        assert_row(part, index, alone, 0)
