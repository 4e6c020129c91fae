"""The ranges of versions that this package states: with others, numbers could be wrong."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


def check_versions() -> None:
    """Raise ImportError if an installed version is outside the range that this package
    states. A checkout that is not installed states none."""
    try:
        stated = map(Requirement, requires("d1") or [])
    except PackageNotFoundError:
        return
    wrong = [
        f"{need.name} is {installed}, and must be {need.specifier}"
        for need in stated
        if need.marker is None and not need.specifier.contains(installed := version(need.name), prereleases=True)
    ]
    if wrong:
        raise ImportError(f"d1 does not work with these versions: {'; '.join(wrong)}")
