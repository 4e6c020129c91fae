"""Checkpoints of other versions, processes or runs are refused with what to do.

That one bit of any of their files is noticed is shown in `tests/d1/runs/test_stage.py`.
"""

import json
import shutil

import pytest

from d1.runs.checkpoints import SUMS, write_sums
from tests.tiny_grpo import make_trainer

COUNTERS = "rollout_rank0.json"
SAVED = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}  # rollouts at steps 0, 2 and 4
OTHER_VERSION = (
    r"-3 was written by another version, .* finish the run with that version, or start a new run from its weights "
    r"\(--model_path, another --output_dir\)$"
)


@pytest.fixture(scope="module")
def whole(tiny_model_dir, tmp_path_factory):
    """A run of five steps with a checkpoint at the third."""
    trainer = make_trainer(tiny_model_dir, tmp_path_factory.mktemp("run"), **SAVED)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"format": version, "losses": None}, OTHER_VERSION) for version in (None, 3, 4, "5")),
        ({"processes": 2}, r"was written by 2 processes, .* with 1: start the run with 2$"),
    ],
)
def test_a_rollout_that_cannot_continue_is_refused_with_what_to_do(whole, tiny_model_dir, tmp_path, changes, said):
    checkpoint = shutil.copytree(f"{whole.args.output_dir}/checkpoint-3", tmp_path / "checkpoint-3")
    file = checkpoint / COUNTERS
    counters = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in counters.items() if value is not None}))
    (checkpoint / SUMS).unlink()
    write_sums(checkpoint, whole.args)
    with pytest.raises(ValueError, match=said):
        make_trainer(tiny_model_dir, tmp_path, **SAVED).train(resume_from_checkpoint=str(checkpoint))
    file.unlink()
    with pytest.raises(ValueError, match=rf"{COUNTERS} is missing; no earlier checkpoint is left: start the run again"):
        make_trainer(tiny_model_dir, tmp_path, **SAVED).train(resume_from_checkpoint=str(checkpoint))
