"""How much GPU memory a stage needs, from a model's config alone, and the largest batch that fits a card.

Weights, gradients and optimizer states are counted. Activations and logits are not put into formulas: one step is run
on fake tensors, which have shapes but no data, of a model two and three layers deep at batch 1 and 2; the peak of its
live storages grows evenly in layers and rows. Left out: fragmentation, communication beyond DeepSpeed's buckets, and
whatever else lives on the card beyond `RESERVED`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig

from d1.models.adapters import lora_targets
from d1.models.head import CHUNK_ELEMENTS, body_and_head
from d1.models.kinds import ENCODERS
from d1.models.load import attach_hooks

GB = 10**9
CARDS = (24, 40, 48, 80, 141)  # RTX 4090, A100, L40S, H100, H200; GB
RESERVED = 1.2 * GB  # CUDA context, kernels and libraries
SFT_ROWS, SFT_LOGITS = 256, 2**25  # positions, or logits, that SFT holds at a time (SFT/sft_loss.py)
BUCKET = 5 * 10**8  # elements of DeepSpeed's default reduction bucket
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, a byte a block of 64, an fp32 a 256 of these (QLoRA, section 3)


@dataclass(frozen=True)
class Setup:
    """One stage's run. `length` is a whole row, prompt and completion; sizes are per GPU."""

    stage: str  # "sft", "rl" or "eval"
    batch: int = 1
    length: int = 4096
    block_length: int = 32
    gpus: int = 1
    zero: int = 0
    dtype: str = "bfloat16"
    lora_r: int = 128  # 0: all weights are trained
    lora_targets: str = "attention"
    load_in_4bit: bool = False
    gradient_checkpointing: bool = False
    beta: float = 0.04


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages made and not yet freed under it: `live` now, `peak` at most."""

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


def build(config: PreTrainedConfig, setup: Setup, layers: int | None = None) -> Any:
    """The model of a stage on the meta device, with its adapter."""
    config = copy.deepcopy(config)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    training = setup.stage != "eval"
    full = training and setup.lora_r == 0
    dtype = torch.float32 if full and setup.zero == 0 else getattr(torch, setup.dtype)
    auto: Any = AutoModelForMaskedLM if config.model_type in ENCODERS else AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = attach_hooks(auto.from_config(config, dtype=dtype))
    if training and setup.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if training and not full:
        targets = lora_targets(config.model_type, setup.lora_targets)
        model = get_peft_model(model, LoraConfig(r=setup.lora_r, target_modules=targets), low_cpu_mem_usage=True)
        if setup.gradient_checkpointing:
            model.enable_input_require_grads()
    return model.train(training)


def fill_with_fakes(model: torch.nn.Module) -> None:
    """Replace meta tensors, for which attention would take another kernel, by the active mode's CPU fakes."""
    made: dict[int, torch.nn.Parameter] = {}  # a tied weight stays one
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                fake = torch.nn.Parameter(torch.empty(old.shape, dtype=old.dtype), requires_grad=old.requires_grad)
                module._parameters[name] = made.setdefault(id(old), fake)
                fake.grad = torch.zeros_like(fake) if old.requires_grad else None
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


@contextmanager
def precision(setup: Setup) -> Iterator[None]:
    mixed = setup.dtype != "float32" and setup.stage != "eval"
    with torch.autocast("cpu", getattr(torch, setup.dtype)) if mixed else nullcontext():
        yield


def step_peak(config: PreTrainedConfig, setup: Setup, layers: int, rows: int) -> int:
    """Peak bytes of one fake step beyond weights, gradients and optimizer states."""
    model = build(config, setup, layers)
    with FakeTensorMode():
        fill_with_fakes(model)
        ids = torch.zeros(rows, setup.length, dtype=torch.long)
        # As a batch with padding has it: attention falls back to kernels that take a mask.
        mask = torch.ones(rows, 1, setup.length, setup.length, dtype=torch.bool)
        body, head = body_and_head(model)
        with LiveStorages() as storages, precision(setup), torch.set_grad_enabled(setup.stage != "eval"):
            states = body(ids, mask)
            if setup.stage == "eval":
                logits = head(states[:, -setup.block_length :]).float()
                exponential = -torch.log1p(-torch.rand_like(logits).clamp(min=1e-9))
                (logits - 0.5 * exponential.log()).argmax(-1)
            else:
                sft_rows = max(SFT_ROWS, SFT_LOGITS // config.vocab_size)
                chunk = sft_rows if setup.stage == "sft" else max(1, CHUNK_ELEMENTS // config.vocab_size)
                flat = states.flatten(0, 1)
                targets = torch.zeros(len(flat[:chunk]), dtype=torch.long)
                loss = F.cross_entropy(head(flat[:chunk]).float(), targets)
                (loss + flat[chunk:].float().sum()).backward()
        return storages.peak


def activation_bytes(config: PreTrainedConfig, setup: Setup) -> tuple[float, float]:
    """Bytes of activations and logits as (constant, per row), from steps of 2 and 3 layers at 1 and 2 rows."""
    layers = config.num_hidden_layers
    peaks = []
    for rows in (1, 2):
        two, three = (step_peak(config, setup, depth, rows) for depth in (2, 3))
        peaks.append(two + (three - two) * (layers - 2))
    return 2 * peaks[0] - peaks[1], peaks[1] - peaks[0]


def count_parameters(config: PreTrainedConfig, setup: Setup) -> dict[str, int]:
    """Parameters that are trained, that are frozen, and of the latter those in linear layers of blocks."""
    model = build(config, setup)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    blocks = [m for n, m in inner.named_modules() if (".layers." in n or ".layer." in n) and "lora_" not in n]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad and setup.stage != "eval")
    return {
        "trained": trained,
        "frozen": sum(p.numel() for p in model.parameters()) - trained,
        "linear": sum(m.weight.numel() for m in blocks if isinstance(m, torch.nn.Linear)),
        "largest": max(p.numel() for p in model.parameters()),
    }


def resident_bytes(config: PreTrainedConfig, setup: Setup) -> dict[str, float]:
    """Bytes a GPU that stay for the whole run, by part: weights, gradients, optimizer, reference, buffers.

    Optimizer is AdamW. Without ZeRO trained weights are fp32 with two fp32 states; DeepSpeed keeps trained weights and
    gradients in `dtype` and an fp32 copy with the states, which stage 1 shares out, stage 2 the gradients also, stage
    3 the weights also. The reference is a second model where RL trains all weights and beta > 0.
    """
    counts = count_parameters(config, setup)
    size = torch.empty(0, dtype=getattr(torch, setup.dtype)).element_size()
    share = [1 / setup.gpus if setup.zero >= stage else 1.0 for stage in range(4)]
    trained_size = size if setup.zero else 4
    frozen = counts["frozen"] * float(size)
    if setup.load_in_4bit:
        frozen += counts["linear"] * (NF4_BYTES - size)
    states = 8 if trained_size == 4 else 12
    buffers = min(counts["trained"], BUCKET) * size if setup.zero and counts["trained"] else 0
    if setup.zero == 3 or setup.load_in_4bit:
        buffers += counts["largest"] * size  # a gathered or dequantised weight
    everything = setup.stage == "rl" and setup.lora_r == 0 and setup.beta > 0
    return {
        "weights": (frozen + counts["trained"] * trained_size) * share[3],
        "gradients": counts["trained"] * trained_size * share[2],
        "optimizer": counts["trained"] * states * share[1],
        "reference": counts["trained"] * size * share[3] if everything else 0.0,
        "buffers": float(buffers),
    }


def fit_table(config: PreTrainedConfig, setup: Setup) -> str:
    """The estimate in GB by part, and the largest batch on each of `CARDS`."""
    constant, per_row = activation_bytes(config, setup)
    parts = resident_bytes(config, setup) | {"CUDA and libraries": RESERVED}
    fixed = sum(parts.values()) + constant
    parts["activations and logits"] = constant + per_row * setup.batch
    parts[f"total at batch {setup.batch}"] = fixed + per_row * setup.batch
    lines = [f"{name:<24}{value / GB:>9.2f} GB" for name, value in parts.items() if value]
    lines += ["", "card                    largest batch a GPU"]
    for card in CARDS:
        rows = int((card * GB - fixed) // per_row)
        lines.append(f"{card:>4} GB{rows if rows > 0 else 'does not fit':>26}")
    return "\n".join(lines)
