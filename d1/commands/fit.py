"""python -m d1 fit --model_path X --stage rl --gpus 8: show the memory that a stage needs, and the largest batch per
card. python -m d1 fit --config FILE: the same for a file of SFT or RL settings, and the hours that its run takes."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from d1.commands.recipes import PEAKS, UTILISATION, Recipe, hardware_of, read_recipe, time_table
from d1.distill.methods import METHODS as DISTILLATIONS
from d1.ranges import AMOUNT, BELOW_ONE, COUNT, NATURAL, Range
from d1.rl.methods import METHODS
from d1.sampling.settings import DTYPES

COMPLETIONS = 96  # per optimizer step of RL, as in run.sh
PER_STAGE: dict[
    str, dict[str, Any]
] = {  # what is computed unless flags say otherwise: d1's recipes, and the largest evaluation of run_eval.sh
    "sft": {"batch": 1, "length": 4096, "lora_targets": ["attention"]},
    # 200 of the prompt and 256 of the completion
    "rl": {"batch": 6, "length": 456, "lora_targets": ["all-linear"], "method": "d1"},
    "prefer": {"batch": 2, "length": 4096, "lora_targets": ["attention"]},
    "distill": {"batch": 1, "length": 456, "lora_targets": ["all-linear"], "method": "dparallel"},
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
    "distill": ("method", "views_at_once", "max_completion_length", "diffusion_steps"),
}


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
    parser.add_argument(
        "--length", type=COUNT, help="tokens per row, prompt and completion (default: the stage's recipe)"
    )
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
    given = {"gpus": 1, "zero": 0} | {name: value for name, value in vars(args).items() if value is not None}
    found = {"load_in_4bit": args.stage == "rl" and args.lora_r > 0, **PER_STAGE[args.stage], **given}
    rollout = {"steps_per_generation": max(1, COMPLETIONS // (found["batch"] * found["gpus"]))}
    return argparse.Namespace(**{**vars(args), **rollout, **found})


def of_preference(args: argparse.Namespace) -> dict[str, Any]:
    """What `FitSettings` is told of a preference run: without LoRA it always has a reference, and its batches
    contain views. A token of a view takes one byte, and an fp32 weight as well if it is on the canvas."""
    canvas = min(args.max_completion_length, args.length)
    stored = args.num_views * (args.length + 4 * canvas)
    return {"beta": 1.0, "views": args.num_views, "canvas": canvas, "stored": stored}


def of_distillation(args: argparse.Namespace) -> dict[str, Any]:
    """What `FitSettings` is told of a distillation: its states; whether it copies the trained weights (`beta` above 0);
    and its stored bytes: what the states hide, and for each compared place 36 bytes and the target's columns."""
    method, canvas = DISTILLATIONS[args.method], min(args.max_completion_length, args.length)
    steps = -(-args.diffusion_steps // method.values.get("num_iterations", 1))
    views = {"halves": 2, "trace": 1, "steps": steps}[method.states]
    places = {"halves": args.block_length, "trace": canvas, "steps": args.block_length * steps}[method.states]
    target = {"own": 1, "rival": 16, "best": 4 + 12 * method.values.get("teacher_top_k", 0)}[method.target]
    stored = 16 * args.length + 2 * views * canvas + places * (36 + target)
    return {"beta": float(method.teacher == "reference"), "views": views, "canvas": canvas, "stored": stored}


def of_method(args: argparse.Namespace, block_size: int | None) -> dict[str, Any]:
    """The fields of `FitSettings` that depend on the RL method: its views, their stored bytes, and whether it has a KL
    to a reference. The method's own values of the canvas win. Raises ValueError for settings that training refuses."""
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
    a_row = config.num_iterations * drawn_views(config, block_size) * (args.length + (4 * numbers + ids) * tokens)
    beta = config.beta if config.needs_reference else 0.0
    found = {"beta": beta, "views": most_views(config, block_size), "canvas": tokens}
    return found | {"stored": a_row * args.steps_per_generation}


BESIDE_CONFIG = ("command", "config", "card", "rows", "utilisation", "gpus", "zero")


def with_config(args: argparse.Namespace) -> tuple[argparse.Namespace, Recipe]:
    """The arguments that describe the run of `--config`, and that run. Raises ValueError for flags of the file's."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, value in vars(args).items():
        if name not in BESIDE_CONFIG and value != parser.get_default(name):
            raise ValueError(f"--{name} {value}: with --config, {args.config} says what the run is; change it there")
    known = hardware_of(args.config)
    hardware: dict[str, Any] = {"gpus": 1, "zero": 0, "card": "H100"} | known
    hardware |= {name: getattr(args, name) for name in hardware if getattr(args, name) is not None}
    if hardware["card"] not in PEAKS:
        raise ValueError(f"{args.config}: the speed of {hardware['card']} is not known: use --card")
    recipe = read_recipe(args.config, hardware["gpus"], args.rows)
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
    stages = {
        "sft": lambda: {"views": args.edit_turns, "views_at_once": args.edit_turns},
        "rl": lambda: of_method(args, block_size(config)),
        "prefer": lambda: of_preference(args),
        "distill": lambda: of_distillation(args),
    }
    settings = FitSettings(**{**fields, **stages.get(args.stage, dict)()})
    shown = {**vars(args), "beta": settings.beta}
    hidden = {"command", "model_path", "config", "card", "rows", "utilisation", *chain(*OWN.values())} - {
        *OWN.get(args.stage, ())
    }
    names = [name for name in shown if name not in hidden]
    values = {name: " ".join(map(str, value)) if isinstance(value := shown[name], list) else value for name in names}
    sys.stdout.write("Computed for " + ", ".join(f"{name} {value}" for name, value in values.items()) + "\n\n")
    sys.stdout.write(fit_table(config, settings) + "\n")
    if recipe is not None:
        sys.stdout.write("\n" + time_table(recipe, args) + "\n")
