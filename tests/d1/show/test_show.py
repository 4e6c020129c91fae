"""Tables, running means and panels: each compared with a result written out by hand."""

import re
import xml.etree.ElementTree as ET

from d1.show.curves import panel_svg, running_mean
from d1.show.tables import markdown_table


def test_a_table_is_markdown():
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_a_running_mean_looks_back():
    assert running_mean([1, 3, 5, 9], 2) == [1, 2, 4, 7]
    assert running_mean([], 3) == []


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
