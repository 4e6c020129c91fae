"""Settings of masked SFT: the flags of `d1 sft`. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from d1.ranges import AMOUNT, BELOW_ONE, COUNT, NATURAL, POSITIVE, SEED
from d1.runs.settings import check_settings, setting


@dataclass
class SFTConfig:
    """Arguments of `d1.sft.train.main`. Defaults are d1's (arXiv 2504.12216, appendix).

    Raises:
        ValueError: a setting is out of range, or contradicts another one.
    """

    # Flags of d1
    model_name: str = setting(
        "GSAI-ML/LLaDA-8B-Instruct", "folder or hub name of the model to fine-tune", aliases=["--model_path"]
    )
    batch_size: Annotated[int, COUNT] = setting(1, "rows per device per micro-batch")
    max_length: Annotated[int, COUNT] = setting(4096, "maximum length of a row in tokens, prompt and answer")
    num_epochs: Annotated[float, POSITIVE] = setting(20)
    learning_rate: Annotated[float, AMOUNT] = setting(1e-5)
    grad_accum_steps: Annotated[int, COUNT] = setting(4)
    output_dir: str = setting("runs", "everything is written to OUTPUT_DIR/JOB_NAME")
    job_name: str = setting("llada-s1")
    train_data: str = setting("simplescaling/s1K", "hub name, or a .json, .jsonl, .parquet or .csv file")
    debugging: bool = setting(False, "turn experiment logging (Weights & Biases) off")

    # Data
    template: tuple[str, str] | None = setting(
        None,
        "two format strings with {column} fields, e.g. '{instruction} {input}' '{output}' ($'...' for newlines)",
        nargs=2,
        metavar=("PROMPT", "COMPLETION"),
    )
    data_function: str | None = setting(
        None, "turns a row into messages, or prompt and completion", metavar="FILE.py:FUNCTION"
    )
    plain_chat_template: bool = setting(False, "give a plain chat template to a tokenizer that has none")
    overlong: str = setting("truncate", "rows longer than --max_length", choices=("truncate", "drop", "refuse"))
    bad_rows: str = setting("error", "rows that cannot be trained on", choices=("error", "skip"))
    test_split: Annotated[float, BELOW_ONE] = setting(0.01, "share of the rows held out for the evaluation loss")
    num_proc: Annotated[int | None, COUNT | None] = setting(None, "processes that tokenise (default: one per core)")
    eos_padding: Annotated[int | str, NATURAL | "batch" | "max"] = setting(
        "batch",
        "fill the answer with EOS, which teaches the model to stop: to at least N answer tokens, EOS included; to the "
        "longest row of the global batch; or to --max_length, as d1 does",
        metavar="N|batch|max",
    )
    packing: bool = setting(
        False, "concatenate the rows of a micro-batch; each row attends only to itself, and there is no padding"
    )
    complementary_masks: bool = setting(
        False,
        "use each row twice per batch, with opposite masks, so that every answer token is trained on each time",
    )

    # Model and precision
    full_finetuning: bool = setting(False, "train all weights instead of a LoRA adapter")
    lora_r: Annotated[int, COUNT] = setting(128)
    lora_alpha: Annotated[int, COUNT] = setting(256)
    lora_dropout: Annotated[float, BELOW_ONE] = setting(0.05)
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

    # Training
    seed: Annotated[int, SEED] = setting(42)
    max_steps: Annotated[int, COUNT | -1] = setting(-1, "stop after this number of optimizer steps; -1: no limit")
    weight_decay: Annotated[float, AMOUNT] = setting(0.1)
    max_grad_norm: Annotated[float, AMOUNT] = setting(1.0)
    lr_scheduler_type: str = setting("linear")
    warmup_steps: Annotated[float, AMOUNT] = setting(0, "steps, or a share of all if below 1")
    eval_steps: Annotated[int, COUNT] = setting(100, "steps between evaluations, each followed by a checkpoint")
    eval_draws: Annotated[int, COUNT] = setting(4, "draws of t and mask per held-out row in an evaluation")
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
        if self.template and self.data_function:
            raise ValueError("use one of --template and --data_function")
        if self.full_finetuning and (self.merge_at_end or self.load_in_4bit):
            raise ValueError("--merge_at_end and --load_in_4bit need LoRA: leave --full_finetuning out")
