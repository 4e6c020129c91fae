"""What one GPU does in at most eight minutes: shares of its peak, and what each way to be faster saves.

    python -m benchmarks.gpu                     # all parts, the most important one first
    python -m benchmarks.gpu --parts small serve
    python -m benchmarks.gpu --tiny              # small shapes, on any machine: whether everything runs

Weights are random and have the true shapes: LLaDA-8B's, SDAR-1.7B's (block-causal) and SmolLM2-135M's. Each part prints
its table when it ends; after `--minutes` no further measurement starts, and what was left out is named. The parts are

    pass      a rollout's pass of 8B, 6 rows of 412 tokens: the weights alone, LoRA as it was (with casts of inputs), as
              RL has it (without), and the merged copy of `--merged_rollouts`
    small     rollouts of 135M: 12 and 64 rows, exact and `dual`, without and with CUDA graphs
    windows   rollouts of 8B: exact, `prefix`, `dual` and threshold, without and with graphs
    serve     tokens per second of the engine of `d1 serve` with 1.7B, without and with graphs
    update    scoring and an update of RL, 8B with LoRA: as it was, and as RL has it
    flash     attention with a dense mask, without one, and by packed texts
    head      a step's predictions with logits in chunks of one size, as it was, and of the card's (`chunk_factor`)
    sft       a step of SFT: 8B with LoRA, 135M with all weights
    peers     Transformers' own `generate` of a causal model of 135M, next to the samplers
    layers    rollouts of 8B and 135M with compiled layers

Times are means of a few calls after a warm-up; "host" is the time until a call returns, "peak" the share of `--peak`
that the matrix products of the weights and attention are.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

import d1.models.head
from benchmarks.machine import describe
from d1.masking import keyed_generator
from d1.models import prepare
from d1.models.adapters import skip_input_casts
from d1.models.attention import count_positions, over_queries
from d1.models.head import backbone_and_head, run_inside
from d1.models.merged import MergedCopy
from d1.ranges import POSITIVE
from d1.runs.cli import OneLineParser, run_script
from d1.runs.tables import markdown_table
from d1.sampling import SamplingSettings, rollout
from d1.sampling.graphs import COMPILED, COMPILED_MODELS, CompiledLayers, PassGraphs, compile_key, run_again
from d1.sampling.predict import predict
from d1.scoring import mean_field_logps
from d1.serve.engine import Completed, Engine, Row

logger = logging.getLogger(__name__)

MASK = 3
# Vocabulary, hidden, feed-forward, layers, heads, key-value heads, tokens per block
SHAPES = {
    "8b": (126_464, 4096, 12_288, 32, 32, 32, None),
    "1.7b": (151_936, 2048, 6144, 28, 16, 8, 4),
    "135m": (49_152, 576, 1536, 30, 9, 3, None),
    "tiny": (512, 64, 128, 2, 4, 2, None),
    "tiny blocks": (512, 64, 128, 2, 4, 2, 4),
}
LORA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # d1's
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)


@dataclass
class Bench:
    """The settings of a run, and the rows of the part that runs."""

    tiny: bool
    peak: float  # FLOP/s
    ends: float  # of the clock
    rows: list[list[str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def size(self, true: int, tiny: int) -> int:
        return tiny if self.tiny else true

    def measure(self, name: str, run: Callable[[], Any], *, flop: float = 0, tokens: int = 0, calls: int = 5) -> None:
        """Times `run` after a warm-up; `flop` and `tokens` are those of one call. A failure is a line of the table."""
        if time.monotonic() > self.ends:
            self.left_out.append(name)
            return
        try:
            run()
            wait()
            started, host = time.perf_counter(), 0.0
            for _ in range(1 if self.tiny else calls):
                before = time.perf_counter()
                run()
                host += time.perf_counter() - before
            wait()
            seconds = (time.perf_counter() - started) / (1 if self.tiny else calls)
        except (RuntimeError, ImportError, ValueError) as error:
            self.rows.append([name, f"{type(error).__name__}: {error}"[:120], "", "", ""])
            return
        share = f"{flop / seconds / self.peak:.1%}" if flop else ""
        speed = f"{tokens / seconds:,.0f}" if tokens else ""
        host_ms = 1e3 * host / (1 if self.tiny else calls)
        self.rows.append([name, f"{1e3 * seconds:.2f}", f"{host_ms:.2f}", share, speed])

    def show(self, part: str) -> None:
        head = [part, "ms", "host ms", "peak", "tokens/s"]
        sys.stdout.write(f"{markdown_table(head, self.rows)}\n\n")
        sys.stdout.flush()
        self.rows = []


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


# --- Models, inputs and what is compared ------------------------------------------------------------------------------


def config_of(bench: Bench, name: str) -> LlamaConfig:
    if bench.tiny:
        name = "tiny blocks" if SHAPES[name][-1] else "tiny"
    vocab, hidden, feed_forward, layers, heads, kv_heads, block = SHAPES[name]
    shape: dict[str, Any] = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": feed_forward}
    shape |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    shape |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "block_size": block, "is_causal": False}
    return LlamaConfig(**shape, max_position_embeddings=8192, tie_word_embeddings=name == "135m")


def random_model(bench: Bench, name: str, dtype: torch.dtype = DTYPE) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return prepare(AutoModelForCausalLM.from_config(config_of(bench, name), dtype=dtype)).eval()


def pass_flop(model: Any, tokens: int, keys: int) -> float:
    """FLOP of a forward pass of the layers over `tokens` tokens that each see `keys` keys; without LoRA."""
    config = model.config
    layers = [weight.numel() for name, weight in model.named_parameters() if ".layers." in name and "lora_" not in name]
    return 2 * sum(layers) * tokens + 4 * config.num_hidden_layers * config.hidden_size * tokens * keys


def with_lora(model: Any, dtype: torch.dtype, rank: int) -> Any:
    """d1's adapter on all seven projections; `unload` takes it off."""
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank // 2, lora_dropout=0.05, target_modules=LORA))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = nn.init.normal_(weight.data.to(dtype), std=1e-3)
    return model.eval()


def prompts_of(bench: Bench, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask (rows, length); the first row has padding, as nearly every batch of RL."""
    ids = torch.randint(4, 500, (rows, length), device=DEVICE, generator=keyed_generator(1, device=DEVICE))
    visible = torch.ones_like(ids)
    visible[0, : length // 16] = 0
    return ids, visible


@contextlib.contextmanager
def compiled(model: Any, compile: str) -> Iterator[None]:
    """Sampling runs as `--compile` says. On a CPU, for a test: graphs without a capture, layers without inductor."""
    if compile != "none":
        inner, graphs = d1.models.head.unwrapped(model), compile == "graphs"
        made: Any
        if graphs:
            made = PassGraphs(None if ON_GPU else run_again)
        else:
            made = CompiledLayers("inductor" if ON_GPU else "eager")
        setattr(inner, COMPILED, compile)
        COMPILED_MODELS[inner] = (compile, compile_key(inner)), made
    try:
        yield
    finally:
        if compile != "none":
            delattr(inner, COMPILED)
            del COMPILED_MODELS[inner]


def sample(model: Any, prompts: tuple[Tensor, Tensor], settings: SamplingSettings) -> Any:
    generators = [keyed_generator(row, device=DEVICE) for row in range(len(prompts[0]))] if settings.draws else None
    return rollout(model, *prompts, settings, mask_token_id=MASK, generator=generators)


def compare_samplers(
    bench: Bench, model: Any, rows: int, samplers: dict[str, dict[str, Any]], modes: tuple[str, ...], calls: int
) -> None:
    """Rollouts of 64 tokens in blocks of 32, one pass per two tokens."""
    length, block = bench.size(64, 8), model.config.block_size or bench.size(32, 4)
    prompts = prompts_of(bench, rows, bench.size(156, 12))
    for name, options in samplers.items():
        settings = SamplingSettings(length, block, length // 2, 0.9, **options)
        for compile in modes:
            with compiled(model, compile):
                run = lambda settings=settings: sample(model, prompts, settings)  # noqa: E731
                tokens = rows * length
                bench.measure(f"{rows} rows, {name}, compile {compile}", run, tokens=tokens, calls=calls)


# --- The parts --------------------------------------------------------------------------------------------------------


def measure_passes(bench: Bench, model: Any, names: dict[str, tuple[bool, bool]]) -> None:
    """A rollout's pass of 6 rows. `names`: whether it runs under autocast, and whether there is a dense mask."""
    rows, length = bench.size(6, 2), bench.size(412, 20)
    ids, visible = prompts_of(bench, rows, length)
    at = torch.arange(length - length // 16, length, device=DEVICE).expand(rows, -1)
    mask, positions = over_queries(visible, length), count_positions(visible)
    backbone = backbone_and_head(model)[0]
    flop = pass_flop(model, rows * length, length)
    for name, (autocast, dense) in names.items():

        @torch.no_grad()
        def run(autocast: bool = autocast, dense: bool = dense) -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                return backbone(ids, mask if dense else None, at, position_ids=positions)

        bench.measure(f"{rows} x {length}, {name}", run, flop=flop)


def part_pass(bench: Bench) -> None:
    model, rank = random_model(bench, "8b"), bench.size(128, 4)
    measure_passes(bench, model, {"weights alone": (False, False), "weights alone, dense mask": (False, True)})
    adapted = with_lora(model, torch.float32, rank)
    measure_passes(bench, adapted, {"LoRA fp32, autocast, dense mask, as it was": (True, True)})
    skip_input_casts(adapted)
    measure_passes(bench, adapted, {"LoRA fp32, autocast, dense mask": (True, True)})
    merged = MergedCopy(adapted)
    bench.measure("refresh of the merged copy", merged.refresh, calls=2)
    measure_passes(bench, merged.model, {"merged copy, dense mask": (False, True), "merged copy": (False, False)})
    del merged
    model = adapted.unload()
    adapted = with_lora(model, DTYPE, rank)
    measure_passes(bench, adapted, {"LoRA bf16, autocast, dense mask": (True, True), "LoRA bf16": (False, True)})


PLAIN_AND_GRAPHS = "none", "graphs"
EXACT: dict[str, dict[str, Any]] = {"exact": {}}
DUAL: dict[str, dict[str, Any]] = {"dual": {"sampler": "cached", "kv_cache": "dual"}}
PREFIX: dict[str, dict[str, Any]] = {"prefix": {"sampler": "cached", "kv_cache": "prefix"}}
THRESHOLD: dict[str, dict[str, Any]] = {"threshold": {"sampler": "parallel"}}


def part_small(bench: Bench) -> None:
    model = random_model(bench, "135m")
    for rows in (bench.size(12, 2), bench.size(64, 3)):
        compare_samplers(bench, model, rows, EXACT | DUAL, PLAIN_AND_GRAPHS, calls=2)


def part_windows(bench: Bench) -> None:
    model = random_model(bench, "8b")
    compare_samplers(bench, model, bench.size(6, 2), DUAL | PREFIX | EXACT | THRESHOLD, PLAIN_AND_GRAPHS, calls=1)


def part_serve(bench: Bench) -> None:
    """Rows of 64 tokens from the engine, 64 at a time; random weights reveal one token per pass at a threshold."""
    model = random_model(bench, "1.7b")
    count, length = bench.size(128, 4), bench.size(64, 8)
    settings = SamplingSettings(length, model.config.block_size, length, 0.9)
    prompt = [5] * bench.size(128, 6)
    for compile in PLAIN_AND_GRAPHS:
        with compiled(model, compile):
            engine = Engine(model, MASK, batch_size=bench.size(64, 2), queue_size=count, version="0")
            engine.thread.start()

            def serve(engine: Engine = engine) -> None:
                events: list[Any] = []
                rows = [Row(f"{row}", prompt, settings, (), 0, on_event=events.append) for row in range(count)]
                engine.submit(rows)
                while len(events) < count:
                    time.sleep(1e-3)
                if not all(isinstance(event, Completed) for event in events):
                    raise RuntimeError(str(events[0]))

            bench.measure(f"{count} rows, compile {compile}", serve, tokens=count * length, calls=1)
            engine.close()


def part_update(bench: Bench) -> None:
    model, rank = random_model(bench, "8b"), bench.size(128, 4)
    rows, prompt, canvas = bench.size(6, 2), bench.size(156, 12), bench.size(256, 8)
    ids, visible = prompts_of(bench, rows, prompt + canvas)
    noise = torch.rand(rows, prompt, device=DEVICE) < 0.15
    given = ids[:, :prompt], visible[:, :prompt], ids[:, prompt:], noise
    for name, dtype, with_casts in (
        ("fp32, as it was", torch.float32, True),
        ("fp32", torch.float32, False),
        ("bf16", DTYPE, True),
    ):
        adapted = with_lora(model, dtype, rank)
        if not with_casts:
            skip_input_casts(adapted)
        flop = pass_flop(adapted, rows * (prompt + canvas), prompt + canvas)

        def score(adapted: Any = adapted) -> Tensor:
            def compute(inner: Any) -> Tensor:
                return mean_field_logps(inner, *given, mask_token_id=MASK, gen_length=canvas)

            with torch.autocast(DEVICE, torch.bfloat16):
                return run_inside(adapted, compute)

        def update(adapted: Any = adapted, score: Callable[[], Tensor] = score) -> None:
            score().sum().backward()
            adapted.zero_grad()

        bench.measure(f"score, LoRA {name}", torch.no_grad()(score), flop=flop, calls=3)
        adapted.train()
        # The weights of the base have no gradients: a backward pass costs as much as a forward pass.
        bench.measure(f"update, LoRA {name}", update, flop=2 * flop, calls=3)
        model = adapted.unload()


def part_flash(bench: Bench) -> None:
    rows, length, heads, size = bench.size(6, 2), bench.size(412, 20), bench.size(32, 2), bench.size(128, 16)
    _, visible = prompts_of(bench, rows, length)
    query, key, value = torch.randn(3, rows, heads, length, size, device=DEVICE, dtype=DTYPE)
    flop = 4.0 * rows * heads * length * length * size
    dense = over_queries(visible, length)
    attention = nn.functional.scaled_dot_product_attention
    bench.measure("sdpa, no mask", lambda: attention(query, key, value), flop=flop)
    bench.measure("sdpa, dense mask", lambda: attention(query, key, value, attn_mask=dense), flop=flop)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def run(kernel: SDPBackend = kernel) -> Tensor:
            with sdpa_kernel(kernel):
                return attention(query, key, value)

        bench.measure(f"{kernel.name}, no mask", run, flop=flop)
    model, prompts = random_model(bench, "135m"), prompts_of(bench, bench.size(64, 2), bench.size(348, 12))
    settings = SamplingSettings(bench.size(64, 8), bench.size(32, 4), bench.size(32, 4))
    tokens = len(prompts[0]) * settings.gen_length
    for kernel_name in ("sdpa", "flash_attention_2"):

        def packed(kernel_name: str = kernel_name) -> Any:
            model.set_attn_implementation(kernel_name)
            return sample(model, prompts, settings)

        bench.measure(f"135M, exact, padded rows, {kernel_name}", packed, tokens=tokens, calls=2)


def part_head(bench: Bench) -> None:
    model, rows, count = random_model(bench, "8b"), bench.size(12, 2), bench.size(32, 4)
    states = torch.randn(1, rows, count, model.config.hidden_size, device=DEVICE, dtype=DTYPE)
    generators = [keyed_generator(row, device=DEVICE) for row in range(rows)]
    of_card = d1.models.head.chunk_factor(torch.device(DEVICE))
    for name, factor in (("as it was", 1), ("as RL has it", of_card)):
        for temperature in (0.0, 0.9):
            settings = SamplingSettings(count, count, count, temperature)

            @torch.no_grad()
            def run(settings: SamplingSettings = settings, factor: int = factor) -> Any:
                with mock.patch.object(d1.models.head, "chunk_factor", return_value=factor):
                    return predict(model, states, [count] * rows, settings, MASK, generators, torch.float32)

            bench.measure(f"{rows} x {count} positions, temperature {temperature}, {name}, x{factor}", run)


def part_sft(bench: Bench) -> None:
    for name, rows, length, lora in (("135m", 16, 1024, False), ("8b", 1, 4096, True)):
        rows, length = (2, 16) if bench.tiny else (rows, length)
        model = random_model(bench, name, DTYPE if lora else torch.float32)
        if lora:
            model = with_lora(model, torch.float32, bench.size(128, 4))
            skip_input_casts(model)
        ids, _ = prompts_of(bench, rows, length)
        hidden = torch.rand(ids.shape, device=DEVICE) < 0.5
        model.train()
        flop = pass_flop(model, rows * length, length) * (2 if lora else 3)
        if lora and not bench.tiny:
            model.gradient_checkpointing_enable()

        def step(model: Any = model, ids: Tensor = ids, hidden: Tensor = hidden) -> None:
            noised = ids.masked_fill(hidden, MASK)
            with torch.autocast(DEVICE, torch.bfloat16):
                states = backbone_and_head(model)[0](noised)
                logps, _ = d1.models.head.target_logps(model, states[hidden], ids[hidden])
            logps.sum().backward()
            model.zero_grad()

        how = "LoRA" if lora else "all weights"
        bench.measure(f"{name}, {how}, {rows} x {length}", step, flop=flop, tokens=rows * length, calls=3)


def part_peers(bench: Bench) -> None:
    """A causal model of the same shape writes one token per pass and row, with a cache of all earlier ones."""
    torch.manual_seed(0)
    config = config_of(bench, "135m")
    config.is_causal, config.block_size = True, None
    with torch.device(DEVICE):
        causal: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    length = bench.size(64, 8)
    for rows in (bench.size(12, 2), bench.size(64, 3)):
        ids, visible = prompts_of(bench, rows, bench.size(156, 12))

        @torch.no_grad()
        def write(ids: Tensor = ids, visible: Tensor = visible) -> Any:
            options = {"min_new_tokens": length, "max_new_tokens": length, "do_sample": False}
            return causal.generate(ids, attention_mask=visible, **options)

        bench.measure(f"{rows} rows, Transformers' generate", write, tokens=rows * length, calls=2)
    model = random_model(bench, "135m")
    for rows in (bench.size(12, 2), bench.size(64, 3)):
        compare_samplers(bench, model, rows, EXACT | PREFIX | DUAL | THRESHOLD, ("graphs",), calls=2)


def part_layers(bench: Bench) -> None:
    for name, rows in (("8b", bench.size(6, 2)), ("135m", bench.size(64, 3))):
        bench.rows.append([name, "", "", "", ""])
        compare_samplers(bench, random_model(bench, name), rows, EXACT | DUAL, ("none", "layers"), calls=2)


PARTS: dict[str, Callable[[Bench], None]] = {
    "pass": part_pass,
    "small": part_small,
    "windows": part_windows,
    "serve": part_serve,
    "update": part_update,
    "flash": part_flash,
    "head": part_head,
    "sft": part_sft,
    "peers": part_peers,
    "layers": part_layers,
}


def main(args: argparse.Namespace) -> None:
    if not (ON_GPU or args.tiny):
        raise ValueError("there is no GPU here: add --tiny to see whether everything runs")
    machine = ", ".join(f"{what} {value}" for what, value in describe().items())
    sys.stdout.write(f"{machine}; {DTYPE}; peak {args.peak:g} TFLOP/s\n\n")
    bench = Bench(args.tiny, 1e12 * args.peak, time.monotonic() + 60 * args.minutes)
    for part in args.parts:
        if time.monotonic() > bench.ends:
            bench.left_out.append(part)
            continue
        try:
            PARTS[part](bench)
        except Exception as error:  # such as a model that does not fit: the parts after it are measured all the same
            logger.exception("part %s", part)
            bench.rows.append([f"ended in {type(error).__name__}", "", "", "", ""])
        bench.show(part)
        gc.collect()  # models with adapters are cycles
        if ON_GPU:
            torch.cuda.empty_cache()
    if bench.left_out:
        sys.stdout.write(f"Left out, after {args.minutes:g} minutes: {'; '.join(bench.left_out)}\n")


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="in this order (default: all)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any machine")
    parser.add_argument("--minutes", type=POSITIVE, default=7.5, help="no measurement starts later (default: 7.5)")
    parser.add_argument(
        "--peak", type=POSITIVE, default=989.0, help="TFLOP/s of bf16 products (default: an H100's or H200's, 989)"
    )
    return parser


if __name__ == "__main__":
    run_script("gpu", lambda: main(make_parser().parse_args()))
