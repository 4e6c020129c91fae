"""Tables, running means and panels: each compared with a result written out by hand."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib as mpl
import pytest

from d1.runs.tables import aligned_table, markdown_table
from d1.show.curves import MARKED, legend, panel_svg, panels, running_mean, save_figure, widen
from d1.show.film import labels_of
from d1.show.report import main, make_parser


def test_tables_are_markdown_or_aligned():
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    assert aligned_table(["a", "bb"], [["long", "2"], ["x", "333"]]) == "a     bb\nlong  2\nx     333\n"


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        (["runs/grpo", "runs/espo"], ["grpo", "espo"]),
        (["demo/seed0/grpo", "demo/seed1/grpo"], ["seed0/grpo", "seed1/grpo"]),
        (["runs/grpo", "runs/grpo"], ["grpo", "grpo"]),
    ],
)
def test_the_labels_of_runs_tell_different_folders_apart(runs, labels):
    assert labels_of([Path(run) for run in runs]) == labels


@pytest.mark.parametrize("output", ["curves", "runs/grpo"])
def test_a_picture_without_an_ending_is_refused_before_any_run_is_read(output):
    """Matplotlib would write curves.png, or a picture next to a folder."""
    args = make_parser().parse_args(["runs/grpo", "--output", output])
    with pytest.raises(
        ValueError, match=rf"^--output {output} is no PNG or SVG: name a file, such as {output}/curves.png"
    ):
        main(args)


@pytest.mark.parametrize(
    ("values", "span"),
    [
        *[([27.8, 28.0], 2.8), ([28.0], 2.8), ([-50.0, -49.9], 5.0)],
        *[([], None), ([0.0], None), ([0.2, 0.9], None), ([0.0, -4.0], None)],  # no value, or a large range
    ],
)
def test_a_small_range_of_values_does_not_fill_an_axis_and_a_large_one_stays(values, span):
    _, (axis,) = panels(1, 1, size=(4, 3))
    axis.plot(values, "o")
    before = axis.get_ylim()
    widen(axis)
    low, high = axis.get_ylim()
    if span is None:
        assert (low, high) == before
    else:
        assert high - low == pytest.approx(span)
        assert high - max(values) == pytest.approx(min(values) - low)


def test_a_figure_in_a_file_follows_its_readers_theme_and_a_png_is_white(tmp_path):
    for name in ("a.svg", "b.svg", "a.png"):
        figure, (axis,) = panels(1, 1, size=(4, 3))
        axis.plot([1, 2], [3, 4], color="black", label="<b>")
        legend(figure)
        save_figure(figure, tmp_path / name)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert ET.fromstring(text).get("fill") == "currentColor"
    assert re.search(r"@media\(prefers-color-scheme:dark\)\{svg\{color:#\w+\}\.card\{fill:#\w+\}\}", text)
    assert not {"#000000", "#ffffff"} & {*re.findall(r"#\w{6}", text)}
    picture = mpl.image.imread(tmp_path / "a.png")
    assert picture[0, 0].tolist() == [1, 1, 1, 1]
    assert picture.shape[1] == 4 * 160


def test_a_running_mean_looks_back_and_no_two_curves_of_a_crowded_figure_look_alike():
    assert [running_mean([1, 3, 5, 9], 2), running_mean([], 3)] == [[1, 2, 4, 7], []]
    assert len({style["color"] for style in MARKED}) == len({style["marker"] for style in MARKED}) == len(MARKED) == 9


def test_panels_of_a_page_share_its_colour_of_text_and_no_names():
    first, second = (panel_svg(lambda axis: axis.plot([1, 2], [3, 4]), "a & b", name) for name in ("p0", "p1"))
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
