"""The comparison of methods: each run's command means what its name says, and the table shows what the runs left."""

import json
from pathlib import Path

import compare_methods
import pytest
from compare_methods import MOST_UPDATES, evaluation, run_name, table, training
from diffu_grpo_train import make_parser

from d1.methods import METHODS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("method", METHODS)
def test_each_run_is_its_method_for_as_many_rollouts_as_the_others(method, tmp_path, monkeypatch):
    args = compare_methods.make_parser().parse_args(["--output_dir", str(tmp_path)])
    phase = training(method, "sft", args)
    monkeypatch.chdir(phase.folder)
    config, _ = make_parser().parse_args_and_config(phase.command[2:])
    expected = METHODS[method].values | {
        "num_iterations": min(METHODS[method].values["num_iterations"], MOST_UPDATES),
        "diffusion_steps": 32 if method == "just-grpo" else 16,
        "learning_rate": 1e-4,
        "num_generations": 8,
        "model_path": str(tmp_path / "sft"),
    }
    assert {name: getattr(config, name) for name in expected} == expected
    completions = config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert completions == 64
    assert config.max_steps == 60 * config.num_iterations
    assert phase.needs == ("sft",)


def test_the_table_has_each_runs_solves_and_compute(tmp_path, monkeypatch):
    args = compare_methods.make_parser().parse_args(["--methods", "d1", "--output_dir", str(tmp_path)])
    row = {"accuracy": 50.0, "ci_low": 45.0, "ci_high": 55.0}
    names = ["base", "sft", run_name("d1", "base"), run_name("d1", "sft")]
    scores = {f"sudoku_{name}_validation_32_16": row | {"accuracy": 50.0 + at} for at, name in enumerate(names)}
    monkeypatch.setattr(compare_methods, "accuracies", lambda folder: scores)
    for name in names[2:]:
        (tmp_path / name).mkdir()
        entries = [{"compute_tokens": 1}, {"compute_tokens": 7_400_000}, {"loss": 0.0}]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    lines = table(args).splitlines()
    assert lines[2] == "| the start itself | 50.0 [45.0, 55.0] |  | 51.0 [45.0, 55.0] |  |"
    assert lines[3] == "| d1 | 52.0 [45.0, 55.0] | 7 M | 53.0 [45.0, 55.0] | 7 M |"


def test_an_evaluation_waits_for_its_run():
    assert evaluation("d1_from_base", ROOT / "runs", ROOT).needs == ("d1_from_base",)
    assert evaluation("base", ROOT / "pocket" / "base", ROOT).needs == ()
