"""Tables, running means, and the picture of a rollout: each against what is written out by hand."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from d1.show.curves import running_mean
from d1.show.denoise import COLOURS, colour, denoise_svg
from d1.show.tables import markdown_table

SVG = "{http://www.w3.org/2000/svg}"
# Two tokens of four fill the empty cells 1 and 2 of a 2x2 grid; one token no step revealed.
PICTURE = {
    "tokens": ["<so>", "b4", "c1", ""],
    "reveal_steps": [9, 7, 8, -1],
    "logps": [math.log(0.05), math.log(0.5), 0.0, math.log(0.99)],
    "givens": ["1", "", "", "3"],
    "places": {1: 1, 2: 2},
}


def test_a_table_is_markdown():
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_a_running_mean_looks_back():
    assert running_mean([1, 3, 5, 9], 2) == [1, 2, 4, 7]
    assert running_mean([], 3) == []


def test_tokens_appear_in_the_order_of_their_steps_in_the_colour_of_their_probability():
    root = ET.fromstring(denoise_svg(**PICTURE))
    groups = [(group.get("class"), group[0].get("fill"), "".join(group.itertext())) for group in root.iter(f"{SVG}g")]
    shown = [group for group in groups if re.fullmatch(r"s\d", group[0])]
    assert shown == [
        ("s1", COLOURS[2], "4"),  # the grid's cells show what their tokens say
        ("s2", COLOURS[4], "1"),
        ("s3", COLOURS[0], "<so>"),
        ("s1", COLOURS[2], "b4"),
        ("s2", COLOURS[4], "c1"),
        ("s3", COLOURS[4], ""),
    ]
    starts = [
        float(re.search(rf"@keyframes s{step}{{0%,([\d.]+)%", root.find(f"{SVG}style").text)[1]) for step in "123"
    ]
    assert starts == sorted(starts)
    assert starts[0] > 0
    assert "step 3 of 3" in "".join(root.itertext())


def test_the_picture_stands_alone_and_moves_without_script():
    text = denoise_svg(**PICTURE)
    assert not re.search(r"<script|href|url\(|@import|<foreignObject|\son\w+=", text)
    assert "prefers-color-scheme:dark" in text
    assert "prefers-reduced-motion" in text


@pytest.mark.parametrize(("probability", "place"), [(0.0, 0), (0.19, 0), (0.21, 1), (0.79, 3), (1.0, 4)])
def test_colours_part_the_unit_interval_equally(probability, place):
    assert colour(math.log(probability) if probability else -math.inf) == COLOURS[place]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"logps": [0.0]}, "4 tokens, 4 reveal steps and 1 log-probs"), ({"givens": ["1"] * 3}, "3 cells is not square")],
)
def test_what_does_not_fit_together_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        denoise_svg(**PICTURE | change)
