"""Whole steps: the published trainers do what ours do, the bare passes are as many as ours, phases add up."""

import argparse

import pytest
import torch

from benchmarks import steps
from benchmarks.machine import random_prompts

SHAPE = {"size": "tiny", "rows": 4, "prompt": 6, "length": 8, "block": 4, "steps": 4, "mu": 2, "repeats": 1}


def make(kind, way, folder):
    clock = steps.Clock()
    trainer = (steps.rl_trainer if kind == "rl" else steps.sft_trainer)(way, argparse.Namespace(**SHAPE), folder, clock)
    return trainer, clock


def test_a_phase_within_another_stops_its_clock(monkeypatch):
    ticks = iter([(0, 0), (1, 10), (3, 30), (7, 70)])
    monkeypatch.setattr(steps, "now", lambda: next(ticks))
    clock = steps.Clock()
    with clock.phase("outer"), clock.phase("inner"):
        pass
    assert clock.wall == {"outer": 1 + 4, "inner": 2}
    assert clock.cpu == {"outer": 10 + 40, "inner": 20}


@pytest.fixture
def rl(tmp_path):
    return make("rl", steps.DiffuGRPOTrainer, tmp_path), make("rl", steps.PublishedRL, tmp_path)


def test_the_published_rl_trainer_samples_and_scores_as_ours(rl):
    (ours, _), (theirs, _) = rl
    ids, mask = random_prompts(ours.model, 4, 6)
    mask[0, :3] = 0
    ours.args.temperature = theirs.args.temperature = 0.0
    ours.model.train(), theirs.model.train()  # an evaluation scores one mask
    sampled = ours._sample(ids, mask).ids
    torch.testing.assert_close(theirs._sample(ids, mask).ids[:, -8:], sampled[:, -8:])
    completions, _ = random_prompts(ours.model, 4, 5)  # shorter than the canvas
    noise = torch.rand(4, 2, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    for noises in (noise, noise[:, 1]):
        scores = []
        for trainer in (ours, theirs):
            trainer._prompt_noise = noises
            both = torch.cat([ids, completions], dim=1), torch.cat([mask, torch.ones_like(completions)], dim=1)
            with torch.no_grad():
                scores.append(trainer._get_per_token_logps_and_entropies(trainer.model, *both, 5)[0])
        torch.testing.assert_close(*scores, rtol=0, atol=1e-5)


def count_passes(model, run):
    passes = []
    hook = model.base_model.register_forward_hook(lambda module, args, output: passes.append(module.training))
    run()
    hook.remove()
    return len(passes)


def test_the_bare_passes_of_rl_are_as_many_as_ours(rl):
    (ours, clock), _ = rl
    counted = count_passes(ours.model, ours.train)
    bare = count_passes(ours.model, lambda: steps.bare_rl(ours, clock))
    assert bare == counted == 4 + 2 + 2  # sampling steps, old log-probs, updates; the reference is another model
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def rows_fed(model, run):
    fed = []
    body = model.base_model
    hook = body.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    run()
    hook.remove()
    return fed


def test_the_bare_rollout_leaves_out_rows_that_have_ended(rl, monkeypatch):
    (ours, clock), _ = rl
    sample = ours._sample

    def ends_early(ids, mask):
        sampled = sample(ids, mask)
        sampled.ids[1:, :] = 5
        sampled.ids[1:, 2] = ours._tokenizer.eos_token_id  # in the first block, in three of the four rows
        return sampled

    monkeypatch.setattr(ours, "_sample", ends_early)
    ours.train()
    ours.eos_stop = True
    assert rows_fed(ours.model, lambda: steps.bare_rl(ours, clock))[:4] == [4, 4, 1, 1]
    ours.eos_stop = False
    assert rows_fed(ours.model, lambda: steps.bare_rl(ours, clock))[:4] == [4, 4, 4, 4]


def entered(trainer, monkeypatch, run):
    counts, autocast = [], trainer.accelerator.autocast
    monkeypatch.setattr(trainer.accelerator, "autocast", lambda *a, **k: counts.append(1) or autocast(*a, **k))
    run()
    return len(counts)


def test_the_bare_passes_run_in_the_trainers_precision(rl, tmp_path, monkeypatch):
    (ours, clock), _ = rl
    ours.train()
    assert entered(ours, monkeypatch, lambda: steps.bare_rl(ours, clock)) == 1 + 1 + 2  # rollout, scoring, updates
    tuned, clock = make("sft", steps.dLLMTrainer, tmp_path)
    tuned.train()
    assert entered(tuned, monkeypatch, lambda: steps.bare_sft(tuned, clock)) == 2


def test_the_published_sft_trainer_has_our_loss(tmp_path):
    (ours, clock), (theirs, _) = make("sft", steps.dLLMTrainer, tmp_path), make("sft", steps.PublishedSFT, tmp_path)
    ours.train()
    theirs.train()
    assert len(ours.seen) == len(theirs.seen) == 2
    assert theirs.seen[0]["input_ids"].shape == (4, 14)  # filled to max_length
    for inputs in ours.seen:
        with torch.no_grad():
            same = [trainer.row_losses(ours.model, inputs) for trainer in (ours, theirs)]
        torch.testing.assert_close(*same, check_dtype=False)
    assert count_passes(ours.model, lambda: steps.bare_sft(ours, clock)) == 2


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_phases_add_up_to_the_whole(kind, tmp_path):
    found = steps.race_steps(kind, argparse.Namespace(**SHAPE), tmp_path)
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
