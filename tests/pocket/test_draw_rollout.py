"""The README's picture is drawn from a real rollout."""

import re

import draw_rollout
import pytest

from tests.commands import ROOT


def test_the_picture_shows_each_token_of_a_rollout_and_fills_the_grid(tmp_path):
    flags = ["--model_path", str(ROOT / "pocket" / "base"), "--problem", "1", "--output", str(tmp_path / "picture.svg")]
    draw_rollout.main(draw_rollout.make_parser().parse_args(flags))
    picture = (tmp_path / "picture.svg").read_text()
    assert picture.count('class="mask"') == 32
    assert 'class="s16"' in picture  # 16 steps, two tokens each
    assert "s17" not in picture


def test_the_shipped_picture_is_small_and_moves():
    picture = (ROOT / "docs" / "denoise.svg").read_text()
    assert len(picture) < 60_000
    assert picture.count("@keyframes s") == 16


def test_an_answer_fills_a_cell_with_its_last_token_that_names_it():
    assert draw_rollout.answer_places(["careful", "a3", "<answer>", "a4", "b1", "c.", "<eos>"]) == {0: 3, 1: 4}


@pytest.mark.parametrize("kind", ["reasoning", "answer"])
def test_tags_are_escaped(kind):
    assert re.search(f"&lt;{kind}&gt;", (ROOT / "docs" / "denoise.svg").read_text())
