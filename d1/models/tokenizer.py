"""Tokenizers with every special token that a masked diffusion model needs, and prompts written with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from d1.files import OF_TOKENIZER, read_object, reading
from d1.models.adapters import adapter_chain, check_there
from d1.models.kinds import KINDS, Kind, check_kind, raw_config, released_kind
from d1.transformers_bridge import has_file

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
# LLaDA and Llama 3, Qwen with Dream, SDAR and Fast-dLLM v2, LLaDA-MoE and LLaDA2, Gemma, DiffusionGemma
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|role_end|>", "<end_of_turn>", "<turn|>")
MASKS = ("<|mask|>", "<|MASK|>", "|<MASK>|")  # LLaDA2 and LLaDA-MoE, SDAR, Fast-dLLM v2
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load_tokenizer(path: str | Path, *, plain_chat_template: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, padding left, with every special token this project relies on.

    Each token comes from the tokenizer, else from the ids in `config.json`, else from here. `save_pretrained` keeps it.

    - mask: the usual names, else the kind; a mask token that the config contradicts is an error;
    - end of turn (`tokenizer.eot_token`): the usual names, else EOS;
    - padding: EOS;
    - EOS: BERT's [SEP].

    Args:
        path: A checkpoint folder, hub name or adapter folder (its own tokenizer, else that of its base).
        plain_chat_template: Give a tokenizer without a chat template `PLAIN_CHAT_TEMPLATE`.

    Raises:
        ValueError: No mask or EOS token is found; the mask token is another special token or ordinary text, or has
            another id in `config.json`; an id lies outside the embedding; or the kind is unknown and has its own code.
    """
    folder, raw = tokenizer_folder(str(path)), dict[str, Any]()
    with suppress(OSError):  # a tokenizer without a model
        raw = raw_config(folder)
    kind = KINDS.get(released_kind(raw), Kind())
    if "auto_map" in raw:
        check_kind(released_kind(raw), folder)
    cls: Any = getattr(transformers, kind.tokenizer)
    options: dict[str, Any] = {"padding_side": "left"}
    if cls is transformers.AutoTokenizer:  # otherwise it asks on the terminal
        options["trust_remote_code"] = False
    try:
        with reading(folder, "its tokenizer cannot be read"):
            tokenizer = cls.from_pretrained(folder, **options)
    except ValueError:
        for path in (Path(folder, name) for name in OF_TOKENIZER):
            if path.is_file():
                read_object(path)  # its error names the damaged file
        raise
    if not raw:
        with suppress(OSError, ValueError):  # an adapter's own tokenizer must fit the base
            raw = raw_config(adapter_chain(folder, None)[0])
    tokenizer = cls.from_pretrained(folder, **options, **special_tokens(tokenizer, raw, kind))
    if tokenizer.chat_template is None and plain_chat_template:
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer


def tokenizer_folder(path: str) -> str:
    """The folder or hub name of a model's tokenizer; an adapter without its own tokenizer uses that of its base."""
    check_there(path)
    folder = path if has_tokenizer(path) else adapter_chain(path, None)[0]
    if not has_tokenizer(folder):
        raise FileNotFoundError(f"{folder} has no tokenizer: none of {', '.join(VOCABULARIES)}")
    return folder


def special_tokens(tokenizer: PreTrainedTokenizerBase, raw: dict[str, Any], kind: Kind) -> dict[str, str]:
    """The tokenizer's special tokens; one that it lacks comes from the id in the config `raw`, or is a usual one."""
    folder, vocab = tokenizer.name_or_path, tokenizer.get_vocab()
    rows = raw.get("embedding_size", raw.get("vocab_size", len(vocab)))
    own = [] if kind.mask_token_id is None else [tokenizer.convert_ids_to_tokens(kind.mask_token_id)]
    usual: dict[str, Sequence[Any]] = {"eos_token": [tokenizer.sep_token], "eot_token": END_OF_TURN}  # BERT has [SEP]
    if raw.get("mask_token_id") is None:
        usual["mask_token"] = [*MASKS, *own]
    found: dict[str, str] = {}
    for name in (*(() if kind.uniform_noise else ("mask_token",)), "eos_token", "pad_token", "eot_token"):
        token = getattr(tokenizer, name, None)
        number = raw.get(f"{name}_id")
        if token is None and isinstance(number, int) and 0 <= number < rows:  # some configs have a padding id of -1
            token = tokenizer.convert_ids_to_tokens(number)
        if token is None:
            token = next((one for one in usual.get(name, ()) if one in vocab), None)
        if token is None and name in ("pad_token", "eot_token"):
            token = found["eos_token"]
        if token is None:
            raise ValueError(
                f"{folder}: neither the tokenizer nor config.json names a {name}: name one in "
                "special_tokens_map.json, or add a mask token with `python -m d1 a2d`"
            )
        if token not in vocab:
            raise ValueError(f"{folder}: {name} {token!r} is not in the tokenizer")
        if vocab[token] >= rows:
            raise ValueError(f"{folder}: {name} {token!r} has id {vocab[token]}, outside the model's embedding")
        found[name] = token
    if kind.uniform_noise:
        return found
    mask, named = found["mask_token"], raw.get("mask_token_id")
    if named is not None and named != vocab[mask]:
        raise ValueError(
            f"{folder}: the tokenizer's mask token is {mask!r} with id {vocab[mask]}, but config.json says "
            f"mask_token_id {named}: correct the one that the model was not trained with"
        )
    check_mask_token(tokenizer, mask, found)
    return found


def check_mask_token(tokenizer: Any, mask: str, others: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for a mask token that has another meaning: that of a special token, or text.

    Args:
        tokenizer: as its files have it, without this mask token added to it.
        others: its other special tokens by name, where the tokenizer itself does not name them.
    """
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
    roles = {name: getattr(tokenizer, name, None) for name in names} | {**(others or {})}
    name = tokenizer.name_or_path
    if same := [role for role, token in roles.items() if role != "mask_token" and token == mask]:
        raise ValueError(f"{name}: the mask token {mask!r} is also the {same[0]}: a mask must be a token of its own")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = tokenizer.get_vocab() if backend is None else backend.get_vocab(with_added_tokens=False)
    text = mask.replace("\u2581", "").replace("\u0120", "").removeprefix("##").strip()  # without marks of a space
    if mask in words and (len(text) < 2 or text.isalnum()):
        raise ValueError(
            f"{name}: the mask token {mask!r} is ordinary text, which would be hidden wherever it occurs: name a "
            "special token of the vocabulary, or a new one"
        )


def check_chat_template(
    tokenizer: PreTrainedTokenizerBase, path: str | Path, flag: str = "--plain_chat_template"
) -> None:
    """Raise ValueError if a tokenizer cannot write prompts."""
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {path} has no chat template: {flag} gives it one")


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """The text of `messages` in the chat template, up to where the answer begins; `options` go to the template.
    ValueError, with the template's reason, if it refuses the messages; and for images, which some templates take."""
    if any(isinstance(message.get("content"), list) for message in messages):
        raise ValueError("a message is a list of parts, such as images, not text: models here read text alone")
    options = {"add_generation_prompt": True, "tokenize": False, **options}
    try:
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except Exception as error:  # a template can raise anything
        reason = str(error) if isinstance(error, TemplateError | ValueError) else f"{type(error).__name__}: {error}"
        raise unreadable(tokenizer, reason, messages[-1]["content"]) from error


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that `render_prompt` wrote; ValueError for a word without a token where none is for unknown
    words."""
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises no other class
        for word in text.split() if text.split() != [text] else ():
            encode_prompt(tokenizer, word)  # the word alone is named
        tokens = tokenizer.convert_ids_to_tokens(list(range(min(20, len(tokenizer)))))
        reason = f"it has no token for {text!r}, nor one for unknown words; its {len(tokenizer)} tokens are"
        raise unreadable(tokenizer, f"{reason} {', '.join(tokens)}, ...", text) from error


def unreadable(tokenizer: PreTrainedTokenizerBase, reason: str, text: str) -> ValueError:
    """The error for a prompt that a model cannot read."""
    start = text if len(text) <= 80 else f"{text[:40]}...{text[-40:]}"
    return ValueError(f"{tokenizer.name_or_path} cannot read the prompt {start!r}: {reason}")


def end_ids(tokenizer: Any) -> list[int]:
    """Ids of the tokens that end a completion: end of text (first, because the EOS stop fills with it), end of turn,
    padding."""
    turn = tokenizer.convert_tokens_to_ids(getattr(tokenizer, "eot_token", None) or tokenizer.eos_token)
    return list(dict.fromkeys([tokenizer.eos_token_id, turn, tokenizer.pad_token_id]))


def first_end(ids: Sequence[int], ends: Collection[int]) -> int:
    """The position of the first token that is one of `ends`; `len(ids)` if there is none."""
    return next((position for position, token in enumerate(ids) if token in ends), len(ids))


def cut(text: str, stops: Iterable[str]) -> str:
    """`text` up to its first stop string."""
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]


def has_tokenizer(folder: str) -> bool:
    """Whether the folder or hub name holds a vocabulary; without one, some classes silently create an empty one."""
    return any(has_file(folder, name) for name in VOCABULARIES)


Message = dict[str, str]


def require_text(value: Any, name: str, empty_ok: bool = False) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text (in SFT, --template turns numbers into text)")
    if not empty_ok and not value.strip():
        raise ValueError(f"{name} is empty")


def as_messages(row: dict[str, Any], name: str, role: str) -> list[Message]:
    if isinstance(row[name], list):
        return row[name]
    require_text(row[name], name)
    return [{"role": role, "content": row[name]}]


def whole_turns(messages: Any) -> list[Message]:
    """The messages up to the assistant's last; ValueError if they are no messages, or if no other comes before it."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is not a list of {role, content}")
    for message in messages:
        role = message.get("role")
        require_text(role, "a message's role")
        require_text(message.get("content"), f"the {role} message", empty_ok=role != "assistant")
    while messages and messages[-1].get("role") != "assistant":
        messages = messages[:-1]
    if len(messages) < 2:
        raise ValueError("no assistant turn follows a user turn")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def prompt_and_answer(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text of a conversation before its last turn, and that turn: the answer, which begins where the template's
    generation prompt ends, because there the model starts to write."""
    prompt, answer = render_prompt(tokenizer, messages[:-1], add_generation_prompt=True), messages[-1]["content"]
    whole = render_prompt(tokenizer, messages, add_generation_prompt=False)
    end = len(answer)
    if whole.startswith(prompt):  # false if the finished conversation does not contain the generation prompt
        content, answer = answer, whole[len(prompt) :]
        end = answer.find(content) + len(content) if content in answer else 0
        if whole == render_prompt(tokenizer, messages, add_generation_prompt=True):
            # Templates that ignore `add_generation_prompt`, such as LLaDA's, may add the header of the next answer.
            marks = {getattr(tokenizer, "eot_token", None), tokenizer.eos_token} - {None}
            ends = [answer.index(mark, end) + len(mark) for mark in marks if mark in answer[end:]]
            answer = answer[: min(ends, default=len(answer))]
    return prompt, answer[:end] + answer[end:].rstrip()  # whitespace between turns must not come before the EOS


def tokenize(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Ids of prompt and answer together, and the number of ids before the answer.

    The prompt has the same ids as when the model is asked for the answer. If the ids of the whole text begin with them,
    the rest is the answer; if a token would straddle the boundary, the answer is tokenised alone.
    """
    ids, whole = encode_prompt(tokenizer, prompt), encode_prompt(tokenizer, prompt + answer)
    new = whole[len(ids) :] if whole[: len(ids)] == ids else encode_prompt(tokenizer, answer)
    return ids + new, len(ids)


def trained_ids(messages: list[Message], tokenizer: Any, answer: str) -> tuple[list[int], int]:
    """The ids of a conversation, EOS last, and where its last turn begins. ValueError if it has a mask token, or if
    that turn, which is called `answer`, has no tokens."""
    ids, start = tokenize(*prompt_and_answer(messages, tokenizer), tokenizer)
    if tokenizer.mask_token_id in ids:
        raise ValueError(f"the mask token {tokenizer.mask_token} is in the text")
    if start == len(ids):
        raise ValueError(f"{answer} has no tokens")
    return [*ids, *[tokenizer.eos_token_id] * (ids[-1] != tokenizer.eos_token_id)], start
