"""The ranges of versions that this package states: with others, numbers could be wrong."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


def check_versions() -> None:
    """Raise ImportError if an installed version is outside the range that this package states. A checkout that is not
    installed states none; what is not installed has none."""
    wrong = []
    with suppress(PackageNotFoundError):
        for need in map(Requirement, requires("d1") or []):
            with suppress(PackageNotFoundError):
                if need.marker is None and not need.specifier.contains(version(need.name), prereleases=True):
                    wrong.append(f"{need.name} is {version(need.name)}, and must be {need.specifier}")
    if wrong:
        raise ImportError(f"d1 does not work with these versions: {'; '.join(wrong)}")
