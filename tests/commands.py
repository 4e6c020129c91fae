"""Checks a command line without running it: files exist, and each script's own parser accepts its arguments.

A shell script of ours is run for real, with a `python` that only notes what it was called with; so is `make`, with -n.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from types import ModuleType

import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser
from trl import TrlParser

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("d1", "SFT", "diffu-grpo", "eval", "launch", "dataset", "pocket", "benchmarks", "tests")
OUTPUTS = {"runs", "results"}
HARMLESS = {"export", "source"}
TOOLS = ("pytest", "ruff", "mypy")
NEEDED = {  # what the reader of a command that ends with ... has to add at least
    "diffu_grpo_train.py": {"--config": "pocket.yaml"},
    "eval.py": {"--model_path": "m", "--dataset": "sudoku"},
}
PYTHON = re.compile(r"python(3(\.\d+)?)?")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

# Stands in for python, torchrun, accelerate, srun and scontrol: notes a launch, answers a question, passes on.
FAKE = """#!/bin/bash
case $(basename "$0") in
    srun) exec "$@" ;;
    scontrol) echo node0 ;;
    *) if [ "$1" = -c ]; then echo "$FAKE_GPUS"; else
        "$REAL_PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$(basename "$0")" "$@" >>"$FAKE_CALLS"
    fi ;;
esac
"""


class BadCommand(AssertionError):
    """A command that could not run as written."""


def need(condition: object, message: str) -> None:
    if not condition:
        raise BadCommand(message)


def parse_shell(text: str) -> list[list[str]]:
    """The simple commands of shell text, in order: comments, redirections and what joins commands are dropped."""
    commands: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        redirected = False
        for word in lexer:
            if set(word) <= set(";&|"):
                commands.append(words)
                words = []
            elif set(word) <= set("<>"):
                redirected = True
            elif redirected:
                redirected = False
            else:
                words.append(word)
        commands.append(words)
    return [words for words in commands if words]


def check_script(text: str, folder: Path = ROOT) -> None:
    """Checks shell text from the first command to the last, each in the folder that the `cd`s before it lead to.

    Raises:
        BadCommand: says which command cannot run as written, and why.
    """
    for words in parse_shell(text):
        try:
            folder = check_command(words, folder)
        except BadCommand as error:
            raise BadCommand(f"`{shlex.join(words)}` in {folder}: {error}") from error


def check_command(words: list[str], folder: Path) -> Path:
    """Checks one command; returns the folder the next one runs in."""
    settings: dict[str, str] = {}
    while words and ASSIGNMENT.match(words[0]):
        name, _, settings[name] = words[0].partition("=")
        words = words[1:]
    if not words or words[0] in HARMLESS:
        return folder
    if words[-1] == "...":  # and flags of your own
        needed = next((flags for script, flags in NEEDED.items() if script in words), {})
        words = [*words[:-1], *(word for flag in needed.items() if flag[0] not in words for word in flag)]
    program, arguments = Path(words[0]).name, words[1:]
    check_paths(arguments, folder)
    if program == "git":
        need(arguments[0] == "clone", "git is only known to clone")
        return folder / ".." if folder == ROOT else folder
    if program == "cd":
        if folder == ROOT / "..":  # into what `git clone` made, whatever its name
            return ROOT
        need((folder / arguments[0]).is_dir(), f"no folder {arguments[0]}")
        return (folder / arguments[0]).resolve()
    if program in ("bash", "sbatch"):
        check_shell_script(settings, arguments, folder)
    elif program == "make":
        check_make(arguments)
    elif program in ("pip", "conda"):
        check_install(program, arguments, folder)
    elif program in ("accelerate", "torchrun") or PYTHON.fullmatch(program):
        check_python(program, arguments, folder)
    elif program in TOOLS:
        check_tool(program, arguments)
    else:
        raise BadCommand(f"unknown program {program!r}: teach it to tests/commands.py")
    return folder


def check_paths(arguments: list[str], folder: Path) -> None:
    """What an argument names inside the rooms of this repository exists, unless it is an output or a pattern."""
    for argument in arguments:
        path = argument.partition("::")[0].partition(".py:")[0]
        inside = Path(os.path.normpath(folder / path))
        if "/" not in path or not inside.is_relative_to(ROOT) or not (path.startswith("../") or folder == ROOT):
            continue
        parts = inside.relative_to(ROOT).parts
        if parts and parts[0] in ROOMS and not OUTPUTS.intersection(parts) and not re.search(r"[*$<{]", path):
            need(inside.exists() or inside.with_suffix(".py").exists(), f"no {path} here")


def check_python(program: str, arguments: list[str], folder: Path) -> None:
    """A launch of one of our scripts, through accelerate or torchrun or not."""
    if arguments[:2] == ["-m", "venv"] or arguments[:1] == ["-c"]:
        return
    if arguments[:1] == ["-m"]:
        module, rest = arguments[1], arguments[2:]
        if module == "pip":
            return check_install(module, rest, folder)
        if module in TOOLS:
            return check_tool(module, rest)
        if module not in ("accelerate.commands.launch", "torch.distributed.run"):
            script = ROOT.joinpath(*module.split("."))
            script = script / "__main__.py" if script.is_dir() else script.with_suffix(".py")
            need(script.is_file(), f"no module {module}")
            return check_arguments(script, rest, folder)
        program, arguments = ("accelerate", ["launch", *rest]) if "accelerate" in module else ("torchrun", rest)
    if program == "accelerate":
        need(arguments[:1] == ["launch"], "accelerate is only known to launch")
        launch = parse(launch_command_parser(), arguments[1:])
        need(not launch.config_file or (folder / launch.config_file).is_file(), f"no {launch.config_file} here")
        arguments = [launch.training_script, *launch.training_script_args]
    elif program == "torchrun":
        launch = parse(torchrun_parser(), arguments)
        arguments = [launch.training_script, *launch.training_script_args]
    need(arguments and (folder / arguments[0]).is_file(), f"no script {arguments[:1]} here")
    return check_arguments((folder / arguments[0]).resolve(), arguments[1:], folder)


def check_arguments(script: Path, arguments: list[str], folder: Path) -> None:
    """The script's own parser accepts the arguments, yaml configs included."""
    parser = load_script(script).make_parser()
    if script.name == "checkpoint_selection.py":  # what it does not know it passes on
        _, rest = parser.parse_known_args(arguments)
        parse(load_script(ROOT / "eval" / "eval.py").make_parser(), ["--model_path", "m", "--dataset", "sudoku", *rest])
    elif isinstance(parser, TrlParser):
        on_this_machine = [] if torch.cuda.is_available() else ["--use_cpu", "true"]  # or bf16 would be refused
        with contextlib.chdir(folder):  # configs are relative to it
            try:
                parser.parse_args_and_config([*arguments, *on_this_machine])
            except (SystemExit, ValueError, OSError) as error:
                raise BadCommand(f"{script.name} does not accept this: {error}") from error
    else:
        parse(parser, arguments)


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(arguments)
    except SystemExit as error:
        raise BadCommand(said.getvalue().strip().splitlines()[-1]) from error


def load_script(script: Path) -> ModuleType:
    """The module of a script; those of the stages import their siblings by name, as pytest's pythonpath allows."""
    need(script.is_file(), f"no script {script}")
    if script.relative_to(ROOT).parts[0] in ("d1", "benchmarks"):
        return importlib.import_module(".".join(script.relative_to(ROOT).with_suffix("").parts))
    if script.parent.name in ("SFT", "diffu-grpo", "eval", "pocket"):
        return importlib.import_module(script.stem)
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls_of(script: Path, arguments: list[str], settings: dict[str, str], tmp: Path, gpus: int = 8) -> list[list[str]]:
    """Runs a shell script of ours and returns what it would have launched: a program's name and its arguments each."""
    tmp.mkdir(parents=True, exist_ok=True)
    log = tmp / "calls.jsonl"
    log.unlink(missing_ok=True)
    for name in ("python", "torchrun", "accelerate", "srun", "scontrol"):
        (tmp / name).write_text(FAKE)
        (tmp / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", str(tmp)),
        "FAKE_CALLS": str(log),
        "FAKE_GPUS": str(gpus),
        "REAL_PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "SLURM_SUBMIT_DIR": str(ROOT / "diffu-grpo"),
        "SLURM_NODEID": "0",
        **settings,
    }
    done = subprocess.run(
        ["bash", str(script), *arguments],
        env=environment,
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    need(done.returncode == 0, f"{script.name} failed: {done.stderr}")
    need(log.exists(), f"{script.name} launched nothing: {done.stdout}")
    return [json.loads(line) for line in log.read_text().splitlines()]


def check_shell_script(settings: dict[str, str], arguments: list[str], folder: Path) -> None:
    script = (folder / arguments[0]).resolve()
    need(script.is_file(), f"no {arguments[0]} here")
    if script.relative_to(ROOT).parts[0] not in ROOMS:
        return  # .ci/run, which would install and test for real
    text = script.read_text()
    for name in settings:
        need(name == "CUDA_VISIBLE_DEVICES" or name in text, f"{script.name} does not read {name}")
    with tempfile.TemporaryDirectory() as tmp:
        for program, *rest in calls_of(script, arguments[1:], settings, Path(tmp)):
            runs_in = ROOT / "diffu-grpo" if script.suffix == ".sbatch" else script.parent
            check_python(program, rest, runs_in)


def check_make(arguments: list[str]) -> None:
    """The targets exist, the variables are the Makefile's, and its own commands would run."""
    makefile = (ROOT / "Makefile").read_text()
    for name in (argument.partition("=")[0] for argument in arguments if "=" in argument):
        need(re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"the Makefile has no variable {name}")
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "-n", *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    need(done.returncode == 0, done.stderr)
    for words in parse_shell("\n".join(line for line in done.stdout.splitlines() if line.startswith("python "))):
        check_command(words, ROOT)


def check_tool(program: str, arguments: list[str]) -> None:
    """pytest's markers and paths exist (its paths were looked at before); ruff and mypy have no files to name."""
    if program == "pytest" and "-m" in arguments:
        expression = arguments[arguments.index("-m") + 1]
        markers = pyproject()["tool"]["pytest"]["ini_options"]["markers"]
        known = {marker.partition(":")[0] for marker in markers} | {"not", "and", "or"}
        need(known.issuperset(re.findall(r"\w+", expression)), f"unknown marker in {expression!r}")


def check_install(program: str, arguments: list[str], folder: Path) -> None:
    """pip installs this package, its extras or its own pins; conda makes and activates the environment of env.yml."""
    project = pyproject()["project"]
    if program == "conda":
        environment = yaml.safe_load((ROOT / "env.yml").read_text())["name"]
        known = (["env", "create", "-f", "env.yml"], ["activate", environment], ["deactivate"])
        need(arguments in known, f"conda is only known to do {known}")
        return
    extras = project["optional-dependencies"]
    pins = {*project["dependencies"], *(pin for pins in extras.values() for pin in pins)}
    need(arguments[:1] == ["install"], "pip is only known to install")
    for argument in arguments[1:]:
        if argument.startswith("-"):
            continue
        package = re.fullmatch(r"\.(\[([\w,]+)\])?", argument)
        if package:
            need(folder == ROOT, "the package lies at the top of the repository")
            named = set((package[2] or "").split(",")) - {""}
            need(named <= set(extras), f"pyproject.toml has no extras {named - set(extras)}")
        else:
            need(argument in pins, f"pyproject.toml does not pin {argument}")


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
