"""The flags of `d1 eval`. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

from d1.ranges import COUNT, NATURAL, SEED, setting
from d1.runs.turns import TurnFlags
from d1.sampling.settings import BLOCK_LENGTH, GEN_LENGTH_HELP, ModelFlags, SamplingFlags, sampling_flag
from d1.tasks import PROTOCOLS, SPLITS, TASKS


def template_kwargs(text: str) -> dict[str, Any]:
    """The arguments of a chat template from a JSON object; argparse's error for other text."""
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise argparse.ArgumentTypeError(f"must be a JSON object, such as '{{\"enable_thinking\": false}}', got {text!r}")


@dataclass(frozen=True, kw_only=True)
class EvalModelFlags(ModelFlags):
    """`ModelFlags`, where "" is no adapter."""

    checkpoint_path: str = setting("", "LoRA adapter to put on the model")


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    """What is evaluated, and how the problems are asked."""

    dataset: str = setting(help=f"{', '.join(TASKS)}, or a task of your own as a .py file", group="task")
    split: str = setting("test", choices=SPLITS)
    data_file: str | None = setting(
        None, "local .json, .jsonl, .csv or .parquet file to use for the split; gsm8k, math, code: or a hub name"
    )
    limit: Annotated[int | None, COUNT] = setting(
        None, "evaluate this number of problems, always the same ones of the split"
    )
    num_samples: Annotated[int, COUNT] = setting(1, "completions per problem, for pass@k (default: %(default)s)")
    prompt_protocol: str = setting("d1", f"how problems are asked and answers read: {', '.join(PROTOCOLS)}")
    few_shot: Annotated[int | None, NATURAL] = setting(
        None, "solved training problems shown before each (default: the protocol's number)"
    )
    few_shot_file: str | None = setting(None, "local file of the training problems for --few_shot")
    chat_template_kwargs: dict[str, Any] | None = setting(
        None,
        "arguments of the chat template, as in RL: '{\"enable_thinking\": false}'",
        type=template_kwargs,
        metavar="JSON",
    )
    add_reasoning: bool = setting(False, "start every completion with <reasoning>")
    dont_use_box: bool = setting(False, r"do not ask for the answer in \boxed{}")


@dataclass(frozen=True, kw_only=True)
class StreamFlags(SamplingFlags):
    """How completions are sampled, each up to its end."""

    eos_stop: bool = setting(False, "skip the blocks after a completion's end: same answers, less work")


@dataclass(frozen=True, kw_only=True)
class EvalFlags(TurnFlags, StreamFlags, TaskFlags, EvalModelFlags):  # --help lists the last base first
    """All flags of an evaluation."""

    gen_length: list[int] | None = sampling_flag(  # type: ignore[assignment]
        "gen_length", help=f"{GEN_LENGTH_HELP}; several: one file each", nargs="+", group="sampling"
    )
    block_length: int | None = sampling_flag(
        "block_length",
        help="tokens per block, a divisor of gen_length; blocks are filled left to right (default: the model's own, or "
        f"{BLOCK_LENGTH})",
    )
    seed: Annotated[int, SEED] = setting(0, "seed of sampling and of the few-shot draw (default: %(default)s)")
    batch_size: Annotated[int, COUNT] = setting(
        4,
        "completions generated at once by each process; in 16 bits it changes some tokens (see above)",
        group="run",
    )
    output_dir: str = setting("results/")
    suffix: str = setting("", "added to the model's name in the file names")
    overwrite: bool = setting(False, "delete this setup's earlier results and start again")
    dont_save: bool = setting(False, "print the accuracy and keep no files")


@dataclass(frozen=True, kw_only=True)
class EvalRun(EvalFlags):
    """The flags of one run: one length, with the block length and the steps that files and records name."""

    gen_length: int  # type: ignore[assignment]
    block_length: int
    diffusion_steps: int
