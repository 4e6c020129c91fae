"""Build the problems, the model and the trainer of an RL run from its settings."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import TrainerCallback
from trl import ModelConfig, get_peft_config

from d1.models import load_model, load_tokenizer
from d1.models.adapters import lora_targets, merge_adapter
from d1.models.tokenizer import check_chat_template, check_mask_token
from d1.rl.budget import StopAtCompute, is_spent
from d1.rl.checks import ON_RESUME, check_config, check_model_settings, check_prompts, settle_canvas
from d1.rl.choose_method import find_method
from d1.rl.config import DiffuGRPOConfig
from d1.rl.plan import idle, plan
from d1.rl.rewards import accuracy_of, check_rewards
from d1.rl.shown_problems import ShowProblems
from d1.rl.state import check_rollout
from d1.rl.trainer import DiffuGRPOTrainer
from d1.runs.fingerprint import ROWS, of_rows
from d1.runs.preflight import check_start
from d1.runs.skeleton import Prepared, Stage, evaluation
from d1.tasks import load_task, under_protocol, with_rewards, with_shots

logger = logging.getLogger(__name__)


def stage(args: DiffuGRPOConfig, model_args: ModelConfig, callbacks: list[TrainerCallback] | None) -> Stage:
    """RL as a `Stage` for `d1.runs.skeleton.run`."""
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
    from d1.rl.curves import report_page  # only now: matplotlib takes a second

    (folder / "report.html").write_text(report_page([folder], [folder.name]), encoding="utf-8")
    logger.info("Report: %s", folder / "report.html")
