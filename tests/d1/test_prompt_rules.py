"""What every command refuses in a text: a part that the chat template leaves out, and a token that the model lacks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig

from d1.eval import run as evaluation
from d1.eval.completions import read_prompts
from d1.models import load_tokenizer
from d1.models.tokenizer import check_prompt, encode_prompts
from d1.preference.data import token_rows
from d1.rl.config import DiffuGRPOConfig
from d1.rl.stage import Tools, longest_prompt
from d1.sft.data import preprocess_dataset
from d1.tasks import load_task
from tests.conftest import save_tiny_model

TASK = """
from datasets import Dataset
REWARDS = [lambda completions, **columns: [0.0] * len(completions)]
def load_rows(split, data_file=None):
    return Dataset.from_list([{"prompt": prompt, "question": "q", "ground_truth": "a"} for prompt in PROMPTS])
def extract(text):
    return text
def score(text, row):
    return {"accuracy": 0.0}
"""
USER_ONLY = (
    "{% for message in messages %}{% if message.role == 'user' %}<user>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def evaluated(model: Path, folder: Path, prompts: list[Any], tokenizer: Any, *flags: str) -> list[Any]:
    task = folder / "own.py"
    task.write_text(TASK.replace("PROMPTS", json.dumps(prompts)))
    words = ["--model_path", str(model), "--dataset", str(task), "--output_dir", str(folder), *flags]
    return read_prompts(evaluation.make_parser().parse_args(words), load_task(str(task)), tokenizer)


def rl_length(folder: Path, prompts: list[Any], tokenizer: Any) -> int:
    args = DiffuGRPOConfig(output_dir=str(folder), report_to="none")
    return longest_prompt(Dataset.from_list([{"prompt": prompt} for prompt in prompts]), tokenizer, args, Tools(args))


# --- Parts that the chat template leaves out --------------------------------------------------------------------------


def test_a_prompt_that_the_template_leaves_out_in_part_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    prompts = [[user("a")], [user("b")], [system("be"), user("c")], [system("be"), user("d")]]
    assert len(evaluated(tiny_model_dir, tmp_path, prompts, tokenizer)) == 4
    assert rl_length(tmp_path, prompts, tokenizer) == 7
    tokenizer.chat_template = USER_ONLY
    refused = r"^problem 2 \(from 0\): the chat template leaves out the content of the system message 'be'"
    with pytest.raises(ValueError, match=refused):
        evaluated(tiny_model_dir, tmp_path, prompts, tokenizer)
    with pytest.raises(ValueError, match=refused):
        rl_length(tmp_path, prompts, tokenizer)
    assert len(evaluated(tiny_model_dir, tmp_path, prompts[:2], tokenizer)) == 2
    assert rl_length(tmp_path, prompts[:2], tokenizer) > 0


def test_a_prompt_may_have_parts_of_text_null_fields_and_functions_as_tools(tiny_model_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)

    def add(a: int) -> int:
        """Adds.

        Args:
            a: A number.
        """
        return a

    parts = [{"type": "text", "text": "a b"}]
    answer = {"role": "assistant", "content": None, "tool_calls": None}
    messages = [{**user("x"), "content": parts, "name": None, "tool_calls": None}, answer, user("c")]
    check_prompt(tokenizer, messages, {"tools": [add]})
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="leaves out the content of the user message 'a b'"):
        check_prompt(tokenizer, messages, {"tools": [add]})


def test_evaluation_says_which_arguments_the_template_does_not_read(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    flags = ["--chat_template_kwargs", '{"enable_thinking": false}']
    with caplog.at_level(logging.WARNING, "eval"):
        evaluated(tiny_model_dir, tmp_path, [[user("a")]], tokenizer, *flags)
    assert caplog.messages == [
        "the chat template reads no enable_thinking of chat_template_kwargs, which changes nothing"
    ]
    caplog.clear()
    tokenizer.chat_template += "{{ enable_thinking }}"
    evaluated(tiny_model_dir, tmp_path, [[user("a")]], tokenizer, *flags)
    assert not caplog.messages


# --- Tokens that the tokenizer or the model lacks ---------------------------------------------------------------------


def test_a_token_that_was_added_to_the_tokenizer_alone_is_refused(tmp_path: Path) -> None:
    """The forward pass ended with an IndexError."""
    folder = save_tiny_model(tmp_path / "model")
    file = str(folder / "tokenizer.json")
    backend = Tokenizer.from_file(file)
    backend.add_tokens([AddedToken("<new>")])
    backend.save(file)
    rows = AutoConfig.from_pretrained(folder).vocab_size
    tokenizer = load_tokenizer(folder)
    refused = f"the token '<new>' with id {rows} is in the text, and the model's embedding has {rows} rows"

    data = Dataset.from_list([{"prompt": "a", "completion": "b"}, {"prompt": "a <new>", "completion": "b"}])
    with pytest.raises(ValueError, match=f"1 of 2 rows cannot be trained on .*\n  row 1: {refused}"):
        preprocess_dataset(data, tokenizer, 20, 0.0)
    pairs = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c <new>"}])
    with pytest.raises(ValueError, match=f"row 0: {refused}"):
        token_rows(pairs, tokenizer, 20, 20, paired=True)
    prompts = [[user("a")], [user("a <new>")]]
    with pytest.raises(ValueError, match=rf"^problem 1 \(from 0\): {refused}"):
        evaluated(folder, tmp_path, prompts, tokenizer)
    with pytest.raises(ValueError, match=rf"^problem 1 \(from 0\): {refused}"):
        rl_length(tmp_path, prompts, tokenizer)
    assert encode_prompts(tokenizer, prompts) is None
    assert len(preprocess_dataset(data.select([0]), tokenizer, 20, 0.0)[0]) == 1


def test_answers_that_the_tokenizer_cannot_write_are_counted(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    data = Dataset.from_list([{"prompt": "a", "completion": "b"}, {"prompt": "É", "completion": "b"}])
    preprocess_dataset(data, tokenizer, 20, 0.0)
    assert not caplog.messages
    data = Dataset.from_list([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "É"}])
    preprocess_dataset(data, tokenizer, 20, 0.0)
    assert caplog.messages == [
        "1 of 2 rows: the tokenizer has no token for a part of the answer, which is trained on as <unk>"
    ]
    tokenizer.unk_token = tokenizer.eos_token  # as GPT-2 has it: every answer ends with this token
    caplog.clear()
    preprocess_dataset(data.select([0]), tokenizer, 20, 0.0)
    assert not caplog.messages
