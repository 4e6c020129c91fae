"""What a run of eval.py is called, and what determines its completions."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers

from d1.eval.prompts import Prompt
from d1.models.adapters import adapter_chain
from d1.models.load import named_dtype
from d1.sampling.flags import sampling_settings
from d1.tasks import TASKS

WHOLE_FILE = 16 << 20  # bytes up to which a weights file is hashed whole
PART = 4  # batches that a process takes at a time in 16 bits, where rows may end early: their last is not full
PIECES, PIECE = 256, 1 << 16  # larger ones are hashed in pieces spread over the file


def task_name(args: argparse.Namespace) -> str:
    return args.dataset if args.dataset in TASKS else Path(args.dataset).stem


def setup_name(args: argparse.Namespace) -> str:
    """`{task}_{model}_{gen_length}_{steps}`, the model being named after its folder."""
    path = Path(args.checkpoint_path or args.model_path)
    within_run = path.name.startswith("checkpoint-") or path.name == "merged"
    parts = [path.resolve().parent.name, path.name] if within_run else [path.resolve().name]
    if args.split != "test":
        parts.append(args.split)
    if args.prompt_protocol != "d1":
        parts.append(args.prompt_protocol)
    if args.few_shot:
        parts.append(f"fs{args.few_shot}")
    model = re.sub(r"[^\w.-]+", "-", "_".join([*parts, *filter(None, [args.suffix])]))
    return f"{task_name(args)}_{model}_{args.gen_length}_{args.diffusion_steps}"


def run_identity(args: argparse.Namespace, prompts: list[Prompt]) -> dict[str, Any]:
    """All that determines the completions: a run resumes only what agrees in it."""
    base, adapters = adapter_chain(args.model_path, args.checkpoint_path or None)
    asked = json.dumps([[prompt.index, prompt.text, prompt.ground_truth] for prompt in prompts], default=str)
    names = ("gen_length", "diffusion_steps", "block_length", "temperature", "cfg_scale", "remasking", "num_samples")
    # What is off is left out, so that runs begun before there was a choice can still be resumed.
    sampling = sampling_settings(vars(args))
    chosen = {"kv_cache": sampling.cache, "reveal": sampling.rule, "reveal_level": sampling.level}
    approximate = {"sampler": chosen} if args.sampler != "exact" else {}
    stop = {"eos_stop": True} if args.eos_stop else {}
    protocol = {"prompt_protocol": args.prompt_protocol} if args.prompt_protocol != "d1" else {}
    return {
        "weights": [weights_fingerprint(path) for path in (base, *adapters)],
        "problems": len(prompts),
        "prompts": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "seed": args.seed,
        "dtype": str(named_dtype(args.dtype)),
        **{name: getattr(args, name) for name in names},
        **approximate,
        **stop,
        **protocol,
        **({} if in_fp32(args) else rounding_identity(args)),
    }


def in_fp32(args: argparse.Namespace) -> bool:
    return named_dtype(args.dtype) == torch.float32


def may_end_early(args: argparse.Namespace) -> bool:
    """Whether one row may take fewer forward passes than another."""
    return args.eos_stop or sampling_settings(vars(args)).rule is not None


def part_size(args: argparse.Namespace) -> int:
    """Rows that a process takes from the queue at a time: one in fp32, where rows do not depend on those beside them;
    in 16 bits, as many as share a batch, one after the other."""
    if in_fp32(args):
        return 1
    return args.batch_size * (PART if may_end_early(args) else 1)


def rounding_identity(args: argparse.Namespace) -> dict[str, Any]:
    """What moves the last digit of a logit: in fp32 it changes no token, in 16 bits some (eval.py says how many)."""
    return {
        "batch_size": args.batch_size,
        "attn_implementation": args.attn_implementation or "default",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "libraries": f"torch {torch.__version__}, transformers {transformers.__version__}",
        **({"rows_in_turn": part_size(args)} if may_end_early(args) else {}),
    }


def weights_fingerprint(path: str) -> str:
    """A hash of the weights in a local folder, so that a retrained model is not taken for the one before.

    A hub name stands for itself. Files larger than `WHOLE_FILE` count by size and by pieces spread over them.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as weights:
            starts = [0] if size <= WHOLE_FILE else [i * (size - PIECE) // (PIECES - 1) for i in range(PIECES)]
            for start in starts:
                weights.seek(start)
                digest.update(weights.read(WHOLE_FILE if size <= WHOLE_FILE else PIECE))
    return digest.hexdigest()[:16]
