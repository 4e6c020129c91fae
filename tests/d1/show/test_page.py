"""The page in a real browser: it plays, moves and shows numbers, with mouse and keys; a model's text is never run."""

import math
import time

import pytest

from d1.show.film import FILLED, Film
from d1.show.page import film_page
from tests.d1.show import browser

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium is installed here")

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
SHOWN = "[...document.querySelectorAll('.film')].map(f => f.querySelectorAll('.t:not(.off)').length)"
STEP = "Number(document.querySelector('.bar input').value)"
PLAY = "document.querySelector('.play').textContent"
DETAIL = "document.querySelector('.detail').textContent"
# For each token, the contrast of its letters with the background (WCAG 2.2, 1.4.3), as the browser paints them.
CONTRAST = """(() => {
  const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = (colour) => {
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const clear = 'rgba(0, 0, 0, 0)', card = getComputedStyle(document.querySelector('.film')).backgroundColor;
  const page = getComputedStyle(document.body).backgroundColor;
  const ground = (one) => { const own = getComputedStyle(one).backgroundColor;
    return own !== clear ? own : one.closest('.film') ? card : page; };
  const written = '.t:not(.off), button, .views label, .note, .stats span, .detail, .caption, summary, .bar output';
  const all = document.querySelectorAll(written);
  return Math.min(...[...all].map((one) => {
    const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
})()"""


def films() -> list[Film]:
    """40 tokens, two per pass in 20 passes and, faster, five per pass in 6 passes; no pass computed the last ten."""
    tokens = [EVIL, " a" * 30, "x" * 80, "line\n", *(f" word{i}" for i in range(36))]
    chances = [math.log(0.025 + 0.024 * i) for i in range(40)]
    spread = [i / 16 for i in range(40)]
    slow = Film("slow", EVIL, "exact", tokens, [i // 2 for i in range(40)], chances, spread)
    slow.fed, slow.seconds = [60 * (i + 1) for i in range(20)], [0.1 * (i + 1) for i in range(20)]
    steps = [i // 5 for i in range(30)] + [FILLED] * 10
    return [slow, Film("fast", EVIL, "parallel", tokens, steps, chances, spread)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "watch.html"
    file.write_text(film_page("Two runs", [("", films())]), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def page():
    with browser.chromium() as opened:
        yield opened


def test_steps_are_scrubbed_by_address_keys_and_the_map(page, path):
    page.open(path, "#step=3")
    assert page.ask(SHOWN) == [6, 15]
    for key, shown in (("ArrowRight", [8, 20]), ("ArrowLeft", [6, 15]), ("Home", [0, 0]), ("End", [40, 40])):
        page.press(key)
        assert page.ask(SHOWN) == shown, key
    assert page.ask("document.querySelector('.bar output').textContent") == "step 20 of 20"
    page.point(".map", click=True)
    assert page.ask(STEP) in (10, 11)
    assert page.errors == []


def test_it_plays_and_stops(page, path):
    page.open(path, "#step=0")
    page.press(" ")
    assert page.ask(PLAY) == "Pause"
    page.wait_for(f"{STEP} > 1")
    page.point(".play", click=True)
    stopped = page.ask(STEP)
    time.sleep(0.6)  # more than a step's time
    assert (page.ask(PLAY), page.ask(STEP)) == ("Play", stopped)
    page.ask("document.activeElement.blur()")
    page.press("End")
    page.press(" ")  # from the end it starts again
    page.wait_for(f"{STEP} == 1")


def test_a_token_tells_its_confidence_and_entropy_to_mouse_and_keys(page, path):
    page.open(path, "#step=20")
    page.point("[data-position='4']")
    assert page.ask(DETAIL) == "word0 position 5 of 40, revealed in step 3 with 12.1% confidence, entropy 0.250 nats"
    page.ask("document.querySelector('[data-position=\"0\"]').focus()")
    assert page.ask(DETAIL).startswith(EVIL)
    page.press("ArrowDown")
    assert page.ask("document.activeElement.dataset.position") == "1"
    assert "position 2 of 40" in page.ask(DETAIL)
    page.ask("document.querySelectorAll('[data-position=\"39\"]')[1].click()")
    assert "filled without a prediction" in page.ask("document.querySelectorAll('.detail')[1].textContent")


def test_a_problem_shows_whether_it_is_solved_at_the_end(page, tmp_path):
    """And one film fills a wide screen."""
    film, file = films()[0], tmp_path / "sudoku.html"
    film.solved = False
    file.write_text(film_page("One run", [("", [film])]), encoding="utf-8")
    shown = "document.querySelector('.verdict').checkVisibility({visibilityProperty: true})"
    for step, expected in ((19, False), (20, True)):
        page.open(file, f"#step={step}", 1600)
        assert page.ask(shown) == expected
    assert page.ask("document.querySelector('h3').textContent") == "slownot solved"
    assert page.ask("document.querySelector('.film').getBoundingClientRect().width") > 1500


def test_the_page_explains_the_marks_that_occur_and_no_others(page, tmp_path):
    plain, filled = films()
    edited = Film("edited", "", "", [" a"], [1], [0.0], [0.0], drafts=[[[0, " b", -1.0]]])
    expected = {
        "": [plain],
        "; frame without colour: filled after the end of the text": [plain, filled],
        "; wavy underline: corrected": [edited],
    }
    for said, shown in expected.items():
        file = tmp_path / "marks.html"
        file.write_text(film_page("Marks", [("", shown)]), encoding="utf-8")
        page.open(file, "#step=1", 1200)
        marks = page.ask("document.querySelector('.films + .note').textContent")
        assert marks == f"Ring: revealed in this step{said}."


def test_text_of_a_model_is_text_and_nothing_is_asked_of_any_server(page, path):
    page.requests.clear()
    page.open(path, "#step=20")
    assert page.ask("document.title") == "Two runs"
    assert page.ask("document.querySelector('[data-position=\"0\"]').textContent") == EVIL
    assert page.ask("document.querySelectorAll('img, .canvas script').length") == 0
    assert set(page.requests) <= {"about:blank", *(f"{path.as_uri()}{end}" for end in ("", "#step=20"))}
    # Its policy stops injected content.
    page.ask("document.body.append(Object.assign(document.createElement('script'), {textContent: 'owned = 1'}))")
    assert page.ask("typeof owned") == "undefined"
    page.errors.clear()  # in which the browser reports it


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_is_readable_on_screens_of_both_kinds(page, path, dark, width):
    page.open(path, "#step=20", width, dark)
    assert page.ask("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert page.ask("document.documentElement.scrollWidth") <= width
    places = "[...document.querySelectorAll('.film')].map(f => f.getBoundingClientRect().y)"
    assert page.ask(f"(([a, b]) => a === b)({places})") == (width == 1280)  # side by side
    for view in ("confidence", "entropy", "order"):
        page.ask(f"setView('{view}')")
        assert page.ask(CONTRAST) >= 4.5, view
    page.point("#theme", click=True)
    assert page.ask("document.documentElement.dataset.theme") == ("light" if dark else "dark")


def test_one_scene_plays_by_itself_unless_motion_is_unwelcome(page, path):
    page.open(path, still=False)
    assert page.ask(PLAY) == "Pause"
    page.open(path)
    assert page.ask(SHOWN) == [40, 40]
