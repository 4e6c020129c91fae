"""Comparison of two checkouts to the bit: each runs its own code once, and every difference is found."""

import contextlib
import shlex

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import same_results
from d1.rl import train
from d1.rl.methods import METHODS
from d1.sft import train as sft_train
from tests.commands import ROOT, check_script

STAGE = """import json, sys
from pathlib import Path
import numpy
from safetensors.numpy import save_file
from d1 import VALUE
folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder.mkdir(exist_ok=False)
save_file({"weight": numpy.array([1.0, VALUE], "float32")}, folder / "model.safetensors")
problems = {"generations": [{"generations": f"text {VALUE > 3}"}]}
(folder / "task_generations.json").write_text(json.dumps(problems))
"""


def checkout(folder, value):
    (folder / "d1").mkdir(parents=True)
    (folder / "d1" / "__init__.py").write_text(f"VALUE = {value}\n")
    (folder / "SFT").mkdir()
    (folder / "SFT" / "sft_train.py").write_text(STAGE)
    return folder


@pytest.mark.parametrize(("value", "row", "status"), [
    (2.0, "| sft_toy | 1 | 0 | 0 | 1 | 0 |", 0),
    (2.5, "| sft_toy | 1 | 1 | 0.5 | 1 | 0 |", 1),
    (4.0, "| sft_toy | 1 | 1 | 2 | 1 | 1 |", 1),
])  # fmt: skip
def test_each_checkout_runs_its_own_code_once_and_differences_are_counted(
    value, row, status, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(same_results, "JOBS", {"sft_toy": same_results.Job("SFT", "sft_train.py")})
    monkeypatch.setattr(same_results, "ROOT", checkout(tmp_path / "this", 2.0))
    other = checkout(tmp_path / "other", value)
    flags = ["--other", str(other), "--output_dir", str(tmp_path / "results")]
    for _ in range(2):  # the second time nothing runs: the toy refuses an existing folder
        assert same_results.main(same_results.make_parser().parse_args(flags)) == status
    assert capsys.readouterr().out.count(row) == 2


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    flags = ["--other", str(tmp_path), "--output_dir", str(tmp_path / "results")]
    with pytest.raises(ValueError, match="is not a checkout of d1"):
        same_results.main(same_results.make_parser().parse_args(flags))


def test_bits_tell_nan_alike_and_signed_zeros_apart():
    nan = torch.tensor([float("nan"), 1.0])
    assert same_results.same_bits(nan, nan.clone())
    assert not same_results.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_results.same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


def test_a_tensor_that_only_one_side_saved_is_an_error(tmp_path):
    for side, names in (("this", ("a", "b")), ("other", ("a",))):
        (tmp_path / side).mkdir()
        save_file({name: torch.zeros(1) for name in names}, tmp_path / side / "model.safetensors")
    with pytest.raises(ValueError, match=r"do not have the same results, e\.g\. \['model.safetensors:b'\]"):
        same_results.compare("job", tmp_path / "this", tmp_path / "other")


def test_two_finished_folders_are_compared_without_a_run(tmp_path, capsys):
    for side in ("this", "other"):
        (tmp_path / side).mkdir()
        save_file({"a": torch.zeros(1)}, tmp_path / side / "model.safetensors")
    flags = ["--folders", str(tmp_path / "this"), str(tmp_path / "other")]
    assert same_results.main(same_results.make_parser().parse_args(flags)) == 0
    assert "| folders | 1 | 0 | 0 | 0 | 0 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [([], "give --other and --output_dir"), (["--only", "nothing"], "no job has this prefix")],
)
def test_flags_that_choose_nothing_are_refused(flags, message, tmp_path):
    folders = ["--other", str(tmp_path), "--output_dir", str(tmp_path)] if flags else []
    with pytest.raises(ValueError, match=message):
        same_results.main(same_results.make_parser().parse_args([*folders, *flags]))


def test_the_jobs_cover_sft_and_every_method_and_are_commands_that_the_scripts_take():
    jobs = same_results.JOBS
    kinds = ["sft", *(f"rl_{method}" for method in METHODS)]
    names = {f"{kind}_{weights}_on_{count}" for kind in kinds for weights in ("full", "lora") for count in (1, 2)}
    assert names <= jobs.keys()
    for name, job in jobs.items():
        config = None
        if job.folder == "diffu-grpo":
            with contextlib.chdir(ROOT / job.folder):
                words = [*job.command.split()[1:], "--use_cpu", "true", "--output_dir", "out"]
                config, _ = train.make_parser().parse_args_and_config(words)
        else:
            config = sft_train.make_parser().parse_args([*job.command.split()[1:], "--output_dir", "out"])
        parts = getattr(config, "gradient_accumulation_steps", None) or config.grad_accum_steps
        assert (parts > 1) == ("accumulated" in name)
        assert job.processes == (2 if name.endswith("on_2") else 1)
        if job.folder == "diffu-grpo":
            assert config.max_steps == 2 * config.num_iterations  # two rollouts
            method = name.split("_")[1]
            assert method not in METHODS or config.method == method
    check_script(
        shlex.join(["python", *same_results.LAUNCHER, *same_results.JOBS["sft_full_on_2"].command.split()]),
        ROOT / "SFT",
    )
