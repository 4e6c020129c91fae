"""Fixtures of the SFT tests."""

from __future__ import annotations

from collections.abc import Iterator

import datasets
import pytest


@pytest.fixture(scope="session", autouse=True)
def own_datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the tests' rows out of the user's cache, in this process and in the processes that it starts."""
    folder = str(tmp_path_factory.mktemp("datasets"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", folder)
        yield
