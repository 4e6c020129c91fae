"""Completions for the problems of a task: their prompts, a journal of what is done, and the sampling.

While a setup (task, model, lengths) runs, `{setup}.partial/` holds what determines its results, a lock, and one journal
per process. A resumed run reads all journals, with any number of processes. When all completions are done, they become
`{setup}_0_generations.json` and the folder is removed.

In fp32 no row depends on the others in its batch: each process takes rows from a shared queue one by one, when its
batch has room. In 16 bits a row's tokens sometimes depend on the other rows. So there the queue holds whole parts of
the run, which depend neither on what is left to do nor on the number of processes. Each part has its own batches, and
a part that was interrupted is generated again as a whole.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import io
import json
import logging
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from d1 import extensions
from d1.eval.flags import EvalRun, StreamFlags, TaskFlags
from d1.files import FileLock, LockHeldError, read_object, write_atomically, writing
from d1.masking import keyed_generator
from d1.models.folder import ModelFolder
from d1.models.head import NotFiniteError
from d1.models.kinds import check_room
from d1.models.load import load_on_device, named_dtype
from d1.models.memory import check_memory
from d1.models.precision import cpu_runs_bf16
from d1.models.tokenizer import check_new_roles, encode_prompt, end_ids, render_prompt, unread_variables
from d1.runs.record import CONTENTS, IMPORTS, hash_file, hash_model, hash_settings
from d1.sampling import Rollout, eos_cut, rollout_stream
from d1.sampling.graphs import set_compile
from d1.sampling.settings import UNIFORM_NOISE_DEFAULTS, ModelFlags, SamplingFlags, sampling_settings
from d1.tasks import TASKS, few_shot_messages, insert_shots, shots_of

logger = logging.getLogger("eval")

BOX_REQUEST = re.compile(r" as \\boxed\{\w+\}")  # the words of the tasks' prompts that ask for a boxed answer
PART_BATCHES = 4  # per part in 16 bits if rows may end early: more of them waste less of the half-empty last one
RESTORE_ADVICE = "it is damaged: restore it, or pass --overwrite to start again"
ENTRY: dict[str, type | tuple[type, ...]] = {  # a line of a journal with all of these fields is a completion
    "index": int,  # the problem's number in its split
    "generations": str,
    "text": str,
    "tokens": int,
    "forward_passes": int,
    "seconds": (int, float),
}
T = TypeVar("T")
STORE: list[dist.Store] = []  # the processes' shared counters; empty for a single process
OWN_GROUP: list[Any] = []  # their process group, if this evaluation made it
EVALUATIONS = count()  # of this launch: each has counters of its own
PROCESS_TIMEOUT = timedelta(days=7)  # a rank may be hours behind another


# --- What an evaluation's arguments ask for ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """A problem: its index in the split, text and ids of its prompt, and the question and answer of its row."""

    index: int
    text: str
    ids: list[int]
    question: str = ""
    ground_truth: Any = None
    messages: Sequence[dict[str, Any]] = ()  # the prompt as chat messages, for the turns with tools
    sample: int = 0  # the completion's number, if a prompt gets several
    samples: int = 1  # how many there are

    @property
    def key(self) -> int:
        """The number of this completion in the journal."""
        return self.index if self.samples == 1 else self.index * self.samples + self.sample


def read_prompts(args: EvalRun, task: ModuleType, tokenizer: Any, config: Any = None) -> list[Prompt]:
    """The problems to evaluate, in the order of their split, each `--num_samples` times; `config` is the model's,
    which only tools read."""
    rows = task.load_rows(args.split, args.data_file)
    if not len(rows):
        raise ValueError(f"--dataset {args.dataset} has no rows in {args.data_file or f'its {args.split} split'}")
    missing = [name for name in ("prompt", "question", "ground_truth") if name not in rows.column_names]
    if missing:
        raise ValueError(f"--dataset {args.dataset}: its load_rows gives no column {', '.join(missing)}")
    indices: Sequence[int] = range(len(rows))
    if args.limit is not None and args.limit < len(rows):
        indices = sorted(random.Random(0).sample(indices, args.limit))
    questions = rows.select(indices)["question"]
    shots = few_shot_messages(task, shots_of(task, args.few_shot), args.seed, args.few_shot_file, questions)
    turns = make_turns(args, tokenizer, config)
    template_options = args.chat_template_kwargs or {}
    for note in unread_variables(tokenizer, template_options):
        logger.warning(note)
    checked_roles: set[tuple[Any, ...]] = set()  # of prompts that the template writes in full
    prompts = []
    for index in indices:
        row = rows[index]
        check_row(row, index)
        *earlier, last = row["prompt"]
        content = last["content"]
        if args.dont_use_box:
            content = BOX_REQUEST.sub("", content, count=1)
            if content == last["content"] and r"\boxed" in content:
                raise ValueError(
                    f"--dont_use_box: the prompts of {args.dataset} ask for a box in other words than"
                    r' " as \boxed{answer}": change them in the task file'
                )
        messages, options = turns.add_instructions(insert_shots(shots, [*earlier, {**last, "content": content}]))
        try:
            text = render_prompt(tokenizer, messages, **template_options, **options)
            check_new_roles(tokenizer, messages, {**template_options, **options}, checked_roles)
            if args.add_reasoning:
                text += "<reasoning>"
            ids = encode_prompt(tokenizer, text)
        except ValueError as error:
            raise ValueError(f"problem {index} (from 0): {error}") from error
        for sample in range(args.num_samples):
            prompt = Prompt(
                index=index,
                text=text,
                ids=ids,
                question=row["question"],
                ground_truth=row["ground_truth"],
                messages=messages,
                sample=sample,
                samples=args.num_samples,
            )
            prompts.append(prompt)
    return prompts


def check_row(row: Mapping[str, Any], index: int) -> None:
    """Refuse (ValueError) a task's row whose prompt is no chat, or whose completions a generation file cannot hold."""
    prompt = row["prompt"]
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    if not isinstance(last, Mapping) or not isinstance(last.get("content"), str):
        raise ValueError(
            f"problem {index} (from 0): its prompt must be chat messages, such as "
            f'[{{"role": "user", "content": "..."}}], got {prompt!r:.80}'
        )
    if not isinstance(row["question"], str):
        raise ValueError(f"problem {index} (from 0): its question must be text, got {row['question']!r:.80}")
    if row["ground_truth"] is None:
        raise ValueError(f"problem {index} (from 0) has no ground_truth; if score does not read it, give it any value")
    try:
        json.dumps(row["ground_truth"])
    except TypeError:
        raise ValueError(
            f"problem {index} (from 0): its ground_truth must be a JSON value, got {row['ground_truth']!r:.80}"
        ) from None


def default_dtype(config: Any) -> str | None:
    """The dtype of a model of this config on a CPU where bf16 is the better choice; else None, that of the device."""
    if not torch.cuda.is_available() and cpu_runs_bf16(config):
        return "bfloat16"
    return None


def in_fp32(args: ModelFlags) -> bool:
    return named_dtype(args.dtype) == torch.float32


def task_name(args: TaskFlags) -> str:
    return args.dataset if args.dataset in TASKS else Path(args.dataset).stem


def setup_name(args: EvalRun) -> str:
    """`{task}_{model}_{gen_length}_{steps}`, where `model` is the name of the folder of the model or the adapter,
    followed by the split (unless it is test), the prompt protocol (unless it is d1), `fs` and the number of worked
    examples (unless it is 0), and the suffix."""
    path = Path(args.checkpoint_path or args.model_path)
    if path.name.startswith("checkpoint-") or path.name == "merged":
        parts = [path.resolve().parent.name, path.name]
    else:
        parts = [path.resolve().name]
    if args.split != "test":
        parts.append(args.split)
    if args.prompt_protocol != "d1":
        parts.append(args.prompt_protocol)
    if args.few_shot:
        parts.append(f"fs{args.few_shot}")
    if args.suffix:
        parts.append(args.suffix)
    model = re.sub(r"[^\w.-]+", "-", "_".join(parts))
    return f"{task_name(args)}_{model}_{args.gen_length}_{args.diffusion_steps}"


def run_identity(args: EvalRun, prompts: list[Prompt]) -> dict[str, Any]:
    """Everything that determines the completions: a run resumes only if all of it agrees.

    The file of a user's task counts as a whole, although it may differ only in how it scores."""
    problems = json.dumps([[prompt.index, prompt.text, prompt.ground_truth] for prompt in prompts], default=str)
    sampling = sampling_settings(args)
    identity: dict[str, Any] = {
        CONTENTS + "model_path": hash_model(args.model_path, args.checkpoint_path or None),
        "problems": len(prompts),
        "prompts": hashlib.sha256(problems.encode()).hexdigest()[:16],
        "seed": args.seed,
        "dtype": str(named_dtype(args.dtype)),
        "gen_length": args.gen_length,
        "diffusion_steps": args.diffusion_steps,
        "block_length": args.block_length,
        "temperature": args.temperature,
        "cfg_scale": args.cfg_scale,
        "remasking": args.remasking,
        "eos_stop": args.eos_stop,
        "sampler": args.sampler,
        "prompt_protocol": args.prompt_protocol,
        "reveal": [sampling.cache, sampling.rule, sampling.level],
    }
    if sampling.edits is not None:
        identity["editing"] = [sampling.edits, sampling.post_steps]
    if sampling.sampler == "scdd":
        identity["nucleus_p"] = sampling.nucleus
    if sampling.first_token is not None:
        identity["first_token"] = sampling.first_token
    for name, default in UNIFORM_NOISE_DEFAULTS.items():
        value = getattr(sampling, name)
        if value != default:
            identity[name] = value
    if args.dataset not in TASKS:
        identity[CONTENTS + "dataset"] = hash_file(args.dataset)
    if args.num_samples > 1:
        identity["num_samples"] = args.num_samples
    if args.tools:
        for name in ("max_turns", "tool_format", "calls_per_turn", "result_length", "max_turn_prompt"):
            identity[name] = getattr(args, name)
        identity["tools"] = [name if name in extensions.TOOLS else hash_file(name) for name in args.tools]
    code = hash_settings({"dataset": args.dataset, "tools": args.tools or []})
    for name, fingerprint in code.items():
        if name.startswith(IMPORTS):
            identity[name] = fingerprint
    if args.compile != "none":
        identity["compile"] = args.compile
    if not in_fp32(args):  # the rest changes the rounding of logits, and so sometimes a token
        identity["batch_size"] = args.batch_size
        identity["attn_implementation"] = args.attn_implementation or "default"
        identity["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        identity["libraries"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return identity


# --- The journal, from which a killed run continues -------------------------------------------------------------------


class Journal:
    """The partial results of one setup in `output_dir`: per process, a file with one JSON line per completion."""

    def __init__(self, output_dir: str | Path, setup: str, rank: int):
        self.output_dir = Path(output_dir)
        self.setup = setup
        self.rank = rank
        self.folder = self.output_dir / f"{setup}.partial"
        self.results = self.output_dir / f"{setup}_0_generations.json"
        self.record = self.output_dir / f"{setup}_record.json"
        self.identity_file = self.folder / "identity.json"
        # All processes share the lock; rank 0 first takes it exclusively. The system releases it when a process ends,
        # so the files of a killed run block no other run.
        self.lock = FileLock(self.folder / "lock")
        self.lines: io.FileIO | None = None  # this process's journal

    def prepare(self, identity: dict[str, Any], overwrite: bool) -> bool:
        """Prepare the folder for `identity` (rank 0 only); False if the results are already complete.

        Raises:
            ValueError: there are results of another run, or another process writes this setup; nothing was changed.
        """
        if not overwrite and self.results.exists() and self.record.exists():
            known = read_object(self.record, RESTORE_ADVICE).get("identity") or {}
            self.check_identity(known, identity)
            return False
        if not overwrite and self.results.exists() and not self.read():  # after a kill, the journal is still there
            raise ValueError(
                f"{self.results} has no {self.record.name}, so it is of another run or program, such as d1's own: "
                "choose another --suffix or --output_dir, or pass --overwrite to replace it"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.take_lock(fcntl.LOCK_EX)
        if overwrite:
            # The identity goes last: completions without one could be taken for those of this run.
            for path in (self.results, self.record, *self.folder.glob("rank_*.jsonl"), self.identity_file):
                path.unlink(missing_ok=True)
        try:
            if self.read():  # else a run was killed before its first completion, and nothing depends on it
                known = {}
                if self.identity_file.is_file():
                    known = read_object(self.identity_file, RESTORE_ADVICE)
                self.check_identity(known, identity)
            else:
                write_atomically(self.identity_file, json.dumps(identity, indent=1))
            self.take_lock(fcntl.LOCK_SH)
        except (ValueError, OSError):
            self.lock.release()
            raise
        return True

    def take_lock(self, kind: int) -> None:
        try:
            self.lock.acquire(kind)
        except LockHeldError as holder:
            raise ValueError(
                f"{holder}, or another process of its launch, is evaluating into {self.folder}: wait until it is done, "
                "end it, or choose another --suffix or --output_dir"
            ) from None

    def check_identity(self, known: dict[str, Any], identity: dict[str, Any]) -> None:
        """Refuse (ValueError) results of another run than `identity`; the message names the differences."""
        changed = []
        for name in known | identity:
            if known.get(name) != identity.get(name):
                changed.append(f"{name}: {known.get(name)!r} there, {identity.get(name)!r} now")
        if changed:
            raise ValueError(
                f"{self.output_dir} already holds {self.setup} of a different run ({'; '.join(changed)}): "
                "choose another --suffix or --output_dir, or pass --overwrite to start again"
            )

    def read(self) -> dict[int, dict[str, Any]]:
        """All completions written so far, by any process of any launch, by index; the first line of an index counts.

        Lines that are not a completion (cut off by a kill, damaged) are skipped and stay in the file.
        """
        done: dict[int, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("rank_*.jsonl")):
            for line in path.read_bytes().split(b"\n"):
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in ENTRY.items()):
                    done.setdefault(entry["index"], entry)
        return done

    def append(self, entry: dict[str, Any]) -> None:
        """Append one completion, with the fields of `ENTRY`, to this process's journal in a single write."""
        line = json.dumps(entry).encode() + b"\n"
        if self.lock.file is None:
            self.take_lock(fcntl.LOCK_SH)
        with self.writing():
            if self.lines is None:
                self.lines = io.FileIO(self.folder / f"rank_{self.rank}.jsonl", "ab")
                if os.fstat(self.lines.fileno()).st_size:
                    line = b"\n" + line  # ends a line that a kill may have cut off
            if self.lines.write(line) < len(line):
                self.lines = None
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finish(self, results: dict[str, Any], record: dict[str, Any]) -> None:
        """Write the results and the record, and remove the journal (rank 0, when everything is done)."""
        with self.writing():
            write_atomically(self.results, json.dumps(results, indent=1, ensure_ascii=False))
            write_atomically(self.record, json.dumps(record, indent=1, default=str))
        self.close()  # NFS keeps a file that is removed while it is open, and its folder
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """Close this process's journal and release the lock, so that another run, also of this process, may continue.
        Without it, both would stay open as long as an error's traceback refers to the journal."""
        if self.lines is not None:
            self.lines.close()
            self.lines = None
        self.lock.release()

    def writing(self) -> AbstractContextManager[None]:
        """Raises an OSError of one line if there is no room for what is written inside."""

        def advice() -> str:
            return f"{len(self.read())} are safe in {self.folder}: make room and start the same command again"

        return writing(self.output_dir, "completions", advice)


# --- Processes and their shared queue ---------------------------------------------------------------------------------


def join_processes() -> tuple[int, int]:
    """(rank, number of processes), as torchrun or accelerate started them. If a trainer of the same script has joined
    them, waiting ends after the time of its group."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        store, rank = launcher_store()
        own = dist.PrefixStore(f"evaluation {next(EVALUATIONS)}", store)
        STORE[:] = [dist.PrefixStore("eval", own)]
        if not dist.is_initialized():  # a trainer of the same script may have joined them
            group = dist.PrefixStore("gloo", own)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=world, timeout=PROCESS_TIMEOUT)
            OWN_GROUP.append(dist.group.WORLD)
    return int(os.environ.get("RANK", "0")), world


@functools.cache
def launcher_store() -> tuple[dist.Store, int]:
    """The store of the processes that were started together, and the rank of this one."""
    store, rank, _ = next(dist.rendezvous("env://", timeout=PROCESS_TIMEOUT))
    return store, rank


def leave_processes() -> None:
    if OWN_GROUP:
        dist.destroy_process_group(OWN_GROUP.pop())
    STORE.clear()


def take_from_queue(parts: Sequence[T], name: str) -> Iterator[T]:
    """`parts` in their order, each given to one process only: the next that asks. Use each name once per evaluation."""
    if not STORE:
        yield from parts
        return
    number = STORE[0].add(f"{name} taken", 1) - 1
    while number < len(parts):
        yield parts[number]
        number = STORE[0].add(f"{name} taken", 1) - 1


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


# --- Sampling ---------------------------------------------------------------------------------------------------------


def load_model_for(args: ModelFlags, folder: ModelFolder) -> Any:
    """The model on this process's device; the log of the first process says in which dtype."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        device = "a GPU" if torch.cuda.is_available() else "a CPU"
        logger.info("Loading %s as %s, on %s", args.model_path, str(named_dtype(args.dtype)).split(".")[-1], device)
    check_memory(folder, args.dtype)
    model = load_on_device(folder, args.dtype, attn_implementation=args.attn_implementation)
    return set_compile(model, args.compile)


def complete(
    args: EvalRun, load: Callable[[], Any], tokenizer: Any, prompts: Iterable[Prompt], journal: Journal
) -> None:
    """Generate the completions that the journal lacks and append each when it ends; return when all processes are
    done."""
    # The longest prompts come first: batches need little padding, and one that does not fit fails at once.
    prompts = sorted(prompts, key=lambda prompt: -len(prompt.ids))
    done = journal.read().keys() & {prompt.key for prompt in prompts}
    wait_for_all()  # no process writes before all have read
    if done and journal.rank == 0:
        logger.info("Resuming: %d of %d completions are done", len(done), len(prompts))

    # The parts of the run that are not done.
    part_size = 1
    if not in_fp32(args):
        part_size = args.batch_size
        may_end_early = args.eos_stop or sampling_settings(args).rule is not None
        if may_end_early:
            part_size *= PART_BATCHES
    parts = []
    for start in range(0, len(prompts), part_size):
        part = prompts[start : start + part_size]
        if any(prompt.key not in done for prompt in part):
            parts.append(part)

    if parts:
        model = load()
        turns = make_turns(args, tokenizer, model.config)
        check_room(model.config, len(parts[0][0].ids), args.gen_length)
        ends = torch.tensor(end_ids(tokenizer), device=model.device)
        # In fp32 one endless batch takes row after row; in 16 bits each part is sampled by itself.
        local_parts: Iterable[Iterable[Prompt]] = take_from_queue(parts, journal.setup)
        if in_fp32(args):
            local_parts = [chain.from_iterable(local_parts)]
        with tqdm(
            total=len(prompts) - len(done), desc=journal.setup, unit="problem", disable=journal.rank != 0
        ) as progress:
            for batch_prompts in local_parts:
                for _, entry in generate_rows(args, turns, model, tokenizer, batch_prompts, ends, args.batch_size):
                    if entry["index"] in done:
                        continue  # a part that was interrupted gives some rows again
                    journal.append(entry)
                    finished = progress.n + 1
                    if STORE:  # the bar counts the completions of all processes
                        finished = STORE[0].add(f"{journal.setup} done", 1)
                    progress.update(finished - progress.n)
    if journal.rank != 0:  # the first process reads and removes the files: on NFS, others have to close them before
        journal.close()
    wait_for_all()


def generate_rows(
    args: StreamFlags,
    turns: SingleTurn,
    model: Any,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    ends: torch.Tensor,
    batch_size: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each prompt's number and journal entry, as soon as its row ends; the next prompt is taken when there is room.

    Entries use the names of the generation files: texts, `tokens` generated before the end, `reveal_steps` (per such
    token, the row's forward pass that wrote it, from 0), `forward_passes`, `forward_tokens` (tokens processed in these
    passes), and `seconds`: the time since the last rows ended, divided by the number of rows that ended together, so
    that the sum over all rows is the total time. A sampler that edits adds `edits` and `first_text`, the text of the
    tokens that were written first. With tools, an entry is of all turns, and `text` is the last one's; `turns`,
    `calls`, `failed_calls`, `end` and `messages` are added, without `reveal_steps`.

    Raises:
        NotFiniteError: a row's logits are not finite; the message names its problem.
    """
    rows = turns.rows(prompts, ends.tolist())
    stream = rollout_stream(
        model,
        rows,
        sampling_settings(args, model.config),
        batch_size=batch_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_ids=ends.tolist() if args.eos_stop else None,
    )
    last_end = time.perf_counter()
    try:
        for numbers, sampled in stream:
            entries = rows.finish(numbers, sampled)
            if entries:
                now = time.perf_counter()
                seconds = (now - last_end) / len(entries)
                last_end = now
                for number, entry in entries:
                    yield number, entry | {"seconds": seconds}
    except NotFiniteError as error:
        prompt, _ = rows.at_work[error.number]
        problem = f"problem {prompt.index}"
        if prompt.samples > 1:
            problem += f", sample {prompt.sample}"
        raise error.named(problem) from error


class SingleTurn:
    """How completions are made: one canvas each. `d1.tools.evaluation.Episodes` is the other way, for `--tools`."""

    def __init__(self, args: StreamFlags, tokenizer: Any) -> None:
        self.args = args
        self.tokenizer = tokenizer

    def add_instructions(
        self, messages: Sequence[dict[str, Any]]
    ) -> tuple[Sequence[dict[str, Any]], Mapping[str, Any]]:
        """A prompt as the model gets it, and options for its chat template."""
        return messages, {}

    def rows(self, prompts: Iterable[Prompt], ends: Sequence[int]) -> Rows:
        """The rows of the stream that samples the completions."""
        return Rows(self.args, self.tokenizer, prompts, ends)


def make_turns(args: EvalRun, tokenizer: Any, config: Any) -> SingleTurn:
    """How the completions of an evaluation are made, for a model of this config."""
    if args.tools:
        return extensions.Episodes(args, tokenizer, config)
    return SingleTurn(args, tokenizer)


def generator_of(args: SamplingFlags, prompt: Prompt, turn: int = 0) -> torch.Generator:
    """The generator of a completion, or of one of its turns."""
    key = [args.seed, prompt.index, prompt.sample]
    if turn:
        key.append(turn)
    return keyed_generator(*key)


class Rows:
    """The rows of a stream: problems, in their order. Iteration may end and continue later, when a turn of an
    episode waits.

    Attributes:
        at_work: by the number of a row in the stream, its problem and its number among the problems.
    """

    def __init__(self, args: SamplingFlags, tokenizer: Any, prompts: Iterable[Prompt], ends: Sequence[int]) -> None:
        self.args = args
        self.sampling = sampling_settings(args)
        self.tokenizer = tokenizer
        self.prompts = enumerate(prompts)
        self.ends = ends
        self.at_work: dict[int, tuple[Prompt, int]] = {}
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[Any, ...]:
        """The next row, as `rollout_stream` takes it."""
        number, prompt = next(self.prompts)
        self.add_row(prompt, number)
        return prompt.ids, generator_of(self.args, prompt)

    def add_row(self, prompt: Prompt, number: int) -> None:
        self.at_work[self.count] = (prompt, number)
        self.count += 1

    def finish(self, numbers: Sequence[int], sampled: Rollout) -> list[tuple[int, dict[str, Any]]]:
        """The number of each problem and its journal entry, for the rows that ended together."""
        canvas = slice(-self.sampling.gen_length, None)
        ends = torch.tensor(self.ends, device=sampled.ids.device)
        canvas_ids, first_ids = sampled.ids[:, canvas], sampled.first_ids[:, canvas]
        lengths = eos_cut(canvas_ids, ends, including=False).sum(1).tolist()
        first_lengths = eos_cut(first_ids, ends, including=False).sum(1).tolist()
        # One copy from the device for all rows.
        ids_of_rows = canvas_ids.tolist()
        first_ids_of_rows = first_ids.tolist()
        reveal_steps = sampled.reveal_steps.tolist()
        passes = sampled.passes.tolist()
        forward_tokens = sampled.forward_tokens.tolist()
        edits = sampled.edits.tolist()

        entries = []
        for row, number in enumerate(numbers):
            prompt, problem = self.at_work.pop(number)
            ids = ids_of_rows[row]
            length = lengths[row]
            entry = {
                "index": prompt.key,
                "generations": self.tokenizer.decode(ids),
                "text": self.tokenizer.decode(ids[:length], skip_special_tokens=True),
                "tokens": length,
                "reveal_steps": reveal_steps[row][:length],
                "forward_passes": passes[row],
                "forward_tokens": forward_tokens[row],
            }
            if self.sampling.rewrites:
                written = first_ids_of_rows[row][: first_lengths[row]]
                entry["edits"] = edits[row]
                entry["first_text"] = self.tokenizer.decode(written, skip_special_tokens=True)
            entries.append((problem, entry))
        return entries
