"""What CONTRIBUTING says of additions from outside the package: they train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 8,
    "block_length": 4,
    "diffusion_steps": 8,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "beta": 0.0,
    "task": str(ROOT / "tests" / "diffu-grpo" / "letters_task.py"),
    "estimator": "halves",
    "objective": "push",
    "sampler": "parallel",
    "reveal": "half",
}


def as_own_kind(source: Path, folder: Path) -> Path:
    """The tiny model as a project of its own would release it: another `model_type`, other names of weights."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"model_type": "own", "architectures": ["OwnModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    names = {name: name.replace("model.", "net.", 1).replace("lm_head.", "out.", 1) for name in weights}
    save_file({names[name]: weight for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def test_an_estimator_an_objective_a_rule_and_a_kind_from_outside_train(tiny_model_dir, tmp_path):
    model = as_own_kind(tiny_model_dir, tmp_path / "own")
    flags = [str(word) for flag in SETTINGS.items() for word in (f"--{flag[0]}", flag[1])]
    command = [sys.executable, str(ROOT / "tests" / "own_additions.py"), "--model_path", str(model), *flags]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    logged = [entry for entry in history if "loss" in entry]
    assert len(logged) == 4
    assert all("pushed" in entry and entry["prompt_masked"] == 0 for entry in logged if "prompt_masked" in entry)
    assert logged[0]["sampling/forward_passes"] < 8  # three passes a block of 4: 2, 1 and 1 tokens
    assert logged[0]["ratio_max"] == 1.0
    before, after = load_file(tiny_model_dir / "model.safetensors"), load_file(tmp_path / "run" / "model.safetensors")
    assert before.keys() == after.keys()  # saved under the names of the class that runs it
    assert not any(torch.equal(before[name], after[name]) for name in before)
