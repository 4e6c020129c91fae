"""The one table of every number a user may set, and the range it must lie in.

    [0, 1)          0 is allowed and 1 is not; `inf` as an end leaves that side open
    integer [1, inf)
    A or B          either; B may also be a single value, such as None or -1
    list of A       each item

A number is never NaN or infinite. A name means the same in SFT, RL, evaluation and `d1 fit`; where one command differs,
the name carries the command, as in `fit.lora_r`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

COUNT = "integer [1, inf)"
SHARE_OR_STEPS = "(0, 1) or integer [1, inf)"
SEED = "integer [0, 4294967295]"  # what numpy takes

RANGES = {
    # Steps, batches and epochs
    "batch": COUNT,
    "batch_size": COUNT,
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "rollout_batch_size": f"{COUNT} or None",
    "generation_batch_size": f"{COUNT} or None",
    "grad_accum_steps": COUNT,
    "gradient_accumulation_steps": COUNT,
    "eval_accumulation_steps": f"{COUNT} or None",
    "num_epochs": "(0, inf)",
    "num_train_epochs": "(0, inf)",
    "max_steps": f"{COUNT} or -1",
    "max_compute_tokens": f"{COUNT} or None",
    "early_stop": f"{COUNT} or None",
    "logging_steps": SHARE_OR_STEPS,
    "eval_steps": f"{SHARE_OR_STEPS} or None",
    "save_steps": SHARE_OR_STEPS,
    "eval_delay": "[0, inf)",
    "save_total_limit": f"{COUNT} or None",
    "torch_empty_cache_steps": f"{COUNT} or None",
    # Optimizer
    "learning_rate": "[0, inf)",
    "warmup_steps": "[0, inf)",
    "weight_decay": "[0, inf)",
    "adam_beta1": "[0, 1)",
    "adam_beta2": "[0, 1)",
    "adam_epsilon": "[0, inf)",
    "max_grad_norm": "[0, inf)",
    "label_smoothing_factor": "[0, 1]",
    "neftune_noise_alpha": "[0, inf) or None",
    "router_aux_loss_coef": "[0, inf) or None",
    # Adapters
    "lora_r": COUNT,
    "fit.lora_r": "integer [0, inf)",  # 0: all weights are trained
    "lora_alpha": COUNT,
    "lora_dropout": "[0, 1)",
    # Random numbers
    "seed": SEED,
    "draw_seed": SEED,
    "data_seed": f"{SEED} or None",
    # Rows
    "length": COUNT,
    "max_length": COUNT,
    "max_prompt_length": COUNT,
    "eos_padding": "integer [0, inf) or batch or max",
    "pad_to_multiple_of": f"{COUNT} or None or auto or none or null",
    "test_split": "[0, 1)",
    "eval_draws": COUNT,
    "eval_limit": f"{COUNT} or None",
    "limit": f"{COUNT} or None",
    "few_shot": "integer [0, inf) or None",
    "index": "integer [0, inf)",
    # Sampling
    "gen_length": COUNT,
    "max_completion_length": COUNT,
    "block_length": f"{COUNT} or None",
    "diffusion_steps": f"{COUNT} or None",
    "temperature": "[0, inf)",
    "cfg_scale": "[0, inf)",
    "reveal_level": "[0, inf) or None",
    "num_samples": COUNT,
    "pause": "[0, inf)",
    "mc_num": COUNT,
    "mask_id": "integer [0, inf) or None",
    # diffu-GRPO
    "num_generations": "integer [2, inf)",
    "num_generations_eval": f"{COUNT} or None",
    "num_iterations": COUNT,
    "steps_per_generation": f"{COUNT} or None",
    "p_mask_prompt": "[0, 1)",
    "beta": "[0, inf)",
    "num_views": f"{COUNT} or None",
    "segments": f"{COUNT} or None",
    "segment_steps": f"{COUNT} or None",
    "views_at_once": COUNT,
    "right_share": "list of [0, 1] or None",
    "eubo_beta": "(0, inf)",
    "eubo_share": "[0, 1]",
    "ratio_cap": "(0, inf)",
    "sampling_weight_cap": "(0, inf) or None",
    "epsilon": "[0, inf)",
    "epsilon_high": "[0, inf) or None",
    "delta": "(0, inf) or None",
    "reward_weights": "list of (-inf, inf) or None",
    "ref_model_mixup_alpha": "[0, 1]",
    "ref_model_sync_steps": COUNT,
    "top_entropy_quantile": "[0, 1]",
    "entropy_coef": "(-inf, inf)",
    "entropy_coef_min": "(-inf, inf)",
    "entropy_coef_max": "(-inf, inf)",
    "entropy_coef_delta": "[0, inf)",
    "entropy_target": "[0, inf)",
    "sapo_temperature_neg": "(0, inf)",
    "sapo_temperature_pos": "(0, inf)",
    "vespo_k_pos": "[0, inf)",
    "vespo_k_neg": "[0, inf)",
    "vespo_lambda_pos": "[0, inf)",
    "vespo_lambda_neg": "[0, inf)",
    "off_policy_mask_threshold": "[0, inf) or None",
    "num_completions_to_print": f"{COUNT} or None",
    # Settings of decoding that TRL has and that are refused here, with the reason, unless they are off
    "top_p": "(0, 1]",
    "top_k": "integer [0, inf)",
    "min_p": "[0, 1] or None",
    "repetition_penalty": "(0, inf)",
    "max_tool_calling_iterations": f"{COUNT} or None",
    "vllm_server_port": "integer [1, 65535]",
    "vllm_group_port": "integer [1, 65535]",
    "vllm_server_timeout": "(0, inf)",
    "vllm_gpu_memory_utilization": "(0, 1]",
    "vllm_max_model_length": f"{COUNT} or None",
    "vllm_tensor_parallel_size": COUNT,
    "vllm_importance_sampling_cap": "(0, inf) or None",
    "vllm_importance_sampling_clip_max": "(0, inf) or None",
    "vllm_importance_sampling_clip_min": "[0, inf) or None",
    # Processes
    "gpus": COUNT,
    "zero": "integer [0, 3]",
    "num_proc": f"{COUNT} or None",
    "local_rank": "integer [-1, inf)",
    "ddp_timeout": COUNT,
    "ddp_bucket_cap_mb": f"{COUNT} or None",
    "dataloader_num_workers": "integer [0, inf)",
    "dataloader_prefetch_factor": f"{COUNT} or None",
}

INTERVAL = re.compile(r"(?P<kind>integer )?(?P<open>[\[(])(?P<low>[^,]+), (?P<high>[^\])]+)(?P<close>[\])])")


def check_ranges(settings: Mapping[str, object], command: str = "") -> None:
    """Checks every setting that `RANGES` knows; `command` is "eval" or "fit" where rows of their own count.

    Raises:
        ValueError: names all settings that are off, as a user types them, with their values and ranges.
    """
    rows = {name: RANGES.get(f"{command}.{name}", RANGES.get(name)) for name in settings}
    wrong = [
        f"--{name} {shown(settings[name])} (must be {described(row)})"
        for name, row in rows.items()
        if row is not None and not fits(settings[name], row)
    ]
    if wrong:
        raise ValueError("out of range: " + "; ".join(wrong))


def shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def described(row: str) -> str:
    """A row as a message has it: "integer [1, inf) or None" is "an integer in [1, inf) or None"."""
    words = row.replace("list of ", "numbers ").replace("integer ", "an integer ")
    return re.sub(r"(?=[\[(])", "in ", words)


def fits(value: object, row: str) -> bool:
    """Whether a value lies in the range that a row of `RANGES` spells."""
    return any(fits_one(value, alternative) for alternative in row.split(" or "))


def fits_one(value: object, alternative: str) -> bool:
    if alternative.startswith("list of "):
        items = value if isinstance(value, (list, tuple)) else [None]
        return all(fits_one(item, alternative.removeprefix("list of ")) for item in items)
    interval = INTERVAL.fullmatch(alternative)
    if interval is None:
        return str(value) == alternative
    try:
        number = float("nan") if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    if not math.isfinite(number) or (interval["kind"] and not number.is_integer()):
        return False
    low, high = float(interval["low"]), float(interval["high"])
    above = number > low or (number == low and interval["open"] == "[")
    below = number < high or (number == high and interval["close"] == "]")
    return above and below
