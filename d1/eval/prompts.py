"""What an evaluation asks: the problems of a split, each with its prompt as the model gets it."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from d1.models.adapters import adapter_chain
from d1.models.kinds import native_config
from d1.models.tokenizer import encode_prompt, render_prompt
from d1.tasks import few_shot_messages
from d1.tasks.protocols import shots_of

BOX_REQUEST = re.compile(r" as \\boxed\{\w+\}")  # how the tasks' prompts ask for a boxed answer


@dataclass(frozen=True)
class Prompt:
    """A problem to ask: its place in the split, text and ids of its prompt, and the row it comes from."""

    index: int
    text: str
    ids: list[int]
    question: str
    ground_truth: Any


def tokenizer_path(args: argparse.Namespace) -> str:
    """The adapter's folder where it holds a tokenizer, else the model's."""
    own = args.checkpoint_path and Path(args.checkpoint_path, "tokenizer_config.json").is_file()
    return args.checkpoint_path if own else args.model_path


def config_of(model_path: str, checkpoint_path: str, trust_remote_code: bool) -> Any:
    """The model's config, before its weights are read; None where code of its own may make another of it.

    Raises:
        ValueError, OSError: there is no such model or adapter, or it is of no supported kind.
    """
    return None if trust_remote_code else native_config(adapter_chain(model_path, checkpoint_path or None)[0])[0]


def read_prompts(args: argparse.Namespace, task: ModuleType, tokenizer: Any) -> list[Prompt]:
    """The problems to evaluate, in the order of their split."""
    rows = task.load_rows(args.split, args.data_file)
    chosen: Sequence[int] = range(len(rows))
    if args.limit is not None and args.limit < len(rows):
        chosen = sorted(random.Random(0).sample(chosen, args.limit))
    asked = rows.select(chosen)["question"]
    try:
        shots = few_shot_messages(task, shots_of(task, args.few_shot), args.seed, args.few_shot_file, asked)
    except ConnectionError as error:  # which speaks of the flag for the problems asked
        raise ConnectionError(str(error).replace("--data_file", "--few_shot_file")) from error
    prompts = []
    for index in chosen:
        row = rows[index]
        *before, last = row["prompt"]
        content = BOX_REQUEST.sub("", last["content"], count=1) if args.dont_use_box else last["content"]
        messages = [*shots, *before, {**last, "content": content}]
        text = render_prompt(tokenizer, messages) + ("<reasoning>" if args.add_reasoning else "")
        ids = encode_prompt(tokenizer, text)
        prompts.append(Prompt(index, text, ids, row["question"], row["ground_truth"]))
    return prompts
