"""How much GPU memory a stage needs, from a model's config alone, and the largest batch that fits a card.

Weights, gradients and optimizer states are counted. For activations and logits, models of two and three layers run one
step at three batch sizes, on fake tensors, which have shapes but no data: the peak of live storages grows linearly with
layers and rows. Logits of sampling grow with the rows up to one chunk, so they are added at the rows of the batch. Not
included: fragmentation, and communication beyond DeepSpeed's buckets.
"""

from __future__ import annotations

import copy
import math
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig

from d1.models.adapters import lora_targets, skip_input_casts
from d1.models.attention import has_causal_context
from d1.models.diffusion_gemma import Context, canvas_states, decode, encode
from d1.models.head import CHUNK_ELEMENTS, MAX_CHUNK_FACTOR, backbone_and_head, target_logps, unwrapped
from d1.models.kinds import block_size, experts, has_masks, vocabulary
from d1.models.memory import meta_model
from d1.models.merged import copied_bytes
from d1.models.packing import two_stream_states
from d1.sampling import predict, uniform
from d1.sampling.settings import SamplingSettings
from d1.transformers_bridge import CACHE

GB = 10**9
CARDS = (24, 40, 48, 80, 141)  # RTX 4090, A100, L40S, H100, H200; GB
RESERVED = 1.2 * GB  # CUDA context, kernels and libraries
SAMPLING_ELEMENTS = CHUNK_ELEMENTS // 2 * MAX_CHUNK_FACTOR  # logits at once in sampling on a card of 80 GB or more
MAX_ROWS = 10**7  # of the search for the largest batch
ROWS = 32  # rows of a fake step, enough for activations to determine its peak with any vocabulary
BUCKET = 5 * 10**8  # elements of DeepSpeed's default reduction bucket
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, a byte per block of 64, an fp32 per 256 blocks (QLoRA, section 3)


@dataclass(frozen=True)
class FitSettings:
    """The settings of one stage that determine its memory."""

    stage: str  # "sft", "rl", "prefer" or "eval"
    batch: int = 1  # rows per GPU
    length: int = 4096  # tokens of a row, prompt and completion
    block_length: int = 32
    gpus: int = 1
    zero: int = 0  # DeepSpeed's ZeRO stage, 0 to 3; 0 is plain DDP
    dtype: str = "bfloat16"
    lora_r: int = 128  # 0: all weights are trained
    lora_targets: str | Sequence[str] = "attention"
    load_in_4bit: bool = False
    gradient_checkpointing: bool = False
    beta: float = 0.04
    # RL, prefer:
    views: int = 1  # views per row and update
    views_at_once: int = 1  # views per row and forward pass
    canvas: int = 256  # tokens of the completion, part of `length`
    stored: int = 0  # bytes kept per row of `batch`, from its views to its last update
    merged_rollouts: bool = False  # rollouts sample from a copy of the weights with the adapter merged

    @property
    def weight_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


class LiveStorages(TorchDispatchMode):
    """Count the bytes of storages that were made and not yet freed: `live` is the current, `peak` the largest count."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The inputs of an operation existed before, or are already counted: a view of a weight is no new storage.
        self.known.update(t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.release, storage.nbytes())
        return out

    def release(self, size: int) -> None:
        self.live -= size


class FakeStep(NamedTuple):
    """Bytes of one step beyond weights, gradients and optimizer states. In training only `peak` is known."""

    peak: int
    backbone: int = 0  # peak of the backbone
    held: int = 0  # after the backbone: its states, and the cache of a model with blocks
    logits: int = 0  # what the predictions add to `held`, at their peak


class Moment(NamedTuple):
    """Bytes at one moment of a step, by the number of rows: `constant` + `per_row` x rows + logits. `logits` are (rows,
    bytes), in the order of rows: between two of them bytes grow linearly, and after the last not at all."""

    constant: float
    per_row: float
    logits: tuple[tuple[int, int], ...] = ((0, 0),)

    def bytes_at(self, rows: int) -> float:
        counts, sizes = zip(*self.logits, strict=True)
        return self.constant + self.per_row * rows + float(np.interp(rows, counts, sizes))


class Grouped(torch.autograd.Function):
    """Makes the same tensors as `grouped_mm` of tokens (n, width) and experts (experts, width, out), on fake tensors of
    any dtype; that of torch 2.13 takes fake tensors of one dtype only."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weights)
        return tokens.new_empty(len(tokens), weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needed else None for tensor, needed in pairs)


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A copy of `config` with `layers` layers; the pattern of layer types is repeated from its beginning."""
    config = copy.deepcopy(config)
    if not has_masks(config):
        # A later layer is as large as the one with the same place in the period, which is what `depths` returns.
        text, period = config.text_config, depths(config)[0]
        fields = text.to_dict() | {"num_hidden_layers": layers}
        fields["layer_types"] = [text.layer_types[layer % period] for layer in range(layers)]
        fields["per_layer_config"] = {
            layer: fields["per_layer_config"][str(layer % period)]
            for layer in range(layers)
            if str(layer % period) in fields["per_layer_config"]
        }
        config.text_config = type(text).from_dict(fields)
        return config
    if types := getattr(config, "layer_types", None):
        config.layer_types = [types[layer % len(types)] for layer in range(layers)]
    config.num_hidden_layers = layers
    return config


def depths(config: PreTrainedConfig) -> tuple[int, int]:
    """Two numbers of layers, between whose models memory grows by that of the layers of `config` on average."""
    if has_masks(config):
        return 2, 3
    period = config.text_config.layer_types.index("full_attention") + 1  # its layers differ in size
    return period, 2 * period


def build(config: PreTrainedConfig, settings: FitSettings) -> Any:
    """The model of a stage on the meta device, with its adapter."""
    training = settings.stage != "eval"
    full = training and settings.lora_r == 0
    dtype = torch.float32 if full and settings.zero == 0 else settings.weight_dtype
    model = meta_model(config, dtype)
    if settings.load_in_4bit and settings.stage in ("sft", "prefer"):  # PEFT's `prepare_model_for_kbit_training`
        in_4bit = {id(layer.weight) for layer in quantised(model)}
        for parameter in model.parameters():
            if id(parameter) not in in_4bit:
                parameter.data = parameter.data.float()
    if training and settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if training and not full:
        targets = lora_targets(model, settings.lora_targets)
        model = get_peft_model(model, LoraConfig(r=settings.lora_r, target_modules=targets), low_cpu_mem_usage=True)
        if settings.gradient_checkpointing:
            model.enable_input_require_grads()
        if settings.load_in_4bit and settings.stage == "rl" and settings.zero:  # TRL casts the adapter
            model.to(dtype)
    return model.train(training)


def quantised(model: Any) -> list[torch.nn.Linear]:
    """The layers whose weights bitsandbytes stores in 4 bits: not the embeddings, the head and the adapter."""
    inside = (m for n, m in model.named_modules() if (".layers." in n or ".layer." in n) and "lora_" not in n)
    return [module for module in inside if isinstance(module, torch.nn.Linear)]


def fake_step(config: PreTrainedConfig, settings: FitSettings, layers: int, rows: int) -> FakeStep:
    """One step on fake tensors.

    For a block-causal model, evaluation has its largest cache, where the prompt leaves room for one block, and training
    has a second, noised stream: the canvas in RL, the row in SFT.
    """
    training, size = settings.stage != "eval", block_size(config)
    mixed = training and settings.dtype != "float32"
    model = build(with_layers(config, layers), settings)
    grouped = patch(
        "torch.nn.functional.grouped_mm", lambda tokens, weights, **_: Grouped.apply(tokens, weights), create=True
    )
    large_card = patch("d1.models.head.chunk_factor", lambda device: MAX_CHUNK_FACTOR)
    with FakeTensorMode(), grouped, large_card:
        # On meta tensors attention would take another kernel than on fake tensors of a CPU.
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        inner = unwrapped(model)
        inner.tie_weights()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        ids = torch.zeros(rows, settings.length, dtype=torch.long)
        # The mask of a batch with padding: attention falls back to kernels that take a mask.
        mask = torch.ones(rows, 1, settings.length, settings.length, dtype=torch.bool)
        backbone, _ = backbone_and_head(model)
        precision = torch.autocast("cpu", settings.weight_dtype, enabled=mixed)
        skip_input_casts(model)
        with LiveStorages() as storages, precision, torch.set_grad_enabled(training):
            cache: Any = None  # what later passes of a rollout read stays in memory while tokens are drawn
            if not has_masks(config):
                states, cache = canvas_step(model, ids, settings)
            elif size and training:
                noised = ids[:, -((settings.length if settings.stage == "sft" else settings.canvas) + size - 1) :]
                clean_positions = None
                if settings.stage == "sft" and has_causal_context(config):  # the clean text is trained, too
                    clean_positions = torch.arange(settings.length).expand(rows, -1)
                visible = torch.ones_like(ids)  # masks over queries are made from it
                states = two_stream_states(model, ids, noised, visible, clean_at=clean_positions)
            elif size:
                cache = DynamicCache()
                states = backbone(ids, mask, **{CACHE: cache})
            else:
                states = backbone(ids, mask)
            if training:
                flat = states.flatten(0, 1)
                chunk = max(1, CHUNK_ELEMENTS // vocabulary(config))
                logps, _ = target_logps(model, flat[:chunk], torch.zeros(len(flat[:chunk]), dtype=torch.long))
                (flat[chunk:].float().sum() - logps.mean()).backward()
                return FakeStep(storages.peak)
            backbone_peak, held = storages.peak, storages.live
            storages.peak = held
            predict_tokens(model, states, settings)
            logits = storages.peak - held
        return FakeStep(max(backbone_peak, held + logits), backbone_peak, held, logits)


def drawn_positions(config: PreTrainedConfig, settings: FitSettings) -> int:
    """The positions of a row that a pass of a rollout predicts: a canvas, or a block, which samplers choose for a
    model with blocks as the model's own."""
    if not has_masks(config):
        return int(config.canvas_length)
    block = block_size(config)
    if not block or has_causal_context(config):
        block = settings.block_length
    return min(block, settings.length)


def predict_tokens(model: Any, states: torch.Tensor, settings: FitSettings) -> None:
    """Draw the tokens of a pass from `states` (rows, tokens, hidden) as the samplers do: of the last block, or of a
    canvas. A greedy choice takes two thirds of these bytes."""
    if not has_masks(model.config):
        uniform.predict(model, states, 1.0, torch.zeros(states.shape[:2], dtype=torch.float64), soft=True)
        return
    rows, positions = len(states), drawn_positions(model.config, settings)
    states = states[None, :, -positions:]
    drawing = SamplingSettings(positions, positions, positions, temperature=1.0)
    predict.predict(model, states, [positions] * rows, drawing, 0, None, torch.float32)


def canvas_step(model: Any, ids: torch.Tensor, settings: FitSettings) -> tuple[torch.Tensor, Context | None]:
    """The states of a step of a model with uniform noise: in SFT of the text and a canvas, in RL of all canvases, in
    evaluation of the last canvas. In evaluation also the context that the next passes read."""
    size = model.config.canvas_length
    if settings.stage == "rl":
        return canvas_states(model, ids, ids[:, -settings.canvas :], torch.ones_like(ids)), None
    text_ids, start = ids, 0
    if settings.stage != "sft":
        text_ids, start = ids[:, :-size], settings.length - size
    context, states = encode(model, text_ids, torch.ones_like(text_ids))
    if settings.stage == "eval":
        context.forget(model.config)
    positions = start + torch.arange(size).expand(len(ids), -1)
    canvas = decode(model, ids[:, :size], positions, positions[:, :1].expand(-1, size), context)
    if settings.stage == "sft":
        return torch.cat([states, canvas], dim=1), None
    return canvas, context


def full_step(config: PreTrainedConfig, settings: FitSettings, rows: int) -> FakeStep:
    """A step of all layers, extrapolated from two shallow models."""
    shallow, deep = depths(config)
    low = fake_step(config, settings, shallow, rows)
    high = fake_step(config, settings, deep, rows)
    more = config.num_hidden_layers - shallow
    sizes = [few + (many - few) * more // (deep - shallow) for few, many in zip(low, high, strict=True)]
    return FakeStep(*sizes)


def fit_line(sizes: dict[int, int]) -> tuple[float, float]:
    """Bytes as (constant, per row), from those at a batch, `ROWS` and 2 x `ROWS` rows.

    The slope is taken at many rows: with few, the gradient of the embeddings can exceed the activations of the layers.
    The constant covers both the batch and a large one.
    """
    per_row = (sizes[2 * ROWS] - sizes[ROWS]) / ROWS
    return max(size - per_row * rows for rows, size in sizes.items() if rows != 2 * ROWS), per_row


def activation_moments(config: PreTrainedConfig, settings: FitSettings) -> list[Moment]:
    """The moments of a step, the largest of which is its peak. In RL those of an update and those of a rollout."""
    if settings.stage == "eval":
        return sampling_moments(config, settings)
    views = min(settings.views, settings.views_at_once)
    rows = (settings.batch * views, ROWS, 2 * ROWS)
    constant, per_row = fit_line({count: full_step(config, settings, count).peak for count in rows})
    moments = [Moment(constant, per_row * views)]
    if settings.stage == "rl":
        # A rollout can be the larger part: its cache, or its logits compared with activations that are recomputed.
        moments += sampling_moments(config, replace(settings, stage="eval", views=1))
    return moments


def sampling_moments(config: PreTrainedConfig, settings: FitSettings) -> list[Moment]:
    """The two moments of a pass of a rollout: in the backbone, and when tokens are drawn from logits.

    Samplers hold the logits of as many rows as fill one chunk. A smaller batch has only those of its own rows.
    """
    steps = {rows: full_step(config, settings, rows) for rows in (settings.batch, ROWS, 2 * ROWS)}

    # Logits of the batch, of half a chunk and of a whole one: beyond a half, a row adds fewer bytes, because entropies
    # are computed for half a chunk at a time.
    chunk_logits = SAMPLING_ELEMENTS if has_masks(config) else SAMPLING_ELEMENTS / 2  # the others are in fp64
    chunk_rows = math.ceil(chunk_logits / (drawn_positions(config, settings) * vocabulary(config)))
    counts = {math.ceil(chunk_rows / 2), chunk_rows, min(settings.batch, chunk_rows)}
    shallow = depths(config)[0]
    logits = tuple((rows, fake_step(config, settings, shallow, rows).logits) for rows in sorted(counts))

    in_backbone = fit_line({rows: step.backbone for rows, step in steps.items()})
    at_head = fit_line({rows: step.held for rows, step in steps.items()})
    return [Moment(*in_backbone), Moment(*at_head, ((0, 0), *logits))]


def activation_bytes(config: PreTrainedConfig, settings: FitSettings) -> tuple[float, float]:
    """Bytes of activations and logits as (constant, per row), whose sum at the batch of the settings is the peak of its
    step. Other batches may have other constants: see `activation_moments`."""
    moments = activation_moments(config, settings)
    peak = max(moments, key=lambda moment: moment.bytes_at(settings.batch))
    return peak.bytes_at(settings.batch) - peak.per_row * settings.batch, peak.per_row


def total_and_active(config: PreTrainedConfig) -> tuple[int, int]:
    """Parameters of the model, and those that process one token: of the routed experts, only the chosen ones."""
    model = build(config, FitSettings("eval"))
    total = sum(p.numel() for p in model.parameters())
    stacks = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", 0)
    few = stacks * chosen // experts(config) if stacks else 0
    return total, total - stacks + few


def flops_per_token(config: PreTrainedConfig, context: int) -> float:
    """Floating-point operations of one token in a forward pass that attends to `context` tokens: 2 per weight that
    processes the token, the head included, and 4 x layers x width of the heads x `context` for attention. Norms, rotary
    positions and adapters are left out."""
    _, active = total_and_active(config)
    if not config.tie_word_embeddings:
        active -= vocabulary(config) * config.hidden_size  # looked up, not multiplied
    text, layers = config.get_text_config(), config.num_hidden_layers
    heads = text.num_attention_heads
    if has_masks(config):
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    else:  # heads differ between layers
        width = heads * sum(text.per_layer_config[layer].head_dim for layer in range(layers)) / layers
    return 2.0 * active + 4.0 * config.num_hidden_layers * width * context


def resident_bytes(config: PreTrainedConfig, settings: FitSettings) -> dict[str, float]:
    """Bytes per GPU that stay for the whole run, by part: weights, gradients, optimizer (AdamW), reference, buffers,
    and the merged copy of rollouts.

    Without ZeRO, trained weights are fp32 with two fp32 states. DeepSpeed keeps trained weights and gradients in
    `dtype`, and an fp32 copy with the states. ZeRO stage 1 divides the states among the GPUs, stage 2 also the
    gradients, stage 3 also the weights. With 4-bit weights, SFT and preference training keep the others (embeddings,
    head, norms) in fp32, as QLoRA does.
    """
    model, size = build(config, settings), settings.weight_dtype.itemsize
    learnt = [p for p in model.parameters() if p.requires_grad and settings.stage != "eval"]
    trained = sum(p.numel() for p in learnt)
    share = [1 / settings.gpus if settings.zero >= stage else 1.0 for stage in range(4)]
    trained_size = size if settings.zero else max((p.element_size() for p in learnt), default=size)
    fixed = [p for p in model.parameters() if not (p.requires_grad and settings.stage != "eval")]
    frozen = float(sum(p.numel() * p.element_size() for p in fixed))
    buffers = min(trained, BUCKET) * size if settings.zero else 0
    if settings.load_in_4bit:
        frozen += sum(layer.weight.numel() for layer in quantised(model)) * (NF4_BYTES - size)
    if settings.load_in_4bit:  # a dequantised weight
        buffers += max(layer.weight.numel() for layer in quantised(model)) * size
    elif settings.zero == 3:  # a gathered weight
        buffers += max(p.numel() for p in model.parameters() if p.element_size() == size) * size
    reference = 0.0
    if settings.stage in ("rl", "prefer") and settings.lora_r == 0 and settings.beta > 0:
        reference = trained * float(trained_size if settings.stage == "prefer" else size)
    summed = trained * float(size) if settings.views > settings.views_at_once else 0.0  # sum over passes, by autograd
    copied = {"merged copy": float(copied_bytes(model))} if settings.merged_rollouts else {}
    return copied | {
        "weights": (frozen + trained * trained_size) * share[3],
        "gradients": trained * trained_size * share[2] + summed,
        "optimizer": trained * (12 if settings.zero and trained_size < 4 else 2 * trained_size) * share[1],
        "reference": reference * share[3],
        "buffers": float(buffers),
    }


def fit_table(config: PreTrainedConfig, settings: FitSettings) -> str:
    """The estimate in GB by part, and the largest batch on each of `CARDS`; first, for a mixture, its parameters."""
    moments = activation_moments(config, settings)
    parts = resident_bytes(config, settings) | {"CUDA and libraries": RESERVED}
    resident, batch = sum(parts.values()), settings.batch

    def activations(rows: int) -> float:
        return max(moment.bytes_at(rows) for moment in moments)

    def total_bytes(rows: int) -> float:
        return resident + activations(rows) + settings.stored * rows

    parts["activations and logits"] = activations(batch)
    parts["views and log-probs"] = settings.stored * batch
    parts[f"total at batch {batch}"] = total_bytes(batch)
    total, active = total_and_active(config)
    lines = []
    if active < total:
        lines.append(f"{'parameters':<24}{total / GB:>9.2f} billion, {active / GB:.2f} active per token")
    lines += [f"{name:<24}{value / GB:>9.2f} GB" for name, value in parts.items() if round(value / GB, 2)]
    lines += ["", "card                    largest batch per GPU"]
    for card in CARDS:
        rows = bisect_right(range(1, MAX_ROWS), float(card * GB), key=total_bytes)
        lines.append(f"{card:>4} GB{rows if rows > 0 else 'does not fit':>26}")
    return "\n".join(lines)
