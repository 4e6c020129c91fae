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


def shape(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """The fields that Qwen's and LLaDA2's configs share."""
    return {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        **more,
    }


def llada(kv_heads: int, mlp: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    """LLaDA's own config, of 32 layers 4096 wide."""
    return {
        "model_type": "llada",
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": kv_heads,
        "mlp_hidden_size": mlp,
        "embedding_size": vocabulary,
        "vocab_size": vocabulary,
        "max_sequence_length": 4096,
        "weight_tying": tied,
        "mask_token_id": 5 if tied else 126336,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }


def llada2(layers: int, hidden: int, heads: int, mlp: int, expert: int) -> dict[str, Any]:
    """LLaDA2's config: 256 experts in 8 groups, 8 per token."""
    mixture = {"num_experts": 256, "num_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    return shape(layers, hidden, heads, 4, mlp, 157184, moe_intermediate_size=expert, head_dim=128, **mixture) | {
        "model_type": "llada2_moe"
    }


SDAR = {"model_type": "sdar", "head_dim": 128, "block_size": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "LLaDA-8B, LLaDA-1.5": llada(32, 12288, 126464, tied=False),
    "iLLaDA-8B": llada(8, 14336, 155136, tied=True),
    "Dream-7B, DreamOn-7B": shape(28, 3584, 28, 4, 18944, 152064, model_type="Dream", mask_token_id=151666),
    "SDAR-1.7B": shape(28, 2048, 16, 8, 6144, 151936, tie_word_embeddings=True, **SDAR),
    "SDAR-4B": shape(36, 2560, 32, 8, 9728, 151936, tie_word_embeddings=True, **SDAR),
    "SDAR-8B": shape(36, 4096, 32, 8, 12288, 151936, **SDAR),
    "SDAR-30B-A3B": shape(
        48, 2048, 32, 4, 6144, 151936, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, **SDAR
    )
    | {"model_type": "sdar_moe"},
    "Fast-dLLM v2 1.5B": shape(28, 1536, 12, 2, 8960, 151936, model_type="Fast_dLLM_Qwen", tie_word_embeddings=True),
    "Fast-dLLM v2 7B": shape(28, 3584, 28, 4, 18944, 152064, model_type="Fast_dLLM_Qwen"),
    "LLaDA-MoE-7B-A1B": shape(16, 2048, 16, 16, 8192, 157184, model_type="lladamoe", rope_theta=50000)
    | {"expert_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8},
    "LLaDA2 mini": llada2(20, 2048, 16, 5120, 512),
    "LLaDA2 flash": llada2(32, 4096, 32, 9216, 1024),
}
STAGES = {
    "evaluation": FitSettings("eval", batch=8, length=512),
    "RL, LoRA": FitSettings("rl", batch=6, length=456, canvas=256),
    "SFT, LoRA": FitSettings("sft", length=4096, gradient_checkpointing=True),
}


def table() -> str:
    """One row per model: parameters, and what one GPU must hold at each stage's batch, except for CUDA itself."""
    rows = []
    for name, fields in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            config = native_config(folder)[0]
        total, active = total_and_active(config)
        row = [name, f"{total / GB:.2f}", f"{active / GB:.2f}" if active < total else ""]
        for settings in STAGES.values():
            constant, per_row = activation_bytes(config, settings)
            held = sum(resident_bytes(config, settings).values()) + constant + per_row * settings.batch
            row.append(f"{held / GB:.0f}")
        rows.append(row)
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
