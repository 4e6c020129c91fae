"""Generation files, d1's or ours: one setup (task, model, lengths) may be spread over the files of several ranks.

A file is `{task}_{model}_{gen_length}_{steps}_{rank}_generations.json` and holds
`{"generations": [{"question", "prompt_input", "generations", "ground_truth"}], ...}`. Our files have more fields:

- per item `text`, `tokens` (generated before the end), `reveal_steps` (the pass that wrote each of these, from 0; not
  with tools), `forward_passes`, `forward_tokens` (processed in these passes), and with a sampler that edits `edits`
  (tokens that replaced others) and `first_text` (the text without the edits);
- per file `task`, `expected_problems` and `prompt_protocol`.

An error in a file or an item is noted in its setup, and the rest is read.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # scoring imports no tokenizer
    from d1.eval.completions import Prompt
    from d1.eval.flags import EvalRun

FILE_NAME = re.compile(r"(?P<setup>.+_\d+_\d+)_(?P<rank>0|[1-9]\d{0,3})_generations\.json")
D1_TASKS = {"gsm8k": "gsm8k", "math500": "math", "math": "math", "countdown": "countdown", "sudoku": "sudoku"}
UNKNOWN = "unknown"  # the task of files that do not say theirs
D1_PROBLEMS = {"gsm8k": 1319, "math": 500, "countdown": 256, "sudoku": 256}  # number of problems in d1's evaluation
SETTINGS = ("model_path", "checkpoint_path", "gen_length", "diffusion_steps", "block_length", "split", "seed")
RUN = ("task", "expected_problems", "prompt_protocol", *SETTINGS)  # what our files of a setup have in common
TURN_ENDS = re.compile(r"<\|(?:eot_id|endoftext|im_end)\|>")


@dataclass(frozen=True)
class GeneratedCompletion:
    """A completion in a file, with its problem: `raw` as decoded, and `text` up to its end, without special tokens."""

    where: str  # "FILE, item N", for messages
    key: str  # identifies the completion within a setup
    problem: str  # identifies its problem
    question: str
    ground_truth: Any
    raw: str
    text: str
    tokens: int | None
    forward_passes: int | None
    edits: int | None = None
    first_text: str | None = None  # with a sampler that edits: the text without the edits


@dataclass
class GeneratedSetup:
    """The content of one setup's files, and the errors in them."""

    name: str
    task: str = UNKNOWN
    model: str = ""
    gen_length: int = 0
    expected: int | None = None
    protocol: str = "d1"  # as eval.py --prompt_protocol
    completions: list[GeneratedCompletion] = field(default_factory=list)
    missing_ranks: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def generation_file(args: EvalRun, task: str, prompts: list[Prompt], done: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The content of a generation file, in d1's format."""
    items = []
    for prompt in prompts:
        item: dict[str, Any] = {"question": prompt.question, "prompt_input": prompt.text}
        for name, value in done[prompt.key].items():
            if name != "index":
                item[name] = value
        item["ground_truth"] = prompt.ground_truth
        item["index"] = prompt.index
        if prompt.samples > 1:
            item["sample"] = prompt.sample
        items.append(item)
    file = {
        "generations": items,
        "metrics": {"wall_time": sum(item["seconds"] for item in items), "total_processed": len(items)},
        "task": task,
        "expected_problems": len(items),
    }
    for name in (*SETTINGS, "prompt_protocol"):
        file[name] = getattr(args, name)
    return file


def read_setups(folder: str | Path) -> list[GeneratedSetup]:
    """All setups of a folder, sorted by task, model and length; a file whose name does not fit becomes its own setup,
    with an error.

    Raises:
        FileNotFoundError: there is no such folder, or no generation file in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: run eval.py first, or name the folder of its results")
    by_setup: dict[str, dict[int, Path]] = {}
    setups = []
    for path in folder.glob("*_generations.json"):
        match = FILE_NAME.fullmatch(path.name)
        if match:
            by_setup.setdefault(match["setup"], {})[int(match["rank"])] = path
        else:
            reason = "not read, because its name is not TASK_MODEL_LENGTH_STEPS_RANK_generations.json"
            setups.append(GeneratedSetup(path.name, errors=[f"{path.name}: {reason}"]))
    if not by_setup and not setups:
        raise FileNotFoundError(f"no generation files ({FILE_NAME.pattern}) in {folder}: run eval.py first")
    setups += [read_setup(name, files) for name, files in by_setup.items()]
    return sorted(setups, key=lambda setup: (setup.task, setup.model, setup.gen_length, setup.name))


def read_setup(name: str, files: dict[int, Path]) -> GeneratedSetup:
    """The setup `name` from its files by rank."""
    setup = GeneratedSetup(name, missing_ranks=sorted(set(range(max(files) + 1)) - set(files)))
    contents = {rank: read_json(path, setup.errors) for rank, path in sorted(files.items())}

    # Our files name their task and number of problems; for d1's own files, the name of the file does.
    identity: dict[str, Any] = {}
    for data in contents.values():
        if isinstance(data.get("task"), str):
            identity = data
            break
    head, length, _ = name.rsplit("_", 2)
    task = UNKNOWN
    for beginning, task_name in D1_TASKS.items():
        if head.startswith(beginning + "_"):
            task = task_name
            break
    setup.task = identity.get("task") or task
    setup.gen_length = int(length)
    task_prefix = "math500_" if head.startswith("math500_") else setup.task + "_"
    setup.model = head.removeprefix(task_prefix)
    setup.protocol = str(identity.get("prompt_protocol", "d1"))
    if identity:
        setup.expected = identity.get("expected_problems")
    else:
        setup.expected = D1_PROBLEMS.get(setup.task)
    if setup.expected is not None and (type(setup.expected) is not int or setup.expected < 1):
        setup.errors.append(f'{name}: "expected_problems" must be a whole number above 0, got {setup.expected!r:.80}')
        setup.expected = None

    for rank, data in contents.items():
        file = files[rank].name
        differences = []
        if identity and data:
            differences = [f"{key} {data.get(key)!r}" for key in RUN if data.get(key) != identity.get(key)]
        if differences:
            setup.errors.append(f"{file}: not read, because it is from another run (here {', '.join(differences)})")
            continue
        for number, item in enumerate(data.get("generations", [])):
            where = f"{file}, item {number}"
            try:
                setup.completions.append(read_completion(where, item))
            except (TypeError, ValueError) as error:
                setup.errors.append(f"{where}: {error}")

    # A file of two runs mixes indices, or has items with and without them.
    numbered = Counter(one.key for one in setup.completions if one.problem.isdigit())
    for key, count in numbered.items():
        if count > 1:
            setup.errors.append(f"{name}: index {key} occurs {count} times")
    if 0 < numbered.total() < len(setup.completions):
        setup.errors.append(f"{name}: some problems have an index and others have none: they are from two runs")
    return setup


def read_json(path: Path, errors: list[str]) -> dict[str, Any]:
    """The content of a generation file; empty if it cannot be read, with the reason appended to `errors`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        errors.append(f"{path.name}: not readable as JSON, perhaps cut off ({error})")
        return {}
    if not isinstance(data, dict) or not isinstance(data.get("generations"), list):
        errors.append(f'{path.name}: it has no list "generations"')
        return {}
    return data


def read_completion(where: str, item: Any) -> GeneratedCompletion:
    """One item of a file."""
    if not isinstance(item, dict):
        raise TypeError(f"an item must be an object, got {type(item).__name__}")
    item = {"text": TURN_ENDS.split(str(item.get("generations")), maxsplit=1)[0]} | item
    for name in ("generations", "question", "text"):
        if not isinstance(item.get(name), str):
            raise TypeError(f'"{name}" must be text, got {type(item.get(name)).__name__}')
    counts = [item.get("tokens"), item.get("forward_passes"), item.get("edits")]
    if not all(isinstance(count, int | None) for count in counts):
        raise TypeError(f'"tokens", "forward_passes" and "edits" must be whole numbers, got {counts}')
    first_text = item.get("first_text")
    if not isinstance(first_text, str | None):
        raise TypeError(f'"first_text" must be text, got {type(first_text).__name__}')

    index = item.get("index")
    if not isinstance(index, int):
        index = [item["question"], item.get("ground_truth")]
    problem = json.dumps(index)
    key = problem
    if isinstance(item.get("sample"), int):
        key = f"{problem}.{item['sample']}"
    return GeneratedCompletion(
        where=where,
        key=key,
        problem=problem,
        question=item["question"],
        ground_truth=item.get("ground_truth"),
        raw=item["generations"],
        text=item["text"],
        tokens=item.get("tokens"),
        forward_passes=item.get("forward_passes"),
        edits=item.get("edits"),
        first_text=first_text,
    )
