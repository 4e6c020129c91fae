"""python -m d1 chat MODEL: a chat in the model's chat template, which shows how the answers are filled in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from d1.commands.model import CompletionFlags, model_argument, model_of, resolve_canvas
from d1.files import harmless
from d1.models.kinds import check_room
from d1.runs.cli import MISTAKES, one_line
from d1.sampling.settings import SamplingSettings, sampling_settings
from d1.show.film import MASK

HELP = """On a terminal, /reset forgets the conversation, /exit or Ctrl-D ends the chat, and Ctrl-C stops an answer.
With other input, as in `echo question | python -m d1 chat MODEL`, each line is a turn, only answers are written to
stdout, and the exit status is 1 if one of them failed."""


@dataclass(frozen=True, kw_only=True)
class ChatFlags(CompletionFlags):
    model_path: str = model_argument()
    checkpoint_path: str | None = None  # MODEL may be an adapter


@dataclass
class Chat:
    """A conversation so far, and the model with its settings."""

    model: Any
    tokenizer: Any
    seed: int
    sampling: SamplingSettings
    on_terminal: bool
    messages: list[dict[str, str]] = field(default_factory=list)

    def talk(self) -> bool:
        """Answers messages until there are no more; returns whether all were answered."""
        well = True
        while True:
            if_stopped = "/exit or Ctrl-D ends the chat"
            try:
                line = input("> " if self.on_terminal else "").strip()
                if line == "/exit":
                    return well
                if line == "/reset":
                    self.messages.clear()
                    note("the conversation is forgotten")
                elif line:
                    if_stopped = "stopped: the chat continues as if you had not asked"
                    with coming_into_focus(self.tokenizer, self.on_terminal) as show:
                        text = self.answer(line, show)
                    sys.stdout.write(harmless(text) + "\n")
                    sys.stdout.flush()
            except EOFError:
                if self.on_terminal:
                    note("")
                return well
            except KeyboardInterrupt:
                if not self.on_terminal:
                    raise
                note("\n" + if_stopped)
            except BrokenPipeError:  # nobody reads the answers; it is an OSError, and so one of MISTAKES
                raise
            except MISTAKES as error:
                well = False
                note(one_line(error))

    def answer(self, question: str, show: Callable[[list[int]], object]) -> str:
        """The model's answer; `show` gets the ids of the canvas after each forward pass. Question and answer are added
        to the conversation when the answer is complete."""
        import torch

        from d1.masking import keyed_generator
        from d1.models.tokenizer import encode_prompt, end_ids, first_end, render_prompt
        from d1.sampling import rollout_steps

        messages = [*self.messages, {"role": "user", "content": question}]
        ids = encode_prompt(self.tokenizer, render_prompt(self.tokenizer, messages))
        advice = ": /reset forgets the conversation; or lower --gen_length"
        check_room(self.model.config, len(ids), self.sampling.gen_length, advice)
        prompt, ends = torch.tensor([ids], device=self.model.device), end_ids(self.tokenizer)
        draws = [keyed_generator(self.seed, len(self.messages))]
        options: Any = {"mask_token_id": self.tokenizer.mask_token_id, "generator": draws, "eos_token_ids": ends}
        canvas_ids: list[int] = []
        for step in rollout_steps(self.model, prompt, torch.ones_like(prompt), self.sampling, **options):
            canvas_ids = step.canvas[0, len(ids) :].tolist()
            show(canvas_ids)
        text = str(self.tokenizer.decode(canvas_ids[: first_end(canvas_ids, ends)], skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return text


def note(text: str) -> None:
    """Writes a message that is not an answer to stderr."""
    sys.stderr.write(harmless(text) + "\n")
    sys.stderr.flush()


@contextmanager
def coming_into_focus(tokenizer: Any, on_terminal: bool) -> Iterator[Callable[[list[int]], object]]:
    """Shows a canvas on a terminal, updated in place, and clears it at the end; does nothing without a terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    if not on_terminal:
        yield lambda ids: None
        return
    with Live(console=Console(), auto_refresh=False, transient=True) as live:
        yield lambda ids: live.update(Text(canvas_text(tokenizer, ids)), refresh=True)


def canvas_text(tokenizer: Any, ids: list[int]) -> str:
    """A canvas with its masks as text; other special tokens are left out."""
    special = {*tokenizer.all_special_ids} - {tokenizer.mask_token_id}
    text = tokenizer.decode([token for token in ids if token not in special])
    if tokenizer.mask_token is not None:  # models with uniform noise need none
        text = text.replace(tokenizer.mask_token, MASK)
    return harmless(text)


def run(args: ChatFlags) -> None:
    from transformers.utils.logging import disable_progress_bar

    from d1.models.tokenizer import check_chat_template

    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not sys.stderr.isatty():
        disable_progress_bar()
    tokenizer = args.load_tokenizer()
    check_chat_template(tokenizer, args.model_path)
    folder = args.read_folder()
    args = resolve_canvas(args, folder)
    model = model_of(args, folder)
    chat = Chat(model, tokenizer, args.seed, sampling_settings(args, model.config), on_terminal)
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        stream.reconfigure(errors=errors)  # type: ignore[union-attr]
    if on_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() edits lines with it
        note(f"{args.model_path}: /reset forgets the conversation, /exit or Ctrl-D ends the chat")
    if not chat.talk():
        sys.exit(1)
