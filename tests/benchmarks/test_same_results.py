"""Comparison of two checkouts to the bit: each runs its own code once, and every difference is found."""

import contextlib
import re
import shlex

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import same_results
from d1.distill.methods import METHODS as DISTILLATIONS
from d1.preference.methods import METHODS as PREFERENCES
from d1.rl import train
from d1.rl.methods import METHODS
from d1.sampling.caches import CACHES
from d1.sampling.reveal import REMASKING, RULES
from d1.sampling.settings import SAMPLERS
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
    (folder / "dataset").mkdir(parents=True)
    (folder / "dataset" / "sudoku_sft.jsonl").write_text('{"question": "q", "attempt": "a"}\n' * 2)
    (folder / "d1").mkdir()
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


def test_bits_tell_nan_alike_and_signed_zeros_apart():
    nan = torch.tensor([float("nan"), 1.0])
    assert same_results.same_bits(nan, nan.clone())
    assert not same_results.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_results.same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(("names", "equal"), [(("a", "b"), False), (("a",), True)])
def test_two_finished_folders_are_compared_and_what_only_one_saved_is_an_error(names, equal, tmp_path, capsys):
    for side, saved in (("this", names), ("other", ("a",))):
        (tmp_path / side).mkdir()
        save_file({name: torch.zeros(1) for name in saved}, tmp_path / side / "model.safetensors")
    flags = ["--folders", str(tmp_path / "this"), str(tmp_path / "other")]
    args = same_results.make_parser().parse_args(flags)
    if equal:
        assert same_results.main(args) == 0
        assert "| folders | 1 | 0 | 0 | 0 | 0 |" in capsys.readouterr().out
    else:
        with pytest.raises(ValueError, match=r"do not have the same results, e\.g\. \['model.safetensors:b'\]"):
            same_results.main(args)


def test_the_jobs_cover_every_stage_and_method_and_are_commands_that_the_scripts_take():
    jobs, kinds = same_results.JOBS, ["sft", *(f"rl_{method}" for method in METHODS)]
    kinds += [f"prefer_{method}" for method in PREFERENCES] + [f"distill_{method}" for method in DISTILLATIONS]
    names = {f"{kind}_{weights}_on_{count}" for kind in kinds for weights in ("full", "lora") for count in (1, 2)}
    assert names | {f"eval_{name}" for name in same_results.SAMPLERS} <= jobs.keys()
    used = " ".join(same_results.SAMPLERS.values()).split()
    # Two defaults; and `scdd` needs a model that was trained with its noise.
    assert {*CACHES, *RULES, *REMASKING, *SAMPLERS} <= {*used, "low_confidence", "exact", "scdd"}
    for name, job in jobs.items():
        assert job.processes == (2 if name.endswith("on_2") else 1)
        check_script(shlex.join(["python", *job.command.split()]), ROOT / job.folder)
        command = job.command
        if name.startswith("rl_"):
            with contextlib.chdir(ROOT / job.folder):
                words = [*command.split()[1:], "--use_cpu", "true", "--output_dir", "out"]
                config, _ = train.make_parser().parse_args_and_config(words)
            assert config.max_steps == 2 * config.num_iterations  # two rollouts
            assert name.split("_")[1] in (config.method, "no", "accumulated", "parallel", "cached", "blocks")
        parts = re.findall(r"--grad\w*_accum\w*_steps (\d+)", command) or ["1"]
        assert (int(parts[-1]) > 1) == ("accumulated" in name)
    two = jobs["sft_full_on_2"]
    check_script(shlex.join(["python", *same_results.LAUNCHER, *two.command.split()]), ROOT / two.folder)
