"""The data of SFT: users' rows, conversations, token rows, and batches with their noise."""

from __future__ import annotations

import logging
import math
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DefaultDataCollator, PreTrainedTokenizerBase

from d1 import rows as json_rows
from d1.lazy import fresh_imports
from d1.masking import draw_noise, keyed_generator, noise_level, token_ids
from d1.models.messages import (
    Message,
    Options,
    as_messages,
    conversation_of,
    read_messages,
    read_weight,
    require_text,
    whole_turns,
)
from d1.models.tokenizer import CUT_OFF, encode_turns
from d1.runs.cli import BAD_ROWS
from d1.runs.data import IGNORED, BatchRow, describe_row_error, require_dataset, tokenize_rows, usable_rows
from d1.sft import columns
from d1.sft.columns import (
    ALPACA,
    SHAREGPT,
    TEMPLATE,
    as_conversation,
    check_labels,
    check_template,
    suggest_flags,
)
from d1.sft.config import OVERLONG, CausalLoss
from d1.tasks import ask

if TYPE_CHECKING:  # its losses read batches with this file's functions
    from d1.sft.editing import EditNoise

logger = logging.getLogger(__name__)

# --- Rows: text to tokens ---------------------------------------------------------------------------------------------

Row = dict[str, Any]

S1K = {"question", "thinking_trajectories", "attempt"}
SHAPES = (S1K, {"messages"}, {"prompt", "completion"}, SHAREGPT, ALPACA)  # columns that make a conversation
SYSTEM_PROMPT = ask("", "Solve the problem.", "the answer")[0]["content"].rstrip()  # before a question of s1K
SEVERAL_TURNS = (
    "completion has several turns of the assistant, and the last alone is trained on (--assistant_only_loss trains on "
    "all turns of the assistant, those of prompt included)"
)
FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "answer": List(Value("bool")),
        "length": Value("int32"),
        "start": Value("int32"),
        "status": Value("string"),
        "problem": Value("string"),
        "notes": List(Value("string")),
    }
)


def convert_columns(
    row: Row, function: Callable[[Row], Any] | None = None, template: tuple[str, str] | None = None
) -> Row:
    """Convert a row to one with `messages`, or with `prompt` and `completion`; ValueError says why it cannot be used.

    The first that applies counts: the user's function, the user's template, s1K's columns (in the format that every
    task's prompt asks for), `messages`, `prompt` and `completion`, ShareGPT's `conversations`, and Alpaca's columns.
    The columns of `conversation_of` belong to all but the template and s1K's. Columns of another shape may be null.
    """
    if function is None and template is None:
        # In a file with rows of several shapes, each row has null cells in the columns of the others.
        filled = {name: cell for name, cell in row.items() if cell is not None}
        if any(shape <= filled.keys() for shape in SHAPES):
            row = filled

    if function is not None:
        result = function(row)
        row = result if isinstance(result, dict) else {"messages": result}
    elif template is not None:
        prompt, completion = template
        row = {"prompt": TEMPLATE.vformat(prompt, (), row), "completion": TEMPLATE.vformat(completion, (), row)}
    elif row.keys() >= S1K:
        if not isinstance(row["thinking_trajectories"], list) or not row["thinking_trajectories"]:
            raise ValueError("thinking_trajectories is not a list with at least one trajectory")
        question = row["question"]
        thoughts = row["thinking_trajectories"][0]
        attempt = row["attempt"]
        require_text(question, "question")
        require_text(thoughts, "thinking_trajectories[0]")
        require_text(attempt, "attempt")
        completion = f"<reasoning>{thoughts}</reasoning>\n<answer>{attempt}</answer>"
        row = {"prompt": f"{SYSTEM_PROMPT}\n\n{question}", "completion": completion}
    if "messages" not in row and not row.keys() >= {"prompt", "completion"}:
        row = as_conversation(row)
    return row


def join_turns(row: Row) -> tuple[list[Message], Options]:
    """The conversation of a row with `messages`, or with `prompt` and `completion`."""
    if "messages" in row:
        messages = row["messages"]
    else:
        prompt_messages = cell_messages(row, "prompt", "user")
        completion_messages = cell_messages(row, "completion", "assistant")
        if all(message["role"] != "assistant" for message in read_messages(completion_messages)):
            raise ValueError("completion has no message of the assistant")
        messages = prompt_messages + completion_messages
    return conversation_of(row, messages)


def cell_messages(row: Row, name: str, role: str) -> list[Message]:
    """The messages of a row's column `name`; a text is one message of `role`. ValueError for a list of other things,
    such as all texts of a file that is one object of columns."""
    messages = as_messages(row, name, role)
    if not all(isinstance(message, dict) for message in messages):
        raise ValueError(
            f"{name} is a list, but not of {{role, content}}: write one object per row, whose {name} is a text or "
            "messages"
        )
    return messages


def has_several_answers(row: Row) -> bool:
    """Whether several turns of the assistant in the row's `completion` could be trained on."""
    if "messages" in row or not isinstance(row["completion"], list):
        return False
    turns = read_messages(row["completion"])
    answers = [turn for turn in turns if turn["role"] == "assistant" and read_weight(turn) is not False]
    return len(answers) > 1


def tokenize_row(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    overlong: str,
    function: Callable[[Row], Any] | None,
    template: tuple[str, str] | None,
    assistant_only_loss: bool = False,
) -> Row:
    """One row of `FEATURES`: `status` is "ok", "truncated", "dropped" or "bad", `problem` says what is wrong, and
    `notes` what the user should know."""
    empty = {"input_ids": [], "answer": [], "length": 0, "start": 0, "problem": "", "notes": []}
    try:
        conversation = convert_columns(row, function, template)
        messages, options = join_turns(conversation)
        turns = whole_turns(messages)
        text = encode_turns(turns, tokenizer, "the answer", options, all_turns=assistant_only_loss)
        notes = list(text.notes)
        if len(turns) < len(messages):
            notes.append(CUT_OFF)
        if not assistant_only_loss and has_several_answers(conversation):
            notes.append(SEVERAL_TURNS)

        ids, answer, status = text.ids, text.trained, "ok"
        if len(ids) > max_length:
            if overlong == "refuse":
                raise ValueError(f"{len(ids)} tokens are more than --max_length {max_length}")
            if overlong == "drop":
                return empty | {"status": "dropped"}
            first = answer.index(True)
            if first >= max_length:
                raise ValueError(f"no answer tokens left: the prompt has {first}, --max_length is {max_length}")
            ids, answer, status = ids[:max_length], answer[:max_length], "truncated"
    except Exception as error:  # templates and users' functions may raise anything
        return empty | {"status": "bad", "problem": describe_row_error(error)}
    return {
        "input_ids": ids,
        "answer": answer,
        "length": len(ids),
        "start": text.start,
        "status": status,
        "problem": "",
        "notes": notes,
    }


def load_function(spec: str) -> Callable[[Row], Any]:
    """The function of `path/to/file.py:name`."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ValueError(f"--data_function {spec}: expected FILE.py:FUNCTION with a file that exists")
    with fresh_imports(Path(file)):
        function = runpy.run_path(file).get(name)
    if not callable(function):
        raise ValueError(f"--data_function {spec}: {file} defines no function {name!r}")
    return function


def check_choices(data: Any, overlong: str, bad_rows: str) -> None:
    """Raise ValueError for data of another class, or without rows, and for choices that there are not."""
    require_dataset("the data", data)
    if not len(data):
        raise ValueError("the data has no rows")
    for name, choice, choices in (("overlong", overlong, OVERLONG), ("bad_rows", bad_rows, BAD_ROWS)):
        if choice not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {choice!r}")


def preprocess_dataset(
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    test_split: float = 0.01,
    *,
    overlong: str = "truncate",
    bad_rows: str = "error",
    function: Callable[[Row], Any] | None = None,
    template: tuple[str, str] | None = None,
    assistant_only_loss: bool = False,
    num_proc: int | None = None,
    seed: int = 42,
) -> tuple[Dataset, Dataset]:
    """Convert conversations to token rows, shuffled and split into (train, evaluation).

    Args:
        data: rows with s1K's columns (`question`, `thinking_trajectories`, `attempt`), or `messages`, or `prompt` and
            `completion` (text or messages), or `conversations`, or `instruction` and `output`; with a `function` or a
            `template`, any columns.
        test_split: share of the rows held out, rounded up.
        overlong: "truncate" (the answer loses its end and gets no EOS), "drop" or "refuse" rows over `max_length`.
        bad_rows: "error", or "skip" rows that cannot be trained on, and say how many and which.
        function: row -> messages, or a row that has `messages` or `prompt` and `completion`.
        template: two format strings with {columns}, the prompt's and the completion's.
        assistant_only_loss: train on all turns of the assistant, but those with weight 0; else on the last turn.
        num_proc: processes that tokenise. The result is cached by `datasets`, except that of a `function`, which may
            read files and modules that change.

    Returns:
        Two data sets with the columns `input_ids`, `answer` (bool, the tokens to train on), `length`, `start` (of the
        last turn that is trained on) and `status` ("ok" or "truncated").

    Raises:
        ValueError: the columns are not understood, or are those of preferences; `template` names others; rows are bad;
            or nothing is left to train on.
    """
    check_choices(data, overlong, bad_rows)
    names = set(data.column_names)
    understood = any(shape <= names for shape in SHAPES)
    if function is None and template is None and not understood:
        raise ValueError(
            f"the data has the columns {', '.join(sorted(names))}; supported are question + thinking_trajectories + "
            "attempt, messages, prompt + completion, conversations, or instruction + output (+ input): "
            f"{suggest_flags(data.column_names)}"
        )
    if template is not None:
        check_template(template, data.column_names)
    elif function is None:
        check_labels(data)
    options = {
        "tokenizer": tokenizer,
        "max_length": max_length,
        "overlong": overlong,
        "function": function,
        "template": template,
        "assistant_only_loss": assistant_only_loss,
    }
    rows = tokenize_rows(
        data,
        tokenize_row,
        source=sys.modules[__name__],
        options=options,
        features=FEATURES,
        num_proc=num_proc,
        also=[columns, json_rows],
        constants=[SYSTEM_PROMPT],
        cached=function is None,
    )
    rows = rows.select(usable_rows(rows["status"], rows["problem"], bad_rows, data))

    counts: Counter[str] = Counter()
    for notes in rows["notes"][:]:  # cell by cell takes much longer
        counts.update(notes)
    for note, count in counts.items():
        logger.warning("%d of %d rows: %s", count, len(rows), note)

    rows = rows.remove_columns(["problem", "notes"]).shuffle(seed=seed)
    held_out = math.ceil(len(rows) * test_split)
    if not 0 <= held_out < len(rows):
        raise ValueError(f"nothing to train on: --test_split {test_split} holds out {held_out} of {len(rows)} rows")
    return rows.select(range(held_out, len(rows))), rows.select(range(held_out))


# --- Batches ----------------------------------------------------------------------------------------------------------
#
# The noise of a row is a function of (seed, epoch, row) alone. It does not depend on the order of rows, on how a batch
# is split over micro-batches and processes, or on a resume.

# The second part of a random generator's key: the purpose of its numbers. Other values would change every draw.
TRAIN_NOISE, EVAL_NOISE, EVAL_TIMES = 0, 1, 4  # 2 is the order's in `d1.runs.data`; other stages have 5 to 7


class dLLMSFTDataset(torch.utils.data.Dataset):
    """Token rows for completion-only training.

    A row has `input_ids`, `answer` (bool per token: trained on), `key` (of its random generator) and `t` (a fixed
    diffusion time, or None). The index is a `BatchRow`, or an int, which means that row in epoch 0. With `eval`, every
    row appears `eval_draws` times, sorted by length; the times of all draws lie on an even grid over [0, 1].

    Args:
        rows: made by `preprocess_dataset`.
        eos_padding: how far complete answers are filled with EOS, which is trained on: to at least N answer tokens; to
            the longest row of the global batch ("batch"; evaluation rows keep only their own EOS, because their loss
            must not depend on a batch); or to `max_length`, as in d1 ("max").
    """

    def __init__(
        self,
        rows: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        eval: bool = False,
        *,
        eos_padding: int | str = "batch",
        seed: int = 42,
        eval_draws: int = 4,
    ) -> None:
        self.rows = rows.with_format(None)  # cells are lists then: + joins those, and would add arrays
        self.eos_token_id = tokenizer.eos_token_id
        self.max_length = max_length
        self.eval = eval
        self.eos_padding = eos_padding
        self.seed = seed
        self.eval_draws = eval_draws
        self.lengths = []
        # Whole columns, because reading them cell by cell takes much longer.
        lengths = self.rows["length"][:]
        starts = self.rows["start"][:]
        statuses = self.rows["status"][:]
        for length, start, status in zip(lengths, starts, statuses, strict=True):
            self.lengths.append(self.filled_length(length, start, status))
        if eval:
            self.order = sorted(range(len(rows)), key=self.lengths.__getitem__)
            self.ranks = torch.randperm(len(rows), generator=keyed_generator(seed, EVAL_TIMES)).tolist()

    def filled_length(self, length: int, start: int, status: str) -> int:
        """Tokens of a row after filling with EOS, before the rows of its batch are known."""
        if status == "truncated" or self.eos_padding == "batch":
            return length
        target = self.max_length if self.eos_padding == "max" else start + int(self.eos_padding)
        return max(length, min(target, self.max_length))

    def __len__(self) -> int:
        return len(self.rows) * (self.eval_draws if self.eval else 1)

    def __getitem__(self, index: BatchRow | int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[BatchRow | int]) -> list[dict[str, Any]]:
        """The rows of a batch, for DataLoader: reading all at once takes a third of the time."""
        entries = []
        for index in indices:
            entries.append(index if isinstance(index, BatchRow) else self.batch_row(index))
        rows = self.rows.__getitems__([max(entry.row, 0) for entry in entries])
        return [self.filled_row(entry, row) for entry, row in zip(entries, rows, strict=True)]

    def batch_row(self, index: int) -> BatchRow:
        """The row in epoch 0; with `eval`, row and time of draw `index`, and `epoch` holds the draw's number."""
        if not self.eval:
            return BatchRow(range(len(self))[index])
        number, draw = divmod(index, self.eval_draws)
        row = self.order[number]
        t = (draw + (self.ranks[row] + 0.5) / len(self.rows)) / self.eval_draws
        return BatchRow(row, epoch=draw, t=t)

    def filled_row(self, entry: BatchRow, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the data set, filled with EOS; an empty one has one token that is not trained on."""
        if self.eval:
            key = (self.seed, EVAL_NOISE, entry.row, entry.epoch)
        else:
            key = (self.seed, TRAIN_NOISE, entry.epoch, max(entry.row, 0))
        if entry.row < 0:
            return {"input_ids": [self.eos_token_id], "answer": [False], "key": key, "t": entry.t}

        ids, answer = row["input_ids"], row["answer"]
        if row["status"] == "ok":
            missing = max(self.lengths[entry.row], entry.length) - len(ids)
            ids = ids + [self.eos_token_id] * missing
            answer = answer + [True] * missing
        return {"input_ids": ids, "answer": answer, "key": key, "t": entry.t}


class dLLMDataCollator(DefaultDataCollator):
    """Pads rows to the longest of the batch, draws each row's t and mask, and hides the masked tokens.

    Returns a batch of (rows, length) tensors `input_ids` (noised), `labels` (the clean answer, -100 elsewhere),
    `attention_mask` (0 on padding) and `masked` (bool: hidden tokens, which are trained on), and `t` (rows,), which is
    (rows, length) with `block_size`. With `edits`, training rows also have `edited`, bool, and `draws`, fp32
    (`d1/sft/editing.py`); with `causal`, `starts` lists a token per row with which a block begins. If packed, the
    tensors per token are (1, all tokens), and `lengths` lists the rows' lengths.

    Args:
        mask_token_id: the tokenizer's if None.
        block_size: tokens per block of a block-causal model (`d1.models.kinds.block_size`): in training each block has
            its own t, in evaluation the row has one.
        complementary: each training row comes again in the second half of the batch, with the opposite mask and 1 - t,
            as LLaDA2 (arXiv 2512.15745) and Fast-dLLM v2 (2509.26328) train. Each half alone has the distribution of a
            plain batch, so the loss over both stays unbiased.
        packed: concatenate the rows of the batch, without padding. Their noise stays the same.
        edits: replaces visible tokens of training rows; evaluation rows have only masks.
        causal: the loss of a model with a causal context; None: of other models.
        max_length: not read; d1's scripts give it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        mask_token_id: int | None = None,
        *,
        block_size: int | None = None,
        complementary: bool = False,
        packed: bool = False,
        edits: EditNoise | None = None,
        causal: CausalLoss | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.complementary = complementary
        self.packed = packed
        self.causal = causal
        self.row_noise = causal is not None and causal.row_noise
        self.edits = edits
        self.vocabulary = 0 if edits is None else len(tokenizer)
        self.mask_token_id = tokenizer.mask_token_id if mask_token_id is None else mask_token_id
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def schedule(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """LLaDA's noise schedule: at times t in [0, 1], the probability t' that an answer token is hidden, and the
        weight 1 / t' of a hidden token's cross-entropy in the loss."""
        level = noise_level(t)
        return level, 1 / level

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        training = features[0]["t"] is None  # evaluation fixes each row's t
        mirrored = [False] * len(features)
        if self.complementary and training:  # each row once more, with the opposite mask
            mirrored += [True] * len(features)
            features = [*features, *features]

        lengths = [len(row["input_ids"]) for row in features]
        texts = [token_ids(row["input_ids"]) for row in features]
        answers = [torch.as_tensor(row["answer"]) for row in features]
        clean = pad_sequence(texts, True, self.pad_token_id)
        answer = pad_sequence(answers, True, False)
        visible = pad_sequence([torch.ones_like(text) for text in texts], True)

        # Blocks begin with the answer in a causal context, and with the row elsewhere.
        starts = [0] * len(features)
        if self.causal is not None and not self.row_noise:
            starts = answer.int().argmax(1).tolist()

        def hiding_probability(t: Tensor) -> Tensor:
            return self.schedule(t)[0]

        # Each row's noise, from its own generator.
        edits = self.edits if training else None
        times: list[Tensor] = []
        masks: list[Tensor] = []
        edit_masks: list[Tensor] = []
        edit_draws: list[Tensor] = []
        for row, maskable, mirror, start in zip(features, answer, mirrored, starts, strict=True):
            low, high = 0.0, 1.0
            if row["t"] is not None:
                low = high = row["t"]
            generator = keyed_generator(*row["key"])
            t, mask = draw_noise(
                maskable,
                generator,
                low=low,
                high=high,
                mirror=mirror,
                block_size=None if self.row_noise else self.block_size,
                origin=start,
                level=hiding_probability,
            )
            times.append(t)
            masks.append(mask)
            if edits is not None:  # after the mask's draws, which stay the same
                edit_mask, draws = edits.draw(maskable, mask, generator)
                edit_masks.append(edit_mask)
                edit_draws.append(draws)

        hidden = torch.stack(masks)
        batch: dict[str, Any] = {
            "input_ids": clean.masked_fill(hidden, self.mask_token_id),
            "labels": clean.masked_fill(~answer, IGNORED),
            "attention_mask": visible,
            "masked": hidden & (clean != self.mask_token_id),  # a mask token in the text has nothing to predict
            "t": torch.stack(times),
        }
        if edits is not None:
            batch["edited"] = torch.stack(edit_masks)
            batch["draws"] = torch.stack(edit_draws)
            batch["input_ids"] = edits.replace(
                batch["input_ids"], batch["edited"], batch["draws"], self.vocabulary, self.mask_token_id
            )
        if self.packed:
            for name, values in batch.items():
                if values.shape == visible.shape:  # (rows, length) -> (1, all visible tokens)
                    batch[name] = values[visible.bool()][None]
            batch["lengths"] = lengths
        if self.causal is not None:
            batch["starts"] = starts
        return batch


def row_numbers(batch: dict[str, Any]) -> Tensor:
    """The number of each token's row in a batch, shaped like its `input_ids`."""
    ids, lengths = batch["input_ids"], batch.get("lengths")
    if lengths is None:
        return torch.arange(len(ids), device=ids.device).unsqueeze(1).expand(ids.shape)
    rows = torch.arange(len(lengths), device=ids.device)
    return rows.repeat_interleave(torch.tensor(lengths, device=ids.device)).unsqueeze(0)


def split_rows(batch: dict[str, Any], name: str) -> Sequence[Tensor]:
    """The values of a batch, row by row; with padding, unless the batch is packed."""
    values, lengths = batch[name], batch.get("lengths")
    if lengths is None or values.dim() == 1:
        return list(values)
    return values[0].split(lengths)  # type: ignore[no-any-return]
