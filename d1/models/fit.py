"""How much GPU memory a stage needs, from a model's config alone, and the largest batch that fits a card.

Weights, gradients and optimizer states are counted. For activations and logits, one step is run on fake tensors, which
have shapes but no data, of a model two and three layers deep at three batch sizes: the peak of its live storages grows
evenly in layers and rows. Left out: fragmentation, and communication beyond DeepSpeed's buckets.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig

from d1.models.adapters import lora_targets
from d1.models.head import CHUNK_ELEMENTS, body_and_head, target_logps
from d1.models.kinds import block_size, experts
from d1.models.load import auto_class, prepare
from d1.models.two_streams import two_stream_states

GB = 10**9
CARDS = (24, 40, 48, 80, 141)  # RTX 4090, A100, L40S, H100, H200; GB
RESERVED = 1.2 * GB  # CUDA context, kernels and libraries
ROWS = 32  # rows of a fake step whose activations are its peak, for any vocabulary
BUCKET = 5 * 10**8  # elements of DeepSpeed's default reduction bucket
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, a byte a block of 64, an fp32 a 256 of these (QLoRA, section 3)


@dataclass(frozen=True)
class FitSettings:
    """One stage's run."""

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
    views: int = 1  # RL, prefer: views of a row that an update sums
    views_at_once: int = 1  # of these in one forward pass
    canvas: int = 256  # RL, prefer: tokens of the row that are the completion's
    stored: int = 0  # RL: bytes that are kept of each of `batch` rows from the rollout to its last update

    @property
    def weight_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages made and not yet freed: `live` now, `peak` at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What an operation is given was there before, or is counted already: a view of a weight is no new storage.
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
    """What `grouped_mm` of tokens (n, width) and experts (experts, width, out) keeps and makes, on fakes of any dtype;
    torch 2.13 takes fakes of one."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weights)
        return tokens.new_empty(len(tokens), weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needed else None for tensor, needed in pairs)


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A copy of `config` with `layers` layers; the pattern of layer types goes on as it begins."""
    config = copy.deepcopy(config)
    if types := getattr(config, "layer_types", None):
        config.layer_types = [types[layer % len(types)] for layer in range(layers)]
    config.num_hidden_layers = layers
    return config


def build(config: PreTrainedConfig, settings: FitSettings) -> Any:
    """The model of a stage on the meta device, with its adapter."""
    training = settings.stage != "eval"
    full = training and settings.lora_r == 0
    dtype = torch.float32 if full and settings.zero == 0 else settings.weight_dtype
    with torch.device("meta"):
        # The kernel is Transformers' choice: the one that a config names need not be there, nor run on fake tensors.
        model: Any = prepare(auto_class(config).from_config(config, dtype=dtype, attn_implementation=None))
    if training and settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if training and not full:
        targets = lora_targets(model, settings.lora_targets)
        model = get_peft_model(model, LoraConfig(r=settings.lora_r, target_modules=targets), low_cpu_mem_usage=True)
        if settings.gradient_checkpointing:
            model.enable_input_require_grads()
    return model.train(training)


def fill_with_fakes(model: Any) -> None:
    """Replaces meta tensors, for which attention would take another kernel, by the active mode's CPU fakes."""
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    inner.tie_weights()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def step_peak(config: PreTrainedConfig, settings: FitSettings, layers: int, rows: int) -> int:
    """Peak bytes of one fake step beyond weights, gradients and optimizer states.

    In evaluation a block-causal model's cache is the largest where the prompt leaves room for one block; in training it
    has a second, noised stream: the canvas in RL, the row in SFT.
    """
    training, size = settings.stage != "eval", block_size(config)
    mixed = training and settings.dtype != "float32"
    model = build(with_layers(config, layers), settings)
    grouped = patch("torch.nn.functional.grouped_mm", lambda tokens, weights, **_: Grouped.apply(tokens, weights))
    with FakeTensorMode(), grouped:
        fill_with_fakes(model)
        ids = torch.zeros(rows, settings.length, dtype=torch.long)
        # As a batch with padding has it: attention falls back to kernels that take a mask.
        mask = torch.ones(rows, 1, settings.length, settings.length, dtype=torch.bool)
        body, head = body_and_head(model)
        precision = torch.autocast("cpu", settings.weight_dtype, enabled=mixed)
        with LiveStorages() as storages, precision, torch.set_grad_enabled(training):
            if size and training:
                noised = ids[:, -((settings.length if settings.stage == "sft" else settings.canvas) + size - 1) :]
                states = two_stream_states(model, ids, noised, torch.ones_like(ids))  # makes its own masks
            else:
                states = body(ids, mask, **({"past_key_values": DynamicCache()} if size else {}))
            if not training:
                logits = head(states[:, -settings.block_length :]).float()
                exponential = -torch.log1p(-torch.rand_like(logits).clamp(min=1e-9))
                (logits - 0.5 * exponential.log()).argmax(-1)
            else:
                flat = states.flatten(0, 1)
                chunk = max(1, CHUNK_ELEMENTS // config.vocab_size)
                logps, _ = target_logps(model, flat[:chunk], torch.zeros(len(flat[:chunk]), dtype=torch.long))
                (flat[chunk:].float().sum() - logps.mean()).backward()
        return storages.peak


def activation_bytes(config: PreTrainedConfig, settings: FitSettings) -> tuple[float, float]:
    """Bytes of activations and logits as (constant, per row), from steps of 2 and 3 layers at three batch sizes.

    The slope is that of many rows: with few, the gradient of the embeddings can exceed the activations of these layers.
    """
    views, peaks = min(settings.views, settings.views_at_once), {}
    asked = settings.batch * views
    for rows in (asked, ROWS, 2 * ROWS):
        two, three = (step_peak(config, settings, depth, rows) for depth in (2, 3))
        peaks[rows] = two + (three - two) * (config.num_hidden_layers - 2)
    one_row = (peaks[2 * ROWS] - peaks[ROWS]) / ROWS
    found = max(peaks[rows] - one_row * rows for rows in (asked, ROWS)), one_row * views
    if settings.stage != "rl" or not block_size(config):
        return found
    rollout = activation_bytes(config, replace(settings, stage="eval", views=1))  # whose cache can be the larger part
    return max(found[0], rollout[0]), max(found[1], rollout[1])


def total_and_active(config: PreTrainedConfig) -> tuple[int, int]:
    """Parameters of the model, and those that one token meets: of the experts it is routed among, its own few."""
    model = build(config, FitSettings("eval"))
    total = sum(p.numel() for p in model.parameters())
    stacks = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    few = stacks * config.num_experts_per_tok // experts(config) if stacks else 0
    return total, total - stacks + few


def resident_bytes(config: PreTrainedConfig, settings: FitSettings) -> dict[str, float]:
    """Bytes per GPU that stay for the whole run, by part: weights, gradients, optimizer (AdamW), reference, buffers.

    Without ZeRO trained weights are fp32 with two fp32 states. DeepSpeed keeps trained weights and gradients in `dtype`
    and an fp32 copy with the states: stage 1 shares out the states, 2 also the gradients, 3 also the weights.
    """
    model, size = build(config, settings), settings.weight_dtype.itemsize
    sizes = [p.numel() for p in model.parameters()]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad and settings.stage != "eval")
    share = [1 / settings.gpus if settings.zero >= stage else 1.0 for stage in range(4)]
    trained_size = size if settings.zero else 4
    frozen = (sum(sizes) - trained) * float(size)
    if settings.load_in_4bit:
        blocks = [m for n, m in model.named_modules() if (".layers." in n or ".layer." in n) and "lora_" not in n]
        frozen += sum(m.weight.numel() for m in blocks if isinstance(m, torch.nn.Linear)) * (NF4_BYTES - size)
    buffers = min(trained, BUCKET) * size if settings.zero else 0
    if settings.zero == 3 or settings.load_in_4bit:
        buffers += max(sizes) * size  # a gathered or dequantised weight
    everything = settings.stage in ("rl", "prefer") and settings.lora_r == 0 and settings.beta > 0
    summed = trained * float(size) if settings.views > settings.views_at_once else 0.0  # by autograd, over passes
    return {
        "weights": (frozen + trained * trained_size) * share[3],
        "gradients": trained * trained_size * share[2] + summed,
        "optimizer": trained * (8 if trained_size == 4 else 12) * share[1],
        "reference": trained * (trained_size if settings.stage == "prefer" else size) * share[3] if everything else 0.0,
        "buffers": float(buffers),
    }


def fit_table(config: PreTrainedConfig, settings: FitSettings) -> str:
    """The estimate in GB by part, and the largest batch on each of `CARDS`; before it, a mixture's parameters."""
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
        lines.append(f"{'parameters':<24}{total / GB:>9.2f} billion, {active / GB:.2f} active a token")
    lines += [f"{name:<24}{value / GB:>9.2f} GB" for name, value in parts.items() if round(value / GB, 2)]
    lines += ["", "card                    largest batch a GPU"]
    for card in CARDS:
        rows = int((card * GB - fixed) // per_row)
        lines.append(f"{card:>4} GB{rows if rows > 0 else 'does not fit':>26}")
    return "\n".join(lines)
