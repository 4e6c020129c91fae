"""Every sampler on a simulated device without visible data: a run's numbers, and waits for the device only where
listed."""

from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import Rollout, SamplingSettings, fill, rollout
from d1.sampling.caches import CACHES
from d1.sampling.reveal import RULES
from tests.d1.conftest import write_kind
from tests.d1.sampling.reference import MASK, SAMPLERS, make_prompts, sharper
from tests.rehearsal.device import DEVICE, rehearsal
from tests.rehearsal.waits import INFILL, SAMPLING, expected, places

LENGTHS = {"gen_length": 12, "block_length": 4, "steps": 9}
ENDS = list(range(4, 24))  # of 64 tokens: rows end early, and leave
DRAWN = {"temperature": 0.8, "cfg_scale": 0.5}
CASES: list[Any] = [  # kind of model, settings, what ends a row
    *(("llada", sampler | DRAWN, ENDS) for sampler in SAMPLERS),
    *(("llada", sampler, None) for sampler in SAMPLERS[::3]),
    ("llada", {"remasking": "random", "temperature": 0.8}, ENDS),
    *(("Dream", sampler | DRAWN, ENDS) for sampler in SAMPLERS[2:4]),  # which predicts the next token
    ("sdar", DRAWN, ENDS),  # block-causal, with the cache of its finished blocks
    ("sdar", {"sampler": "parallel", "temperature": 0.8}, ENDS),
    ("sdar", {"sampler": "parallel", "reveal": "entropy"}, None),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp("rehearsed") / kind for kind in ("llada", "Dream", "sdar")}
    return {kind: sharper(load_model(write_kind(folder, kind))) for kind, folder in folders.items()}


def test_every_sampler_cache_and_rule_is_among_them():
    chosen = [SamplingSettings(**LENGTHS, **settings) for _, settings, _ in CASES]
    assert {settings.cache for settings in chosen} == {None, *CACHES}
    assert {settings.rule for settings in chosen} == {None, *RULES}


def assert_same(rehearsed, real):
    for field in fields(Rollout)[:-1]:  # without `writes`
        found = getattr(rehearsed, field.name)
        assert found.device == DEVICE
        assert torch.equal(found.numbers, getattr(real, field.name)), field.name


def finished_blocks(reveal_steps, widths, blocks):
    """The number of filled blocks that are not the last: of all rows together, or of the rows whose `blocks` begin
    together."""
    after = [width % 4 if blocks else 0 for width in widths]
    count = 0
    for own in set(after):
        rows = [row for row, other in enumerate(after) if other == own]
        ends = range(4 - own, 12, 4)
        count += sum((reveal_steps[rows, max(end - 4, 0) : end] >= 0).any().item() for end in ends)
    return count


@pytest.mark.parametrize(("kind", "settings", "ends"), CASES, ids=range(len(CASES)))
def test_a_rollout_waits_where_listed_and_gives_a_runs_numbers(models, kind, settings, ends):
    widths = [6, 3, 4, 6] if ends else [6, 6, 6, 6]  # with padding and without
    ids, mask = make_prompts(widths, 1)

    def run(device):
        generators = [keyed_generator(1, row, device=device) for row in range(4)]
        model, calls = deepcopy(models[kind]).to(device, non_blocking=True), []
        model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
        given = [part.to(device, non_blocking=True) for part in (ids, mask)]
        options = {"mask_token_id": MASK, "generator": generators, "eos_token_ids": ends}
        return rollout(model, *given, **LENGTHS, **settings, **options), len(calls)

    with rehearsal(places(SAMPLING)) as waits:
        rehearsed, passes = run(DEVICE)
    with sdpa_kernel(SDPBackend.MATH):
        real, _ = run("cpu")
    assert_same(rehearsed, real)
    counts = {"rollout": 1, "rollout of blocks": kind == "sdar"}
    counts |= {"parallel step": passes if "parallel" in settings.get("sampler", "") else 0}
    counts |= {"block": finished_blocks(real.reveal_steps, widths, kind == "sdar") if ends else 0}
    assert waits == expected(SAMPLING, counts)
    assert not ends or (real.reveal_steps < 0).any()  # some row has left


def test_filling_holes_waits_before_its_first_pass_and_after_its_last(models):
    ids, mask = make_prompts([12, 9, 12], 1)
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[0, 2:7] = hidden[1, 5:8] = hidden[2, ::3] = True

    def run(device):
        given = [part.to(device, non_blocking=True) for part in (ids, hidden, mask)]
        return fill(deepcopy(models["llada"]).to(device, non_blocking=True), *given, mask_token_id=MASK, block_length=2)

    with rehearsal(places(INFILL)) as waits:
        rehearsed = run(DEVICE)
    with sdpa_kernel(SDPBackend.MATH):
        assert_same(rehearsed, run("cpu"))
    assert waits == expected(INFILL, {"fill": 1})
