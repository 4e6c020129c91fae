"""The head: from hidden states and targets to log-probabilities, with the logits of few positions at a time; and the
search for the first module whose output is not finite.

Only the head reads the output of a decoder's last layer. So this layer needs the keys and values of all positions, but
queries, attention output and feed-forward only of the positions whose logits are needed (`select_state_positions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import MethodType
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from d1.models.distribution import MODEL_DISTRIBUTION, Distribution
from d1.models.kinds import is_encoder, kind_of, vocabulary
from d1.transformers_bridge import CACHE, attention_kernel, recomputes_activations, rotate_half

# Logits in memory at once, positions x vocabulary: 67 MB in fp32. Scores and losses use it on every device, so that old
# and new log-probabilities come from products of one shape; sampling multiplies it by `chunk_factor`.
CHUNK_ELEMENTS = 2**24
MAX_CHUNK_FACTOR = 16  # 1.1 GB in fp32
BYTES_PER_ELEMENT = 256  # of a card's memory per logit of a chunk: fp32 logits, their noise and copies take 16 at most

T = TypeVar("T")


@cache
def chunk_factor(device: torch.device) -> int:
    """How many times `CHUNK_ELEMENTS` logits sampling may hold at once on a device: 1 on a CPU, up to 16 on a GPU.

    It is a power of two, by the card's whole memory and not by what is free of it, so that a run can be repeated.
    """
    if device.type != "cuda":
        return 1
    fits = torch.cuda.get_device_properties(device).total_memory // (BYTES_PER_ELEMENT * CHUNK_ELEMENTS)
    return min(MAX_CHUNK_FACTOR, 2 ** max(0, fits.bit_length() - 1))


def can_narrow(model: Any) -> bool:
    """Whether `model` without its head takes `state_positions` (rows, n) and returns only the states at these."""
    return (
        not is_encoder(model.config)
        and attention_kernel(model.config) in ("sdpa", "eager")
        and not (model.training and recomputes_activations(model))
    )


class AllKeys:
    """The keys and values of all tokens, instead of a layer's cache."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


def select_state_positions(layer: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of a decoder's last layer: only `state_positions` (rows, n), if given, go through it."""
    positions = kwargs.pop("state_positions", None)
    if positions is None:
        return args, kwargs
    attention = layer.self_attn
    states = args[0]  # (rows, length, hidden)
    cos, sin = kwargs["position_embeddings"]  # (rows, length, rotary size)
    position_ids = kwargs.get("position_ids")
    past = kwargs.get(CACHE)
    mask = kwargs.get("attention_mask")  # (rows, 1, length, keys)

    # The layer would compute keys for the chosen positions only: they are made here for all, as its attention does.
    normed = layer.input_layernorm(states)
    keys = attention.k_proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    values = attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    # (rows, heads, length, head size); rotary positions may cover only a part of each head
    turned, plain = keys.tensor_split([cos.shape[-1]], dim=-1)
    turned = turned * cos.unsqueeze(1) + rotate_half(turned) * sin.unsqueeze(1)
    keys = torch.cat([turned, plain], -1) if plain.shape[-1] else turned
    if past is not None:
        keys, values = past.update(keys, values, attention.layer_idx)

    # The layer itself then runs on the chosen positions, and takes the keys of all from what it believes is a cache.
    index = positions.unsqueeze(-1)
    chosen_states = torch.take_along_dim(states, index, 1)
    kwargs[CACHE] = AllKeys(keys, values)
    kwargs["position_embeddings"] = (torch.take_along_dim(cos, index, 1), torch.take_along_dim(sin, index, 1))
    kwargs["position_ids"] = None if position_ids is None else torch.take_along_dim(position_ids, positions, 1)
    kwargs["attention_mask"] = None if mask is None else torch.take_along_dim(mask, index.unsqueeze(1), 2)
    if "texts" in kwargs:
        kwargs["texts"] = kwargs["texts"].at(positions)
    return (chosen_states, *args[1:]), kwargs


def unwrapped(model: Any) -> Any:
    """The model without a `PeftModel` around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def backbone_and_head(model: Any) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """The two parts of a prepared model, for work without the logits of all positions at once.

    Returns:
        `backbone(input_ids, attention_mask, positions)` -> last hidden states, aligned to the token they score:
        (rows, length, hidden), or (rows, n, hidden) at each row's own `positions` (rows, n); most decoders then run
        their last layer only at these.
        `head(states)` -> logits (..., vocab). `head(backbone(...))` equals `model(...).logits` for every kind.
    """
    inner = unwrapped(model)
    kind = kind_of(inner.config)
    cap = getattr(inner.config, "final_logit_softcapping", None)

    def backbone(
        input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if kind.uniform_noise:
            raise ValueError(f"{inner.config.model_type} has no pass over a whole text: use d1.models.diffusion_gemma")
        narrowed = positions is not None and can_narrow(inner)
        if narrowed:
            kwargs["state_positions"] = positions
        states = inner.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        if positions is None or narrowed:
            return states
        return states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.shape[-1]))

    def head(states: Tensor) -> Tensor:
        for name in kind.head:
            states = getattr(inner, name)(states)
        if kind.uniform_noise and states.dtype != torch.float64:
            states = states.float()  # Transformers caps these logits in fp32
        if cap is None:
            return states
        return torch.tanh(states / cap) * cap

    return backbone, head


def token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    """log softmax(logits)[ids]: (..., vocab) and (...) -> (...)."""
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def token_entropies(logits: Tensor) -> Tensor:
    """Entropy in nats of each position's distribution: (..., vocab) -> (...)."""
    logps = logits.log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def most_likely(logits: Tensor, excluded: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely id except `excluded` (in a tie, the first), its log-probability among all ids, and the entropy,
    in nats, of the distribution of all ids: (...) each. `logits`, (..., vocab) fp32, is overwritten."""
    other = logits[..., excluded].clone()
    logits[..., excluded] = -torch.inf
    top, ids = logits.max(-1)
    # PyTorch's exp2 is vectorised on every processor, its exp only on some.
    powers = logits.sub_(top.unsqueeze(-1)).mul_(1 / math.log(2))
    weights = powers.exp2()
    total = weights.sum(-1)
    powers[..., excluded] = 0  # its weight is 0, and 0 x infinity would be NaN
    mean = powers.mul_(weights).sum(-1) / total * math.log(2)
    other = other - top
    logps = -torch.logaddexp(total.log(), other)
    # H = -sum p log p. For all but `excluded`, log p is a log weight plus logps; `mean` is the mean of log weights.
    return ids, logps, torch.special.entr((other + logps).exp()) - (total.log() + logps).exp() * (mean + logps)


def target_logps(
    model: Any,
    states: Tensor,
    targets: Tensor,
    *,
    with_entropies: bool = False,
    distribution: Distribution = MODEL_DISTRIBUTION,
    temperatures: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `targets`, with the logits of at most one chunk of positions in memory at once.

    All chunks but the last are recomputed in the backward pass, which begins with the last and frees it first.

    Args:
        states: (n, hidden), aligned last hidden states.
        targets: (n,) ids.
        with_entropies: also the entropies of the model's own distributions, without gradients.
        distribution: the distribution whose log-probabilities are returned.
        temperatures: (n,) that the logits are divided by first; None: 1.

    Returns:
        (n,) each, in nats, fp32 (fp64 for a model in fp64); None for entropies that were not asked for.
    """
    head = backbone_and_head(model)[1]

    def chunk(states: Tensor, targets: Tensor, divide_by: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = head(states)
        if logits.dtype != torch.float64:
            logits = logits.float()
        divided = logits if divide_by is None else logits / divide_by.unsqueeze(-1)
        logps = token_logps(distribution.logits(divided, targets), targets)
        if not with_entropies:
            return logps, None
        # Entropies come last: the recomputation stops when it has what the gradient needs, and so leaves them out.
        with torch.no_grad():
            return logps, token_entropies(logits)

    if temperatures is None:
        results: list[Any] = map_chunks(model, chunk, states, targets)
    else:
        results = map_chunks(model, chunk, states, targets, temperatures)
    logps = torch.cat([logps for logps, _ in results])
    if not with_entropies:
        return logps, None
    return logps, torch.cat([entropies for _, entropies in results])


def map_chunks(model: Any, compute: Callable[..., T], *columns: Tensor, tensors_per_logit: int = 1) -> list[T]:
    """Run `compute`, which calls the head, for one chunk of positions after the other.

    All chunks but the last are recomputed in the backward pass, which begins with the last and frees it first.

    Args:
        columns: (n, ...) each, split alike.
        tensors_per_logit: how many numbers `compute` holds at once for each logit.
    """
    count = len(columns[0])
    at_once = max(1, CHUNK_ELEMENTS // tensors_per_logit // vocabulary(model.config))
    chunks = calls_in_step(model, -(-count // at_once))
    cut = max(0, count - at_once)

    results = []
    if chunks > 1:
        run: Any = compute
        if torch.is_grad_enabled():
            run = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
        parts = [values[:cut].tensor_split(chunks - 1) for values in columns]
        for chunk in zip(*parts, strict=True):
            results.append(run(*chunk))
        columns = tuple(values[cut:] for values in columns)
    results.append(compute(*columns))
    return results


def runs_in_step(model: Any) -> bool:
    """Whether each process holds a part of the weights (ZeRO-3, FSDP2), so that a forward pass waits for the others."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    has_zero3 = any(hasattr(parameter, "ds_id") for parameter in model.get_output_embeddings().parameters())
    return has_zero3 or any(hasattr(module, "set_reshard_after_forward") for module in model.modules())  # FSDP2's


def calls_in_step(model: Any, calls: int) -> int:
    """The number of calls to make to a part of the model, at least one: under ZeRO-3 and FSDP2, the maximum over
    processes."""
    if not runs_in_step(model):
        return max(1, calls)
    max_calls = torch.tensor(max(1, calls), device=model.device)
    torch.distributed.all_reduce(max_calls, torch.distributed.ReduceOp.MAX)
    return int(max_calls)


def accept_run_argument(model: Any) -> None:
    """Make `model(run=compute)` return `compute(model)`: see `run_inside`."""

    def forward(self: Any, *args: Any, run: Callable[[Any], Any] | None = None, **kwargs: Any) -> Any:
        if run is not None:
            return run(self)
        return type(self).forward(self, *args, **kwargs)

    model.forward = MethodType(forward, model)  # a bound method: a copy of the model gets one bound to itself


def run_inside(wrapped: Any, compute: Callable[[Any], T]) -> T:
    """Run `compute(model)` within the forward pass of `wrapped`, which wraps a prepared model.

    DDP, FSDP and DeepSpeed prepare weights and gradients there, so training must call the model through them.
    """
    return wrapped(run=compute)


NEW_COPY = "the model is damaged: download, convert or train it again"


class NotFiniteError(FloatingPointError):
    """A row whose log-probabilities are not finite.

    Attributes:
        number: of the row, in its batch or its stream.
        why: what was found, and what to do.
    """

    def __init__(self, number: int, why: str, name: str | None = None) -> None:
        super().__init__(f"{name or f'row {number}'}: the model's logits are not finite: {why}")
        self.number = number
        self.why = why

    def named(self, name: str) -> NotFiniteError:
        """The same error under another name of the row."""
        return NotFiniteError(self.number, self.why, name)


@torch.no_grad()
def why_not_finite(model: Any, texts: Iterable[Tensor]) -> str:
    """The first module, in the order of execution, whose output is not finite, and what to do about it.

    Nothing of this runs for a healthy model: a sampler sees in its log-probabilities that something is wrong. -inf for
    a forbidden token counts as wrong, too, because it makes an entropy NaN; no supported kind of model has it.

    Args:
        texts: (length,) ids each, without padding: states of the row, which run again until one shows the fault.
    """
    if any(hasattr(weight, "ds_id") or hasattr(weight, "to_local") for weight in model.parameters()):
        return "which layer is at fault is unknown, because each process holds only a part of the weights"
    for text in texts:
        fault = find_fault(model, text)
        if fault is not None:
            name, module = fault
            return describe_fault(model, name, module)
    return "another run of the row gave finite numbers: check the machine's memory"


def find_fault(model: Any, text: Tensor) -> tuple[str, nn.Module] | None:
    """The first module, by name, whose output for a `text` (length,) is not finite."""
    faults: list[tuple[str, nn.Module]] = []
    names = {module: name for name, module in model.named_modules()}

    def check_output(module: nn.Module, args: Any, output: Any) -> None:
        if faults:
            return
        for part in tree_leaves(output):
            if isinstance(part, Tensor) and part.is_floating_point() and not part.isfinite().all():
                faults.append((names[module], module))
                return

    hooks = [module.register_forward_hook(check_output) for module in names]
    backbone, run_head = backbone_and_head(model)
    try:
        states = backbone(text.unsqueeze(0))[0]
        for chunk in states.split(max(1, CHUNK_ELEMENTS // vocabulary(model.config))):
            logits = run_head(chunk)
            if faults:
                return faults[0]
            if not logits.isfinite().all():
                return "the head", model
    finally:
        for hook in hooks:
            hook.remove()
    return None


def describe_fault(model: Any, name: str, module: nn.Module) -> str:
    """What is wrong with the module `name`, on one line."""
    first = f"the first non-finite output comes from {name}"
    for weight_name, weight in module.named_parameters():
        if not weight.is_floating_point():
            continue
        count = int((~weight.isfinite()).sum())
        if count:
            values = "value" if count == 1 else "values"
            return f"{first}, whose {weight_name} has {count} non-finite {values} out of {weight.numel()}: {NEW_COPY}"
    if model.dtype == torch.float16:
        return f"{first}, whose weights are finite: float16 overflows there, so load the model in bfloat16 or float32"
    return f"{first}, whose weights are finite: numbers before it are too large for {model.dtype}, so {NEW_COPY}"
