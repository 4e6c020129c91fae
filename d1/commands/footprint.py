"""How much GPU memory a stage needs, from a model's config alone, and the largest batch that fits a card.

Weights, gradients and optimizer states are counted. For activations and logits, models of two and three layers run one
step at three batch sizes, on fake tensors, which have shapes but no data: the peak of live storages grows linearly with
layers and rows. Not included: fragmentation, and communication beyond DeepSpeed's buckets.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig

from d1.models.adapters import lora_targets, skip_input_casts
from d1.models.attention import has_causal_context
from d1.models.diffusion_gemma import canvas_states, decode, encode, soft_embeddings
from d1.models.head import CHUNK_ELEMENTS, MAX_CHUNK_FACTOR, backbone_and_head, target_logps, unwrapped
from d1.models.kinds import block_size, experts, has_masks, vocabulary
from d1.models.memory import meta_model
from d1.models.merged import copied_bytes
from d1.models.packing import two_stream_states
from d1.transformers_bridge import CACHE

GB = 10**9
CARDS = (24, 40, 48, 80, 141)  # RTX 4090, A100, L40S, H100, H200; GB
RESERVED = 1.2 * GB  # CUDA context, kernels and libraries
SAMPLING_ELEMENTS = CHUNK_ELEMENTS // 2 * MAX_CHUNK_FACTOR  # logits at once in sampling on a large card
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
        if settings.load_in_4bit and settings.stage == "rl":  # TRL casts the adapter
            model.to(dtype)
    return model.train(training)


def quantised(model: Any) -> list[torch.nn.Linear]:
    """The layers whose weights bitsandbytes stores in 4 bits: not the embeddings, the head and the adapter."""
    inside = (m for n, m in model.named_modules() if (".layers." in n or ".layer." in n) and "lora_" not in n)
    return [module for module in inside if isinstance(module, torch.nn.Linear)]


def step_peak(config: PreTrainedConfig, settings: FitSettings, layers: int, rows: int) -> int:
    """Peak bytes of one fake step beyond weights, gradients and optimizer states.

    For a block-causal model, evaluation has its largest cache, where the prompt leaves room for one block, and training
    has a second, noised stream: the canvas in RL, the row in SFT.
    """
    training, size = settings.stage != "eval", block_size(config)
    mixed = training and settings.dtype != "float32"
    model = build(with_layers(config, layers), settings)
    grouped = patch(
        "torch.nn.functional.grouped_mm", lambda tokens, weights, **_: Grouped.apply(tokens, weights), create=True
    )
    with FakeTensorMode(), grouped:
        # On meta tensors attention would take another kernel than on fake tensors of a CPU.
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        inner = unwrapped(model)
        inner.tie_weights()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        ids = torch.zeros(rows, settings.length, dtype=torch.long)
        # The mask of a batch with padding: attention falls back to kernels that take a mask.
        mask = torch.ones(rows, 1, settings.length, settings.length, dtype=torch.bool)
        backbone, head = backbone_and_head(model)
        precision = torch.autocast("cpu", settings.weight_dtype, enabled=mixed)
        skip_input_casts(model)
        with LiveStorages() as storages, precision, torch.set_grad_enabled(training):
            if not has_masks(config):
                states = canvas_step(model, ids, settings)
            elif size and training:
                noised = ids[:, -((settings.length if settings.stage == "sft" else settings.canvas) + size - 1) :]
                clean_positions = None
                if settings.stage == "sft" and has_causal_context(config):  # the clean text is trained, too
                    clean_positions = torch.arange(settings.length).expand(rows, -1)
                visible = torch.ones_like(ids)  # masks over queries are made from it
                states = two_stream_states(model, ids, noised, visible, clean_at=clean_positions)
            else:
                states = backbone(ids, mask, **({CACHE: DynamicCache()} if size else {}))
            if not training and not has_masks(config):
                logits = head(states.flatten(0, 1)[: max(1, SAMPLING_ELEMENTS // 2 // vocabulary(config))])
                soft_embeddings(model, logits.double().softmax(-1).cumsum(-1).float())
            elif not training:
                flat = states[:, -settings.block_length :].flatten(0, 1)
                logits = head(flat[: max(1, SAMPLING_ELEMENTS // vocabulary(config))]).float()
                exponential = -torch.log1p(-torch.rand_like(logits).clamp(min=1e-9))
                (logits - 0.5 * exponential.log()).argmax(-1)
            else:
                flat = states.flatten(0, 1)
                chunk = max(1, CHUNK_ELEMENTS // vocabulary(config))
                logps, _ = target_logps(model, flat[:chunk], torch.zeros(len(flat[:chunk]), dtype=torch.long))
                (flat[chunk:].float().sum() - logps.mean()).backward()
        return storages.peak


def canvas_step(model: Any, ids: torch.Tensor, settings: FitSettings) -> torch.Tensor:
    """The states of a step of a model with uniform noise: in SFT of the text and a canvas, in RL of all canvases, in
    evaluation of the last canvas."""
    size = model.config.canvas_length
    if settings.stage == "rl":
        return canvas_states(model, ids, ids[:, -settings.canvas :], torch.ones_like(ids))
    text_ids, start = ids, 0
    if settings.stage != "sft":
        text_ids, start = ids[:, :-size], settings.length - size
    context, states = encode(model, text_ids, torch.ones_like(text_ids))
    if settings.stage == "eval":
        context.forget(model.config)
    positions = start + torch.arange(size).expand(len(ids), -1)
    canvas = decode(model, ids[:, :size], positions, positions[:, :1].expand(-1, size), context)
    return torch.cat([states, canvas], dim=1) if settings.stage == "sft" else canvas


def activation_bytes(config: PreTrainedConfig, settings: FitSettings) -> tuple[float, float]:
    """Bytes of activations and logits as (constant, per row), from steps of 2 and 3 layers at three batch sizes.

    The slope is taken at many rows: with few, the gradient of the embeddings can exceed the activations of the layers.
    """
    views = min(settings.views, settings.views_at_once)
    batch_rows = settings.batch * views
    shallow, deep = depths(config)
    peaks = {}
    for rows in (batch_rows, ROWS, 2 * ROWS):
        low = step_peak(config, settings, shallow, rows)
        high = step_peak(config, settings, deep, rows)
        peaks[rows] = low + (high - low) * (config.num_hidden_layers - shallow) // (deep - shallow)

    # The peak is linear in the rows; the constant must cover the batch of the settings and a large one.
    one_row = (peaks[2 * ROWS] - peaks[ROWS]) / ROWS
    constant = max(peaks[rows] - one_row * rows for rows in (batch_rows, ROWS))
    update = constant, one_row * views
    if settings.stage != "rl":
        return update

    # A rollout can be the larger part: its cache, or its logits compared with activations that are recomputed.
    rollout = activation_bytes(config, replace(settings, stage="eval", views=1))
    if block_size(config):
        return max(update[0], rollout[0]), max(update[1], rollout[1])
    return max(update, rollout, key=lambda part: part[0] + part[1] * settings.batch)


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
    head, norms) in fp32, as QLoRA does, and RL has its adapter in 16 bits, as TRL does.
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
    constant, per_row = activation_bytes(config, settings)
    parts = resident_bytes(config, settings) | {"CUDA and libraries": RESERVED}
    fixed, batch = sum(parts.values()) + constant, settings.batch
    parts["activations and logits"] = constant + per_row * batch
    parts["views and log-probs"] = settings.stored * batch
    per_row += settings.stored
    parts[f"total at batch {batch}"] = fixed + per_row * batch
    total, active = total_and_active(config)
    lines = []
    if active < total:
        lines.append(f"{'parameters':<24}{total / GB:>9.2f} billion, {active / GB:.2f} active per token")
    lines += [f"{name:<24}{value / GB:>9.2f} GB" for name, value in parts.items() if round(value / GB, 2)]
    lines += ["", "card                    largest batch per GPU"]
    for card in CARDS:
        rows = int((card * GB - fixed) // per_row)
        lines.append(f"{card:>4} GB{rows if rows > 0 else 'does not fit':>26}")
    return "\n".join(lines)
