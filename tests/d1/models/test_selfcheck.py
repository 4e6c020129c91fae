"""A decoder of the installed Transformers computes the same with a cache; a renamed argument is noticed, once."""

from __future__ import annotations

import pytest
import torch

from d1.models import head, prepare, selfcheck
from d1.transformers_bridge import CACHE


def test_a_cache_that_a_hook_does_not_see_is_an_error(monkeypatch, tmp_path):
    before = torch.random.get_rng_state()
    selfcheck.check_environment(prepare, tmp_path / "marks")
    (mark,) = (tmp_path / "marks").iterdir()
    assert "transformers_" in mark.name
    monkeypatch.setattr(head, "CACHE", f"{CACHE}_of_another_version")
    selfcheck.check_environment(prepare, tmp_path / "marks")  # these versions were checked
    mark.unlink()
    with pytest.raises(RuntimeError, match=r"with a cache differ from those without by \d.* constraints\.txt"):
        selfcheck.check_environment(prepare, tmp_path / "marks")
    assert not mark.exists()
    assert torch.equal(torch.random.get_rng_state(), before)
