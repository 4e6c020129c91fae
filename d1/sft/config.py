"""Settings of masked SFT: the flags of `d1 sft`. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from d1.ranges import AMOUNT, BELOW_ONE, COUNT, NATURAL, POSITIVE, SHARE, setting
from d1.runs.cli import TrainingSettings

EDIT_NOISE = ("uniform", "draft")  # `d1/sft/editing.py`
CANVAS_SETTINGS = ("self_conditioning", "causal_weight")  # `d1/sft/diffusion_gemma.py`
NOISES = ("scdd",)  # `d1/sft/scdd.py`
EDIT_SETTINGS = ("edit_share", "edit_weight", "edit_keep_weight", "edit_turns")


@dataclass(frozen=True)
class CausalLoss:
    """The loss of a model with a causal context: the weighed sum of that of its masks and of the next token's
    cross-entropy in the clean stream, in the same pass. Blocks begin with the answer, as the samplers' do, and each has
    its own t.

    With `row_noise` all is as in NVIDIA's Automodel (`HybridDiffusionLLMLoss`), where the masks' weight is .3 and that
    of the clean text 1, too: one t per row, blocks from the row's start, and masks divided by the hidden tokens of the
    optimizer step.
    """

    masked_weight: float = 0.3
    row_noise: bool = False
    causal_weight: float = 1.0


OVERLONG = ("truncate", "drop", "refuse")


@dataclass
class SFTConfig(TrainingSettings):
    """Arguments of `d1.sft.train.main`. Defaults are d1's (arXiv 2504.12216, appendix).

    Raises:
        ValueError: a setting is out of range, or contradicts another one.
    """

    max_length: Annotated[int, COUNT] = setting(4096, "maximum length of a row in tokens, prompt and answer")
    learning_rate: Annotated[float, AMOUNT] = setting(1e-5)

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
    assistant_only_loss: bool = setting(
        False,
        "train on all turns of the assistant that have no weight 0; otherwise on the last turn alone (with a causal "
        "context, it needs --row_noise or --masked_weight 0)",
    )
    overlong: str = setting("truncate", "rows longer than --max_length", choices=OVERLONG)
    test_split: Annotated[float, BELOW_ONE] = setting(0.01, "share of the rows held out for the evaluation loss")
    eos_padding: Annotated[int | str, NATURAL | "batch" | "max"] = setting(
        "batch",
        "fill the answer with EOS, which teaches the model to stop: to at least N answer tokens, EOS included; to the "
        "longest row of the global batch; or to --max_length, as d1 does",
        metavar="N|batch|max",
    )
    packing: bool = setting(
        False, "concatenate the rows of a micro-batch; each row attends only to itself, and there is no padding"
    )
    # The authors of LLaDA2 and Fast-dLLM v2 train with it (`recipes/llada2-mini-sft.yaml`, `fast-dllm-v2-7b-sft.yaml`).
    complementary_masks: bool = setting(
        False, "use each row twice per batch, with opposite masks, so that every answer token is trained on each time"
    )

    # Visible noise, for models that edit
    edit_noise: str | None = setting(
        None,
        "also replace visible answer tokens, to be corrected: by uniform ids, or by the model's own draft",
        choices=EDIT_NOISE,
    )
    edit_share: Annotated[float, SHARE] = setting(1.0, "share of the visible answer tokens that are replaced")
    edit_weight: Annotated[float, POSITIVE] = setting(1.0, "weight of a replaced token in the loss")
    edit_keep_weight: Annotated[float, AMOUNT] = setting(1.0, "weight of a visible token that was not replaced")
    edit_turns: Annotated[int, COUNT] = setting(1, "forward passes per batch: each later one corrects the one before")

    # Masks and uniform ids in one bound, for the sampler scdd
    noise: str | None = setting(
        None,
        "scdd: masks and uniform ids, which the model learns to correct, for full attention (default: the model's own "
        "noise)",
        choices=NOISES,
    )
    uniform_ratio: Annotated[float, BELOW_ONE] = setting(
        0.1, "with --noise scdd, the largest share of uniform ids, at t = 1/2"
    )

    # Models with a causal context
    masked_weight: Annotated[float, AMOUNT] = setting(
        CausalLoss.masked_weight,
        "weight of the masks' loss next to that of the clean text, which predicts the next token",
    )
    causal_weight: Annotated[float, AMOUNT] = setting(
        CausalLoss.causal_weight,
        "weight of the clean text's loss, which predicts the next token: of the answer with a causal context, of the "
        "whole text with uniform noise",
    )
    row_noise: bool = setting(
        CausalLoss.row_noise,
        "as Automodel: one t per row, blocks from the row's start, and the masks' loss divided by hidden tokens",
    )
    # Models with uniform noise
    self_conditioning: Annotated[float, SHARE] = setting(
        0.5, "with uniform noise, share of the rows that also see a first pass's distributions"
    )

    # Output
    quiet: bool = setting(False, "do not show a row and what is trained on in it before the first step")

    # Model and precision
    lora_dropout: Annotated[float, BELOW_ONE] = setting(0.05)

    # Training
    weight_decay: Annotated[float, AMOUNT] = setting(0.1)
    lr_scheduler_type: str = setting("linear")
    warmup_steps: Annotated[float, AMOUNT] = setting(0, "steps, or a share of all if below 1")
    eval_steps: Annotated[int, COUNT] = setting(100, "steps between evaluations, each followed by a checkpoint")
    eval_draws: Annotated[int, COUNT] = setting(4, "draws of t and mask per held-out row in an evaluation")
    keep_last: bool = setting(
        False, "save the weights of the last step; otherwise those of the checkpoint with the lowest held-out loss"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template and self.data_function:
            raise ValueError("use one of --template and --data_function")
        for name in EDIT_SETTINGS:
            value = getattr(self, name)
            if self.edit_noise is None and value != getattr(SFTConfig, name):
                raise ValueError(f"--{name} {value} would do nothing: set --edit_noise")
        if self.noise is None and self.uniform_ratio != SFTConfig.uniform_ratio:
            raise ValueError(f"--uniform_ratio {self.uniform_ratio} would do nothing: set --noise scdd")
