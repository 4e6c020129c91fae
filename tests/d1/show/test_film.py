"""A film shows what the rollout did: it is compared with the rollout's own record, for every kind of output."""

import io
import json
import math
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from d1.files import harmless
from d1.models import load_model, load_tokenizer
from d1.sampling import SamplingSettings, rollout, rollout_steps
from d1.show.film import FILLED, HIDDEN, Film, chip, colour, filmed, piece, visible
from d1.show.page import film_data, film_page, film_svg
from d1.show.terminal import picture, play
from tests.d1.diffusion_gemma import CANVAS, needs_class, write_tiny
from tests.d1.sampling.reference import EDITORS, MASK, make_prompts, sharper

# What a model could write to do harm in a display.
EVIL = "</script><script>document.title='owned'</script>"
ANSI = "\x1b[2J\x1b]0;owned\x07\ufffe"
TURNED = "\u202eabc\u2028"
SVG = "{http://www.w3.org/2000/svg}"


def evil_film(title: str = "evil") -> Film:
    """Three passes over six positions; no pass computed the last one."""
    tokens = [EVIL, ANSI, " the", "\n\n", TURNED, "@@DATA@@"]
    logps = [0.0, math.log(0.5), math.log(0.05), -0.1, -0.1, 0.0]
    entropies = [0.1 * i for i in range(6)]
    return Film(title, EVIL, ANSI, tokens, [0, 2, 1, 1, 0, FILLED], logps, entropies, [9, 18, 27], [1, 2, 3])


def least_sure(film: Film) -> str:
    """A user's own way to look at a rollout: a function of its film."""
    return film.tokens[min(range(len(film.tokens)), key=film.logps.__getitem__)]


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.0}, {"sampler": "parallel", "reveal_level": 0.2}, {"sampler": "cached", "cfg_scale": 0.5}],
    ids=["exact", "parallel", "cached"],
)
def test_a_film_is_what_the_rollout_notes(tiny_model_dir, settings):
    model, tokenizer = load_model(tiny_model_dir), load_tokenizer(tiny_model_dir)
    chosen = SamplingSettings(gen_length=12, block_length=4, steps=6, **settings)
    ids = torch.tensor([[1, 9, 10, 11, 6]])
    given = (model, ids, torch.ones_like(ids), chosen)
    ends = list(range(10, 30))  # a third of the vocabulary: some block ends the text
    options = {"mask_token_id": tokenizer.mask_token_id, "eos_token_ids": ends}
    sampled = rollout(*given, **options, generator=[torch.Generator().manual_seed(3)])
    steps = rollout_steps(*given, **options, generator=[torch.Generator().manual_seed(3)])
    looks = []
    for film in filmed(steps, lambda token: f"<{token}>", start=5):
        looks.append([token for token, step in zip(film.tokens, film.steps, strict=True) if step != HIDDEN])
    assert film.tokens == [f"<{token}>" for token in sampled.ids[0, 5:].tolist()]
    assert film.steps == sampled.reveal_steps[0].tolist()
    assert film.logps == sampled.logps[0].tolist()
    assert least_sure(film) == f"<{sampled.ids[0, 5 + sampled.logps[0].argmin()]}>"
    assert film.entropies == sampled.entropies[0].tolist()
    assert film.passes == len(film.fed) == len(film.seconds) == sampled.passes[0]
    assert film.fed[-1] == sampled.forward_tokens[0]
    assert FILLED in film.steps
    assert film.seconds == sorted(film.seconds)
    counts = [len(look) for look in looks]
    assert counts == sorted(counts)
    assert counts[-2] < counts[-1] == 12  # positions filled by the EOS stop come last
    assert max(film.shown_by()) == film.passes


@needs_class
@pytest.mark.parametrize("output", ["argmax", "draw"])
def test_a_film_of_uniform_noise_ends_with_the_text_and_counts_passes_alone(tmp_path, output):
    model = load_model(write_tiny(tmp_path))
    own = {"sampler": "parallel", "reveal": "entropy", "reveal_level": 3.0, "stop_entropy": 1.6, "output": output}
    chosen = SamplingSettings(3 * CANVAS, CANVAS, 12, temperature=0.8, end_temperature=0.4, **own)
    ids = torch.tensor([[5, 9, 3]])

    def sampled(how):
        generator = [torch.Generator().manual_seed(3)]
        return how(model, ids, torch.ones_like(ids), chosen, mask_token_id=None, generator=generator)

    result = sampled(rollout)
    steps = result.reveal_steps[0].tolist()
    frames = []
    for film in filmed(sampled(rollout_steps), str, start=3):
        frames.append([*film.tokens])
    assert film.tokens == [str(token) for token in result.ids[0, 3:].tolist()]
    assert film.passes == len(film.fed) == result.passes[0]
    assert film.fed[-1] == result.forward_tokens[0]

    # A shown token is the last draw of its position, unless the canvas was left with another one.
    assert {*film.steps} > {FILLED} or output == "draw"
    for position, step in enumerate(film.steps):
        if step >= 0:
            assert step == steps[position]
            assert film.logps[position] == result.logps[0, position]
    assert any(film.drafts)

    # Drafts and tokens say what each pass has left on the canvas.
    for passes, frame in enumerate(frames[:-1], 1):
        for position, token in enumerate(frame):
            shown = [text for step, text, _, end in film.drafts[position] if step < passes <= end]
            if 0 <= film.steps[position] < passes:
                shown.append(film.tokens[position])
            assert shown == [token] * bool(token)


@pytest.mark.parametrize(
    ("words", "decoder", "text"),
    [
        (["▁the", "▁cat", "s"], decoders.Metaspace(), " the cats"),
        (["Ġthe", "Ġcat", "s"], decoders.ByteLevel(), " the cats"),
        (["the", "cat", "##s"], decoders.WordPiece(), " the cats"),
        (["the", "cat", "s"], None, " the cat s"),
    ],
    ids=["sentencepiece", "bytes", "wordpiece", "words"],
)
def test_a_token_keeps_the_space_before_it(words, decoder, text):
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert "".join(piece(tokenizer, token) for token in range(3)) == text
    assert tokenizer.decode([0, 1, 2]).strip() == text.strip()


@pytest.mark.parametrize(
    ("token", "laid_out"), [(" the", (1, "the", 0)), ("  ", (0, "␣␣", 0)), (".\n\n", (0, ".↵↵", 2)), ("", (0, "", 0))]
)
def test_a_token_is_laid_out_as_spaces_text_and_line_ends(token, laid_out):
    assert chip(token) == laid_out


def test_what_acts_on_the_text_around_it_is_shown_by_its_number():
    assert visible(ANSI) == "⟨1B⟩[2J⟨1B⟩]0;owned⟨7⟩⟨FFFE⟩"
    assert visible(TURNED) == "⟨202E⟩abc⟨2028⟩"
    assert visible("\r\x85\ud800\ufffe\uffff") == "⟨D⟩⟨85⟩⟨D800⟩⟨FFFE⟩⟨FFFF⟩"
    assert harmless("line\n\tand عربي\u200cها\r") == "line\n\tand عربي\u200cها⟨D⟩"
    assert visible("é 东京 👩\u200d🔬\n") == "é 东京 👩\u200d🔬↵\n"


def test_the_page_holds_text_as_data_alone_and_asks_for_nothing():
    page = film_page(EVIL, [(EVIL, [evil_film(), evil_film("other")])])
    assert page.count("<script") == 2  # its data and its own
    assert page.count("</script>") == 2
    assert "&lt;/script&gt;" in page  # the title
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data[0]["films"][0] == json.loads(json.dumps(film_data(evil_film())))
    assert [label for _, label, _ in data[0]["films"][0]["tokens"]][::5] == [EVIL, "@@DATA@@"]
    assert "\x1b" not in page
    assert not re.search(r"https?://(?!www\.w3\.org)|\bsrc=|@import|url\(|fetch|XMLHttp|innerHTML", page)
    assert "default-src 'none'" in page


def test_a_picture_shows_each_token_in_its_step_and_colour_and_text_as_text():
    text = film_svg([evil_film(), evil_film("other")])
    root = ET.fromstring(text)
    groups = [(one.get("class"), one[0].get("fill"), "".join(one.itertext())) for one in root.iter(f"{SVG}g")]
    tokens = [group for group in groups if re.fullmatch(r"s\d", group[0])]
    film = evil_film()
    assert len(tokens) == 12
    assert [group[0] for group in tokens[:6]] == ["s1", "s3", "s2", "s2", "s1", "s3"]
    assert [group[1] for group in tokens[:6]] == [*map(colour, film.logps[:5]), None]
    assert tokens[1][2] == visible(ANSI)
    assert "step 3 of 3" in "".join(root.itertext())
    assert "prefers-color-scheme:dark" in text
    assert "prefers-reduced-motion" in text
    starts = [float(re.search(rf"@keyframes s{step}{{0%,([\d.]+)%", text)[1]) for step in "123"]
    assert starts == sorted(starts)
    assert starts[0] > 0
    assert not re.search(r"<script|href|url\(|@import|<foreignObject|\son\w+=|\x1b", text)


def partial_films(film: Film):
    """The film as it grows."""
    whole = (film.tokens, film.steps)
    for step in range(3):
        seen = [0 <= at <= step for at in whole[1]]
        film.tokens = [token if there else "" for token, there in zip(whole[0], seen, strict=True)]
        film.steps = [at if there else HIDDEN for at, there in zip(whole[1], seen, strict=True)]
        film.fed, film.seconds = [9, 18, 27][: step + 1], [1.0, 2.0, 3.0][: step + 1]
        yield film
    film.tokens, film.steps = whole
    yield film


def test_a_terminal_gets_the_canvas_in_place_and_no_escape_of_the_models():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, color_system="truecolor", legacy_windows=False)
    film = play(partial_films(evil_film()), console, total=4)
    text = file.getvalue()
    assert film.steps[-1] == FILLED
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert "\x1b[1A" in text  # it moves up to write over itself
    assert re.search(r"step 3/4 .* 6 of 6 tokens .* 27 processed .* 3.00 s", text)
    red, green, blue = bytes.fromhex(colour(math.log(0.5))[1:])
    assert re.search(rf"48;2;{red};{green};{blue}m⟨1B⟩", text)
    frames = text.split("╭")
    assert [frame.count("░") for frame in frames[1:4]] == [4, 2, 1]
    assert all("underlined: just revealed ─" in frame for frame in frames[1:4])  # and no word on corrected tokens


def test_a_log_probability_that_is_not_a_number_has_the_colour_of_the_unsure():
    """The rollout of a damaged model ends with an error of its own, which the display must not come before."""
    film = evil_film()
    film.logps = [math.nan] * 6
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    assert play(partial_films(film), console, total=3) is film
    assert colour(math.nan) == colour(-math.inf)


def test_what_is_no_terminal_gets_a_line_a_step_and_the_text():
    file = io.StringIO()
    play(partial_films(evil_film()), Console(file=file, width=40), total=4)
    lines = file.getvalue().splitlines()
    assert lines[0] == f"step 1/4  2 of 6 tokens  9 processed  1.00 s  {EVIL} 100%, ⟨202E⟩abc⟨2028⟩ 90%"
    assert lines[1].endswith("the 5%, ↵↵ 90%")
    assert "\x1b" not in file.getvalue()
    assert [line.partition("  ")[0] for line in lines[:3]] == ["step 1/4", "step 2/4", "step 3/4"]
    assert lines[3] == f"{EVIL}{visible(ANSI)} the"


def test_films_keep_the_drafts_of_corrected_tokens(kind_dirs):
    model = sharper(load_model(kind_dirs["llama"]))
    ids, mask = make_prompts([4], 2)
    chosen = {"gen_length": 8, "block_length": 8, "steps": 8, "mask_token_id": MASK, **EDITORS[1]}
    *_, film = filmed(rollout_steps(model, ids, mask, **chosen), str, 4, "edited")
    taken = rollout(model, ids, mask, **chosen)
    assert sum(map(len, film.drafts)) == taken.edits.item() > 0
    for at, drafts in enumerate(film.drafts):
        writes = zip(taken.writes.steps[0, at].tolist(), taken.writes.ids[0, at].tolist(), strict=True)
        every = [[step, str(token)] for step, token in writes if step >= 0]
        assert [draft[:2] for draft in drafts] + [[film.steps[at], film.tokens[at]]] == every
    edited = next(at for at, drafts in enumerate(film.drafts) if drafts)
    said = io.StringIO()
    Console(file=said, width=200).print(picture(film, 20, Console(width=200)))
    assert f"{taken.edits.item()} edits" in said.getvalue()
    svg = film_svg([film])
    assert svg.count('class="box"') == sum(map(bool, film.drafts))
    assert f">{film.drafts[edited][0][1]}</text>" in svg
    assert film_data(film)["drafts"][edited][0][:2] == [film.drafts[edited][0][0] + 1, film.drafts[edited][0][1]]
