"""RL as a `Stage` of `d1.runs.stage`: its problems, its model, its trainer, and the problems that a report shows."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import ModelConfig, get_peft_config

from d1 import extensions
from d1.models import load_model, load_tokenizer
from d1.models.adapters import lora_targets, merge_adapter
from d1.models.folder import ModelFolder
from d1.models.kinds import has_masks, kind_of
from d1.models.tokenizer import (
    check_chat_template,
    check_mask_token,
    check_new_roles,
    check_no_mask,
    encode_prompt,
    encode_prompts,
    encode_text,
    render_prompt,
)
from d1.rl.bridge import EQUAL_REWARDS
from d1.rl.checks import (
    check_config,
    check_model_settings,
    check_prompts,
    check_single_turn,
    check_trace_column,
    resume_rules,
    set_by_user,
)
from d1.rl.config import DiffuGRPOConfig, inactive_settings, plan
from d1.rl.hints import TRACE
from d1.rl.methods import Trained
from d1.rl.rewards import accuracy_of, check_rewards, tokens_per_forward_pass
from d1.rl.tables import find_method
from d1.rl.trainer import DiffuGRPOTrainer, StopAtCompute, budget_exhausted
from d1.runs.checkpoints import read_state
from d1.runs.console import log_to_console
from d1.runs.record import ROWS, hash_rows
from d1.runs.stage import Prepared, Stage, check_model_is_kept, cpu_default_bf16
from d1.runs.turns import TurnSettings
from d1.sampling.graphs import check_compile
from d1.sampling.settings import SamplingFlags
from d1.tasks import load_task, shots_of, under_protocol, with_rewards, with_shots, without_rewards

logger = logging.getLogger(__name__)


def stage(args: DiffuGRPOConfig, model_args: ModelConfig, callbacks: list[TrainerCallback] | None) -> Stage:
    """The stage of a run. Raises ValueError for settings that contradict each other or the model's config."""
    check_model_settings(args, model_args)
    log_to_console()

    # What the model's config decides
    folder = ModelFolder.read(str(args.model_path))
    check_model_is_kept(str(args.output_dir), folder)
    config = folder.config
    check_compile(
        args.compile,
        config,
        quantized=model_args.load_in_4bit,
        kernel=model_args.attn_implementation,
        on_cpu=args.use_cpu,
    )
    # The canvas and the model's blocks on it: a resume compares them with those of the run.
    args.resolve_canvas(config, folder.gen_length)
    args.sampling_settings(config)
    output_dir = Path(str(args.output_dir))
    if args.bf16_is_unset and not args.bf16 and cpu_default_bf16(output_dir, args.resume_from_checkpoint, folder):
        args.bf16, args.mixed_precision = True, "bf16"  # as `TrainingArguments` sets both

    return Stage(
        training=args,
        settings=lambda: {**args.to_dict(), "model": vars(model_args)},
        on_resume=resume_rules(args),
        ended=lambda checkpoint: budget_exhausted(str(checkpoint), args.max_compute_tokens),
        prepare=lambda: prepare(args, model_args, folder, callbacks),
        next_command=lambda: next_command(args, config),
        outcome=lambda: [] if args.state_reward else learnt_nothing(Path(str(args.output_dir))),
        conclude=lambda: extensions.write_report(Path(str(args.output_dir))) if args.report else None,
    )


def prepare(
    args: DiffuGRPOConfig, model_args: ModelConfig, folder: ModelFolder, callbacks: list[TrainerCallback] | None
) -> Prepared:
    """The plan of a run with checked problems, and a function that makes the trainer; `folder` is the model's."""
    config = folder.config

    # The task, its rows and its rewards
    task = under_protocol(load_task(args.dataset), args.prompt_protocol)
    if args.accuracy_reward:
        task = without_rewards(task)
    task = with_rewards(task, args.reward_file)
    train_rows, eval_rows = load_problems(task, args)
    if args.hints != "none":
        train_rows = with_traces(task, train_rows, args)
    check_rewards(task, train_rows, args.dataset)
    if eval_rows is not None:
        check_rewards(task, eval_rows, args.dataset, "validation rows")
    weights = args.reward_weights or [1.0] * len(task.REWARDS)
    if len(weights) != len(task.REWARDS):
        count = f"task {args.dataset} has {len(task.REWARDS)} rewards"
        raise ValueError(f"--reward_weights needs one number per reward: {count}, got {len(weights)}")
    rewards = [*task.REWARDS]
    if args.speed_reward:
        rewards.append(tokens_per_forward_pass)
        weights = [*weights, args.speed_reward]
    rewards.append(accuracy_of(task))
    args.reward_weights = [*weights, float(args.accuracy_reward)]  # with 0, the accuracy is only logged

    # The tokenizer, the tools, and the longest prompt as the model gets it
    tokenizer = load_tokenizer(str(args.model_path), plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, str(args.model_path), flag="--plain_chat_template true")
    if args.mask_id is not None:
        check_mask_token(tokenizer, str(tokenizer.convert_ids_to_tokens(args.mask_id)))
    if args.hints != "none":
        check_trace_texts(train_rows, tokenizer, args)
    tools = extensions.RunTools(args, tokenizer, config) if args.tools else Tools(args)
    datasets = [rows for rows in (train_rows, eval_rows) if rows is not None]
    longest = max(longest_prompt(rows, tokenizer, args, tools) for rows in datasets)

    # The plan, what differs from the method as published, and settings without effect
    numbers = plan(args, len(train_rows), check_config(config, longest, args))
    if args.should_save:
        logger.info("Plan:%s", "".join(f"\n  {value:>8g}  {name}" for name, value in numbers.items()))
        log_deviation(args, model_args, numbers["prompts per optimizer step"])
        set_names = [name for name in inactive_settings(args) if getattr(args, name) is not None]
        if set_names:
            inactive = [f"{name} {getattr(args, name)}" for name in set_names]
            why = "each rollout has one optimizer step and every ratio is 1"
            logger.info("Without effect, because %s: %s", why, ", ".join(inactive))
        log_unused_lora(args, model_args)
        # Not refused: `--eval_strategy no` also turns off the evaluation that a config file describes.
        if args.eval_strategy == "no":
            unused = [name for name in EVAL_SETTINGS if set_by_user(args, name)]
            if unused:
                described = ", ".join(f"{name} {getattr(args, name)}" for name in unused)
                logger.info("Without effect, because eval_strategy is no: %s", described)

    def start() -> DiffuGRPOTrainer:
        model = start_model(folder, model_args)
        trainer = DiffuGRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=args,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            peft_config=adapter_config(model_args, model),
            task_name=args.dataset,
            callbacks=callbacks,
            tools=list(tools.functions),
        )
        if not args.state_reward:  # which gives the steps of equal completions advantages of their own
            trainer.add_callback(WatchGroups())
        if args.report:
            trainer.add_callback(extensions.ShowProblems(trainer, task, train_rows if eval_rows is None else eval_rows))
        if args.max_compute_tokens:
            trainer.add_callback(StopAtCompute(trainer, args.max_compute_tokens, args.save_at_compute or ()))
        return trainer

    facts = {
        "plan": numbers,
        "idle": inactive_settings(args),
        "paper": find_method(args.method).paper,
        ROWS + "dataset": hash_rows(train_rows),
        "validation_problems": len(eval_rows or []),
    }
    return facts, start


LORA_SETTINGS = (  # of an adapter
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
    *("lora_modules_to_save", "use_rslora", "use_dora"),
)
EVAL_SETTINGS = ("eval_steps", "eval_limit", "num_generations_eval")  # of a run with an evaluation


def log_deviation(args: DiffuGRPOConfig, model_args: ModelConfig, prompts_per_step: float) -> None:
    """Logs what this run has in other numbers than the method's authors, such as a rate for fewer prompts."""
    lora_rank = 0
    if model_args.use_peft:
        lora_rank = model_args.lora_r
    run = Trained(prompts_per_step, lora_rank, model_args.load_in_4bit)
    deviation = find_method(args.method).deviation(run, args.num_generations or 1, args.learning_rate)
    if deviation:
        logger.info("Method %s: %s.", args.method, deviation)


def log_unused_lora(args: DiffuGRPOConfig, model_args: ModelConfig) -> None:
    """Logs the settings of an adapter that were given and have no effect. They are not refused: `--use_peft false` also
    turns off the adapter that a config file describes."""
    names: tuple[str, ...] = ()
    reason = ""
    if not model_args.use_peft:
        names, reason = LORA_SETTINGS, "use_peft is false"
    elif args.disable_dropout and model_args.lora_dropout:
        names, reason = ("lora_dropout",), "disable_dropout is true"
    defaults = ModelConfig()
    given = [name for name in names if getattr(model_args, name) != getattr(defaults, name)]
    if given:
        described = ", ".join(f"{name} {getattr(model_args, name)}" for name in given)
        logger.info("Without effect, because %s: %s", reason, described)


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
        if rows is not None and "prompt" not in rows.column_names:
            raise ValueError(
                f"the rows of task {args.dataset} to {what} on have no column 'prompt', only {rows.column_names}"
            )
    return with_shots(task, train, args.data_file, evaluation, args.few_shot)


def with_traces(task: ModuleType, rows: Dataset, args: DiffuGRPOConfig) -> Dataset:
    """The rows with a worked solution in the column `trace`, by default the one that the task demonstrates. Raises
    ValueError for a task without any."""
    if TRACE in rows.column_names:
        return rows
    if not callable(getattr(task, "demonstrate", None)):
        raise ValueError(
            f"--hints {args.hints} needs worked solutions: task {args.dataset} has no demonstrate(row), and its rows "
            f"have no column {TRACE!r}"
        )
    return rows.add_column(TRACE, [task.demonstrate(row) for row in rows])


def check_trace_texts(rows: Dataset, tokenizer: PreTrainedTokenizerBase, args: DiffuGRPOConfig) -> None:
    """Raises ValueError for a worked solution that is no text, or that the tokenizer cannot read."""
    check_trace_column(rows, args)
    for number, trace in enumerate(rows[TRACE][:]):
        try:
            encode_text(tokenizer, trace)
        except ValueError as error:
            raise ValueError(f"row {number}, column {TRACE!r}: {error}") from error


class Tools:
    """The tools of a run, which has none. `d1.tools.rl.RunTools` are those of a run with `--tools`."""

    functions: Sequence[Callable[..., Any]] = ()

    def __init__(self, args: DiffuGRPOConfig) -> None:
        check_single_turn(args)

    def add_instructions(self, messages: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """A prompt as the model gets it, and options for its chat template."""
        return messages, {}


def longest_prompt(rows: Dataset, tokenizer: PreTrainedTokenizerBase, args: DiffuGRPOConfig, tools: Tools) -> int:
    """The length of the longest prompt in tokens, after truncation. Raises ValueError for one that is too long, or that
    the model cannot read."""
    options = args.chat_template_kwargs or {}
    prompts = [tools.add_instructions(prompt) for prompt in rows["prompt"][:]]  # `[:]` reads the column at once
    encoded = encode_prompts(tokenizer, [messages for messages, _ in prompts], **options, **prompts[0][1])
    lengths = []
    checked_roles: set[tuple[Any, ...]] = set()  # of prompts that the template writes in full
    for number, (messages, of_tools) in enumerate(prompts):
        try:
            if encoded is None:  # one by one, to name the prompt that cannot be encoded
                ids = encode_prompt(tokenizer, render_prompt(tokenizer, messages, **options, **of_tools))
            else:
                ids = encoded[number]
            check_new_roles(tokenizer, messages, {**options, **of_tools}, checked_roles)
            check_no_mask(tokenizer, ids, args.mask_id)
        except ValueError as error:
            raise ValueError(f"problem {number} (from 0): {error}") from error
        lengths.append(len(ids))
    return check_prompts(lengths, args)


def start_model(folder: ModelFolder, model_args: ModelConfig) -> Any:
    """The model to train. An SFT adapter is merged into its base, so that RL starts from the SFT model."""
    dtype = quantization = None
    if model_args.dtype != "float32":
        dtype = model_args.dtype
    if model_args.load_in_4bit:
        quantization = "nf4"
    model = load_model(
        folder,
        dtype=dtype,
        quantization=quantization,
        attn_implementation=model_args.attn_implementation,
    )
    if not isinstance(model, PeftModel):
        return model
    if model_args.load_in_4bit:
        raise ValueError(
            "an adapter cannot be merged into 4-bit weights exactly: first run "
            f"`python -m d1 merge BASE {folder.path} OUT` and pass OUT as --model_path"
        )
    return merge_adapter(model, folder.path)


def adapter_config(model_args: ModelConfig, model: Any) -> PeftConfig | None:
    """The LoRA adapter to train, None for all weights; `--lora_target_modules` has the same meaning as in SFT."""
    config: Any = get_peft_config(model_args)
    if config is not None and config.target_modules is not None:  # TRL 1.16 turns a list of one name into a pattern
        config.target_modules = set(lora_targets(model, config.target_modules))
    if config is not None and kind_of(model.config).model:
        config.task_type = None  # PEFT's wrapper of causal LMs calls methods that other classes lack
    return config


# Of a run with tools, the settings that `d1 eval` has, too
TURN_SETTINGS = ("tools", "tool_format", *(field.name for field in fields(TurnSettings)))


def next_command(args: DiffuGRPOConfig, config: Any) -> str:
    """The command that evaluates the model on the run's task, as the run asks, samples and reads answers, but greedily;
    `config` is the model's. Problems of a file are those of `eval_data_file`, else those that were trained on."""
    # The model, and the task's problems as the run asks them
    flags: dict[str, Any] = {"model_path": args.output_dir, "dataset": args.dataset}
    if args.eval_data_file:
        flags.update(split="validation", data_file=args.eval_data_file)
    elif args.data_file:
        flags.update(split="train", data_file=args.data_file)
    if args.prompt_protocol != "d1":
        flags["prompt_protocol"] = args.prompt_protocol
        task = under_protocol(load_task(args.dataset), args.prompt_protocol)
        if args.data_file and shots_of(task, args.few_shot):  # the training problems that its examples come from
            flags["few_shot_file"] = args.data_file
    flags["few_shot"] = args.few_shot
    names = ["plain_chat_template", "chat_template_kwargs"]
    if args.tools:
        names += TURN_SETTINGS
    for name in names:
        value = getattr(args, name)
        if value not in (None, False, getattr(TurnSettings, name, None)):
            flags[name] = value

    # The canvas and the sampler; the temperature is left out, so that the evaluation is greedy
    flags["gen_length"] = args.max_completion_length
    flags["block_length"] = args.block_length
    flags["diffusion_steps"] = args.diffusion_steps
    left_out = {"seed", *flags}
    if has_masks(config):
        left_out.update(("temperature", "end_temperature"))
    for flag in fields(SamplingFlags):
        if flag.name in left_out or not hasattr(args, flag.name):  # RL does not have all samplers
            continue
        if getattr(args, flag.name) != flag.default:
            flags[flag.name] = getattr(args, flag.name)
    return shlex.join(["python", "-m", "d1", "eval", *flag_words(flags)])


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """The words of a command line with these flags; True is a switch, False its opposite, None no flag."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            words += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


# --- Runs whose groups never differ -----------------------------------------------------------------------------------

ADVICE = (
    "take problems that the model solves sometimes, raise --temperature or --num_generations, or check that rewards "
    "read the answers"
)


def never_differed(log_history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rewards were equal within every group that these logs tell of, at least one."""
    shares = [log[EQUAL_REWARDS] for log in log_history if EQUAL_REWARDS in log]
    return bool(shares) and min(shares) == 1


class WatchGroups(TrainerCallback):
    """Warns while no group's rewards differ: at the first log, and each time the number of such logs has doubled."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = sum(EQUAL_REWARDS in log for log in state.log_history)
        if not state.is_world_process_zero or EQUAL_REWARDS not in state.log_history[-1] or logs & (logs - 1):
            return
        if never_differed(state.log_history):
            logger.warning(
                "Until step %d the rewards were equal within every group: all advantages are 0, and the model does not "
                "learn. If this goes on: %s.",
                *(state.global_step, ADVICE),
            )


def learnt_nothing(folder: Path) -> list[str]:
    """The line that ends the log of a run in which no group's rewards differed; none for other runs."""
    state = read_state(folder)
    if not never_differed(state.log_history):
        return []
    last = next(log for log in reversed(state.log_history) if EQUAL_REWARDS in log)
    return [
        f"Nothing was learnt: up to the last step, {state.global_step}, the rewards were equal within every group, so "
        f"that all advantages were 0. The last mean reward is {last.get('reward', math.nan):g}. Before the next run: "
        f"{ADVICE}."
    ]
