"""The tolerance of comparisons holds for every kind of model on this processor, and would not hide a fault."""

from typing import Any

import pytest
import torch
from torch import Tensor

from d1.models import load_model
from tests.d1.conftest import KINDS, VOCAB, write_kind
from tests.rounding import LOGITS, assert_near, largest, rounding

MIXTURES = ("sdar_moe", "lladamoe", "llada2_moe")  # the kernel of their experts has no fp64


def test_the_largest_difference_is_that_of_many_sums_and_no_more():
    """8 sqrt(64) eps for values of size 1: two sums of 64 terms differ by less, two bf16 numbers by more."""
    assert rounding(1.0) == pytest.approx(64 * 2.0**-23)
    assert rounding(3.0, terms=256, dtype=torch.float64) == pytest.approx(3 * 128 * 2.0**-52)
    values = torch.rand(1000, 64, generator=torch.Generator().manual_seed(0)) - 0.5
    forwards, backwards = torch.zeros(1000), torch.zeros(1000)
    for term in range(64):
        forwards, backwards = forwards + values[:, term], backwards + values[:, 63 - term]
    assert not torch.equal(forwards, backwards)
    assert_near(forwards, backwards)
    with pytest.raises(AssertionError):
        assert_near(forwards.bfloat16().float(), backwards)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MIXTURES])
@torch.no_grad()
def test_logits_are_within_half_of_it_from_those_in_double_precision(tmp_path, kind):
    """Two results that are each within half are within all of it, whatever the two processors were."""
    folder = write_kind(tmp_path / kind, kind)
    ids = torch.randint(8, VOCAB, (8, 24), generator=torch.Generator().manual_seed(0))

    def logits(dtype: torch.dtype) -> Tensor:
        model: Any = load_model(folder, dtype)
        return model(input_ids=ids).logits[..., :VOCAB].double()

    found, exact = logits(torch.float32), logits(torch.float64)
    assert largest(exact) < LOGITS
    assert (found - exact).abs().max() < rounding(largest(exact)) / 2
