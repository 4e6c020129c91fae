"""RL with the choice of places in the likelihood: ratios, forward passes, records, weights of trajectories."""

import pytest
import torch

from d1.rl.bridge import rollout_buffer
from d1.rl.config import DiffuGRPOConfig
from d1.scoring.views import hidden_states  # noqa: F401
from tests.rounding import LOGITS, rounding
from tests.tiny_grpo import SETTINGS, logged, make_trainer

OWN = {"estimator": "places", "objective": "clipped_places", "loss_type": "sum", "scored_tokens": "completed"}
OWN |= {"p_mask_prompt": 0.0, "beta": 0.0, "block_length": 4, "max_completion_length": 8, "diffusion_steps": 8}
FAST = {"sampler": "parallel", "reveal_level": 0.05}
GUMBEL = {"remasking": "gumbel", "order_temperature": 0.5}


def trained(model_dir, folder, **changes):
    trainer = make_trainer(model_dir, folder, **(OWN | {"max_steps": 2} | changes))
    trainer.train()
    return trainer


@pytest.mark.parametrize("sampler", [{}, FAST, GUMBEL, FAST | GUMBEL, {"temperature": 0.7, "top_k": 8}], ids=str)
def test_ratios_start_at_one_and_no_step_is_impossible(tiny_model_dir, tmp_path, sampler):
    """Two updates per rollout: the first has ratio 1, the second one another. The record has no more than replay's,
    except for the ranks of an order with noise."""
    trainer = trained(
        tiny_model_dir, tmp_path, max_steps=4, learning_rate=0.01, lr_scheduler_type="constant", **sampler
    )
    first, second, third, _ = logged(trainer)
    assert first["clip_ratio/region_mean"] == 0
    assert [first["ratio_max"], third["ratio_max"]] == pytest.approx([1.0, 1.0], abs=rounding(LOGITS))
    assert second["ratio_max"] > 1.001
    assert first["places/dropped"] == first["places/impossible"] == 0
    assert first["places/nll"] > 0
    batch = rollout_buffer(trainer)[0]
    extra = {"reveal_ranks"} if "remasking" in sampler else set()
    assert {"reveal_ranks", "step_logps"} & batch.keys() == extra


def test_no_forward_pass_more_than_replay(tiny_model_dir, tmp_path):
    """The same rollouts and, in the update, as many rows through the transformer."""
    counts = {}
    for name, own in (("places", OWN), ("replay", OWN | {"estimator": "replay", "objective": "clipped_views"})):
        trainer = make_trainer(tiny_model_dir, tmp_path / name, **(own | {"max_steps": 1, "num_iterations": 1}))
        rows = []
        trainer.model.base_model.register_forward_pre_hook(
            lambda body, args, kwargs, rows=rows: rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        trainer.train()
        counts[name] = sum(rows), len(rows), logged(trainer)[0]["compute_tokens"]
    assert counts["places"] == counts["replay"]


@pytest.mark.parametrize("cached", [False, True])
def test_the_weight_of_a_trajectory_is_one_for_exact_states_and_logged_for_a_cache(tiny_model_dir, tmp_path, cached):
    sampler = {"sampler": "cached+parallel", "kv_cache": "dual", "reveal_level": 0.05} if cached else FAST
    trainer = trained(tiny_model_dir, tmp_path, max_steps=1, trajectory_weight_cap=2.0, learning_rate=0.0, **sampler)
    (entry,) = logged(trainer)
    if not cached:
        assert entry["places/log_weight"] == pytest.approx(0.0, abs=1e-4)
        assert entry["places/effective"] == pytest.approx(1.0, abs=1e-4)
        assert entry["places/no_support"] == 0
    else:
        assert abs(entry["places/log_weight"]) > 1e-3 or entry["places/no_support"] > 0
        assert entry["places/effective"] < 0.9999
    # log_places measures the same for a method that scores no places, and changes nothing of its training.
    plain = {"estimator": "replay", "objective": "clipped_views", "trajectory_weight_cap": None}
    how = {"max_steps": 1, **sampler, **plain}
    one, other = (trained(tiny_model_dir, tmp_path / str(log), log_places=log, **how) for log in (False, True))
    for name in ("places/nll", "places/tokens_nll", "places/effective", "places/no_support"):
        assert logged(other)[0][name] == pytest.approx(entry[name], rel=1e-3, abs=1e-4)
    for parameter, same in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(parameter, same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "clipped_views"}, "scored and read by --estimator places --objective clipped_places"),
        ({"estimator": "replay"}, "scored and read by --estimator places --objective clipped_places"),
        ({"scored_tokens": "ended"}, "set --scored_tokens completed, canvas"),
        ({"temperature": 0.0}, "temperature above 0|at temperature 0"),
        ({"num_views": 2, "trajectory_weight_cap": 2.0}, "leave num_views out"),
        ({"segment_steps": 2}, "the estimator places does not read it"),
        ({"score_as_sampled": True}, "places always scores under the distribution"),
        (FAST | GUMBEL | {"reveal": "factor"}, "known for the rules threshold"),
        ({"order_temperature": 0.3}, "order_temperature would be ignored by remasking low_confidence: choose gumbel"),
        (FAST | {"edit_threshold": 0.6, "trajectory_weight_cap": 2.0}, "has no token to record"),
    ],
)
def test_settings_without_a_probability_of_places_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        DiffuGRPOConfig(**(SETTINGS | {"output_dir": str(tmp_path)} | OWN | change))
