"""What `run.sh` and the sbatch scripts launch: the same batch on any number of GPUs, and on none."""

import itertools
from pathlib import Path

import pytest

from tests.commands import ROOT, calls_of


def flags_of(call: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in itertools.pairwise(call) if flag.startswith("--")}


@pytest.mark.parametrize(
    ("script", "gpus", "processes"),
    [("run.sh", 1, 1), ("run.sh", 2, 2), ("run.sh", 4, 4), ("run.sh", 8, 8), ("*2nodes.sbatch", 8, 16)],
)
def test_the_effective_batch_does_not_depend_on_the_number_of_gpus(script, gpus, processes, tmp_path):
    for path in (ROOT / "diffu-grpo").rglob(script):
        tmp_path.joinpath("calls.jsonl").unlink(missing_ok=True)
        (call,) = calls_of(path, [], {}, tmp_path, gpus)
        flags = flags_of(call)
        rows, accumulation = int(flags["--per_device_train_batch_size"]), int(flags["--gradient_accumulation_steps"])
        assert (int(flags["--num_processes"]), processes * rows * accumulation) == (processes, 96)
    assert tmp_path.joinpath("calls.jsonl").exists()


def test_a_named_model_runs_without_a_gpu_and_a_config_of_its_own_keeps_its_batch(tmp_path):
    run = ROOT / "diffu-grpo" / "run.sh"
    settings = {"GPUS": "0", "MODEL_PATH": "../pocket/base", "DATASET": "sudoku"}
    (call,) = calls_of(run, ["--max_steps", "1"], settings, tmp_path)
    found = flags_of(call)
    assert (Path(found["--config_file"]).name, found["--load_in_4bit"], found["--bf16"]) == ("cpu.yaml", *["false"] * 2)
    assert (found["--num_processes"], found["--max_steps"]) == ("1", "1")
    *_, call = calls_of(run, [], {"CONFIG": "pocket.yaml"}, tmp_path, gpus=8)
    assert flags_of(call)["--num_processes"] == "1"
