"""python -m d1 fit --model_path X --stage rl --gpus 8: show the memory that a stage needs, and the largest batch per
card. python -m d1 fit --config FILE: the same for a file of SFT or RL settings, and the hours that its run takes.

The hours are floating-point operations divided by a share of the cards' peak. They assume that every row has its full
length and every completion its largest number of passes; data loading, rewards, evaluations and communication are left
out.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from d1.distill.methods import METHODS as DISTILLATIONS
from d1.ranges import AMOUNT, BELOW_ONE, COUNT, NATURAL, Range
from d1.rl.methods import METHODS
from d1.sampling.settings import DTYPES

COMPLETIONS = 96  # per optimizer step of RL, as in run.sh
# What is computed unless flags say otherwise: d1's recipes, and the largest evaluation of run_eval.sh.
PER_STAGE: dict[str, dict[str, Any]] = {
    "sft": {"batch": 1, "length": 4096, "lora_targets": ["attention"]},
    # 200 of the prompt and 256 of the completion
    "rl": {"batch": 6, "length": 456, "lora_targets": ["all-linear"], "method": "d1"},
    "prefer": {"batch": 2, "length": 4096, "lora_targets": ["attention"]},
    "distill": {"batch": 1, "length": 456, "lora_targets": ["all-linear"], "method": "dparallel"},
    "eval": {"batch": 8, "length": 712},
}
SAMPLED = ("method", "views_at_once", "max_completion_length", "diffusion_steps")
OWN = {  # flags that only these stages read
    "rl": (*SAMPLED, "beta", "steps_per_generation", "edit_threshold"),
    "sft": ("edit_turns",),
    "prefer": ("num_views", "max_completion_length"),
    "distill": SAMPLED,
}
WITH_CONFIG = ("command", "config", "card", "rows", "utilisation", "gpus", "zero")  # flags that go with --config
HARDWARE = re.compile(r"^# Hardware: (\d+) GPUs? with \d+ GB(?: each)? \((.+)\)$", re.MULTILINE)
LAUNCH = re.compile(r"--config_file (\S+)")
ROWS = {"gsm8k": 7473, "simplescaling/s1K": 1000, "allenai/tulu-3-sft-mixture": 939343}  # to train on, by data set
TRIAL = 2.0  # hours
# Peak of dense matrix products in bf16 with sums in fp32, TFLOP/s, by the makers' data sheets.
PEAKS = {"RTX 4090": 165.0, "A100": 312.0, "L40S": 362.0, "H100": 989.0, "H200": 989.0}
UTILISATION = 0.4  # the share of the peak that a run reaches, an assumption


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_path", "--model_name", help="only its config.json is read")
    parser.add_argument("--stage", choices=["sft", "rl", "prefer", "distill", "eval"])
    recipe = parser.add_argument_group("a file of settings, whose values take the place of all other flags")
    recipe.add_argument("--config", type=Path, metavar="FILE", help="yaml of SFT or RL, such as those of recipes/")
    recipe.add_argument("--card", choices=PEAKS, help="for the hours (default: that of the file's head, or H100)")
    recipe.add_argument("--rows", type=COUNT, help="to train on (default: those of the data set, where known)")
    share = "share of the card's peak speed that the run reaches (default: %(default)s)"
    recipe.add_argument("--utilisation", type=Range(0, 1, open_low=True), default=UTILISATION, help=share)
    rows = "rows per GPU, of prefer completions, two per pair (default: the stage's recipe)"
    parser.add_argument("--batch", type=COUNT, help=rows)
    tokens = "tokens per row, prompt and completion (default: the stage's recipe)"
    parser.add_argument("--length", type=COUNT, help=tokens)
    parser.add_argument("--block_length", type=COUNT, default=32)
    parser.add_argument("--gpus", type=COUNT, help="(default: 1, or by the head of the --config file)")
    zero = "DeepSpeed ZeRO stage (default: 0, plain DDP, or by the head of the --config file)"
    parser.add_argument("--zero", type=int, choices=range(4), help=zero)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--lora_r", type=NATURAL, default=128, help="0: train all weights (default: %(default)s)")
    targets = "attention, all-linear or names of modules (default: the stage's recipe)"
    parser.add_argument("--lora_targets", nargs="+", help=targets)
    bits = "frozen weights in NF4 (default: in RL with LoRA)"
    parser.add_argument("--load_in_4bit", action=argparse.BooleanOptionalAction, help=bits)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    turns = "SFT: passes per batch, whose activations are all kept (default: %(default)s)"
    parser.add_argument("--edit_turns", type=COUNT, default=1, help=turns)
    rl = parser.add_argument_group("RL and distill, with the names and values of training")
    rl.add_argument("--method", choices=[*METHODS, *DISTILLATIONS], help="of the stage (default: d1, dparallel)")
    beta = "above 0, full training keeps a reference model (default: the method's)"
    rl.add_argument("--beta", type=AMOUNT, help=beta)
    rl.add_argument("--views_at_once", type=COUNT, default=1)
    rl.add_argument("--max_completion_length", type=COUNT, default=256, help="(default: %(default)s)")
    rl.add_argument("--diffusion_steps", type=COUNT, default=128, help="(default: %(default)s)")
    parser.add_argument("--num_views", type=COUNT, default=8, help="prefer: draws per bound (default: %(default)s)")
    rl.add_argument("--edit_threshold", type=BELOW_ONE, help="rollouts with edits, by a parallel sampler")
    rollout = f"micro-batches per rollout (default: {COMPLETIONS} completions / batch / gpus)"
    rl.add_argument("--steps_per_generation", type=COUNT, help=rollout)


def with_recipe(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments, with those of the stage's recipe where none were given."""
    given = {"gpus": 1, "zero": 0} | {name: value for name, value in vars(args).items() if value is not None}
    found = {"load_in_4bit": args.stage == "rl" and args.lora_r > 0, **PER_STAGE[args.stage], **given}
    rollout = {"steps_per_generation": max(1, COMPLETIONS // (found["batch"] * found["gpus"]))}
    return argparse.Namespace(**{**vars(args), **rollout, **found})


def of_preference(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `FitSettings` for a preference run: without LoRA it always has a reference."""
    canvas = min(args.max_completion_length, args.length)
    # A token of a view takes one byte, and an fp32 weight as well if it is on the canvas.
    stored = args.num_views * (args.length + 4 * canvas)
    return {"beta": 1.0, "views": args.num_views, "canvas": canvas, "stored": stored}


def of_distillation(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `FitSettings` for a distillation; `beta` is above 0 if it copies the trained weights."""
    method, canvas = DISTILLATIONS[args.method], min(args.max_completion_length, args.length)
    steps = -(-args.diffusion_steps // method.values.get("num_iterations", 1))
    views = {"halves": 2, "trace": 1, "steps": steps}[method.states]
    positions = {"halves": args.block_length, "trace": canvas, "steps": args.block_length * steps}[method.states]
    target = {"own": 1, "rival": 16, "best": 4 + 12 * method.values.get("teacher_top_k", 0)}[method.target]
    # What the states hide, and for each compared position 36 bytes and the target's.
    stored = 16 * args.length + 2 * views * canvas + positions * (36 + target)
    return {"beta": float(method.teacher == "reference"), "views": views, "canvas": canvas, "stored": stored}


def of_method(args: argparse.Namespace, block_size: int | None) -> dict[str, Any]:
    """The fields of `FitSettings` for an RL run: views, their stored bytes, and `beta`, 0 without a reference.

    The method's own values of the canvas win. Raises ValueError for settings that training refuses.
    """
    from d1.rl.config import DiffuGRPOConfig, drawn_views, most_views
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
    bytes_per_row = (
        config.num_iterations * drawn_views(config, block_size) * (args.length + (4 * numbers + ids) * tokens)
    )
    stored = bytes_per_row * args.steps_per_generation
    beta = config.beta if config.needs_reference else 0.0
    return {"beta": beta, "views": most_views(config, block_size), "canvas": tokens, "stored": stored}


# ---- the run that a file describes, and its hours


@dataclass(frozen=True)
class Recipe:
    """A run that a file describes.

    Attributes:
        flags: those of `d1 fit` that describe it.
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
    """`gpus`, `card` and `zero`, as far as the comment at the top of a recipe states them."""
    text, found = file.read_text(encoding="utf-8"), dict[str, Any]()
    if match := HARDWARE.search(text):
        found |= {"gpus": int(match[1]), "card": match[2]}
    if (match := LAUNCH.search(text)) and (launch := file.resolve().parents[1] / match[1]).is_file():
        config = yaml.safe_load(launch.read_text(encoding="utf-8"))
        found["zero"] = config.get("deepspeed_config", {}).get("zero_stage", 0)
    return found


def rows_of(name: str, data_file: str | None, rows: int | None) -> int:
    """The number of rows that a run trains on: `rows`, else that of the data set if it is known."""
    known = rows or (None if data_file else ROWS.get(name))
    if known is None:
        raise ValueError(f"the number of rows of {data_file or name} is not known: add --rows N")
    return known


def sft_recipe(file: Path, gpus: int, rows: int | None) -> Recipe:
    """The SFT run that a file describes, on this many GPUs."""
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


def rl_recipe(file: Path, gpus: int, rows: int | None) -> Recipe:
    """The RL run that a file describes, on this many GPUs; passes and rollouts come from the plan of the run itself."""
    import torch

    from d1.models.kinds import block_size
    from d1.rl.config import plan
    from d1.rl.train import make_parser

    words = ["--config", str(file), *([] if torch.cuda.is_available() else ["--use_cpu", "true"])]
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    # One process here does what the GPUs do together.
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        if name in settings or name == "gradient_accumulation_steps":
            words += [f"--{name}", str(gpus * int(settings.get(name, 1)))]
    args, model = make_parser().parse_args_and_config(words)
    size = block_size(config_of(args.model_path))
    args.block_length = args.block_length or size or 32
    numbers = plan(args, rows_of(args.dataset, args.data_file, rows), size)
    flags = {"model_path": args.model_path, "stage": "rl", "batch": args.per_device_train_batch_size}
    length = args.max_prompt_length + args.max_completion_length
    flags |= {"length": length, "method": args.method, "beta": args.beta}
    flags["dtype"] = "bfloat16" if settings.get("bf16", True) else model.dtype or "float32"  # the default on a GPU
    names = ("max_completion_length", "diffusion_steps", "views_at_once", "edit_threshold", "gradient_checkpointing")
    flags |= {name: getattr(args, name) for name in names}
    flags |= {"steps_per_generation": args.steps_per_generation // gpus, "load_in_4bit": model.load_in_4bit}
    targets = model.lora_target_modules
    flags["lora_targets"] = [targets] if isinstance(targets, str) else targets
    flags["lora_r"] = model.lora_r if model.use_peft else 0
    completions = numbers["rollouts"] * numbers["completions per rollout"]
    # A block-causal model samples with a cache, and scores a clean text and a noised canvas.
    scored = length + (args.max_completion_length + size - 1 if size else 0)
    parts = {}
    for name, passes in numbers.items():
        head, _, purpose = name.partition(": ")
        if head == "passes per completion (maximum)" and purpose == "sampling":
            parts[purpose] = float(completions * (passes * (size or length) + (length if size else 0)))
        elif head == "passes per completion (maximum)":
            each = scored * (1 if model.use_peft or "backward" not in purpose else 2)
            parts[purpose] = float(completions * passes * each)
    per_rollout = max(1, numbers["optimizer steps"] // max(1, numbers["rollouts"]))
    return Recipe(flags, numbers["optimizer steps"], per_rollout, parts, length)


def config_of(model_path: str) -> Any:
    from d1.models.adapters import adapter_chain
    from d1.models.kinds import native_config

    return native_config(adapter_chain(model_path, None)[0])[0]


def hours_of(recipe: Recipe, args: argparse.Namespace) -> tuple[dict[str, float], str]:
    """Hours by purpose, and the line about them at the head of a recipe."""
    from d1.models.fit import flops_per_token

    speed = PEAKS[args.card] * 1e12 * args.utilisation * args.gpus * 3600
    each = flops_per_token(config_of(recipe.flags["model_path"]), recipe.context)
    hours = {purpose: tokens * each / speed for purpose, tokens in recipe.tokens.items()}
    total = sum(hours.values())
    trial = int(TRIAL * recipe.steps / total) // recipe.steps_per_rollout * recipe.steps_per_rollout
    trial = min(max(trial, recipe.steps_per_rollout), recipe.steps)
    shown = f"{total:.0f}" if total >= 10 else f"{total:.1f}"
    return hours, f"Time: {shown} hours for {recipe.steps} steps; a trial of two hours: --max_steps {trial}"


def with_config(args: argparse.Namespace) -> tuple[argparse.Namespace, Recipe]:
    """The flags of the run in `--config`, a file of RL (it has a `model_path`) or SFT settings, and that run.

    Raises:
        ValueError: flags repeat what the file says, its settings are wrong, or the number of rows is not known.
        OSError: the file cannot be read.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, value in vars(args).items():
        if name not in WITH_CONFIG and value != parser.get_default(name):
            raise ValueError(f"--{name} {value}: with --config, {args.config} says what the run is; change it there")
    hardware: dict[str, Any] = {"gpus": 1, "zero": 0, "card": "H100"} | hardware_of(args.config)
    hardware |= {name: getattr(args, name) for name in hardware if getattr(args, name) is not None}
    if hardware["card"] not in PEAKS:
        raise ValueError(f"{args.config}: the speed of {hardware['card']} is not known: use --card")
    settings = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError(f"--config {args.config} must have lines NAME: VALUE, got {settings!r:.60}")
    recipe = (rl_recipe if "model_path" in settings else sft_recipe)(args.config, hardware["gpus"], args.rows)
    return argparse.Namespace(**{**vars(args), **hardware, **recipe.flags}), recipe


def run(args: argparse.Namespace) -> None:
    recipe = None
    if args.config is not None:
        args, recipe = with_config(args)
    elif args.model_path is None or args.stage is None:
        raise ValueError("fit needs --model_path and --stage, or a --config file of SFT or RL settings")
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
    known = DISTILLATIONS if args.stage == "distill" else METHODS
    if args.method is not None and args.method not in known:
        raise ValueError(f"--method {args.method} is none of --stage {args.stage}: use one of {', '.join(known)}")
    match args.stage:
        case "sft":
            fields |= {"views": args.edit_turns, "views_at_once": args.edit_turns}
        case "rl":
            fields |= of_method(args, block_size(config))
        case "prefer":
            fields |= of_preference(args)
        case "distill":
            fields |= of_distillation(args)
    settings = FitSettings(**fields)
    hidden = {"command", "model_path", "config", "card", "rows", "utilisation"}
    hidden |= {*chain(*OWN.values())} - {*OWN.get(args.stage, ())}
    shown = {name: value for name, value in {**vars(args), "beta": settings.beta}.items() if name not in hidden}
    words = (
        f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in shown.items()
    )
    sys.stdout.write(f"Computed for {', '.join(words)}\n\n")
    sys.stdout.write(fit_table(config, settings) + "\n")
    if recipe is not None:
        hours, line = hours_of(recipe, args)
        used = f"{PEAKS[args.card]:g} TFLOP/s each in bf16, of which {args.utilisation:.0%} are used"
        sys.stdout.write(f"\nhours on {args.gpus} x {args.card} ({used}), every row at its full length:\n")
        sys.stdout.writelines(f"{purpose:<48}{value:>9.2f}\n" for purpose, value in hours.items())
        sys.stdout.write(f"{line}\n")
