"""Generation files, d1's or ours: one setup (task, model, lengths) may be spread over the files of several ranks.

A file is `{task}_{model}_{gen_length}_{steps}_{rank}_generations.json` and holds
`{"generations": [{"question", "prompt_input", "generations", "ground_truth"}], ...}`. Ours add to an item `text`,
`tokens` (generated before the end), `forward_passes`, `forward_tokens` (fed through the model in these) and, when there
are several, `samples`; to the file `task`, `expected_problems` and `prompt_protocol`.
Whatever is wrong with a file or an item is noted, and the rest is read.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # scoring imports no tokenizer
    from d1.eval.journal import Key
    from d1.eval.setup import Prompt

FILE_NAME = re.compile(r"(?P<setup>.+_\d+_\d+)_(?P<rank>0|[1-9]\d{0,3})_generations\.json")
D1_TASKS = {"gsm8k": "gsm8k", "math500": "math", "math": "math", "countdown": "countdown", "sudoku": "sudoku"}
D1_PROBLEMS = {"gsm8k": 1319, "math": 500, "countdown": 256, "sudoku": 256}  # in d1's evaluation
SETTINGS = ("model_path", "checkpoint_path", "gen_length", "diffusion_steps", "block_length", "split", "seed")
RUN = ("task", "expected_problems", "prompt_protocol", *SETTINGS)  # what our files of a setup have in common
TURN_ENDS = re.compile(r"<\|(?:eot_id|endoftext|im_end)\|>")


@dataclass(frozen=True)
class Sample:
    """One completion: as decoded, as read for an answer (up to its end, no special tokens), and its cost."""

    raw: str
    text: str
    tokens: int | None
    forward_passes: int | None


@dataclass(frozen=True)
class GeneratedProblem:
    """A problem as a file has it, with its completions."""

    where: str  # "FILE, item N", for messages
    index: int | None  # in the split; None in d1's files
    question: str
    ground_truth: Any
    samples: list[Sample]

    @property
    def key(self) -> str:
        """What identifies the problem within a setup."""
        return json.dumps([self.question, self.ground_truth] if self.index is None else self.index)


@dataclass
class GeneratedSetup:
    """What the files of one setup hold, and what is wrong with them."""

    name: str
    task: str
    model: str
    gen_length: int
    expected: int | None
    protocol: str = "d1"  # as eval.py --prompt_protocol
    problems: list[GeneratedProblem] = field(default_factory=list)
    duplicates: int = 0
    missing_ranks: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # something is lost
    notes: list[str] = field(default_factory=list)  # something is odd


def generation_file(
    args: argparse.Namespace, task: str, prompts: list[Prompt], done: dict[Key, dict[str, Any]]
) -> dict[str, Any]:
    """A file in d1's format: of several samples, `generations` is the first, `samples` has all.

    Args:
        args: eval.py's.
        done: the journal's entries of all `prompts` and their samples.
    """
    items, seconds = [], 0.0
    for prompt in prompts:
        samples = [
            {name: value for name, value in done[prompt.index, sample].items() if name not in ("index", "sample")}
            for sample in range(args.num_samples)
        ]
        seconds += sum(sample["seconds"] for sample in samples)
        items.append(
            {"question": prompt.question, "prompt_input": prompt.text}
            | samples[0]
            | {"ground_truth": prompt.ground_truth, "index": prompt.index}
            | ({"samples": samples} if len(samples) > 1 else {})
        )
    return {
        "generations": items,
        "metrics": {"wall_time": seconds, "total_processed": len(items)},
        "task": task,
        "expected_problems": len(items),
        **{name: getattr(args, name) for name in (*SETTINGS, "prompt_protocol")},
    }


def read_setups(folder: str | Path) -> list[GeneratedSetup]:
    """All setups of a folder, sorted by task, model and length; a file that cannot be part of one is its own.

    Raises:
        FileNotFoundError: no such folder, or no generation file in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: run eval.py first, or name the folder of its results")
    by_setup: dict[str, dict[int, Path]] = {}
    setups = []
    for path in folder.glob("*_generations.json"):
        if match := FILE_NAME.fullmatch(path.name):
            by_setup.setdefault(match["setup"], {})[int(match["rank"])] = path
        else:
            reason = "not read, because its name is not TASK_MODEL_LENGTH_STEPS_RANK_generations.json"
            setups.append(GeneratedSetup(path.name, "unknown", "", 0, None, errors=[f"{path.name}: {reason}"]))
    if not by_setup and not setups:
        raise FileNotFoundError(f"no generation files ({FILE_NAME.pattern}) in {folder}: run eval.py first")
    setups += [read_setup(name, files) for name, files in by_setup.items()]
    return sorted(setups, key=lambda setup: (setup.task, setup.model, setup.gen_length, setup.name))


def read_setup(name: str, files: dict[int, Path]) -> GeneratedSetup:
    """The setup `name` from its files by rank."""
    errors: list[str] = []
    contents = {rank: read_json(path, errors) for rank, path in sorted(files.items())}
    head, length, _ = name.rsplit("_", 2)
    ours = [rank for rank, data in contents.items() if isinstance(data.get("task"), str)]
    own = contents[ours[0]] if ours else {}
    task = own.get("task") or next((D1_TASKS[start] for start in D1_TASKS if head.startswith(start + "_")), "unknown")
    expected = own.get("expected_problems") if ours else D1_PROBLEMS.get(task)
    if expected is not None and (type(expected) is not int or expected < 1):
        where = files[ours[0]].name
        errors.append(f'{where}: "expected_problems" must be a whole number above 0, got {expected!r:.80}')
        expected = None
    model = head.removeprefix("math500_" if head.startswith("math500_") else task + "_")
    setup = GeneratedSetup(name, task, model, int(length), expected, errors=errors)
    setup.protocol = str(own.get("prompt_protocol", "d1"))
    setup.missing_ranks = sorted(set(range(max(files) + 1)) - set(files))
    seen: set[str] = set()
    for rank, data in contents.items():
        name = files[rank].name
        if ours and data and (other := [f"{key} {data.get(key)!r}" for key in RUN if data.get(key) != own.get(key)]):
            errors.append(
                f"{name}: not read, because {files[ours[0]].name} is of another run (here {', '.join(other)})"
            )
            continue
        for number, item in enumerate(data.get("generations", [])):
            try:
                problem = read_problem(f"{name}, item {number}", item)
            except (TypeError, ValueError) as error:
                errors.append(f"{name}, item {number}: {error}")
                continue
            if problem.key in seen:
                setup.duplicates += 1
                if problem.index is not None:
                    errors.append(f"{problem.where}: index {problem.index} is there already")
            seen.add(problem.key)
            setup.problems.append(problem)
    if any(problem.index is not None for problem in setup.problems):
        errors += [f"{p.where}: no index, so it is not of this run" for p in setup.problems if p.index is None]
    return setup


def read_json(path: Path, errors: list[str]) -> dict[str, Any]:
    """The content of a generation file; what cannot be read is appended to `errors` and comes back empty."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        errors.append(f"{path.name}: not readable as JSON, perhaps cut off ({error})")
        return {}
    if not isinstance(data, dict) or not isinstance(data.get("generations"), list):
        errors.append(f'{path.name}: no list "generations" in it')
        return {}
    return data


def read_problem(where: str, item: Any) -> GeneratedProblem:
    """One item of a file.

    Raises:
        TypeError, ValueError: a field is missing or of another type than it should be.
    """
    if not isinstance(item, dict):
        raise TypeError(f"an item must be an object, got {type(item).__name__}")
    samples = item.get("samples", [item])
    if not isinstance(samples, list) or not samples or not all(isinstance(sample, dict) for sample in samples):
        raise TypeError('"samples" must be a list of objects')
    index = item["index"] if isinstance(item.get("index"), int) else None
    text_in(item, "generations")  # of the first sample
    completions = [read_sample(sample) for sample in samples]
    return GeneratedProblem(where, index, text_in(item, "question"), item.get("ground_truth"), completions)


def read_sample(sample: dict[str, Any]) -> Sample:
    raw = text_in(sample, "generations")
    text = text_in({"text": TURN_ENDS.split(raw, maxsplit=1)[0]} | sample, "text")
    tokens, passes = (sample.get(name) for name in ("tokens", "forward_passes"))
    for count in (tokens, passes):
        if count is not None and not isinstance(count, int):
            raise TypeError(f"a count must be a whole number, got {count!r}")
    return Sample(raw, text, tokens, passes)


def text_in(fields: dict[str, Any], name: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str):
        raise TypeError(f'"{name}" must be text, got {type(text).__name__}')
    return text
