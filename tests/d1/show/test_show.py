"""Tables, running means, panels, and the puzzle's picture: each against what is written out by hand."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from d1.show.curves import panel_svg, running_mean
from d1.show.denoise import denoise_svg
from d1.show.film import COLOURS, Film
from d1.show.tables import markdown_table

SVG = "{http://www.w3.org/2000/svg}"
# Two tokens of four fill the empty cells 1 and 2 of a 2x2 grid; one token no step revealed.
LOGPS = [math.log(0.05), math.log(0.5), 0.0, math.log(0.99)]
PICTURE = {
    "film": Film("", "", "", ["<so>", "b4", "c1", ""], [9, 7, 8, -1], LOGPS, [0.0] * 4),
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


def test_a_grid_that_is_not_square_is_refused():
    with pytest.raises(ValueError, match="3 cells is not square"):
        denoise_svg(**PICTURE | {"givens": ["1"] * 3})


def test_panels_of_a_page_share_its_colour_of_text_and_no_names():
    first, second = (
        panel_svg(lambda axis: axis.plot([1, 2], [3, 4], label="<b>"), "a & b", name) for name in ("p0", "p1")
    )
    for text in (first, second):
        ET.fromstring(text)
        assert text.startswith('<svg role="img" aria-label="a &amp; b"')
        assert "currentColor" in text
        assert "#000000" not in text
    names = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (first, second)]
    assert all(names)
    assert not names[0] & names[1]
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', first))
    assert used
    assert used <= names[0]
