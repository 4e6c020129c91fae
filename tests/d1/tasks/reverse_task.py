"""A user's own task, complete: spell a word backwards. Train on it with `--task tests/d1/tasks/reverse_task.py`."""

import random
from pathlib import Path

from datasets import Dataset

from d1.tasks import final_answer, text_of

WORDS = ["mask", "noise", "block", "step", "token", "prompt", "reward", "group", "sample", "policy"]
PARTS = {"train": WORDS[:6], "validation": WORDS[6:8], "test": WORDS[8:]}


def load_rows(split, data_file=None):
    words = Path(data_file).read_text().split() if data_file else PARTS[split]
    rows = []
    for word in random.Random(0).sample(words, len(words)):
        question = f"Spell backwards: {word}"
        content = f"Think in <reasoning></reasoning>, answer in <answer></answer>.\n\n{question}"
        prompt = [{"role": "user", "content": content}]
        rows.append({"prompt": prompt, "question": question, "ground_truth": word[::-1]})
    return Dataset.from_list(rows)


def extract(text):
    return final_answer(text)


def score(text, row):
    return {"accuracy": float(extract(text) == row["ground_truth"])}


def letters_reward(completions, ground_truth, **columns):
    answers = [extract(text_of(completion)) or "" for completion in completions]
    return [sum(map(str.__eq__, a, truth)) / len(truth) for a, truth in zip(answers, ground_truth, strict=True)]


REWARDS = [letters_reward]
