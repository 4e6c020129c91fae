"""Command lines: dataclasses of settings, the parser that is made from one, and how a script starts and ends. Imports
no torch."""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import logging
import os
import pickle
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_type_hints

import yaml

from d1.ranges import AMOUNT, BELOW_ONE, COUNT, POSITIVE, SEED, Range, check_ranges, nearest, ranges_of, setting
from d1.runs.flag_names import hint_of_choice, hint_of_command, hint_of_flag, hints_of_flags

# --- How a script starts and ends: a mistake of the user is one line on stderr and status 1, a bug has its traceback --

# Deprecation and other warnings, by their beginnings, that do not help a user. Delete each one with its version.
WARNINGS = (
    "`gradient_checkpointing",  # Transformers 5.23: TRL 1.16 uses the old names
    "`is_gradient_checkpointing",
    "Could not find a config file in",  # PEFT 0.21, after an adapter was merged: no vocabulary grows here
)
MESSAGES = {  # logger -> the beginning of such a message
    "DeepSpeed": "Setting accelerator to CPU",  # 0.19, when it is imported, even if it is not used
    # 5.23, when PEFT 0.21 saves an adapter: it compares the vocabulary with that in the base's config.json, which it
    # reads as the class that runs the model, and a released format has a name of its own.
    "transformers.configuration_utils": "You are using a model of type",
    # 0.50, for a kernel that would round to bf16 and that sampling with gradients must not use
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}

# A process other than the first waits this long before it prints: if the first failed, too, a launcher stops it.
RANK_0_WAIT_SECONDS = 3.0

SHARED_SECONDS = 60.0  # after which another machine sees a new file of a shared folder, as NFS has it by default


class RunError(RuntimeError):
    """Ends a run with a message that needs no traceback: the user has to fix something, such as a reward function."""


class ListedError(ValueError):
    """An error whose message has several lines, such as a list of bad rows, which stay apart when it is shown."""


# What this library and its dependencies raise for wrong settings, files and machines. FloatingPointError: a loss is not
# finite. ImportError: a setting needs an optional package.
MISTAKES = (ValueError, OSError, ImportError, FloatingPointError, RunError)


def begins_otherwise(text: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(text)


FILTERS = {logger: partial(begins_otherwise, text) for logger, text in MESSAGES.items()}


def silence() -> None:
    """Silence the `WARNINGS` and `MESSAGES`, without importing the libraries that raise them."""
    for text in WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(text))
    for logger, begins in FILTERS.items():
        logging.getLogger(logger).addFilter(begins)  # once: a second time does nothing


def refuse_flags(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Answer a bad command line with one line; argparse itself would print the usage of every flag."""
    parser.exit(2, f"{parser.prog}: {message} (--help lists what there is)\n")


def show_defaults(parser: argparse.ArgumentParser) -> None:
    """Add each flag's default to its help, unless the help states it, it is None or empty, or the flag is a switch."""
    for action in parser._actions:
        value = " ".join(map(str, action.default)) if isinstance(action.default, list | tuple) else action.default
        silent = action.required or action.nargs == 0 or value in (None, "", argparse.SUPPRESS)
        if not (silent or action.help == argparse.SUPPRESS or "default" in (action.help or "")):
            action.help = f"{action.help or ''} (default: {str(value).replace('%', '%%')})".lstrip()


class OneLineParser(argparse.ArgumentParser):
    """A parser that refuses abbreviated flags and checks those of type `Range`.

    Its errors are one line long and name the flag, choice or command that was meant; its help shows defaults.
    """

    passes_unknown = False  # another program reads the flags that this parser does not know
    words: Sequence[str] = ()  # those that are parsed

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def ranges(self) -> dict[str, Range]:
        """The range of each of these flags; None is allowed if it is the default."""
        values = {}
        for action in self._actions:
            if isinstance(action.type, Range):
                flag_range = replace(action.type, many=action.nargs == "+")
                if action.default is None and None not in flag_range:
                    flag_range = flag_range | None
                values[action.dest] = flag_range
        return values

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does; ValueError names all flags that are out of range."""
        self.words = sys.argv[1:] if args is None else [*args]
        known, rest = super().parse_known_args(args, namespace)
        check_ranges(vars(known), self.ranges())
        return known, rest

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            commands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
            parser = commands[0].choices[getattr(known, commands[0].dest)] if commands else self
            refuse_flags(parser, f"unrecognized arguments: {' '.join(rest)}{hints_of_flags(rest, parser)}")
        return known

    def error(self, message: str) -> NoReturn:
        """Refuse a command line; the message also names the flags in it that do not exist, because a flag that is
        missing may be there under another name."""
        flags = dict.fromkeys(word.partition("=")[0] for word in self.words if word.startswith("--") and len(word) > 2)
        known: set[str] = set()
        for action in self._actions:
            known.update(action.option_strings)
        unknown = [flag for flag in flags if flag not in known]
        if unknown and not self.passes_unknown:
            message += f"; unrecognized: {' '.join(unknown)}{hints_of_flags(unknown, self)}"
        refuse_flags(self, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = action.choices or ()
            commands = isinstance(action, argparse._SubParsersAction)
            hint = nearest(value, choices) or hint_of_choice(action, self)
            if commands:
                hint = hint_of_command(value, choices)
            raise argparse.ArgumentError(action, error.message + hint) from None

    def format_help(self) -> str:
        show_defaults(self)
        return super().format_help()


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import with the garbage collector off, a quarter faster: imported objects live as long as the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_script(name: str, work: Callable[[], object]) -> NoReturn:
    """Run a script's `work` and exit with the number that it returns, or 0.

    An error in `MISTAKES` becomes the line "NAME: message" and status 1. If all processes fail, the first one prints
    the line; if one fails alone, it prints it. Other errors are not caught.
    """
    silence()
    try:
        status = work()
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_process(0)
    except MISTAKES as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(RANK_0_WAIT_SECONDS)
        sys.stderr.write(f"{name}: {one_line(error)}\n")
        exit_process(1)
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: stopped\n")
        exit_process(130)
    exit_process(status if isinstance(status, int) else 0)


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, or the name of its class if it has no message; a `ListedError` keeps
    its lines."""
    if isinstance(error, ListedError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and type(error).__module__ == "builtins":
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


def exit_process(status: int = 0) -> NoReturn:
    """Exit with `status` when all output is written; if several processes ran on the CPU, without a normal shutdown.

    The threads of gloo may outlive the process group and abort the interpreter's shutdown, which a launcher takes for a
    failure. Delete all but `sys.exit` when PyTorch joins them.
    """
    gc.freeze()  # otherwise the shutdown searches all modules for garbage, for about a second
    torch = sys.modules.get("torch")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or torch is None or torch.cuda.is_available():
        sys.exit(status)
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# --- Dataclasses of settings, and the command line that is made from one ----------------------------------------------

T = TypeVar("T")
OptionalAmount = Annotated[float | None, AMOUNT | None]
OptionalCount = Annotated[int | None, COUNT | None]


def check_settings(config: Any) -> None:
    """Check the ranges and choices that the fields of a dataclass declare; ValueError names what is wrong."""
    check_ranges(vars(config), ranges_of(type(config)))
    for setting_field in fields(config):
        value = getattr(config, setting_field.name)
        choices = setting_field.metadata.get("choices")
        if choices and value != setting_field.default and value not in choices:
            hint = nearest(value, choices)
            raise ValueError(f"--{setting_field.name} must be one of {', '.join(choices)}, got {value!r}{hint}")


def method_defaults(name: str, methods: Mapping[str, Any]) -> str:
    """For a flag's help: the setting's default in each method that has one; empty if none has."""
    values = {method: entry.values[name] for method, entry in methods.items() if name in entry.values}
    if len(values) == len(methods) and len({*values.values()}) == 1:
        return f" (default: {next(iter(values.values()))})"
    listed = ", ".join(f"{method} {value}" for method, value in values.items())
    return f" (default: {listed})" if listed else ""


def add_flags(parser: argparse.ArgumentParser, settings: type, methods: Mapping[str, Any] | None = None) -> None:
    """Add a flag for each field of a dataclass that `d1.ranges.setting` made, in the order of the fields: those of the
    last base come first. Switches are off by default.

    Args:
        methods: the entries of --method, whose `values` the help shows where a setting's default is None.
    """
    hints, ranges = get_type_hints(settings), ranges_of(settings)
    group: Any = parser
    for setting_field in fields(settings):
        if "help" not in setting_field.metadata:
            continue
        name = setting_field.name
        options = dict(setting_field.metadata)
        title = options.pop("group", None)
        if title is not None:
            group = parser.add_argument_group(title) if title else parser
        required = setting_field.default is MISSING and setting_field.default_factory is MISSING
        if options.pop("positional", False):
            names = [name]
        else:
            names = [options.pop("flag", f"--{name}"), *options.pop("aliases", [])]
            options |= {"dest": name, "required": required}
        if hints[name] is bool and "action" not in options:
            options["action"] = "store_true"
        elif not required:
            if setting_field.default_factory is MISSING:
                options["default"] = setting_field.default
            else:
                options["default"] = setting_field.default_factory()
        if options.get("action", "append") == "append":
            options.setdefault("type", ranges.get(name, str))
            options["help"] += method_defaults(name, methods or {})
        group.add_argument(*names, **options)


class SettingsParser(OneLineParser, Generic[T]):
    """A parser with the flags of a dataclass (`add_flags`); `parse_args` returns an instance.

    Transformers' HfArgumentParser and TRL's TrlParser do the same, but take seconds to import. `d1 rl` needs TRL in any
    case and uses TRL's (`d1/rl/train.py`): most of its fields are those of `GRPOConfig`.
    """

    def __init__(
        self,
        settings: type[T],
        prog: str | None = None,
        about: str | None = None,
        *,
        methods: Mapping[str, Any] | None = None,
        config_file: bool = False,
        **options: Any,
    ) -> None:
        """`about`: the text of the help, as it is written. `methods`: as for `add_flags`. `config_file`: add the flag
        --config FILE, which reads settings from a yaml file; flags on the command line override these."""
        super().__init__(prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.settings = settings
        self.config_file = config_file
        if config_file:
            self.add_argument("--config", metavar="FILE", help="yaml file of settings, NAME: VALUE; flags override it")
        add_flags(self, settings, methods)

    def parse_args(self, args: Any = None, namespace: Any = None) -> T:  # type: ignore[override]
        words = sys.argv[1:] if args is None else list(args)
        if self.config_file and sum(word.partition("=")[0] == "--config" for word in words) > 1:
            self.error("argument --config: give --config once")
        values = vars(super().parse_args(words, namespace))
        if self.config_file:
            file = values.pop("config")
            if file:
                values = vars(super().parse_args([*self.words_of(file), *words], namespace))
                del values["config"]
        return self.settings(**values)

    def words_of(self, file: str) -> list[str]:
        """The command line that is equivalent to a yaml file of settings. `null` keeps the default. ValueError as from
        `read_settings`, and if the file names an unknown setting, or one setting by two names."""
        settings = read_settings(file)
        flags = {flag: action for action in self._actions for flag in action.option_strings if action.dest != "config"}
        words: list[str] = []
        seen: dict[str, str] = {}
        for name, value in settings.items():
            action = flags.get(f"--{name}")
            if action is None or action.dest == "help":
                hint = hint_of_flag(str(name), self).replace("--", "")  # names in a file have no dashes
                raise ValueError(f"--config {file}: there is no such setting: {name}{hint} (--help lists them)")
            if action.dest in seen:
                raise ValueError(f"--config {file}: {seen[action.dest]} and {name} are one setting: keep one")
            seen[action.dest] = name
            if action.nargs == 0:  # a switch
                if not isinstance(value, bool):
                    raise ValueError(f"--config {file}: {name} must be true or false, got {value!r}")
                words += [f"--{name}"] if value else []
            elif isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            elif value is not None:
                words += [f"--{name}={str(value).lower() if isinstance(value, bool) else value}"]
        return words


def read_settings(file: str | Path) -> dict[Any, Any]:
    """The settings in a yaml file. ValueError if it is not a yaml mapping, or has the same setting twice."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {file} is no yaml: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"--config {file} must have lines NAME: VALUE, got {settings!r}")

    # Of a setting that is there twice, `safe_load` takes the last value.
    lines: dict[str, int] = {}
    for name, _ in yaml.compose(text, Loader=yaml.SafeLoader).value:
        line = name.start_mark.line + 1
        if name.value in lines:
            raise ValueError(f"--config {file}: {name.value} is in lines {lines[name.value]} and {line}: keep one")
        lines[name.value] = line
    return settings


# --- What SFT, preference training and distillation share -------------------------------------------------------------


BAD_ROWS = ("error", "skip")


@dataclass
class TrainingSettings:
    """Flags of SFT, preference training and distillation; each adds its own. Defaults are d1's (arXiv 2504.12216,
    appendix). ValueError if a setting is out of range, or contradicts another."""

    model_name: str = setting(
        "GSAI-ML/LLaDA-8B-Instruct", "folder or hub name of the model to fine-tune", aliases=["--model_path"]
    )
    batch_size: Annotated[int, COUNT] = setting(1, "rows per device per micro-batch")
    grad_accum_steps: Annotated[int, COUNT] = setting(4)
    num_epochs: Annotated[float, POSITIVE] = setting(20)
    output_dir: str = setting("runs", "everything is written to OUTPUT_DIR/JOB_NAME")
    job_name: str = setting("llada-s1")
    train_data: str = setting("simplescaling/s1K", "hub name, or a .json, .jsonl, .parquet or .csv file")
    debugging: bool = setting(False, "turn experiment logging off, like --report_to none")
    report_to: str = setting("wandb", "where numbers are logged to", choices=("wandb", "tensorboard", "none"))
    plain_chat_template: bool = setting(False, "give a plain chat template to a tokenizer that has none")
    bad_rows: str = setting("error", "rows that cannot be trained on", choices=BAD_ROWS)
    num_proc: Annotated[int | None, COUNT | None] = setting(None, "processes that tokenise (default: one per core)")
    full_finetuning: bool = setting(False, "train all weights instead of a LoRA adapter")
    lora_r: Annotated[int, COUNT] = setting(128)
    lora_alpha: Annotated[int, COUNT] = setting(256)
    lora_target_modules: list[str] = setting(
        ["q_proj", "k_proj", "v_proj"], "names of modules, or 'attention' or 'all-linear', for this model's", nargs="+"
    )
    load_in_4bit: bool = setting(False, "QLoRA: frozen weights in 4-bit NF4 (needs bitsandbytes)")
    dtype: str | None = setting(None, "of frozen weights (default on GPUs: bfloat16)", choices=("float32", "bfloat16"))
    bf16: str | None = setting(
        None,
        "mixed precision: products in bf16, trained weights in fp32 (default: true on a GPU, and on a CPU with "
        "instructions for bf16 if the model is large enough to gain and a check of the results holds)",
        choices=("true", "false"),
    )
    attn_implementation: str | None = setting(None, "sdpa, eager or flash_attention_2 (default: Transformers chooses)")
    gradient_checkpointing: bool = setting(False, "use less memory and a third more time")
    merge_at_end: bool = setting(False, "also save the model with its adapter merged, to .../merged")
    seed: Annotated[int, SEED] = setting(42)
    max_steps: Annotated[int, COUNT | -1] = setting(
        -1, "train for this number of optimizer steps, whatever --num_epochs says; -1: as that says"
    )
    max_grad_norm: Annotated[float, AMOUNT] = setting(1.0)
    logging_steps: Annotated[int, COUNT] = setting(10)
    resume: str | None = setting(
        None,
        "continue from the last complete checkpoint, if there is one, or from the one named (with DeepSpeed, one of "
        "your own: it unpickles its files)",
        aliases=["--resume_from_checkpoint"],
        nargs="?",
        const="true",
        metavar="true|false|FOLDER",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.full_finetuning and (self.merge_at_end or self.load_in_4bit):
            raise ValueError("--merge_at_end and --load_in_4bit need LoRA: leave --full_finetuning out")
        if self.full_finetuning and self.dtype not in (None, "float32"):
            problem = f"--dtype {self.dtype} is for frozen weights, and --full_finetuning trains all weights in float32"
            raise ValueError(f"{problem}: leave one of them out (--bf16 true computes in bfloat16)")


@dataclass
class MethodSettings(TrainingSettings):
    """Flags of stages that choose a method from a table. A setting that is None becomes the method's value."""

    method: str = ""  # each stage has its own choices
    num_epochs: Annotated[float, POSITIVE] = setting(1)
    grad_accum_steps: Annotated[int, COUNT] = setting(8)
    save_steps: Annotated[int, COUNT] = setting(100, "optimizer steps between checkpoints")
    max_prompt_length: Annotated[int, COUNT] = setting(1024, "tokens of a prompt; rows with a longer one are bad rows")
    max_completion_length: Annotated[int, COUNT] = setting(256, "tokens of the canvas")
    learning_rate: OptionalAmount = setting(None, "peak learning rate")
    weight_decay: OptionalAmount = setting(None)
    adam_beta2: Annotated[float | None, BELOW_ONE | None] = setting(None)
    lr_scheduler_type: str | None = setting(None)
    warmup_steps: OptionalAmount = setting(None, "steps, or a share of all if below 1")

    def apply_defaults(self, values: Mapping[str, Any]) -> None:
        """Fill the settings that are None."""
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


@dataclass(frozen=True)
class Program:
    """The command of a stage with `TrainingSettings`."""

    config: type[TrainingSettings]
    module: str  # has `stage(args)`, which makes a `d1.runs.stage.Stage`
    about: str | None  # the text of its help
    methods: Mapping[str, Any] = field(default_factory=dict)  # the entries of --method

    def make_parser(self, prog: str | None = None) -> SettingsParser[Any]:
        return SettingsParser(self.config, prog, self.about, methods=self.methods, config_file=True)

    def main(self, args: Any) -> Any:
        """Train, and save the model and the Trainer's state. Returns the trainer, or None if the run was finished.

        Raises:
            ValueError, OSError: a setting, a file or a row is wrong; raised before the model is loaded where possible.
        """
        with quick_imports():  # only now: they take seconds, and `--help` does not need them
            stage = import_module(self.module).stage
        return stage(args).run()

    def cli(self, prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
        """Run the stage as the command `prog`, and exit. Default of `arguments`: those of the command line."""
        run_script(prog, lambda: self.main(self.make_parser(prog).parse_args(arguments)))


# --- Work of several processes: an error in one is raised in all, so that none waits for ever -------------------------


@contextlib.contextmanager
def raise_together() -> Iterator[None]:
    """Raise in all processes what one of them raises inside; a process with an error of its own raises that. Every
    process must enter."""
    local_error: Exception | None = None
    try:
        yield
    except Exception as error:
        local_error = error
    all_errors = from_all(picklable(local_error))
    for candidate in (local_error, *all_errors):
        if candidate is not None:
            raise candidate


def from_rank_0(compute: Callable[[], T]) -> T:
    """The result of `compute` on rank 0, which all processes get; an exception there is raised in all of them."""
    import torch.distributed as dist

    result: Any = None
    with raise_together():
        if not dist.is_initialized() or dist.get_rank() == 0:
            result = compute()
    return from_all(result)[0]  # type: ignore[no-any-return]


def from_all(value: T) -> list[T]:
    """The values of all processes, by rank."""
    import torch.distributed as dist  # only now: `eval.py --help` imports this module

    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_equal(value: object, message: str) -> None:
    """Refuse (ValueError with the message) a value that differs between processes. Every process must call this."""
    values = from_all(value)
    if any(other != values[0] for other in values):
        raise ValueError(message)


def require_shared(file: Path, advice: str) -> None:
    """Refuse (ValueError, in all processes) a folder that some process does not see: `file` in it, which rank 0 has
    written, is not found there. Every process must call this."""
    with raise_together():
        deadline = time.monotonic() + SHARED_SECONDS
        while not file.exists():
            if time.monotonic() > deadline:
                raise ValueError(f"{file} of the first process is not there on {platform.node()}: {advice}")
            time.sleep(0.5)


def picklable(error: Exception | None) -> Exception | None:
    """The error, or one with its message alone if it cannot be sent to another process."""
    if error is None:
        return None
    with contextlib.suppress(Exception):
        pickle.dumps(copy.copy(error))
        return error
    return RunError(one_line(error))
