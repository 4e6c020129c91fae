"""Compiled forward passes of sampling: `--compile none`, `layers` or `graphs`.

A pass of few tokens costs the host 20 to 40 ms for its about 1,200 kernels, and a GPU a few milliseconds. So cached
and block-causal sampling, `d1 serve` and small models wait for the host. Two settings change that:

graphs  A pass is run on buffers of one shape, which a CUDA graph replays with one launch. Shapes are made equal where
        this costs little: rows come in buckets, cached keys too, and a step that predicts fewer tokens than another
        takes its graph. A shape that is new runs as always; its second pass is captured. The kernels are those of the
        plain pass. Where the shape is the plain pass's, so are all results, to the bit; rows, keys or positions that
        were added change results by rounding alone.
layers  `torch.compile` of each layer, whose code all layers share. Kernels that are fused round differently: in 16 bits
        some tokens may change, as with another batch size. The first pass of a block, which fills a cache, runs as
        always.

The setting is a mark on the model (`set_compile`), which `Passes` reads through `forward_pass`. What was compiled
lives as long as the model, and is made anew after its weights, adapters or mode were exchanged; weights that training
changes in place are read where they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from d1.models.head import backbone_and_head, unwrapped
from d1.models.kinds import experts, has_masks, is_encoder
from d1.sampling.kv_cache import is_read_only, layers_of, same_layers
from d1.sampling.settings import COMPILE
from d1.transformers_bridge import CACHE, attention_kernel

logger = logging.getLogger(__name__)

Forward = Callable[..., Tensor]  # `backbone` of `backbone_and_head`
Compute = Callable[[], Any]  # reads buffers; returns tensors
Capture = Callable[[Compute], tuple[Any, Callable[[], Any]]]  # -> its results, and what computes them again

# --- The setting ------------------------------------------------------------------------------------------------------

COMPILED = "d1_compile"  # the attribute that `set_compile` sets: a name of `COMPILE`
MAX_GRAPHS = 32  # per model; the one that was used least recently goes
MAX_SHAPES = 1024  # that are known; a shape that was forgotten is new
MAX_VERSIONS = 64  # of the code of a layer, in a process
KEY_BUCKET = 128  # cached keys are padded to multiples of this


def check_compile(
    compile: str, config: Any, *, quantized: bool = False, kernel: str | None = None, on_cpu: bool = False
) -> None:
    """Raise ValueError if a model of this config cannot run compiled as `compile` says, on this machine. `kernel` is
    that of its attention, if the config does not say; `on_cpu`: no GPU is used."""
    if compile not in COMPILE:
        raise ValueError(f"--compile must be one of {', '.join(COMPILE)}, got {compile!r}")
    if compile == "none":
        return
    kind = config.model_type
    if not kernel:
        kernel = attention_kernel(config) or ""
    if compile == "graphs" and (on_cpu or not torch.cuda.is_available()):
        raise ValueError("--compile graphs needs a GPU: CUDA graphs replay its kernels")
    if not has_masks(config):
        raise ValueError(f"--compile {compile}: a pass of {kind} encodes a context and reads it on the host")
    if experts(config):
        raise ValueError(f"--compile {compile}: {kind} is a mixture, which copies its experts' counts to the host")
    if quantized:
        raise ValueError(f"--compile {compile}: 4-bit weights have kernels of their own: leave --load_in_4bit out")
    if is_encoder(config):
        raise ValueError(f"--compile {compile} is for decoders, and {kind} is an encoder")
    if kernel.startswith("flash_attention"):
        raise ValueError(f"--compile {compile}: {kernel} reads the lengths of padded rows on the host: use sdpa")


def set_compile(model: Any, compile: str) -> Any:
    """Make sampling run the passes of a prepared model as `compile` says; returns the model. ValueError as by
    `check_compile`."""
    inner = unwrapped(model)
    check_compile(compile, inner.config, quantized=getattr(inner, "is_loaded_in_4bit", False))
    split = any(hasattr(weight, "ds_id") or hasattr(weight, "to_local") for weight in inner.parameters())
    if compile != "none" and split:
        raise ValueError(f"--compile {compile}: each process holds only a part of the weights (ZeRO-3, FSDP2)")
    setattr(inner, COMPILED, compile)
    return model


def compile_of(model: Any) -> str:
    """What `set_compile` set last."""
    return getattr(unwrapped(model), COMPILED, "none")


# model -> its `compile_key` and compile mode, what was compiled
COMPILED_MODELS: WeakKeyDictionary[Any, tuple[Hashable, Any]] = WeakKeyDictionary()


def forward_pass(model: Any) -> Forward:
    """`backbone` of `backbone_and_head`, compiled if `set_compile` says so."""
    inner, compile = unwrapped(model), compile_of(model)
    backbone, _ = backbone_and_head(model)
    if compile == "none":
        return backbone

    # `backbone` holds the model, and what the table keeps must not: the model would never be freed.
    state = compile, compile_key(inner)
    if inner not in COMPILED_MODELS or COMPILED_MODELS[inner][0] != state:
        compiled: Any = PassGraphs() if compile == "graphs" else CompiledLayers()
        COMPILED_MODELS[inner] = state, compiled
    compiled = COMPILED_MODELS[inner][1]

    def forward(*args: Any, **options: Any) -> Tensor:
        if torch.is_grad_enabled():
            return backbone(*args, **options)
        return compiled.run(inner, backbone, *args, **options)  # type: ignore[no-any-return]

    return forward


def compile_key(model: Any) -> Hashable:
    """What compiled code depends on: where the weights lie, the mode, the kernel and the adapters in use."""
    weights = tuple(weight.data_ptr() for weight in (*model.parameters(), *model.buffers()))
    adapters = tuple(
        (module.disable_adapters, module.merged, *module.active_adapters)
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
    )
    return weights, model.training, attention_kernel(model.config), adapters


# --- Layers: torch.compile --------------------------------------------------------------------------------------------


class CompiledLayers:
    """`--compile layers`."""

    def __init__(self, backend: Any = "inductor") -> None:
        self.backend = backend
        self.compiled: list[Callable[..., Any]] = []

    def run(self, model: Any, backbone: Forward, *args: Any, **options: Any) -> Tensor:
        past = options.get(CACHE)
        if past is not None and not is_read_only(past):  # the first pass of a block
            return backbone(*args, **options)
        with self.compiled_layers(model):
            return backbone(*args, **options)

    @contextmanager
    def compiled_layers(self, model: Any) -> Iterator[None]:
        """The layers of a model run compiled. Only in sampling: training and scoring keep their kernels."""
        layers: Any = model.base_model.layers
        if not self.compiled:
            self.compiled = [torch.compile(layer.forward, backend=self.backend) for layer in layers]
        for number, (layer, compiled) in enumerate(zip(layers, self.compiled, strict=True)):
            layer.forward = partial(run_layer, compiled, number)
        try:
            # With and without a mask, a cache and chosen positions, of fixed and of variable sizes, for each model.
            with torch._dynamo.config.patch(recompile_limit=MAX_VERSIONS):
                yield
        finally:
            for layer in layers:
                del layer.forward


def run_layer(compiled: Callable[..., Any], number: int, *args: Any, **options: Any) -> Any:
    """A compiled layer's forward pass. From a cache that is only read, the layer gets its own part: a number of a layer
    that compiled code reads would make it the code of that layer alone, and torch keeps eight versions of code."""
    if isinstance(options.get(CACHE), DynamicCache):
        options[CACHE] = layers_of(options[CACHE])[number]
    return compiled(*args, **options)


# --- Graphs: passes on buffers of one shape ---------------------------------------------------------------------------

PER_KEY_ARGUMENTS = ("attention_mask", "opened")  # arguments with a value per key, in their last dimension


@dataclass(frozen=True)
class Shape:
    """What passes of one graph have in common. The number of positions is no part of it: a graph has the most that
    its passes had, and others repeat their last one."""

    rows: int
    cached: int  # keys
    # None: the pass has no cache; else whether it only reads it. If not, it returns keys and values of its own.
    only_reads: bool | None
    inputs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # of the arguments, without `positions`
    layers: tuple[tuple[torch.dtype, int, int, int], ...]  # heads and sizes of cached keys and values
    precision: tuple[bool, torch.dtype]  # of autocast

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], past: DynamicCache | None) -> Shape:
        """The shape of a pass, after padding."""
        ids = tensors["input_ids"]
        rows = row_bucket(len(ids))

        # The cache. Keys can be added only where a mask hides them.
        cached, only_reads, layers = 0, None, []
        if past is not None:
            cached, only_reads = past.get_seq_length(), is_read_only(past)
        if past is not None and cached:
            for layer in layers_of(past):
                layers.append((layer.keys.dtype, layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
        padded = cached
        if "attention_mask" in tensors:
            padded = -(-cached // KEY_BUCKET) * KEY_BUCKET

        # The other arguments.
        inputs = []
        for name, value in tensors.items():
            size = [rows, *value.shape[1:]]
            if name in PER_KEY_ARGUMENTS:
                size[-1] += padded - cached
            if name != "positions":
                inputs.append((name, value.dtype, tuple(size)))
        device = ids.device.type
        return cls(
            rows=rows,
            cached=padded,
            only_reads=only_reads,
            inputs=tuple(inputs),
            layers=tuple(layers),
            precision=(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        )


def row_bucket(rows: int) -> int:
    """`rows`, rounded up to a number with at most three binary digits before zeros: 1 to 8, 10, 12, 14, 16, 20, ..."""
    unit = 1 << max(rows.bit_length() - 3, 0)
    return -(-rows // unit) * unit


@dataclass(eq=False)
class Graph:
    """A captured pass.

    Attributes:
        inputs: the buffers of the arguments, by name.
        past: those of the cached keys and values, layer by layer.
        states: (rows, positions, hidden), which `replay` writes.
        new_values: keys and values of the pass's own tokens, layer by layer; empty for a cache that is only read.
    """

    inputs: dict[str, Tensor]
    past: list[Tensor]
    states: Tensor
    new_values: list[Tensor]
    replay: Callable[[], Any]


class PassGraphs:
    """`--compile graphs`: the graphs of a model's passes.

    Args:
        capture: makes a graph of a computation on buffers. Tests on a CPU have others.

    Attributes:
        eager_passes, captures, replays: how many there were.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self.capture = capture or GPUCapture()
        self.graphs: dict[Shape, Graph] = {}  # the one that was used last is the last
        self.positions: dict[Shape, int] = {}  # the most of a pass of each shape that ran
        self.failed: set[Shape] = set()  # shapes that cannot be captured
        # Cached keys and values: one allocation per layer, which the graphs of all shapes share, and what it holds.
        self.memory: list[Tensor] = []
        self.held: tuple[list[ref[Tensor]], Shape | None] = [], None
        self.eager_passes = self.captures = self.replays = 0

    def run(
        self,
        model: Any,
        backbone: Forward,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """`backbone` with the same arguments, by a graph if there is one for their shape."""
        # The arguments that are tensors; others, such as segments of packed rows, have no graph.
        arguments = {"input_ids": input_ids, "attention_mask": attention_mask, "positions": positions, **options}
        past = arguments.pop(CACHE, None)
        tensors = {}
        has_graph = positions is not None
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                tensors[name] = value
            elif value is not None:
                has_graph = False

        # The pass, by its graph if there is one.
        if has_graph:
            shape = Shape.from_tensors(tensors, past)
            graph = self.get_graph(shape, backbone, tensors, past)
            if graph is not None:
                self.replays += 1
                return self.replay(graph, shape, tensors, past)
        self.eager_passes += 1
        return backbone(input_ids, attention_mask, positions, **options)

    def get_graph(self, shape: Shape, backbone: Forward, tensors: dict[str, Tensor], past: Any) -> Graph | None:
        """The graph of a shape with at least as many positions; None if the shape is new or cannot be captured."""
        count = tensors["positions"].shape[1]
        graph = self.graphs.pop(shape, None)
        if graph is None or graph.inputs["positions"].shape[1] < count:
            is_new = shape not in self.positions
            self.positions[shape] = max(self.positions.pop(shape, 0), count)
            while len(self.positions) > MAX_SHAPES:
                del self.positions[next(iter(self.positions))]
            if is_new or shape in self.failed:
                return None
            graph = self.make(shape, backbone, tensors, past)
            if graph is None:
                return None
        self.graphs[shape] = graph
        while len(self.graphs) > MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        return graph

    def make(self, shape: Shape, backbone: Forward, tensors: dict[str, Tensor], past: Any) -> Graph | None:
        """Captures a pass of this shape; None if that fails."""
        inputs = {name: tensors[name].new_zeros(size) for name, _, size in shape.inputs}
        inputs["positions"] = tensors["positions"].new_zeros(shape.rows, self.positions[shape])
        buffers = self.past_buffers(shape, past)
        template = DynamicCache()
        if buffers:
            template = same_layers(past)
            for layer, keys, values in zip(layers_of(template), buffers[::2], buffers[1::2], strict=True):
                layer.keys, layer.values = keys, values

        def compute() -> tuple[Tensor, list[Tensor]]:
            options: dict[str, Any] = dict(inputs)
            ids, positions = options.pop("input_ids"), options.pop("positions")
            mask = options.pop("attention_mask", None)
            if shape.only_reads is None:
                return backbone(ids, mask, positions, **options), []
            # An empty cache, or one that a pass adds to, is a new one in each run.
            cache = template
            if not buffers or not shape.only_reads:
                cache = same_layers(template)
            options[CACHE] = cache
            states = backbone(ids, mask, positions, **options)
            new_values: list[Tensor] = []
            if not shape.only_reads:
                for layer in layers_of(cache):
                    for values in (layer.keys, layer.values):
                        new_values.append(values[:, :, shape.cached :].clone())  # the graph need not keep the others
            return states, new_values

        # The first run of the computation is on real numbers: those of this pass.
        self.copy_arguments(inputs, tensors)
        try:
            (states, new_values), replay = self.capture(compute)
        except RuntimeError as error:
            self.failed.add(shape)
            logger.warning("--compile graphs: passes of one shape run as always, because a capture failed: %s", error)
            return None
        self.captures += 1
        return Graph(inputs, buffers, states, new_values, replay)

    def past_buffers(self, shape: Shape, past: Any) -> list[Tensor]:
        """Buffers of a shape's cached keys and values, layer by layer: views of the memory that all shapes share. If
        it is too small, it is made anew, and the graphs with it."""
        # A shape without cached keys has no buffers, and keeps the memory of the others.
        if not shape.layers:
            return []
        sizes, dtypes = [], []
        for dtype, heads, key_size, value_size in shape.layers:
            sizes += [(shape.rows, heads, shape.cached, key_size), (shape.rows, heads, shape.cached, value_size)]
            dtypes += [dtype, dtype]
        counts = [math.prod(size) for size in sizes]

        # Is the memory large enough?
        fits = len(self.memory) == len(sizes)
        if fits:
            for memory, count, dtype in zip(self.memory, counts, dtypes, strict=True):
                fits = fits and memory.numel() >= count and memory.dtype == dtype
        if not fits:
            self.graphs.clear()
            self.memory, self.held = [], ([], None)
            like = layers_of(past)[0].keys
            for count, dtype in zip(counts, dtypes, strict=True):
                self.memory.append(like.new_zeros(count, dtype=dtype))
        return [memory[:count].view(size) for memory, count, size in zip(self.memory, counts, sizes, strict=True)]

    def replay(self, graph: Graph, shape: Shape, tensors: dict[str, Tensor], past: Any) -> Tensor:
        self.copy_arguments(graph.inputs, tensors)
        if graph.past:
            self.copy_past(graph.past, shape, past)
        graph.replay()
        rows, count = tensors["positions"].shape
        if past is not None and not shape.only_reads:
            for number in range(len(graph.new_values) // 2):
                keys, values = graph.new_values[2 * number : 2 * number + 2]
                past.update(keys[:rows], values[:rows], number)  # copies them
        return graph.states[:rows, :count].clone()

    def copy_arguments(self, buffers: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        """Copies the arguments of a pass into buffers. Rows that are added repeat the first one, positions the last
        one; keys that are added come first and are hidden."""
        for name, value in tensors.items():
            buffer, rows = buffers[name], len(value)
            if name == "positions":
                buffer[:rows, : value.shape[1]] = value
                buffer[:rows, value.shape[1] :] = value[:, -1:]
            elif name in PER_KEY_ARGUMENTS and buffer.shape[-1] > value.shape[-1]:
                extra = buffer.shape[-1] - value.shape[-1]
                buffer[:rows, ..., :extra] = 0
                buffer[:rows, ..., extra:] = value
            else:
                buffer[:rows] = value
            if len(buffer) > rows:
                buffer[rows:] = buffer[:1]

    def copy_past(self, buffers: list[Tensor], shape: Shape, past: Any) -> None:
        """Copies cached keys and values into their buffers, unless these hold them already: those of a window stay the
        same from pass to pass."""
        tensors = [values for layer in layers_of(past) for values in (layer.keys, layer.values)]
        known, of_shape = self.held
        same_place = of_shape is not None and (of_shape.rows, of_shape.cached) == (shape.rows, shape.cached)
        if same_place and all(reference() is tensor for reference, tensor in zip(known, tensors, strict=True)):
            return
        rows, extra = len(tensors[0]), shape.cached - tensors[0].shape[2]
        torch._foreach_copy_([buffer[:rows, :, extra:] for buffer in buffers], tensors)
        if extra:  # hidden, but what is not finite would spread
            torch._foreach_zero_([buffer[:, :, :extra] for buffer in buffers])
        self.held = [ref(values) for values in tensors], shape


class GPUCapture:
    """Captures computations as CUDA graphs, which share their memory, because one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> tuple[Any, Callable[[], Any]]:
        # Kernels are chosen and loaded in a run of their own, on another stream than the default one, as a capture is.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        device = torch.cuda.current_stream().device.type
        # Under autocast, weights that were cast before would be constants of the graph.
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            with torch.cuda.stream(stream):
                states = compute()[0]
            torch.cuda.current_stream().wait_stream(stream)
            if not states.is_cuda:
                raise RuntimeError("the model is not on a GPU")
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as those of a data loader, may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                results = compute()
        return results, graph.replay


def run_again(compute: Compute) -> tuple[Any, Callable[[], Any]]:
    """What `GPUCapture` returns, on any device: each time, the computation runs on the same buffers as always."""
    results = compute()

    def replay() -> None:
        for old, new in zip(tree_leaves(results), tree_leaves(compute()), strict=True):
            old.copy_(new)

    return results, replay
