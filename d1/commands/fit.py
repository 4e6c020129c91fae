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
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml

from d1.ranges import AMOUNT, BELOW_ONE, COUNT, NATURAL, Range, setting
from d1.rl.methods import METHODS
from d1.runs.cli import read_settings
from d1.sampling.settings import DTYPES

COMPLETIONS = 96  # per optimizer step of RL, as in run.sh
# What is computed unless flags say otherwise: d1's recipes, and the largest evaluation of run_eval.sh.
PER_STAGE: dict[str, dict[str, Any]] = {
    "sft": {"batch": 1, "length": 4096, "lora_targets": ["attention"]},
    # 200 of the prompt and 256 of the completion
    "rl": {"batch": 6, "length": 456, "lora_targets": ["all-linear"], "method": "d1"},
    "prefer": {"batch": 2, "length": 4096, "lora_targets": ["attention"]},
    "eval": {"batch": 8, "length": 712},
}
WITH_CONFIG = ("config", "card", "rows", "utilisation", "gpus", "zero")  # flags that go with --config
READ_BY = {  # flags that not all stages read
    **dict.fromkeys(("lora_r", "lora_targets", "gradient_checkpointing"), ("sft", "rl", "prefer")),
    "block_length": ("rl", "eval"),
    "edit_turns": ("sft",),
    "num_views": ("prefer",),
    "views_at_once": ("rl", "prefer"),
    "max_completion_length": ("rl", "prefer"),
    **dict.fromkeys(("method", "beta", "diffusion_steps", "edit_threshold", "steps_per_generation"), ("rl",)),
}
HARDWARE_DEFAULTS: dict[str, Any] = {"gpus": 1, "zero": 0, "card": "H100"}
HARDWARE = re.compile(r"^# Hardware: (\d+) GPUs? with \d+ GB(?: each)? \((.+)\)$", re.MULTILINE)
LAUNCH = re.compile(r"--config_file (\S+)")
CHECKOUT = Path(__file__).parents[2]
ROWS = {  # to train on, by data set
    **{"gsm8k": 7473, "simplescaling/s1K": 1000, "allenai/tulu-3-sft-mixture": 939343},
    # Of its folder in $D1_FILES, and of these problems with new numbers, as the recipe of SmolLM2 makes them
    **{"svamp": 2211, "runs/svamp.jsonl": 8737},
}
TRIAL = 2.0  # hours
# Peak of dense matrix products in bf16 with sums in fp32, TFLOP/s, by the makers' data sheets.
PEAKS = {"RTX 4090": 165.0, "A100": 312.0, "L40S": 362.0, "H100": 989.0, "H200": 989.0}
# The share of the peak that a run reaches: RL's is that of LLaDA-8B on an H200 (benchmarks/RESULTS.md), SFT's is an
# assumption.
UTILISATION = {"sft": 0.4, "rl": 0.3}


SHARES = ", ".join(f"{share} in {stage.upper()}" for stage, share in UTILISATION.items())


@dataclass(frozen=True, kw_only=True)
class FitFlags:
    model_path: str | None = setting(None, "only its config.json is read", aliases=["--model_name"])
    stage: str | None = setting(None, choices=PER_STAGE)

    config: Path | None = setting(
        None,
        "yaml of SFT or RL, such as those of recipes/",
        type=Path,
        metavar="FILE",
        group="a file of settings, whose values take the place of all other flags",
    )
    card: str | None = setting(None, "for the hours (default: that of the file's head, or H100)", choices=PEAKS)
    rows: Annotated[int | None, COUNT] = setting(None, "to train on (default: those of the data set, where known)")
    utilisation: Annotated[float | None, Range(0, 1, open_low=True)] = setting(
        None, f"share of the card's peak speed that the run reaches (default: {SHARES})"
    )

    batch: Annotated[int | None, COUNT] = setting(
        None, "rows per GPU, of prefer completions, two per pair", group="one stage (default: d1's recipe)"
    )
    length: Annotated[int | None, COUNT] = setting(None, "tokens per row, prompt and completion")
    block_length: Annotated[int, COUNT] = setting(32)
    gpus: Annotated[int | None, COUNT] = setting(None, "(default: 1, or by the head of the --config file)")
    zero: int | None = setting(
        None, "DeepSpeed ZeRO stage; 3 also for FSDP2 (default: as for --gpus, or 0)", type=int, choices=range(4)
    )
    dtype: str = setting("bfloat16", choices=DTYPES)
    lora_r: Annotated[int, NATURAL] = setting(128, "0: train all weights (default: %(default)s)")
    lora_targets: list[str] | None = setting(None, "attention, all-linear or names of modules", nargs="+")
    load_in_4bit: bool | None = setting(
        None, "frozen weights in NF4 (default: in RL with LoRA)", action=argparse.BooleanOptionalAction
    )
    gradient_checkpointing: bool = setting(False)
    edit_turns: Annotated[int, COUNT] = setting(1, "SFT: passes per batch (default: %(default)s)")
    num_views: Annotated[int, COUNT] = setting(8, "prefer: draws per bound (default: %(default)s)")

    method: str | None = setting(None, choices=METHODS, group="RL, with the names and values of training")
    beta: Annotated[float | None, AMOUNT] = setting(
        None, "above 0, full training keeps a reference (default: the method's)"
    )
    views_at_once: Annotated[int, COUNT] = setting(1)
    max_completion_length: Annotated[int, COUNT] = setting(256, "(default: %(default)s)")
    diffusion_steps: Annotated[int | None, COUNT] = setting(None, "(default: half of max_completion_length)")
    edit_threshold: Annotated[float | None, BELOW_ONE] = setting(None, "rollouts with edits, by a parallel sampler")
    merged_rollouts: bool | None = setting(
        None,
        "count a copy of the weights with the adapter merged (default: it is shown alone)",
        action=argparse.BooleanOptionalAction,
    )
    steps_per_generation: Annotated[int | None, COUNT] = setting(
        None, f"micro-batches per rollout (default: {COMPLETIONS} completions / batch / gpus)"
    )


@dataclass(frozen=True, kw_only=True)
class FitRun(FitFlags):
    """The flags with the values of the stage's recipe where none were given."""

    model_path: str
    stage: str
    batch: int
    length: int
    gpus: int
    zero: int
    card: str
    load_in_4bit: bool
    steps_per_generation: int


def check_flags(flags: FitFlags) -> None:
    """Raise ValueError if the model or the stage is missing, or if a flag is given that the stage does not read."""
    if flags.model_path is None or flags.stage is None:
        raise ValueError("fit needs --model_path and --stage, or a --config file of SFT or RL settings")
    for name in ("card", "rows", "utilisation"):
        if getattr(flags, name) is not None:
            raise ValueError(f"--{name} would do nothing: hours are computed for a --config file alone")
    for flag in fields(FitFlags):
        stages = READ_BY.get(flag.name, (flags.stage,))
        if flags.stage not in stages and getattr(flags, flag.name) != flag.default:
            raise ValueError(f"--{flag.name} would do nothing: --stage {flags.stage} does not read it")


def with_recipe(args: FitFlags) -> FitRun:
    """The arguments, with those of the stage's recipe where none were given."""
    values = vars(args) | {"load_in_4bit": args.stage == "rl" and args.lora_r > 0}
    values.update(PER_STAGE[str(args.stage)])
    values.update(HARDWARE_DEFAULTS)
    values.update({name: value for name, value in vars(args).items() if value is not None})
    if values.get("steps_per_generation") is None:
        values["steps_per_generation"] = max(1, COMPLETIONS // (values["batch"] * values["gpus"]))
    return FitRun(**values)


def preference_sizes(args: FitRun) -> dict[str, Any]:
    """The fields of `FitSettings` for a preference run: without LoRA it always has a reference."""
    canvas = min(args.max_completion_length, args.length)
    # A token of a view takes one byte, and an fp32 weight as well if it is on the canvas.
    stored = args.num_views * (args.length + 4 * canvas)
    return {"beta": 1.0, "views": args.num_views, "canvas": canvas, "stored": stored}


UNIFORM_NOISE = {  # what RL of a model with uniform noise needs
    "estimator": "accepted",
    "p_mask_prompt": 0.0,
    "self_conditioning": False,
    "sampler": "parallel",
    "reveal": "entropy",
    "temperature": 0.8,
    "end_temperature": 0.4,
}


def method_sizes(args: FitRun, block_size: int | None, uniform: bool = False) -> dict[str, Any]:
    """The fields of `FitSettings` for an RL run: views, their stored bytes, and `beta`, 0 without a reference.
    `uniform`: the model has uniform noise.

    The method's own values of the canvas win. Raises ValueError for settings that training refuses.
    """
    from d1.commands.rl_memory import fields_of
    from d1.rl.config import DiffuGRPOConfig

    method = str(args.method)
    group = METHODS[method].scale.get("num_generations", 2)
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": args.steps_per_generation,
        "steps_per_generation": args.steps_per_generation,
        # One group: rows are counted elsewhere.
        "per_device_train_batch_size": group,
        "num_generations": group,
    }
    for name in ("max_completion_length", "diffusion_steps", "block_length"):
        if name not in METHODS[method].values and getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    if block_size is not None:
        settings["block_length"] = block_size
    if args.beta is not None:
        settings["beta"] = args.beta
    if args.edit_threshold is not None:
        settings.update(sampler="parallel", reveal="threshold", edit_threshold=args.edit_threshold)
    if uniform:
        settings.update(UNIFORM_NOISE)
    config = DiffuGRPOConfig(output_dir=".", method=method, use_cpu=True, bf16=False, **settings)
    canvas = min(args.max_completion_length, args.length)
    return fields_of(config, args.length, canvas, block_size, uniform)


# ---- the run that a file describes, and its hours


class Recipe(NamedTuple):
    """A run that a file describes."""

    flags: dict[str, Any]  # those of `d1 fit`
    sizes: dict[str, Any]  # of RL: fields of `FitSettings` that its settings determine
    config: Any  # of its model
    steps: int  # of the optimizer
    steps_per_rollout: int  # of RL, else 1
    # Purpose -> tokens of the whole run in forward passes; a backward pass counts as 1 where weights are frozen, and as
    # 2 where they are trained.
    tokens: dict[str, float]
    context: int  # tokens that a token attends to


def hardware_of(file: Path) -> dict[str, Any]:
    """`gpus`, `card` and `zero`, as far as the comment at the top of a recipe states them."""
    text = file.read_text(encoding="utf-8")
    hardware: dict[str, Any] = {}
    cards = HARDWARE.search(text)
    if cards:
        hardware["gpus"] = int(cards[1])
        hardware["card"] = cards[2]
    launch_line = LAUNCH.search(text)
    if launch_line is None:
        return hardware
    # The path in the command counts from the repository's folder. A copy of the file may lie elsewhere.
    for folder in (file.resolve().parent.parent, Path.cwd(), CHECKOUT):
        launch_file = folder / launch_line[1]
        if launch_file.is_file():
            launch = yaml.safe_load(launch_file.read_text(encoding="utf-8"))
            hardware["zero"] = launch.get("deepspeed_config", {}).get("zero_stage", 0)
            if launch.get("distributed_type") == "FSDP":  # weights, gradients and optimizer are split as by ZeRO-3
                hardware["zero"] = 3
            break
    return hardware


def rows_of(name: str, data_file: str | None, rows: int | None) -> int:
    """The number of rows that a run trains on: `rows`, else that of the data set if it is known."""
    count = rows
    if not count and not data_file:
        count = ROWS.get(name)
    if not count:
        raise ValueError(f"the number of rows of {data_file or name} is not known: add --rows N")
    return count


def has_rl_settings(file: Path) -> bool:
    """Whether a file's settings are those of RL, and not of SFT: the parser of RL knows more of their names."""
    from d1.sft.train import make_parser as sft_parser

    settings = read_settings(file)
    unknown_to_sft = unknown_names(settings, sft_parser())
    if not unknown_to_sft:
        return False
    from d1.rl.train import make_parser as rl_parser  # imports TRL

    return len(unknown_names(settings, rl_parser())) < len(unknown_to_sft)


def unknown_names(settings: Iterable[Any], parser: argparse.ArgumentParser) -> list[Any]:
    """The settings that a parser has no flag for."""
    flags = {flag for action in parser._actions for flag in action.option_strings}
    return [name for name in settings if f"--{name}" not in flags]


def sft_recipe(file: Path, gpus: int, rows: int | None) -> Recipe:
    """The SFT run that a file describes, on this many GPUs."""
    from d1.models.kinds import block_size, has_masks
    from d1.sft.train import make_parser

    args = make_parser().parse_args(["--config", str(file)])
    config = config_of(args.model_name)

    # The optimizer steps
    count = rows_of(args.train_data, None, rows)
    held_out = math.ceil(count * args.test_split)
    train_rows = count - held_out
    batches = math.ceil(train_rows / (args.batch_size * gpus))
    steps = args.max_steps
    if steps <= 0:
        steps = math.ceil(args.num_epochs * -(-batches // args.grad_accum_steps))

    # What takes memory
    batch = args.batch_size
    if args.complementary_masks:
        batch *= 2
    dtype = args.dtype
    if not dtype:
        dtype = "float32" if args.bf16 == "false" else "bfloat16"
    flags = {
        "model_path": args.model_name,
        "stage": "sft",
        "batch": batch,
        "length": args.max_length,
        "dtype": dtype,
        "lora_r": 0 if args.full_finetuning else args.lora_r,
        "lora_targets": args.lora_target_modules,
        "load_in_4bit": args.load_in_4bit,
        "gradient_checkpointing": args.gradient_checkpointing,
        "edit_turns": args.edit_turns,
    }

    # The tokens of a row that a forward pass processes: a block-causal model reads the row clean and noised, and one
    # with uniform noise reads the row and a canvas.
    streams = args.max_length * (2 if block_size(config) else 1)
    if not has_masks(config):
        streams = args.max_length + config.canvas_length
    rows_of_run = float(steps * args.grad_accum_steps * gpus * batch * args.edit_turns)
    tokens = rows_of_run * streams
    parts = {"forward": tokens * (1 + args.gradient_checkpointing), "backward": tokens * (1 + args.full_finetuning)}
    if not has_masks(config):
        # The canvases of a batch are decoded once more, without gradients, if one of its rows is conditioned.
        is_conditioned = 1 - (1 - args.self_conditioning) ** batch
        parts["forward"] += rows_of_run * config.canvas_length * is_conditioned
    parts["evaluation"] = float(steps // args.eval_steps * held_out * args.eval_draws * streams)
    return Recipe(flags, {}, config, steps, 1, parts, args.max_length)


def rl_recipe(file: Path, gpus: int, rows: int | None) -> Recipe:
    """The RL run that a file describes, on this many GPUs; passes and rollouts come from the plan of the run itself."""
    import torch

    from d1.commands.rl_memory import fields_of
    from d1.models.attention import has_causal_context
    from d1.models.kinds import block_size, has_masks
    from d1.rl.config import plan
    from d1.rl.train import make_parser

    words = ["--config", str(file), *([] if torch.cuda.is_available() else ["--use_cpu", "true"])]
    settings = read_settings(file)
    # One process here does what the GPUs do together.
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        if name in settings or name == "gradient_accumulation_steps":
            words += [f"--{name}", str(gpus * int(settings.get(name, 1)))]
    args, model = make_parser().parse_args_and_config(words)
    if args.model_path is None:
        raise ValueError(f"--config {file} names no model: add a line model_path: FOLDER_OR_NAME to a copy of it")
    config = config_of(args.model_path)
    size = block_size(config)
    args.block_length = args.block_length or size or 32
    sampling = args.sampling_settings(config)  # which says how a block's first token is predicted
    if has_causal_context(config):
        size = args.block_length
    numbers = plan(args, rows_of(args.dataset, args.data_file, rows), size)
    length = args.max_prompt_length + args.max_completion_length

    # What takes memory on one GPU
    args.gradient_accumulation_steps //= gpus
    args.steps_per_generation //= gpus
    sizes = fields_of(args, length, args.max_completion_length, size, uniform=not has_masks(config))
    dtype = "bfloat16"  # the default on a GPU
    if not settings.get("bf16", True):
        dtype = model.dtype or "float32"
    targets = model.lora_target_modules
    if isinstance(targets, str):
        targets = [targets]
    flags = {
        "model_path": args.model_path,
        "stage": "rl",
        "method": args.method,
        "beta": args.beta,
        "batch": args.per_device_train_batch_size,
        "length": length,
        "max_completion_length": args.max_completion_length,
        "diffusion_steps": args.diffusion_steps,
        "block_length": args.block_length,
        "edit_threshold": args.edit_threshold,
        "views_at_once": args.views_at_once,
        "steps_per_generation": args.steps_per_generation,
        "merged_rollouts": args.merged_rollouts,
        "gradient_checkpointing": args.gradient_checkpointing,
        "dtype": dtype,
        "load_in_4bit": model.load_in_4bit,
        "lora_r": model.lora_r if model.use_peft else 0,
        "lora_targets": targets,
    }

    # The tokens of a completion that its passes process. A block-causal model samples with a cache, and scores a clean
    # text and a noised canvas.
    scored = length
    if size:
        scored += args.max_completion_length + size - 1
    window = None  # of all passes of a completion, with a cache that computes a part of the row
    if not size and sampling.cache in ("dual", "prefix"):
        window = window_tokens(sampling, length, shift=getattr(config, "predicts_next_token", False))
    completions = numbers["rollouts"] * numbers["completions per rollout"]
    parts = {}
    for name, passes in numbers.items():
        head, _, purpose = name.partition(": ")
        if head != "passes per completion (maximum)":
            continue
        if purpose.startswith("sampling") and window is not None:
            tokens = window * passes / sampling.max_passes()
        elif purpose == "sampling" and size:
            tokens = passes * size + length
        elif purpose == "sampling":
            tokens = passes * length
        elif "backward" in purpose and not model.use_peft:
            tokens = 2 * scored * passes
        else:
            tokens = scored * passes
        parts[purpose] = float(completions * tokens)
    per_rollout = max(1, numbers["optimizer steps"] // max(1, numbers["rollouts"]))
    return Recipe(flags, sizes, config, numbers["optimizer steps"], per_rollout, parts, length)


def window_tokens(sampling: Any, length: int, shift: bool) -> int:
    """The tokens of a row of `length` tokens that the passes of a completion process with the cache "dual" or "prefix":
    the first pass of each block all of them, later ones the block ("dual") or the canvas from there on. A model whose
    logits predict the next token (`shift`) processes the token before, too."""
    tokens = start = 0
    for steps in sampling.schedule():
        window = sampling.block_length
        if sampling.cache == "prefix":
            window = sampling.gen_length - start
        tokens += length + (len(steps) + sampling.post_steps - 1) * (window + shift)
        start += sampling.block_length
    return tokens


def config_of(model_path: str) -> Any:
    """The config of a model here or on the hub; for those of recipes/ that cannot be read, of the library's table."""
    from d1.models.adapters import adapter_chain
    from d1.models.kinds import native_config, native_config_of
    from d1.models.published import CONFIGS

    try:
        return native_config(adapter_chain(model_path, None)[0])[0]
    except OSError:
        if model_path not in CONFIGS:
            raise
    return native_config_of(CONFIGS[model_path], model_path)[0]


def hours_of(recipe: Recipe, args: FitRun) -> tuple[dict[str, float], str]:
    """Hours by purpose, and the line about them at the head of a recipe."""
    from d1.commands.footprint import flops_per_token

    assert args.utilisation is not None
    speed = PEAKS[args.card] * 1e12 * args.utilisation * args.gpus * 3600
    token_flops = flops_per_token(recipe.config, recipe.context)
    hours = {purpose: tokens * token_flops / speed for purpose, tokens in recipe.tokens.items()}
    total = sum(hours.values())
    trial = int(TRIAL * recipe.steps / total) // recipe.steps_per_rollout * recipe.steps_per_rollout
    trial = min(max(trial, recipe.steps_per_rollout), recipe.steps)
    digits = 2
    if total >= 0.1:
        digits = 1
    if total >= 10:
        digits = 0
    shown = f"{total:.{digits}f}"
    return hours, f"Time: {shown} hours for {recipe.steps} steps; a trial of two hours: --max_steps {trial}"


def with_config(args: FitFlags) -> tuple[FitRun, Recipe]:
    """The flags of the run in `--config`, a file of RL or SFT settings, and that run.

    Raises:
        ValueError: flags repeat what the file says, its settings are wrong, or the number of rows is not known.
        OSError: the file cannot be read.
    """
    assert args.config is not None
    for flag in fields(FitFlags):
        value = getattr(args, flag.name)
        if flag.name not in WITH_CONFIG and value != flag.default:
            raise ValueError(
                f"--{flag.name} {value}: with --config, {args.config} says what the run is; change it there"
            )
    hardware = HARDWARE_DEFAULTS | hardware_of(args.config)
    hardware |= {name: getattr(args, name) for name in hardware if getattr(args, name) is not None}
    if hardware["card"] not in PEAKS:
        raise ValueError(f"{args.config}: the speed of {hardware['card']} is not known: use --card")
    make_recipe = rl_recipe if has_rl_settings(args.config) else sft_recipe
    recipe = make_recipe(args.config, hardware["gpus"], args.rows)
    values = vars(args) | hardware | recipe.flags
    values["utilisation"] = args.utilisation or UTILISATION[recipe.flags["stage"]]
    return with_recipe(FitFlags(**values)), recipe


def run(flags: FitFlags) -> None:
    recipe = None
    if flags.config is not None:
        args, recipe = with_config(flags)
    else:
        check_flags(flags)
        args = with_recipe(flags)
    from d1.commands.footprint import FitSettings, fit_table, resident_bytes
    from d1.models.attention import has_causal_context
    from d1.models.kinds import block_size, has_masks

    if args.load_in_4bit and args.lora_r == 0 and args.stage != "eval":
        raise ValueError("4-bit weights are frozen: --load_in_4bit needs a LoRA adapter (--lora_r of at least 1)")
    can_merge = args.stage == "rl" and args.lora_r > 0 and not args.load_in_4bit
    if args.merged_rollouts and not can_merge:
        raise ValueError("--merged_rollouts needs RL with a LoRA adapter on weights of 16 or 32 bits")
    config = config_of(args.model_path) if recipe is None else recipe.config
    values = {n: value for n, value in vars(args).items() if n in FitSettings.__annotations__ and value is not None}
    if args.stage == "sft":
        values |= {"views": args.edit_turns, "views_at_once": args.edit_turns}
    elif args.stage == "prefer":
        values |= preference_sizes(args)
    elif args.stage == "rl" and recipe is not None:
        values |= recipe.sizes
    elif args.stage == "rl":
        size = args.block_length if has_causal_context(config) else block_size(config)
        values |= method_sizes(args, size, not has_masks(config))
    settings = FitSettings(**values)
    shown = asdict(settings) | ({"method": args.method} if args.stage == "rl" else {})
    words = (f"{n} {' '.join(value) if isinstance(value, list) else value}" for n, value in shown.items())
    sys.stdout.write(f"Computed for {', '.join(words)}\n\n{fit_table(config, settings)}\n")
    if can_merge and args.merged_rollouts is None and settings.dtype != "float32":
        copy_size = resident_bytes(config, replace(settings, merged_rollouts=True))["merged copy"] / 1e9
        sys.stdout.write(
            f"\nA merged copy for rollouts (merged_rollouts) takes {copy_size:.2f} GB more, where there is room.\n"
        )
    if recipe is not None:
        hours, line = hours_of(recipe, args)
        used = f"{PEAKS[args.card]:g} TFLOP/s each in bf16, of which {args.utilisation:.0%} are used"
        sys.stdout.write(f"\nhours on {args.gpus} x {args.card} ({used}), every row at its full length:\n")
        sys.stdout.writelines(f"{purpose:<48}{value:>9.2f}\n" for purpose, value in hours.items())
        sys.stdout.write(f"{line}\n")
