"""Models whose predictions are so certain that reveal rules reveal several tokens."""

from functools import cache

import pytest

from d1.models import load_model
from tests.d1.sampling.reference import sharper


@pytest.fixture(scope="session")
def load(kind_dirs):
    """`load(kind, **options of load_model)`, once per session: do not change these models."""
    return cache(lambda kind, **options: sharper(load_model(kind_dirs[kind], **options)))
