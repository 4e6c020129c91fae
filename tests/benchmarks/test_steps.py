"""Whole steps: the published trainers do what ours do, the bare passes are as many as ours, phases add up."""

import argparse

import pytest
import torch

from benchmarks import clock as clock_module
from benchmarks import rl_steps, sft_steps, steps
from benchmarks.clock import Clock
from benchmarks.random_models import MASK, random_model, random_prompts
from d1.rl.methods import METHODS
from d1.sampling import Rollout
from d1.sampling.settings import SamplingSettings
from d1.scoring.masks import one_step_views

SHAPE = {"size": "tiny", "rows": 4, "prompt": 6, "length": 8, "block": 4, "steps": 4, "mu": 2, "repeats": 1}


def test_a_phase_within_another_stops_its_clock(monkeypatch):
    ticks = iter([(0, 0), (1, 10), (3, 30), (7, 70)])
    monkeypatch.setattr(clock_module, "now", lambda: next(ticks))
    clock = Clock()
    with clock.phase("outer"), clock.phase("inner"):
        pass
    assert clock.wall == {"outer": 1 + 4, "inner": 2}
    assert clock.cpu == {"outer": 10 + 40, "inner": 20}


@pytest.fixture
def rl(tmp_path):
    clock = Clock()
    return rl_steps.rl_trainer(argparse.Namespace(**SHAPE), tmp_path, clock), clock


def test_the_published_pieces_sample_and_score_as_ours():
    model, rows, prompt = random_model("tiny"), 4, 6
    ids, mask = random_prompts(model, rows, prompt)
    mask[0, :3] = 0
    settings = SamplingSettings(gen_length=8, block_length=4, steps=4)
    completions, _ = random_prompts(model, rows, 5)  # shorter than the canvas
    noise = torch.rand(rows, prompt, generator=torch.Generator().manual_seed(0)) < 0.3
    views = one_step_views(noise, torch.ones_like(completions, dtype=torch.bool), 8)
    found = {}
    for way, (sample, score) in rl_steps.WAYS.items():
        with torch.no_grad():
            scores = score(model, ids, mask, completions, views, mask_token_id=MASK, gen_length=8)
        found[way] = sample(model, ids, mask, settings, mask_token_id=MASK).ids, scores.logps
    assert torch.equal(found["ours"][0], found["published"][0])
    torch.testing.assert_close(found["ours"][1], found["published"][1], rtol=0, atol=1e-5)


def count_passes(model, run):
    passes = []
    hook = model.base_model.register_forward_hook(lambda module, args, output: passes.append(module.training))
    run()
    hook.remove()
    return len(passes)


def test_the_bare_passes_of_rl_are_as_many_as_ours(rl):
    ours, clock = rl
    work = []
    counted = count_passes(ours.model, lambda: work.append(rl_steps.train_rl(ours, "ours", clock)))
    bare = count_passes(ours.model, lambda: rl_steps.bare_rl(ours, work[0], clock))
    assert bare == counted == 4 + 2 + 2  # sampling steps, old log-probs, updates; the reference is another model
    assert all(parameter.grad is None for parameter in ours.model.parameters())


@pytest.mark.parametrize("method", ["espo", "cj-grpo"])
def test_the_bare_passes_of_a_method_feed_the_same_rows(method, tmp_path):
    clock, work = Clock(), []
    changes = METHODS[method].values | {"num_iterations": 2, "views_at_once": 2}
    ours = rl_steps.rl_trainer(argparse.Namespace(**SHAPE), tmp_path, clock, method=method, **changes)
    fed = rows_fed(ours.model, lambda: work.append(rl_steps.train_rl(ours, "ours", clock)))
    assert sorted(rows_fed(ours.model, lambda: rl_steps.bare_rl(ours, work[0], clock))) == sorted(fed)
    assert max(fed) > 4  # views of more than one row in a pass


def rows_fed(model, run):
    fed = []
    body = model.base_model
    hook = body.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    run()
    hook.remove()
    return fed


def test_the_bare_rollout_leaves_out_rows_that_have_ended(rl):
    ours, clock = rl
    ids, mask = random_prompts(ours.model, 4, 6 + 8)
    ids[1:, 6 + 2] = ours.processing_class.eos_token_id  # in the first block, in three of the four rows
    nothing = mask[:, 0]
    work = rl_steps.Work([(mask[:, :6], Rollout(ids, nothing, nothing, nothing, nothing, nothing))])
    for stop, fed in ((True, [4, 4, 1, 1]), (False, [4, 4, 4, 4])):
        ours.eos_stop = stop
        assert rows_fed(ours.model, lambda: rl_steps.bare_rl(ours, work, clock))[:4] == fed


def entered(trainer, monkeypatch, run):
    counts, autocast = [], trainer.accelerator.autocast
    monkeypatch.setattr(trainer.accelerator, "autocast", lambda *a, **k: counts.append(1) or autocast(*a, **k))
    run()
    return len(counts)


def test_the_bare_passes_run_in_the_trainers_precision(rl, tmp_path, monkeypatch):
    ours, clock = rl
    work = rl_steps.train_rl(ours, "ours", clock)
    assert entered(ours, monkeypatch, lambda: rl_steps.bare_rl(ours, work, clock)) == 1 + 1 + 2
    tuned = sft_steps.sft_trainer(sft_steps.dLLMTrainer, argparse.Namespace(**SHAPE), tmp_path, clock)
    tuned.train()
    assert entered(tuned, monkeypatch, lambda: sft_steps.bare_sft(tuned, clock)) == 2


def test_the_published_sft_trainer_has_our_loss(tmp_path):
    shape, clock = argparse.Namespace(**SHAPE), Clock()
    ours = sft_steps.sft_trainer(sft_steps.dLLMTrainer, shape, tmp_path, clock)
    theirs = sft_steps.sft_trainer(sft_steps.PublishedSFT, shape, tmp_path, clock)
    ours.train()
    theirs.train()
    assert len(ours.seen) == len(theirs.seen) == 2
    assert theirs.seen[0]["input_ids"].shape == (4, 14)  # filled to max_length
    for inputs in ours.seen:
        with torch.no_grad():
            same = [trainer.row_losses(ours.model, inputs) for trainer in (ours, theirs)]
        torch.testing.assert_close(*same, check_dtype=False)
    assert count_passes(ours.model, lambda: sft_steps.bare_sft(ours, clock)) == 2


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_phases_add_up_to_the_whole(kind):
    found = steps.race_steps(argparse.Namespace(**SHAPE, what=kind))
    assert set(found["results"]) == {"ours", "bare", "published"}
    for way, row in found["results"].items():
        total = sum(phase[way] for phase in found["seconds by phase"].values() if way in phase)
        assert total == pytest.approx(row["cpu_seconds" if not torch.cuda.is_available() else "wall_seconds"])
    phases = {"trainer", "update", "optimizer"} | (
        {"bookkeeping", "rollout", "scoring", "rewards"} if kind == "rl" else {"batches"}
    )
    assert set(found["seconds by phase"]) == phases
    share = found["results"]["bare"]["cpu_seconds"] / found["results"]["ours"]["cpu_seconds"]
    if not torch.cuda.is_available():
        assert f"{share:.1%}" in found["remarks"][0]
