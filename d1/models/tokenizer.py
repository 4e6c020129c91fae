"""Tokenizers with every special token that a masked diffusion model needs, and prompts written with them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from d1.files import TOKENIZER_JSON_FILES, read_object, reading
from d1.models.adapters import adapter_chain, check_model_path
from d1.models.kinds import KINDS, Kind, check_kind, raw_config, released_kind
from d1.models.messages import (
    REASONING,
    TEMPLATE_COLUMNS,
    Message,
    Options,
    join_text_parts,
    map_texts,
    name_of_tool,
    read_weight,
    texts_in,
)
from d1.models.messages import as_messages as as_messages
from d1.models.messages import conversation_of as conversation_of
from d1.models.messages import require_text as require_text
from d1.models.messages import whole_turns as whole_turns
from d1.transformers_bridge import has_file

logger = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
# LLaDA and Llama 3, Qwen with Dream, SDAR and Fast-dLLM v2, LLaDA-MoE and LLaDA2, Gemma, DiffusionGemma
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|role_end|>", "<end_of_turn>", "<turn|>")
MASKS = ("<|mask|>", "<|MASK|>", "|<MASK>|")  # LLaDA2 and LLaDA-MoE, SDAR, Fast-dLLM v2
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load_tokenizer(
    path: str | Path, *, plain_chat_template: bool = False, base: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, padding left, with every special token this project relies on.

    Each token comes from the tokenizer, else from the ids in `config.json`, else from here. `save_pretrained` keeps it.

    - mask: the usual names, else the kind; a mask token that the config contradicts is an error;
    - end of turn (`tokenizer.eot_token`): the usual names, else EOS;
    - padding: EOS;
    - EOS: BERT's [SEP].

    Args:
        path: A checkpoint folder, hub name or adapter folder (its own tokenizer, else that of its base).
        plain_chat_template: Give a tokenizer without a chat template `PLAIN_CHAT_TEMPLATE`.
        base: The model that an adapter's own tokenizer has to fit; None: the one that the adapter names, if it is
            there.

    Raises:
        ValueError: No mask or EOS token is found; the mask token is another special token or ordinary text, or has
            another id in `config.json`; an id lies outside the embedding; or the kind is unknown and has its own code.
    """
    folder = tokenizer_folder(str(path))
    raw: dict[str, Any] = {}
    with suppress(OSError):  # a tokenizer without a model
        raw = raw_config(folder)
    kind = KINDS.get(released_kind(raw), Kind())
    if "auto_map" in raw:
        check_kind(released_kind(raw), folder)

    # Once as its files have it, and once with the special tokens
    cls: Any = getattr(transformers, kind.tokenizer)
    options: dict[str, Any] = {"padding_side": "left"}
    if cls is transformers.AutoTokenizer:  # otherwise it asks on the terminal
        options["trust_remote_code"] = False
    try:
        with reading(folder, "its tokenizer cannot be read"):
            tokenizer = cls.from_pretrained(folder, **options)
    except ValueError:
        for name in TOKENIZER_JSON_FILES:
            file_path = Path(folder, name)
            if file_path.is_file():
                read_object(file_path)  # its error names the damaged file
        raise
    if not raw:
        with suppress(OSError, ValueError):  # an adapter's own tokenizer must fit the base
            if base is None:
                base, _ = adapter_chain(folder, None)
            raw = raw_config(base)
            kind = KINDS.get(released_kind(raw), Kind())
    tokenizer = cls.from_pretrained(folder, **options, **special_tokens(tokenizer, raw, kind))
    rows = embedding_rows(raw)
    if rows is not None and max(tokenizer.get_vocab().values()) >= rows:
        tokenizer.embedding_rows = rows  # for `check_embedded`
    if tokenizer.chat_template is None and plain_chat_template:
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer


def tokenizer_folder(path: str) -> str:
    """The folder or hub name of a model's tokenizer; an adapter without its own tokenizer uses that of its base."""
    check_model_path(path)
    folder = path
    if not has_tokenizer(path):
        folder, _ = adapter_chain(path, None)
    if not has_tokenizer(folder):
        raise FileNotFoundError(f"{folder} has no tokenizer: none of {', '.join(VOCABULARIES)}")
    return folder


def embedding_rows(raw: Mapping[str, Any]) -> int | None:
    """The rows of the embedding that the config `raw` describes, if it says so."""
    return raw.get("embedding_size") or raw.get("vocab_size")


def special_tokens(tokenizer: PreTrainedTokenizerBase, raw: dict[str, Any], kind: Kind) -> dict[str, str]:
    """The tokenizer's special tokens; one that it lacks comes from the id in the config `raw`, or is a usual one."""
    folder = tokenizer.name_or_path
    vocab = tokenizer.get_vocab()
    rows = embedding_rows(raw) or len(vocab)
    names = ["eos_token", "pad_token", "eot_token"]
    if not kind.uniform_noise:
        names.insert(0, "mask_token")

    # The usual tokens of each name; BERT has [SEP] for EOS.
    usual: dict[str, Sequence[Any]] = {"eos_token": [tokenizer.sep_token], "eot_token": END_OF_TURN}
    if raw.get("mask_token_id") is None:
        masks: list[Any] = list(MASKS)
        if kind.mask_token_id is not None:
            masks.append(tokenizer.convert_ids_to_tokens(kind.mask_token_id))
        usual["mask_token"] = masks

    special: dict[str, str] = {}
    for name in names:
        token = getattr(tokenizer, name, None)
        number = raw.get(f"{name}_id")
        if isinstance(number, list) and number:  # of EOS, all tokens that end a text
            number = number[0]
        if token is None and isinstance(number, int) and 0 <= number < rows:  # some configs have a padding id of -1
            token = tokenizer.convert_ids_to_tokens(number)
        if token is None:
            token = next((candidate for candidate in usual.get(name, ()) if candidate in vocab), None)
        if token is None and name in ("pad_token", "eot_token"):
            token = special["eos_token"]
        if token is None:
            article, advice = "an", ""
            if name == "mask_token":
                article, advice = "a", ", or add a mask token with `python -m d1 a2d`"
            raise ValueError(
                f"{folder}: neither the tokenizer nor config.json names {article} {name}: name one in "
                f"special_tokens_map.json{advice}"
            )
        if token not in vocab:
            raise ValueError(f"{folder}: {name} {token!r} is not in the tokenizer")
        if vocab[token] >= rows:
            raise ValueError(f"{folder}: {name} {token!r} has id {vocab[token]}, outside the model's embedding")
        special[name] = token
    if kind.uniform_noise:
        return special

    mask = special["mask_token"]
    mask_token_id = raw.get("mask_token_id")
    if mask_token_id is not None and mask_token_id != vocab[mask]:
        raise ValueError(
            f"{folder}: the tokenizer's mask token is {mask!r} with id {vocab[mask]}, but config.json says "
            f"mask_token_id {mask_token_id}: correct the one that the model was not trained with"
        )
    check_mask_token(tokenizer, mask, special)
    return special


def check_mask_token(tokenizer: Any, mask: str, others: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for a mask token that has another meaning: that of a special token, or text.

    Args:
        tokenizer: as its files have it, without this mask token added to it.
        others: its other special tokens by name, where the tokenizer itself does not name them.
    """
    name = tokenizer.name_or_path
    roles = {}
    for role in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token"):
        roles[role] = getattr(tokenizer, role, None)
    roles.update(others or {})
    for role, token in roles.items():
        if role != "mask_token" and token == mask:
            raise ValueError(f"{name}: the mask token {mask!r} is also the {role}: a mask must be a token of its own")

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        words = tokenizer.get_vocab()
    else:
        words = backend.get_vocab(with_added_tokens=False)
    text = mask.replace("\u2581", "").replace("\u0120", "").removeprefix("##").strip()  # without marks of a space
    is_new = mask not in tokenizer.get_vocab()
    is_text = len(text) < 2 or all(part.isalnum() for part in text.split())
    if (mask in words or is_new) and is_text:
        raise ValueError(
            f"{name}: the mask token {mask!r} is ordinary text, which would be hidden wherever it occurs: name a "
            "special token of the vocabulary, or a new one"
        )


def check_chat_template(
    tokenizer: PreTrainedTokenizerBase, path: str | Path, flag: str = "--plain_chat_template"
) -> None:
    """Raise ValueError if a tokenizer cannot write prompts; warn if it does not write the same ones tomorrow."""
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {path} has no chat template: {flag} gives it one")
    if "strftime_now" in str(tokenizer.chat_template):  # a function of Transformers, which Llama 3.2's template calls
        logger.warning(
            "The chat template of %s writes today's date: prompts and results differ from day to day, and a run that "
            "is resumed on another day may be refused, because its rows are not the same. To keep them equal, write a "
            "date in place of strftime_now(...) in the template.",
            path,
        )


def with_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages, with one text in place of a list of parts; ValueError for images."""
    chat = [dict(message) for message in messages]
    for message in chat:
        if isinstance(message.get("content"), list):
            message["content"] = join_text_parts(message["content"], f"the {message.get('role')} message")
    return chat


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """The text of `messages` in the chat template, up to where the answer begins; `options` go to the template.
    ValueError, with the template's reason, if it refuses the messages; and for images, which some templates take."""
    return render(tokenizer, messages, options, add_generation_prompt)


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Options, add_generation_prompt: bool
) -> str:
    """`render_prompt` with the template's options in one mapping."""
    chat = with_texts(messages)
    arguments = {"add_generation_prompt": add_generation_prompt, "tokenize": False, **options}
    try:
        return str(apply_template(tokenizer, chat, arguments))
    except Exception as error:  # a template can raise anything
        reason = str(error)
        if not isinstance(error, TemplateError | ValueError):
            reason = f"{type(error).__name__}: {error}"
        raise unreadable(tokenizer, reason, messages[-1].get("content") or "") from error


def apply_template(tokenizer: Any, messages: Sequence[Message], options: Options) -> Any:
    """What `apply_chat_template` returns. If the template takes no objects as the arguments of calls, such as
    DeepSeek-V3's, which adds them to a text, it gets texts in JSON."""
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except TypeError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        return tokenizer.apply_chat_template([with_text_arguments(message) for message in messages], **options)


def with_text_arguments(message: Message) -> Message:
    """The message, with the arguments of its calls as texts in JSON."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    if not calls:
        return message
    return {**message, "tool_calls": calls}


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that `render_prompt` wrote; ValueError for a mask token, for a token that the model's embedding
    lacks, and as `encode_text`."""
    ids = encode_text(tokenizer, text)
    check_ids(tokenizer, ids)
    return ids


def encode_prompts(tokenizer: Any, prompts: Sequence[Sequence[Message]], **options: Any) -> list[list[int]] | None:
    """What `render_prompt` and `encode_prompt` give for each prompt, in less time, because the tokenizer is called once
    for all; None if one of these raises an error for one of the prompts."""
    arguments = {"add_generation_prompt": True, "tokenize": False, **options}
    try:
        texts = tokenizer.apply_chat_template([with_texts(messages) for messages in prompts], **arguments)
        encoded = [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        for ids in encoded:
            check_ids(tokenizer, ids)
    except Exception:  # a template can raise anything
        return None
    return encoded


def check_ids(tokenizer: Any, ids: Collection[int], mask_token_id: int | None = None) -> None:
    """`check_no_mask` and `check_embedded`."""
    check_no_mask(tokenizer, ids, mask_token_id)
    check_embedded(tokenizer, ids)


def check_no_mask(tokenizer: Any, ids: Collection[int], mask_token_id: int | None = None) -> None:
    """Raise ValueError if ids that a model is given hold its mask token, which it would take for a token to fill in.
    This is the rule for every text: questions, answers to train on, messages to a server, results of tools.

    Args:
        mask_token_id: of the model; None: the tokenizer's.
    """
    if mask_token_id is None:
        mask_token_id = tokenizer.mask_token_id
    if mask_token_id is not None and mask_token_id in ids:
        token = tokenizer.convert_ids_to_tokens(mask_token_id)
        raise ValueError(f"the mask token {token} is in the text, and the model would fill it in: write it differently")


def check_embedded(tokenizer: Any, ids: Collection[int]) -> None:
    """Raise ValueError for an id that the model's embedding has no row for, of a token that was added to the tokenizer
    alone. `load_tokenizer` notes the number of rows if there are such tokens."""
    rows = getattr(tokenizer, "embedding_rows", None)
    if rows is None:
        return
    for number in ids:
        if number >= rows:
            raise ValueError(
                f"the token {tokenizer.convert_ids_to_tokens(number)!r} with id {number} is in the text, and the "
                f"model's embedding has {rows} rows: write it differently, or remove it from the tokenizer"
            )


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text, which may have mask tokens. ValueError if the tokenizer has no token for a word, and none for
    unknown words."""
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises no other class
        words = text.split()
        if words != [text]:
            for word in words:
                encode_text(tokenizer, word)  # the word alone is named
        tokens = tokenizer.convert_ids_to_tokens(list(range(min(20, len(tokenizer)))))
        reason = f"it has no token for {text!r}, nor one for unknown words; its {len(tokenizer)} tokens are"
        raise unreadable(tokenizer, f"{reason} {', '.join(tokens)}, ...", text) from error


def unreadable(tokenizer: PreTrainedTokenizerBase, reason: str, text: str) -> ValueError:
    """The error for a text that a tokenizer cannot read."""
    excerpt = text
    if len(text) > 80:
        excerpt = f"{text[:40]}...{text[-40:]}"
    return ValueError(f"{tokenizer.name_or_path} cannot read the text {excerpt!r}: {reason}")


def end_ids(tokenizer: Any) -> list[int]:
    """Ids of the tokens that end a completion: end of text (first, because the EOS stop fills with it), end of turn,
    padding."""
    turn = tokenizer.convert_tokens_to_ids(getattr(tokenizer, "eot_token", None) or tokenizer.eos_token)
    return list(dict.fromkeys([tokenizer.eos_token_id, turn, tokenizer.pad_token_id]))


def first_end(ids: Sequence[int], ends: Collection[int]) -> int:
    """The position of the first token that is one of `ends`; `len(ids)` if there is none."""
    for position, token in enumerate(ids):
        if token in ends:
            return position
    return len(ids)


def cut_at_stop(text: str, stops: Iterable[str]) -> str:
    """`text` up to its first stop string."""
    end = len(text)
    for stop in stops:
        if stop:
            position = text.find(stop)
            if 0 <= position < end:
                end = position
    return text[:end]


def has_tokenizer(folder: str) -> bool:
    """Whether the folder or hub name holds a vocabulary; without one, some classes silently create an empty one."""
    return any(has_file(folder, name) for name in VOCABULARIES)


# --- Conversations to train on ----------------------------------------------------------------------------------------

Parts = list[tuple[str, bool]]  # the text of a conversation, in parts, and whether each is trained on
THOUGHTS = ("<think>", "</think>")
OTHER_PROMPT = "the training text differs from the generation prompt, and the answer begins where they part"
CUT_OFF = "messages after the assistant's last turn are left out"
ONE_TURN = "a weight is on an earlier turn, and the last alone is trained on (--assistant_only_loss trains on all)"
NO_NAMES = "the chat template does not write the name of a message, which is left out"
NO_VARIABLE = "the chat template reads no {} of chat_template_kwargs, which changes nothing"
UNKNOWN = "the tokenizer has no token for a part of the answer, which is trained on as {}"
NO_STOP = "the chat template ends earlier turns of the assistant without a token for it, so they do not teach to stop"


@dataclass(frozen=True)
class TrainedText:
    """The ids of a conversation, EOS last; whether each is trained on; where the last trained turn begins; and what
    the user should know about it, of the constants above."""

    ids: list[int]
    trained: list[bool]
    start: int
    notes: tuple[str, ...] = ()


def trained_ids(
    messages: list[Message], tokenizer: Any, answer: str, options: Options | None = None
) -> tuple[list[int], int]:
    """The ids of a conversation, EOS last, and where its last turn begins.

    Args:
        messages: those of `whole_turns`.
        answer: what a message calls the last turn.
        options: what the template gets besides, as `conversation_of` returns it.

    Raises:
        ValueError: the template leaves out a part of the conversation; the text has a mask token; the turn has another
            special token, or no tokens; or its weight is 0.
    """
    text = encode_turns(messages, tokenizer, answer, options)
    return text.ids, text.start


def encode_turns(
    messages: list[Message], tokenizer: Any, answer: str, options: Options | None = None, *, all_turns: bool = False
) -> TrainedText:
    """`trained_ids` with all that is known about the ids; with `all_turns`, all turns of the assistant are trained on
    whose weight is not 0."""
    if all_turns:
        chosen = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and read_weight(message) is not False:
                chosen.append(number)
        if not chosen:
            raise ValueError("all turns of the assistant have weight 0: there is nothing to train on")
        messages = messages[: chosen[-1] + 1]
    else:
        chosen = [len(messages) - 1]
        if read_weight(messages[-1]) is False:
            raise ValueError(
                "the last turn of the assistant has weight 0: there is nothing to train on "
                "(--assistant_only_loss trains on its other turns)"
            )
    for turn in chosen:
        check_plain_text(tokenizer, messages[turn], answer)
    parts, notes = trained_parts(messages, tokenizer, chosen, options or {}, all_turns)
    if not all_turns and any(read_weight(message) for message in messages[:-1] if message["role"] == "assistant"):
        notes.append(ONE_TURN)
    notes += omission_notes(messages, tokenizer, options or {})

    ids: list[int] = []
    trained: list[bool] = []
    start = 0
    text = ""
    for part, is_trained in parts:
        count = len(ids)
        ids = extend_ids(ids, text, part, tokenizer)
        text += part
        if is_trained:
            start = count
        trained += [is_trained] * (len(ids) - count)
    if start == len(ids):
        raise ValueError(f"{answer} has no tokens")
    unknown = tokenizer.unk_token_id
    if unknown in ids and unknown not in end_ids(tokenizer) and (unknown, True) in zip(ids, trained, strict=True):
        notes.append(UNKNOWN.format(tokenizer.unk_token))
    if ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
        trained.append(True)
    return TrainedText(ids, trained, start, tuple(notes))


def extend_ids(ids: list[int], before: str, part: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of the text `before` and then those of `part`: as in the whole text, if its ids begin with them; if a
    token would straddle the boundary, the first of `encodings_after` that keeps the text as it is, or else the part
    alone."""
    whole = encode_prompt(tokenizer, before + part)
    if whole[: len(ids)] == ids:
        return whole
    text = decode_text(tokenizer, whole)
    for part_ids in encodings_after(tokenizer, part):
        if decode_text(tokenizer, ids + part_ids) == text:
            check_ids(tokenizer, part_ids)
            return ids + part_ids
    return ids + encode_prompt(tokenizer, part)


ANCHORS = ("x", ".", "0")  # characters that most tokenizers have a token for


def encodings_after(
    tokenizer: PreTrainedTokenizerBase, part: str, anchors: Sequence[str] = ANCHORS
) -> Iterator[list[int]]:
    """Ways to tokenise a text that comes after another one: alone, and after each of `anchors`, whose ids are cut off
    again. Some tokenizers (Metaspace of SentencePiece) put a space before a text that they tokenise alone."""
    yield encode_text(tokenizer, part)
    for anchor in anchors:
        with suppress(ValueError):  # the tokenizer has no token for it
            anchor_ids = encode_text(tokenizer, anchor)
            ids = encode_text(tokenizer, anchor + part)
            if ids[: len(anchor_ids)] == anchor_ids:
                yield ids[len(anchor_ids) :]


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of ids, without the changes that some tokenizers make to spaces before punctuation."""
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=8)
def special_texts(tokenizer: Any, size: int) -> re.Pattern[str] | None:
    """Finds the special tokens of a tokenizer of this `size` in a text, without its mask token, which no text may have
    at all, the token of unknown words, and the marks of thoughts, which some tokenizers have as special tokens."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = {*added, *tokenizer.all_special_tokens, getattr(tokenizer, "eot_token", None)}
    special -= {None, "", tokenizer.mask_token, tokenizer.unk_token, *THOUGHTS}
    if not special:
        return None
    return re.compile("|".join(re.escape(token) for token in sorted(special)))


def check_plain_text(tokenizer: Any, message: Message, name: str) -> None:
    """Raise ValueError for a turn, called `name`, whose text spells a special token: the model would learn to write
    the end of a text, or the header of a turn, in the middle of an answer. The template writes those that belong."""
    pattern = special_texts(tokenizer, len(tokenizer))
    if pattern is None:
        return
    for text in texts_in([message.get(field) for field in ("content", "reasoning_content", "tool_calls")]):
        match = pattern.search(text)
        if match is not None:
            raise ValueError(f"the special token {match[0]} is in {name}: the chat template and the EOS end an answer")


def select_template(tokenizer: Any, options: Options) -> str | None:
    """The tokenizer's own chat template for a conversation with these `options`, which say whether it has tools: some
    tokenizers have several templates, by name."""
    if tokenizer.chat_template is None:
        return None
    return str(tokenizer.get_chat_template(tools=options.get("tools")))


@lru_cache(maxsize=8)
def training_template(tokenizer: Any, template: str | None) -> str | None:
    """TRL's variant for training of `template`, the tokenizer's own, which keeps all that messages say and marks what
    the model writes; None if TRL has none, or the template has such marks itself."""
    from trl.chat_template_utils import get_training_chat_template  # TRL is slow to import

    try:
        return get_training_chat_template(tokenizer)  # type: ignore[no-any-return]
    except Exception:  # ValueError: TRL does not know it; or the template refuses the messages that TRL tries
        return None


def has_marks(template: str | None) -> bool:
    """Whether a chat template marks what the model writes, by {% generation %}."""
    from trl.chat_template_utils import has_generation_markers

    return template is not None and has_generation_markers(template)


def candidate_templates(tokenizer: Any, options: Options, all_turns: bool) -> Iterator[tuple[str | None, bool]]:
    """Chat templates to try, the tokenizer's own as None, and whether to find turns by what the template marks. With
    `all_turns`, marks come first, as in TRL, whose variant writes earlier turns as it writes the last."""
    template = select_template(tokenizer, options)
    if all_turns and has_marks(template):
        yield None, True
    elif all_turns:
        variant = training_template(tokenizer, template)
        if variant:
            yield variant, True
    yield None, False
    variant = training_template(tokenizer, template)
    if variant:
        yield variant, False


def trained_parts(
    messages: list[Message], tokenizer: Any, chosen: Sequence[int], options: Options, all_turns: bool
) -> tuple[Parts, list[str]]:
    """The text of a conversation up to its last chosen turn, in parts, and notes about it.

    The first of `candidate_templates` counts that finds all that the messages say. Thoughts of turns that are not
    trained on are left to the template: many leave them out, as they do when the model is asked.

    Raises:
        ValueError: no template writes everything, or a turn cannot be found in the text.
    """
    problem: ValueError | None = None
    for template, by_marks in candidate_templates(tokenizer, options, all_turns):
        with_template = {**options, "chat_template": template}
        try:
            parts, notes = split_parts(messages, tokenizer, chosen, with_template, by_marks)
            check_complete(messages, tokenizer, chosen, with_template, by_marks)
            return parts, notes
        except ValueError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def split_parts(
    messages: list[Message], tokenizer: Any, chosen: Sequence[int], options: Options, by_marks: bool
) -> tuple[Parts, list[str]]:
    """`trained_parts` in one way, with the template in `options`."""
    whole = render(tokenizer, messages, options, add_generation_prompt=False)
    begins_as_asked = True
    if by_marks:
        spans = marked_spans(messages, tokenizer, chosen, options, whole)
    else:
        spans = []
        for turn in chosen:
            first, last, as_asked = span_of_turn(messages[: turn + 1], tokenizer, options, whole)
            spans.append((first, last))
            begins_as_asked = begins_as_asked and as_asked

    parts = Parts()
    end = 0
    for first, last in spans:
        parts.append((whole[end:first], False))
        parts.append((whole[first:last], True))
        end = last

    notes = []
    if not begins_as_asked:
        notes.append(OTHER_PROMPT)
    if len(spans) > 1:
        turn_ends = tuple(tokenizer.get_added_vocab())
        if not all(part.endswith(turn_ends) for part, is_trained in parts[:-1] if is_trained):
            notes.append(NO_STOP)
    return parts, notes


def split_last(messages: list[Message], tokenizer: Any, options: Options) -> tuple[str, str, bool]:
    """The text of a conversation before its last turn; that turn, the answer, which begins where the template's
    generation prompt ends, because there the model starts to write; and whether the prompt is that generation prompt.
    Together they are the text that the template writes."""
    content = messages[-1]["content"]
    prompt = render(tokenizer, messages[:-1], options, add_generation_prompt=True)
    whole = render(tokenizer, messages, options, add_generation_prompt=False)
    as_asked = whole.startswith(prompt)
    if not as_asked:  # such as a prompt that opens a thought, before an answer that has none
        other_content = "." if content[:1] != "." else ","
        other = [*messages[:-1], {**messages[-1], "content": other_content}]
        other_whole = render(tokenizer, other, options, add_generation_prompt=False)
        prompt = whole[: common_prompt_length(tokenizer, prompt, [whole, other_whole])]
    answer = whole[len(prompt) :]

    end = 0  # of the content in the answer
    if content in answer:
        end = answer.find(content) + len(content)
    if whole == render(tokenizer, messages, options, add_generation_prompt=True):
        # Templates that ignore `add_generation_prompt`, such as LLaDA's, may add the header of the next answer.
        answer_end = len(answer)
        for mark in {getattr(tokenizer, "eot_token", None), tokenizer.eos_token} - {None}:
            if mark in answer[end:]:
                answer_end = min(answer_end, answer.index(mark, end) + len(mark))
        answer = answer[:answer_end]
    return prompt, answer[:end] + answer[end:].rstrip(), as_asked  # whitespace between turns must not precede the EOS


def common_prompt_length(tokenizer: Any, prompt: str, texts: Sequence[str]) -> int:
    """The length of the longest beginning that a prompt shares with each text, without a part of an added token. The
    second text has another answer, so that no part of an answer counts."""
    length = min(shared_length(prompt, text) for text in texts)
    for token in tokenizer.get_added_vocab():
        first = texts[0].find(token, max(0, length - len(token) + 1), length + len(token) - 1)
        if 0 <= first < length:
            length = first
    return length


def shared_length(text: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    for position, (character, other_character) in enumerate(zip(text, other, strict=False)):
        if character != other_character:
            return position
    return min(len(text), len(other))


def span_of_turn(messages: list[Message], tokenizer: Any, options: Options, whole: str) -> tuple[int, int, bool]:
    """Where the last of these messages begins and ends in the text of the `whole` conversation, and whether it begins
    where the generation prompt ends. ValueError if the template writes it otherwise there, or if nothing comes before
    the turn."""
    if len(messages) == 1:
        raise ValueError(
            "the conversation begins with a turn of the assistant, and the chat template does not mark where it begins "
            "by {% generation %}: add these marks, give this turn the weight 0, or train on the last turn alone"
        )
    prompt, answer, as_asked = split_last(messages, tokenizer, options)
    if not whole.startswith(prompt + answer):
        raise ValueError(
            "the chat template writes an earlier turn of the assistant otherwise than the last, and neither it nor "
            "TRL's variant marks turns by {% generation %}: add these marks, or train on the last turn alone"
        )
    return len(prompt), len(prompt) + len(answer), as_asked


def marked_spans(
    messages: list[Message], tokenizer: Any, chosen: Sequence[int], options: Options, whole: str
) -> list[tuple[int, int]]:
    """Where the chosen turns begin and end in the `whole` text, by the template's {% generation %}."""
    arguments = {**options, "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    encoding = apply_template(tokenizer, messages, arguments)
    if not encoding.encodings:
        raise ValueError("the places of turns need a tokenizer with a tokenizer.json: train on the last turn alone")

    # Marked tokens next to each other are one span.
    spans: list[tuple[int, int]] = []
    for (first, last), is_marked in zip(encoding.encodings[0].offsets, encoding["assistant_masks"], strict=True):
        if is_marked and spans and first <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(last, spans[-1][1])
        elif is_marked:
            spans.append((first, last))

    # The spans of chosen turns, by where each message ends
    turns = [message for message in messages if message["role"] == "assistant"]
    if len(turns) > len(chosen):
        message_ends = []
        for count in range(1, len(messages) + 1):
            text = render(tokenizer, messages[:count], options, add_generation_prompt=False)
            message_ends.append(shared_length(text, whole))
        chosen_spans = []
        for first, last in spans:
            number = next((number for number, end in enumerate(message_ends) if end > first), None)
            if number in chosen:
                chosen_spans.append((first, last))
        spans = chosen_spans
    if not spans:
        raise ValueError("the chat template marks nothing as written by the assistant")
    spans[-1] = spans[-1][0], len(whole)  # what the template writes after the last turn ends it
    return [(first, first + len(whole[first:last].rstrip())) for first, last in spans]


# --- Nothing of a row is lost -----------------------------------------------------------------------------------------


def omission_notes(messages: list[Message], tokenizer: Any, options: Options) -> list[str]:
    """Notes about what the template leaves out, but which some rows have in vain: names of messages, and variables.
    The name of a tool's message is that of its call."""
    notes = []
    if any("name" in message and message["role"] != "tool" for message in messages):
        nameless = []
        for message in messages:
            nameless.append({name: value for name, value in message.items() if name != "name"})
        text = render(tokenizer, messages, options, add_generation_prompt=True)
        if text == render(tokenizer, nameless, options, add_generation_prompt=True):
            notes.append(NO_NAMES)
    return notes + unread_variables(tokenizer, options)


def unread_variables(tokenizer: Any, options: Options) -> list[str]:
    """A note about each of a chat template's arguments that it does not read."""
    template = select_template(tokenizer, options) or ""
    notes = []
    for name in options:
        if name not in TEMPLATE_COLUMNS and name not in template:
            notes.append(NO_VARIABLE.format(name))
    return notes


def encode_question(tokenizer: PreTrainedTokenizerBase, messages: list[Message], options: Options) -> list[int]:
    """The ids of a conversation up to where the model answers; `messages` and `options` are those of `conversation_of`.
    ValueError as `encode_prompt`, and if the template leaves out a part of it; thoughts of earlier turns may be."""
    text = render(tokenizer, messages, options, add_generation_prompt=True)
    check_question(tokenizer, messages, options)
    return encode_prompt(tokenizer, text)


def check_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Options) -> None:
    """Raise ValueError if the chat template leaves out a part of a task's prompt, whose messages may have lists of
    parts, and null in fields that others have."""
    filled = []
    for message in with_texts(messages):
        fields = {name: value for name, value in message.items() if value is not None}
        filled.append({"role": "", "content": "", **fields})
    check_question(tokenizer, filled, options)


def check_new_roles(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Options, checked: set[tuple[Any, ...]]
) -> None:
    """`check_prompt` for a prompt whose sequence of roles is not in `checked`, to which it is added."""
    roles = tuple(message.get("role") for message in messages)
    if roles not in checked:
        check_prompt(tokenizer, messages, options)
        checked.add(roles)


def check_question(tokenizer: PreTrainedTokenizerBase, messages: list[Message], options: Options) -> None:
    """Raise ValueError if the template leaves out a part of a conversation that the model is to answer."""
    copies, marked_options, marks = add_marks(messages, options, chosen=())
    try:
        written = render(tokenizer, copies, marked_options, add_generation_prompt=True)
    except ValueError:  # a template that reads its messages refuses the words
        written = ""
    for mark in marks:
        if mark.word not in written:
            check_not_left_out(mark, messages, tokenizer, options, chosen=())


@dataclass(frozen=True)
class Mark:
    """A word that is added to one part of a conversation, to find the part in the template's text."""

    word: str
    part: str  # what an error calls it
    message: int | None = None  # None: of the options


def add_marks(
    messages: list[Message], options: Options, chosen: Collection[int], only: Mark | None = None
) -> tuple[list[Message], dict[str, Any], list[Mark]]:
    """A copy of a conversation with a word at the end of each part, and the words; or a copy where a word replaces the
    part `only`. The thoughts of messages that are not chosen get none."""
    marks: list[Mark] = []

    def mark(part: str, message: int | None = None) -> Callable[[str], str]:
        """Take the next word for a part, and return the function that changes its texts."""
        new_mark = Mark(f"zq{len(marks)}qz", part, message)
        marks.append(new_mark)

        def change(text: str) -> str:
            if only is None:
                return text + new_mark.word
            if new_mark == only:
                return new_mark.word
            return text

        return change

    copies = []
    for number, message in enumerate(messages):
        copy = dict(message)
        role = message["role"]
        thoughts = message.get("reasoning_content")
        if number in chosen and thoughts:
            change = mark(f"reasoning_content of the {role} message", number)
            for name in REASONING:
                if copy.get(name) == thoughts:
                    copy[name] = change(thoughts)
        inner, close, answer = message["content"].rpartition("</think>")
        if number in chosen and close and inner.replace("<think>", "").strip():
            inner = mark(f"the thought in the content of the {role} message", number)(inner)
        if answer.strip():
            answer = mark(f"the content of the {role} message {message['content']!r:.60}", number)(answer)
        copy["content"] = inner + close + answer
        calls = []
        for call in message.get("tool_calls", ()):
            function = dict(call["function"])
            name = function["name"]
            function["name"] = mark(f"tool_calls (to {name})", number)(name)
            if function["arguments"]:
                change = mark(f"the arguments in tool_calls (to {name})", number)
                function["arguments"] = map_texts(function["arguments"], change, keys=True)
            calls.append({**call, "function": function})
        if calls:
            copy["tool_calls"] = calls
        copies.append(copy)

    marked_options = dict(options)
    if "tools" in options:
        marked_options["tools"] = []
        for tool in options["tools"]:
            if callable(tool):  # described by Transformers
                marked_options["tools"].append(tool)
                continue
            name = name_of_tool(tool)
            function = dict(tool.get("function") or tool)
            function["name"] = mark(f"tools ({name})")(name)
            if "function" in tool:
                function = {**tool, "function": function}
            marked_options["tools"].append(function)
    if "documents" in options:
        marked_options["documents"] = map_texts(options["documents"], mark("documents"))
    return copies, marked_options, marks


def check_complete(
    messages: list[Message], tokenizer: Any, chosen: Sequence[int], options: Options, by_marks: bool
) -> None:
    """Raise ValueError unless the template's text depends on each part of a conversation, where the parts of chosen
    turns are trained on and no others are."""
    copies, marked_options, marks = add_marks(messages, options, chosen)
    try:
        parts, _ = split_parts(copies, tokenizer, chosen, marked_options, by_marks)
    except ValueError:  # a template that reads its messages, such as the pocket models', refuses the words
        parts = []
    for mark in marks:
        trained = [is_trained for part, is_trained in parts if mark.word in part]
        is_chosen = mark.message in chosen
        if trained and any(trained) != is_chosen:
            verb = "is not" if is_chosen else "would be"
            raise ValueError(f"{mark.part} {verb} trained on: the chat template writes it in another turn's place")
        if not trained:
            check_not_left_out(mark, messages, tokenizer, options, chosen)


def check_not_left_out(
    mark: Mark, messages: list[Message], tokenizer: Any, options: Options, chosen: Collection[int]
) -> None:
    """Raise ValueError if the template writes the same text when another word replaces this part."""
    copies, marked_options, _ = add_marks(messages, options, chosen, only=mark)
    whole = render(tokenizer, messages, options, add_generation_prompt=False)
    try:
        other_whole = render(tokenizer, copies, marked_options, add_generation_prompt=False)
    except ValueError:
        return
    if other_whole == whole:
        raise ValueError(
            f"the chat template leaves out {mark.part}: remove it from the row, or use a model whose template writes it"
        )
