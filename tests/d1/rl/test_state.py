"""The rollout files of a checkpoint: which files are refused, also those of other versions, and with which message."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from d1.rl.trainer import check_rollout
from tests.tiny_grpo import make_trainer

COUNTERS, TENSORS = "rollout_rank0.json", "rollout_rank0.safetensors"
RUN = SimpleNamespace(world_size=1, gradient_accumulation_steps=1, sync_ref_model=False, rollout_staleness=0)
SAVED = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}  # rollouts at steps 0, 2 and 4


@pytest.fixture(scope="module")
def whole(tiny_model_dir, tmp_path_factory):
    """A run of five steps with a checkpoint at the third."""
    trainer = make_trainer(tiny_model_dir, tmp_path_factory.mktemp("run"), **SAVED)
    trainer.train()
    return trainer


@pytest.fixture
def checkpoint(whole, tmp_path):
    return shutil.copytree(f"{whole.args.output_dir}/checkpoint-3", tmp_path / "checkpoint-3")


def edit(**changes):
    """Damage to the counters: entries with other values, or None for missing ones."""

    def damage(path):
        counters = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in counters.items() if value is not None}))

    return damage


def rename(path):
    tensors = load_file(path)
    save_file({name.replace("view_noise", "noise"): tensor for name, tensor in tensors.items()}, path)


def shorten(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


DAMAGES = [
    *((name, damage, "is damaged") for name in (COUNTERS, TENSORS) for damage in (empty, shorten)),
    *((name, lambda path: path.unlink(), "is missing") for name in (COUNTERS, TENSORS)),
    (COUNTERS, lambda path: path.write_text("[]"), "is damaged .*not the counters of a run"),
    (COUNTERS, lambda path: path.write_bytes(b"\xff"), "is damaged"),
    (COUNTERS, edit(losses=None, compute=None), "is damaged .*without compute, losses"),
    (TENSORS, lambda path: save_file({"lm_head.weight": torch.ones(2)}, path), "is damaged .*other tensors: 0.canvas"),
    (TENSORS, lambda path: save_file({}, path), "is damaged .*other tensors: 0.canvas"),
    (TENSORS, rename, "is damaged .*other tensors: 0.view_noise"),
]


@pytest.mark.parametrize(("name", "damage", "problem"), DAMAGES)
def test_a_damaged_or_missing_file_is_named_with_what_to_do(checkpoint, name, damage, problem):
    check_rollout(checkpoint, RUN)
    damage(checkpoint / name)
    with pytest.raises(
        ValueError, match=rf"{name} {problem}.*; no earlier checkpoint is left: start the run again"
    ) as told:
        check_rollout(checkpoint, RUN)
    assert "\n" not in str(told.value)


def test_a_reference_that_is_missing_is_named(checkpoint):
    with pytest.raises(ValueError, match=r"reference.safetensors is missing; no earlier checkpoint is left"):
        check_rollout(checkpoint, SimpleNamespace(**{**vars(RUN), "sync_ref_model": True}))


def test_another_number_of_processes_is_refused_with_theirs(checkpoint):
    with pytest.raises(ValueError, match=r"was written by 1 processes, .* with 2: start the run with 1"):
        check_rollout(checkpoint, SimpleNamespace(**{**vars(RUN), "world_size": 2}))
    edit(processes=2)(checkpoint / COUNTERS)  # the second of which left no file
    with pytest.raises(ValueError, match=r"rollout_rank1.json is missing"):
        check_rollout(checkpoint, SimpleNamespace(**{**vars(RUN), "world_size": 2}))


def test_counters_of_another_kind_are_named_when_they_are_put_back(checkpoint, tiny_model_dir, tmp_path):
    edit(losses={"total": 0.0})(checkpoint / COUNTERS)
    with pytest.raises(ValueError, match=f"{COUNTERS} is damaged .*last_logged.*no earlier checkpoint is left"):
        make_trainer(tiny_model_dir, tmp_path, **SAVED).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("version", [None, 3, 4, "5"])
def test_a_checkpoint_of_another_version_is_refused_with_what_to_do(checkpoint, tiny_model_dir, tmp_path, version):
    """Also if the rollout lacks what that version did not store: the number of views and rows that take part."""
    file = checkpoint / TENSORS
    new = ("scoring_views", "active_rows")
    save_file({name: tensor for name, tensor in load_file(file).items() if not name.endswith(new)}, file)
    edit(format=version, losses=None)(checkpoint / COUNTERS)
    told = "-3 was written by another version, .* finish the run with that version, or start a new run from its "
    with pytest.raises(ValueError, match=told + r"weights \(--model_path, another --output_dir\)$"):
        make_trainer(tiny_model_dir, tmp_path, **SAVED).train(resume_from_checkpoint=str(checkpoint))
