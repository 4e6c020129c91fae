"""The repository as a whole: pins, imports, names, and that what it ships to be launched can be launched."""

import ast
import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from packaging.requirements import Requirement

from tests.commands import (
    ROOMS,
    ROOT,
    BadCommand,
    calls_of,
    check_make,
    check_script,
    check_shell_script,
    parse_shell,
    pyproject,
)

STAGES = ("SFT", "diffu-grpo", "eval", "pocket", "dataset")
PACKAGES = ("d1", "benchmarks")  # imported by their full names; the others hold scripts that import siblings by name
MODULES = sorted(path for room in (*PACKAGES, *STAGES) for path in (ROOT / room).rglob("*.py"))
SCRIPTS = [path for path in MODULES if path.relative_to(ROOT).parts[0] in STAGES]
SHELL = sorted(path for room in ROOMS for kind in ("*.sh", "*.sbatch") for path in (ROOT / room).rglob(kind))
YAML = sorted(path for room in (*STAGES, "launch") for path in (ROOT / room).rglob("*.yaml"))
OPTIONAL = ("deepspeed", "bitsandbytes", "wandb", "flash_attn")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def flags_of(call: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in itertools.pairwise(call) if flag.startswith("--")}


# Pins


def test_env_yml_installs_the_same_pins_and_the_package():
    project = pyproject()["project"]
    environment = yaml.safe_load((ROOT / "env.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert environment["name"] == "d1"
    assert sorted(pip["pip"]) == sorted([*project["dependencies"], *project["optional-dependencies"]["gpu"], "-e ."])
    version = next(entry.removeprefix("python=") for entry in conda if entry.startswith("python="))
    assert project["requires-python"] == f">={version}"


def test_every_pin_names_a_version_and_the_extras_agree():
    project = pyproject()["project"]
    pins: dict[str, str] = {}
    for text in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(text)
        if requirement.name != project["name"]:  # an extra that takes in another
            assert str(requirement.specifier).startswith("=="), text
            assert pins.setdefault(requirement.name, str(requirement.specifier)) == str(requirement.specifier)


def requirements_of(pins: list[str]) -> set[str]:
    """The distributions that come with pins, and with what those need in turn."""
    todo, seen = [Requirement(pin) for pin in pins], {}
    while todo:
        requirement = todo.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if seen.get(name, set()) >= {"", *requirement.extras}:
            continue
        seen[name] = seen.get(name, set()) | {"", *requirement.extras}
        try:
            needs = map(Requirement, importlib.metadata.requires(name) or [])
        except importlib.metadata.PackageNotFoundError:  # not needed on this platform
            continue
        for need in needs:
            if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in seen[name]):
                todo.append(need)
    return set(seen)


def imports_of(path: Path) -> set[str]:
    """The modules a file imports anywhere in it, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(str(node.module))
    return found


def test_what_is_imported_is_what_the_pins_install():
    installed = requirements_of(pyproject()["project"]["dependencies"])
    providers = importlib.metadata.packages_distributions()
    ours = {*PACKAGES, *(path.stem for path in SCRIPTS)}
    for path in MODULES:
        for module in {name.partition(".")[0] for name in imports_of(path)} - ours - set(sys.stdlib_module_names):
            names = {re.sub(r"[-_.]+", "-", name).lower() for name in providers.get(module, [])}
            assert module in OPTIONAL or names & installed, f"{name_of(path)} imports {module}, which is no dependency"


# Rooms


@pytest.mark.parametrize("room", ["d1", "SFT", "diffu-grpo", "eval"])
def test_imports_run_one_way(room):
    others = {"benchmarks", *(path.stem for path in SCRIPTS if path.parent.name != room)}
    for path in (ROOT / room).rglob("*.py"):
        found = {name.partition(".")[0] for name in imports_of(path)}
        assert not found & others, f"{name_of(path)} imports from another room"


def test_no_module_hides_another():
    names = [path.stem for path in SCRIPTS]
    assert len(names) == len(set(names)), f"used twice: {sorted({name for name in names if names.count(name) > 1})}"
    taken = sys.stdlib_module_names | importlib.metadata.packages_distributions().keys()
    assert not {path.stem for path in MODULES if path.stem != "__init__"} & taken


def test_every_module_imports_in_silence_without_optional_packages(tmp_path):
    names = [
        path.stem if path in SCRIPTS else ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES
    ]
    program = """
import importlib, importlib.util, sys
from importlib.machinery import PathFinder
missing, names = sys.argv[1].split(","), sys.argv[2:]
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else super().find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
for name in names:
    importlib.import_module(name.removesuffix(".__init__"))
present = [name for name in missing if importlib.util.find_spec(name) or name in sys.modules]
sys.exit(f"not hidden: {present}" if present else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, ",".join(OPTIONAL), *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / room) for room in ("", *STAGES))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


# Launch files


@pytest.mark.parametrize("script", [*SHELL, ROOT / ".ci" / "run"], ids=name_of)
def test_shell_scripts_are_sound_bash(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "set -e" in script.read_text() or "exec " in script.read_text()


@pytest.mark.parametrize("script", SHELL, ids=name_of)
def test_shell_scripts_launch_what_exists_with_flags_it_knows(script):
    arguments = {"eval_checkpoints.sh": ["../runs/grpo", "--gen_length", "32"]}.get(script.name, [])
    check_shell_script({}, [script.name, *arguments], script.parent)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_effective_batch_does_not_depend_on_the_number_of_gpus(gpus, tmp_path):
    (call,) = calls_of(ROOT / "diffu-grpo" / "run.sh", [], {"GPUS": str(gpus)}, tmp_path)
    flags = flags_of(call)
    sizes = [flags[f"--{name}"] for name in ("num_processes", "per_device_train_batch_size")]
    assert int(sizes[0]) == gpus
    assert int(sizes[0]) * int(sizes[1]) * int(flags["--gradient_accumulation_steps"]) == 96


def test_a_named_model_runs_without_a_gpu(tmp_path):
    settings = {"GPUS": "0", "MODEL_PATH": "../pocket/base", "DATASET": "sudoku"}
    (call,) = calls_of(ROOT / "diffu-grpo" / "run.sh", ["--max_steps", "1"], settings, tmp_path)
    flags = flags_of(call)
    assert (flags["--config_file"], flags["--load_in_4bit"], flags["--bf16"]) == (
        "../launch/cpu.yaml",
        "false",
        "false",
    )
    assert (flags["--num_processes"], flags["--max_steps"]) == ("1", "1")


def test_a_config_of_its_own_keeps_its_batch_whatever_the_number_of_gpus(tmp_path):
    (call,) = calls_of(ROOT / "diffu-grpo" / "run.sh", [], {"CONFIG": "pocket.yaml"}, tmp_path, gpus=8)
    assert flags_of(call)["--num_processes"] == "1"


def test_two_nodes_share_the_same_batch(tmp_path):
    scripts = [path for path in SHELL if path.name.endswith("2nodes.sbatch")]
    assert scripts
    for script in scripts:
        (call,) = calls_of(script, [], {}, tmp_path)
        flags = flags_of(call)
        assert (flags["--num_processes"], flags["--num_machines"], flags["--machine_rank"]) == ("16", "2", "0")
        assert int(flags["--per_device_train_batch_size"]) * 16 * int(flags["--gradient_accumulation_steps"]) == 96


@pytest.mark.parametrize("path", YAML, ids=name_of)
def test_shipped_yaml_is_accepted_by_what_reads_it(path):
    content = yaml.safe_load(path.read_text())
    if "distributed_type" in content:  # Accelerate's
        config = load_config_from_file(str(path))
        assert config.num_processes >= 1
    else:
        check_script(f"python diffu_grpo_train.py --config {path} --model_path m --dataset sudoku", ROOT / "diffu-grpo")


def documented_commands() -> list[tuple[str, str, Path]]:
    """The launch lines that headers and docstrings give: indented, and starting with a program or its settings."""
    settings, programs = r'(?:[A-Z_]+=(?:".*?"|\S*) )*', "python|accelerate|torchrun|bash|sbatch|make"
    line = re.compile(rf"^(?:#  |   ) +({settings}(?:{programs}) .*)$")
    found = []
    for path in [*MODULES, *SHELL, *YAML]:
        text = path.read_text()
        header = (ast.get_docstring(ast.parse(text), clean=False) or "") if path.suffix == ".py" else text
        for command in filter(None, map(line.match, header.replace("\\\n", " ").splitlines())):
            room = path.relative_to(ROOT).parts[0]
            found.append((name_of(path), command[1], ROOT / room if room in ("SFT", "diffu-grpo", "eval") else ROOT))
    return found


@pytest.mark.parametrize(("where", "command", "folder"), documented_commands())
def test_launch_lines_in_headers_and_docstrings_work(where, command, folder):
    check_script(command, folder)


# The Makefile, and the checker itself


@pytest.mark.parametrize("target", [["demo", "SEED=1"], ["test"], ["lint"], ["clean"]])
def test_make_has_its_targets(target):
    check_make(target)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("python eval.py --model_path m --dataset sudoku --no_such_flag 1", "no_such_flag"),
        ("python eval.py --model_path m --dataset sudoku --gen_length long", "invalid int"),
        ("python gone.py", "no script"),
        ("cd ../diffu-GRPO", "no folder"),
        ("cd ../diffu-grpo && python diffu_grpo_train.py --config pocket.yaml --no_such_field 1", "no_such_field"),
        ("cd ../diffu-grpo && python diffu_grpo_train.py --config gone.yaml", "gone.yaml"),
        ("cd ../diffu-grpo && CUDA_VISIBLE_DEVICES=0,1 bash run.sh --no_such_field 1", "no_such_field"),
        ("cd ../diffu-grpo && NO_SUCH_SETTING=1 bash run.sh", "does not read"),
        ("cd ../diffu-grpo && accelerate launch --config_file gone.yaml diffu_grpo_train.py", "gone.yaml"),
        ("accelerate launch --no_such_flag eval.py --model_path m --dataset sudoku", "no_such_flag"),
        ("python eval.py --model_path ../pocket/gone --dataset sudoku", "no ../pocket/gone"),
        ("python eval.py --model_path m \\\n  --dataset sudoku # fine\npython eval.py --batch 4", "required"),
        ("make no_such_target", "No rule"),
        ("make demo NO_SUCH_VARIABLE=1", "no variable"),
        ("make test ARGS='-m no_such_marker'", "unknown marker"),
        ("pip install torch", "does not pin"),
        ("frobnicate", "unknown program"),
    ],
)
def test_the_checker_finds_rotten_commands(command, complaint):
    with pytest.raises(BadCommand, match=re.escape(complaint)):
        check_script(command, ROOT / "eval")


def test_the_checker_sees_every_command():
    text = 'A=1 B="x y" python a.py --n 1 \\\n    --m 2 > log.txt # why\n\ncd b && make c; bash d.sh | e\n'
    words = [["A=1", "B=x y", "python", "a.py", "--n", "1", "--m", "2"], ["cd", "b"], ["make", "c"]]
    assert parse_shell(text) == [*words, ["bash", "d.sh"], ["e"]]
