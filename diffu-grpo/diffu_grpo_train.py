"""diffu-GRPO: reinforcement learning of a masked diffusion language model.

On the pocket model, on any machine:
    python diffu_grpo_train.py --config pocket.yaml --output_dir ../runs/grpo
LLaDA-8B with LoRA on 8 GPUs, d1's settings (`run.sh` does this for you):
    accelerate launch --config_file accelerate.yaml diffu_grpo_train.py --config slurm_scripts/train.yaml \
        --model_path GSAI-ML/LLaDA-8B-Instruct --dataset gsm8k --output_dir ../runs/gsm8k
Any field of `DiffuGRPOConfig` and of TRL's `ModelConfig` (LoRA, 4-bit) is a flag; flags win over the yaml.
Add `--resume_from_checkpoint true` to continue a run that was stopped.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from diffu_grpo_config import DiffuGRPOConfig
from diffu_grpo_trainer import DiffuGRPOTrainer
from peft import PeftModel
from rewards import accuracy_of, check_rewards
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState
from trl import ModelConfig, TrlParser, get_peft_config

from d1.models import load_model, load_tokenizer
from d1.models.adapters import merge_adapter
from d1.models.tokenizer import check_chat_template, encode_prompt, render_prompt
from d1.runs.checkpoints import checkpoint_to_resume, copy_model, is_finished
from d1.runs.processes import check_processes, leave
from d1.runs.record import log_without_account, save_record
from d1.tasks import load_task

logger = logging.getLogger(__name__)

RENAMED = {  # names that d1's settings have and TRL and Transformers no longer know
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps (below 1 it is a share of the steps)",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": "resume_from_checkpoint, or an output_dir of its own for each run",
    "wandb_log_unique_prompts": "log_unique_prompts",
}

ONLY = {  # settings of TRL's that nothing here reads, and their defaults
    "model_init_kwargs": None,
    "cast_lm_head_to_fp32": False,
    "model_revision": "main",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": None,
}

# What a checkpoint's rollout, counters and weights belong to.
SAME_RUN = (
    "model_path",
    "use_peft",
    "dataset",
    "data_file",
    "seed",
    "per_device_train_batch_size",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
    "max_completion_length",
)


class Parser(TrlParser):
    """TRL's, which says what replaced a flag."""

    def parse_args_and_config(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        try:
            return super().parse_args_and_config(*args, **kwargs)
        except ValueError as error:
            hints = [f"--{old} is now --{new}" for old, new in RENAMED.items() if f"--{old}" in str(error)]
            if not hints:
                raise
            raise ValueError("; ".join(hints)) from error


def make_parser() -> TrlParser:
    return Parser((DiffuGRPOConfig, ModelConfig), prog="diffu_grpo_train.py")


def check_settings(args: DiffuGRPOConfig, model_args: ModelConfig) -> None:
    """Refuses settings that contradict each other, before anything is loaded."""
    if not args.model_path:
        raise ValueError("--model_path is missing: a hub id or a folder, e.g. --model_path ../pocket/base")
    if model_args.model_name_or_path:
        raise ValueError("--model_name_or_path is not used here; the model is --model_path")
    for name, only in ONLY.items():
        value = getattr(args if hasattr(args, name) else model_args, name)
        if value != only:
            raise ValueError(f"{name}={value!r} would be ignored here: leave it at {only!r}")
    if model_args.load_in_8bit:
        raise ValueError("8-bit loading is not supported; use --load_in_4bit (NF4)")
    if model_args.load_in_4bit and not (torch.cuda.is_available() and model_args.use_peft):
        raise ValueError(
            "--load_in_4bit (NF4, bitsandbytes) needs a GPU and --use_peft: on a CPU leave it out, and without LoRA "
            "there would be nothing to train"
        )
    if args.sync_ref_model and model_args.use_peft:
        raise ValueError(
            "sync_ref_model needs a reference model in memory; with LoRA the reference is the model without its "
            "adapter. Train fully, or leave sync_ref_model off (with LoRA it did nothing in d1 either)"
        )


def check_same_run(checkpoint: str, args: DiffuGRPOConfig, model_args: ModelConfig) -> None:
    """Refuses to continue a run whose checkpoints mean something else under the settings of now."""
    record = Path(checkpoint).parent / "run.json"
    if not record.exists():
        return
    settings = json.loads(record.read_text())["settings"]
    now = {**vars(args), **vars(model_args)}
    before = {**now, **settings, **settings["model"]}
    changed = [f"{name} {before[name]} (now {now[name]})" for name in SAME_RUN if before[name] != now[name]]
    if changed:
        raise ValueError(
            f"{record.parent} holds another run, of {', '.join(changed)}: continue it with its own settings, or choose "
            "another output_dir"
        )


def save_finished(checkpoint: str, args: DiffuGRPOConfig) -> None:
    """All that is left to do where a run was killed between its last checkpoint and its end."""
    states = [Path(folder) / "trainer_state.json" for folder in (checkpoint, str(args.output_dir))]
    steps = [TrainerState.load_from_json(str(state)).global_step for state in states if state.exists()]
    if steps[1:] != steps[:1]:
        best = TrainerState.load_from_json(str(states[0])).best_model_checkpoint
        copy_model(best if args.load_best_model_at_end and best else checkpoint, str(args.output_dir))
        shutil.copy(states[0], states[1])
    logger.info("%s is finished: there is nothing left to train.", args.output_dir)


def load_problems(task: ModuleType, args: DiffuGRPOConfig) -> tuple[Dataset, Dataset | None]:
    """Training rows and, if the run evaluates, validation rows, with the columns the rewards ask for."""
    train = task.load_rows("train", args.data_file)
    evaluation = None
    if args.eval_strategy != "no":
        evaluation = task.load_rows("validation", args.eval_data_file)
        evaluation = evaluation.select(range(min(args.eval_limit or len(evaluation), len(evaluation))))
    if "prompt" not in train.column_names:
        raise ValueError(f"the rows of task {args.dataset} have no column 'prompt', only {train.column_names}")
    return train, evaluation


def check_prompts(rows: Dataset, tokenizer: PreTrainedTokenizerBase, args: DiffuGRPOConfig) -> None:
    """Refuses prompts longer than `max_prompt_length`, or says that the trainer will cut them if `truncate_prompts`."""
    texts = [render_prompt(tokenizer, prompt, **(args.chat_template_kwargs or {})) for prompt in rows["prompt"]]
    lengths = [len(encode_prompt(tokenizer, text)) for text in texts]
    too_long = [index for index, length in enumerate(lengths) if length > args.max_prompt_length]
    if not too_long:
        return
    if not args.truncate_prompts:
        raise ValueError(
            f"{len(too_long)} of {len(rows)} prompts are longer than max_prompt_length={args.max_prompt_length} tokens "
            f"(the first is row {too_long[0]}, the longest has {max(lengths)}): raise max_prompt_length, or pass "
            "--truncate_prompts true to keep only the end of them"
        )
    logger.warning("The beginning of %d of %d prompts will be cut off.", len(too_long), len(rows))


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


def plan(args: DiffuGRPOConfig, num_prompts: int) -> dict[str, Any]:
    """What the run is about to do, in numbers.

    Raises:
        ValueError: the training problems are too few for one rollout.
    """
    completions = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    rollout = args.per_device_train_batch_size * args.world_size * int(args.steps_per_generation or 1)
    cycle = int(args.steps_per_generation or 1) * args.num_iterations  # micro-steps that share one rollout
    groups = rollout // int(args.num_generations or 1)
    rollouts_an_epoch = num_prompts // groups
    if not rollouts_an_epoch:
        raise ValueError(
            f"a rollout takes {groups} prompts and there are {num_prompts}: lower per_device_train_batch_size or "
            "steps_per_generation (by default gradient_accumulation_steps), or add problems"
        )
    steps_an_epoch = math.ceil(rollouts_an_epoch * cycle / args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_an_epoch)
    epochs, rest = divmod(steps, steps_an_epoch)  # the last step of an epoch may be short of micro-steps
    rollouts = epochs * rollouts_an_epoch + math.ceil(rest * args.gradient_accumulation_steps / cycle)
    scored = args.num_iterations * (2 if args.beta else 1)
    return {
        "processes": args.world_size,
        "prompts an optimizer step": completions / int(args.num_generations or 1),
        "completions an optimizer step": completions,
        "completions a rollout": rollout,
        "optimizer steps": steps,
        "rollouts": rollouts,
        "forward passes a rollout (sampling + old and reference log-probs)": args.diffusion_steps + scored,
        "updates on each rollout (mu)": args.num_iterations,
    }


class TimeLeft(TrainerCallback):
    """Says once how long a run will take, when two steps and a rollout are done; evaluations come on top."""

    def __init__(self, rollout_seconds: list[float]) -> None:
        self.rollout_seconds = rollout_seconds
        self.steps, self.started, self.said = 0, 0.0, False

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self.steps:
            self.started = time.perf_counter()

    def on_step_end(self, args: DiffuGRPOConfig, state: TrainerState, control: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.steps += 1
        if self.said or self.steps < 2 or not self.rollout_seconds:
            return
        self.said = True
        rollout = sum(self.rollout_seconds) / len(self.rollout_seconds)
        step = (time.perf_counter() - self.started - sum(self.rollout_seconds)) / self.steps
        steps = state.max_steps - state.global_step
        rollouts = (
            steps * args.gradient_accumulation_steps / (int(args.steps_per_generation or 1) * args.num_iterations)
        )
        if state.is_world_process_zero:
            left = timedelta(seconds=round(steps * step + rollouts * rollout))
            logger.info("About %s left: %d steps of %.2g s, rollouts of %.2g s", left, steps, step, rollout)


def main(
    args: DiffuGRPOConfig, model_args: ModelConfig, callbacks: list[TrainerCallback] | None = None
) -> DiffuGRPOTrainer | None:
    """Trains; returns the trainer, or None where the run was finished already."""
    check_processes(args.world_size)
    check_settings(args, model_args)
    checkpoint = checkpoint_to_resume(str(args.output_dir), args.resume_from_checkpoint)
    if checkpoint:
        check_same_run(checkpoint, args, model_args)
        args.eval_on_start = False  # it was, at the start
        if is_finished(checkpoint, args):
            if args.should_save:
                save_finished(checkpoint, args)
            return None
    task = load_task(args.dataset)
    train_rows, eval_rows = load_problems(task, args)
    check_rewards(task, train_rows, args.dataset)
    tokenizer = load_tokenizer(str(args.model_path), plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, str(args.model_path), flag="--plain_chat_template true")
    for rows in filter(None, (train_rows, eval_rows)):
        check_prompts(rows, tokenizer, args)

    numbers = plan(args, len(train_rows))
    kind = str(args.distributed_state.distributed_type) if args.distributed_state else "NO"
    if PartialState().is_main_process:
        logger.info("Plan: %s", "; ".join(f"{name}: {value:g}" for name, value in numbers.items()))
        settings = {**args.to_dict(), "model": vars(model_args), "plan": numbers, "distributed_type": kind}
        save_record(str(args.output_dir), "run.json", settings)
        if "wandb" in args.report_to:
            log_without_account(str(args.output_dir))

    args.reward_weights = [*(args.reward_weights or [1.0] * len(task.REWARDS)), 0.0]
    trainer = DiffuGRPOTrainer(
        model=start_model(args, model_args),
        reward_funcs=[*task.REWARDS, accuracy_of(task)],
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        task_name=args.dataset,
        callbacks=callbacks,
    )
    trainer.add_callback(TimeLeft(trainer.rollout_seconds))
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(args.output_dir)
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(*make_parser().parse_args_and_config())
    leave()
