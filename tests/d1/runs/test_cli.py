"""How scripts start and end: fast help, one line for a mistake, a traceback for a bug, both ways to write flags."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

from d1 import __main__ as tools
from d1.distill import train as distillation
from d1.eval import run as evaluation
from d1.preference import train as preference
from d1.ranges import COUNT, setting
from d1.rl import train as rl_train
from d1.runs.cli import ListedError, RunError, SettingsParser, run_script
from d1.sft import train as sft_train
from tests import forks
from tests.commands import ROOT

BLOCKED = ("torch", "transformers", "peft", "accelerate", "trl", "matplotlib")


def run_here(*command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run_here(sys.executable, "-c", code, folder=folder)


HELP = """import runpy, sys
sys.modules.update(dict.fromkeys({blocked}))  # a None entry makes an import fail
sys.argv = {argv}
try:
    runpy.run_path(sys.argv[0], run_name='__main__')
finally:
    sys.stderr.write(' '.join(sys.modules))
"""


@pytest.mark.parametrize(
    ("folder", "argv", "says"),
    [
        ("SFT", ["sft_train.py"], "--full_finetuning"),
        ("eval", ["eval.py"], "--gen_length"),
        ("eval", ["parse_and_get_acc.py"], "--scoring"),
        (".", ["d1/__main__.py"], "merge"),
        (".", ["d1/__main__.py", "fit"], "--gpus"),
    ],
)
def test_help_comes_without_torch_or_transformers(folder: str, argv: list[str], says: str) -> None:
    done = python(HELP.format(blocked=BLOCKED, argv=[*argv, "--help"]), ROOT / folder)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_the_help_of_rl_imports_trls_settings_but_no_trainer() -> None:
    done = python(HELP.format(blocked=(), argv=["diffu_grpo_train.py", "--help"]), ROOT / "diffu-grpo")
    assert "--p_mask_prompt" in done.stdout
    assert "trl.trainer.grpo_config" in done.stderr
    heavy = {"trl.trainer.grpo_trainer", "d1.rl.trainer", "d1.models.load", "d1.models.adapters", "datasets.load"}
    assert not heavy & set(done.stderr.split())


@pytest.mark.parametrize(
    ("name", "flags", "problem"),
    [
        ("SFT/sft_train.py", ["--max_steps", "0"], "out of range: --max_steps 0"),
        ("diffu-grpo/diffu_grpo_train.py", ["--config", "none.yaml"], "No such file or directory: none.yaml"),
        ("diffu-grpo/diffu_grpo_train.py", ["--config", "pocket.yaml", "--output_dir", "run.sh"], "run.sh is a file"),
        ("eval/eval.py", ["--model_path", "x", "--dataset", "sudoku", "--output_dir", "eval.py"], "eval.py is a file"),
        ("eval/parse_and_get_acc.py", ["none"], "no folder none"),
        ("diffu-grpo/plot_curves.py", ["none", "--output", "/tmp/none.png"], "holds no run"),
    ],
)
def test_a_users_mistake_is_one_line(name: str, flags: list[str], problem: str, tmp_path: Path) -> None:
    path, log = ROOT / name, tmp_path / "log"
    said = forks.finish(forks.start(forks.script, path.name, *flags, log=log, folder=path.parent), log, status=1)
    *before, line = said.splitlines()
    assert not any(Path(name).name in text or "Traceback" in text for text in before)
    assert line.startswith(f"{Path(name).name}: ")
    assert problem in line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no\n such task"), "name: no such task"),
        (FileNotFoundError(2, "No such file or directory", "rows.csv"), "name: No such file or directory: rows.csv"),
        (OSError(28, "No space left on device"), "name: No space left on device"),
        (ConnectionError("the hub is away"), "name: the hub is away"),
        (FloatingPointError("the loss became nan"), "name: the loss became nan"),
        (RunError("reward odd raised"), "name: reward odd raised"),
        (ValueError(), "name: ValueError"),
        (
            ListedError("2 rows:\n  line 1: a\n  line 3: b\nFix them"),
            "name: 2 rows:\n  line 1: a\n  line 3: b\nFix them",
        ),
        *((bug, None) for bug in (KeyError("x"), RuntimeError("shapes"), AssertionError(), TypeError("x"))),
    ],
)
def test_a_mistake_is_one_line_and_status_1_and_a_bug_keeps_its_traceback(
    error: Exception, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error) if line is None else SystemExit) as raised:
        run_script("name", work)
    assert line is None or (raised.value.code, capsys.readouterr().err) == (1, f"{line}\n")


@pytest.mark.parametrize(("returned", "status"), [(3, 3), (None, 0), ("trainer", 0)])
def test_a_number_returned_is_the_status_and_anything_else_is_success(returned: object, status: int) -> None:
    with pytest.raises(SystemExit, match=rf"^{status}$"):
        run_script("name", lambda: returned)


WORKER = """import os, time
from d1.runs.cli import run_script
def work():
    if {fails}:
        raise ValueError('it is wrong')
    time.sleep(60)
run_script('worker.py', work)
"""


@pytest.mark.parametrize("fails", ["True", "os.environ['RANK'] == '1'"])
def test_of_several_processes_one_speaks(fails: str, tmp_path: Path) -> None:
    """All processes have the mistake, or only the second one."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(fails=fails))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run_here(sys.executable, *launcher, str(worker))
    assert done.returncode == 1
    assert done.stderr.splitlines().count("worker.py: it is wrong") == 1


def test_a_closed_pipe_is_no_mistake() -> None:
    work = "lambda: [sys.stdout.write('line\\n') for _ in range(10**5)]"
    command = f'{sys.executable} -c "import sys; from d1.runs.cli import *; run_script(0, {work})"'
    done = run_here("bash", "-c", f"set -o pipefail; {command} | head -1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "line\n", "")


@pytest.mark.parametrize(
    ("parser", "flags", "says"),
    [
        (sft_train.make_parser(), ["--batch", "3"], "unrecognized arguments: --batch 3"),
        (sft_train.make_parser(), ["--report_to", "mail"], "--report_to: invalid choice: 'mail'"),
        (evaluation.make_parser(), ["--dataset", "sudoku"], "required: --model_path/--model_name"),
        (tools.make_parser(), ["fit", "--gpus", "x"], "--gpus: must be an integer in [1, inf), got 'x'"),
        (rl_train.make_parser(), ["--beta", "x"], "--beta: invalid float value: 'x'"),
        (rl_train.make_parser(), ["--config"], "--config: expected the path"),
        (tools.make_parser(), ["nonsense"], ", ".join(repr(name) for name in [*tools.STAGES, *tools.COMMANDS])),
        (tools.make_parser(), ["evl"], " (the nearest is eval)"),
        (tools.make_parser(), ["fit", "--gpu", "1", "--model_path", "x", "--stage", "rl"], " (the nearest is --gpus)"),
        (tools.make_parser(), ["fit", "--model_path", "x", "--stage", "prefre"], " (the nearest is prefer)"),
        (sft_train.make_parser(), ["--config", "a.yaml", "--config=b.yaml"], ": give --config once"),
        (sft_train.make_parser(), ["--learning-rate=1"], " (the nearest is --learning_rate)"),
        (preference.make_parser(), ["--method", "vpro"], " (the nearest is vrpo)"),
    ],
)
def test_a_bad_command_line_is_one_line(
    parser: Any, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        getattr(parser, "parse_args_and_config", parser.parse_args)(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_help_shows_the_default_of_every_flag_that_has_one() -> None:
    """Switches are off, and None is explained by the flag's own text."""
    for module in (sft_train, preference, distillation, evaluation, rl_train):
        parser = module.make_parser()
        parts = re.split(r"\n  (?=-)", parser.format_help())
        helps = {
            flag: " ".join(part.split())
            for part in parts
            for flag in re.findall(r"--\w+(?![\w-])", part.splitlines()[0])
        }
        defaults = {flag: parser.get_default(flag.removeprefix("--")) for flag in helps}
        given = {flag: value for flag, value in defaults.items() if value not in (None, False, "", argparse.SUPPRESS)}
        assert len(given) > 7
        for flag, value in given.items():
            text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            assert f"(default: {text})" in helps[flag] or re.search("by default|defaults to", helps[flag]), flag
        if module is preference:
            assert "(default: vrpo 0.2, vrpo-dare 0.2, elbo-kto 0.1)" in helps["--beta"]
            assert "(default: vrpo cosine, vrpo-dare constant, elbo-kto cosine)" in helps["--lr_scheduler_type"]
            assert "(default: 0.01)" in helps["--weight_decay"]


@dataclass(frozen=True, kw_only=True)
class First:
    """Flags that others inherit."""

    rows: Annotated[int, COUNT] = setting(4, "rows per step", aliases=["--batch"], group="first")
    names: list[str] = setting([], action="append")


@dataclass(frozen=True, kw_only=True)
class Second(First):
    names: list[str] = setting(["a"], "names, in any order", nargs="+")  # changed, in the place of the inherited field
    hidden: int = 3  # no flag
    fast: bool = setting(False, "skip all checks", group="second")
    cache: bool | None = setting(None, action=argparse.BooleanOptionalAction)
    needed: str = setting(help="a file", flag="--needed-file", group="")
    folder: Path = setting(positional=True, type=Path, metavar="FOLDER")
    other: str | None = setting(None, positional=True, nargs="?")


def test_a_dataclass_becomes_flags_and_the_flags_an_instance(capsys: pytest.CaptureFixture[str]) -> None:
    parser = SettingsParser(Second, "command", "What it does.")
    required = ["--needed-file", "x", "here"]
    plain = parser.parse_args(required)
    assert plain == Second(needed="x", folder=Path("here"))
    assert (plain.rows, plain.names, plain.hidden, plain.fast) == (4, ["a"], 3, False)
    assert (plain.cache, plain.other) == (None, None)
    assert plain.names is not SettingsParser(Second).parse_args(required).names
    words = "here there --batch 2 --names b c --fast --no-cache --needed-file y"
    given = {"rows": 2, "names": ["b", "c"], "fast": True, "cache": False, "needed": "y"}
    assert parser.parse_args(words.split()) == Second(**given, folder=Path("here"), other="there")
    usage = " ".join(parser.format_usage().split())
    flags = "[--rows ROWS] [--names NAMES [NAMES ...]] [--fast] [--cache | --no-cache] --needed-file NEEDED"
    assert usage == f"usage: command [-h] {flags} FOLDER [other]"
    text = parser.format_help()
    assert re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE) == ["positional arguments", "options", "first", "second"]
    assert text.index("--needed-file NEEDED ") < text.index("first:")
    assert "rows per step (default: 4)" in text
    with pytest.raises(ValueError, match=r"^out of range: --rows 0 \(must be an integer in \[1, inf\)\)$"):
        parser.parse_args([*required, "--rows", "0"])
    for wrong, message in ((["here"], "required: --needed-file"), ([*required, "--hidden", "1"], "--hidden 1")):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(wrong)
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_both_dialects_are_understood() -> None:
    for name in ("--model_name", "--model_path"):
        assert sft_train.make_parser().parse_args([name, "x"]).model_name == "x"
    for value in (None, "true", "false", "a/b"):
        for name in ("--resume", "--resume_from_checkpoint"):
            typed = [name] if value is None else [name, value]
            assert sft_train.make_parser().parse_args(typed).resume == (value or "true")
            start = ["--per_device_train_batch_size", "6", "--model_name", "m"]
            args, _ = rl_train.make_parser().parse_args_and_config([*start, *typed])
            assert (args.resume_from_checkpoint, args.model_path) == (value or "true", "m")
    assert sft_train.make_parser().parse_args([]).resume is None
    assert evaluation.make_parser().parse_args(["--model_name", "m", "--dataset", "sudoku"]).model_path == "m"


def test_a_yaml_of_rl_may_use_either_name_but_not_both_and_no_unknown_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("per_device_train_batch_size: 6\nnonsense: 3\n")
    with pytest.raises(ValueError, match="there is no such setting: --nonsense 3"):
        rl_train.make_parser().parse_args_and_config([f"--config={config}"])
    with pytest.raises(SystemExit):
        rl_train.make_parser().parse_args_and_config(["--per_device_train_batch_size=6", "--nonsense", "3"])
    assert "there is no such setting: --nonsense 3" in capsys.readouterr().err
    config.write_text("model_name: m\nresume: true\ntask: sudoku\nper_device_train_batch_size: 6\n")
    args, _ = rl_train.make_parser().parse_args_and_config(["--config", str(config)])
    assert (args.model_path, str(args.resume_from_checkpoint).lower(), args.dataset) == ("m", "true", "sudoku")
    config.write_text("model_name: m\nmodel_path: n\n")
    with pytest.raises(ValueError, match="model_name and model_path in the --config file are one setting"):
        rl_train.make_parser().parse_args_and_config(["--config", str(config)])
    config.write_text("model_name: m\n\nmodel_name: n\n")
    with pytest.raises(ValueError, match="model_name is in lines 1 and 3: keep one"):
        rl_train.make_parser().parse_args_and_config(["--config", str(config)])


def test_sft_reads_its_flags_from_a_yaml_and_the_command_line_wins(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(
        "model_path: m\nlearning_rate: 2e-4\nwarmup_steps: 0.1\nmax_steps: -1\nnum_proc: null\neos_padding: 40\n"
        "packing: true\nload_in_4bit: false\nlora_target_modules: [attention, up_proj]\nresume: true\n"
    )
    parser = sft_train.make_parser()
    typed = "--model_name m --learning_rate 2e-4 --warmup_steps 0.1 --max_steps -1 --eos_padding 40 --packing --resume"
    expected = parser.parse_args([*typed.split(), "--lora_target_modules", "attention", "up_proj"])
    assert parser.parse_args(["--config", str(config)]) == expected
    found = parser.parse_args(["--learning_rate", "1e-3", f"--config={config}", "--lora_target_modules", "q_proj"])
    assert found == replace(expected, learning_rate=1e-3, lora_target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense: 3", "there is no such setting: nonsense "),
        ("batch: 3", "there is no such setting: batch (the nearest is batch_size)"),  # an abbreviation
        ("config: a.yaml", "there is no such setting: config "),
        ("model_name: m\nmodel_path: n", "model_name and model_path are one setting: keep one"),
        ("seed: 1\nbatch_size: 2\nseed: 3", "seed is in lines 1 and 3: keep one"),
        ("packing: 1", "packing must be true or false, got 1"),
        ("batch_size: 0", "--batch_size 0 "),
        ("- batch_size", "must have lines NAME: VALUE"),
        ("a: b: c", "is no yaml"),
    ],
)
def test_a_yaml_that_sft_cannot_use_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(text)
    with pytest.raises(ValueError, match=re.escape(problem)):
        sft_train.make_parser().parse_args(["--config", str(config)])
