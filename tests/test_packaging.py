"""The repository as a whole: pins, imports, names, and that the files to launch can be launched."""

import ast
import contextlib
import graphlib
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.commands import LAUNCHED, PACKAGES, ROOMS, ROOT, check_script, folder_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONAL = ("deepspeed", "bitsandbytes", "wandb", "flash_attn", "lm_eval", "fastapi", "starlette")
OPTIONAL += ("uvicorn", "sglang", "tensordict", "verl", "gguf")
# d1's folders from the bottom up: each may import itself and those of earlier lines.
LAYERS = (
    ("versions",),
    ("cpus", "files", "lazy", "ranges"),
    ("extensions", "hub", "sandbox", "transformers_bridge"),
    ("models", "masking", "tasks"),
    ("sampling",),
    ("scoring",),
    ("runs",),
    ("show",),
    ("sft", "rl", "eval"),
    ("preference", "distill", "serve", "tools"),
    ("report",),
    ("commands",),
    ("__main__",),
)
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
OUTSIDE = {  # folders that use the package like any user -> the other folders from which they may import
    "dataset": (),
    "examples": (),
    "pocket": ("dataset",),
    "smollm": ("pocket",),
    "studies": ("pocket", "dataset", "benchmarks"),
    "benchmarks": ("pocket",),
}
MODULES = sorted(path for room in PACKAGES for path in (ROOT / room).rglob("*.py"))
SCRIPTS = sorted(path for room in LAUNCHED for path in (ROOT / room).rglob("*.py"))
SHELL = sorted(  # those of tests prepare, and launch nothing
    path for room in {*ROOMS} - {"tests"} for kind in ("*.sh", "*.sbatch") for path in (ROOT / room).rglob(kind)
)
YAML = sorted(path for room in (*LAUNCHED, "launch", "recipes") for path in (ROOT / room).rglob("*.yaml"))


NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports anywhere, and the names imported from them; not imports only for types."""
    tree = ast.parse(path.read_text())
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    nodes = {*ast.walk(tree)} - {node for block in blocks for node in ast.walk(block)}
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    taken = [(str(node.module), node.names) for node in nodes if isinstance(node, ast.ImportFrom)]
    return found | {name for of, names in taken for name in (of, *(f"{of}.{alias.name}" for alias in names))}


def requirements_of(pins: list[str]) -> set[str]:
    """The distributions that the pins install, including indirect dependencies."""
    todo, seen = [Requirement(pin) for pin in pins], {}
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
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


def test_what_is_imported_is_what_the_pins_install():
    """The library imports only its own dependencies; other folders may need the extra `studies`."""
    library = requirements_of(PROJECT["project"]["dependencies"])
    studies = library | requirements_of(PROJECT["project"]["optional-dependencies"]["studies"])
    providers = importlib.metadata.packages_distributions()
    for path in MODULES:
        installed = library if path.is_relative_to(ROOT / "d1") else studies
        for module in {name.partition(".")[0] for name in imports_of(path)} - {*PACKAGES} - sys.stdlib_module_names:
            names = {canonicalize_name(name) for name in providers.get(module, [])}
            assert module in OPTIONAL or names & installed, f"{path} imports {module}, which is no dependency"


def test_the_version_is_the_same_wherever_it_stands():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version, date = re.search(r"^## \[(.+?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert (version, date) == (citation["version"], citation["date-released"])
    assert version == PROJECT["project"]["version"]


def pins_of(file: str) -> dict[str, str]:
    """Distribution -> its version in a constraints file."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_versions_that_are_installed_or_tested_lie_in_the_stated_ranges():
    """What the README installs, what runs these tests, the ends that `make test-versions` tries, and Unsloth's pins."""
    project = PROJECT["project"]
    lowest = project["requires-python"].removeprefix(">=")
    ranges = [Requirement(need) for need in (*project["dependencies"], *project["optional-dependencies"]["serve"])]
    sets = (f"tests/versions/{name}.txt" for name in ("oldest", "newest", "unsloth"))
    installed, oldest, newest, unsloth = map(pins_of, ("constraints.txt", *sets))
    for need in ranges:
        name = canonicalize_name(need.name)
        ends = [clause for clause in need.specifier if clause.operator == ">="]
        assert oldest[name].startswith(ends[0].version), name  # the lower end itself
        for version in (installed[name], oldest[name], newest[name]):
            assert need.specifier.contains(version), (name, version)
        assert need.specifier.contains(unsloth.get(name, installed[name])), name
    for name, version in installed.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another platform or extra
            assert importlib.metadata.version(name).partition("+")[0] == version, name
            python = importlib.metadata.metadata(name)["Requires-Python"]
            assert SpecifierSet(python or "").contains(f"{lowest}.0"), f"{name} {version} needs Python {python}"


def test_another_version_is_one_error_at_import(monkeypatch):
    versions = importlib.metadata.version
    monkeypatch.setattr("d1.versions.version", lambda name: "5.16.1" if name == "transformers" else versions(name))
    monkeypatch.delitem(sys.modules, "d1.transformers_bridge")
    with pytest.raises(ImportError, match=r"transformers is 5\.16\.1, and must be [<>=,.\d]*>=5\.17"):
        importlib.import_module("d1.transformers_bridge")


def test_the_wheel_takes_what_modules_read_beside_them():
    taken = PROJECT["tool"]["setuptools"]["package-data"]["d1"]
    beside = [path for path in (ROOT / "d1").rglob("*.*") if path.suffix not in (".py", ".pyc")]
    assert sorted(taken) == sorted(str(path.relative_to(ROOT / "d1")) for path in beside)


def test_imports_run_one_way():
    for name, path in NAMES.items():
        top, _, rest = name.partition(".")
        own = rest.partition(".")[0]
        for other in imports_of(path):
            folder, _, inside = other.partition(".")
            if folder in OUTSIDE:
                assert folder in (top, *OUTSIDE.get(top, ())), f"{name} imports {other}"
            room = inside.partition(".")[0]
            if folder == top == "d1" and room in LAYER and own in LAYER and room != own:
                assert LAYER[room] < LAYER[own], f"{name} imports {other}, which lies in a room above its own"
        if name.startswith("d1.tasks"):
            assert not {other.partition(".")[0] for other in imports_of(path)} & {"torch", "transformers", "trl"}


def test_scripts_that_users_launch_import_the_package_alone():
    for path in SCRIPTS:
        assert {name.partition(".")[0] for name in imports_of(path)} == {"d1"}, path
    taken = sys.stdlib_module_names | importlib.metadata.packages_distributions().keys() - {*PACKAGES}
    assert not {path.stem for path in SCRIPTS} & taken  # none hides a module


def test_no_modules_import_each_other_in_a_circle():
    needs = {name: imports_of(path) & set(NAMES) for name, path in NAMES.items()}
    packages = {name: {other for other in NAMES if name.startswith(f"{other}.")} for name in NAMES}  # its own: no need
    list(graphlib.TopologicalSorter({name: needs[name] - packages[name] - {name} for name in NAMES}).static_order())


def test_every_module_imports_in_silence_without_optional_packages(tmp_path):
    program = f"import importlib, sys; sys.modules |= dict.fromkeys({OPTIONAL})\n"  # None: it cannot be imported
    names = [name for name in NAMES if name != "examples.verl_actor"]  # an example of verl
    program += f"for name in {names}: importlib.import_module(name)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert not subprocess.check_output([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [*SHELL, *YAML], ids=lambda path: path.name)
def test_shell_scripts_and_configs_launch_what_exists_with_flags_it_knows(path):
    if path.suffix != ".yaml":
        assert re.search(r"^(set -e|exec )", path.read_text(), re.MULTILINE)
        check_script(f"bash {path.name}", path.parent)
    elif "distributed_type" not in path.read_text():  # Accelerate's are in tests/launch
        stages = {"preference": "prefer --train_data f", "distill": "distill --train_data f", "sft": "sft"}
        stage = stages.get(path.stem.rpartition("-")[2], "rl --dataset sudoku")
        check_script(f"python -m d1 {stage} --config {path} --model_path m")


def test_launch_lines_in_headers_and_docstrings_work():
    """Commands are indented and start with a program or its environment variables."""
    line = re.compile(r'^(?:#  |   ) +((?:[A-Z_]+=(?:".*?"|\S*) )*(?:python|accelerate|bash|sbatch|make) .*)$')
    seen = 0
    for path in [*MODULES, *SCRIPTS, *SHELL, *YAML]:
        text = path.read_text()
        header = (ast.get_docstring(ast.parse(text), clean=False) or "") if path.suffix == ".py" else text
        for command in filter(None, map(line.match, header.replace("\\\n", " ").splitlines())):
            seen += 1
            check_script(command[1], folder_of(path.relative_to(ROOT).parts[0]))
    assert seen > 10
