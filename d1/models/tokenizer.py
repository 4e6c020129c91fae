"""Tokenizers with every special token that a masked diffusion model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.utils import cached_file

from d1.models.adapters import adapter_chain, check_there

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")  # LLaDA and Llama 3, Qwen and Dream, Gemma
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load_tokenizer(
    path: str | Path,
    *,
    mask_token: str | None = None,
    pad_token: str | None = None,
    eos_token: str | None = None,
    eot_token: str | None = None,
    plain_chat_template: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, padding left, with every special token this project relies on.

    Tokens come from the arguments, else the tokenizer, else the ids in `config.json`; the end-of-turn token (as
    `tokenizer.eot_token`) also from the usual names, else it is EOS; padding falls back to EOS, EOS to BERT's [SEP].
    `save_pretrained` keeps all of it. SFT, RL and eval all use this tokenizer's chat template.

    Args:
        path: A checkpoint folder, hub name or adapter folder (its own tokenizer, else that of its base).
        plain_chat_template: Give a tokenizer without a chat template `PLAIN_CHAT_TEMPLATE`: one line
            "role: content" a message, then "assistant: ". A template that is there is kept.

    Raises:
        ValueError: No mask or EOS token can be found, or an id lies outside the model's embedding.
    """
    check_there(str(path))
    folder = str(path) if has_tokenizer(str(path)) else adapter_chain(str(path), None)[0]
    if not has_tokenizer(folder):
        unknown = "" if Path(folder).is_dir() else " (it is no folder here, and the hub or its cache has no such model)"
        raise FileNotFoundError(
            f"{folder} holds none of {', '.join(VOCABULARIES)}: there is no tokenizer to load{unknown}"
        )
    raw = config_beside(folder)
    cls: Any = AutoTokenizer
    if not trust_remote_code:  # these name code of their own, which only wraps what Transformers has
        cls = {"llada": PreTrainedTokenizerFast, "Dream": Qwen2Tokenizer}.get(raw.get("model_type", ""), AutoTokenizer)
    options = {"padding_side": "left"} | ({"trust_remote_code": True} if trust_remote_code else {})
    tokenizer = cls.from_pretrained(folder, **options)
    tokens = special_tokens(tokenizer, raw, mask_token=mask_token, pad_token=pad_token, eos_token=eos_token)
    vocab = tokenizer.get_vocab()
    eot = eot_token or getattr(tokenizer, "eot_token", None) or next((t for t in END_OF_TURN if t in vocab), None)
    tokens["eot_token"] = eot or tokens["eos_token"]
    for name, token in tokens.items():
        if token not in vocab:
            raise ValueError(f"{folder}: {name} {token!r} is not in the tokenizer")
        if vocab[token] >= raw.get("embedding_size", raw.get("vocab_size", len(vocab))):
            raise ValueError(f"{folder}: {name} {token!r} has id {vocab[token]}, outside the model's embedding")
    tokenizer = cls.from_pretrained(folder, **options, **tokens)
    if tokenizer.chat_template is None and plain_chat_template:
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer


def check_chat_template(
    tokenizer: PreTrainedTokenizerBase, path: str | Path, flag: str = "--plain_chat_template"
) -> None:
    """Raises ValueError for a tokenizer that cannot write prompts, with the `flag` that gives it a template."""
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {path} has no chat template: {flag} gives it one")


def has_tokenizer(folder: str) -> bool:
    """Whether the folder or hub name holds a vocabulary: some classes would start an empty one without a word."""
    return any(cached_file(folder, name, _raise_exceptions_for_missing_entries=False) for name in VOCABULARIES)


def config_beside(folder: str) -> dict[str, Any]:
    """`config.json` of the folder or hub name, {} where there is none (a tokenizer on its own)."""
    try:
        return PreTrainedConfig.get_config_dict(folder)[0]
    except OSError:
        return {}


def special_tokens(tokenizer: PreTrainedTokenizerBase, raw: dict[str, Any], **chosen: str | None) -> dict[str, str]:
    """Mask, EOS and padding token: the `chosen`, else the tokenizer's, else those of the ids in config `raw`."""
    found: dict[str, str] = {}
    for name in ("mask_token", "eos_token", "pad_token"):
        token = chosen[name] or getattr(tokenizer, name)
        id_ = raw.get(f"{name}_id")
        if token is None and isinstance(id_, int):
            token = tokenizer.convert_ids_to_tokens(id_)
        if token is None and name == "eos_token":
            token = tokenizer.sep_token  # what ends a text of BERT's
        if token is None and name == "pad_token":
            token = found["eos_token"]
        if token is None:
            raise ValueError(
                f"{tokenizer.name_or_path}: neither the tokenizer nor config.json names a {name}. Name one "
                f"(load_tokenizer(..., {name}=...)), or add a mask token with `python -m d1 a2d`"
            )
        found[name] = token
    return found
