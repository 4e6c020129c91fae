"""The data of SFT: users' rows, conversations, token rows, and batches with their noise."""

from __future__ import annotations

import logging
import math
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DefaultDataCollator, PreTrainedTokenizerBase

from d1.lazy import fresh_imports
from d1.masking import draw_noise, keyed_generator, noise_level, token_ids
from d1.models.messages import (
    Message,
    Options,
    as_messages,
    conversation_of,
    read_messages,
    require_text,
    whole_turns,
)
from d1.models.tokenizer import CUT_OFF, encode_turns
from d1.runs.data import IGNORED as IGNORED
from d1.runs.data import BatchRow, problem_of, tokenised, usable_rows
from d1.runs.data import GlobalBatchSampler as GlobalBatchSampler
from d1.runs.data import load_rows as load_rows
from d1.sft import columns
from d1.sft.columns import ALPACA, SHAREGPT, TEMPLATE, as_conversation, way_for
from d1.sft.config import CausalLoss
from d1.sft.editing import EditNoise
from d1.tasks import ask

logger = logging.getLogger(__name__)

# --- Rows: text to tokens ---------------------------------------------------------------------------------------------

Row = dict[str, Any]

S1K = {"question", "thinking_trajectories", "attempt"}
SHAPES = (S1K, {"messages"}, {"prompt", "completion"}, SHAREGPT, ALPACA)  # columns that make a conversation
SYSTEM_PROMPT = ask("", "Solve the problem.", "the answer")[0]["content"].rstrip()  # before a question of s1K
FEATURES = Features(
    {"input_ids": List(Value("int32")), "answer": List(Value("bool"))}
    | dict.fromkeys(("length", "start"), Value("int32"))
    | dict.fromkeys(("status", "problem"), Value("string"))
    | {"notes": List(Value("string"))}
)


def to_conversation(
    row: Row, function: Callable[[Row], Any] | None, template: tuple[str, str] | None
) -> tuple[list[Message], Options]:
    """Convert a row to chat messages and what the chat template gets besides; ValueError says why it cannot be used.

    The first that applies counts: the user's function, the user's template, s1K's columns (in the format that every
    task's prompt asks for), `messages`, `prompt` and `completion`, ShareGPT's `conversations`, and Alpaca's columns.
    The columns of `conversation_of` belong to all but the template and s1K's. Columns of another shape may be null.
    """
    if function is None and template is None:
        row = of_one_shape(row)
    if function is not None:
        converted = function(row)
        row = converted if isinstance(converted, dict) else {"messages": converted}
    elif template is not None:
        prompt, completion = (TEMPLATE.vformat(part, (), row) for part in template)
        row = {"prompt": prompt, "completion": completion}
    elif row.keys() >= S1K:
        if not isinstance(row["thinking_trajectories"], list) or not row["thinking_trajectories"]:
            raise ValueError("thinking_trajectories is not a list with at least one trajectory")
        question, thoughts, attempt = row["question"], row["thinking_trajectories"][0], row["attempt"]
        for part, name in ((question, "question"), (thoughts, "thinking_trajectories[0]"), (attempt, "attempt")):
            require_text(part, name)
        completion = f"<reasoning>{thoughts}</reasoning>\n<answer>{attempt}</answer>"
        row = {"prompt": f"{SYSTEM_PROMPT}\n\n{question}", "completion": completion}
    if "messages" not in row and not row.keys() >= {"prompt", "completion"}:
        row = as_conversation(row)
    if "messages" in row:
        messages = row["messages"]
    else:
        asked, answer = as_messages(row, "prompt", "user"), as_messages(row, "completion", "assistant")
        if all(message["role"] != "assistant" for message in read_messages(answer)):
            raise ValueError("completion has no message of the assistant")
        messages = asked + answer
    return conversation_of(row, messages)


def of_one_shape(row: Row) -> Row:
    """A row of a file with several shapes without its null columns, which other rows have; any other row unchanged."""
    filled = {name: cell for name, cell in row.items() if cell is not None}
    return filled if any(shape <= filled.keys() for shape in SHAPES) else row


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
    none = {"input_ids": [], "answer": [], "length": 0, "start": 0, "problem": "", "notes": []}
    try:
        messages, given = to_conversation(row, function, template)
        turns = whole_turns(messages)
        text = encode_turns(turns, tokenizer, "the answer", given, all_turns=assistant_only_loss)
        ids, answer, start = text.ids, text.trained, text.start
        notes = [*text.notes, *([CUT_OFF] if len(turns) < len(messages) else ())]
        status = "ok"
        if len(ids) > max_length:
            if overlong == "refuse":
                raise ValueError(f"{len(ids)} tokens are more than --max_length {max_length}")
            if overlong == "drop":
                return none | {"status": "dropped"}
            first = answer.index(True)
            if first >= max_length:
                raise ValueError(f"no answer tokens left: the prompt has {first}, --max_length is {max_length}")
            ids, answer, status = ids[:max_length], answer[:max_length], "truncated"
    except Exception as error:  # templates and users' functions may raise anything
        return none | {"status": "bad", "problem": problem_of(error)}
    known = {"input_ids": ids, "answer": answer, "length": len(ids), "start": start, "status": status, "notes": notes}
    return none | known


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
        ValueError: the columns are not understood, rows are bad, or nothing is left to train on.
    """
    names = set(data.column_names)
    understood = any(shape <= names for shape in SHAPES)
    if function is None and template is None and not understood:
        raise ValueError(
            f"the data has the columns {', '.join(sorted(names))}; supported are question + thinking_trajectories + "
            "attempt, messages, prompt + completion, conversations, or instruction + output (+ input): "
            f"{way_for(data.column_names)}"
        )
    options = {"tokenizer": tokenizer, "max_length": max_length, "overlong": overlong}
    options |= {"function": function, "template": template, "assistant_only_loss": assistant_only_loss}
    how: dict[str, Any] = {"also": [columns], "cached": function is None}
    rows = tokenised(data, tokenize_row, sys.modules[__name__], options, FEATURES, num_proc, **how)
    usable = usable_rows(rows["status"], rows["problem"], bad_rows, data)
    rows = rows.select(usable)
    for note, count in Counter(note for notes in rows["notes"] for note in notes).items():
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
        # Without a format, cells are lists: + joins those, and would add arrays.
        self.rows, self.eos_token_id, self.max_length = rows.with_format(None), tokenizer.eos_token_id, max_length
        self.eval, self.eos_padding, self.seed, self.eval_draws = eval, eos_padding, seed, eval_draws
        columns = (self.rows[name] for name in ("length", "start", "status"))
        self.lengths = [self.filled_length(*row) for row in zip(*columns, strict=True)]
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
        chosen = [index if isinstance(index, BatchRow) else self.batch_row(index) for index in indices]
        return [*map(self.filled_row, chosen, self.rows.__getitems__([max(one.row, 0) for one in chosen]))]

    def batch_row(self, index: int) -> BatchRow:
        """The row in epoch 0; with `eval`, row and time of draw `index`, and `epoch` holds the draw's number."""
        if not self.eval:
            return BatchRow(range(len(self))[index])
        number, draw = divmod(index, self.eval_draws)
        row = self.order[number]
        return BatchRow(row, draw, (draw + (self.ranks[row] + 0.5) / len(self.rows)) / self.eval_draws)

    def filled_row(self, chosen: BatchRow, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the data set, filled with EOS; an empty one has one token that is not trained on."""
        key = (EVAL_NOISE, chosen.row, chosen.epoch) if self.eval else (TRAIN_NOISE, chosen.epoch, max(chosen.row, 0))
        noise = {"key": (self.seed, *key), "t": chosen.t}
        if chosen.row < 0:
            return {"input_ids": [self.eos_token_id], "answer": [False]} | noise
        filled = max(self.lengths[chosen.row], chosen.length) if row["status"] == "ok" else 0
        missing = max(0, filled - len(row["input_ids"]))
        ids, answer = row["input_ids"] + [self.eos_token_id] * missing, row["answer"] + [True] * missing
        return {"input_ids": ids, "answer": answer} | noise


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
        self.causal, self.per_row = causal, causal is not None and causal.row_noise
        self.edits, self.vocabulary = edits, 0 if edits is None else len(tokenizer)
        self.block_size, self.complementary, self.packed = block_size, complementary, packed
        self.mask_token_id = tokenizer.mask_token_id if mask_token_id is None else mask_token_id
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def schedule(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """LLaDA's noise schedule: at times t in [0, 1], the probability t' that an answer token is hidden, and the
        weight 1 / t' of a hidden token's cross-entropy in the loss."""
        level = noise_level(t)
        return level, 1 / level

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        training = features[0]["t"] is None  # evaluation fixes each row's t
        sides = (False, True) if self.complementary and training else (False,)
        mirrored = [side for side in sides for _ in features]
        features = [row for _ in sides for row in features]
        lengths = [len(row["input_ids"]) for row in features]
        texts = [token_ids(row["input_ids"]) for row in features]
        answers = [torch.as_tensor(row["answer"]) for row in features]
        clean, answer = pad_sequence(texts, True, self.pad_token_id), pad_sequence(answers, True, False)
        visible = pad_sequence([torch.ones_like(text) for text in texts], True)
        edits = self.edits if training else None
        options: dict[str, Any] = {"block_size": None if self.per_row else self.block_size}
        options["level"] = lambda t: self.schedule(t)[0]
        from_answer = self.causal is not None and not self.per_row
        starts = answer.int().argmax(1).tolist() if from_answer else [0] * len(features)
        draws, replaced = [], []
        for row, maskable, mirror, origin in zip(features, answer, mirrored, starts, strict=True):
            span = {} if row["t"] is None else {"low": row["t"], "high": row["t"]}
            generator = keyed_generator(*row["key"])
            draws.append(draw_noise(maskable, generator, mirror=mirror, origin=origin, **options, **span))
            if edits is not None:  # after the mask's draws, which stay the same
                replaced.append(edits.draw(maskable, draws[-1][1], generator))
        times, hidden = map(torch.stack, zip(*draws, strict=True))
        batch = {
            "input_ids": clean.masked_fill(hidden, self.mask_token_id),
            "labels": clean.masked_fill(~answer, IGNORED),
            "attention_mask": visible,
            "masked": hidden & (clean != self.mask_token_id),  # a mask token in the text has nothing to predict
            "t": times,
        }
        if edits is not None:
            edited, numbers = map(torch.stack, zip(*replaced, strict=True))
            ids = edits.replaced(batch["input_ids"], edited, numbers, self.vocabulary, self.mask_token_id)
            batch |= {"input_ids": ids, "edited": edited, "draws": numbers}
        causal_columns = {} if self.causal is None else {"starts": starts}
        if not self.packed:
            return batch | causal_columns
        # (rows, length) -> (1, all visible tokens)
        by_token = {name: values for name, values in batch.items() if values.shape == visible.shape}
        joined = {name: values[visible.bool()][None] for name, values in by_token.items()}
        return batch | joined | {"lengths": lengths} | causal_columns


def row_numbers(batch: dict[str, Any]) -> Tensor:
    """The number of each token's row in a batch, shaped like its `input_ids`."""
    ids, lengths = batch["input_ids"], batch.get("lengths")
    if lengths is None:
        return torch.arange(len(ids), device=ids.device).unsqueeze(1).expand(ids.shape)
    rows = torch.arange(len(lengths), device=ids.device)
    return rows.repeat_interleave(torch.tensor(lengths, device=ids.device)).unsqueeze(0)


def by_row(batch: dict[str, Any], name: str) -> Sequence[Tensor]:
    """The values of a batch, row by row; with padding, unless the batch is packed."""
    values, lengths = batch[name], batch.get("lengths")
    return list(values) if lengths is None or values.dim() == 1 else values[0].split(lengths)
