"""Tokenizers with every special token that a masked diffusion model needs, and prompts written with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from d1.models.adapters import adapter_chain, check_there
from d1.models.kinds import KINDS, Kind, check_kind, released_kind
from d1.transformers_bridge import has_file

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
# LLaDA and Llama 3, Qwen with Dream, SDAR and Fast-dLLM v2, LLaDA-MoE and LLaDA2, Gemma
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|role_end|>", "<end_of_turn>")
MASKS = ("<|mask|>", "<|MASK|>", "|<MASK>|")  # LLaDA2 and LLaDA-MoE, SDAR, Fast-dLLM v2
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load_tokenizer(path: str | Path, *, plain_chat_template: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, padding left, with every special token this project relies on.

    Tokens come from the tokenizer, else from the ids in `config.json`; the mask also from the usual names, else from
    the kind; the end-of-turn token (as `tokenizer.eot_token`) also from the usual names, else it is EOS; padding falls
    back to EOS, EOS to BERT's [SEP]. `save_pretrained` keeps all of it.

    Args:
        path: A checkpoint folder, hub name or adapter folder (its own tokenizer, else that of its base).
        plain_chat_template: Give a tokenizer without a chat template `PLAIN_CHAT_TEMPLATE`.

    Raises:
        ValueError: No mask or EOS token can be found, an id lies outside the model's embedding, or the model or its
            tokenizer is an unknown kind with code of its own, which is not run.
    """
    folder = tokenizer_folder(str(path))
    try:
        raw = PreTrainedConfig.get_config_dict(folder)[0]
    except OSError:  # a tokenizer on its own
        raw = {}
    kind = KINDS.get(released_kind(raw), Kind())
    if "auto_map" in raw:
        check_kind(released_kind(raw), folder)
    cls: Any = getattr(transformers, kind.tokenizer)
    options: dict[str, Any] = {"padding_side": "left"}
    if cls is transformers.AutoTokenizer:  # unless told, it asks on the terminal
        options["trust_remote_code"] = False
    tokenizer = cls.from_pretrained(folder, **options)
    tokenizer = cls.from_pretrained(folder, **options, **special_tokens(tokenizer, raw, kind))
    if tokenizer.chat_template is None and plain_chat_template:
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer


def tokenizer_folder(path: str) -> str:
    """The folder or hub name whose tokenizer a model goes by: an adapter without one of its own has its base's."""
    check_there(path)
    folder = path if has_tokenizer(path) else adapter_chain(path, None)[0]
    if not has_tokenizer(folder):
        unknown = "" if Path(folder).is_dir() else " (it is no folder here, and the hub or its cache has no such model)"
        raise FileNotFoundError(f"{folder} has no tokenizer: none of {', '.join(VOCABULARIES)}{unknown}")
    return folder


def special_tokens(tokenizer: PreTrainedTokenizerBase, raw: dict[str, Any], kind: Kind) -> dict[str, str]:
    """The tokenizer's special tokens; where it has none, that of the id in config `raw`, or a usual one."""
    folder, vocab = tokenizer.name_or_path, tokenizer.get_vocab()
    rows = raw.get("embedding_size", raw.get("vocab_size", len(vocab)))
    own = [] if kind.mask_token_id is None else [tokenizer.convert_ids_to_tokens(kind.mask_token_id)]
    usual: dict[str, Sequence[Any]] = {"eos_token": [tokenizer.sep_token], "eot_token": END_OF_TURN}  # BERT has [SEP]
    if raw.get("mask_token_id") is None:
        usual["mask_token"] = [*MASKS, *own]
    found: dict[str, str] = {}
    for name in ("mask_token", "eos_token", "pad_token", "eot_token"):
        token = getattr(tokenizer, name, None)
        if token is None and isinstance(raw.get(f"{name}_id"), int):
            token = tokenizer.convert_ids_to_tokens(raw[f"{name}_id"])
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
    return found


def check_chat_template(
    tokenizer: PreTrainedTokenizerBase, path: str | Path, flag: str = "--plain_chat_template"
) -> None:
    """Raises ValueError for a tokenizer that cannot write prompts."""
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {path} has no chat template: {flag} gives it one")


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """The text of `messages` in the chat template, up to where the answer begins; `options` are its own.

    Raises:
        ValueError: The template refuses them, with its reason, which says what the model reads.
    """
    options = {"add_generation_prompt": True, **options}
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # a template is somebody's program
        reason = str(error) if isinstance(error, TemplateError | ValueError) else f"{type(error).__name__}: {error}"
        raise unreadable(tokenizer, reason, messages[-1]["content"]) from error


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that `render_prompt` wrote.

    Raises:
        ValueError: The tokenizer has no token for a word of it, and none for unknown words.
    """

    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # all that the tokenizers library raises
        if (words := text.split()) != [text]:
            for word in words:
                encode_prompt(tokenizer, word)
            raise unreadable(tokenizer, str(error), text) from error
        tokens = tokenizer.convert_ids_to_tokens(list(range(min(20, len(tokenizer)))))
        reason = f"it has no token for {text!r}, nor one for unknown words; its {len(tokenizer)} tokens are"
        raise unreadable(tokenizer, f"{reason} {', '.join(tokens)}, ...", text) from error


def unreadable(tokenizer: PreTrainedTokenizerBase, reason: str, text: str) -> ValueError:
    """The error for a prompt that a model cannot read."""
    start = text if len(text) <= 80 else f"{text[:40]}...{text[-40:]}"
    return ValueError(f"{tokenizer.name_or_path} cannot read the prompt {start!r}: {reason}")


def end_ids(tokenizer: Any) -> list[int]:
    """Tokens that end a completion: end of text (first, it fills what an EOS stop leaves out), end of turn, padding."""
    turn = tokenizer.convert_tokens_to_ids(getattr(tokenizer, "eot_token", None) or tokenizer.eos_token)
    return list(dict.fromkeys([tokenizer.eos_token_id, turn, tokenizer.pad_token_id]))


def has_tokenizer(folder: str) -> bool:
    """Whether the folder or hub name holds a vocabulary: without one, some classes silently begin an empty one."""
    return any(has_file(folder, name) for name in VOCABULARIES)
