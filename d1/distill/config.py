"""Settings of distillation: the flags of `d1 distill`. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from d1.distill.methods import METHODS
from d1.ranges import COUNT, NATURAL, POSITIVE, setting
from d1.runs.cli import MethodSettings, OptionalAmount, OptionalCount

CANVAS = 256  # tokens, as in d1's RL


@dataclass
class DistillConfig(MethodSettings):
    """Arguments of `d1.distill.train.main`. A setting that is None becomes the method's value.

    Raises:
        ValueError: a setting is out of range, contradicts another, or would be ignored.
    """

    method: str = setting("dparallel", f"one of {', '.join(METHODS)}", choices=tuple(METHODS))
    train_data: str = setting(
        "", "prompts: a task, by name or its .py file; or a hub name or local file with a column prompt"
    )
    data_file: str | None = setting(None, "of a task: its training rows, instead of its own")
    num_prompts: OptionalCount = setting(None, "use only this number of prompts, drawn by the seed (default: all)")
    job_name: str = setting("distill")

    # The traces
    max_completion_length: OptionalCount = setting(  # type: ignore[assignment]
        None, f"tokens of the canvas (default: max_new_tokens of the model's generation_config.json, or {CANVAS})"
    )
    diffusion_steps: OptionalCount = setting(
        None, "steps of the sampler per canvas, at most (default: half of max_completion_length)"
    )
    block_length: OptionalCount = setting(None, "of the sampler (default: the model's own, else 32)")
    temperature: OptionalAmount = setting(None, "of the sampler; 0 is greedy")
    keep: str | None = setting(None, "traces to train on; right needs a task", choices=("right", "all"))
    sampling_batch_size: Annotated[int, COUNT] = setting(64, "prompts sampled at once")

    # The states
    tail: Annotated[int | None, NATURAL | -1 | None] = setting(
        None, "tokens after a completion's end that are trained to be EOS; -1: all of the canvas"
    )

    # The loss
    entropy_weight: OptionalAmount = setting(None, "dparallel")
    entropy_temperature: Annotated[float | None, POSITIVE | None] = setting(None, "dparallel")
    views_at_once: Annotated[int, COUNT] = setting(1, "states of a row per forward pass; more take more memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.apply_defaults(METHODS[self.method].values)
        if not self.train_data:
            raise ValueError("--train_data is missing: a task, or a file with a column prompt")
