"""DiffusionGemma's config, which describes text, vision and canvas. This library reads text and canvas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Fields of the text's config that this library reads where other models have them. Not `vocab_size`: PEFT would compare
# it with that of the base's config, which has none.
TEXT_FIELDS = (
    "max_position_embeddings",
    "final_logit_softcapping",
    "hidden_size",
    "num_hidden_layers",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
ENCODER = "model.encoder.language_model."


def check_config(config: Any, name: str) -> None:
    """Raise ValueError for a config whose encoder is not causal, or does not share its weights with the decoder."""
    text = config.text_config
    if text.use_bidirectional_attention == "all":
        raise ValueError(
            f"{name}: use_bidirectional_attention 'all' makes the encoder bidirectional; only a causal one"
        )
    if not config.tie_word_embeddings:
        raise ValueError(f"{name}: tie_word_embeddings false unties encoder and decoder, which share all weights here")


def copy_text_fields(config: Any) -> None:
    """Give a config the fields of its text's config, and its canvas as its `block_size`; changes it in place."""
    for field in TEXT_FIELDS:
        if getattr(config, field, None) is None:
            setattr(config, field, getattr(config.text_config, field))
    config.block_size = config.canvas_length


def diffusion_gemma_weights(name: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The released names: of the encoder's text model only the scale of each layer, as the decoder has the rest."""
    if not name.startswith(ENCODER) or name.endswith(".layer_scalar"):
        yield name, state[name]
