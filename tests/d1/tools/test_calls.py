"""Formats of calls: what is written is read, what is wrong is a text for the model, and who is told about tools."""

from typing import Literal

import pytest

from d1.models import load_tokenizer
from d1.runs.turns import TurnSettings
from d1.tools.calls import FORMATS, format_of, instructions, parse_argument
from d1.tools.turns import Toolbox
from tests.d1.sft.templates import byte_tokenizer

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}CALL<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def multiply(a: int, b: int) -> int:
    """The product of two numbers,
    both whole.

    Args:
        a: One number.
        b: The other.
    """
    return a * b


def search(text: str) -> str:
    """Search for a text.

    Args:
        text: What to search for.
    """
    return text


BOTH, ONE = {"multiply": multiply, "search": search}, {"search": search}
CASES = [
    (BOTH, "multiply", {"a": 37, "b": -46}),
    (BOTH, "search", {"text": 'a: "b" {c} <d>'}),
    (ONE, "search", {"text": "37*46"}),
]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (str | None, "celsius", "celsius"),
        (str | None, "5", "5"),  # no number, as the parameter takes none
        (str | None, "null", None),
        (str | int, "5", 5),
        (float | str, "5", 5),
        (list[int] | str, "[1, 2]", [1, 2]),
        (dict[str, int] | None | str, '{"a": 1}', {"a": 1}),
        (str | None, '"abc"', '"abc"'),
        (Literal["day", "night"], "night", "night"),
        (Literal["day"] | None, "day", "day"),
        (list[str], '["a"]', ["a"]),
    ],
)
def test_text_is_read_by_the_type_of_its_parameter(kind, text, value):
    assert parse_argument(text, kind) == value
    for wrong in (int, Literal["other"], list[str] | None):
        with pytest.raises(ValueError, match="'no number' is not a JSON value"):
            parse_argument("no number", wrong)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("functions", "function", "arguments"), CASES)
def test_a_call_that_is_written_is_read(name, functions, function, arguments):
    form = FORMATS[name]
    text = f"I call it. {form.write_call(function, arguments, functions)} and wait"
    (inside,) = form.pattern.findall(text)
    assert form.read(inside, functions) == (function, arguments)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("json", "37*46", "JSON"),
        ("json", '["name"]', "JSON"),
        ("json", '{"name": "divide", "arguments": {}}', "no tool 'divide': use multiply, search"),
        ("json", '{"name": "search", "arguments": 3}', "an object"),
        ("xml", "<function=search><parameter=text>3", "must be <function"),
        ("xml", "<function=divide></function>", "no tool 'divide'"),
        ("xml", "<function=multiply>\n<parameter=a>\nx\n</parameter>\n</function>", "'x' is not a JSON value"),
        ("plain", "37*46", "no tool '37"),
        ("plain", "multiply: 37", "JSON object with a, b"),
        ("plain", "multiply: {", "not a JSON value"),
    ],
)
def test_what_is_no_call_is_a_text_for_the_model(name, text, said):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        FORMATS[name].read(text, BOTH)
    assert said in str(error.value)


def test_qwens_and_nemotrons_calls_as_they_are_published():
    call = "search", {"text": "jazz"}
    qwen = '\n{"name": "search", "arguments": {"text": "jazz"}}\n'
    nemotron = "\n<function=search>\n<parameter=text>\njazz\n</parameter>\n</function>\n"
    for name, text in (("json", qwen), ("xml", nemotron)):
        assert FORMATS[name].write(*call, BOTH) == text
        assert FORMATS[name].read(text, BOTH) == call


@pytest.mark.parametrize(("says", "name"), [("<tool_call>", "json"), ("<tool_call><function=x>", "xml"), ("", "plain")])
def test_the_template_chooses_the_format_and_tells_about_tools_or_the_prompt_does(tiny_model_dir, says, name):
    tokenizer = load_tokenizer(tiny_model_dir)
    assert format_of(tokenizer) == "plain"
    prompt = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    toolbox = Toolbox(tokenizer, [2], TurnSettings())
    messages, options = toolbox.add_tool_instructions(prompt, BOTH)  # this template ignores tools
    assert options == {}
    assert messages[0]["content"] == f"{instructions(BOTH, FORMATS['plain'])}\n\nhi"
    assert "multiply(a, b): The product of two numbers, both whole." in messages[0]["content"]
    assert messages[1:] == prompt[1:]
    assert prompt[0]["content"] == "hi"
    tokenizer.chat_template = CHATML.replace("CALL", says)
    assert format_of(tokenizer) == name
    assert Toolbox(tokenizer, [2], TurnSettings()).add_tool_instructions(prompt, BOTH) == (
        prompt,
        {"tools": [multiply, search]},
    )


def test_a_message_of_parts_is_its_text_after_what_tells_about_tools(tiny_model_dir):
    toolbox = Toolbox(load_tokenizer(tiny_model_dir), [2], TurnSettings())
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    text = [{"role": "user", "content": "hi"}]
    assert toolbox.add_tool_instructions(parts, BOTH) == toolbox.add_tool_instructions(text, BOTH)
    assert isinstance(parts[0]["content"], list)


def test_a_template_that_refuses_the_messages_says_so_with_tools_too():
    toolbox = Toolbox(byte_tokenizer("gemma"), [1], TurnSettings(), "plain")
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="cannot read the text 'hi': System role not supported"):
        toolbox.add_tool_instructions(prompt, BOTH)
