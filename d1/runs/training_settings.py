"""The settings that SFT, preference training and distillation share. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from d1.ranges import AMOUNT, COUNT, POSITIVE, SEED
from d1.runs.settings import check_settings, setting


@dataclass
class TrainingSettings:
    """Flags of these stages; each adds its own. Defaults are d1's (arXiv 2504.12216, appendix).

    Raises:
        ValueError: a setting is out of range, or contradicts another.
    """

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
    bad_rows: str = setting("error", "rows that cannot be trained on", choices=("error", "skip"))
    num_proc: Annotated[int | None, COUNT | None] = setting(None, "processes that tokenise (default: one per core)")
    full_finetuning: bool = setting(False, "train all weights instead of a LoRA adapter")
    lora_r: Annotated[int, COUNT] = setting(128)
    lora_alpha: Annotated[int, COUNT] = setting(256)
    lora_target_modules: list[str] = setting(
        ["q_proj", "k_proj", "v_proj"],
        "names of modules, or 'attention' or 'all-linear' for those of this kind of model",
        nargs="+",
    )
    load_in_4bit: bool = setting(False, "QLoRA: frozen weights in 4-bit NF4 (needs bitsandbytes)")
    dtype: str | None = setting(None, "of frozen weights (default on GPUs: bfloat16)", choices=("float32", "bfloat16"))
    attn_implementation: str | None = setting(None, "sdpa, eager or flash_attention_2 (default: Transformers chooses)")
    gradient_checkpointing: bool = setting(False, "use less memory and a third more time")
    merge_at_end: bool = setting(False, "also save the model with its adapter merged, to .../merged")
    seed: Annotated[int, SEED] = setting(42)
    max_steps: Annotated[int, COUNT | -1] = setting(-1, "stop after this number of optimizer steps; -1: no limit")
    max_grad_norm: Annotated[float, AMOUNT] = setting(1.0)
    logging_steps: Annotated[int, COUNT] = setting(10)
    resume: str | None = setting(
        None,
        "continue from the last complete checkpoint, if there is one, or from the one named",
        aliases=["--resume_from_checkpoint"],
        nargs="?",
        const="true",
        metavar="true|false|FOLDER",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.full_finetuning and (self.merge_at_end or self.load_in_4bit):
            raise ValueError("--merge_at_end and --load_in_4bit need LoRA: leave --full_finetuning out")
