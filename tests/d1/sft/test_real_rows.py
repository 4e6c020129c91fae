"""Rows in the shapes of other people's data (tests/real_files/sft_rows.jsonl), with what is trained on in them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from datasets import Dataset

from d1.distill.traces import prompt_ids
from d1.sft.data import preprocess_dataset, tokenize_row
from tests.d1.sft.templates import OWN, byte_tokenizer, trained_texts

tokenizer_of = cache(byte_tokenizer)
CASES = [json.loads(line) for line in (OWN / "sft_rows.jsonl").read_text().splitlines()]


def read(case: dict[str, Any]) -> dict[str, Any]:
    tokenizer = tokenizer_of(case["template"])
    return tokenize_row(case["row"], tokenizer, 100_000, "truncate", None, None, case.get("all_turns", False))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_row_trains_on_what_it_says_or_is_refused_by_name(case):
    row = read(case)
    if "refused" in case:
        assert row["status"] == "bad"
        assert case["refused"] in row["problem"]
        assert "\n" not in row["problem"]
        return
    assert row["status"] == "ok", row["problem"]
    tokenizer = tokenizer_of(case["template"])
    assert trained_texts(tokenizer, row["input_ids"], row["answer"]) == case["trained"]
    last = tokenizer.decode(row["input_ids"][row["start"] :])
    assert last == case["trained"][-1] + "<eos>"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"system": "Answer in French."}, "<|im_start|>system\nAnswer in French.<|im_end|>\n<|im_start|>user\nhi"),
        (
            {"system_prompt": "Answer in French."},
            "<|im_start|>system\nAnswer in French.<|im_end|>\n<|im_start|>user\nhi",
        ),
        ({"tools": [{"type": "function", "function": {"name": "get_weather"}}]}, '"name": "get_weather"'),
        ({"chat_template_kwargs": '{"enable_thinking": false}'}, "assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_columns_are_in_the_prompt(row, text):
    for columns in ({"prompt": "hi", "completion": "yo"}, {"messages": [*user("hi"), *assistant("yo")]}):
        made = read({"template": "qwen3", "row": {**columns, **row}})
        prompt = tokenizer_of("qwen3").decode(made["input_ids"][: made["start"]])
        assert text in prompt


def test_the_prompts_of_distillation_have_the_columns_of_their_rows():
    row = {"system": "Answer in French.", "prompt": "hi", "chat_template_kwargs": {"enable_thinking": False}}
    tokenizer = tokenizer_of("qwen3")
    ids, problem = prompt_ids(row, tokenizer, 1000)
    assert problem == ""
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nAnswer in French.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_prompt_of_distillation_that_loses_a_part_is_refused():
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    row = {"prompt": [*user("a"), *assistant("<think>\nhm\n</think>\n\nb"), *user("c")], "tools": tools}
    problems = [prompt_ids(row, tokenizer_of(name), 10_000)[1] for name in ("qwen3", "gemma")]
    todo = "remove it from the row, or use a model whose template writes it"
    assert problems == ["", f"the chat template leaves out tools (get_weather): {todo}"]
    row = {"prompt": "What is <mask>?"}
    assert prompt_ids(row, tokenizer_of("qwen3"), 10_000)[1].startswith("the mask token <mask> is in the text")


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def assistant(text: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text, **fields}]


def test_what_a_user_should_know_is_counted(caplog):
    tokenizer = tokenizer_of("deepseek_r1_distill")
    turns = [*user("a"), *assistant("b", weight=1), *user("c"), *assistant("d")]
    rows = [{"messages": turns}, {"messages": [*turns, *user("thanks")]}]
    plain = [{"messages": [*user("a"), *assistant("<think>\nhm\n</think>\n\nb")]}]
    plain[0]["messages"][0]["name"] = "Ada"
    rows[0]["chat_template_kwargs"] = {"enable_thinking": True}
    preprocess_dataset(Dataset.from_list([*rows, *plain]), tokenizer, 1000, 0.0, num_proc=1)
    assert "1 of 3 rows: the chat template does not write the name of a message" in caplog.text
    assert "1 of 3 rows: the chat template reads no enable_thinking of chat_template_kwargs" in caplog.text
    assert "1 of 3 rows: messages after the assistant's last turn are left out" in caplog.text
    assert "2 of 3 rows: a weight is on an earlier turn" in caplog.text
    assert "2 of 3 rows: the training text differs from the generation prompt" in caplog.text


def test_null_fields_of_a_table_change_nothing():
    """A parquet file gives each message, call and schema the fields of all others, as nulls."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1", "y": None}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": None}}}
    messages = [*user("a"), *assistant("b", tool_calls=[call], reasoning_content=None, weight=None)]
    messages[0] |= {"tool_calls": None}
    full = read({"template": "qwen3", "row": {"messages": messages, "tools": [tool], "chat_template_kwargs": None}})
    call, tool = json.loads(json.dumps(call)), json.loads(json.dumps(tool))
    del call["function"]["arguments"]["y"], tool["function"]["parameters"]["required"]
    row = {"messages": [*user("a"), *assistant("b", tool_calls=[call])], "tools": [tool]}
    assert full == read({"template": "qwen3", "row": row})
