"""The repository as a whole: pins, imports, names, and that what it ships to be launched can be launched."""

import ast
import graphlib
import importlib.metadata
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
    PACKAGES,
    ROOMS,
    ROOT,
    STAGES,
    BadCommand,
    check_make,
    check_script,
    check_shell_script,
    parse_shell,
    pyproject,
)

MODULES = sorted(path for room in (*PACKAGES, *STAGES) for path in (ROOT / room).rglob("*.py"))
SCRIPTS = [path for path in MODULES if path.relative_to(ROOT).parts[0] in STAGES]
SHELL = sorted(path for room in ROOMS for kind in ("*.sh", "*.sbatch") for path in (ROOT / room).rglob(kind))
YAML = sorted(path for room in (*STAGES, "launch") for path in (ROOT / room).rglob("*.yaml"))
COME_WITH_PINS = (
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "pyyaml",
)  # Transformers needs them itself
OPTIONAL = ("deepspeed", "bitsandbytes", "wandb", "flash_attn")
# d1's rooms from the ground up: each may import those before it.
LAYERS = (
    "lazy",
    "show",
    "tasks",
    "masking",
    "transformers_bridge",
    "models",
    "scoring",
    "sampling",
    "runs",
    "commands",
    "__main__",
)
# What each stage may import beside d1: other stages never, tools what they measure and draw with.
BESIDE_D1 = {"d1": (), "SFT": (), "diffu-grpo": (), "eval": (), "dataset": (), "pocket": (), "benchmarks": STAGES}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, typing_too: bool = True) -> set[str]:
    """The modules a file imports anywhere in it, by their full names, and the names it takes from them."""
    tree, found = ast.parse(path.read_text()), set()
    only_typing = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test) and not typing_too
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in only_typing:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node not in only_typing:
            assert node.level == 0, f"{path} imports relatively"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


# Pins


def test_env_yml_installs_the_same_pins_and_the_package():
    project, environment = pyproject()["project"], yaml.safe_load((ROOT / "env.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert environment["name"] == "d1"
    assert sorted(pip["pip"]) == sorted([*project["dependencies"], *project["optional-dependencies"]["gpu"], "-e ."])
    assert f"python={project['requires-python'].removeprefix('>=')}" in conda


def test_every_pin_names_a_version_and_the_extras_agree():
    project = pyproject()["project"]
    pins: dict[str, str] = {}
    for text in sum(project["optional-dependencies"].values(), project["dependencies"]):
        requirement = Requirement(text)
        if requirement.name != project["name"]:  # an extra that takes in another
            assert str(requirement.specifier).startswith("=="), text
            assert pins.setdefault(requirement.name, str(requirement.specifier)) == str(requirement.specifier)


def test_what_is_imported_is_what_the_pins_install():
    installed = {
        *map(canonical, COME_WITH_PINS),
        *(canonical(Requirement(p).name) for p in pyproject()["project"]["dependencies"]),
    }
    providers = importlib.metadata.packages_distributions()
    ours = {*PACKAGES, *OPTIONAL, *sys.stdlib_module_names, *(path.stem for path in SCRIPTS)}
    for path in MODULES:
        for module in {name.partition(".")[0] for name in imports_of(path)} - ours:
            found = {canonical(name) for name in providers.get(module, [])}
            assert found & installed, f"{name_of(path)} imports {module}, which is no dependency"


# Rooms


@pytest.mark.parametrize("room", BESIDE_D1)
def test_imports_run_one_way(room):
    allowed = {room, *BESIDE_D1[room]}
    others = {path.stem for path in SCRIPTS if path.relative_to(ROOT).parts[0] not in allowed}
    others |= set() if room == "benchmarks" else {"benchmarks"}
    for path in (ROOT / room).rglob("*.py"):
        found = {name.partition(".")[0] for name in imports_of(path)}
        assert not found & others, f"{name_of(path)} imports from another room"


def test_rooms_of_d1_build_on_those_below_and_tasks_know_no_model():
    for path in (ROOT / "d1").rglob("*.py"):
        room = module_of(path).split(".")[1] if path.parent != ROOT / "d1" or path.stem != "__init__" else LAYERS[0]
        above = LAYERS[LAYERS.index(room) + 1 :]
        found = {name.split(".")[1] for name in imports_of(path) if name.startswith("d1.")}
        assert not found & set(above), f"{name_of(path)} imports from a room above {room}"
        if room == "tasks":
            assert not {name.partition(".")[0] for name in imports_of(path)} & {"torch", "transformers", "trl"}


def test_no_modules_of_d1_import_each_other_in_a_circle():
    modules = {module_of(path): path for path in (ROOT / "d1").rglob("*.py")}
    graph = {name: imports_of(path, typing_too=False) & set(modules) for name, path in modules.items()}
    for name, needed in graph.items():  # a package is not a need of its own modules
        graph[name] = {other for other in needed if not name.startswith(f"{other}.")}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("room", ["d1", "SFT", "diffu-grpo", "eval", "benchmarks"])
def test_no_file_is_longer_than_300_lines(room):
    lines = {name_of(path): len(path.read_text().splitlines()) for path in (ROOT / room).rglob("*.py")}
    assert not {name: count for name, count in lines.items() if count > 300}


def test_no_module_hides_another():
    names = [path.stem for path in SCRIPTS]
    assert len(names) == len(set(names)), f"used twice: {sorted({name for name in names if names.count(name) > 1})}"
    taken = sys.stdlib_module_names | importlib.metadata.packages_distributions().keys()
    assert not {path.stem for path in MODULES if path.stem != "__init__"} & taken


def test_every_module_imports_in_silence_without_optional_packages(tmp_path):
    names = [path.stem if path in SCRIPTS else module_of(path) for path in MODULES]
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
    importlib.import_module(name)
present = [name for name in missing if importlib.util.find_spec(name) or name in sys.modules]
sys.exit(f"not hidden: {present}" if present else 0)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / room) for room in ("", *STAGES))}
    command = [sys.executable, "-c", program, ",".join(OPTIONAL), *names]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


# Launch files


@pytest.mark.parametrize("script", [*SHELL, ROOT / ".ci" / "run"], ids=name_of)
def test_shell_scripts_are_sound_and_launch_what_exists_with_flags_it_knows(script):
    assert "set -e" in script.read_text() or "exec " in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
    arguments = {"eval_checkpoints.sh": ["../runs/grpo", "--gen_length", "32"]}.get(script.name, [])
    check_shell_script({}, [script.name, *arguments], script.parent)


@pytest.mark.parametrize("path", YAML, ids=name_of)
def test_shipped_yaml_is_accepted_by_what_reads_it(path):
    if "distributed_type" in yaml.safe_load(path.read_text()):  # Accelerate's
        assert load_config_from_file(str(path)).num_processes >= 1
    else:
        check_script(f"python diffu_grpo_train.py --config {path} --model_path m --dataset sudoku", ROOT / "diffu-grpo")


def test_launch_lines_in_headers_and_docstrings_work():
    """They are indented and start with a program or its settings."""
    settings, programs = r'(?:[A-Z_]+=(?:".*?"|\S*) )*', "python|accelerate|bash|sbatch|make"
    line = re.compile(rf"^(?:#  |   ) +({settings}(?:{programs}) .*)$")
    wrong, seen = [], 0
    for path in [*MODULES, *SHELL, *YAML]:
        text, room = path.read_text(), path.relative_to(ROOT).parts[0]
        header = (ast.get_docstring(ast.parse(text), clean=False) or "") if path.suffix == ".py" else text
        for command in filter(None, map(line.match, header.replace("\\\n", " ").splitlines())):
            seen += 1
            try:
                check_script(command[1], ROOT / room if room in ("SFT", "diffu-grpo", "eval") else ROOT)
            except BadCommand as error:
                wrong.append(f"{name_of(path)}: {error}")
    assert seen > 10
    assert not wrong, "\n".join(wrong)


# The Makefile, and the checker itself


@pytest.mark.parametrize("target", [["demo", "SEED=1"], ["test"], ["bench"], ["lint"], ["clean"]])
def test_make_has_its_targets(target):
    check_make(target)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("python eval.py --model_path m --dataset sudoku --no_such_flag 1", "no_such_flag"),
        ("python gone.py", "no script"),
        ("cd ../diffu-GRPO", "no folder"),
        ("cd ../diffu-grpo && python diffu_grpo_train.py --config pocket.yaml --no_such_field 1", "no_such_field"),
        ("cd ../diffu-grpo && CUDA_VISIBLE_DEVICES=0,1 bash run.sh --no_such_field 1", "no_such_field"),
        ("cd ../diffu-grpo && NO_SUCH_SETTING=1 bash run.sh", "does not read"),
        ("cd ../diffu-grpo && accelerate launch --config_file gone.yaml diffu_grpo_train.py", "gone.yaml"),
        ("python -m d1 no_such_command", "no_such_command"),
        ("python eval.py --model_path ../pocket/gone --dataset sudoku", "no ../pocket/gone"),
        ("python eval.py --model_path m \\\n  --dataset sudoku # fine\npython eval.py --batch 4", "required"),
        ("make no_such_target", "No rule"),
        ("make demo NO_SUCH_VARIABLE=1", "no variable"),
        ("make test ARGS='-m no_such_marker'", "unknown marker"),
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
