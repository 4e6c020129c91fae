"""What the benchmarks share: models of random weights, fair races, peak memory, the machine's description."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from d1.models import prepare
from d1.scoring import mean_field_logps
from d1.show.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
MASK = 3
SIZES = {  # vocabulary, hidden, feed-forward, layers, heads
    "tiny": (2048, 32, 64, 2, 4),
    "pocket": (128, 64, 192, 4, 4),
    "60m": (26_000, 512, 2048, 8, 8),
    "wide": (126_464, 64, 128, 1, 4),  # LLaDA's vocabulary on next to no body: for the memory of logits
    "goal": (126_464, 512, 2048, 8, 8),
    "llada": (126_464, 4096, 12_288, 32, 32),  # LLaDA-8B
}


def random_model(size: str, vocabulary: int | None = None) -> Any:
    """A bidirectional Llama of a size in `SIZES`, with random weights.

    Raises:
        ValueError: LLaDA-8B without a GPU.
    """
    default, hidden, feed_forward, layers, heads = SIZES[size]
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=vocabulary or default,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        is_causal=False,
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if size == "llada" and device == "cpu":
        raise ValueError(
            "no CUDA device here: LLaDA-8B's shape needs one with about 40 GB (80 GB for the published scoring at "
            "d1's settings). --size tiny runs the same code on any machine"
        )
    with torch.device(device):  # made where it is used: a large model need not fit elsewhere first
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return prepare(model).eval()


def random_prompts(model: Any, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask (rows, length), without padding or special tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
    return ids, torch.ones_like(ids)


def scoring_inputs(model: Any, args: Any) -> tuple[torch.Tensor, ...]:
    """Prompts and their mask (rows, prompt), completions (rows, length), and prompt noise (rows, mu, prompt)."""
    ids, mask = random_prompts(model, args.rows, args.prompt)
    completion, _ = random_prompts(model, args.rows, args.length)
    noise = torch.rand(args.rows, args.mu, args.prompt, generator=torch.Generator().manual_seed(2)) < 0.15
    return ids, mask, completion, noise.to(ids.device)


def our_scores(model: Any, ids: torch.Tensor, mask: torch.Tensor, completion: torch.Tensor, noise: torch.Tensor) -> Any:
    """Log-probs (rows, mu, completion) as the RL trainer takes them: one mask after the other."""
    options: dict[str, Any] = {"mask_token_id": MASK, "gen_length": completion.shape[1]}
    parts = [mean_field_logps(model, ids, mask, completion, one, **options) for one in noise.unbind(1)]
    return torch.stack(parts, dim=1)


def update(model: Any, score: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
    """The log-probs under the first mask, and their gradients."""
    score(model, *inputs[:3], inputs[3][:, :1]).sum().backward()
    model.zero_grad()  # or the next call would free these gradients and its peak miss them


def describe() -> dict[str, Any]:
    """The machine: processor model, cores, threads, GPU."""
    model = platform.processor()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    machine = {"processor": model, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    machine |= {"PyTorch": torch.__version__}
    return machine | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def now() -> tuple[float, float]:
    """(wall, processor) clocks, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """(wall, processor) seconds of one call."""
    wall, cpu = now()
    run()
    after = now()
    return after[0] - wall, after[1] - cpu


def race(
    contestants: dict[str, Callable[[], Any]], repeats: int, base: str, clocked: bool = False, warm: bool = False
) -> dict[str, dict[str, float]]:
    """Times the contestants against each other, in one process, each round in the opposite order of the last.

    Every contestant runs once before the first round, unless all are `warm`. Ratios are taken within a round, against
    `base`: of processor seconds on a CPU, which its other users disturb less than the clock, and of the clock on a GPU.
    With `clocked` the contestants return their own (wall, processor) seconds.
    """
    if not warm:
        for run in contestants.values():
            run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(repeats):
        for name in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(contestants[name]() if clocked else seconds(contestants[name]))
    kind = 0 if torch.cuda.is_available() else 1
    results = {}
    for name, measured in times.items():
        ratios = [mine[kind] / other[kind] for mine, other in zip(measured, times[base], strict=True)]
        results[name] = {
            "wall_seconds": statistics.median(wall for wall, _ in measured),
            "cpu_seconds": statistics.median(cpu for _, cpu in measured),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
        }
    return results


def multiply_adds(run: Callable[[], Any]) -> int:
    """Multiplications, each with an addition, in the matrix products of a call; on a CPU all but attention's own."""

    def of_linear(states: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * math.prod(states) * weight[0]

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.mkldnn._linear_pointwise: of_linear})
    with counter:
        run()
    return counter.get_total_flops() // 2


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes the allocator held during a call, beyond those before it; temporaries inside an op included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def results_table(rows: dict[str, dict[str, float]]) -> str:
    """A table with one row a name; a ratio stands with the lowest and the highest of its rounds."""
    columns = [name for name in next(iter(rows.values())) if name not in ("ratio_low", "ratio_high")]

    def cell(row: dict[str, float], column: str) -> str:
        if column != "ratio":
            return f"{row[column]:.4g}" if column in row else ""
        low, high = row["ratio_low"], row["ratio_high"]
        return f"{row['ratio']:.3f}" + (f" ({low:.3g} to {high:.3g})" if low < high else "")

    body = [[name, *(cell(row, column) for column in columns)] for name, row in rows.items()]
    return markdown_table(["", *(name.replace("_", " ") for name in columns)], body)


def as_markdown(report: dict[str, Any]) -> str:
    """A report's machine and settings in a line each, its tables, and its remarks."""
    parts = [", ".join(f"{key} {value}" for key, value in report[of].items()) + "  " for of in ("machine", "settings")]
    for key, value in report.items():
        if key == "remarks":
            parts += ["", *value]
        elif key not in ("machine", "settings"):
            parts += ["", *([] if key == "results" else [f"{key}:", ""]), results_table(value).rstrip()]
    return "\n".join(parts) + "\n"


def check_counts(args: Any, *names: str) -> None:
    """Raises ValueError for a setting among `names` that is not positive."""
    for name in names:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")


def write_report(report: dict[str, Any], folder: str, name: str) -> None:
    """Writes `name.json` and `.md` into the folder, which is there, and prints the latter."""
    path = Path(folder)
    (path / f"{name}.json").write_text(json.dumps(report, indent=1))
    (path / f"{name}.md").write_text(as_markdown(report))
    sys.stdout.write(as_markdown(report))
