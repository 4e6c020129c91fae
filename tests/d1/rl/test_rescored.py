"""A row of each rollout is scored again: what its sampler gave passes, anything else is an error or a warning."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from d1.rl.batch import record_and_costs
from d1.rl.engines import STATES, states_of
from tests.tiny_grpo import make_method

NUCLEUS = {"temperature": 1.0, "top_p": 0.8, "score_as_sampled": True}
HOW = {"exact": {}, "nucleus": NUCLEUS, "parallel": {"sampler": "parallel", "reveal_level": 0.3}, "blocks": {}}


def sampled(trainer):
    """A rollout of the trainer's own, as `check_scores` reads it."""
    ids, mask = trainer.padded(trainer.encoded([row["prompt"] for row in trainer.train_dataset][:4]))
    return {"prompt_ids": ids, "prompt_mask": mask, **record_and_costs(trainer.sample(ids, mask))[0]}


def check(trainer, batch, exact=True, certain=True):
    rows = range(len(batch["canvas_ids"]))
    trainer.check_scores(batch, rows, lambda row: f"engine, row {row}: ", exact, certain)


def changed(batch, name, change):
    return {**batch, name: change(batch[name])}


@pytest.mark.parametrize("case", HOW)
def test_what_the_model_sampled_passes_and_anything_else_does_not(tiny_model_dir, tiny_block_dir, tmp_path, case):
    model = tiny_block_dir if case == "blocks" else tiny_model_dir
    trainer = make_method(model, tmp_path, "d1", eos_stop=False, **HOW[case])
    batch = sampled(trainer)
    before = trainer.compute.item(), torch.get_rng_state(), trainer.model.training
    check(trainer, batch)
    assert trainer.compute.item() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert trainer.model.training == before[2]
    wrong = {
        "canvas_ids": lambda ids: torch.where(batch["reveal_steps"] == 0, (ids + 1) % 50 + 8, ids),
        "reveal_steps": lambda steps: steps.max() - steps,
        "rollout_logps": lambda logps: logps - 0.02,
        "rollout_entropies": lambda entropies: entropies + 0.02,
    }
    for name, change in wrong.items():
        with pytest.raises(ValueError, match=re.escape("engine, row 0: the ")):
            check(trainer, changed(batch, name, change))


def test_in_16_bits_small_differences_pass_and_wrong_rows_do_not(tiny_model_dir, tmp_path):
    trainer = make_method(tiny_model_dir, tmp_path, "d1", eos_stop=False)
    batch = sampled(trainer)
    check(trainer, changed(batch, "rollout_logps", lambda logps: logps - 0.1), exact=False)
    with pytest.raises(ValueError, match="other weights, settings or tokens"):
        check(trainer, changed(batch, "rollout_logps", lambda logps: logps * 0.1), exact=False)


@pytest.mark.parametrize("why", ["older weights", "a cache", "guidance"])
def test_where_a_difference_is_expected_it_is_at_most_a_warning(tiny_model_dir, tmp_path, caplog, why):
    changes = {"a cache": {"sampler": "cached"}, "guidance": {"cfg_scale": 1.0}}.get(why, {})
    trainer = make_method(tiny_model_dir, tmp_path, "d1", eos_stop=False, **changes)
    batch = changed(sampled(trainer), "rollout_logps", lambda logps: logps * 0.1)
    with caplog.at_level(logging.WARNING, "d1.rl.trainer"):
        for _ in range(2):
            check(trainer, batch, certain=why != "older weights")
    assert sum("engine, row 0" in message for message in caplog.messages) == (why != "guidance")


def test_every_state_of_a_row_has_its_turn(tiny_model_dir, tiny_block_dir, tmp_path):
    longer = {"max_completion_length": 24, "diffusion_steps": 24}
    for model in (tiny_model_dir, tiny_block_dir):
        trainer = make_method(model, tmp_path, "d1", eos_stop=False, **longer)
        one = {name: column[:1] for name, column in sampled(trainer).items()}
        scored = [states_of(one, trainer.model.config, number).weights for number in range(24)]
        assert all(weights.shape[1] <= STATES for weights in scored)
        assert all((weights.sum(1) <= 1).all() for weights in scored)
        assert torch.stack([weights.sum(1) for weights in scored]).amax(0).min() == 1
