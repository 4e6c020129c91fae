"""What a rollout source may be asked for: canvases to continue from."""

import pytest
import torch

from d1 import extensions
from d1.masking import keyed_generator
from d1.models import load_model
from d1.rl.config import DiffuGRPOConfig
from d1.rl.sources import LocalRollouts, RolloutRequest, require_continuing
from d1.sampling import RolloutStart, SamplingSettings, rollout
from tests.tiny_grpo import make_trainer


def test_the_trainers_own_model_continues_rollouts_in_batches(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, rollout_batch_size=2, temperature=0.7, block_length=4)
    ids = torch.randint(5, 20, (3, 6), generator=keyed_generator(1))
    mask, keys = torch.ones_like(ids), [(7, row) for row in range(3)]
    whole = trainer.sample(ids, mask, keys)
    mask_id = trainer.mask_token_id
    start = RolloutStart.from_rollout(whole, 3, mask_id)
    assert trainer.source.can_continue
    before = trainer.computed_tokens.clone()
    found = trainer.source.sample(RolloutRequest(ids, mask, keys, start=start))
    for row in range(3):
        own = [keyed_generator(7, row)]
        options = {"mask_token_id": mask_id, "generator": own, "eos_token_ids": trainer.stop_token_ids or None}
        alone = rollout(
            trainer.model,
            ids[[row]],
            mask[[row]],
            trainer.sampling,
            start=start.select([row]),
            **options,
        )
        assert torch.equal(found.ids[[row]], alone.ids)
        assert torch.equal(found.reveal_steps[[row]], alone.reveal_steps)
    # What was there stays, with its record.
    there = start.reveal_steps >= 0
    assert there.any()
    for name in ("reveal_steps", "logps", "entropies"):
        assert torch.equal(getattr(found, name)[there], getattr(whole, name)[there])
    again = trainer.sample(ids, mask, keys, start=start)
    assert torch.equal(again.ids, found.ids)
    assert trainer.computed_tokens - before == again.forward_tokens.sum()


def test_sources_that_cannot_continue_are_refused_at_the_set_up(tiny_model_dir, tmp_path):
    config = load_model(tiny_model_dir).config
    args = DiffuGRPOConfig(output_dir=str(tmp_path), report_to="none", block_length=4)
    settings = args.sampling_settings(config)
    require_continuing(LocalRollouts(), settings, config, "--branches")
    user = extensions.UserRollouts(lambda prompts, trainer: {}, args, config)
    sources = {
        "rollout_mode server": [extensions.ServerRollouts(), extensions.PrefetchedRollouts()],
        "a rollout_func": [user],
    }
    for name, cannot in sources.items():
        for source in cannot:
            with pytest.raises(ValueError, match=f"^--branches continues rollouts, and {name} cannot: let the trainer"):
                require_continuing(source, settings, config, "--branches")
    edits = SamplingSettings(8, 4, 8, sampler="parallel", edit_threshold=0.6)
    with pytest.raises(ValueError, match=r"^--branches: sampling cannot continue from .*: edit_threshold and"):
        require_continuing(LocalRollouts(), edits, config, "--branches")
