"""What users of d1, TRL, lm-eval and other programs call a flag or a command, for the hint of a message; nothing is
renamed by it. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from d1.ranges import nearest

Table = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

# Words -> the flags or arguments that they may mean here; a message names those that the command has.
FLAGS: Table = (
    # What is trained or run
    (
        ("model", "model_name_or_path", "model_path", "model_name", "model_id", "model_args", "pretrained"),
        ("model_path", "model_name", "source"),
    ),
    (("base_model", "base"), ("base", "model_path", "model_name", "source")),
    (
        ("checkpoint", "checkpoint_path", "ckpt", "adapter", "adapter_path", "lora_path", "peft", "peft_path"),
        ("checkpoint_path", "adapters", "model_path", "model_name"),
    ),
    (
        ("output", "out", "output_path", "output_folder", "output_dir", "out_dir", "save_dir", "save_path", "outdir"),
        ("output_dir", "out"),
    ),
    (("results", "results_dir", "result_dir", "log_dir", "logging_dir"), ("output_dir",)),
    (("name", "run_name", "job_name", "experiment_name", "exp_name", "tag"), ("job_name", "run_name", "suffix")),
    (("resume", "resume_from", "resume_from_checkpoint"), ("resume", "resume_from_checkpoint")),
    (("report", "wandb", "logger", "log_with", "use_wandb"), ("report_to",)),
    (("random_seed", "random_state"), ("seed",)),
    # Data
    (("task", "tasks", "dataset", "dataset_name", "benchmark"), ("dataset", "train_data")),
    (
        ("data", "data_file", "data_path", "dataset_path", "dataset_file", "train_data", "train_file", "train_dataset"),
        ("data_file", "train_data"),
    ),
    (
        ("eval_data", "eval_file", "eval_data_file", "eval_dataset", "validation_file", "val_file", "test_file"),
        ("eval_data_file", "data_file"),
    ),
    (("subset", "eval_split", "dataset_split", "dataset_config"), ("split",)),
    (("val_split", "validation_split", "test_size", "val_size", "eval_size"), ("test_split",)),
    (
        ("limit", "n_problems", "num_problems", "max_samples", "max_examples", "max_eval_samples", "num_examples"),
        ("limit", "eval_limit", "num_prompts"),
    ),
    (("num_fewshot", "fewshot", "few_shots", "shots", "num_shots", "n_shot", "n_shots"), ("few_shot",)),
    (("protocol", "prompt_template", "prompt_style", "template"), ("prompt_protocol",)),
    (("apply_chat_template", "chat_template"), ("plain_chat_template",)),
    (("num_workers", "workers", "preprocessing_num_workers", "dataset_num_proc"), ("num_proc",)),
    # Batches and the optimizer
    (
        ("batch", "bs", "batch_size", "train_batch_size", "micro_batch_size", "per_device_train_batch_size"),
        ("batch_size", "per_device_train_batch_size", "batch"),
    ),
    (("eval_batch_size", "per_device_eval_batch_size"), ("per_device_eval_batch_size", "batch_size")),
    (("gen_batch_size", "generation_batch_size"), ("rollout_batch_size", "sampling_batch_size", "batch_size")),
    (
        ("grad_accum", "grad_accum_steps", "gradient_accumulation", "gradient_accumulation_steps", "accum_steps"),
        ("grad_accum_steps", "gradient_accumulation_steps"),
    ),
    (("lr", "learning_rate"), ("learning_rate",)),
    (("wd",), ("weight_decay",)),
    (("epochs", "num_epochs", "num_train_epochs", "n_epochs", "max_epochs"), ("num_epochs", "num_train_epochs")),
    (("num_steps", "n_steps", "max_steps", "train_steps", "total_steps", "max_iters", "iterations"), ("max_steps",)),
    (("steps",), ("diffusion_steps", "max_steps")),
    (("warmup", "warmup_ratio", "num_warmup_steps"), ("warmup_steps",)),
    (("scheduler", "lr_scheduler", "lr_schedule"), ("lr_scheduler_type",)),
    (("grad_clip", "clip_grad_norm", "max_norm", "gradient_clipping"), ("max_grad_norm",)),
    (("save_steps", "save_every", "save_interval", "eval_every", "eval_interval"), ("save_steps", "eval_steps")),
    (("log_every", "log_interval", "log_steps"), ("logging_steps",)),
    # Weights and precision
    (("lora_rank", "rank", "lora_dim", "r"), ("lora_r",)),
    (("lora", "use_lora", "use_peft"), ("use_peft", "lora_r")),
    (("full", "full_finetune", "full_fine_tuning", "no_lora"), ("full_finetuning",)),
    (("target_modules", "lora_targets", "lora_target_modules"), ("lora_target_modules", "lora_targets")),
    (("qlora", "4bit", "load_4bit", "use_4bit", "quantization"), ("load_in_4bit",)),
    (("bf16", "fp16", "fp32", "precision", "torch_dtype", "mixed_precision"), ("dtype",)),
    (("attn", "attention", "attn_impl", "flash_attention", "use_flash_attention"), ("attn_implementation",)),
    (("grad_checkpointing", "gradient_checkpoint", "activation_checkpointing"), ("gradient_checkpointing",)),
    (("num_gpus", "n_gpus", "devices", "num_processes"), ("gpus",)),
    # Lengths and sampling
    (
        ("gen_length", "gen_len", "max_completion_length", "completion_length", "max_new_tokens", "max_tokens"),
        ("gen_length", "max_completion_length", "length"),
    ),
    (("max_gen_toks", "gen_kwargs"), ("gen_length",)),
    (
        ("max_len", "max_length", "max_seq_length", "max_seq_len", "seq_len", "seq_length"),
        ("max_length", "max_completion_length", "gen_length", "length"),
    ),
    (
        ("diffusion_steps", "denoising_steps", "sampling_steps", "num_inference_steps", "num_diffusion_steps", "nfe"),
        ("diffusion_steps",),
    ),
    (("temp", "temperature", "generation_temperature", "sampling_temperature"), ("temperature",)),
    (("block_size", "block_len", "block", "block_length"), ("block_length", "block_size")),
    (("cfg", "guidance", "guidance_scale"), ("cfg_scale",)),
    (("remask", "remasking_strategy", "unmasking", "alg"), ("remasking",)),
    (("threshold", "confidence_threshold"), ("reveal_level",)),
    (("cache", "use_cache"), ("kv_cache",)),
    # RL
    (
        ("num_samples", "n_samples", "num_generations", "group_size", "num_return_sequences", "repeats", "n"),
        ("num_samples", "num_generations"),
    ),
    (("mu", "num_iters", "ppo_epochs", "num_iterations"), ("num_iterations",)),
    (("kl", "kl_coef", "kl_beta", "beta"), ("beta",)),
    (("clip", "clip_eps", "clip_range", "cliprange", "eps"), ("epsilon",)),
    (("algo", "algorithm", "trainer", "loss", "method"), ("method",)),
    (("reward", "rewards", "reward_func", "reward_funcs", "reward_fn"), ("reward_file",)),
)
COMMANDS: Table = (
    (("train", "finetune", "fine_tune", "tune"), ("sft", "rl")),
    (("grpo", "diffu_grpo", "diffu-grpo", "ppo", "rlvr", "reinforce"), ("rl",)),
    (("dpo", "kto", "vrpo", "preference", "preferences"), ("prefer",)),
    (("distillation",), ("distill",)),
    (("evaluate", "evaluation", "test", "benchmark", "lm_eval"), ("eval",)),
    (("score", "scores", "accuracy", "results"), ("parse",)),
    (("generate", "sample", "infer", "inference", "run", "talk"), ("chat",)),
    (("server", "api"), ("serve",)),
    (("convert", "conversion", "ar2d"), ("a2d",)),
    (("infill", "complete"), ("fill",)),
    (("memory", "vram", "size"), ("fit",)),
)
# Flags of features that left, because they were measured as no help (CHANGELOG.md, "Removed")
REMOVED = (
    "order_temperature",
    "trajectory_weight_cap",
    "log_places",
    "share_power",
    "rival_weight",
    "path_weight",
    "path_tokens",
    "reference_steps",
)
REMOVED_HINT = " (removed, because it did not help; the code is at commit 6fbae12b)"


def matching_names(word: str, known: Iterable[str], table: Table) -> list[str] | None:
    """The names in `known` that a word of the table means, maybe none; None for a word that the table lacks."""
    known = set(known)
    is_in_table = False
    names: dict[str, None] = {}  # an ordered set
    for words, flags in table:
        if word in words:
            is_in_table = True
            names.update(dict.fromkeys(flag for flag in flags if flag in known))
    return list(names) if is_in_table else None


def hint_of_flag(word: str, parser: argparse.ArgumentParser) -> str:
    """For a message about a flag that the parser does not have: " (the nearest is --X)", or the nearest flag, or
    nothing."""
    name = normalized(word)
    descriptions: dict[str, str] = {}  # each flag or argument of the parser, as a message names it
    all_flags: list[str] = []
    for action in parser._actions:
        all_flags += action.option_strings
        for flag in action.option_strings:
            descriptions[normalized(flag)] = action.option_strings[0]
        if not action.option_strings:
            descriptions[action.dest] = f"{action.metavar or action.dest}, without a flag"

    if name in descriptions:  # written with hyphens
        return f" (the nearest is {descriptions[name]})"
    if name in REMOVED:
        return REMOVED_HINT
    names = matching_names(name, descriptions, FLAGS)
    if names is None:
        return nearest(word, all_flags)
    if not names:
        return ""
    return f" (the nearest is {' or '.join(dict.fromkeys(descriptions[name] for name in names))})"


def hints_of_flags(words: Iterable[str], parser: argparse.ArgumentParser) -> str:
    """The hints for all words that begin with "--"; each names its flag if there are several."""
    hints = {}
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            hints[flag] = hint_of_flag(flag, parser)
    if len(hints) == 1:
        return "".join(hints.values())
    return "".join(hint.replace("(", f"({flag}: ", 1) for flag, hint in hints.items())


def hint_of_choice(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """For a message about a value that is no choice of a flag: another flag of this parser, for which other programs
    use this flag's name, such as --output_dir; or nothing."""
    other_flags = []
    for other in parser._actions:
        if other is not action:
            other_flags += [normalized(flag) for flag in other.option_strings]
    names = matching_names(action.dest, other_flags, FLAGS)
    return f" (another flag is --{names[0]})" if names else ""


def normalized(flag: str) -> str:
    """A flag as the table has it, without dashes."""
    return flag.lstrip("-").replace("-", "_")


def hint_of_command(word: object, commands: Iterable[str]) -> str:
    """For a message about a command that does not exist: the command that was probably meant, or nothing."""
    commands = list(commands)
    names = matching_names(str(word), commands, COMMANDS)
    if not names:
        return nearest(word, commands)
    return f" (the nearest is {' or '.join(names)})"
