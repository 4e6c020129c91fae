"""diffu-GRPO: reinforcement learning of a masked diffusion language model.

On the pocket model, on any machine:
    python -m d1 rl --config diffu-grpo/pocket.yaml --model_path pocket/base --output_dir runs/grpo
LLaDA-8B with LoRA on 8 GPUs, d1's settings (`diffu-grpo/run.sh` does this for you):
    accelerate launch --config_file diffu-grpo/accelerate.yaml -m d1.rl.train \
        --config diffu-grpo/slurm_scripts/train.yaml \
        --model_path GSAI-ML/LLaDA-8B-Instruct --dataset gsm8k --output_dir runs/gsm8k
Every field of `DiffuGRPOConfig` and of TRL's `ModelConfig` (LoRA, 4-bit) is a flag; flags override the yaml.
Add `--resume_from_checkpoint true` to continue a stopped run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin, get_type_hints

from trl import ModelConfig, TrlParser

from d1.files import check_output_dir
from d1.ranges import check_ranges, ranges_of
from d1.rl.config import INHERITED, DiffuGRPOConfig
from d1.rl.methods import CANVAS, METHODS, SCHEDULE, Method
from d1.rl.tables import find_method
from d1.runs.cli import quick_imports, read_settings, refuse_flags, run_script, show_defaults
from d1.runs.flag_names import hints_of_flags

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from d1.rl.trainer import DiffuGRPOTrainer

RENAMED = {  # settings of the original d1 that TRL and Transformers no longer have
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps (below 1 it is a share of the steps)",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": "resume_from_checkpoint, or an output_dir of its own for each run",
    "wandb_log_unique_prompts": "log_unique_prompts",
}

EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")

# The first field of each section of `DiffuGRPOConfig` -> the title of its flags in --help
SECTIONS = {
    "model_path": "model, task and run",
    "max_prompt_length": "rollout",
    "method": "method: estimator and objective",
    "learning_rate": "settings of TRL with defaults of their own here",
}
COMMON = (  # Trainer's, TRL's and PEFT's flags that most runs set
    "output_dir",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    "eval_strategy",
    "eval_steps",
    "logging_steps",
    "save_steps",
    "report_to",
    "run_name",
    "seed",
    "gradient_checkpointing",
    "dtype",
    "use_peft",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "load_in_4bit",
)


class Parser(TrlParser):
    """TRL's parser with flags in groups, aliases in the yaml, and errors of one line that name an old flag's successor.
    d1's fields are made by `d1.ranges.setting` as in all commands; TRL's parser also reads those of TRL and Trainer.

    Order, the last wins: defaults, the method's `scale` (d1's if none is named), yaml, the method's `values`, the other
    flags. If the yaml names the method, or nothing does, the yaml's lines override its `values`, too.
    """

    named: Method | None  # on the command line
    together: dict[str, Any]  # the flags on the command line whose settings must fit others (`Method.under`)

    def __init__(self, everything: bool, **options: Any) -> None:
        """`everything`: the help also lists the flags that are in none of d1's sections and not in `COMMON`."""
        self.everything = everything
        self.groups: dict[str, Any] = {}
        # The title of each flag's group: a section begins with the field that names it.
        self.titles = dict.fromkeys(COMMON, "TRL, Trainer and LoRA")
        title = ""
        for name in DiffuGRPOConfig.__annotations__:
            title = SECTIONS.get(name, title)
            self.titles[name] = title
        super().__init__(
            (DiffuGRPOConfig, ModelConfig),
            allow_abbrev=False,
            formatter_class=argparse.HelpFormatter,
            **options,
        )

    def add_argument(self, *flags: Any, **options: Any) -> Any:
        """Add a flag to its group; the groups are in the order of `SECTIONS`, and all others come last."""
        if flags[0] in ("-h", "--help_all"):
            return super().add_argument(*flags, **options)
        if not self.groups:
            titles = dict.fromkeys([*SECTIONS.values(), *self.titles.values(), ""])
            self.groups = {title: self.add_argument_group(title or "all others") for title in titles}
        if flags[0] == "--output_dir":
            options["help"] = "Folder of the run (runs/rl if unset)."
        title = self.titles.get(options.get("dest", flags[0].removeprefix("--")), "")
        if not title and not self.everything:
            options["help"] = argparse.SUPPRESS
        return self.groups[title].add_argument(*flags, **options)

    def error(self, message: str) -> NoReturn:
        refuse_flags(self, message)

    def format_help(self) -> str:
        show_defaults(self)
        return super().format_help()

    def about_unknown(self, words: Sequence[str]) -> str:
        """What to say of words that are not flags; it names the successor of an old flag."""
        names = [word.partition("=")[0] for word in words if word.startswith("--")]
        renamed = [f"{name} is now --{RENAMED[name[2:]]}" for name in names if name[2:] in RENAMED]
        if renamed:
            return "; ".join(renamed)
        hints = hints_of_flags(names, self)
        return f"there is no such setting: {' '.join(words)}{hints} (--help_all lists them)"

    def parse_args_and_config(self, args: Iterable[str] | None = None, *more: Any, **kwargs: Any) -> tuple[Any, ...]:
        words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            if word.startswith("--config="):
                words += word.split("=", 1)
            else:
                words.append(word)
        if words[-1:] == ["--config"]:
            self.error("argument --config: expected the path of a yaml file")
        if words.count("--config") > 1:
            files = [file for flag, file in pairwise(words) if flag == "--config"]
            self.error(f"argument --config: give --config once, got {' and '.join(files)} (with run.sh: CONFIG=FILE)")
        self.read_method(words)
        if "--config" in words:
            check_names(words[words.index("--config") + 1])
        return super().parse_args_and_config(words, *more, **kwargs)

    def read_method(self, args: list[str]) -> None:
        """Makes the method named on the command line set the defaults, before any value is checked."""
        # Flags that are not given are None.
        together = (*CANVAS, SCHEDULE)
        known, rest = self.parse_known_args(args, argparse.Namespace(method=None, **dict.fromkeys(together)))
        if "--config" in rest:
            at = rest.index("--config")
            del rest[at : at + 2]
        if rest:
            self.exit(2, f"{self.prog}: {self.about_unknown(rest)}\n")

        # The method, and the flags that must fit others.
        self.named = None
        if known.method is not None:
            self.named = find_method(known.method)
        self.together = {}
        for name in together:
            value = getattr(known, name)
            if value is not None:
                self.together[name] = value

        # Its values become the defaults of the other flags.
        defaults = (self.named or METHODS["d1"]).under(self.together)
        for name in self.together:
            defaults.pop(name, None)
        self.set_defaults(**defaults)

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        """Makes the lines of the yaml file defaults; an alias of a flag becomes the name of its field."""
        # The field of each flag
        fields: dict[str, str] = {}
        for action in self._actions:
            if action.nargs != 0:
                for flag in action.option_strings:
                    fields[flag[2:]] = action.dest

        # Lines that are no flags are refused, as on a command line.
        unknown: list[str] = []
        for name, value in config.items():
            if name not in fields:
                unknown += [f"--{name}", str(value)]
        if unknown:
            raise ValueError(self.about_unknown(unknown))

        # Aliases
        for alias in list(config):
            name = fields[alias]
            if name == alias:
                continue
            if name in config:
                raise ValueError(f"{alias} and {name} in the --config file are one setting: keep one")
            config[name] = config.pop(alias)

        # Values, as on a command line
        hints = get_type_hints(DiffuGRPOConfig) | get_type_hints(ModelConfig)
        ranges = INHERITED | ranges_of(DiffuGRPOConfig)
        for name, value in config.items():
            if name in hints:
                check_container(name, value, hints[name])
            if name in ranges:
                config[name] = ranges[name].convert(value)
            elif name.endswith("_kwargs"):
                config[name] = read_exponents(value)
        if config.get("report_to", "none") is None:
            config["report_to"] = "none"

        # The method's values
        if self.named:  # the method of the command line overrides the file
            config = self.named.under(config | self.together)
        else:  # the file's other lines override its method
            config = find_method(config.get("method", "d1")).under(config | self.together) | config
        return super().set_defaults_with_config(**config)


def check_names(file: str) -> None:
    """Raises ValueError if a yaml file gives a setting twice, or a name that is no text, such as 5 or yes."""
    settings = read_settings(file)
    for name in settings:
        if not isinstance(name, str):
            raise ValueError(f"--config {file}: the name {name!r} is no text: lines are NAME: VALUE")


def check_container(name: str, value: Any, hint: Any) -> None:
    """Raises ValueError for a list or a mapping where a setting is text, by its type `hint`, and takes none."""
    kinds = {get_origin(kind) or kind for kind in get_args(hint) or (hint,)}
    if isinstance(value, list | dict) and str in kinds and type(value) not in kinds:
        described = "a list" if isinstance(value, list) else "a mapping"
        expected = "a mapping" if dict in kinds else "text"
        raise ValueError(f"{name} in the --config file must be {expected}, got {described}: {value!r:.80}")


def read_exponents(value: Any) -> Any:
    """The value of a yaml file with numbers in place of texts such as 1e-1, which YAML does not read as numbers."""
    if isinstance(value, dict):
        return {name: read_exponents(item) for name, item in value.items()}
    if isinstance(value, list):
        return [read_exponents(item) for item in value]
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        return float(value)
    return value


class HelpAll(argparse.Action):
    """Print the help with all flags, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *found: Any) -> NoReturn:
        make_parser(parser.prog, everything=True).print_help()
        parser.exit()


def make_parser(prog: str = "diffu_grpo_train.py", everything: bool = False) -> TrlParser:
    usage = "%(prog)s [--config FILE] --model_path MODEL --output_dir FOLDER [--FLAG VALUE ...]"
    about = "--config FILE reads flags from a yaml file, NAME: VALUE; flags on the command line override it."
    parser = Parser(everything, prog=prog, usage=usage, description=about)
    all_flags = "list all flags of TRL, Transformers' Trainer and PEFT too"
    parser.add_argument("--help_all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help=all_flags)
    return parser


def main(
    args: DiffuGRPOConfig, model_args: ModelConfig, callbacks: list[TrainerCallback] | None = None
) -> DiffuGRPOTrainer | None:
    """Trains; returns the trainer, or None if the run was finished already. Raises ValueError or OSError for a wrong
    setting, file or row, if possible before the model is loaded."""
    check_ranges(vars(model_args), INHERITED)
    check_output_dir(str(args.output_dir))
    with quick_imports():  # only now: they take seconds, and `--help` does not need them
        from d1.rl.stage import stage

    return stage(args, model_args, callbacks).run()


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs RL as the command `prog` with `arguments` (default: those of the command line), then exits."""
    run_script(prog, lambda: main(*make_parser(prog).parse_args_and_config(arguments)))


if __name__ == "__main__":
    cli("d1.rl.train")
