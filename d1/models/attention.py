"""Which token sees which, and the position of each token: only this module makes masks and position ids.

A token's *position* is its number among the real tokens of its text, from 0. An `Attention` says, by positions, which
tokens see each other; the masks of padded batches, packed rows and two streams follow from it. The hooks at the end
give positions and masks to the backbone of a model (its `base_model`, without the head), and align its states.

`visible` (rows, keys) is 1 at every token that may be seen, 0 at padding. A mask "over queries" is (rows, 1, queries,
keys), bool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from d1.models.kinds import attention_name, block_size, is_encoder, kind_of, windowed
from d1.transformers_bridge import attention_kernel

KERNELS = ("sdpa", "eager")  # kernels that take a mask over queries


class Blocks(NamedTuple):
    """Where the blocks of a batch's texts lie."""

    size: int
    origin: Tensor | int = 0  # (rows, 1), a position where a block begins; an int: the same in all rows

    def numbers(self, position: Tensor) -> Tensor:
        """The number of the block of each `position` (rows, tokens); below 0 before `origin`."""
        return (position - self.origin) // self.size


@dataclass(frozen=True)
class Attention:
    """An attention pattern. The config of a model says which one it has (`d1.models.kinds.attention_name`).

    If the config has a `block_size`, texts are finished block by block, and no token may see a block after its own: the
    exact cache of finished blocks, the two streams of training and the samplers rely on this.

    `sees(config, query, key)` gets positions that broadcast and says whether the token at `query` sees the token at
    `key`; each token sees itself. None: all tokens see each other.
    """

    sees: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    fields: tuple[str, ...] = ()  # the fields of the config that `sees` reads; each must be a positive whole number
    caches: tuple[str, ...] | None = ()  # names of the approximate caches that are valid with it; None: all of them
    # The clean text is read from left to right: the state of a token predicts the next one. Blocks begin at the end of
    # the prompt and may have any length; the noised tokens of a block all see each other, whatever `sees` says.
    causal_context: bool = False

    def mask(
        self,
        config: Any,
        visible: Tensor,
        noised: int,
        queries: int,
        blocks: Blocks | None = None,
        opened: Tensor | None = None,
    ) -> Tensor:
        """The mask (rows, 1, queries, keys), true where a query sees a key.

        The keys are the tokens `visible`, followed by copies of the last `noised` of them; the queries are the last
        `queries` of these keys.

        Padding among the queries sees what a token at its position sees. A copy sees the copies of its own block and
        the clean tokens of earlier blocks; no clean token sees a copy (BD3-LM, arXiv 2503.09573, section 3.2).

        Args:
            blocks: None: the model's, counted from the start of each text.
            opened: with a causal context, (rows, length) bool, the tokens of the block that is being filled: they see
                what copies do, and have no clean tokens. There are then no copies.
        """
        # Of all keys, (rows, keys): the tokens, then their copies
        real = with_copies(visible.bool(), noised)
        position = with_copies(count_positions(visible), noised)
        key_count = position.shape[1]
        first = key_count - queries

        # (rows, queries, keys)
        query_position = position[:, first:, None]
        key_position = position[:, None]
        seen = real[:, None].expand(-1, queries, -1)
        clean = seen
        if self.sees is not None:
            clean = seen & self.sees(config, query_position, key_position)
        size = block_size(config)
        if size is None:
            return clean.unsqueeze(1)

        # `sees` hides later blocks. In its own block, a copy sees the other copies, not the clean tokens.
        key = torch.arange(key_count, device=visible.device)
        if opened is None:
            copied = (key >= visible.shape[1]).unsqueeze(0)
            block = (blocks or Blocks(size)).numbers(position)
        else:
            copied = opened
            block = opened.long()
        in_own_block = copied[:, first:, None] & (block[:, first:, None] == block[:, None])
        copies = (seen if self.causal_context else clean) & in_own_block
        seen = torch.where(copied[:, None], copies, clean & ~in_own_block)

        # If padding saw nothing, attention would divide by zero.
        is_self = key[first:, None] == key
        return (seen | copied[:, first:, None] & is_self).unsqueeze(1)

    def kernel_mask(
        self,
        backbone: PreTrainedModel,
        visible: Tensor,
        noised: int,
        queries: int,
        blocks: Blocks | None = None,
        opened: Tensor | None = None,
    ) -> Tensor:
        """The same mask in the form that the kernel of `backbone` takes."""
        mask = self.mask(backbone.config, visible, noised, queries, blocks=blocks, opened=opened)
        return for_kernel(attention_kernel(backbone.config), mask, backbone)


def for_kernel(kernel: str | None, mask: Tensor, backbone: PreTrainedModel) -> Tensor:
    """A mask, true where a query sees a key, in the form that a kernel of `KERNELS` takes."""
    if kernel == "sdpa":
        return mask
    # Eager attention adds the mask to the scores.
    return torch.zeros_like(mask, dtype=backbone.dtype).masked_fill(~mask, torch.finfo(backbone.dtype).min)


def same_or_earlier_block(config: Any, query: Tensor, key: Tensor) -> Tensor:
    """A token sees its own block and those before it, of `block_size` tokens (BD3-LM, arXiv 2503.09573, section 3)."""
    return key // config.block_size <= query // config.block_size


def same_or_earlier_token(config: Any, query: Tensor, key: Tensor) -> Tensor:
    """A token sees itself and those before it."""
    return key <= query


CAUSAL_CONTEXT = "causal-context"  # the name of the entry that `d1 a2d --causal_context` chooses
ATTENTION: dict[str, Attention] = {
    "full": Attention(caches=None),
    "block-causal": Attention(same_or_earlier_block, fields=("block_size",)),
    # Nemotron-Labs-Diffusion's (NVIDIA; `block_diff_mask` of its released code)
    CAUSAL_CONTEXT: Attention(same_or_earlier_token, fields=("block_size",), causal_context=True),
    "canvas": Attention(same_or_earlier_token, caches=()),  # of the text; `diffusion_gemma.py` makes its masks
}


def attention_of(config: Any) -> Attention:
    """The entry of `ATTENTION` of a model with this config."""
    name = attention_name(config)
    if name not in ATTENTION:
        raise ValueError(
            f"{config.name_or_path or config.model_type}: unknown attention {name!r}: known are "
            f"{', '.join(ATTENTION)}, and what you add to d1.models.attention.ATTENTION before you load the model"
        )
    return ATTENTION[name]


def has_causal_context(config: Any) -> bool:
    """Whether a model of this config reads clean text from left to right (`Attention.causal_context`)."""
    return block_size(config) is not None and attention_of(config).causal_context


def refuse_causal_context(config: Any, what: str) -> None:
    """Raise ValueError if `what` is asked of a model with a causal context, for which it is not there."""
    if has_causal_context(config):
        raise ValueError(
            f"{what} is not there for models with a causal context, such as this {config.model_type}: SFT, RL, "
            "evaluation and the server are"
        )


def check_attention(config: Any, name: str) -> None:
    """Raise ValueError if the model cannot attend as its config asks; `name` is the model's name in the message."""
    attention = attention_of(config)
    if attention.sees is None:
        return
    label = attention_name(config)
    kernel = attention_kernel(config)
    for field in attention.fields:
        value = getattr(config, field, None)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {field} must be positive and whole, got {value!r}")
    if is_encoder(config) or windowed(config):
        raise ValueError(f"{name}: {label} attention needs a decoder without windows, not {config.model_type}")
    if kernel not in KERNELS:
        raise ValueError(f"{name}: {label} attention runs under {', '.join(KERNELS)}, not under {kernel}")


def check_rule(config: Any, name: str) -> None:
    """Raise ValueError if a model that finishes text block by block has an attention that sees later blocks."""
    sees = attention_of(config).sees
    size = block_size(config)
    if not size:
        return
    position = torch.arange(2 * size, device="cpu")
    if sees is None or sees(config, position[[0, size - 1], None], position[size:]).any():
        raise ValueError(
            f"{name}: {attention_name(config)} attention lets tokens see blocks after their own, so a model with "
            f"a block_size ({size}) cannot have it"
        )


def count_positions(mask: Tensor) -> Tensor:
    """Positions (rows, length) that count the real tokens of `mask` only."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def with_copies(values: Tensor, noised: int) -> Tensor:
    """The `values` (rows, length) of tokens, followed by those of the last `noised` again."""
    return torch.cat([values, values[:, values.shape[1] - noised :]], dim=1)


def position_ids(config: Any, positions: Tensor) -> Tensor:
    """The ids that the model's class has for `positions`."""
    if kind_of(config).positions_after_padding:
        return positions + config.pad_token_id + 1
    return positions


def left_pad(prompts: Sequence[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, (rows, prompt) each, padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = []
    mask = []
    for prompt in prompts:
        padding = longest - len(prompt)
        ids.append([pad_token_id] * padding + prompt)
        mask.append([0] * padding + [1] * len(prompt))
    return torch.tensor(ids), torch.tensor(mask)


def padding_mask(visible: Tensor) -> Tensor | None:
    """`visible`, or None if it hides nothing: then attention can use its fastest kernel. Waits for the device."""
    return None if visible.all() else visible


def takes_masks_over_queries(config: Any) -> bool:
    """Whether Transformers forwards a mask over queries unchanged, and so does not wait for the device."""
    if is_encoder(config) or windowed(config) or attention_of(config).sees is not None:
        return False
    return attention_kernel(config) == "sdpa"


def over_queries(visible: Tensor, queries: int) -> Tensor:
    """The mask (rows, 1, queries, keys) of queries that all see the keys `visible` (rows, keys)."""
    return visible.bool()[:, None, None].expand(-1, -1, queries, -1)


PREPARED = "d1_prepared"  # the attribute that `d1.models.prepare` sets


def require_prepared(model: Any) -> None:
    """Raise ValueError if a model was not prepared; sampling, scoring and training begin with this."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(inner, PREPARED, False):
        raise ValueError(
            f"this {type(inner).__name__} was not prepared for masked diffusion: its attention may be causal, and "
            "padding would shift its positions. Load it with d1.models.load_model(path), or call "
            "d1.models.prepare(model) on a model that you built"
        )


def input_tokens(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """One value (rows, length) per token in the arguments of a forward pass: its id, or the first of its embedding."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        return kwargs["inputs_embeds"][..., 0]  # type: ignore[no-any-return]
    return ids  # type: ignore[no-any-return]


def add_positions_and_mask(
    backbone: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the backbone: adds position ids and, if attention is not full, the mask over queries.

    With `noised=n`, the last n tokens are noised copies of the n before them; the mask is that of the clean tokens.
    `blocks` and `opened` are those of `Attention.mask`.
    """
    config = backbone.config
    check_attention(config, type(backbone).__name__)
    noised = kwargs.pop("noised", 0)
    blocks = kwargs.pop("blocks", None)
    opened = kwargs.pop("opened", None)
    visible = kwargs.get("attention_mask")
    if "texts" in kwargs or (visible is not None and len(visible.shape) != 2):  # a packed row, or the sampler's mask
        return args, kwargs

    tokens = input_tokens(args, kwargs)
    queries = tokens.shape[1]
    if visible is None:
        visible = torch.ones_like(tokens[:, noised:], dtype=torch.long)
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = position_ids(config, with_copies(count_positions(visible), noised))
    attention = attention_of(config)
    if attention.sees is None:
        return args, kwargs

    if attention.causal_context:
        before = before_in_context(config, visible, noised, queries, blocks=blocks, opened=opened)
    elif noised:
        before = before_in_two_streams(visible, noised, Blocks(config.block_size))
    else:
        before = real_before(visible, tokens)
    kwargs["token_before"] = before
    kwargs["attention_mask"] = attention.kernel_mask(backbone, visible, noised, queries, blocks=blocks, opened=opened)
    return args, kwargs


def before_in_two_streams(visible: Tensor, noised: int, blocks: Blocks | None) -> Tensor:
    """`real_before` (rows, keys + noised), with noised copies of the last keys: the token before the first noised one
    of a block is clean. Models without blocks have no copies."""
    before = real_before(visible, visible)
    if not noised or blocks is None:
        return before
    block = blocks.numbers(count_positions(visible))
    # The token before is read from the noised copy if it lies in the same block, else from the clean text.
    is_noised = (block.gather(1, before) == block) & (before >= visible.shape[1] - noised)  # in the copy
    return torch.cat([before, torch.where(is_noised, before + noised, before)[:, -noised:]], dim=1)


def before_in_context(
    config: Any,
    visible: Tensor,
    noised: int,
    queries: int,
    blocks: Blocks | None = None,
    opened: Tensor | None = None,
) -> Tensor:
    """For each token of a pass of a model with a causal context that predicts the next token, the index of the token
    whose state scores it, (rows, queries); the arguments are those of `Attention.mask`.

    The state of a clean token is its own in every model with a causal context: it predicts the token that follows. A
    noised token is scored by the token before it: the noised one of its own block or, for a block's first token, the
    clean one.
    """
    index = torch.arange(queries, device=visible.device).expand(len(visible), -1)
    if opened is not None:
        return torch.where(opened[:, -queries:], (index - 1).clamp(min=0), index)
    if not noised:
        return index
    length = visible.shape[1]
    copies = before_in_two_streams(visible, noised, blocks or Blocks(config.block_size))[:, length:]
    return torch.cat([index[:, :length], copies], dim=1)


def real_before(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """The index of the real token before each of `tokens` (rows, length, ...), for models that predict the next one.

    The first real token of a row gets its own index, as in Dream's published sampler. With a cache, the tokens of this
    pass are the last keys of the mask.
    """
    rows, length = tokens.shape[:2]
    index = torch.arange(length, device=tokens.device).expand(rows, length)
    last_real = index
    if mask is not None:
        last_real = torch.where(mask[:, -length:].bool(), index, -1).cummax(-1).values
    before = torch.cat([last_real.new_full((rows, 1), -1), last_real[:, :-1]], dim=1)
    return torch.where(before < 0, index, before)


def tokens_before(kwargs: dict[str, Any], tokens: Tensor) -> Tensor:
    """`real_before` of the `tokens`, which `add_positions_and_mask` or `place_packed` may have computed already."""
    before = kwargs.get("token_before")
    if before is not None:
        return before  # type: ignore[no-any-return]
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() > 2:  # over queries: each real token is seen, at least by itself
        if mask.dtype != torch.bool:
            mask = mask == 0
        mask = mask[:, 0].any(1)
    return real_before(mask, tokens)


def align_positions(backbone: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of a backbone that predicts the next token: takes the states of one real token earlier."""
    positions = kwargs.get("state_positions")
    if positions is not None:
        kwargs["state_positions"] = tokens_before(kwargs, kwargs["input_ids"]).gather(1, positions)
    return args, kwargs


def align_states(backbone: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a backbone that predicts the next token: state i becomes that of the real token before i."""
    if kwargs.get("state_positions") is None:
        states = output[0]
        before = tokens_before(kwargs, states)
        output.last_hidden_state = states.gather(1, before[..., None].expand_as(states))
    return output


def apply_logits_to_keep(backbone: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of an encoder's backbone: adds `logits_to_keep`, which Transformers has for decoders only."""
    kept = kwargs.get("logits_to_keep", 0)  # 0: all
    if not isinstance(kept, Tensor):
        kept = slice(-kept, None)
    output.last_hidden_state = output[0][:, kept]
    return output
