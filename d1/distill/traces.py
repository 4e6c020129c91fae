"""Prompts, and the traces that a model samples for them: which token was revealed in which step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from d1.distill.config import DistillConfig
from d1.distill.states import COLUMNS, Traces, blocks_of_canvas
from d1.files import give_usual_mode, reading, writing
from d1.masking import keyed_generator
from d1.models.attention import left_pad
from d1.models.kinds import block_size
from d1.models.messages import CONVERSATION_COLUMNS, as_messages, conversation_of
from d1.models.tokenizer import encode_question, end_ids
from d1.runs.data import describe_row_error, load_rows, usable_rows
from d1.runs.record import hash_rows, hash_values
from d1.sampling import SamplingSettings, eos_cut, rollout
from d1.tasks import TASKS, load_task

Judge = Callable[[str, int], bool]  # (text of a completion, number of its prompt) -> whether it is right
NUMBERS = "numbers"  # of the prompts, a column of the files of traces
TRACES = 6  # the second part of the key of the traces' random numbers


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run, as tokens, and what judges their completions."""

    ids: list[list[int]]
    judge: Judge | None  # None: the data cannot judge completions
    rows: str  # the fingerprint of the ids and of the rows that they come from


def load_prompts(args: DistillConfig, tokenizer: Any) -> Prompts:
    """The training prompts of a task, or those of a file's column `prompt`: text or chat messages; at most
    `--num_prompts` of the usable ones, drawn by the seed. ValueError for bad rows, unless they are skipped."""
    # The rows.
    name = args.train_data
    task = None
    if name in TASKS or name.endswith(".py"):
        task = load_task(name)
    if args.data_file is not None and task is None:
        raise ValueError(f"--data_file is for a task, and --train_data {name} is none")
    rows: Dataset = load_rows(name, TASKS) if task is None else task.load_rows("train", args.data_file)
    if "prompt" not in rows.column_names:
        raise ValueError(f"the rows of {name} have no column prompt, only {', '.join(rows.column_names)}")

    # Their prompts; rows without one are refused or skipped.
    columns = [column for column in rows.column_names if column in ("prompt", *CONVERSATION_COLUMNS)]
    ids, problems, states = [], [], []
    for row in rows.select_columns(columns):
        row_ids, problem = prompt_ids(row, tokenizer, args.max_prompt_length)
        ids.append(row_ids)
        problems.append(problem)
        states.append("bad" if problem else "ok")
    usable = usable_rows(states, problems, args.bad_rows, rows)

    if args.num_prompts is not None and args.num_prompts < len(usable):
        usable = sorted(random.Random(args.seed).sample(usable, args.num_prompts))
    usable_ids = [ids[row] for row in usable]
    prompt_rows = rows.select(usable)

    def judge(text: str, number: int) -> bool:
        assert task is not None
        scores = task.score(text, prompt_rows[number])
        return bool(next(iter(scores.values())) == 1)

    return Prompts(usable_ids, judge if task else None, hash_values([usable_ids, hash_rows(prompt_rows)]))


def prompt_ids(row: dict[str, Any], tokenizer: Any, longest: int) -> tuple[list[int], str]:
    """The ids of a row's prompt and an empty text, or no ids and what is wrong with the row."""
    try:
        prompt = as_messages(row, "prompt", "user")
        if not prompt:
            raise ValueError("prompt is empty")
        messages, template_arguments = conversation_of(row, prompt)
        ids = encode_question(tokenizer, messages, template_arguments)
        if len(ids) > longest:
            raise ValueError(f"the prompt has {len(ids)} tokens, more than --max_prompt_length")
    except Exception as error:  # a chat template may raise anything
        return [], describe_row_error(error)
    return ids, ""


@dataclass(frozen=True)
class TraceSampler:
    """Samples traces with the library's exact sampler. Without a `judge`, all are trained on."""

    prompts: Prompts
    settings: SamplingSettings
    tokenizer: Any
    judge: Judge | None

    @torch.no_grad()
    def sample(self, model: Any, numbers: Sequence[int], seed: int) -> tuple[Traces, int]:
        """Traces of these prompts, on the host, and the tokens processed, as `Rollout.forward_tokens`. A trace depends
        on its prompt, its number and the seed alone."""
        was_training = model.training
        model.eval()
        eos_token_ids = end_ids(self.tokenizer)
        prompts = [self.prompts.ids[number] for number in numbers]
        ids, mask = left_pad(prompts, self.tokenizer.pad_token_id)
        sampled = rollout(
            model,
            ids.to(model.device),
            mask.to(model.device),
            self.settings,
            mask_token_id=self.tokenizer.mask_token_id,
            eos_token_ids=eos_token_ids,
            generator=[keyed_generator(seed, TRACES, number, 0, device=model.device) for number in numbers],
        )
        model.train(was_training)

        canvas_ids = sampled.ids[:, ids.shape[1] :].cpu().contiguous()
        traces = Traces(
            ids=canvas_ids,
            steps=sampled.reveal_steps.cpu(),
            blocks=blocks_of_canvas(self.settings, [len(prompt) for prompt in prompts], block_size(model.config)),
            right=self.are_right(canvas_ids, numbers),
            eos_token_ids=eos_token_ids,
        )
        return traces, int(sampled.forward_tokens.sum())

    def are_right(self, canvas_ids: Tensor, numbers: Sequence[int]) -> Tensor:
        """(rows,) bool: whether the judge calls each completion right; True without a judge."""
        if self.judge is None:
            return torch.ones(len(canvas_ids)).bool()
        before_end = eos_cut(canvas_ids, end_ids(self.tokenizer), including=False)  # as an evaluation reads them
        completions = [row[row_mask] for row, row_mask in zip(canvas_ids, before_end, strict=True)]
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return torch.tensor([self.judge(text, number) for text, number in zip(texts, numbers, strict=True)])


def sample_once(
    sampler: TraceSampler, model: Any, folder: Path, seed: int, batch: int, process: int, processes: int
) -> list[Path]:
    """Sample a trace of every prompt into files of `folder`, one per `batch` prompts of similar length, shared among
    processes. Files that are there stay, so a killed run continues. Return the files of all processes."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [len(ids) for ids in sampler.prompts.ids]
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)  # or short prompts would be padded to long ones
    files = {first: folder / f"{first:08d}.safetensors" for first in range(0, len(by_length), batch)}
    firsts = list(files)[process::processes]
    for first in tqdm(firsts, desc="Sampling traces", disable=process > 0):
        path = files[first]
        if path.exists():
            continue
        numbers = by_length[first : first + batch]
        traces, compute = sampler.sample(model, numbers, seed)
        columns = {name: getattr(traces, name) for name in COLUMNS}
        staging = path.with_suffix(".part")
        with writing(folder, "the traces", "make room and start the same command again: it keeps the traces there"):
            save_file(columns | {NUMBERS: torch.tensor(numbers), "compute": torch.tensor(compute)}, staging)
        staging.replace(path)
    give_usual_mode(files[first] for first in firsts)
    return [*files.values()]


def read_traces(files: Iterable[Path], eos_token_ids: Sequence[int]) -> tuple[Traces, int]:
    """The traces of these files, in the order of the prompts, and the tokens that sampling processed; `eos_token_ids`
    are the tokens that end a completion.

    Raises:
        ValueError: a file is missing or damaged.
    """
    parts = []
    for path in files:
        if not path.exists():
            raise ValueError(f"{path}: these traces are missing: the same command samples them again")
        with reading(path, "these traces are damaged: delete the file, and the same command samples them again"):
            parts.append(load_file(path))
    order = torch.cat([part[NUMBERS] for part in parts]).argsort()
    columns = {name: torch.cat([part[name] for part in parts])[order] for name in COLUMNS}
    return Traces(**columns, eos_token_ids=eos_token_ids), sum(int(part["compute"]) for part in parts)
