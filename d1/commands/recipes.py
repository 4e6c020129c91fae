"""A yaml file of SFT or RL settings as `d1 fit` reads it: the flags that describe the run, and the hours that it takes.

The hours are floating-point operations divided by a share of the cards' peak. They assume that every row has its full
length and every completion its largest number of passes; data loading, rewards, evaluations and communication are left
out.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HARDWARE = re.compile(r"^# Hardware: (\d+) GPUs? with \d+ GB(?: each)? \((.+)\)$", re.MULTILINE)
LAUNCH = re.compile(r"--config_file (\S+)")
ROWS = {"gsm8k": 7473, "simplescaling/s1K": 1000, "allenai/tulu-3-sft-mixture": 939343}  # to train on, by data set
TRIAL = 2.0  # hours
# Peak of dense matrix products in bf16 with sums in fp32, TFLOP/s, by the makers' data sheets.
PEAKS = {"RTX 4090": 165.0, "A100": 312.0, "L40S": 362.0, "H100": 989.0, "H200": 989.0}
UTILISATION = 0.4  # the share of the peak that a run reaches, an assumption


@dataclass(frozen=True)
class Recipe:
    """A run that a file describes.

    Attributes:
        flags: what `d1 fit` would be told of it.
        steps: optimizer steps.
        steps_per_rollout: of RL, else 1.
        tokens: purpose -> tokens of the whole run in forward passes; a backward pass counts as 1 where weights are
            frozen, and as 2 where they are trained.
        context: tokens that a token attends to.
    """

    flags: dict[str, Any]
    steps: int
    steps_per_rollout: int
    tokens: dict[str, float]
    context: int


def hardware_of(file: Path) -> dict[str, Any]:
    """`gpus`, `card` and `zero` by the comment at the top of a recipe, where they are there."""
    text, found = file.read_text(encoding="utf-8"), dict[str, Any]()
    if match := HARDWARE.search(text):
        found |= {"gpus": int(match[1]), "card": match[2]}
    if (match := LAUNCH.search(text)) and (launch := file.resolve().parents[1] / match[1]).is_file():
        config = yaml.safe_load(launch.read_text(encoding="utf-8"))
        found["zero"] = config.get("deepspeed_config", {}).get("zero_stage", 0)
    return found


def read_recipe(file: Path, gpus: int, rows: int | None) -> Recipe:
    """The run that a yaml file of RL (it has a `model_path`) or SFT settings describes, on this number of GPUs.

    Args:
        rows: to train on; None: those of the data set, if they are known.

    Raises:
        ValueError: the settings are wrong, or the number of rows is not known.
        OSError: the file cannot be read.
    """
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError(f"--config {file} must have lines NAME: VALUE, got {settings!r:.60}")
    return (of_rl if "model_path" in settings else of_sft)(file, gpus, rows)


def rows_of(name: str, data_file: str | None, rows: int | None) -> int:
    """How many rows a run trains on."""
    known = rows or (None if data_file else ROWS.get(name))
    if known is None:
        raise ValueError(f"the number of rows of {data_file or name} is not known: add --rows N")
    return known


def of_sft(file: Path, gpus: int, rows: int | None) -> Recipe:
    from d1.models.kinds import block_size
    from d1.sft.train import make_parser

    args = make_parser().parse_args(["--config", str(file)])
    count, batch = rows_of(args.train_data, None, rows), args.batch_size * (2 if args.complementary_masks else 1)
    batches = math.ceil((count - math.ceil(count * args.test_split)) / (args.batch_size * gpus))
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_epochs * -(-batches // args.grad_accum_steps))
    flags = {"model_path": args.model_name, "stage": "sft", "batch": batch, "length": args.max_length}
    flags |= {"dtype": args.dtype or "bfloat16", "lora_r": 0 if args.full_finetuning else args.lora_r}
    flags |= {name: getattr(args, name) for name in ("load_in_4bit", "gradient_checkpointing", "edit_turns")}
    flags["lora_targets"] = args.lora_target_modules
    size = block_size(config_of(args.model_name))
    streams = args.max_length * (2 if size else 1)  # a block-causal model reads the row clean and noised
    tokens = float(steps * args.grad_accum_steps * gpus * batch * streams * args.edit_turns)
    parts = {"forward": tokens * (1 + args.gradient_checkpointing), "backward": tokens * (1 + args.full_finetuning)}
    return Recipe(flags, steps, 1, parts, args.max_length)


def of_rl(file: Path, gpus: int, rows: int | None) -> Recipe:
    import torch

    from d1.models.kinds import block_size
    from d1.rl.plan import plan
    from d1.rl.train import make_parser

    words = ["--config", str(file), *([] if torch.cuda.is_available() else ["--use_cpu", "true"])]
    asked = yaml.safe_load(file.read_text(encoding="utf-8"))
    # One process here does what the GPUs do together.
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        if name in asked or name == "gradient_accumulation_steps":
            words += [f"--{name}", str(gpus * int(asked.get(name, 1)))]
    args, model = make_parser().parse_args_and_config(words)
    size = block_size(config_of(args.model_path))
    args.block_length = args.block_length or size or 32
    numbers = plan(args, rows_of(args.dataset, args.data_file, rows), size)
    flags = {"model_path": args.model_path, "stage": "rl", "batch": args.per_device_train_batch_size}
    length = args.max_prompt_length + args.max_completion_length
    flags |= {"length": length, "method": args.method, "beta": args.beta}
    flags["dtype"] = "bfloat16" if asked.get("bf16", True) else model.dtype or "float32"  # the default on a GPU
    names = ("max_completion_length", "diffusion_steps", "views_at_once", "edit_threshold", "gradient_checkpointing")
    flags |= {name: getattr(args, name) for name in names}
    flags |= {"steps_per_generation": args.steps_per_generation // gpus, "load_in_4bit": model.load_in_4bit}
    targets = model.lora_target_modules
    flags |= {"lora_r": model.lora_r if model.use_peft else 0}
    flags["lora_targets"] = [targets] if isinstance(targets, str) else targets
    completions = numbers["rollouts"] * numbers["completions per rollout"]
    # A block-causal model samples with a cache, and scores a clean text and a noised canvas.
    scored = length + (args.max_completion_length + size - 1 if size else 0)
    parts = {}
    for name, passes in numbers.items():
        head, _, purpose = name.partition(": ")
        if head != "passes per completion (maximum)":
            continue
        each = scored * (1 if model.use_peft or "backward" not in purpose else 2)
        if purpose == "sampling":
            each = size or length
            parts[purpose] = float(completions * (passes * each + (length if size else 0)))
        else:
            parts[purpose] = float(completions * passes * each)
    per_rollout = max(1, numbers["optimizer steps"] // max(1, numbers["rollouts"]))
    return Recipe(flags, numbers["optimizer steps"], per_rollout, parts, length)


def config_of(model_path: str) -> Any:
    from d1.models.adapters import adapter_chain
    from d1.models.kinds import native_config

    return native_config(adapter_chain(model_path, None)[0])[0]


def hours_of(recipe: Recipe, args: argparse.Namespace) -> tuple[dict[str, float], str]:
    """Hours by purpose, and the line that a recipe's head has about them."""
    from d1.models.fit import flops_per_token

    speed = PEAKS[args.card] * 1e12 * args.utilisation * args.gpus * 3600
    each = flops_per_token(config_of(recipe.flags["model_path"]), recipe.context)
    hours = {purpose: tokens * each / speed for purpose, tokens in recipe.tokens.items()}
    total = sum(hours.values())
    trial = int(TRIAL * recipe.steps / total) // recipe.steps_per_rollout * recipe.steps_per_rollout
    trial = min(max(trial, recipe.steps_per_rollout), recipe.steps)
    shown = f"{total:.0f}" if total >= 10 else f"{total:.1f}"
    return hours, f"Time: {shown} hours for {recipe.steps} steps; a trial of two hours: --max_steps {trial}"


def time_table(recipe: Recipe, args: argparse.Namespace) -> str:
    """The hours by purpose, what they assume, and their sum."""
    hours, line = hours_of(recipe, args)
    used = f"{PEAKS[args.card]:g} TFLOP/s each in bf16, of which {args.utilisation:.0%} are used"
    lines = [f"hours on {args.gpus} x {args.card} ({used}), every row at its full length:"]
    lines += [f"{purpose:<48}{value:>9.2f}" for purpose, value in hours.items()]
    return "\n".join([*lines, line])
