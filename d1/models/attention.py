"""Which token sees which, and where each one stands: the only maker of masks and positions.

Masks speak of keys. `visible` (rows, keys) is 1 at every token that may be seen, 0 at padding; a mask "over queries"
is (rows, 1, queries, keys), bool, and says it for each query on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import PreTrainedModel

from d1.models.kinds import attention_of, block_size, is_decoder, kind_of, windowed
from d1.transformers_bridge import attention_kernel

# The texts of a packed row, one behind the other: tokens of each, and how many noised copies of its last follow them.
Segments = Sequence[tuple[int, int]]


def count_positions(mask: Tensor) -> Tensor:
    """Position ids (rows, length) that count the real tokens of `mask` only."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def padding_mask(visible: Tensor) -> Tensor | None:
    """`visible`, or None where it hides nothing: then attention can take its fastest kernel. Waits for the device."""
    return None if visible.all() else visible


def takes_masks_over_queries(config: Any) -> bool:
    """Whether a model passes a mask over queries on as it is.

    Transformers asks the device in every forward pass whether a mask (rows, keys) hides anything. It asks nothing about
    a mask over queries, which decoders take under sdpa unless some of their layers have a window. Of block-causal
    attention the model makes that mask itself.
    """
    plain = is_decoder(config) and not windowed(config) and not block_size(config)
    return plain and attention_kernel(config) == "sdpa"


def over_queries(visible: Tensor, queries: int) -> Tensor:
    """The mask (rows, 1, queries, keys) of so many queries that all see the keys `visible` (rows, keys)."""
    return visible.bool()[:, None, None].expand(-1, -1, queries, -1)


def over_blocks(visible: Tensor, queries: int, size: int, noised: int = 0) -> Tensor:
    """The mask (rows, 1, queries, keys) of queries that see their own block and the blocks before it.

    A block is `size` real tokens, counted from the start of the sequence (BD3-LM, arXiv 2503.09573, section 3). The
    queries are the last of the keys `visible` (rows, keys); padding among them sees what its block does.

    Args:
        noised: a copy of so many last keys follows, in which a token sees its own block's copies and, of the blocks
            before it, the clean tokens; it is among the queries and makes keys `noised` longer (section 3.2).
    """
    rule, device = block_rule(visible, queries, size, noised), visible.device
    row, query, key = (torch.arange(n, device=device) for n in (len(visible), queries, visible.shape[1] + noised))
    return rule(row[:, None, None], query[:, None], key).unsqueeze(1)


def block_rule(visible: Tensor, queries: int, size: int, noised: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`over_blocks` as a function of the numbers of row, query and key, which is what flex attention computes with."""
    real, block = visible.bool(), count_positions(visible) // size
    if noised:
        real, block = (torch.cat([values, values[:, -noised:]], dim=1) for values in (real, block))
    places = torch.arange(real.shape[1], device=visible.device)
    copied = places >= visible.shape[1]
    own, copy, place = block[:, -queries:], copied[-queries:], places[-queries:]

    def sees(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        before = block[row, key] + copy[query] <= own[row, query]
        beside = copy[query] & (block[row, key] == own[row, query])
        itself = copy[query] & (place[query] == key)  # or padding might see nothing, and attention divide by zero
        return real[row, key] & torch.where(copied[key], beside, before) | itself

    return sees


def packed_rule(segments: Segments, size: int | None, device: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Which key a query sees in a packed row, by their numbers: of its own text alone all or, with a block size, what
    `over_blocks` lets it see."""
    counts = torch.tensor([length + noised for length, noised in segments], device=device)
    text = torch.arange(len(segments), device=device).repeat_interleave(counts)
    place = packed_positions(segments, device)
    block = torch.zeros_like(place) if size is None else place // size
    copied = torch.cat([torch.arange(length + noised) >= length for length, noised in segments]).to(device)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        before = block[key] + copied[query] <= block[query]
        beside = copied[query] & (block[key] == block[query])
        return (text[query] == text[key]) & torch.where(copied[key], beside, before)

    return sees


def packed_positions(segments: Segments, device: Any) -> Tensor:
    """(tokens,) places of a packed row's tokens in their own texts; a copy stands where its original does."""
    places = [torch.cat([torch.arange(n), torch.arange(n - noised, n)]) for n, noised in segments]
    return torch.cat(places).to(device)


def within_window(length: int, window: int, device: Any) -> Tensor:
    """The mask (1, 1, length, length) of tokens that see so many on either side, as Transformers' windows do."""
    place = torch.arange(length, device=device)
    return ((place[:, None] - place).abs() <= window)[None, None]


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask over queries as eager attention takes it: 0 at what is seen, to be added to the scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def seen_keys(mask: Tensor | None) -> Tensor | None:
    """(rows, keys) of a mask that may be over queries already: what some query sees, as each real token sees itself."""
    if mask is None or mask.dim() == 2:
        return mask
    return (mask if mask.dtype == torch.bool else mask == 0)[:, 0].any(1)


def fed_tokens(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Of a body's arguments, one value a token: (rows, length) ids, or of embeddings the first number."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return kwargs["inputs_embeds"][..., 0] if ids is None else ids


def place_tokens(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the body: position ids count real tokens only, so padding cannot move a row."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is not None or (mask is not None and mask.dim() != 2):
        return args, kwargs
    if mask is None:
        mask = torch.ones_like(fed_tokens(args, kwargs), dtype=torch.long)
    first = body.config.pad_token_id + 1 if kind_of(body.config).positions_after_padding else 0
    kwargs["position_ids"] = count_positions(mask) + first
    return args, kwargs


def before_in_two_streams(visible: Tensor, noised: int, size: int) -> Tensor:
    """The index (rows, keys + noised) of the real token before each one, with a noised copy of the last keys behind.

    Before a block's first noised token stands a clean one, as when blocks are sampled one after the other.
    """
    before, block = real_before(visible, visible), count_positions(visible) // size
    beside = (block.gather(1, before) == block) & (before >= visible.shape[1] - noised)  # where the copy holds it
    return torch.cat([before, torch.where(beside, before + noised, before)[:, -noised:]], dim=1)


def see_blocks(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the body of a block-causal model: as `place_tokens`, and each token sees up to its block's
    end. A mask over queries is taken as it is.

    With `noised=n` the last n of the tokens fed are a noised copy of the n before them, and the mask is that of the
    clean tokens alone (`over_blocks`).
    """
    check_blocks(body.config, type(body).__name__)
    if "texts" in kwargs:  # of a packed row, which has all it needs
        return args, kwargs
    noised, size, kernel = kwargs.pop("noised", 0), body.config.block_size, attention_kernel(body.config)
    mask, tokens = kwargs.get("attention_mask"), fed_tokens(args, kwargs)
    if mask is not None and len(mask.shape) != 2:
        return place_tokens(body, args, kwargs)
    queries = tokens.shape[1]
    visible = mask if mask is not None else torch.ones_like(tokens[:, noised:], dtype=torch.long)
    if noised:
        positions = count_positions(visible)
        kwargs["position_ids"] = torch.cat([positions, positions[:, -noised:]], dim=1)
        kwargs["token_before"] = before_in_two_streams(visible, noised, size)
    else:
        args, kwargs = place_tokens(body, args, kwargs)
        kwargs["token_before"] = real_before(visible, tokens)
    if kernel == "flex_attention":
        rule, shape = (
            block_rule(visible, queries, size, noised),
            (len(visible), None, queries, visible.shape[1] + noised),
        )
        kwargs["attention_mask"] = create_block_mask(lambda b, h, q, k: rule(b, q, k), *shape, device=visible.device)
        return args, kwargs
    mask = over_blocks(visible, queries, size, noised)
    kwargs["attention_mask"] = mask if kernel == "sdpa" else added(mask, body.dtype)
    return args, kwargs


def check_blocks(config: Any, name: str) -> None:
    """Raises ValueError for a config whose model cannot attend block-causally; `name` says which model it is."""
    size, kernel = config.block_size, attention_kernel(config)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name}: block_size must be positive and whole, got {size!r}")
    if not is_decoder(config) or windowed(config):
        raise ValueError(f"{name}: block-causal attention needs a decoder without windows, not {config.model_type}")
    if kernel not in ("sdpa", "eager", "flex_attention"):
        raise ValueError(
            f"{name}: block-causal attention runs under sdpa, eager and flex_attention, not under {kernel}"
        )


# `Kind.attention` -> forward pre-hook of the body, which makes masks and positions from the mask it is given: of keys
# (rows, keys), None where all are seen, or already over queries, with position ids, where the sampler has made both.
ATTENTION = {"full": place_tokens, "block-causal": see_blocks}


def real_before(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """The index of the real token before each of `tokens` (rows, length, ...), for models that predict the next one.

    A row's first real token has none before it and takes its own place, as in Dream's published sampler. With a cache
    the mask covers it too: the tokens of this pass are its last columns.
    """
    rows, length = tokens.shape[:2]
    index = torch.arange(length, device=tokens.device).expand(rows, length)
    seen = index if mask is None else torch.where(mask[:, -length:].bool(), index, -1).cummax(-1).values
    before = torch.cat([seen.new_full((rows, 1), -1), seen[:, :-1]], dim=1)
    return torch.where(before < 0, index, before)


def tokens_before(kwargs: dict[str, Any], tokens: Tensor) -> Tensor:
    """`real_before` of a body's `tokens`, which `see_blocks` has found already where they are two streams."""
    known = kwargs.get("token_before")
    return real_before(seen_keys(kwargs.get("attention_mask")), tokens) if known is None else known


def align_positions(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of a body that predicts the next token: states are asked for one real token earlier."""
    positions = kwargs.get("state_positions")
    if positions is not None:
        kwargs["state_positions"] = tokens_before(kwargs, kwargs["input_ids"]).gather(1, positions)
    return args, kwargs


def align_states(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a body that predicts the next token: state i becomes that of the real token before i."""
    if kwargs.get("state_positions") is None:
        states = output[0]
        before = tokens_before(kwargs, states)
        output.last_hidden_state = states.gather(1, before[..., None].expand_as(states))
    return output


def keep_states(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of an encoder's body: `logits_to_keep`, which Transformers gives to decoders only."""
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor):
        output.last_hidden_state = output[0][:, keep]
    elif keep:
        output.last_hidden_state = output[0][:, -keep:]
    return output


PREPARED = "d1_prepared"  # the attribute in which `d1.models.prepare` leaves the name of a model's attention


def require_prepared(model: Any) -> None:
    """Called where sampling, scoring and training begin.

    Raises:
        ValueError: the model was not prepared for this library, or not for the attention its config asks for, with how
            to prepare it.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(inner, PREPARED, False):
        raise ValueError(
            f"this {type(inner).__name__} was not prepared for masked diffusion: its attention may be causal, and "
            "padding would move its tokens. Load it with d1.models.load_model(path), or call "
            "d1.models.prepare(model) on one that you built"
        )
    if block_size(inner.config) and getattr(inner, PREPARED) != attention_of(inner.config):
        raise ValueError(
            f"this {type(inner).__name__} has blocks of {inner.config.block_size} tokens, but was prepared without "
            "block-causal attention: load it with d1.models.load_model(path), without trust_remote_code"
        )
