"""diffu-GRPO: reinforcement learning of a masked diffusion language model.

On the pocket model, on any machine:
    python -m d1 rl --config diffu-grpo/pocket.yaml --model_path pocket/base --output_dir runs/grpo
LLaDA-8B with LoRA on 8 GPUs, d1's settings (`diffu-grpo/run.sh` does this for you):
    accelerate launch --config_file diffu-grpo/accelerate.yaml -m d1.rl.train \
        --config diffu-grpo/slurm_scripts/train.yaml \
        --model_path GSAI-ML/LLaDA-8B-Instruct --dataset gsm8k --output_dir runs/gsm8k
Any field of `DiffuGRPOConfig` and of TRL's `ModelConfig` (LoRA, 4-bit) is a flag; flags win over the yaml.
Add `--resume_from_checkpoint true` to continue a run that was stopped.
"""

from __future__ import annotations

import argparse
import ast
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from trl import ModelConfig, TrlParser

from d1.ranges import check_ranges
from d1.runs.entry import quick_imports, refuse_flags, run_script
from d1.runs.output_dir import check_output_dir, writing

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from d1.rl.config import DiffuGRPOConfig
    from d1.rl.methods import Method
    from d1.rl.trainer import DiffuGRPOTrainer

logger = logging.getLogger(__name__)

RENAMED = {  # names that d1's settings have and TRL and Transformers no longer know
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps (below 1 it is a share of the steps)",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": "resume_from_checkpoint, or an output_dir of its own for each run",
    "wandb_log_unique_prompts": "log_unique_prompts",
}


class Parser(TrlParser):
    """TRL's, which says in one line what is wrong or what replaced a flag, and knows a flag's other names in a yaml.

    The later wins: defaults, a yaml, `--method`, the other flags. A method that the yaml names comes before its other
    lines. What a paper gives for the size of its models (`Method.scale`) comes before any yaml.
    """

    named: Method | None

    def error(self, message: str) -> NoReturn:
        refuse_flags(self, message)

    def parse_args_and_config(self, args: Iterable[str] | None = None, *more: Any, **kwargs: Any) -> tuple[Any, ...]:
        args = [
            part
            for word in (sys.argv[1:] if args is None else args)
            for part in (word.split("=", 1) if word.startswith("--config=") else [word])
        ]
        if args[-1:] == ["--config"]:
            self.error("argument --config: expected the path of a yaml file")
        from d1.rl.choose_method import find_method

        # As this parser reads it, abbreviated or not; None unless it is there.
        name = self.parse_known_args(args, argparse.Namespace(method=None))[0].method
        self.named = None if name is None else find_method(name)
        if self.named:
            self.set_defaults(**self.named.scale, **self.named.values)
        try:
            return super().parse_args_and_config(args, *more, **kwargs)
        except yaml.YAMLError as error:
            raise ValueError(f"the --config file is no yaml: {error}") from error
        except ValueError as error:
            hints = [f"--{old} is now --{new}" for old, new in RENAMED.items() if f"--{old}" in str(error)]
            unknown = re.search(r"(?:arguments are not used by|Unknown arguments from).*?(\[.*?\])", str(error))
            if unknown:
                words = " ".join(map(str, ast.literal_eval(unknown[1])))
                hints = hints or [f"there is no such setting: {words} (--help lists them)"]
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
        if self.named:  # on the command line, hence above the file
            config = {**self.named.scale, **config, **self.named.values}
        elif "method" in config:
            from d1.rl.choose_method import find_method

            method = find_method(config["method"])
            config = {**method.scale, **method.values, **config}
        return super().set_defaults_with_config(**config)


def make_parser(prog: str = "diffu_grpo_train.py") -> TrlParser:
    with quick_imports():
        from d1.rl.config import DiffuGRPOConfig

    return Parser((DiffuGRPOConfig, ModelConfig), prog=prog)


def main(
    args: DiffuGRPOConfig, model_args: ModelConfig, callbacks: list[TrainerCallback] | None = None
) -> DiffuGRPOTrainer | None:
    """Trains; returns the trainer, or None where the run was finished already.

    Raises:
        ValueError, OSError: a setting, a file or a row makes no sense; wherever possible, before the model is loaded.
    """
    from d1.rl.config import INHERITED

    check_ranges(vars(model_args), INHERITED)
    check_output_dir(str(args.output_dir))

    # Only now, for they take seconds and `--help` needs none of them.
    with quick_imports():
        from accelerate import PartialState

        from d1.models import load_tokenizer
        from d1.models.tokenizer import check_chat_template
        from d1.rl import setup
        from d1.rl.budget import StopAtCompute, is_spent
        from d1.rl.checks import check_config, check_model_settings, check_prompts, check_same_run
        from d1.rl.choose_method import find_method
        from d1.rl.plan import plan
        from d1.rl.rewards import accuracy_of, check_rewards
        from d1.rl.shown_rollouts import ShowRollouts
        from d1.rl.state import check_rollout
        from d1.rl.trainer import DiffuGRPOTrainer
        from d1.runs.checkpoints import checkpoint_to_resume, is_finished
        from d1.runs.console import RunConsole, log_to_console, train_with_console
        from d1.runs.hub import hold_push, publish
        from d1.runs.processes import check_processes
        from d1.runs.record import log_without_account, save_record
        from d1.tasks import load_task
        from d1.tasks.protocols import under_protocol

    log_to_console()
    check_processes(args.world_size)
    check_model_settings(args, model_args)
    push, changed = hold_push(args), setup.changed_settings(args, model_args)
    checkpoint = checkpoint_to_resume(str(args.output_dir), args.resume_from_checkpoint)
    if checkpoint:
        check_same_run(checkpoint, args, model_args)
        args.eval_on_start = False  # it was, at the start
        if is_finished(checkpoint, args) or is_spent(checkpoint, args.max_compute_tokens):
            if args.should_save:
                setup.save_finished(checkpoint, args)
                setup.write_report(args)
                publish(args, push, started_again=True)
            return None
        check_rollout(Path(checkpoint), args)
    task = under_protocol(load_task(args.dataset), args.prompt_protocol)
    train_rows, eval_rows = setup.load_problems(task, args)
    check_rewards(task, train_rows, args.dataset)
    weights = args.reward_weights or [1.0] * len(task.REWARDS)
    if len(weights) != len(task.REWARDS):
        count = f"task {args.dataset} has {len(task.REWARDS)} rewards"
        raise ValueError(f"--reward_weights takes a number for each: {count}, got {len(weights)}")
    args.reward_weights = [*weights, 0.0]  # the accuracy is only watched
    tokenizer = load_tokenizer(str(args.model_path), plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, str(args.model_path), flag="--plain_chat_template true")
    longest = max(check_prompts(rows, tokenizer, args) for rows in filter(None, (train_rows, eval_rows)))
    numbers = plan(args, len(train_rows), check_config(longest, args))
    kind = str(args.distributed_state.distributed_type) if args.distributed_state else "NO"
    if PartialState().is_main_process:
        logger.info("Plan: %s", "; ".join(f"{name}: {value:g}" for name, value in numbers.items()))
        settings = {**args.to_dict(), "model": vars(model_args), "plan": numbers, "distributed_type": kind}
        settings |= {
            "paper": find_method(args.method).paper,
            "changed": changed,
            "validation_problems": len(eval_rows or []),
        }
        save_record(str(args.output_dir), "run.json", settings)
        if "wandb" in args.report_to:
            log_without_account(str(args.output_dir))

    model = setup.start_model(args, model_args)
    trainer = DiffuGRPOTrainer(
        model=model,
        reward_funcs=[*task.REWARDS, accuracy_of(task)],
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=setup.adapter_config(model_args, model),
        task_name=args.dataset,
        callbacks=callbacks,
    )
    if args.report:
        trainer.add_callback(ShowRollouts(trainer))
    cycle = int(args.steps_per_generation or 1) * args.num_iterations  # micro-steps that share one rollout
    console = RunConsole(trainer.rollout_seconds, args.gradient_accumulation_steps / cycle)
    if args.max_compute_tokens:
        trainer.add_callback(StopAtCompute(trainer, args.max_compute_tokens))
    train_with_console(trainer, console, checkpoint)
    with writing(str(args.output_dir)):
        trainer.save_model(args.output_dir)
        trainer.save_state()
        if args.should_save:
            setup.write_report(args)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if args.should_save:  # the other processes need not wait for an upload
        publish(args, push)
    return trainer


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs RL as the command `prog`, with `arguments` in place of those of the command line; exits."""
    run_script(prog, lambda: main(*make_parser(prog).parse_args_and_config(arguments)))


if __name__ == "__main__":
    cli("d1.rl.train")
