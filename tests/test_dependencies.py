"""The pinned packages include everything that the code imports."""

import importlib.metadata
import re
import sys
import tomllib

from packaging.requirements import Requirement

from tests.commands import ROOT
from tests.test_packaging import MODULES, NAMES, OPTIONAL, imports_of


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements_of(pins: list[str]) -> set[str]:
    """The distributions that the pins install, including indirect dependencies."""
    todo, seen = [Requirement(pin) for pin in pins], {}
    while todo:
        requirement = todo.pop()
        name = canonical(requirement.name)
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    library = requirements_of(project["dependencies"])
    studies = library | requirements_of(project["optional-dependencies"]["studies"])
    providers = importlib.metadata.packages_distributions()
    ours = {name.partition(".")[0] for name in NAMES}
    for path in MODULES:
        installed = library if path.is_relative_to(ROOT / "d1") else studies
        for module in {name.partition(".")[0] for name in imports_of(path)} - ours - set(sys.stdlib_module_names):
            names = {canonical(name) for name in providers.get(module, [])}
            assert module in OPTIONAL or names & installed, f"{path} imports {module}, which is no dependency"
