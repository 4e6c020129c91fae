"""The GPU memory that each released model needs, by `d1 fit` from its shape alone: the table of docs/models.md.

    python -m benchmarks.model_memory           # prints the table; a minute on a laptop core
    python -m benchmarks.model_memory --write   # puts it into docs/models.md

Shapes are those of the released configs and reports. On one GPU, in bf16: evaluation of 8 problems of 512 tokens; RL by
d1 with a LoRA of rank 128 on the attention, 6 completions of 200 + 256 tokens; SFT with the same LoRA and gradient
checkpointing, one row of 4096 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from d1.models.fit import GB, FitSettings, activation_bytes, resident_bytes, total_and_active
from d1.models.kinds import native_config
from d1.show.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- memory -->", "<!-- /memory -->"


COLUMNS = (
    *("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)
TIED = {"tie_word_embeddings": True}
SDAR: dict[str, Any] = {"head_dim": 128, "block_size": 4}
LLADA2: dict[str, Any] = {  # 8 of 256 experts per token, in 8 groups
    **{"head_dim": 128, "num_experts": 256, "num_shared_experts": 1},
    **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
}
SHAPES: dict[str, tuple[Any, ...]] = {  # the values of COLUMNS, and more fields; LLaDA is a Llama under other names
    "LLaDA-8B, LLaDA-1.5": ("llama", 32, 4096, 32, 32, 12288, 126464, {}),
    "iLLaDA-8B": ("llama", 32, 4096, 32, 8, 14336, 155136, TIED),
    "Dream-7B, DreamOn-7B": ("Dream", 28, 3584, 28, 4, 18944, 152064, {"mask_token_id": 151666}),
    "SDAR-1.7B": ("sdar", 28, 2048, 16, 8, 6144, 151936, TIED | SDAR),
    "SDAR-4B": ("sdar", 36, 2560, 32, 8, 9728, 151936, TIED | SDAR),
    "SDAR-8B": ("sdar", 36, 4096, 32, 8, 12288, 151936, SDAR),
    "SDAR-30B-A3B": (
        *("sdar_moe", 48, 2048, 32, 4, 6144, 151936),
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, **SDAR},
    ),
    "Fast-dLLM v2 1.5B": ("Fast_dLLM_Qwen", 28, 1536, 12, 2, 8960, 151936, TIED),
    "Fast-dLLM v2 7B": ("Fast_dLLM_Qwen", 28, 3584, 28, 4, 18944, 152064, {}),
    "LLaDA-MoE-7B-A1B": (
        *("lladamoe", 16, 2048, 16, 16, 8192, 157184),
        {"expert_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "rope_theta": 50000},
    ),
    "LLaDA2 mini": ("llada2_moe", 20, 2048, 16, 4, 5120, 157184, {"moe_intermediate_size": 512, **LLADA2}),
    "LLaDA2 flash": ("llada2_moe", 32, 4096, 32, 4, 9216, 157184, {"moe_intermediate_size": 1024, **LLADA2}),
}
STAGES = {
    "evaluation": FitSettings("eval", batch=8, length=512),
    "RL, LoRA": FitSettings("rl", batch=6, length=456, canvas=256),
    "SFT, LoRA": FitSettings("sft", length=4096, gradient_checkpointing=True),
}


def config_of(shape: tuple[Any, ...]) -> Any:
    """The native config of a row of `SHAPES`."""
    common = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
    with tempfile.TemporaryDirectory() as folder:
        fields = common | dict(zip(COLUMNS, shape, strict=False)) | shape[-1]
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return native_config(folder)[0]


def total_bytes(config: Any, settings: FitSettings) -> float:
    """What one GPU must hold, except for CUDA itself."""
    constant, per_row = activation_bytes(config, settings)
    return sum(resident_bytes(config, settings).values()) + constant + per_row * settings.batch


def table() -> str:
    """One row per model: parameters, and what one GPU must hold at each stage's batch."""
    rows = []
    for name, shape in SHAPES.items():
        config = config_of(shape)
        total, active = total_and_active(config)
        row = [name, f"{total / GB:.2f}", f"{active / GB:.2f}" if active < total else ""]
        rows.append(row + [f"{total_bytes(config, settings) / GB:.0f}" for settings in STAGES.values()])
    return markdown_table(["model", "billion parameters", "active", *(f"{name}, GB" for name in STAGES)], rows)


def main(args: argparse.Namespace) -> None:
    found = table()
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{rest.partition(END)[2]}")
    sys.stdout.write(found + "\n")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/models.md, between its marks")
    return parser


if __name__ == "__main__":
    main(make_parser().parse_args())
