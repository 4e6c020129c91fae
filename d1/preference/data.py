"""Preference data: the rows that can be trained on, and batches with their views.

`d1/preference/rows.py` reads a row. A completion is scored on a canvas of fixed length, as in RL: the tokens after its
EOS are hidden in every view, and not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset, Features, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from d1.masking import keyed_generator
from d1.preference import rows as preference_rows
from d1.preference.rows import answer_columns, tokenize_row
from d1.runs.data import IGNORED as IGNORED
from d1.runs.data import BatchRow, tokenize_rows, usable_rows
from d1.scoring import Estimator, Randomness, SampledRows, ViewSettings
from d1.scoring.inputs import canvas_blocks

VIEWS = 5  # the second part of the key of the views' random numbers
FEATURES = Features(
    {"prompt_ids": List(Value("int32")), "completions": List(List(Value("int32"))), "label": Value("int32")}
    | dict.fromkeys(("status", "problem"), Value("string"))
)


def token_rows(
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    max_completion_length: int,
    *,
    paired: bool,
    bad_rows: str = "error",
    num_proc: int | None = None,
) -> Dataset:
    """The rows that can be trained on, in their order; the others are an error, or counted and reported. Pairs are
    taken apart if `paired` is False.

    Returns:
        A data set with `prompt_ids`; `completions`, each with its EOS: the chosen and the rejected one, or one; and
        `label`, 1 or -1 for a single completion and 1 for a pair.

    Raises:
        ValueError: columns of none of the formats, bad rows, or nothing left to train on.
    """
    columns = answer_columns(data.features, paired=paired)
    options = {
        "tokenizer": tokenizer,
        "max_prompt_length": max_prompt_length,
        "max_completion_length": max_completion_length,
        "columns": columns,
    }
    rows = tokenize_rows(data, tokenize_row, preference_rows, options, FEATURES, num_proc)
    rows = rows.select(usable_rows(rows["status"], rows["problem"], bad_rows, data))
    data_has_pairs = len(columns) == 2
    if data_has_pairs and not paired:
        rows = rows.map(split_pairs, batched=True, remove_columns=["status", "problem"])
    if not paired and len({*rows["label"]}) < 2:
        raise ValueError("all completions have the same label: nothing is preferred to anything")
    return rows


def split_pairs(batch: dict[str, list]) -> dict[str, list]:
    """Each pair of a batch as two rows with a label."""
    rows: dict[str, list] = {"prompt_ids": [], "completions": [], "label": []}
    for prompt, (chosen, rejected) in zip(batch["prompt_ids"], batch["completions"], strict=True):
        for completion, label in ((chosen, 1), (rejected, -1)):
            rows["prompt_ids"].append(prompt)
            rows["completions"].append([completion])
            rows["label"].append(label)
    return rows


class PreferenceDataset(torch.utils.data.Dataset):
    """`token_rows`, by `BatchRow`: an item is a pair or a completion, with the `key` of its views' generators."""

    def __init__(self, rows: Dataset, seed: int = 42) -> None:
        self.rows, self.seed = rows, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: BatchRow) -> dict[str, Any]:
        number = max(index.row, 0)
        row = self.rows[number] | {"key": (self.seed, VIEWS, index.epoch, number)}
        return row if index.row >= 0 else row | {"label": IGNORED}


class PreferenceCollator:
    """A batch of tensors, with the views that both models score each completion in, which are a function of its item's
    key alone. Pairs have all chosen completions before all rejected ones.

    Returns:
        `prompt_ids` and `prompt_mask` (rows, prompt), padded on the left; `canvas_ids` (rows, canvas); `noise` and
        `weights` of `d1.scoring.Views`; and `labels` (items,), 1 or -1, or -100 for an empty row.
    """

    def __init__(
        self, tokenizer: Any, estimator: Estimator, settings: ViewSettings, block_size: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.estimator = estimator
        self.settings = settings
        self.block_size = block_size

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(item["prompt_ids"]) for item in items)
        rows = [self.row(item, side, longest) for side in range(len(items[0]["completions"])) for item in items]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return batch | {"labels": torch.tensor([item["label"] for item in items])}

    def row(self, item: dict[str, Any], side: int, longest: int) -> dict[str, Tensor]:
        """One completion, its prompt padded to `longest` tokens."""
        canvas = self.settings.gen_length
        ids = item["completions"][side]
        eos_tail = [self.tokenizer.eos_token_id] * (canvas - len(ids))
        completion = torch.tensor([ids + eos_tail])
        prompt = torch.tensor([item["prompt_ids"]])
        visible = torch.ones_like(prompt)

        # Its views, as of a rollout of one row whose sampler is unknown: estimators that replay it cannot be used.
        sampled = SampledRows(
            prompt_ids=prompt,
            attention_mask=visible,
            maskable=visible.bool(),
            canvas_ids=completion,
            scored=(torch.arange(canvas) < len(ids)).unsqueeze(0),
            reveal_steps=torch.full((1, canvas), -1),
            logps=torch.zeros(1, canvas),
            entropies=torch.zeros(1, canvas),
            blocks=canvas_blocks(visible, canvas, self.block_size),
        )
        row_generator = keyed_generator(*item["key"], side, 0)
        shared_generator = keyed_generator(*item["key"], side, 1)
        randomness = Randomness([row_generator], shared_generator, first_row=0, total_rows=1)
        views = self.estimator(sampled, randomness, self.settings)

        padding = longest - len(item["prompt_ids"])
        return {
            "prompt_ids": F.pad(prompt[0], (padding, 0), value=self.tokenizer.pad_token_id),
            "prompt_mask": F.pad(visible[0], (padding, 0)),
            "canvas_ids": completion[0],
            "noise": F.pad(views.noise[0], (padding, 0)),
            "weights": views.weights[0] * (item["label"] != IGNORED),
        }
