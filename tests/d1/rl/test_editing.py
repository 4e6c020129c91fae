"""RL on rollouts with edits: ratios start at 1, final tokens serve the other methods, low thresholds are refused."""

import pytest
import torch

from d1.models import load_model
from d1.rl.bridge import rollout_buffer
from d1.rl.config import DiffuGRPOConfig
from tests.rounding import LOGITS, rounding
from tests.tiny_grpo import SETTINGS, make_trainer

EDITS = {"sampler": "parallel", "reveal_level": 0.3, "edit_threshold": 0.5, "max_post_steps": 3, "temperature": 1.0}
CANVAS = {"max_completion_length": 8, "block_length": 4, "diffusion_steps": 8, "num_iterations": 2, "max_steps": 2}
CANVAS["p_mask_prompt"] = 0.0


@pytest.fixture(params=["tiny_model_dir", "tiny_block_dir"])
def model_dir(request):
    return request.getfixturevalue(request.param)


def trained(model_dir, folder, **changes):
    """The trainer of a finished run and its logged entries; the model is sure enough to reveal and edit early."""
    model = load_model(str(model_dir))
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    trainer = make_trainer(model_dir, folder, model=model, base=SETTINGS | CANVAS | EDITS, **changes)
    trainer.train()
    return trainer, [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "cj-grpo"},
        {"method": "egspo", "num_views": 3},
        {"method": "trajectory", "num_views": 3},
        {"method": "dipo", "right_share": None, "segment_steps": 2},
        {"method": "trajectory", "draw_steps": "uniform", "split_views": True, "loss_type": "views"},
        {"method": "d2"},
    ],
    ids=lambda changes: changes["method"],
)
def test_ratios_of_replay_methods_start_at_one(model_dir, tmp_path, changes):
    trainer, logs = trained(model_dir, tmp_path, **changes, num_iterations=2)
    assert logs[0]["sampling/edits"] > 0
    assert logs[0]["ratio_max"] == pytest.approx(1, abs=rounding(LOGITS))
    if not {"segment_steps"} & changes.keys() and changes["method"] != "d2":
        # Steps are replayed alone, so what the sampler noted for the writes in the loss is the policy's.
        assert logs[0]["sampling/logp_difference_abs"] < rounding(LOGITS)
        assert logs[0]["sampling/ratio_max"] == pytest.approx(1, abs=rounding(LOGITS))
    batch = rollout_buffer(trainer)[0]
    assert batch["write_ids"].shape[-1] == batch["write_steps"].ge(0).sum(-1).max() > 1


@pytest.mark.parametrize("method", ["d1", "espo", "ebpo"])
def test_methods_of_final_tokens_train_on_edited_rollouts(model_dir, tmp_path, method):
    trainer, logs = trained(model_dir, tmp_path, **{"method": method, "num_iterations": 2})
    assert "view_shown" not in rollout_buffer(trainer)[0]
    assert logs[0]["ratio_max"] == pytest.approx(1, abs=rounding(LOGITS))
    assert all(torch.isfinite(torch.tensor(entry["loss"])) for entry in logs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edit_threshold": 0.49}, "edit_threshold 0.49: below 0.5 more than one token can replace a revealed one"),
        ({"editing": "speed", "edit_threshold": None}, "edit_threshold 0: below 0.5"),
        (
            {"method": "rldf", "kv_cache": None},
            "states replays what was written last, and edit_threshold writes more than once",
        ),
        ({"method": "cj-grpo", "sampling_weight_cap": 2.0}, "sampling_weight_cap: replay scores in the sampler's"),
        ({"objective": "rldf", "beta": 0.0, "loss_type": "sum"}, "rldf reads the one step that revealed a token"),
        ({"max_post_steps": 1000}, "max_post_steps"),
    ],
)
def test_what_rl_refuses(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        DiffuGRPOConfig(str(tmp_path), **SETTINGS | CANVAS | EDITS | {"num_iterations": 1} | changes)


def test_quality_is_at_the_lowest_threshold_that_rl_takes(tmp_path):
    values = {"editing": "quality", "edit_threshold": None, "method": "cj-grpo"}
    args = DiffuGRPOConfig(str(tmp_path), **SETTINGS | CANVAS | EDITS | values)
    assert args.sampling_settings().edits == 0.5
    assert args.view_settings().steps == 8 + 2 * 3  # more states than tokens
