"""Models of an encoder and a decoder with the same weights, whose noise is uniform ids (DiffusionGemma).

A text is read in two passes. The *encoder* is causal and reads clean text. The *decoder* predicts canvases: each of a
canvas's tokens sees the whole canvas and the encoded text before it. Canvases begin where the prompt ends. Layers with
a window see in the encoder the last `sliding_window` tokens, and in the decoder the last `sliding_window` - 1 tokens
before the *canvas*, as `generate` does.

The masks are written out here by positions, as in `attention.py`, so several canvases of a row share one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from d1.models.attention import KERNELS, count_positions, for_kernel
from d1.models.formats.diffusion_gemma import ENCODER
from d1.models.head import unwrapped
from d1.transformers_bridge import CACHE, attention_kernel

Masks = dict[str, Tensor]  # the type of a layer -> its mask over queries, (rows, 1, queries, keys)


class SharedModule(nn.Module):
    """Runs a module of the decoder in the encoder's place. It has no weights: the decoder's module, with its adapter if
    it has one, is found at every call."""

    def __init__(self, parent: nn.Module, name: str) -> None:
        super().__init__()
        self.shared = (parent, name)  # in a tuple, so that it is no submodule of this one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parent, name = self.shared
        return getattr(parent, name)(*args, **kwargs)


def share_weights(model: Any) -> None:
    """Make the encoder of a DiffusionGemma run the decoder's modules; changes it in place.

    Transformers ties their weights, but the modules are two: an adapter would be two, and merging would add both to the
    one weight (huggingface/trl, sft_diffusion_gemma.py). The vision tower, which text does not reach,
    is frozen.
    """
    encoder = model.model.encoder
    decoder = model.model.decoder
    for encoder_layer, decoder_layer in zip(encoder.language_model.layers, decoder.layers, strict=True):
        share_children(encoder_layer.self_attn, decoder_layer.self_attn)
        share_children(encoder_layer, decoder_layer)

    # `tie_weights` must not look for what the encoder has no more.
    inner = model.model
    inner._tied_weights_keys = {
        target: source for target, source in inner._tied_weights_keys.items() if ".layers" not in target
    }
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if not target.startswith(f"{ENCODER}layers.")
    }
    freeze_vision(model)
    for table in (encoder.language_model.embed_tokens, decoder.embed_tokens):
        table.padding_idx = None  # nn.Embedding would give this row no gradient


def share_children(encoder_module: nn.Module, decoder_module: nn.Module) -> None:
    """Replace the modules of an encoder's layer, or of its attention, by the decoder's. ValueError if their weights are
    not tied."""
    names = [name for name, _ in encoder_module.named_children() if name != "self_attn"]
    for name in names:
        weights = getattr(encoder_module, name).parameters()
        decoder_weights = getattr(decoder_module, name).parameters()
        for weight, decoder_weight in zip(weights, decoder_weights, strict=True):
            if weight is not decoder_weight:
                raise ValueError(f"the encoder's {name} has weights of its own: tie them to the decoder's first")
        setattr(encoder_module, name, SharedModule(decoder_module, name))


def freeze_vision(model: Any) -> None:
    """Freeze what only images reach."""
    for part in (model.model.encoder.vision_tower, model.model.encoder.embed_vision):
        part.requires_grad_(False)


@dataclass
class Context:
    """Encoded text, (rows, tokens): what the decoder reads of it.

    Attributes:
        cache: keys and values of each layer; layers with a window may have lost those of the first tokens.
        visible: bool, false at padding.
    """

    cache: Any
    visible: Tensor

    def rows(self, rows: Tensor) -> Context:
        """These rows alone."""
        cache = DynamicCache()
        for number, layer in enumerate(self.cache.layers):
            cache.update(layer.keys[rows], layer.values[rows], number)
        return Context(cache, self.visible[rows])

    def forget(self, config: Any) -> None:
        """Drop keys and values that no later token sees; valid if every row continues after its last token."""
        for layer, kind in zip(self.cache.layers, config.text_config.layer_types, strict=True):
            visible_keys = config.text_config.sliding_window - 1
            if kind == "sliding_attention" and layer.keys.shape[2] > visible_keys:
                layer.keys = layer.keys[:, :, -visible_keys:]
                layer.values = layer.values[:, :, -visible_keys:]


def layer_masks(model: Any, keys: int, full: Tensor, windowed: Tensor, cache: Any) -> Masks:
    """The masks of each type of layer from those (rows, queries, all keys) bool, without the first keys where a layer
    of this type has fewer; `keys` are those that this pass adds to the cache's."""
    inner = unwrapped(model)
    kernel = attention_kernel(inner.config.text_config)
    if kernel not in KERNELS:
        raise ValueError(f"{inner.config.model_type} runs under {', '.join(KERNELS)}, not another attention kernel")
    layer_types = inner.config.text_config.layer_types
    masks = {}
    for layer_type, visible in (("full_attention", full), ("sliding_attention", windowed)):
        if layer_type not in layer_types:
            continue
        number = layer_types.index(layer_type)
        cached = 0
        if number < len(cache.layers):
            cached = cache.layers[number].keys.shape[2]
        visible = visible[..., visible.shape[-1] - cached - keys :]
        masks[layer_type] = for_kernel(kernel, visible.unsqueeze(1), inner)  # (rows, 1, queries, keys)
    return masks


def encode(model: Any, ids: Tensor, visible: Tensor, before: Context | None = None) -> tuple[Context, Tensor]:
    """Read text (rows, tokens) with the causal encoder; `visible` is 1 at real tokens.

    Args:
        before: the text before, whose cache is extended in place. Padding then lies left of it.

    Returns:
        The context, and the last states (rows, tokens, hidden), which predict the next token.
    """
    inner = unwrapped(model)
    if before is None:
        cache = DynamicCache()
        real = visible.bool()
    else:
        cache = before.cache
        real = torch.cat([before.visible, visible.bool()], dim=1)
    length = ids.shape[1]
    position = count_positions(real)  # (rows, all tokens)

    # (rows, queries, keys)
    query, key = position[:, -length:, None], position[:, None]
    causal = real[:, None] & (key <= query)
    windowed = causal & (query - key < inner.config.text_config.sliding_window)
    # Padding sees itself, because each token must see a key.
    diagonal = torch.eye(length, dtype=torch.bool, device=ids.device)
    diagonal = torch.cat([diagonal.new_zeros(length, real.shape[1] - length), diagonal], dim=1)
    output = inner.model.encoder.language_model(
        input_ids=ids,
        attention_mask=layer_masks(model, length, causal | diagonal, windowed | diagonal, cache),
        position_ids=position[:, -length:],
        **{CACHE: cache},
    )
    return Context(cache, real), output.last_hidden_state


def decode(
    model: Any, ids: Tensor, positions: Tensor, starts: Tensor, context: Context, soft: Tensor | None = None
) -> Tensor:
    """The decoder's last states (rows, n, hidden) of canvases.

    Args:
        ids: (rows, n), of one or several canvases per row.
        positions: (rows, n), of each token in its text, from 0.
        starts: (rows, n), the position of the first token of each token's canvas. It sees the text before, and the
            tokens with the same `starts`.
        soft: (rows, n, hidden) soft embeddings for self-conditioning (`soft_embeddings`); None: zeros.
    """
    inner = unwrapped(model)
    decoder = inner.model.decoder
    config = inner.config.text_config

    # (rows, queries, keys of the text and of the canvases)
    key = count_positions(context.visible)[:, None]
    start = starts.unsqueeze(-1)
    text = context.visible[:, None] & (key < start)
    window = text & (key > start - config.sliding_window)
    canvas = start == starts.unsqueeze(1)
    full = torch.cat([text, canvas], dim=-1)
    windowed = torch.cat([window, canvas], dim=-1)
    masks = layer_masks(model, ids.shape[1], full, windowed, context.cache)

    embedded = decoder.embed_tokens(ids)
    if soft is None:
        soft = torch.zeros_like(embedded)
    states = decoder.self_conditioning(embedded, soft)
    position_embeddings = {kind: decoder.rotary_emb(states, positions, kind) for kind in masks}
    for layer, kind in zip(decoder.layers, config.layer_types, strict=True):
        states = layer(
            states,
            position_ids=positions,
            position_embeddings=position_embeddings[kind],
            attention_mask=masks[kind],
            **{CACHE: context.cache},
        )
    return decoder.norm(states)  # type: ignore[no-any-return]


def soft_embeddings(model: Any, logits: Tensor) -> Tensor:
    """The mean embedding (n, hidden) of the distribution of `logits` (n, vocab), rounded as Transformers does."""
    decoder = unwrapped(model).model.decoder
    weight = decoder.embed_tokens.weight
    probabilities = logits.to(weight.dtype).softmax(-1, dtype=torch.promote_types(weight.dtype, torch.float32))
    return probabilities.to(weight.dtype) @ weight * decoder.embed_tokens.embed_scale.to(weight.dtype)


def canvas_states(model: Any, clean: Tensor, canvas: Tensor, visible: Tensor | None) -> Tensor:
    """States (rows, canvas, hidden) of all canvases of a row in one pass.

    Args:
        clean: (rows, prompt + canvas) ids, padded on the left; each canvas sees the clean text before it.
        canvas: (rows, canvas) ids that the decoder reads, whole canvases of the model's length.
        visible: (rows, prompt + canvas), 1 at real tokens; None: all are.
    """
    size = unwrapped(model).config.canvas_length
    length = canvas.shape[1]
    if visible is None:
        visible = torch.ones_like(clean)
    context, _ = encode(model, clean[:, :-size], visible[:, :-size])
    prompt = visible[:, : clean.shape[1] - length].sum(1, keepdim=True)
    offsets = torch.arange(length, device=clean.device)
    starts = offsets // size * size
    return decode(model, canvas, prompt + offsets, prompt + starts, context)
