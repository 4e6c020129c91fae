"""The released format of Nemotron-Labs-Diffusion (NVIDIA): a Ministral3 with other names, whose clean text is read from
left to right, and whose blocks of noised text see themselves in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from d1.models.formats.released import check_fixed, key_mapping, rename

if TYPE_CHECKING:
    from torch import Tensor

NAME = "Nemotron-Labs-Diffusion"
NEMOTRON_KEYS = (("encoder", "model"), ("diffusion_head", "lm_head"))  # the released module -> Ministral3's
FROM_NEMOTRON = key_mapping(NEMOTRON_KEYS)
TO_NEMOTRON = key_mapping((new, old) for old, new in NEMOTRON_KEYS)
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Fields that the class reads under the same name; the others are about NVIDIA's trainers.
SHARED_FIELDS = (
    *SIZES,
    "rope_parameters",
    "hidden_act",
    "attention_dropout",
    "initializer_range",
    "tie_word_embeddings",
    "mask_token_id",
    "bos_token_id",
    "eos_token_id",
    "block_size",
    "torch_dtype",
    "dtype",
)
NEMOTRON_FIXED = {  # every released model; another value would need another class or another mask
    "dlm_paradigm": ("bidirectional", "block_diff"),  # how NVIDIA's code samples, or trains, the same model
    "sliding_window": (None,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "tie_word_embeddings": (None, False),
    "hidden_act": ("silu",),
}
# Of `rope_parameters`, which Ministral3 computes with
ROPE_FIELDS = ("rope_theta", "llama_4_scaling_beta", "original_max_position_embeddings")


def ministral3_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the Ministral3 config that a released `config.json` describes."""
    check_fixed(raw, NEMOTRON_FIXED, NAME)
    rope = raw.get("rope_parameters") or {}
    absent = [name for name in (*SIZES, "rope_parameters") if raw.get(name) is None]
    if rope:
        absent += [f"rope_parameters.{name}" for name in ROPE_FIELDS if rope.get(name) is None]
    if absent:
        raise ValueError(f"this {NAME} config.json lacks {', '.join(absent)}")
    fields = {name: raw[name] for name in SHARED_FIELDS if name in raw}
    # The released tokenizer has no padding token; the class would take 11, which ends a turn.
    fields["pad_token_id"] = raw.get("pad_token_id")
    return fields


def without_window(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Ministral3 config; ValueError if its layers have a window, which `layer_types` would not show."""
    check_fixed(raw, {"sliding_window": (None,)}, "Ministral3")
    return raw


def nemotron_weights(name: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The released name and weight for a weight of the class."""
    yield rename(name, TO_NEMOTRON), state[name]
