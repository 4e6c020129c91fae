"""The settings that RL refuses before a model is loaded, and those that a resume may change."""

from __future__ import annotations

import logging
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import ModelConfig

from d1.models.adapters import adapter_chain
from d1.models.kinds import block_size, check_room, native_config
from d1.models.tokenizer import encode_prompt, render_prompt
from d1.rl.config import DiffuGRPOConfig
from d1.runs.record import OnResume, whole
from d1.sampling.settings import BLOCK_LENGTH

logger = logging.getLogger(__name__)

ONLY = {  # TRL's settings that nothing here reads, with their defaults
    "model_init_kwargs": None,
    "cast_lm_head_to_fp32": False,
    "model_revision": "main",
    "trust_remote_code": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": None,
}

ON_RESUME = OnResume(
    fixed=dict.fromkeys(
        (
            # The task, the order of its rows, and random numbers
            *("dataset", "data_file", "prompt_protocol", "seed", "shuffle_dataset", "world_size"),
            # The rollout in the checkpoint and its place in the cycle of updates
            *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
            "rollout_staleness",
            *("num_generations", "num_iterations", "max_completion_length", "mask_id"),
            *("method", "estimator", "num_views", "antithetic", "stratified", "segments", "segment_steps"),
            *("draw_steps", "mean_step", "split_views", "scored_tokens", "score_as_sampled", "state_reward"),
            *("p_mask_prompt", "random_masking", "protect_special_tokens"),
            *("objective", "kl", "advantage", "scale_rewards", "right_share"),
            # The weights in the checkpoint
            *("model_path", "use_peft", "load_in_4bit", "sync_ref_model", "lora_r", "lora_alpha", "use_rslora"),
            *("use_dora", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save"),
            # The state of its optimizer and scheduler, where a new value would have no effect
            *("optim", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2"),
            *("adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs"),
        ),
        whole,
    )
    | {"beta": bool},  # 0: no reference was scored
    free=(
        *("output_dir", "resume_from_checkpoint", "run_name", "report*", "project", "trackio_*", "disable_tqdm"),
        *("log*", "num_completions_to_print", "skip_memory_metrics", "include_*", "debug", "do_*"),
        *("prediction_loss_only", "save_*", "eval_*", "per_device_eval_batch_size", "num_generations_eval"),
        *("batch_eval_metrics", "push_to_hub", "hub_*", "restore_callback_states_from_checkpoint"),
        *("enable_jit_checkpoint", "local_rank", "dataloader_*", "ddp_*", "accelerator_config"),
        *("torch_empty_cache_steps", "remove_unused_columns", "label_names", "activation_checkpointing*"),
        *("gradient_checkpointing*", "ds3_gather_for_generation", "views_at_once"),
        *("generation_batch_size", "pad_to_multiple_of", "use_cpu", "eos_stop"),
        "rollout_*",
    ),
)


def check_model_settings(args: DiffuGRPOConfig, model_args: ModelConfig) -> None:
    """Refuses model settings that contradict each other or that nothing here reads."""
    if not args.model_path:
        raise ValueError("--model_path is missing: a hub id or a folder, e.g. --model_path ../pocket/base")
    if model_args.model_name_or_path:
        raise ValueError("--model_name_or_path is not used here; name the model with --model_path")
    for name, only in ONLY.items():
        value = getattr(args if hasattr(args, name) else model_args, name)
        if value != only:
            raise ValueError(f"{name}={value!r} would be ignored here: leave it at {only!r}")
    if model_args.load_in_8bit:
        raise ValueError("8-bit loading is not supported; use --load_in_4bit (NF4)")
    if model_args.load_in_4bit and not (torch.cuda.is_available() and model_args.use_peft):
        raise ValueError(
            "--load_in_4bit (NF4, bitsandbytes) needs a GPU and --use_peft: leave it out on a CPU, and add --use_peft "
            "on a GPU, because 4-bit weights are not trained themselves"
        )
    if model_args.attn_implementation == "flex_attention" and not torch.cuda.is_available():
        raise ValueError("--attn_implementation flex_attention trains on a GPU only: use sdpa or eager on a CPU")
    if args.sync_ref_model and model_args.use_peft:
        raise ValueError(
            "sync_ref_model needs a reference model in memory; with LoRA the reference is the model without its "
            "adapter. Train fully, or leave sync_ref_model off (with LoRA it did nothing in d1 either)"
        )


def settle_canvas(args: DiffuGRPOConfig) -> None:
    """Where nobody gave the length of the canvas, and the model has no room for the default: as many blocks as it has
    room for after prompts of `max_prompt_length` tokens, with d1's two tokens per step."""
    if not args.canvas_is_unset:
        return
    config, _ = native_config(adapter_chain(str(args.model_path), None)[0])
    room, block = getattr(config, "max_position_embeddings", None), args.block_length or block_size(config)
    length = int(args.max_completion_length or 0)
    if room is None or room > length:
        return
    block = block or BLOCK_LENGTH
    fits = (room - args.max_prompt_length) // block * block
    if fits > 0:
        args.max_completion_length = fits
        args.diffusion_steps = (
            max(fits // 2, fits // block) if args.diffusion_steps == length // 2 else args.diffusion_steps
        )
        logger.warning(
            "max_completion_length is %d and diffusion_steps %d: after %d tokens of a prompt (max_prompt_length), the "
            "model's %d positions have no room for the default of %d.",
            *(fits, args.diffusion_steps, args.max_prompt_length, room, length),
        )


def check_config(prompt: int, args: DiffuGRPOConfig) -> int | None:
    """Refuses settings that contradict the model's config, for prompts of up to `prompt` tokens.

    Returns the tokens per block of a block-causal model, which become `block_length` if it is not set."""
    config, _ = native_config(adapter_chain(str(args.model_path), None)[0])
    args.sampling_settings(config)
    if args.mask_id is not None and args.mask_id >= config.vocab_size:
        raise ValueError(f"--mask_id {args.mask_id}: {args.model_path} has {config.vocab_size} tokens, numbered from 0")
    by_default = f" (its default is {args.max_completion_length})" if args.canvas_is_unset else ""
    check_room(config, prompt, int(args.max_completion_length or 0), f": lower --max_completion_length{by_default}")
    return block_size(config)


def check_prompts(rows: Dataset, tokenizer: PreTrainedTokenizerBase, args: DiffuGRPOConfig) -> int:
    """Refuses prompts longer than `max_prompt_length`; with `truncate_prompts`, warns that the trainer will cut them.
    Returns the length of the longest prompt in tokens."""
    texts = [render_prompt(tokenizer, prompt, **(args.chat_template_kwargs or {})) for prompt in rows["prompt"]]
    lengths = [len(encode_prompt(tokenizer, text)) for text in texts]
    too_long = [index for index, length in enumerate(lengths) if length > args.max_prompt_length]
    if not too_long:
        return max(lengths)
    if not args.truncate_prompts:
        raise ValueError(
            f"{len(too_long)} of {len(rows)} prompts are longer than max_prompt_length={args.max_prompt_length} tokens "
            f"(the first is row {too_long[0]}, the longest has {max(lengths)}): raise max_prompt_length, or pass "
            "--truncate_prompts true to keep only the end of them"
        )
    logger.warning("The beginning of %d of %d prompts will be cut off.", len(too_long), len(rows))
    return args.max_prompt_length


def check_trainer(trainer: Any) -> None:
    """Raises ValueError for settings that do not fit the trainer's rewards, or the way its processes share weights.
    Warns if completions are sampled from a distribution that no estimator scores."""
    args, sampling = trainer.args, trainer.sampling
    means = [name for name, used in (("a cache", sampling.cache), ("guidance", sampling.cfg_scale)) if used]
    if means:
        logger.warning(
            "Completions are sampled with %s, so the policy that samples is not the one that is trained: "
            "sampling/logp_difference_abs and sampling/ratio_max log the difference.",
            " and ".join(means),
        )
    if args.right_share and not getattr(trainer.reward_funcs[-1], "only_watched", False):
        raise ValueError("right_share needs to know which completions are right: the last reward must be `accuracy_of`")
    if args.sync_ref_model and trainer.weights_are_split:
        raise ValueError(
            "sync_ref_model changes the reference during the run, and under ZeRO-3 or FSDP a checkpoint cannot store "
            "it: use DDP or ZeRO-2, or leave sync_ref_model off"
        )
    if args.rollout_mode == "server" and trainer.weights_are_split:
        raise ValueError(
            "rollout_mode server sends weights that lie whole on each process: leave out ZeRO-3 and FSDP, or sample in "
            "the trainer"
        )
    if trainer.samples_in_step and (sampling.rule or args.eos_stop or block_size(trainer.model.config)):
        raise ValueError(
            "with a parallel sampler, eos_stop or a block-causal model, the number of forward passes depends on the "
            "texts, but processes that each hold a part of the weights must make the same number: use DDP, ZeRO-2, or "
            "ZeRO-3 with ds3_gather_for_generation, or turn the parallel sampler and eos_stop off"
        )
