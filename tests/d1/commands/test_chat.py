"""`python -m d1 chat`, through pipes and a pseudo-terminal: its answers equal `generate`'s, whatever is typed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from itertools import takewhile
from pathlib import Path

import pytest
import torch

from d1.__main__ import main, make_parser
from d1.commands.chat import canvas_text
from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.sampling import generate
from d1.show.film import MASK

ROOT = Path(__file__).parents[3]
POCKET = ["chat", str(ROOT / "pocket" / "base")]
PUZZLES = ["Solve 0002403020033024", "4010003402003021"]
SHORT = ["--gen_length", "32", "--block_length", "8"]


def conversation(folder: str | Path, questions: list[str], seed: int = 0, **settings: float) -> list[str]:
    """The answers to successive questions, each by `generate` on the whole conversation so far."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        mask_id, noise = tokenizer.mask_token_id, [keyed_generator(seed, len(messages) - 1)]
        ids = generate(model, asked, torch.ones_like(asked), mask_token_id=mask_id, generator=noise, **settings)
        said = takewhile(lambda token: token not in (0, 2), ids[0, asked.shape[1] :].tolist())  # padding, EOS
        messages.append({"role": "assistant", "content": tokenizer.decode([*said], skip_special_tokens=True)})
    return [message["content"] for message in messages[1::2]]


def piped(monkeypatch: pytest.MonkeyPatch, text: str | bytes, *flags: str) -> None:
    """`python -m d1 chat` in this process, with this text on its stdin."""
    raw = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    main(make_parser().parse_args([*flags]))


def test_a_pipe_gets_answers_alone_and_the_conversation_goes_on_after_a_mistake(monkeypatch, capsys) -> None:
    """A refused message does not enter the conversation, and /reset starts a new one."""
    first, second = PUZZLES
    lines = [first, "2 + 2", second, "", "/reset", second, "/exit", "no"]
    with pytest.raises(SystemExit, match="1"):
        piped(monkeypatch, "\n".join(lines), *POCKET, *SHORT, "--steps", "8", "--seed", "3")
    done = capsys.readouterr()
    canvas = {"gen_length": 32, "block_length": 8}
    cold = conversation(POCKET[1], [first], seed=3, steps=8, **canvas)[0]
    assert re.fullmatch(r"<reasoning>.*</answer>", cold)
    alone = conversation(POCKET[1], [second], seed=3, steps=8, **canvas)[0]
    out = done.out.split("\n")
    assert (out[0], out[2:]) == (cold, [alone, ""])  # between them, the turn that followed the first answer
    for said in ("2 + 2", "end the user message with 16 digits", "the conversation is forgotten"):
        assert said in done.err


@pytest.mark.parametrize("settings", [{"steps": 12}, {"steps": 4, "cfg_scale": 1.5}])
def test_each_turn_is_sampled_from_all_that_was_said(tiny_model_dir, monkeypatch, capsys, settings) -> None:
    """On a model whose answers depend on everything before them."""
    questions, canvas = ["ab", "cd e", "f"], {"gen_length": 12, "block_length": 6, "temperature": 1.0}
    expected = conversation(tiny_model_dir, questions, seed=1, **canvas, **settings)
    assert len(set(expected)) == 3
    flags = [f"--{name}={value}" for name, value in (canvas | settings | {"seed": 1}).items()]
    piped(monkeypatch, "\n".join(questions), "chat", str(tiny_model_dir), *flags)
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


@pytest.fixture
def folder(tiny_model_dir, tmp_path) -> Path:
    """A copy of a small model, to change."""
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


@pytest.mark.parametrize(
    ("typed", "flags", "said", "answers"),
    [
        (b"x\n\xff\xfe b\nab\n", ["--gen_length", "4"], "model cannot read the text 'x': TypeError: ", 2),
        (
            b"a" * 300 + b"\n",
            ["--gen_length", "300"],
            "too long: 303 tokens of text and 300 to fill in exceed the model's 512 positions: /reset",
            0,
        ),
    ],
)
def test_what_cannot_be_answered_is_one_line_and_ends_a_turn_and_not_the_chat(
    folder, monkeypatch, capsys, typed, flags, said, answers
) -> None:
    """A broken template, bytes that are no text, a question without room."""
    template = folder / "chat_template.jinja"
    template.write_text("{% if 'x' in messages[-1]['content'] %}{{ 1 + 'x' }}{% endif %}" + template.read_text())
    with pytest.raises(SystemExit, match="1"):
        piped(monkeypatch, typed, "chat", str(folder), *flags)
    captured = capsys.readouterr()
    assert re.fullmatch(f".*{said}.*\n", captured.err)
    assert len(captured.out.splitlines()) == answers


def test_model_text_is_seen_and_not_obeyed(folder, monkeypatch, capsys) -> None:
    """A vocabulary of escape sequences, rich's markup and a character that reverses the writing direction."""
    hostile = ["\x1b[31m", "\x1b]0;title\x07", "[bold red]", "\r", "\u202e", "\x9b2J", "é👩‍🚀"]
    words, plain = (folder / "tokenizer.json").read_text(), load_tokenizer(folder)
    for token in range(8, 56):  # every word that is not a special token
        quoted, bad = map(json.dumps, (plain.convert_ids_to_tokens(token), f"{hostile[token % 7]}{token}"))
        words = words.replace(f"{quoted}: {token}", f"{bad}: {token}")
    (folder / "tokenizer.json").write_text(words)
    lines = "".join(f"{word}\n/reset\n" for word in "abcdefgh")
    piped(monkeypatch, lines, "chat", str(folder), "--gen_length", "64", "--temperature", "2", "--steps", "8")
    out = capsys.readouterr().out
    for part in ("⟨1B⟩[31m", "[bold red]", "⟨202E⟩"):
        assert part in out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)


class Terminal:
    """A chat on its own pseudo-terminal, as the user sees it."""

    def __init__(self, *words: str) -> None:
        self.process, self.screen = pty.fork()
        if self.process == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a parallel test process ignores Ctrl-C
            os.chdir(ROOT)
            environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
            os.execve(sys.executable, [sys.executable, "-m", "d1", *words], environment)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """The output since the last call, up to and including this text."""
        until = time.monotonic() + seconds
        while not (found := re.search(text, self.seen, re.DOTALL)):
            ready, _, _ = select.select([self.screen], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no {text} in {self.seen!r}"
            self.seen += os.read(self.screen, 65536).decode(errors="replace")
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def interrupt(self, answer: str) -> None:
        """Sends Ctrl-C at the prompt until it has an effect. Python misses a Ctrl-C that arrives between writing the
        prompt and waiting for a line (`input` checks for signals only when that wait is interrupted)."""
        for _ in range(12):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.wait_for(answer, seconds=10)
                return
        raise AssertionError(f"no {answer} in {self.seen!r}")


def test_on_a_terminal_an_answer_comes_into_focus_and_ctrl_c_stops_it_and_not_the_chat() -> None:
    canvas = {"gen_length": 128, "steps": 128, "block_length": 32}
    chat = Terminal(*POCKET, *(f"--{name}={value}" for name, value in canvas.items()))
    chat.wait_for("Ctrl-D ends the chat.*> ")
    chat.interrupt("/exit or Ctrl-D ends the chat.*> ")
    chat.type(PUZZLES[1] + "\n")
    chat.wait_for(MASK)
    chat.type("\x03")
    chat.wait_for("stopped: .*> ")
    chat.type(PUZZLES[0] + "\n")
    expected = conversation(POCKET[1], PUZZLES[:1], **canvas)[0]
    drawn = chat.wait_for(re.escape(expected) + r"\r\n.*> ")
    frames = [frame.count(MASK) for frame in drawn.split("\x1b[2K") if MASK in frame]
    assert len(frames) >= 7
    assert frames == sorted(frames, reverse=True)
    chat.type("\x04")
    assert os.waitpid(chat.process, 0)[1] == 0


def test_a_canvas_is_shown_where_the_tokenizer_has_no_mask_token():
    """Models with uniform noise need none."""
    tokenizer = load_tokenizer(POCKET[1])
    ids = [tokenizer.vocab_size - 1, tokenizer.mask_token_id]
    shown = canvas_text(tokenizer, ids)
    assert shown.endswith(MASK)
    tokenizer.mask_token = None
    assert canvas_text(tokenizer, ids[:1]) == shown.removesuffix(MASK).rstrip()
