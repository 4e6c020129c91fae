"""Fixtures of the tests of RL on servers."""

from __future__ import annotations

import pytest

from d1.serve import KEY


@pytest.fixture
def server_key(monkeypatch):
    """The key of the fleet's servers, where trainers look for it."""
    from tests.d1.rl.fleet import SECRET  # only here: it imports the server

    monkeypatch.setenv(KEY, SECRET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a module's runs; servers read weights below it."""
    return tmp_path_factory.mktemp("runs")
