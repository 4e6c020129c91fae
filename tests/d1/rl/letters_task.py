"""A task for process tests: name the prompt's letter. Slow on purpose, so that a run can be killed while it works."""

import os
import time

from datasets import Dataset


def load_rows(split, data_file=None):
    letters = "abcdefghijkl"
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": letter * (4 + i)}], "question": letter, "ground_truth": letter}
            for i, letter in enumerate(letters)
        ]
    )


def letter_share(completions, ground_truth, **columns):
    time.sleep(float(os.environ.get("LETTERS_SECONDS", "0")))
    texts = [completion[0]["content"] for completion in completions]
    return [
        (text.count(wanted) + 0.1 * sum(map(text.count, "aeiou"))) / max(len(text), 1)
        for text, wanted in zip(texts, ground_truth, strict=True)
    ]


REWARDS = [letter_share]


def extract(text):
    return text.strip()[:1] or None


def score(text, row):
    return {"accuracy": float(extract(text) == row["ground_truth"])}
