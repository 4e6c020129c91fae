"""What several released formats have in common: tables of names, the export of their config, and their experts.

Transformers keeps the experts of a layer as two stacks, `experts.gate_up_proj` (experts, 2 x width, hidden), gate above
up, and `experts.down_proj` (experts, hidden, width). It makes these stacks from files that name each expert's weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Fields of a released config that describe its files and code, not the model.
FILE_FIELDS = ("model_type", "architectures", "auto_map", "transformers_version")
# Fields that may have changed since the model was read; all others of a released config are written as they were.
CHANGEABLE = ("vocab_size", "mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
# Config fields that have the same name in the released mixtures and in the classes that run them.
SAME_IN_MIXTURES = {
    name: name
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts_per_tok",
        "norm_topk_prob",
        "rms_norm_eps",
        "hidden_act",
        "max_position_embeddings",
        "initializer_range",
        "attention_dropout",
        "tie_word_embeddings",
        "mask_token_id",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
}


def key_mapping(table: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The table (name, name it becomes) of modules or weights, where {} is the number of the block, as
    {regular expression: replacement}, the form that `from_pretrained` and `rename` take."""
    mapping = {}
    for old, new in table:
        pattern = re.escape(old).replace(r"\{\}", r"(\d+)")
        mapping["^" + pattern + r"(?![^.])"] = new.replace("{}", r"\1")
    return mapping


def rename(name: str, mapping: Mapping[str, str]) -> str:
    """`name` changed by the first rule of `mapping` that matches its start; unchanged if none does."""
    for pattern, replacement in mapping.items():
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name


def check_fixed(raw: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], name: str) -> None:
    """Raise ValueError if a field of a released config has a value that `fixed` does not allow."""
    unsupported = {}
    for field, allowed in fixed.items():
        if field in raw and raw[field] not in allowed:
            unsupported[field] = raw[field]
    if unsupported:
        raise ValueError(f"this {name} config asks for layers that are not supported: {unsupported}")


SIZES = ("d_model", "_size", "_heads", "_layers", "_experts", "_per_tok", "_eps")  # endings of fields


def renamed_fields(raw: Mapping[str, Any], table: Mapping[str, str], name: str) -> dict[str, Any]:
    """The fields of `table` (released name -> name here) that a released config has, and its rotary positions;
    ValueError for missing sizes."""
    needed = [field for field in table if field.endswith(SIZES)]
    needed.append("rope_theta")
    absent = [field for field in needed if raw.get(field) is None]
    if absent:
        raise ValueError(f"this {name} config.json lacks {', '.join(absent)}")
    fields = {new: raw[old] for old, new in table.items() if old in raw}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    return fields


def head_sizes(raw: Mapping[str, Any]) -> dict[str, int]:
    """`num_key_value_heads` and `head_dim` of a config; if it leaves them out, the values that it implies."""
    heads = raw.get("num_attention_heads")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        head_dim = raw.get("hidden_size", 0) // (heads or 1)
    return {"num_key_value_heads": raw.get("num_key_value_heads") or heads, "head_dim": head_dim}


def as_released(config: Any) -> dict[str, Any]:
    """The released `config.json` of a model that was read from one."""
    raw = getattr(config, "released", None)
    if raw is None:
        raise ValueError("only a model that was read from this format can be written in it again; this one was not")
    written = dict(raw)
    for name in CHANGEABLE:
        if name in raw:
            written[name] = getattr(config, name, None)
    return written


def same_names(name: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """For a format that names its weights as the class does."""
    yield name, state[name]


def split_experts(name: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """For a format that names each expert's weights; the parts of a stack are views of it."""
    prefix, _, last = name.rpartition(".")
    if not prefix.endswith(".experts"):
        yield name, state[name]
        return
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    for expert, weight in enumerate(state[name]):
        for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", rows
