from collections.abc import Iterator

import datasets.config
import pytest


@pytest.fixture(autouse=True, scope="session")
def own_datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the rows of these tests, some with names of real datasets, out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield
