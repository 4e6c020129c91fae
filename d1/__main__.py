"""Tools for checkpoint folders, and estimates:
python -m d1 a2d SRC OUT                     # autoregressive Llama/Qwen -> masked diffusion model
python -m d1 merge BASE ADAPTER [ADAPTER ...] OUT
python -m d1 export SRC OUT --format llada   # LLaDA's own names, for LLaDA's own code
python -m d1 fit --model_path X --stage rl --gpus 8
"""

from __future__ import annotations

import argparse
import logging
import sys

from d1.runs.entry import run_script
from d1.runs.ranges import check_ranges


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("a2d", help="autoregressive decoder -> masked diffusion model")
    sub.add_argument("source", metavar="SRC")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--mask_token", default="<|mask|>", help="a spare token of the tokenizer, or a new name")
    sub.add_argument("--keep_shift", action="store_true", help="go on predicting the next position, as Dream does")
    sub.add_argument("--plain_chat_template", action="store_true", help="for a tokenizer that has none")
    sub = commands.add_parser("merge", help="fold LoRA adapters into the weights")
    sub.add_argument("base", metavar="BASE")
    sub.add_argument("adapters", metavar="ADAPTER", nargs="+", help="in order of training")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--dtype", default="auto", help="of the merged weights (default: that of BASE)")
    sub.add_argument("--device", help="where to compute, e.g. cuda")
    sub = commands.add_parser("export", help="write the weight names and config of another project")
    sub.add_argument("source", metavar="SRC")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--format", choices=["llada"], required=True)
    sub = commands.add_parser("fit", help="memory of a stage by part, and the largest batch on each card")
    sub.add_argument("--model_path", "--model_name", required=True, help="only its config.json is read")
    sub.add_argument("--stage", choices=["sft", "rl", "eval"], required=True)
    sub.add_argument("--batch", type=int, default=1, help="rows a GPU (default: %(default)s)")
    sub.add_argument("--length", type=int, default=4096, help="tokens of a row, prompt and completion")
    sub.add_argument("--block_length", type=int, default=32)
    sub.add_argument("--gpus", type=int, default=1)
    sub.add_argument("--zero", type=int, choices=range(4), default=0, help="DeepSpeed ZeRO stage; 0 is plain DDP")
    sub.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    sub.add_argument("--lora_r", type=int, default=128, help="0: all weights are trained (default: %(default)s)")
    sub.add_argument("--lora_targets", choices=["attention", "all-linear"], default="attention")
    sub.add_argument("--load_in_4bit", action="store_true", help="frozen weights in NF4")
    sub.add_argument("--gradient_checkpointing", action="store_true")
    sub.add_argument("--beta", type=float, default=0.04, help="RL without LoRA keeps a reference model if > 0")
    return parser


def main(args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.command != "fit":
        from d1.models import convert
    if args.command == "a2d":
        convert.a2d(args.source, args.out, args.mask_token, args.keep_shift, args.plain_chat_template)
    elif args.command == "merge":
        convert.merge(args.base, args.adapters, args.out, args.dtype, args.device)
    elif args.command == "export":
        convert.export_llada(args.source, args.out)
    elif args.command == "fit":
        check_ranges(vars(args), "fit")
        from d1.models.adapters import adapter_chain
        from d1.models.fit import Setup, fit_table
        from d1.models.kinds import native_config

        fields = {name: value for name, value in vars(args).items() if name not in ("command", "model_path")}
        base, _ = adapter_chain(args.model_path, None)
        sys.stdout.write(fit_table(native_config(base)[0], Setup(**fields)) + "\n")


if __name__ == "__main__":
    run_script("d1", lambda: main(make_parser().parse_args()))
