"""Episodes of several turns: a canvas, the calls in it, their results as given text, and the next canvas.

A canvas is cut after its first EOS, or in all turns but the last after its last allowed call. The EOS that the cut
removed, the results and the header of the next answer follow as given text. What was sampled after the cut is no part
of the episode, so a canvas is never a prefix of the next prompt. Ids are joined, and never tokenised again.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from d1.files import valid_unicode
from d1.models.tokenizer import encode_text, first_end, render_prompt, with_texts
from d1.runs.turns import TurnSettings
from d1.sampling.passes import KVCacheRows
from d1.sandbox import WORKERS
from d1.tools.calls import (
    FORMATS,
    Call,
    CallFormat,
    Functions,
    Message,
    example_call,
    format_of,
    instructions,
    is_mark,
    renders_tools,
)
from d1.tools.functions import Outcome, call

ENDS = ("no_call", "unclosed", "max_turns", "no_room")  # why an episode ended
TEMPLATE_MARK = re.compile(r"<[^<>\s'\"]{1,40}>|\[/?[A-Z_]{2,}\]")  # in a chat template: <|im_start|>, <think>, [INST]
PLAIN_HEADER = re.compile(r"[^<>\[\]|]*[A-Za-z][^<>\[\]|]*:")  # of a turn: user:, ### Human:
PLACEHOLDER = "d1-answer"  # stands for the assistant's message while the template writes what follows it


@dataclass(frozen=True)
class Turn:
    """One turn: the ids before its canvas, and those of the canvas up to the cut."""

    prompt_ids: list[int]
    kept: list[int]


@dataclass
class Episode:
    """A conversation, which is over once `end` is set.

    Attributes:
        end: why it ended, one of `ENDS`.
        prompt: the messages before the first canvas.
        next_ids: the prompt of the next canvas.
        functions: the tools of this episode by name.
        number: of its row, for the log of results.
        messages: the messages after the prompt, as TRL passes them to rewards; arguments of calls are JSON, as text.
        cache_rows: what the sampler's exact cache keeps for the next turn: keys and values of the text up to the cut.
    """

    prompt: Sequence[Message]
    next_ids: list[int]
    functions: Functions
    number: int = 0
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: int = 0
    failed: int = 0
    hung: bool = False
    end: str | None = None
    cache_rows: KVCacheRows = field(default_factory=KVCacheRows)

    def finish(self, end: str) -> None:
        self.end = end
        self.cache_rows.clear()

    @property
    def ids(self) -> list[int]:
        """All ids after the first prompt."""
        last = self.turns[-1]
        return [*last.prompt_ids, *last.kept][len(self.turns[0].prompt_ids) :]

    @property
    def sampled(self) -> list[int]:
        """1 for each of `ids` that the model wrote, 0 for given text."""
        flags = [0] * len(self.ids)
        first_prompt_length = len(self.turns[0].prompt_ids)
        for turn in self.turns:
            start = len(turn.prompt_ids) - first_prompt_length
            flags[start : start + len(turn.kept)] = [1] * len(turn.kept)
        return flags


class Results:
    """A file with the results of calls, one JSON line per call, from which a resumed run takes them.

    A line is read only if the same call is made at the same place of the same rollout."""

    def __init__(self, path: Path, resume: bool) -> None:
        """`resume`: keep the lines of the file; otherwise the file is written anew."""
        self.lines: dict[str, Any] = {}
        self.lock = threading.Lock()  # calls of several rows may run at the same time
        path.parent.mkdir(parents=True, exist_ok=True)
        text = ""
        if resume and path.is_file():
            text = path.read_text(encoding="utf-8")
        for line in text.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # cut off by a kill
                entry = json.loads(line)
                self.lines[json.dumps(entry["at"])] = entry
        self.file = open(path, "a" if resume else "w", encoding="utf-8")  # noqa: SIM115  (as long as the run)
        self.file.write("" if text.endswith("\n") or not text else "\n")

    def get_or_make(self, key: Sequence[int], tool_call: Call, make: Callable[[], Outcome]) -> Outcome:
        """The logged outcome of a call, or that of `make`, which is then logged."""
        json_key = json.dumps(list(key))
        json_call = json.loads(json.dumps(tool_call, default=str))
        entry = self.lines.get(json_key)
        if entry is not None and entry.get("call") == json_call:
            return Outcome(entry["text"], entry["failed"])
        outcome = make()
        line = {"at": list(key), "call": json_call, "text": outcome.text, "failed": outcome.failed}
        with self.lock:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        return outcome


class Toolbox:
    """Everything that the turns of a run share.

    Args:
        ends: ids of the tokens that end a completion.
        form: the name of the format of calls; None: the one that fits the tokenizer.
        options: what the chat template gets besides messages and tools.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: Sequence[int],
        settings: TurnSettings,
        form: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if form is not None and form not in FORMATS:
            raise ValueError(f"--tool_format must be one of {', '.join(FORMATS)}, got {form!r}")
        self.tokenizer = tokenizer
        self.ends = ends
        self.settings = settings
        self.options = options or {}
        self.form_name = form
        self.rendered: dict[tuple[str, ...], bool] = {}  # names of tools -> whether the template tells about them
        self.writable: set[tuple[str, ...]] = set()  # names of tools whose calls the vocabulary can write

    # The properties below read the whole vocabulary, which is not needed without tools.

    @cached_property
    def form(self) -> CallFormat:
        return FORMATS[self.form_name or format_of(self.tokenizer)]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return self.form.pattern

    @cached_property
    def special_tokens(self) -> list[str]:
        """The special tokens, the longest first."""
        flagged = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return sorted({*flagged, *self.tokenizer.all_special_tokens}, key=len, reverse=True)

    @cached_property
    def special_ids(self) -> set[int]:
        """The ids of the special tokens, without that for unknown words."""
        return {*self.tokenizer.convert_tokens_to_ids(self.special_tokens)} - {self.tokenizer.unk_token_id, None}

    @cached_property
    def marks(self) -> list[str]:
        """What no result may hold, the longest first: special tokens, marks of calls and results, and the marks that
        the chat template writes."""
        marks = {*self.special_tokens, *self.form.marks}
        template = str(self.tokenizer.chat_template or "")
        marks.update(TEMPLATE_MARK.findall(template))
        for token in self.tokenizer.added_tokens_decoder.values():
            if is_mark(token.content) and token.content in template:
                marks.add(token.content)
        for form in FORMATS.values():
            marks.update(mark for mark in form.marks if is_mark(mark))
        marks.update(self.plain_headers)
        return sorted((mark for mark in marks if mark.strip()), key=lambda mark: (-len(mark), mark))

    @cached_property
    def plain_headers(self) -> list[str]:
        """The headers of turns that the chat template writes as plain text, each with the line end before it, such as
        that of "user:"."""
        chat = [{"role": role, "content": PLACEHOLDER} for role in ("user", "assistant", "user")]
        try:
            parts = render_prompt(self.tokenizer, chat, **self.options).split(PLACEHOLDER)
        except ValueError:  # of a template that reads questions of one form alone
            return []
        lines = [part.strip().rpartition("\n")[2] for part in parts]
        return [f"\n{line}" for line in lines if PLAIN_HEADER.fullmatch(line)]

    # --- Checks -------------------------------------------------------------------------------------------------------

    def check_calls(self, functions: Functions) -> None:
        """Raise ValueError unless the vocabulary can write a call of each function, and the marks of its result."""
        if tuple(functions) in self.writable:
            return
        for name in functions:
            text = example_call(name, functions, self.form)
            marks = [self.form.opens.strip(), self.form.closes.strip()]
            # Some tokenizers decode with spaces between tokens, which no mark may have.
            decoded = self.encode_and_decode(text)
            is_whole = "".join(decoded.split()) == "".join(text.split())
            if not is_whole or not all(mark in decoded for mark in marks):
                raise self.unwritable_error(text, f"a call of the tool {name}")
        result = self.form.result.format(result="")
        if result.strip() and not self.encode_and_decode(result):
            raise self.unwritable_error(result, "the marks of a result")
        self.writable.add(tuple(functions))

    def encode_and_decode(self, text: str) -> str:
        """A text as the tokenizer decodes its ids; "" if a part of it has no token."""
        try:
            ids = encode_text(self.tokenizer, text)
        except ValueError:
            return ""
        if self.tokenizer.unk_token_id in ids:
            return ""
        return str(self.tokenizer.decode(ids))

    def unwritable_error(self, text: str, role: str) -> ValueError:
        return ValueError(
            f"{self.tokenizer.name_or_path}: its vocabulary cannot write {text!r:.200}, {role}: use another "
            "--tool_format, or a model that can call tools (docs/tools.md)"
        )

    # --- Prompts ------------------------------------------------------------------------------------------------------

    def add_tool_instructions(
        self, prompt: Sequence[Message], functions: Functions
    ) -> tuple[list[Message], dict[str, Any]]:
        """A prompt that tells the model about its tools, and the options for the template that does it instead."""
        if not functions:
            return list(prompt), {}
        messages = with_texts(prompt)
        names = tuple(functions)
        if names not in self.rendered:
            self.rendered[names] = renders_tools(self.tokenizer, messages, functions)
        if self.rendered[names]:
            return messages, {"tools": [*functions.values()]}
        first, *later = messages
        content = f"{instructions(functions, self.form)}\n\n{first['content']}"
        return [{**first, "content": content}, *later], {}

    # --- The cut ------------------------------------------------------------------------------------------------------

    def calls_in(self, ids: Sequence[int]) -> list[str]:
        """The texts of the whole calls in a completion."""
        return self.pattern.findall(self.tokenizer.decode(list(ids)))

    def stops(self, ids: Sequence[int]) -> bool:
        """Whether the completion that begins with these ids ends with them, before an EOS: they have all calls."""
        return len(self.calls_in(ids)) >= self.settings.calls_per_turn

    def cut(self, canvas_ids: Sequence[int], is_last: bool) -> int:
        """The number of tokens of a canvas that count."""
        before_end = first_end(canvas_ids, self.ends)
        if is_last or not self.stops(canvas_ids[:before_end]):
            return min(before_end + 1, len(canvas_ids))
        # The shortest beginning with all calls, by bisection.
        low, high = 1, before_end
        while low < high:
            middle = (low + high) // 2
            if self.stops(canvas_ids[:middle]):
                high = middle
            else:
                low = middle + 1
        return low

    # --- Turns --------------------------------------------------------------------------------------------------------

    def stop_of(self, turn: int) -> Callable[[Sequence[int]], bool] | None:
        """`stops` for all turns but the last, where a call has no effect."""
        return self.stops if turn + 1 < self.settings.max_turns else None

    def cache_rows_of(self, episode: Episode) -> KVCacheRows | None:
        """For the sampler of an episode's next turn; None if no other turn is to read them, or the episode is over."""
        if episode.end is not None or self.settings.max_turns == 1:
            return None
        episode.cache_rows.wanted = self.stop_of(len(episode.turns)) is not None
        return episode.cache_rows

    def append_turn(self, episode: Episode, canvas_ids: Sequence[int]) -> list[str]:
        """Adds a canvas to an episode; returns the texts of the calls that need results. Without any, it has ended."""
        # The cut
        is_last = self.stop_of(len(episode.turns)) is None
        kept = list(canvas_ids[: self.cut(canvas_ids, is_last)])
        episode.turns.append(Turn(episode.next_ids, kept))
        episode.cache_rows.crop(len(episode.next_ids) + len(kept))
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        episode.messages.append({"role": "assistant", "content": text})

        # Its calls
        calls = self.calls_in(kept[: first_end(kept, self.ends)])[: self.settings.calls_per_turn]
        if calls and not is_last:
            return calls

        # Without calls that need results, the episode ends.
        text_without_calls = self.pattern.sub("", self.tokenizer.decode(kept))
        if calls:
            episode.finish("max_turns")
        elif self.form.opens in text_without_calls:
            episode.finish("unclosed")
        else:
            episode.finish("no_call")
        return []

    def append_results(
        self, episode: Episode, calls: Sequence[str], log: Results | None = None, at: Sequence[int] = ()
    ) -> None:
        """Makes the calls of an episode's last turn and gives it their results. `at` is the key of the rollout: of its
        results in the log, and of the random numbers of tools. Nothing that a tool does raises an error here."""
        # Make the calls.
        outcomes, tool_calls, messages = [], [], []
        for number, text in enumerate(calls):
            name, arguments = "unknown", dict[str, Any]()
            try:
                name, arguments = self.form.read(text, episode.functions)
            except ValueError as error:
                outcome = Outcome(f"error: {error}", failed=True)
            else:
                key = [*at, episode.number, len(episode.turns) - 1, number]
                make = partial(call, episode.functions[name], arguments, self.settings.tool_seconds, key)
                outcome = make() if log is None else log.get_or_make(key, (name, arguments), make)
            outcomes.append(outcome)
            # As text: TRL's tables of completions cannot hold arguments of different types.
            arguments_text = valid_unicode(json.dumps(arguments, ensure_ascii=False))
            function = {"name": name, "arguments": arguments_text}
            tool_calls.append({"type": "function", "function": function})
            messages.append({"role": "tool", "name": name, "content": outcome.text})
        episode.calls += len(outcomes)
        episode.failed += sum(outcome.failed for outcome in outcomes)
        episode.hung |= any(outcome.hung for outcome in outcomes)

        # Their results are the end of the next prompt, if it has room for them.
        turn = episode.turns[-1]
        result_ids = self.encode_results(episode, [outcome.text for outcome in outcomes])
        next_ids = [*turn.prompt_ids, *turn.kept, *result_ids]
        if self.settings.max_turn_prompt is not None and len(next_ids) > self.settings.max_turn_prompt:
            episode.finish("no_room")
            return
        episode.next_ids = next_ids
        episode.messages[-1]["tool_calls"] = tool_calls
        episode.messages += messages

    def encode_results(self, episode: Episode, results: Sequence[str]) -> list[int]:
        """The ids between the last turn and the next canvas: the EOS if the cut removed it, results, header."""
        ids = self.render_results(episode, [self.clean_result(text) for text in results])
        ids_of_empty_results = ids
        with suppress(ValueError):  # of a template that refuses empty messages
            ids_of_empty_results = self.render_results(episode, [""] * len(results))
        if self.special_ids_in(ids) != self.special_ids_in(ids_of_empty_results):
            ids = ids_of_empty_results  # a result and the text around it form a special token

        # The EOS of the turn: once, whether the cut removed it or not.
        begins_with_end = bool(ids) and ids[0] in self.ends
        kept = episode.turns[-1].kept
        if kept and kept[-1] in self.ends:
            return ids[1:] if begins_with_end else ids
        return ids if begins_with_end else [self.ends[0], *ids]

    def render_results(self, episode: Episode, results: Sequence[str]) -> list[int]:
        """The ids that the template writes after an answer: its end, the results as the user's message, the header."""
        content = "\n".join(self.form.result.format(result=text) for text in results)
        placeholder = PLACEHOLDER
        while placeholder in content:
            placeholder += PLACEHOLDER
        messages = [{"role": "assistant", "content": placeholder}, {"role": "user", "content": content}]
        rendered = render_prompt(self.tokenizer, [*episode.prompt, *messages], **self.options)
        return encode_text(self.tokenizer, rendered.rpartition(placeholder)[2])

    def special_ids_in(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self.special_ids]

    def clean_result(self, text: str) -> str:
        """A result that cannot be mistaken for anything else: without special tokens and marks of calls, without
        characters that have no token, and cut to the length allowed."""
        text = self.remove_marks(text)
        try:
            ids = encode_text(self.tokenizer, text)
        except ValueError:  # a vocabulary without unknown tokens
            ids = None
        if ids is None or self.has_marks(ids):  # the tokenizer's normalizer made them of other characters
            words = [word for word in text.split() if self.is_plain_word(word)]
            text = self.remove_marks(" ".join(words))
            ids = encode_text(self.tokenizer, text)
        if self.has_marks(ids):  # of several words
            text = ""
            ids = []
        max_length = self.settings.result_length
        if len(ids) <= max_length:
            return text
        return self.remove_marks(str(self.tokenizer.decode(ids[:max_length])))

    def has_marks(self, ids: Sequence[int]) -> bool:
        """Whether ids have a special token, or a mark in the text that they decode to."""
        text = "\n" + str(self.tokenizer.decode(list(ids)))  # headers begin a line
        return bool(self.special_ids_in(ids)) or any(mark in text for mark in self.marks)

    def remove_marks(self, text: str) -> str:
        """A text without what is invisible and without `marks`, also those that appear when others are removed."""
        visible = [character for character in text if character.isprintable() or character in "\n\t"]
        text = "\n" + "".join(visible)  # headers begin a line
        before = ""
        while text != before:
            before = text
            for mark in self.marks:
                text = text.replace(mark, " ")
        return text.removeprefix("\n")

    def is_plain_word(self, word: str) -> bool:
        """Whether a word has tokens, none of which is special, and no mark."""
        try:
            ids = encode_text(self.tokenizer, word)
        except ValueError:
            return False
        return bool(ids) and not self.has_marks(ids)

    def run_episodes(
        self,
        episodes: Sequence[Episode],
        sample: Callable[[list[int], int], Sequence[Sequence[int]]],
        *,
        any_process: Callable[[bool], bool] = bool,
        all_rows: bool = False,
        log: Results | None = None,
        at: Sequence[int] = (),
    ) -> None:
        """Runs episodes to their ends.

        Args:
            sample: canvases (rows, canvas) for the episodes with these numbers, in this turn.
            any_process: whether a value is true in any process, so that all processes take part in the same number of
                turns. A process whose episodes have ended samples its first row again, and drops the result.
            all_rows: sample all rows in every turn, for processes that must make the same forward passes.
        """
        for turn in range(self.settings.max_turns):
            # Sample the episodes that have not ended.
            active = [row for row, episode in enumerate(episodes) if episode.end is None]
            if not any_process(bool(active)):
                return
            rows = active or [0]
            if all_rows:
                rows = list(range(len(episodes)))
            canvases = dict(zip(rows, sample(rows, turn), strict=True))

            # Cut their canvases.
            with_calls = []
            for row in active:
                calls = self.append_turn(episodes[row], canvases[row])
                if calls:
                    with_calls.append((episodes[row], calls))

            # Make the calls. A user's functions may share state, so they are called one after the other unless all are
            # marked as concurrent.
            def make_calls(episode_and_calls: tuple[Episode, list[str]]) -> None:
                episode, calls = episode_and_calls
                self.append_results(episode, calls, log, at)

            functions = [function for episode, _ in with_calls for function in episode.functions.values()]
            is_concurrent = all(getattr(function, "concurrent", False) for function in functions)
            with ThreadPoolExecutor(WORKERS if is_concurrent else 1) as pool:
                for _ in pool.map(make_calls, with_calls):  # raises the errors of its threads
                    pass


def ends_of(episodes: Iterable[Episode]) -> Mapping[str, int]:
    """How many episodes ended for each reason."""
    counts = Counter(episode.end for episode in episodes)
    return {name: counts[name] for name in ENDS}
