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
import ast
import json
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import TrainerCallback
from trl import ModelConfig, TrlParser, get_peft_config

from d1.files import check_output_dir, write_atomically
from d1.models import load_model, load_tokenizer
from d1.models.adapters import lora_targets, merge_adapter
from d1.models.tokenizer import check_chat_template, check_mask_token, end_ids
from d1.ranges import check_ranges, nearest
from d1.rl.batch import evaluating, record_and_costs
from d1.rl.checks import ON_RESUME, check_config, check_model_settings, check_prompts, find_method, settle_canvas
from d1.rl.config import DiffuGRPOConfig, idle, plan
from d1.rl.report import SHOWN_FILE
from d1.rl.rewards import accuracy_of, check_rewards
from d1.rl.trainer import DiffuGRPOTrainer, StopAtCompute, check_rollout, is_spent
from d1.runs.cli import flags_of, quick_imports, refuse_flags, run_script, show_defaults
from d1.runs.record import ROWS, of_rows
from d1.runs.stage import Prepared, Stage, check_start, evaluation
from d1.show.film import Film, judge_of, piece
from d1.tasks import load_task, under_protocol, with_rewards, with_shots

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from d1.rl.config import DiffuGRPOConfig
    from d1.rl.methods import Method
    from d1.rl.trainer import DiffuGRPOTrainer


# --- Shown problems ---------------------------------------------------------------------------------------------------
#
# Sample the same few problems before and after a run, for the report on what RL did (`--report true`).
#
# Both times the random numbers are the same, so that only the weights differ. They are numbers of their own: a run with
# the report takes the same steps as one without it.

PROBLEMS = 8  # shown: the first ones
COLUMNS = ("canvas_ids", "reveal_steps", "rollout_logps", "rollout_entropies")
WRITES = ("steps", "ids", "logps")  # of a sampler that edits


class ShowProblems(TrainerCallback):
    """Writes the films of problems before and after training into the run's folder. A resumed run keeps those before.

    Args:
        task: judges the completions.
        rows: the task's rows; the first ones are shown.
    """

    def __init__(self, trainer: Any, task: ModuleType, rows: Dataset) -> None:
        self.trainer, self.task = trainer, task
        self.rows = rows.select(range(min(PROBLEMS, len(rows))))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.global_step:
            self.keep("before", {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / SHOWN_FILE
        self.keep("after", json.loads(path.read_text()) if path.exists() else {})

    def keep(self, when: str, kept: dict[str, Any]) -> None:
        films = self.films(when)  # in every process, because the weights may be divided among them
        path = Path(self.trainer.args.output_dir) / SHOWN_FILE
        if self.trainer.accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(kept | {when: [asdict(film) for film in films]}))

    def films(self, when: str) -> list[Film]:
        """One film per problem, sampled as in an evaluation during training."""
        trainer, tokenizer, compute = self.trainer, self.trainer.text_tokenizer, self.trainer.compute
        trainer.evaluation_rollouts = 0
        prompts = trainer.encoded(list(self.rows["prompt"]))
        with evaluating(trainer.model):
            sampled = trainer.sample(*trainer.padded(prompts))
        trainer.compute = compute  # counts training only
        columns: dict[str, Any] = {**record_and_costs(sampled)[0]}
        record = {name: part.tolist() for name, part in columns.items()}
        films = []
        for place, (prompt, row) in enumerate(zip(prompts, self.rows, strict=True)):
            ids, *numbers = (record[name][place] for name in COLUMNS)
            tokens = [piece(tokenizer, token) for token in ids]
            film = Film(when, tokenizer.decode(prompt), "", tokens, *numbers)
            if "write_ids" in record:
                film.drafts = drafts_of([record[f"write_{name}"][place] for name in WRITES], tokenizer)
            judge_of(self.task, row, tokenizer, end_ids(tokenizer))(film, ids)
            films.append(film)
        return films


def drafts_of(writes: list[list[Any]], tokenizer: Any) -> list[list[list[Any]]]:
    """`Film.drafts` of a completion, from the steps, ids and log-probabilities written at each place."""
    places = [[write for write in zip(*place, strict=True) if write[0] >= 0] for place in zip(*writes, strict=True)]
    return [[[step, piece(tokenizer, token), logp] for step, token, logp in of[:-1]] for of in places]


# --- Setup ------------------------------------------------------------------------------------------------------------
#
# Build the problems, the model and the trainer of an RL run from its settings.

logger = logging.getLogger(__name__)


def stage(args: DiffuGRPOConfig, model_args: ModelConfig, callbacks: list[TrainerCallback] | None) -> Stage:
    """RL as a `Stage` for `d1.runs.stage.run`."""
    check_model_settings(args, model_args)
    check_start(str(args.model_path))
    settle_canvas(args)
    return Stage(
        training=args,
        settings=lambda: {**args.to_dict(), "model": vars(model_args)},
        on_resume=ON_RESUME,
        ended=lambda checkpoint: is_spent(str(checkpoint), args.max_compute_tokens),
        check=lambda checkpoint: check_rollout(checkpoint, args),
        prepare=lambda: prepare(args, model_args, callbacks),
        next_command=lambda: next_command(args),
        conclude=lambda: write_report(Path(str(args.output_dir))) if args.report else None,
    )


def prepare(args: DiffuGRPOConfig, model_args: ModelConfig, callbacks: list[TrainerCallback] | None) -> Prepared:
    """The checked problems and the plan of a run, and a function that makes the trainer."""
    task = with_rewards(under_protocol(load_task(args.dataset), args.prompt_protocol), args.reward_file)
    train_rows, eval_rows = load_problems(task, args)
    check_rewards(task, train_rows, args.dataset)
    weights = args.reward_weights or [1.0] * len(task.REWARDS)
    if len(weights) != len(task.REWARDS):
        count = f"task {args.dataset} has {len(task.REWARDS)} rewards"
        raise ValueError(f"--reward_weights needs one number per reward: {count}, got {len(weights)}")
    args.reward_weights = [*weights, 0.0]  # the accuracy is only logged
    tokenizer = load_tokenizer(str(args.model_path), plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, str(args.model_path), flag="--plain_chat_template true")
    if args.mask_id is not None:
        check_mask_token(tokenizer, str(tokenizer.convert_ids_to_tokens(args.mask_id)))
    longest = max(check_prompts(rows, tokenizer, args) for rows in (train_rows, eval_rows) if rows is not None)
    numbers = plan(args, len(train_rows), check_config(longest, args))
    if args.should_save:
        logger.info("Plan:%s", "".join(f"\n  {value:>8g}  {name}" for name, value in numbers.items()))
        if useless := [f"{name} {getattr(args, name)}" for name in idle(args) if getattr(args, name) is not None]:
            logger.info(
                "Idle, because each rollout has one optimizer step and every ratio is 1: %s", ", ".join(useless)
            )

    def start() -> DiffuGRPOTrainer:
        model = start_model(args, model_args)
        trainer = DiffuGRPOTrainer(
            model=model,
            reward_funcs=[*task.REWARDS, accuracy_of(task)],
            args=args,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            peft_config=adapter_config(model_args, model),
            task_name=args.dataset,
            callbacks=callbacks,
        )
        if args.report:
            trainer.add_callback(ShowProblems(trainer, task, train_rows if eval_rows is None else eval_rows))
        if args.max_compute_tokens:
            trainer.add_callback(StopAtCompute(trainer, args.max_compute_tokens, args.save_at_compute or ()))
        return trainer

    facts = {"plan": numbers, "idle": idle(args), "paper": find_method(args.method).paper}
    facts[ROWS + "dataset"] = of_rows(train_rows)
    return facts | {"validation_problems": len(eval_rows or [])}, start


def load_problems(task: ModuleType, args: DiffuGRPOConfig) -> tuple[Dataset, Dataset | None]:
    """Training rows and, if the run evaluates, validation rows. Raises ValueError if there are none, or no prompts."""
    train = task.load_rows("train", args.data_file)
    evaluation = None
    if args.eval_strategy != "no":
        try:
            evaluation = task.load_rows("validation", args.eval_data_file)
        except ConnectionError as error:  # its message names the flag of the training rows
            raise ConnectionError(str(error).replace("--data_file", "--eval_data_file")) from error
        evaluation = evaluation.select(range(min(args.eval_limit or len(evaluation), len(evaluation))))
    for rows, what, flag in ((train, "train", "data_file"), (evaluation, "validate", "eval_data_file")):
        if rows is not None and not len(rows):
            raise ValueError(f"task {args.dataset} has no rows to {what} on (--{flag} {getattr(args, flag)})")
    if "prompt" not in train.column_names:
        raise ValueError(f"the rows of task {args.dataset} have no column 'prompt', only {train.column_names}")
    return with_shots(task, train, args.data_file, evaluation)


def start_model(args: DiffuGRPOConfig, model_args: ModelConfig) -> Any:
    """The model to train. An SFT adapter is merged into its base, so that RL starts from the SFT model."""
    model = load_model(
        str(args.model_path),
        dtype=model_args.dtype if model_args.dtype != "float32" else None,
        quantization="nf4" if model_args.load_in_4bit else None,
        attn_implementation=model_args.attn_implementation,
    )
    if isinstance(model, PeftModel):
        if model_args.load_in_4bit:
            raise ValueError(
                "an adapter cannot be merged into 4-bit weights exactly: first run "
                f"`python -m d1 merge BASE {args.model_path} OUT` and pass OUT as --model_path"
            )
        model = merge_adapter(model, str(args.model_path))
    return model


def adapter_config(model_args: ModelConfig, model: Any) -> PeftConfig | None:
    """The LoRA adapter to train, None for all weights; `--lora_target_modules` has the same meaning as in SFT."""
    config: Any = get_peft_config(model_args)
    if config is not None and config.target_modules is not None:  # TRL 1.16 turns a list of one name into a pattern
        config.target_modules = set(lora_targets(model, config.target_modules))
    return config


def next_command(args: DiffuGRPOConfig) -> str:
    """The command that evaluates the model on the task of the run, with its sampling."""
    flags = {"gen_length": args.max_completion_length, "block_length": args.block_length}
    flags |= {"diffusion_steps": args.diffusion_steps}
    return evaluation(str(args.output_dir), args.dataset, flags)


def write_report(folder: Path) -> None:
    """Writes report.html into the folder of a finished run."""
    from d1.rl.report import report_page  # only now: matplotlib takes a second

    (folder / "report.html").write_text(report_page([folder], [folder.name]), encoding="utf-8")
    logger.info("Report: %s", folder / "report.html")


# --- Train ------------------------------------------------------------------------------------------------------------

RENAMED = {  # settings of the original d1 that TRL and Transformers no longer have
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps (below 1 it is a share of the steps)",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": "resume_from_checkpoint, or an output_dir of its own for each run",
    "wandb_log_unique_prompts": "log_unique_prompts",
}


# The first field of each section of `DiffuGRPOConfig` -> the title of its flags in --help
SECTIONS = {
    "model_path": "model, task and run",
    "max_prompt_length": "rollout",
    "method": "method: estimator and objective",
    "learning_rate": "settings of TRL with defaults of their own here",
}
COMMON = (  # Trainer's, TRL's and PEFT's flags that most runs set
    *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs"),
    *("eval_strategy", "eval_steps", "logging_steps", "save_steps", "report_to", "run_name", "seed"),
    *("gradient_checkpointing", "dtype", "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit"),
)


class Parser(TrlParser):
    """TRL's parser with flags in groups, aliases in the yaml, and errors of one line that name an old flag's successor.

    Order, the last wins: defaults, yaml, `--method`, the other flags. If the yaml names the method, the yaml's other
    lines override the method's values. A yaml always overrides the values that depend on a paper's model size
    (`Method.scale`).
    """

    named: Method | None
    canvas: dict[str, Any]  # the flags of `CANVAS`

    def __init__(self, config: type[DiffuGRPOConfig], everything: bool, **options: Any) -> None:
        """`everything`: the help also lists the flags that are in none of d1's sections and not in `COMMON`."""
        self.everything, title = everything, ""
        self.titles = dict.fromkeys(COMMON, "TRL, Trainer and LoRA")
        for name in config.__annotations__:
            self.titles[name] = title = SECTIONS.get(name, title)
        self.groups: dict[str, Any] = {}
        super().__init__((config, ModelConfig), allow_abbrev=False, formatter_class=argparse.HelpFormatter, **options)

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
        hidden = {} if title or self.everything else {"help": argparse.SUPPRESS}
        return self.groups[title].add_argument(*flags, **options | hidden)

    def error(self, message: str) -> NoReturn:
        refuse_flags(self, message)

    def format_help(self) -> str:
        show_defaults(self)
        return super().format_help()

    def no_such(self, words: Sequence[str]) -> str:
        """The message about words that are no flags."""
        hints = [nearest(word.partition("=")[0], flags_of(self)) for word in words if word.startswith("--")]
        return f"there is no such setting: {' '.join(words)}{''.join(hints)} (--help_all lists them)"

    def parse_args_and_config(self, args: Iterable[str] | None = None, *more: Any, **kwargs: Any) -> tuple[Any, ...]:
        words = sys.argv[1:] if args is None else args
        args = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        if args[-1:] == ["--config"]:
            self.error("argument --config: expected the path of a yaml file")
        from d1.rl.checks import find_method
        from d1.rl.methods import CANVAS

        # None for flags that are not given.
        blank = argparse.Namespace(method=None, **dict.fromkeys(CANVAS))
        known, rest = self.parse_known_args(args, blank)
        if "--config" in rest:
            at = rest.index("--config")
            del rest[at : at + 2]
        if rest and not any(word.partition("=")[0][2:] in RENAMED for word in rest):  # before values are checked
            raise ValueError(self.no_such(rest))
        found = vars(known)
        self.named = None if found["method"] is None else find_method(found["method"])
        self.canvas = {name: found[name] for name in CANVAS if found[name] is not None}
        if self.named:
            self.set_defaults(**self.named.under(self.canvas))
        try:
            return super().parse_args_and_config(args, *more, **kwargs)
        except yaml.YAMLError as error:
            raise ValueError(f"the --config file is not valid yaml: {error}") from error
        except ValueError as error:
            hints = [f"--{old} is now --{new}" for old, new in RENAMED.items() if f"--{old}" in str(error)]
            unknown = re.search(r"(?:arguments are not used by|Unknown arguments from).*?(\[.*?\])", str(error))
            if unknown and not hints:
                hints = [self.no_such([str(word) for word in ast.literal_eval(unknown[1])])]
            if not hints:
                raise
            raise ValueError("; ".join(hints)) from error

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        for action in self._actions:
            for other in (option.lstrip("-") for option in action.option_strings if action.nargs != 0):
                if other in config and other != action.dest:
                    if action.dest in config:
                        raise ValueError(f"{other} and {action.dest} in the --config file are one setting: keep one")
                    config[action.dest] = config.pop(other)
        if self.named:  # on the command line, which overrides the file
            config = self.named.under(self.canvas | config)
        elif "method" in config:
            from d1.rl.checks import find_method

            method = find_method(config["method"])
            config = method.under(self.canvas | config) | config
        return super().set_defaults_with_config(**config)


class HelpAll(argparse.Action):
    """Print the help with all flags, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *found: Any) -> NoReturn:
        make_parser(parser.prog, everything=True).print_help()
        parser.exit()


def make_parser(prog: str = "diffu_grpo_train.py", everything: bool = False) -> TrlParser:
    with quick_imports():
        from d1.rl.config import DiffuGRPOConfig

    usage = "%(prog)s [--config FILE] --model_path MODEL --output_dir FOLDER [--FLAG VALUE ...]"
    about = "--config FILE reads flags from a yaml file, NAME: VALUE; flags on the command line override it."
    parser = Parser(DiffuGRPOConfig, everything, prog=prog, usage=usage, description=about)
    all_flags = "list all flags of TRL, Transformers' Trainer and PEFT too"
    parser.add_argument("--help_all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help=all_flags)
    return parser


def main(
    args: DiffuGRPOConfig, model_args: ModelConfig, callbacks: list[TrainerCallback] | None = None
) -> DiffuGRPOTrainer | None:
    """Trains; returns the trainer, or None if the run was finished already.

    Raises:
        ValueError, OSError: a setting, a file or a row is wrong; raised before the model is loaded where possible.
    """
    from d1.rl.config import INHERITED

    check_ranges(vars(model_args), INHERITED)
    check_output_dir(str(args.output_dir))
    with quick_imports():  # only now: they take seconds, and `--help` does not need them
        from d1.rl.train import stage
        from d1.runs.stage import run

    return run(stage(args, model_args, callbacks))


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs RL as the command `prog` with `arguments` (default: those of the command line), then exits."""
    run_script(prog, lambda: main(*make_parser(prog).parse_args_and_config(arguments)))


if __name__ == "__main__":
    cli("d1.rl.train")
