"""python -m d1 fit --model_path X --stage rl --gpus 8: show the memory that a stage needs, and the largest batch per
card."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from typing import Any

from d1.ranges import AMOUNT, BELOW_ONE, COUNT, NATURAL
from d1.rl.methods import METHODS
from d1.sampling.flags import DTYPES

COMPLETIONS = 96  # per optimizer step of RL, as in run.sh
PER_STAGE: dict[
    str, dict[str, Any]
] = {  # what is computed unless flags say otherwise: d1's recipes, and the largest evaluation of run_eval.sh
    "sft": {"batch": 1, "length": 4096, "lora_targets": ["attention"]},
    "rl": {"batch": 6, "length": 456, "lora_targets": ["all-linear"]},  # 200 of the prompt and 256 of the completion
    "prefer": {"batch": 2, "length": 4096, "lora_targets": ["attention"]},
    "eval": {"batch": 8, "length": 712},
}
OWN = {  # flags that only these stages read
    "rl": (
        "method",
        "beta",
        "views_at_once",
        "max_completion_length",
        "diffusion_steps",
        "steps_per_generation",
        "edit_threshold",
    ),
    "sft": ("edit_turns",),
    "prefer": ("num_views", "max_completion_length"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_path", "--model_name", required=True, help="only its config.json is read")
    parser.add_argument("--stage", choices=["sft", "rl", "prefer", "eval"], required=True)
    rows = "rows per GPU, of prefer completions, two per pair (default: the stage's recipe)"
    parser.add_argument("--batch", type=COUNT, help=rows)
    parser.add_argument(
        "--length", type=COUNT, help="tokens per row, prompt and completion (default: the stage's recipe)"
    )
    parser.add_argument("--block_length", type=COUNT, default=32)
    parser.add_argument("--gpus", type=COUNT, default=1)
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help="DeepSpeed ZeRO stage; 0 is plain DDP")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--lora_r", type=NATURAL, default=128, help="0: train all weights (default: %(default)s)")
    targets = "attention, all-linear or names of modules (default: the stage's recipe)"
    parser.add_argument("--lora_targets", nargs="+", help=targets)
    bits = "frozen weights in NF4 (default: in RL with LoRA)"
    parser.add_argument("--load_in_4bit", action=argparse.BooleanOptionalAction, help=bits)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    turns = "SFT: passes per batch, whose activations are all kept (default: %(default)s)"
    parser.add_argument("--edit_turns", type=COUNT, default=1, help=turns)
    rl = parser.add_argument_group("RL, with the names and values of training")
    rl.add_argument("--method", choices=list(METHODS), default="d1", help="(default: %(default)s)")
    rl.add_argument(
        "--beta", type=AMOUNT, help="above 0, full training keeps a reference model (default: the method's)"
    )
    rl.add_argument("--views_at_once", type=COUNT, default=1)
    rl.add_argument("--max_completion_length", type=COUNT, default=256, help="(default: %(default)s)")
    rl.add_argument("--diffusion_steps", type=COUNT, default=128, help="(default: %(default)s)")
    parser.add_argument("--num_views", type=COUNT, default=8, help="prefer: draws per bound (default: %(default)s)")
    rl.add_argument("--edit_threshold", type=BELOW_ONE, help="rollouts with edits, by a parallel sampler")
    rollout = f"micro-batches per rollout (default: {COMPLETIONS} completions / batch / gpus)"
    rl.add_argument("--steps_per_generation", type=COUNT, help=rollout)


def with_recipe(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments, with those of the stage's recipe where none were given."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    found = {"load_in_4bit": args.stage == "rl" and args.lora_r > 0, **PER_STAGE[args.stage], **given}
    rollout = {"steps_per_generation": max(1, COMPLETIONS // (found["batch"] * args.gpus))}
    return argparse.Namespace(**{**vars(args), **rollout, **found})


def of_preference(args: argparse.Namespace) -> dict[str, Any]:
    """What `FitSettings` is told of a preference run: without LoRA it always has a reference, and its batches
    contain views. A token of a view takes one byte, and an fp32 weight as well if it is on the canvas."""
    canvas = min(args.max_completion_length, args.length)
    stored = args.num_views * (args.length + 4 * canvas)
    return {"beta": 1.0, "views": args.num_views, "canvas": canvas, "stored": stored}


def of_method(args: argparse.Namespace, block_size: int | None) -> dict[str, Any]:
    """The fields of `FitSettings` that depend on the RL method: its views, their stored bytes, and whether it has a KL
    to a reference. The method's own values of the canvas win. Raises ValueError for settings that training refuses."""
    from d1.rl.config import DiffuGRPOConfig
    from d1.rl.plan import drawn_views, most_views
    from d1.scoring import ESTIMATORS

    canvas = {name: getattr(args, name) for name in ("max_completion_length", "diffusion_steps", "block_length")}
    given: dict[str, Any] = {name: value for name, value in canvas.items() if name not in METHODS[args.method].values}
    given |= {} if block_size is None else {"block_length": block_size}
    given |= {} if args.beta is None else {"beta": args.beta}
    if args.edit_threshold is not None:
        given |= {"sampler": "parallel", "reveal": "threshold", "edit_threshold": args.edit_threshold}
    # The smallest batch, because rows are counted elsewhere.
    batch: dict[str, Any] = {"per_device_train_batch_size": 2, "num_generations": 2}
    batch["gradient_accumulation_steps"] = args.steps_per_generation
    config = DiffuGRPOConfig(output_dir=".", method=args.method, use_cpu=True, bf16=False, **batch, **given)
    tokens = min(args.max_completion_length, args.length)
    # Per update and view: one byte per token for what is hidden, and fp32 weights and log-probs on the canvas. Updates
    # that divide the views among them store all of them.
    numbers = 1 + config.needs_old_logps + config.needs_reference
    # With edits, replay also keeps ids of 8 bytes: what each view shows and what it scores.
    ids = 16 if args.edit_threshold is not None and ESTIMATORS[config.estimator].replays_writes else 0
    a_row = config.num_iterations * drawn_views(config, block_size) * (args.length + (4 * numbers + ids) * tokens)
    beta = config.beta if config.needs_reference else 0.0
    found = {"beta": beta, "views": most_views(config, block_size), "canvas": tokens}
    return found | {"stored": a_row * args.steps_per_generation}


def run(args: argparse.Namespace) -> None:
    args = with_recipe(args)
    from d1.models.adapters import adapter_chain
    from d1.models.fit import FitSettings, fit_table
    from d1.models.kinds import block_size, native_config

    if args.load_in_4bit and args.lora_r == 0 and args.stage != "eval":
        raise ValueError("4-bit weights are frozen: --load_in_4bit needs a LoRA adapter (--lora_r of at least 1)")
    given = {name: value for name, value in vars(args).items() if value is not None}
    fields = {name: value for name, value in given.items() if name in FitSettings.__annotations__}
    base, _ = adapter_chain(args.model_path, None)
    config, _ = native_config(base)
    stages = {
        "sft": lambda: {"views": args.edit_turns, "views_at_once": args.edit_turns},
        "rl": lambda: of_method(args, block_size(config)),
        "prefer": lambda: of_preference(args),
    }
    settings = FitSettings(**{**fields, **stages.get(args.stage, dict)()})
    shown = {**vars(args), "beta": settings.beta}
    hidden = {"command", "model_path", *chain(*OWN.values())} - {*OWN.get(args.stage, ())}
    names = [name for name in shown if name not in hidden]
    values = {name: " ".join(map(str, value)) if isinstance(value := shown[name], list) else value for name in names}
    sys.stdout.write("Computed for " + ", ".join(f"{name} {value}" for name, value in values.items()) + "\n\n")
    sys.stdout.write(fit_table(config, settings) + "\n")
