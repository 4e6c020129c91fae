"""Rollouts from a copy of the weights with the adapter merged."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import ModelConfig

from d1.commands.footprint import activation_bytes, resident_bytes
from d1.commands.rl_memory import fit_settings, has_room_for_copy
from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.convert import merged_state_dict
from d1.rl.checks import check_model_settings
from d1.rl.config import DiffuGRPOConfig
from d1.rl.sources import RolloutRequest, merges_rollouts
from d1.sampling import rollout
from tests.tiny_grpo import SETTINGS, assert_same, logged, make_trainer, weights

TARGETS = ["q_proj", "v_proj", "down_proj"]
MIXED = {"bf16": True, "use_cpu": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_steps": 0}


def make(model_dir, folder, dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, lora_alpha=64, target_modules=TARGETS)
    model = load_model(str(model_dir), dtype)
    return make_trainer(model_dir, folder, model=model, peft_config=adapter, **(MIXED | changes))


def merged_model(model_dir, trained):
    """A model without an adapter, merged by the function of `d1 merge`'s weights."""
    expected = load_model(str(model_dir), torch.bfloat16)
    # A rollout runs under autocast.
    with torch.autocast("cpu", enabled=False), merged_state_dict(deepcopy(trained)) as state:
        expected.load_state_dict(state)
    return expected


def test_tokens_are_those_of_a_merged_model_and_the_weights_stay(tiny_model_dir, tmp_path):
    trainer = make(tiny_model_dir, tmp_path, merged_rollouts=True, rollout_batch_size=2, temperature=1.0)
    ids = torch.randint(5, 20, (4, 6), generator=keyed_generator(1))
    mask = torch.ones_like(ids)
    for step in range(2):
        with torch.no_grad():  # as an optimizer step does
            for name, weight in trainer.model.named_parameters():
                if "lora_B" in name:
                    weight.add_(torch.randn(weight.shape, generator=keyed_generator(2, step)), alpha=0.2)
        before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
        keys = [(step, row) for row in range(4)]
        found = trainer.source.sample(RolloutRequest(ids, mask, keys))
        assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
        options = {"mask_token_id": trainer.mask_token_id, "eos_token_ids": trainer.stop_token_ids or None}
        expected = merged_model(tiny_model_dir, trainer.model)
        for rows in (slice(0, 2), slice(2, 4)):
            own = [keyed_generator(*key) for key in keys[rows]]
            with trainer.accelerator.autocast():
                alone = rollout(expected, ids[rows], mask[rows], trainer.sampling, generator=own, **options)
            assert torch.equal(found.ids[rows], alone.ids)
            assert torch.equal(found.logps[rows], alone.logps)


def test_every_rollout_has_the_present_weights_and_scores_have_the_trained_ones(tiny_model_dir, tmp_path, monkeypatch):
    seen = []

    def sample(model, *args, **kwargs):
        expected = merged_model(tiny_model_dir, trainer.model).state_dict()
        assert model is not trainer.model
        assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
        seen.append((trainer.state.global_step, trainer.evaluating, model.state_dict()["lm_head.weight"].data_ptr()))
        return rollout(model, *args, **kwargs)

    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "merged_rollouts": True}
    trainer = make(tiny_model_dir, tmp_path, **options)
    trainer.evaluating, evaluate = False, trainer.evaluate

    def evaluation(*args, **kwargs):
        trainer.evaluating = True
        try:
            return evaluate(*args, **kwargs)
        finally:
            trainer.evaluating = False

    trainer.evaluate = evaluation
    monkeypatch.setattr("d1.rl.sources.rollout", sample)
    trainer.train()
    assert {(step, evaluates) for step, evaluates, _ in seen} == {(0, False), (2, True), (2, False), (4, True)}
    assert len({pointer for *_, pointer in seen}) == 1  # one copy
    first = logged(trainer)[0]
    assert first["ratio_max"] == 1.0  # old log-probabilities are those of the trained weights
    assert first["sampling/logp_difference_abs"] > 0  # the sampler's are those of the merged ones


def test_in_fp32_and_on_a_cpu_rollouts_stay_as_they_were(tiny_model_dir, tmp_path):
    runs = []
    for change in ({}, {"merged_rollouts": False}):
        runs.append(make(tiny_model_dir, tmp_path, **change))
        runs[-1].train()
        assert runs[-1].source.merged is None
    assert_same(*runs)
    exact = [make(tiny_model_dir, tmp_path, torch.float32, bf16=False, merged_rollouts=value) for value in (None, True)]
    assert [trainer.source.merges for trainer in exact] == [False, True]
    for trainer in exact:
        trainer.train()
    assert weights(exact[0].model).keys() == weights(exact[1].model).keys()


def test_by_default_16_bit_weights_on_a_gpu_with_room_for_a_copy(tiny_model_dir, tmp_path, monkeypatch):
    """The room is that of `d1 fit`, with a twentieth to spare."""
    args = DiffuGRPOConfig(output_dir=str(tmp_path), **(SETTINGS | MIXED))
    gpu, free = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000)

    def model(dtype, **options):
        base = load_model(str(tiny_model_dir), dtype)
        return get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS, **options))

    half = model(torch.bfloat16)
    settings = fit_settings(args, half)
    assert (settings.merged_rollouts, settings.lora_targets, settings.lora_r) == (True, sorted(TARGETS), 4)
    assert (settings.batch, settings.canvas, settings.dtype, settings.length) == (4, 8, "bfloat16", 208)
    constant, per_row = activation_bytes(half.config, settings)
    needed = sum(resident_bytes(half.config, settings).values()) + constant + 4 * (per_row + settings.stored)

    def chosen(model, device=gpu, **changes):
        accelerator = SimpleNamespace(device=device, unwrap_model=lambda model: model)
        own = DiffuGRPOConfig(output_dir=str(tmp_path), **(SETTINGS | MIXED | changes))
        return merges_rollouts(SimpleNamespace(args=own, accelerator=accelerator, model=model, weights_are_split=False))

    for room, expected in ((needed / 0.95 + 1, True), (needed / 0.95 - 1, False)):
        free.append(room - 1000)
        assert chosen(half) == has_room_for_copy(args, half, room) == expected
    free.append(10**15)
    with monkeypatch.context() as patched:
        patched.setattr("d1.rl.sources.gather_object", lambda own: [*own, False])  # another process has no room
        assert not chosen(half)
    assert not chosen(half, torch.device("cpu"))
    assert not chosen(half, merged_rollouts=False)
    assert not chosen(model(torch.float32))
    assert not chosen(model(torch.bfloat16, modules_to_save=["lm_head"]))
    assert not chosen(load_model(str(tiny_model_dir), torch.bfloat16))
    monkeypatch.setattr("d1.commands.rl_memory.activation_bytes", None)  # a model that the estimate cannot build
    assert not chosen(half)


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({}, {}, "--merged_rollouts true: without --use_peft there is no adapter to merge"),
        (
            {},
            {"use_peft": True, "load_in_4bit": True},
            "--merged_rollouts true: 4-bit weights cannot absorb an adapter",
        ),
    ],
)
def test_runs_without_an_adapter_that_can_be_merged_are_refused(tmp_path, settings, model, message):
    args = DiffuGRPOConfig(output_dir=str(tmp_path), model_path="m", use_cpu=True, bf16=False, merged_rollouts=True)
    with pytest.raises(ValueError, match=message):
        check_model_settings(args, ModelConfig(**model))


def test_servers_shared_weights_and_other_adapters_are_refused(tiny_model_dir, tmp_path, monkeypatch):
    there = {"rollout_mode": "server", "rollout_server_base_url": ["http://127.0.0.1:1"]}
    with pytest.raises(ValueError, match="rollout servers get merged weights anyway"):
        make(tiny_model_dir, tmp_path, merged_rollouts=True, **there)
    with pytest.raises(ValueError, match="--merged_rollouts true: the model has no adapter to merge: leave it out"):
        make_trainer(tiny_model_dir, tmp_path, merged_rollouts=True)
    with pytest.raises(ValueError, match="--merged_rollouts true: a rollout_func samples, not the trainer"):
        make(tiny_model_dir, tmp_path, merged_rollouts=True, rollout_func=lambda prompts, trainer: {})
    monkeypatch.setattr("d1.rl.trainer.DiffuGRPOTrainer.weights_are_split", True)
    with pytest.raises(ValueError, match=r"each process holds only a part of the weights \(ZeRO-3, FSDP\)"):
        make(tiny_model_dir, tmp_path, merged_rollouts=True)
