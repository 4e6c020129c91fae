"""RL with uniform noise: ratios start at 1, the sampler's record is the policy's, flips are counted, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import LoraConfig
from trl import ModelConfig

from d1.models import load_model
from d1.models.adapters import lora_targets
from d1.models.kinds import native_config
from d1.rl.bridge import rollout_buffer
from d1.rl.checks import check_config
from d1.rl.config import DiffuGRPOConfig, plan
from d1.rl.train import main
from tests.rounding import LOGITS, TOKENS, assert_near, rounding
from tests.tiny_grpo import SETTINGS, TWO_BATCHES_A_STEP, UNIFORM, assert_same, logged, make_trainer, weights


def trained(tiny_canvas_dir, folder, **changes):
    trainer = make_trainer(tiny_canvas_dir, folder, base=SETTINGS | UNIFORM, **changes)
    trainer.train()
    return trainer, logged(trainer)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"output": "argmax"},
        {"beta": 0.04, "method": "cj-grpo"},
        {"num_views": 2, "objective": "clipped_views", "loss_type": "views"},
        {"scored_tokens": "drawn"},
    ],
    ids=str,
)
def test_ratios_start_at_one_and_the_sampler_is_the_policy(tiny_canvas_dir, tmp_path, changes):
    trainer, logs = trained(tiny_canvas_dir, tmp_path, **changes)
    assert logs[0]["ratio_max"] == pytest.approx(1, abs=rounding(LOGITS))
    assert logs[1]["ratio_max"] > 1.001
    assert logs[0]["accepted/flipped_passes"] == 0
    assert logs[0]["sampling/edits"] > 0
    assert ("num_views" in changes) or logs[0]["sampling/logp_difference_abs"] < rounding(LOGITS)
    batch = rollout_buffer(trainer)[0]
    assert batch["view_shown"].shape[2] == batch["write_ids"].shape[-1] - 1 or "num_views" in changes
    assert batch["view_temperatures"].max() == pytest.approx(0.8)


def test_large_steps_flip_accepted_sets(tiny_canvas_dir, tmp_path):
    _, logs = trained(tiny_canvas_dir, tmp_path, learning_rate=0.3, num_iterations=2)
    assert 0 < logs[1]["accepted/flipped_positions"] <= logs[1]["accepted/flipped_passes"] <= 1


def test_an_adapter_learns_in_both_passes_and_a_resumed_run_equals_an_unbroken_one(tiny_canvas_dir, tmp_path):
    def run(folder, steps, resume=None):
        model = load_model(str(tiny_canvas_dir))
        config = LoraConfig(r=2, target_modules=lora_targets(model, "attention"))
        options = TWO_BATCHES_A_STEP | {"max_steps": steps, "num_iterations": 3, "lr_scheduler_type": "constant"}
        trainer = make_trainer(
            tiny_canvas_dir, folder, base=SETTINGS | UNIFORM, model=model, peft_config=config, **options
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole", 3)
    run(tmp_path / "part", 2)
    assert_same(whole, run(tmp_path / "part", 3, str(tmp_path / "part" / "checkpoint-2")))
    assert all(".decoder.layers." in name for name in weights(whole.model))


def test_micro_batches_add_up_to_the_whole_batch(tiny_canvas_dir, tmp_path):
    found = []
    for size, parts in ((8, 1), (4, 2)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts, "num_iterations": 1}
        options |= {"steps_per_generation": parts, "max_steps": 1, "loss_type": "grpo", "optim": "sgd"}
        found.append(weights(trained(tiny_canvas_dir, tmp_path / str(size), **options)[0].model))
    before = weights(load_model(str(tiny_canvas_dir)))
    for name, weight in found[0].items():
        assert_near(found[1][name], weight, terms=TOKENS)
    assert any((found[0][name] - before[name]).abs().max() > 1e-5 for name in before)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"estimator": "replay"}, "has uniform ids for noise: use accepted"),
        ({"estimator": "one_step"}, "has uniform ids for noise: use accepted"),
        ({"self_conditioning": True}, "self_conditioning false"),
        ({"cfg_scale": 1.0}, "guidance"),
        ({"top_k": 4}, "top_k"),
        ({"top_p": 0.9}, "top_p"),
        ({"temperature": 0.0, "end_temperature": None}, "tempered"),
        ({"sampling_weight_cap": 2.0}, "sampling_weight_cap"),
        ({"mask_id": 3}, "no mask token"),
        ({"score_as_sampled": True}, "score_as_sampled"),
        ({"diffusion_steps": 10}, "multiple of 3"),
        ({"block_length": 2, "diffusion_steps": 12}, "block_length must be 4"),
        ({"sampler": "cached+parallel"}, "needs no cached sampler"),
        ({"remasking": "random"}, "needs remasking low_confidence"),
        ({"tools": ["calculator"]}, "cannot end with a call"),
        ({"rollout_mode": "server", "rollout_server_base_url": ["http://localhost:1"]}, "server"),
    ],
)
def test_what_rl_refuses(tiny_canvas_dir, tmp_path, changes, problem):
    def check():
        args = DiffuGRPOConfig(str(tmp_path), **SETTINGS | UNIFORM | changes)
        check_config(native_config(str(tiny_canvas_dir))[0], 20, args)

    with pytest.raises(ValueError, match=problem):
        check()


def test_models_with_masks_refuse_the_estimator_and_the_plan_counts_passes(tiny_canvas_dir, tiny_model_dir, tmp_path):
    unset = {"end_temperature": None, "output": "argmax", "self_conditioning": True}
    args = DiffuGRPOConfig(str(tmp_path), **SETTINGS | UNIFORM | unset)
    with pytest.raises(ValueError, match="does not fit llama, which has mask tokens"):
        check_config(native_config(str(tiny_model_dir))[0], 20, args)
    args = DiffuGRPOConfig(str(tmp_path), **SETTINGS | UNIFORM)
    numbers = plan(args, 12, check_config(native_config(str(tiny_canvas_dir))[0], 20, args))
    assert numbers["views per completion and update (maximum)"] == 3


def test_the_command_trains_an_adapter_that_loads_again(tiny_canvas_dir, tmp_path):
    task = str(Path(__file__).with_name("letters_task.py"))
    more = {"dataset": task, "model_path": str(tiny_canvas_dir), "output_dir": str(tmp_path / "run"), "report": True}
    args = DiffuGRPOConfig(**SETTINGS | UNIFORM | more)
    main(args, ModelConfig(use_peft=True, lora_r=2, lora_target_modules=["attention"]), None)
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert entries[0]["ratio_max"] == pytest.approx(1, abs=rounding(LOGITS))
    assert (tmp_path / "run" / "report.html").exists()
    names = {name for name, weight in load_model(str(tmp_path / "run")).named_parameters() if "lora_" in name}
    assert len(names) == 2 * (4 + 3 + 3)  # the four projections, of which full layers have no v_proj
    assert all(".decoder.layers." in name for name in names)
