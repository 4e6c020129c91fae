"""python -m d1 fit --model_path X --stage rl --gpus 8: the memory a stage needs, and the batch that fits each card."""

from __future__ import annotations

import argparse
import sys

from d1.runs.ranges import check_ranges


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_path", "--model_name", required=True, help="only its config.json is read")
    parser.add_argument("--stage", choices=["sft", "rl", "eval"], required=True)
    parser.add_argument("--batch", type=int, default=1, help="rows a GPU (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row, prompt and completion")
    parser.add_argument("--block_length", type=int, default=32)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help="DeepSpeed ZeRO stage; 0 is plain DDP")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--lora_r", type=int, default=128, help="0: all weights are trained (default: %(default)s)")
    parser.add_argument("--lora_targets", default="attention", help="attention or all-linear (default: %(default)s)")
    parser.add_argument("--load_in_4bit", action="store_true", help="frozen weights in NF4")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--beta", type=float, default=0.04, help="RL without LoRA keeps a reference model if > 0")


def run(args: argparse.Namespace) -> None:
    from d1.models.adapters import adapter_chain
    from d1.models.fit import FitSettings, fit_table
    from d1.models.kinds import native_config

    check_ranges(vars(args), "fit")
    fields = {name: value for name, value in vars(args).items() if name not in ("command", "model_path")}
    settings = FitSettings(**fields)
    base, _ = adapter_chain(args.model_path, None)
    sys.stdout.write(fit_table(native_config(base)[0], settings) + "\n")
