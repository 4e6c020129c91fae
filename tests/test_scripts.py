"""The scripts outside of d1/ check the ranges of their numbers, as its commands do."""

from __future__ import annotations

import pytest

from benchmarks import gpu
from pocket import demo, learning, make_base, make_products_base, pairs
from smollm import data, run
from studies.tools import run as tools

PAIRS = ["--model_path", "m", "--task", "sudoku", "--output", "o", "--gen_length", "8"]


@pytest.mark.parametrize(
    ("script", "words", "named"),
    [
        (demo, ["--jobs", "0"], "--jobs 0"),
        (demo, ["--seed", "-1"], "--seed -1"),
        (learning, ["--jobs", "0"], "--jobs 0"),
        (pairs, [*PAIRS, "--samples", "0"], "--samples 0"),
        (make_base, ["--block_size", "0"], "--block_size 0"),
        (make_products_base, ["folder", "--steps", "0"], "--steps 0"),
        (run, ["--limit", "0"], "--limit 0"),
        (data, ["rows.jsonl", "--task", "svamp", "--limit", "-1"], "--limit -1"),
        (tools, ["--seeds", "0", "-1"], "--seeds"),
        (gpu, ["--minutes", "0"], "--minutes 0"),
        (gpu, ["--peak", "nan"], "--peak nan"),
    ],
)
def test_a_number_out_of_its_range_is_refused(script, words, named):
    with pytest.raises(ValueError, match=f"^out of range: {named}"):
        script.make_parser().parse_args(words)
