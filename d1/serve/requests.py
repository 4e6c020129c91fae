"""The bodies of requests, in SGLang's dialect and in OpenAI's, the rows that they ask for, and the rows' events.

An unknown field is an error, except within a message or `stream_options`; `user` and `flush_cache` change nothing, nor
do the values in `NEUTRAL`. All limits are checked before any work, so that no request takes the time of the others.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from d1.models.kinds import block_size, check_room, max_positions
from d1.models.messages import REASONING
from d1.models.tokenizer import check_no_mask, encode_prompt, encode_question, end_ids, render_prompt
from d1.ranges import SEED
from d1.sampling.reveal import REMASKING
from d1.sampling.settings import LARGEST, SamplingSettings, check_sampler, default_steps, refuse_scdd
from d1.serve import LOCAL
from d1.serve.answers import Choice, choice_of, envelope, server_sent_event, step_of, usage
from d1.serve.engine import Completed, Engine, Event, Finished, Loader, Revealed, Row, Stopped

# Limits of a body. The model's room bounds each prompt and canvas, and the queue bounds the rows of a request.
MAX_FIELDS = 64  # of an object
MAX_ENTRIES = 1 << 16  # of a list of prompts, messages or names
MAX_INTEGER = 1 << 30
MAX_RID_LENGTH = 256  # characters, as in the next two
MAX_NAME_LENGTH = 4096
MAX_STOP_LENGTH = 1024
CHARACTERS_PER_POSITION = 32  # of a text, at most, per position of the model
DEFAULT_ROOM = 1 << 17  # of a model that does not say how many positions it has
MAX_WRITES = 1 << 22  # of a completion with editing, over all positions of its canvas: 64 MiB of records

Rid = Annotated[str, Field(max_length=MAX_RID_LENGTH)]
Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Ids = Annotated[list[int], Field(fail_fast=True)]  # a wrong list of millions gives one error
ListField = Field(fail_fast=True, max_length=MAX_ENTRIES)


def limit_fields(fields: Any) -> Any:
    if isinstance(fields, dict) and len(fields) > MAX_FIELDS:
        raise ValueError(f"{len(fields)} fields, of at most {MAX_FIELDS}")
    return fields


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    _limit_fields = model_validator(mode="before")(limit_fields)


GREEDY = {"top_k": 0, "top_p": 1.0, "record_as_sampled": False}  # what temperature 0 needs
# Settings that belong to one sampler.
SAMPLER_SETTINGS = ("kv_cache", "reveal", "reveal_level", "edit_threshold", "max_post_steps", "editing")
HINTS = {name: hint for name, hint in get_type_hints(SamplingSettings).items() if name != "gen_length"}
LIMITS: dict[Any, float] = {float: LARGEST, float | None: LARGEST, int: MAX_INTEGER, int | None: MAX_INTEGER}
# The fields of `SamplingSettings`, all of which a request may leave to the server's flags.
Settings: Any = create_model(
    "Settings",
    __base__=Strict,
    **{name: (hint | None, Field(None, le=LIMITS[hint]) if hint in LIMITS else None) for name, hint in HINTS.items()},  # type: ignore[call-overload]
)
Count = Field(1, ge=1, le=1024)
Seed = Field(None, ge=0, le=int(SEED.high))
Length = Field(None, le=MAX_INTEGER)
Zero = Field(0.0, ge=0, le=0)  # what a diffusion model does not do, and clients of OpenAI's send all the same


class SamplingParams(Settings):  # type: ignore[misc]
    max_new_tokens: int | None = Length
    n: int = Count
    ignore_eos: bool = False  # sample and return the whole canvas
    stop_token_ids: list[int] = Field([], max_length=64)  # that end a completion, besides the model's own
    # With `ignore_eos`: leave out the blocks after the one that holds one of these, and fill them with the first.
    eos_stop: list[int] = Field([], max_length=64)
    sampling_seed: int | None = Seed


class Generate(Strict):
    input_ids: Ids | Annotated[list[Ids], ListField]
    rid: Rid | Annotated[list[Rid], ListField] | None = None
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    # Sample the rows as a batch of their own, whose prompts are padded to this number of tokens: log-probabilities and
    # entropies are then those of `rollout` for such a batch, to the bit.
    padded_to: int | None = Field(None, ge=1, le=MAX_INTEGER)


ANYTHING = object()
# Fields of OpenAI's API that are not supported here -> values that many clients send and that ask for nothing. So does
# null, in these and in all other fields.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "extra_body": ({},),
    "extra_headers": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "keep_alive": (ANYTHING,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "metadata": (ANYTHING,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (ANYTHING,),
    "prompt_cache_options": (),
    "prompt_cache_retention": (ANYTHING,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "safety_identifier": (ANYTHING,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (-1,),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def is_neutral(name: str, value: Any) -> bool:
    """Whether a field of a request asks for nothing."""
    if value is None:
        return True
    for neutral in NEUTRAL.get(name, ()):
        same_type = isinstance(neutral, bool) == isinstance(value, bool)  # to Python, True equals 1
        if neutral is ANYTHING or (same_type and neutral == value):
            return True
    return False


class OpenAI(Settings):  # type: ignore[misc]
    model: Name | None = None
    max_tokens: int | None = Length
    n: int = Count
    seed: int | None = Seed
    stop: Stop | Annotated[list[Stop | None], Field(fail_fast=True, max_length=64)] | None = None
    stream: bool = False
    stream_options: Annotated[dict[str, bool], BeforeValidator(limit_fields)] | None = None
    stream_steps: bool = False  # also what each forward pass reveals
    ignore_eos: bool = False
    rid: Rid | None = None
    user: str | None = None
    frequency_penalty: float | None = Zero
    presence_penalty: float | None = Zero

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, fields: Any) -> Any:
        """The fields of a body that ask for something; unknown fields stay, and are refused."""
        if not isinstance(fields, dict) or len(fields) > MAX_FIELDS:
            return fields
        names = cls.model_fields.keys() | NEUTRAL.keys()
        return {name: value for name, value in fields.items() if name not in names or not is_neutral(name, value)}

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]


class Completion(OpenAI):
    prompt: str | Annotated[list[str], ListField] | Ids | Annotated[list[Ids], ListField]


class Part(BaseModel):
    type: Literal["text"]
    text: str


# Fields of a message that only the chat templates of some models read.
UNREAD_IN_MESSAGES = {
    **dict.fromkeys(("tool_calls", "function_call"), "send the call as text in content"),
    **dict.fromkeys(REASONING, "send the thoughts as text in content, or leave them out"),
}


class Message(BaseModel):
    role: str
    content: str | Annotated[list[Part], ListField]

    @model_validator(mode="before")
    @classmethod
    def set_content(cls, fields: Any) -> Any:
        """An assistant's message without content is empty. A field with something that is not read is refused."""
        if not isinstance(fields, dict):
            return fields
        for name, advice in UNREAD_IN_MESSAGES.items():
            if fields.get(name):
                raise ValueError(f"{name} are not supported here: {advice}")
        if fields.get("content") is None and fields.get("role") == "assistant":
            return {**fields, "content": ""}
        return fields


class Chat(OpenAI):
    messages: list[Message] = Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)
    max_completion_tokens: int | None = Length


class Update(Strict):
    model_path: Name
    weight_version: Name | None = None
    flush_cache: bool = True


class Pause(Strict):
    # Rows at work stay as they are. A request has to name this mode, because SGLang's default is another one.
    mode: Literal["in_place"]


# --- The rows that a request asks for ---------------------------------------------------------------------------------

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/]+)(:\d*)?")  # of a header: the name, and a port


@dataclass(frozen=True)
class Server:
    """What requests are answered with."""

    engine: Engine
    tokenizer: Any
    name: str  # of the model
    defaults: SamplingSettings
    seed: int = 0
    max_gen_length: int | None = None  # largest canvas; None: the model's room
    weights_dir: tuple[Path, ...] = ()
    loader: Loader | None = None  # where there is a `weights_dir`
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = LOCAL  # in a request's `Host`, where there is no `api_key`; "*" allows all

    def is_called(self, host: str) -> bool:
        """Whether this server allows requests whose header `Host` is this. A page of another site is found by a name,
        so that every numeric address is allowed."""
        match = HOST.fullmatch(host.lower())
        name = match[1].strip("[]") if match else ""
        if name in self.allowed_hosts or "*" in self.allowed_hosts:
            return True
        with suppress(ValueError):
            return bool(ip_address(name))
        return False

    @property
    def room(self) -> int:
        """Tokens of prompt and canvas together."""
        return max_positions(self.engine.model.config) or DEFAULT_ROOM

    def settings(self, body: Any, gen_length: int | None) -> SamplingSettings:
        """A request's settings; the server's defaults fill in what it leaves out. Raises ValueError if they make no
        sense."""
        requested: dict[str, Any] = {}
        for name in HINTS:
            value = getattr(body, name)
            if value is not None:
                requested[name] = value
        defaults = self.defaults
        length = defaults.gen_length if gen_length is None else gen_length
        max_length = min(self.room, self.max_gen_length or self.room)
        if not 1 <= length <= max_length:
            raise ValueError(f"a canvas must have at least 1 token and at most {max_length}, not {length}")
        if requested.get("block_length", 1) > self.room:
            raise ValueError(f"block_length must be at most {self.room}, got {requested['block_length']}")

        # A default that contradicts the request is left out.
        values = asdict(defaults) | {"gen_length": length}
        if not requested.get("temperature", defaults.temperature):
            values |= GREEDY
        if "sampler" in requested:
            values |= dict.fromkeys(SAMPLER_SETTINGS)
            if "parallel" in requested["sampler"] and not REMASKING[defaults.remasking].by_confidence:
                values["remasking"] = "low_confidence"
        elif "reveal" in requested and requested["reveal"] != defaults.rule:
            values["reveal_level"] = None
            if defaults.editing is not None:  # its level is one of the rule threshold
                values["editing"] = None
            if defaults.edit_threshold is None and "edit_threshold" not in requested:
                values["max_post_steps"] = None
        if "editing" in requested:  # it has levels of its own, of the rule threshold
            values["reveal"] = None
            values["reveal_level"] = None
            values["edit_threshold"] = None
        values |= requested

        # Steps keep their share of the canvas.
        block_length = values["block_length"]
        if "steps" not in requested and block_length >= 1:
            is_causal = values["first_token"] == "causal"
            steps = default_steps(length, block_length, is_causal)
            was_causal = defaults.first_token == "causal"
            if defaults.steps != default_steps(defaults.gen_length, defaults.block_length, was_causal):
                min_steps = default_steps(length, block_length, is_causal, tokens_per_step=length)
                steps = max(round(length * defaults.steps / defaults.gen_length), min_steps)
            values["steps"] = min(steps, length)
        settings = SamplingSettings(**values).for_model(self.engine.model.config)
        refuse_scdd(settings, "a server")
        check_sampler(settings, self.engine.model.config)
        if settings.max_writes * length > MAX_WRITES:
            raise ValueError(
                f"with editing, each of the {length} tokens of the canvas may be written {settings.max_writes} times, "
                f"which is more than {MAX_WRITES} writes: lower block_length, max_post_steps or the canvas"
            )
        return settings

    def check_count(self, prompts: Sequence[Any], n: int) -> None:
        """Raises ValueError for a request without a prompt or with more rows than the queue ever takes."""
        if not prompts:
            raise ValueError("there is no prompt")
        count = len(prompts) * n
        queue_size = self.engine.queue_size
        if count > queue_size:
            raise ValueError(
                f"{count} completions in one request: the queue takes {queue_size} (--queue_size), send fewer"
            )

    def check_characters(self, count: int) -> None:
        """Raises ValueError for a text that is too long to be encoded at all."""
        max_count = CHARACTERS_PER_POSITION * self.room
        if count > max_count:
            raise ValueError(f"too long: {count} characters of text, and this model takes at most {max_count}")

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of a chat, up to where the model answers. Raises ValueError if it is too long, or if the template
        leaves out a message, as many do with roles that they do not know."""
        text = render_prompt(self.tokenizer, messages)
        self.check_characters(len(text))
        return encode_question(self.tokenizer, messages, {})

    def make_rows(
        self, prompts: Any, rids: Sequence[str], settings: SamplingSettings, ends: Any, seed: Any
    ) -> list[Row]:
        """As many rows per prompt as there are names. Raises ValueError for a prompt that the model does not read."""
        config = self.engine.model.config
        for ids in prompts:
            if not ids:
                raise ValueError("the prompt is empty: a model needs at least one token")
            check_no_mask(self.tokenizer, ids, self.engine.mask_token_id)
            check_room(config, len(ids) + 1, 0, ": the prompt is too long")
            check_room(config, len(ids), settings.gen_length, ": the canvas is too large, lower max_tokens")
            for token in (*ids, *ends):
                if not 0 <= token < config.vocab_size:
                    raise ValueError(f"token {token} is none of the model's {config.vocab_size}, numbered from 0")
        seed = self.seed if seed is None else seed
        rows_per_prompt = len(rids) // len(prompts)
        row_prompts = [ids for ids in prompts for _ in range(rows_per_prompt)]
        return [Row(rid, ids, settings, tuple(ends), seed) for rid, ids in zip(rids, row_prompts, strict=True)]

    def rows_to_generate(self, body: Generate) -> list[Row]:
        """The rows of a request in SGLang's dialect: `n` per prompt."""
        params = body.sampling_params
        prompts = list[Any](body.input_ids)
        if not (prompts and isinstance(prompts[0], list)):
            prompts = [prompts]
        self.check_count(prompts, params.n)

        # A name for each row
        count = len(prompts) * params.n
        rid = uuid.uuid4().hex if body.rid is None else body.rid
        if isinstance(rid, list):
            rids = rid
        elif count == 1:
            rids = [rid]
        else:
            rids = [f"{rid}-{row}" for row in range(count)]
        if len(rids) != count:
            raise ValueError(f"{count} completions need as many rid, got {len(rids)}")
        if params.ignore_eos and params.stop_token_ids:
            raise ValueError("stop_token_ids would be ignored: leave out ignore_eos, or give eos_stop instead")
        if params.eos_stop and not params.ignore_eos:
            raise ValueError("eos_stop would be ignored: it is for ignore_eos; without it, give stop_token_ids")

        if params.ignore_eos:
            ends = params.eos_stop
        else:
            ends = [*end_ids(self.tokenizer), *params.stop_token_ids]
        settings = self.settings(params, params.max_new_tokens)
        rows = self.make_rows(prompts, rids, settings, ends, params.sampling_seed)
        if body.padded_to is not None:
            self.mark_own_batch(rows, body.padded_to)
        return rows

    def mark_own_batch(self, rows: list[Row], prompt_width: int) -> None:
        """Marks the rows as a batch of their own. Raises ValueError if the batch has no room."""
        longest = max(len(row.ids) for row in rows)
        if prompt_width < longest:
            raise ValueError(f"padded_to {prompt_width}: a prompt has {longest} tokens")
        check_room(self.engine.model.config, prompt_width, rows[0].settings.gen_length, ": lower padded_to")
        batch_size = self.engine.batch_size
        if len(rows) > batch_size:
            raise ValueError(
                f"{len(rows)} rows must share a batch of at most {batch_size} (--batch_size): "
                "raise it, or send fewer rows per request (--rollout_batch_size of a run)"
            )
        batch_name = uuid.uuid4().hex
        size = block_size(self.engine.model.config)
        for row in rows:
            row.batch_name = batch_name
            row.prompt_width = prompt_width
            row.prompt_in_block = 0
            if size and row.settings.first_token is None:
                row.prompt_in_block = len(row.ids) % size

    def rows_of_openai(self, body: Completion | Chat) -> list[Row]:
        """The rows of a request in OpenAI's dialect: `n` per prompt. With a `seed` and no `rid`, equal requests draw
        equal random numbers."""
        if body.model not in (None, self.name):
            raise LookupError(f"the model {body.model!r} is not served here: this is {self.name!r}")
        length = body.max_tokens
        if isinstance(body, Chat):
            messages = [{"role": message.role, "content": join_parts(message.content)} for message in body.messages]
            self.check_characters(sum(len(message["role"]) + len(message["content"]) for message in messages))
            prompts: list[Any] = [messages]
            if body.max_completion_tokens is not None:
                length = body.max_completion_tokens
        else:
            is_ids = bool(body.prompt) and isinstance(body.prompt[0], int)
            has_several = isinstance(body.prompt, list) and not is_ids
            prompts = [*body.prompt] if has_several else [body.prompt]
        self.check_count(prompts, body.n)
        settings = self.settings(body, length)
        ids = []
        for prompt in prompts:
            if isinstance(body, Chat):
                prompt = self.encode_chat(prompt)
            elif isinstance(prompt, str):
                self.check_characters(len(prompt))
                prompt = encode_prompt(self.tokenizer, prompt)
            ids.append(prompt)
        rid = body.rid
        if not rid:
            rid = uuid.uuid4().hex if body.seed is None else "seed"
        rids = [f"{rid}-{row}" for row in range(len(ids) * body.n)]
        ends = () if body.ignore_eos else end_ids(self.tokenizer)
        rows = self.make_rows(ids, rids, settings, ends, body.seed)

        watches = ""
        if body.stream and body.stream_steps:
            watches = "steps"
        elif body.stream or body.stops:  # a stop string ends a row early, by its finished blocks
            watches = "blocks"
        for row in rows:
            row.watches = watches
        return rows


def join_parts(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# --- Events of rows, from the engine's thread to the event loop -------------------------------------------------------

Events = asyncio.Queue[tuple[int, Event]]  # each with the number of its row


@contextmanager
def submitted(engine: Engine, rows: Sequence[Row]) -> Iterator[Events]:
    """Hands rows to the engine; their events come to the running loop. Rows that have not ended are dropped when the
    block is left. Raises QueueFull."""
    events: Events = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def put_event(index: int, event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, (index, event))

    for index, row in enumerate(rows):
        row.on_event = partial(put_event, index)
    engine.submit(rows)
    try:
        yield events
    finally:
        engine.drop(rows)


async def read_events(
    engine: Engine, rows: Sequence[Row], events: Events, choices: Sequence[Choice] = ()
) -> AsyncGenerator[tuple[int, Event]]:
    """The events of submitted rows, after the choices have read them, until all rows have ended. A row that has
    a stop string is dropped. Raises `Stopped` for a row that ended without a completion."""
    ended_rows: set[int] = set()
    while len(ended_rows) < len(rows):
        index, event = await events.get()
        if index in ended_rows:
            continue
        if isinstance(event, Stopped):
            raise event
        if choices and isinstance(event, Completed):
            choices[index].update(event.ids, is_last=True)
        elif choices and isinstance(event, Finished):
            choices[index].update(event.ids, is_last=False)
        if isinstance(event, Completed) or (choices and choices[index].reason):
            ended_rows.add(index)
            engine.drop([rows[index]])
        yield index, event


async def complete_rows(engine: Engine, rows: Sequence[Row], choices: Sequence[Choice] = ()) -> list[Any]:
    """The last event of each row, after the choices have read it. Raises QueueFull or Stopped."""
    last_events: list[Any] = [None] * len(rows)
    with submitted(engine, rows) as events:
        async for index, event in read_events(engine, rows, events, choices):
            last_events[index] = event
    return last_events


async def stream_rows(
    server: Server, rows: Sequence[Row], choices: Sequence[Choice], object_name: str, usage_n: int | None
) -> AsyncGenerator[str]:
    """The server-sent events of OpenAI's streams. What a pass revealed is a chunk without text, with a `step`. A row
    that began again with other weights, after some of its text was passed on, ends the stream with an error. The usage
    comes last, with `usage_n` rows per prompt; None: it is not asked for."""
    kind = ""
    if object_name.startswith("chat"):
        kind = "delta"
        object_name = f"{object_name}.chunk"
    versions: dict[int, str] = {}  # of the weights that gave what was passed on
    make_chunk = partial(envelope, object_name, server.name, rows)
    with submitted(server.engine, rows) as events:
        yield server_sent_event(make_chunk([choice_of(index, "", None, kind) for index in range(len(rows))]))
        try:
            async for index, event in read_events(server.engine, rows, events, choices):
                choice = choices[index]
                if isinstance(event, Revealed):
                    step = step_of(event, server.tokenizer)
                    step["length"] = rows[index].settings.gen_length
                    yield server_sent_event(make_chunk([choice_of(index, None, None, kind)], step=step))
                    continue
                assert isinstance(event, Completed | Finished)
                version = versions.get(index, event.weight_version)
                if event.weight_version != version:
                    raise Stopped("the weights changed in the middle of this stream: ask again")
                text = choice.pop_delta()
                if text or choice.reason:
                    versions[index] = version
                    entry = choice_of(index, text, choice.reason, kind, is_first=False)
                    yield server_sent_event(make_chunk([entry]))
        except Stopped as error:
            yield server_sent_event({"error": {"message": str(error), "code": error.status}})
            return
    if usage_n is not None:
        yield server_sent_event(make_chunk([], usage=usage(rows, choices, usage_n)))
    yield server_sent_event("[DONE]")
