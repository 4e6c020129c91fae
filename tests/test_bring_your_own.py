"""The examples in README and CONTRIBUTING of additions from outside the package train."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from d1.rl.train import main, make_parser
from d1.tasks import load_task, with_rewards
from tests import forks

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    **{"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 4, "learning_rate": 1e-3, "seed": 1},
    **{"max_completion_length": 8, "block_length": 4, "diffusion_steps": 8, "logging_steps": 1, "report_to": "none"},
    "task": str(ROOT / "tests" / "d1" / "rl" / "letters_task.py"),
    "method": str(ROOT / "tests" / "my_method.py"),
}


def flags(folder: Path, **more: object) -> list[str]:
    settings = {**SETTINGS, "output_dir": folder, **more}
    return [str(word) for name, value in settings.items() for word in (f"--{name}", value)]


def run(script: Path, folder: Path, arguments: list[str]) -> None:
    forks.finish(forks.start(forks.script, str(script), *arguments, log=folder / "log", folder=ROOT), folder / "log")


def as_own_kind(source: Path, folder: Path) -> Path:
    """The tiny model as another project would release it: another `model_type`, other names of weights."""
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text()) | {"model_type": "own", "architectures": ["OwnModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    own = {name.replace("model.", "net.", 1).replace("lm_head.", "out.", 1): value for name, value in weights.items()}
    save_file(own, folder / "model.safetensors")
    return folder


def test_a_method_file_trains_and_goes_on_from_the_middle_of_a_rollout(tiny_model_dir, tmp_path):
    """Two rollouts of two updates here; the last update again, in a process that knows the file only from its flag."""
    folder, run_flags = tmp_path / "run", {"model_path": tiny_model_dir, "save_steps": 1}
    main(*make_parser().parse_args_and_config(flags(folder, **run_flags)))
    record = json.loads((folder / "run.json").read_text())["settings"]
    expected = {"estimator": "half", "objective": "push", "num_iterations": 2, "epsilon": 0.5}
    assert {name: record[name] for name in expected} == expected
    unbroken = load_file(folder / "model.safetensors")
    shutil.rmtree(folder / "checkpoint-4")
    (folder / "model.safetensors").unlink()
    run(ROOT / "diffu-grpo" / "diffu_grpo_train.py", tmp_path, [*flags(folder, **run_flags), "--resume"])
    resumed = load_file(folder / "model.safetensors")
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
    started = load_file(tiny_model_dir / "model.safetensors")
    assert [name for name in started if torch.equal(started[name], resumed[name])] == []


def test_a_reward_file_needs_only_the_function_of_the_documents(tiny_model_dir, tmp_path):
    """Its lines are those of docs/tasks.md; imported functions and helpers are no rewards."""
    (block,) = (part for part in (ROOT / "docs" / "tasks.md").read_text().split("```") if "# my_reward.py" in part)
    file = tmp_path / "my_reward.py"
    file.write_text(block.removeprefix("python\n"))
    assert "import" not in file.read_text()
    run_flags = {"model_path": tiny_model_dir, "max_steps": 1, "save_strategy": "no", "method": "d1"}
    trainer = main(*make_parser().parse_args_and_config(flags(tmp_path / "run", **run_flags, reward_file=file)))
    (logged,) = (entry for entry in trainer.state.log_history if "reward" in entry)
    own = [f"rewards/{name}/mean" for name in ("letter_share", "brevity")]
    assert sum(logged[name] for name in own) == pytest.approx(logged["reward"], abs=1e-6)
    assert -0.01 < logged[own[1]] < 0
    file.write_text("from textwrap import dedent\n\n\ndef _helper():\n    pass\n")
    with pytest.raises(ValueError, match=r"reward file .*my_reward.py defines no function: write f"):
        with_rewards(load_task("sudoku"), str(file))
    for name in ("cells_reward", "accuracy"):
        file.write_text(f"def {name}(completions, **columns):\n    return [0.0 for _ in completions]\n")
        with pytest.raises(ValueError, match=rf"my_reward.py: there is another reward {name}"):
            with_rewards(load_task("sudoku"), str(file))
    with pytest.raises(FileNotFoundError, match=r"no reward file .*nowhere.py"):
        with_rewards(load_task("sudoku"), "nowhere.py")


def test_a_method_a_rule_and_a_kind_from_outside_train(tiny_model_dir, tmp_path):
    model = as_own_kind(tiny_model_dir, tmp_path / "own")
    own = {"model_path": model, "save_strategy": "no", "sampler": "parallel", "reveal": "half"}
    run(ROOT / "tests" / "own_additions.py", tmp_path, flags(tmp_path / "run", **own))
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    logged = [entry for entry in history if "loss" in entry]
    assert len(logged) == 4
    assert all("pushed" in entry and entry["prompt_masked"] == 0 for entry in logged if "prompt_masked" in entry)
    assert logged[0]["sampling/forward_passes"] < 8  # three passes per block of 4: 2, 1 and 1 tokens
    assert "ratio_max" not in logged[0]  # its objective reads no old log-probs
    before, after = load_file(tiny_model_dir / "model.safetensors"), load_file(tmp_path / "run" / "model.safetensors")
    assert before.keys() == after.keys()  # saved under the names of the class that runs it
    assert not any(torch.equal(before[name], after[name]) for name in before)
