"""An evaluation's prompts, its name in files, and everything that determines its results, from its arguments."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from d1.models.adapters import adapter_chain
from d1.models.kinds import native_config
from d1.models.load import named_dtype
from d1.models.tokenizer import encode_prompt, load_tokenizer, render_prompt
from d1.runs.fingerprint import CONTENTS, of_file, of_model
from d1.sampling.flags import sampling_settings
from d1.tasks import TASKS, few_shot_messages, shots_of

BOX_REQUEST = re.compile(r" as \\boxed\{\w+\}")  # the words of the tasks' prompts that ask for a boxed answer
PART = 4  # batches per part in 16 bits if rows may end early: more of them waste less of the half-empty last one
PIECES, PIECE = 256, 1 << 16  # of a weights file that are hashed: number, and bytes per piece


@dataclass(frozen=True)
class Prompt:
    """A problem: its index in the split, text and ids of its prompt, and the question and answer of its row."""

    index: int
    text: str
    ids: list[int]
    question: str = ""
    ground_truth: Any = None
    sample: int = 0  # the completion's number, if a prompt gets several
    samples: int = 1  # how many there are

    @property
    def key(self) -> int:
        """The number of this completion in the journal."""
        return self.index if self.samples == 1 else self.index * self.samples + self.sample


def load_tokenizer_for(args: argparse.Namespace) -> Any:
    """The tokenizer in the adapter's folder if there is one, else the model's."""
    own = args.checkpoint_path and Path(args.checkpoint_path, "tokenizer_config.json").is_file()
    path = args.checkpoint_path if own else args.model_path
    return load_tokenizer(path, plain_chat_template=args.plain_chat_template)


def config_of(model_path: str, checkpoint_path: str) -> Any:
    """The model's config, without reading its weights."""
    return native_config(adapter_chain(model_path, checkpoint_path or None)[0])[0]


def read_prompts(args: argparse.Namespace, task: ModuleType, tokenizer: Any) -> list[Prompt]:
    """The problems to evaluate, in the order of their split, each `--num_samples` times."""
    rows = task.load_rows(args.split, args.data_file)
    if not len(rows):
        raise ValueError(f"--dataset {args.dataset} has no rows in {args.data_file or f'its {args.split} split'}")
    chosen: Sequence[int] = range(len(rows))
    if args.limit is not None and args.limit < len(rows):
        chosen = sorted(random.Random(0).sample(chosen, args.limit))
    asked = rows.select(chosen)["question"]
    shots = few_shot_messages(task, shots_of(task, args.few_shot), args.seed, args.few_shot_file, asked)
    prompts = []
    for index in chosen:
        row = rows[index]
        *before, last = row["prompt"]
        content = BOX_REQUEST.sub("", last["content"], count=1) if args.dont_use_box else last["content"]
        messages = [*shots, *before, {**last, "content": content}]
        text = render_prompt(tokenizer, messages) + ("<reasoning>" if args.add_reasoning else "")
        asked_for = (index, text, encode_prompt(tokenizer, text), row["question"], row["ground_truth"])
        prompts += [Prompt(*asked_for, sample, args.num_samples) for sample in range(args.num_samples)]
    return prompts


def in_fp32(args: argparse.Namespace) -> bool:
    return named_dtype(args.dtype) == torch.float32


def part_size(args: argparse.Namespace) -> int:
    """Rows that a process takes from the queue at a time. In fp32 it is one row, because rows do not depend on their
    batch. In 16 bits it is one batch, or several if rows may take different numbers of forward passes."""
    if in_fp32(args):
        return 1
    may_end_early = args.eos_stop or sampling_settings(vars(args)).rule is not None
    return args.batch_size * (PART if may_end_early else 1)


def task_name(args: argparse.Namespace) -> str:
    return args.dataset if args.dataset in TASKS else Path(args.dataset).stem


def setup_name(args: argparse.Namespace) -> str:
    """`{task}_{model}_{gen_length}_{steps}`, where the model has the name of its folder."""
    path = Path(args.checkpoint_path or args.model_path)
    within_run = path.name.startswith("checkpoint-") or path.name == "merged"
    parts = [path.resolve().parent.name, path.name] if within_run else [path.resolve().name]
    parts += [args.split] * (args.split != "test") + [args.prompt_protocol] * (args.prompt_protocol != "d1")
    parts += [f"fs{args.few_shot}"] * bool(args.few_shot) + [args.suffix] * bool(args.suffix)
    model = re.sub(r"[^\w.-]+", "-", "_".join(parts))
    return f"{task_name(args)}_{model}_{args.gen_length}_{args.diffusion_steps}"


def run_identity(args: argparse.Namespace, prompts: list[Prompt]) -> dict[str, Any]:
    """Everything that determines the completions: a run resumes only if all of it agrees.

    The rows are those of `prompts`. The file of a user's task counts as a whole, although it may differ only in how it
    scores."""
    asked = json.dumps([[prompt.index, prompt.text, prompt.ground_truth] for prompt in prompts], default=str)
    base, adapters = adapter_chain(args.model_path, args.checkpoint_path or None)
    names = ("gen_length", "diffusion_steps", "block_length", "temperature", "cfg_scale", "remasking", "eos_stop")
    sampling = sampling_settings(vars(args))
    identity: dict[str, Any] = {
        "weights": [weights_fingerprint(path) for path in (base, *adapters)],  # all that older records have of them
        CONTENTS + "model_path": of_model(args.model_path, args.checkpoint_path or None),
        "problems": len(prompts),
        "prompts": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "seed": args.seed,
        "dtype": str(named_dtype(args.dtype)),
        **{name: getattr(args, name) for name in (*names, "sampler", "prompt_protocol")},
        "reveal": [sampling.cache, sampling.rule, sampling.level],
    }
    if sampling.edits is not None:  # runs from before there were edits resume
        identity["editing"] = [sampling.edits, sampling.post_steps]
    if args.dataset not in TASKS:
        identity[CONTENTS + "dataset"] = of_file(args.dataset)
    if args.num_samples > 1:
        identity["num_samples"] = args.num_samples
    if not in_fp32(args):  # these change the rounding of logits, and so sometimes a token
        identity |= {
            "batch_size": args.batch_size,
            "attn_implementation": args.attn_implementation or "default",
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "libraries": f"torch {torch.__version__}, transformers {transformers.__version__}",
        }
    return identity


def weights_fingerprint(path: str) -> str:
    """A hash of the weights in a local folder, which changes when the model is trained again; a hub name is returned.

    It hashes each file's size and `PIECES` pieces spread over the file, so files up to 16 MiB are hashed completely.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as weights:
            for start in dict.fromkeys(i * max(size - PIECE, 0) // (PIECES - 1) for i in range(PIECES)):
                weights.seek(start)
                digest.update(weights.read(PIECE))
    return digest.hexdigest()[:16]
