"""From anyone's data to token rows: load, read as conversations, tokenise with an exact boundary, report bad rows."""

from __future__ import annotations

import logging
import math
import os
import runpy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, List, Value, load_dataset, load_from_disk
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from d1.tasks import ask
from d1.tasks.data import read_csv

logger = logging.getLogger(__name__)

Message = dict[str, str]
Row = dict[str, Any]

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
S1K = {"question", "thinking_trajectories", "attempt"}
ROWS_PER_PROCESS = 500  # fewer are not worth another process
LISTED = 5  # bad rows named in full
FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "answer": List(Value("bool")),
        "length": Value("int32"),
        "start": Value("int32"),
        "status": Value("string"),
        "problem": Value("string"),
    }
)


def load_rows(train_data: str) -> Dataset:
    """The rows of a local .json, .jsonl, .parquet or .csv file, of a folder saved by `datasets`, or of a hub data set.

    Cells of a csv file are text.

    Raises:
        FileNotFoundError: neither exists here, nor does the hub answer; says how to give a local file.
        ValueError: the file cannot be read, or has no rows.
    """
    path = Path(train_data)
    if path.suffix in READERS and not path.exists():
        raise FileNotFoundError(f"--train_data {train_data}: no file {path.absolute()}")
    if path.is_file() and path.suffix not in READERS:
        raise ValueError(f"--train_data {train_data}: not a file of the kinds {', '.join(READERS)}")
    try:
        if path.is_dir():
            data = load_from_disk(str(path))
            rows = data["train"] if isinstance(data, DatasetDict) else data
        elif path.suffix == ".csv":
            rows = read_csv(train_data)
        elif path.is_file():
            rows = load_dataset(READERS[path.suffix], data_files=str(path), split="train")
        else:
            rows = load_dataset(train_data, split="train")
    except Exception as error:  # each reader and the hub client fail in their own ways
        reason = error.__cause__ or error
        if path.exists():
            raise ValueError(f"--train_data {train_data}: cannot be read: {type(reason).__name__}: {reason}") from error
        raise FileNotFoundError(
            f"--train_data {train_data}: neither a local file nor a data set that the hub gives "
            f"({type(error).__name__}: {error}). Download it elsewhere and pass a local file with the same columns, "
            f"--train_data rows.jsonl (or {', '.join(READERS)})"
        ) from error
    if not len(rows):
        raise ValueError(f"--train_data {train_data}: no rows")
    return rows


def choose_columns(data: Dataset, prompt: str, completion: str) -> Dataset:
    """The two columns, named `prompt` and `completion`."""
    missing = [name for name in (prompt, completion) if name not in data.column_names]
    if missing:
        raise ValueError(f"no column {', '.join(missing)} in the data, which has {', '.join(data.column_names)}")
    names = {prompt: "prompt", completion: "completion"}
    return data.select_columns(list(names)).rename_columns({old: new for old, new in names.items() if old != new})


def load_function(spec: str) -> Callable[[Row], Any]:
    """The function of `path/to/file.py:name`."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ValueError(f"--data_function {spec}: expected FILE.py:FUNCTION with a file that exists")
    function = runpy.run_path(file).get(name)
    if not callable(function):
        raise ValueError(f"--data_function {spec}: {file} defines no function {name!r}")
    return function


def to_messages(row: Row, function: Callable[[Row], Any] | None, template: tuple[str, str] | None) -> list[Message]:
    """A row as chat messages that end with an assistant's turn.

    The first that applies: the user's function, the user's template, s1K's columns, `messages`, `prompt`/`completion`.

    Raises:
        ValueError: the row is not usable; says why.
    """
    if function is not None:
        made = function(row)
        row = made if isinstance(made, dict) else {"messages": made}
    elif template is not None:
        cells = {name: value for name, value in row.items() if value is not None}
        row = dict(zip(("prompt", "completion"), (part.format_map(cells) for part in template), strict=True))
    elif row.keys() >= S1K:
        row = from_s1k(row)
    if "messages" in row:
        messages = row["messages"]
    else:
        messages = as_messages(row["prompt"], "user", "prompt")
        messages = messages + as_messages(row["completion"], "assistant", "completion")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is not a list of {role, content}")
    for message in messages:
        role = message.get("role")
        require_text(role, "a message's role")
        require_text(message.get("content"), f"the {role} message", empty_ok=role != "assistant")
    while messages and messages[-1].get("role") != "assistant":
        messages = messages[:-1]
    if len(messages) < 2:
        raise ValueError("no assistant turn that answers something")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def from_s1k(row: Row) -> Row:
    """s1K's columns as prompt and completion, in the form that every task's prompt asks for."""
    question, trajectories, attempt = row["question"], row["thinking_trajectories"], row["attempt"]
    require_text(question, "question")
    require_text(attempt, "attempt")
    if not isinstance(trajectories, list) or not trajectories:
        raise ValueError("thinking_trajectories is not a list with a trajectory in it")
    require_text(trajectories[0], "thinking_trajectories[0]")
    completion = f"<reasoning>{trajectories[0]}</reasoning>\n<answer>{attempt}</answer>"
    return {"prompt": ask(question, "Solve the problem.", "the answer"), "completion": completion}


def require_text(value: Any, name: str, empty_ok: bool = False) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text (--template makes text of numbers)")
    if not empty_ok and not value.strip():
        raise ValueError(f"{name} is empty")


def as_messages(value: Any, role: str, name: str) -> list[Message]:
    if isinstance(value, list):
        return value
    require_text(value, name)
    return [{"role": role, "content": value}]


def conversation_segments(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, train_on: str
) -> list[tuple[str, bool]]:
    """The text of a conversation, cut where answers begin and end: (text, is an answer), which add up to the whole.

    An answer begins where the template's generation prompt ends: where a model that is asked for it starts to write.
    """

    def render(turns: list[Message], ask_for_answer: bool) -> str:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask_for_answer))

    last = len(messages) - 1
    first = 1 if train_on == "all" else last  # a greeting before any question answers nothing
    turns = [turn for turn in range(first, last + 1) if messages[turn]["role"] == "assistant"]
    segments: list[tuple[str, bool]] = []
    text = ""
    for turn in turns:
        prompt, content = render(messages[:turn], True), messages[turn]["content"]
        if not prompt.startswith(text):
            raise ValueError("the chat template rewrites earlier turns when later ones follow: use --train_on last")
        whole = render(messages[: turn + 1], False)
        if whole.startswith(prompt):
            answer = whole[len(prompt) :]
            if whole == render(messages[: turn + 1], True):
                answer = first_turn(answer, content, tokenizer)
        elif turn == last:  # a template whose generation prompt is not in the finished conversation
            answer = content
        else:
            raise ValueError("the chat template's generation prompt is not in the conversation: use --train_on last")
        if turn == last:  # what a template puts between turns (a newline) has no place before the EOS
            end = answer.find(content) + len(content) if content in answer else 0
            answer = answer[:end] + answer[end:].rstrip()
        segments += [(prompt[len(text) :], False), (answer, True)]
        text = prompt + answer
    return segments


def first_turn(answer: str, content: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`answer` up to the token that ends its turn.

    Templates that do not ask whether an answer is wanted, such as LLaDA's, may go on to the next answer's header.
    """
    after = answer.find(content) + len(content) if content in answer else 0
    marks = {getattr(tokenizer, "eot_token", None), tokenizer.eos_token} - {None}
    ends = [answer.index(mark, after) + len(mark) for mark in marks if mark in answer[after:]]
    return answer[: min(ends, default=len(answer))]


def tokenize_segments(
    segments: list[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Ids of the whole text and, for each, whether it belongs to an answer.

    The ids before an answer are those of the text before it alone, as when a model is asked for the answer. Where the
    ids of the whole text begin with them, the answer has the rest; where a token would straddle the boundary, the
    answer is tokenised by itself.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    text = ""
    ids: list[int] = []
    answer: list[bool] = []
    for piece, is_answer in segments:
        text += piece
        whole = encode(text)
        new = whole[len(ids) :] if whole[: len(ids)] == ids else encode(piece)
        ids, answer = ids + new, answer + [is_answer] * len(new)
    return ids, answer


def tokenize_row(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    overlong: str,
    train_on: str,
    function: Callable[[Row], Any] | None,
    template: tuple[str, str] | None,
) -> Row:
    """One row of `FEATURES`: `status` is "ok", "truncated", "dropped" or "bad", and `problem` says what is wrong."""

    def unusable(status: str, problem: str) -> Row:
        return {"input_ids": [], "answer": [], "length": 0, "start": 0, "status": status, "problem": problem}

    try:
        messages = to_messages(row, function, template)
        ids, answer = tokenize_segments(conversation_segments(messages, tokenizer, train_on), tokenizer)
    except ValueError as error:
        return unusable("bad", str(error))
    except KeyError as error:
        return unusable("bad", f"there is no {error}")
    except Exception as error:  # templates and users' functions may raise anything; the row is what is wrong
        return unusable("bad", f"{type(error).__name__}: {error}")
    if tokenizer.mask_token_id in ids:
        return unusable("bad", f"the mask token {tokenizer.mask_token} is in the text")
    if not any(answer):
        return unusable("bad", "the answer has no tokens")
    if ids[-1] != tokenizer.eos_token_id:
        ids, answer = [*ids, tokenizer.eos_token_id], [*answer, True]
    start = len(answer) - answer[::-1].index(False) if False in answer else 0
    status = "ok"
    if len(ids) > max_length:
        if overlong == "refuse":
            return unusable("bad", f"{len(ids)} tokens are more than --max_length {max_length}")
        if overlong == "drop":
            return unusable("dropped", "")
        if not any(answer[:max_length]):
            prompt = answer.index(True)
            return unusable("bad", f"no answer tokens left: the prompt has {prompt}, --max_length is {max_length}")
        ids, answer, status = ids[:max_length], answer[:max_length], "truncated"
    made = {"input_ids": ids, "answer": answer, "length": len(ids), "start": start}
    return made | {"status": status, "problem": ""}


def preprocess_dataset(
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    test_split: float = 0.01,
    *,
    overlong: str = "truncate",
    bad_rows: str = "error",
    train_on: str = "last",
    function: Callable[[Row], Any] | None = None,
    template: tuple[str, str] | None = None,
    num_proc: int | None = None,
    seed: int = 42,
) -> tuple[Dataset, Dataset]:
    """Conversations as token rows, shuffled and split into (train, evaluation).

    Args:
        data: s1K's columns (`question`, `thinking_trajectories`, `attempt`), or `messages`, or `prompt` and
            `completion` (text or messages); anything with a `function` or a `template`.
        max_length: tokens of a row at most.
        test_split: share of the rows held out, rounded up.
        overlong: what happens to longer rows: "truncate" (the answer loses its end and gets no EOS), "drop", "refuse".
        bad_rows: what happens to rows that cannot be trained on: "error", or "skip" them and say how many and which.
        train_on: "last", the last assistant's turn, or "all" of them.
        function: row -> messages, or a row that has `messages` or `prompt` and `completion`.
        template: two format strings with {columns}, the prompt's and the completion's.
        num_proc: processes that tokenise; the result is cached by `datasets`.

    Returns:
        Two data sets with the columns `input_ids`, `answer` (which of them to train on), `length`, `start` (of the
        last answer) and `status` ("ok" or "truncated").

    Raises:
        ValueError: columns that are not understood, bad rows, or nothing left to train on.
    """
    columns = set(data.column_names)
    if (
        function is None
        and template is None
        and not any(needed <= columns for needed in (S1K, {"messages"}, {"prompt", "completion"}))
    ):
        raise ValueError(
            f"the data has the columns {', '.join(sorted(columns))}; understood are question + thinking_trajectories + "
            "attempt, messages, or prompt + completion. Name yours with --prompt_column and --completion_column, build "
            "both with --template, or convert each row with --data_function FILE.py:FUNCTION"
        )
    if not 0 <= test_split < 1:
        raise ValueError(f"--test_split must be in [0, 1), got {test_split}")
    options = {
        "tokenizer": tokenizer,
        "max_length": max_length,
        "overlong": overlong,
        "train_on": train_on,
        "function": function,
        "template": template,
    }
    processes = min(num_proc or os.cpu_count() or 1, len(data) // ROWS_PER_PROCESS)
    rows = data.map(
        tokenize_row,
        fn_kwargs=options,
        features=FEATURES,
        remove_columns=data.column_names,
        num_proc=processes if processes > 1 else None,
        # `datasets` names an imported function by its name alone; this file's text makes a new version a new result.
        new_fingerprint=Hasher.hash([data._fingerprint, options, Path(__file__).read_text()]),
        desc="Tokenising",
    )
    usable = usable_rows(rows["status"], rows["problem"], bad_rows)
    rows = rows.remove_columns("problem").select(usable).shuffle(seed=seed)
    held_out = math.ceil(len(rows) * test_split)
    if held_out == len(rows):
        raise ValueError(f"nothing to train on: --test_split {test_split} holds out all of {len(rows)} rows")
    return rows.select(range(held_out, len(rows))), rows.select(range(held_out))


def usable_rows(status: Sequence[str], problems: Sequence[str], bad_rows: str) -> list[int]:
    """Indices of the rows to train on; the others are counted and reported, or an error.

    Raises:
        ValueError: bad rows that may not be skipped, or no row is left.
    """
    counts = Counter(status)
    bad = [f"  row {i}: {problem}" for i, problem in enumerate(problems) if problem]
    listed = "\n".join(bad[:LISTED] + ["  ..."] * (len(bad) > LISTED))
    if bad and bad_rows == "error":
        raise ValueError(
            f"{len(bad)} of {len(status)} rows cannot be trained on (rows count from 0):\n{listed}\n"
            "Mend them, or leave them out with --bad_rows skip"
        )
    if bad:
        logger.warning("skipped %d of %d rows that cannot be trained on:\n%s", len(bad), len(status), listed)
    for kind in ("truncated", "dropped"):
        if counts[kind]:
            logger.warning("%s %d of %d rows longer than --max_length", kind, counts[kind], len(status))
    usable = [i for i, kind in enumerate(status) if kind in ("ok", "truncated")]
    if not usable:
        raise ValueError(f"nothing to train on: of {len(status)} rows, {dict(counts)}\n{listed}".rstrip())
    return usable
