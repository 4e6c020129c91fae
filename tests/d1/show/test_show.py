"""Tables, running means and panels: each compared with a result written out by hand."""

import re
import xml.etree.ElementTree as ET

from d1.show.curves import legend, panel_svg, panels, running_mean
from d1.show.tables import aligned_table, markdown_table


def test_a_table_is_markdown():
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_a_table_for_a_terminal_is_aligned():
    assert aligned_table(["a", "bb"], [["long", "2"], ["x", "333"]]) == "a     bb\nlong  2\nx     333\n"


def test_ticks_have_no_offset_and_the_legend_covers_no_axes():
    figure, axes = panels(1, 2, size=(8, 4))
    for axis in axes:
        for name in ("first", "second"):
            axis.plot([1, 2], [1000.0001, 1000.0002], label=name)
    legend(figure)
    figure.canvas.draw()
    assert [axis.yaxis.get_offset_text().get_text() for axis in axes] == ["", ""]
    assert len({line.get_color() for line in axes[0].lines}) == 2
    (box,) = [one.get_window_extent() for one in figure.legends]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["first", "second"]  # once, not once per axis
    assert not any(box.overlaps(axis.get_tightbbox()) for axis in axes)


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
