"""Makes the problems and the model of diffu_grpo_train.py from its settings, and finishes a run killed at its end."""

from __future__ import annotations

import logging
import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import TrainerState
from trl import ModelConfig, get_peft_config

from d1.models import load_model
from d1.models.adapters import lora_targets, merge_adapter
from d1.rl.choose_method import find_method
from d1.rl.config import INHERITED, DiffuGRPOConfig
from d1.runs.checkpoints import copy_model
from d1.runs.console import write_metrics
from d1.runs.record import changed
from d1.tasks.protocols import with_shots

logger = logging.getLogger(__name__)

# Settings that a model card has elsewhere, that made no difference to the model, or that follow from others.
NOT_OF_THE_METHOD = (
    *("model_path", "dataset", "data_file", "method", "resume_from_checkpoint", "bf16", "local_rank"),
    *("generation_batch_size", "steps_per_generation", "pad_to_multiple_of", "logging_steps", "save_steps"),
    *("save_total_limit", "eval_steps", "eval_limit", "per_device_eval_batch_size"),
)


def load_problems(task: ModuleType, args: DiffuGRPOConfig) -> tuple[Dataset, Dataset | None]:
    """Training rows and, if the run evaluates, validation rows, with the columns the rewards ask for."""
    train = task.load_rows("train", args.data_file)
    evaluation = None
    if args.eval_strategy != "no":
        try:
            evaluation = task.load_rows("validation", args.eval_data_file)
        except ConnectionError as error:  # which speaks of the flag for the rows trained on
            raise ConnectionError(str(error).replace("--data_file", "--eval_data_file")) from error
        evaluation = evaluation.select(range(min(args.eval_limit or len(evaluation), len(evaluation))))
    if "prompt" not in train.column_names:
        raise ValueError(f"the rows of task {args.dataset} have no column 'prompt', only {train.column_names}")
    return with_shots(task, train, args.data_file, evaluation)


def start_model(args: DiffuGRPOConfig, model_args: ModelConfig) -> Any:
    """The model to train. An SFT adapter is merged into its base: RL starts from the model SFT left."""
    model = load_model(
        str(args.model_path),
        dtype=model_args.dtype if model_args.dtype != "float32" else None,
        quantization="nf4" if model_args.load_in_4bit else None,
        attn_implementation=model_args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
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
    """The LoRA adapter to train, None for all weights; `--lora_target_modules` means what it means in SFT.

    TRL 1.16 makes a text of a list of one name, which PEFT takes for a pattern that the whole name must match.
    """
    config: Any = get_peft_config(model_args)
    if config is not None and config.target_modules is not None:
        config.target_modules = set(lora_targets(model, config.target_modules))
    return config


def changed_settings(args: DiffuGRPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    """The settings of a run that differ from those of its method, for its model card: of TRL's and Transformers' own,
    numbers and a few names, without what they derive from others."""
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in (*fields(args), *fields(model_args))
    }
    method = find_method(args.method)
    known = {*DiffuGRPOConfig.__annotations__, *INHERITED, "lr_scheduler_type", "optim", "sync_ref_model"}
    settings = {name: value for name, value in vars(args).items() if name in known} | vars(model_args)
    return changed(settings, {**defaults, **method.scale, **method.values}, NOT_OF_THE_METHOD)


def save_finished(checkpoint: str, args: DiffuGRPOConfig) -> None:
    """Finishes a run that was killed after its last checkpoint: copies its model and state from there."""
    states = [Path(folder) / "trainer_state.json" for folder in (checkpoint, str(args.output_dir))]
    steps = [TrainerState.load_from_json(str(state)).global_step for state in states if state.exists()]
    if steps[1:] != steps[:1]:
        best = TrainerState.load_from_json(str(states[0])).best_model_checkpoint
        copy_model(best if args.load_best_model_at_end and best else checkpoint, str(args.output_dir))
        shutil.copy(states[0], states[1])
        write_metrics(str(args.output_dir), TrainerState.load_from_json(str(states[0])).log_history)
    logger.info("%s is finished: there is nothing left to train.", args.output_dir)


def write_report(args: DiffuGRPOConfig) -> None:
    """Writes report.html into the folder of a run that ends, if it was asked for."""
    if args.report:
        from d1.rl.curves import report_page

        folder = Path(str(args.output_dir))
        (folder / "report.html").write_text(report_page([folder], [folder.name]), encoding="utf-8")
        logger.info("Report: %s", folder / "report.html")
