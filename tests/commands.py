"""Checks a command line without running it: files exist, and each script's own parser accepts its arguments.

This project's shell scripts really run, with a `python` that only records its arguments; so does `make`, with -n.
"""

import contextlib
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser
from trl import TrlParser

from d1.__main__ import STAGES
from d1.lazy import module_in

ROOT = Path(__file__).resolve().parents[1]
LAUNCHED = ("SFT", "diffu-grpo", "eval")  # folders of scripts to start; the code is in d1
PACKAGES = ("d1", "pocket", "studies", "benchmarks", "dataset", "examples")
ROOMS = (*PACKAGES, *LAUNCHED, "launch", "recipes", "docs", "tests")
OUTPUTS = {"runs", "results"}
# Replaces python, torchrun, accelerate, srun and scontrol: records a launch, answers a question, or forwards the call.
FAKE = """#!/bin/bash
trap '' TERM
case $(basename "$0") in
    srun) while [[ $1 == --* ]]; do shift; done; exec "$@" ;;
    scontrol) printf 'node%d\\n' 0 1 2 ;;
    *) if [ "$1" = -c ]; then echo "$FAKE_GPUS"; else
        "$REAL_PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$(basename "$0")" "$@" >>"$FAKE_CALLS"
    fi ;;
esac
"""


def folder_of(room: str) -> Path:
    """Where a reader types the commands of a folder's files: in a stage's folder, as d1's users do, or the root."""
    return ROOT / room if room in LAUNCHED else ROOT


def copy_checkout(folder: Path) -> Path:
    """A copy of the files of the checkout that git does not ignore."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def check_script(text: str, folder: Path = ROOT) -> None:
    """Raises the parser's error or AssertionError at the first command of a shell text that could not run."""
    for line in text.replace("\\\n", " ").splitlines():
        bare = re.sub(r"""('[^']*'|"[^"]*")|[<>]\s*\S+""", lambda found: found[1] or "", line)  # without redirections
        lexer = shlex.shlex(bare, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        for joins, words in itertools.groupby(lexer, lambda word: set(word) <= set(";&|")):
            folder = folder if joins else check_command(list(words), folder)


def check_command(words: list[str], folder: Path) -> Path:
    """Checks one command; returns the folder the next one runs in."""
    settings = {}
    while re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, settings[name] = words[0].partition("=")
        words = words[1:]
    program, arguments = Path(words[0]).name, [word for word in words[1:] if word != "..."]  # and flags of your own
    check_paths(arguments, folder)
    if program == "cd":
        assert (folder / arguments[0]).is_dir(), f"no folder {arguments[0]}"
        return (folder / arguments[0]).resolve()
    if program in ("bash", "sbatch"):
        check_shell_script(settings, [*itertools.dropwhile(lambda word: word.startswith("--"), arguments)], folder)
    elif program == "make":
        check_make(arguments)
    elif program in ("accelerate", "torchrun", "python"):
        check_python(program, arguments, folder)
    else:
        assert program in ("pip", "conda", "ruff", "mypy"), f"teach {program!r} to tests/commands.py"
    return folder


def check_paths(arguments: list[str], folder: Path) -> None:
    """A path in this repository's folders exists if an argument names it, unless it is an output or a pattern."""
    for path in (argument.partition(".py:")[0] for argument in arguments):
        inside = Path(os.path.normpath(folder / path))
        if "/" in path and inside.is_relative_to(ROOT) and (path.startswith("../") or folder == ROOT):
            room, *rest = inside.relative_to(ROOT).parts or [""]
            output = room in OUTPUTS or (room != "d1" and OUTPUTS & {*rest})
            if room in ROOMS and not output and not set(path) & set("*$<{"):
                assert inside.exists() or inside.with_suffix(".py").exists(), f"no {path} here"


def check_python(program: str, arguments: list[str], folder: Path) -> None:
    """Checks a launch of one of this project's scripts, directly or through accelerate or torchrun."""
    if arguments[:2] in (["-m", "pytest"], ["-m", "mkdocs"], ["-m", "sglang.launch_server"]):
        return  # not this project's; the paths were checked before
    if arguments[:2] == ["-m", "accelerate.commands.launch"]:
        program, arguments = "accelerate", ["launch", *arguments[2:]]
    if program != "python":
        known = launch_command_parser() if program == "accelerate" else torchrun_parser()
        launch = known.parse_args(arguments[program == "accelerate" :])
        config = getattr(launch, "config_file", None)
        assert not config or (folder / config).is_file(), f"no {config} here"
        module = ["-m"] if launch.module else []
        arguments = [*module, launch.training_script, *launch.training_script_args]
    script = folder / arguments[0]
    if arguments[0] == "-m":
        path, arguments = ROOT.joinpath(*arguments[1].split(".")), arguments[1:]
        script = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert script.is_file(), f"no script {arguments[0]} here"
    check_arguments(script.resolve(), arguments[1:], folder)


def check_arguments(script: Path, arguments: list[str], folder: Path) -> None:
    """The script's own parser accepts the arguments, yaml configs included."""
    if script == ROOT / "d1" / "__main__.py" and arguments[0] in STAGES:
        parser, arguments = importlib.import_module(STAGES[arguments[0]]).make_parser(), arguments[1:]
    else:
        parser = module_in(script, f"launched_{script.stem}").make_parser()
    if isinstance(parser, TrlParser):
        on_this_machine = [] if torch.cuda.is_available() else ["--use_cpu", "true"]  # or bf16 would be refused
        with contextlib.chdir(folder):  # configs are relative to it
            parser.parse_args_and_config([*arguments, *on_this_machine])
    elif "--help" not in arguments:
        with contextlib.chdir(folder):
            parser.parse_args(arguments)


def calls_of(script: Path, arguments: list[str], settings: dict[str, str], tmp: Path, gpus: int = 8) -> list[list[str]]:
    """Runs one of this project's shell scripts; returns its launches, each a program's name and its arguments."""
    log = tmp / "calls.jsonl"
    for name in ("python", "torchrun", "accelerate", "srun", "scontrol"):
        (tmp / name).write_text(FAKE)
        (tmp / name).chmod(0o755)
    environment = {"PATH": f"{tmp}:{os.environ['PATH']}", "HOME": str(tmp), "REAL_PYTHON": sys.executable}
    environment |= {"FAKE_CALLS": str(log), "FAKE_GPUS": str(gpus), "SLURM_SUBMIT_DIR": str(ROOT / "diffu-grpo")}
    environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))), "SLURM_NODEID": "0", **settings}
    subprocess.run(["bash", str(script), *arguments], env=environment, cwd=script.parent, timeout=60, check=True)
    return [json.loads(line) for line in log.read_text().splitlines()]


def check_shell_script(settings: dict[str, str], arguments: list[str], folder: Path) -> None:
    script = (folder / arguments[0]).resolve()
    assert script.is_file(), f"no {arguments[0]} here"
    if script.relative_to(ROOT).parts[0] not in ROOMS:
        return  # .ci/run, which would install and test for real
    for name in settings.keys() - {"CUDA_VISIBLE_DEVICES"}:
        assert name in script.read_text(), f"{script.name} does not read {name}"
    with tempfile.TemporaryDirectory() as tmp:
        for program, *rest in calls_of(script, arguments[1:], settings, Path(tmp)):
            check_python(program, rest, ROOT / "diffu-grpo" if script.suffix == ".sbatch" else script.parent)


def check_make(arguments: list[str]) -> None:
    """The targets exist, the variables are the Makefile's, and its own commands would run."""
    for name in (argument.partition("=")[0] for argument in arguments if "=" in argument):
        assert re.search(rf"^{name} \?=", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no variable {name}"
    environment = {"PATH": os.environ["PATH"]}  # without the variables of a make that runs this test
    said = subprocess.check_output(["make", "-n", *arguments], env=environment, cwd=ROOT, timeout=60, text=True)
    lines = [line.removeprefix(".venv/bin/") for line in said.splitlines()]
    check_script("\n".join(line for line in lines if line.startswith("python ") and " -m pip " not in line))
