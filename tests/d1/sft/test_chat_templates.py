"""All chat templates of the installed TRL with rows of many shapes: each is trained on as a template writes it, or
refused in one line."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from trl.chat_template_utils import get_training_chat_template, supports_tool_calling

from d1.models.tokenizer import conversation_of, encode_turns, whole_turns
from tests.d1.sft.templates import NAMES, byte_tokenizer, trained_texts

FUNCTION = {"name": "get_weather", "description": "of now", "parameters": {"type": "object", "properties": {}}}
FUNCTION["parameters"] = {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
CALLS = [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo17"}}}]
SYSTEM, USER, AGAIN = (
    {"role": "system", "content": "Be brief11."},
    {"role": "user", "content": "Who12?"},
    {"role": "user", "content": "And13?"},
)
RESULT = {"role": "tool", "name": "get_weather", "content": "rain14"}


def said(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


SHAPES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([USER, said("Me15.")], {}),
    "system": ([SYSTEM, USER, said("Me15.")], {}),
    "two turns": ([USER, said("Me15."), AGAIN, said("You16.")], {}),
    "inline thoughts": ([USER, said("<think>\nhm18\n</think>\n\nMe15.")], {}),
    "thoughts": ([USER, said("Me15.", reasoning_content="hm18")], {}),
    "thoughts in two turns": ([USER, said("Me15.", reasoning="hm18"), AGAIN, said("You16.", thinking="so19")], {}),
    "call": ([USER, said("", tool_calls=CALLS)], TOOLS),
    "text and call": ([USER, said("Wait20.", tool_calls=CALLS)], TOOLS),
    "result": ([USER, said("", tool_calls=CALLS), RESULT, said("Rain21.")], TOOLS),
    "call without tools": ([USER, said("", tool_calls=CALLS)], {}),
}
IMAGES_ONLY = {"idefics3", "llava_next", "smolvlm"}  # these templates read lists of parts, with images, alone
tokenizer_of = cache(byte_tokenizer)


@cache
def variant(name: str) -> str | None:
    """TRL's variant of a template for training."""
    try:
        return get_training_chat_template(tokenizer_of(name))
    except ValueError:
        return None


def rendered(name: str, messages: Any, columns: Any, **options: Any) -> str | None:
    try:
        return tokenizer_of(name).apply_chat_template(messages, tokenize=False, **columns, **options)
    except Exception:  # a template can raise anything
        return None


def words(messages: Any, columns: Any) -> set[str]:
    """Every word with a number, each of which occurs once in a row, and the function's name."""
    return {*re.findall(r"\w+\d\d\b", str(messages).replace("\\n", " "))} | ({"get_weather"} if columns else set())


@pytest.mark.parametrize("all_turns", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_trained_on_as_the_template_writes_it_or_refused_in_one_line(name, all_turns):
    tokenizer, accepted, refusals = tokenizer_of(name), set(), []
    for shape, (messages, columns) in SHAPES.items():
        read, options = conversation_of(columns, messages)
        try:
            text = encode_turns(whole_turns(read), tokenizer, "the answer", options, all_turns=all_turns)
        except ValueError as error:
            refusals.append(str(error))
            continue
        accepted.add(shape)

        # Prompt and answer together are a template's own text, thoughts as often as it writes them.
        whole = tokenizer.decode(text.ids).removesuffix("<eos>").rstrip()
        full = [rendered(name, read, columns, chat_template=one) for one in (None, variant(name))]
        trimmed = [one.removesuffix("<eos>").rstrip() for one in full if one is not None]
        assert whole in trimmed, shape

        # Nothing that the row says is lost, and no tool's result is trained on.
        history = {"hm18"} if shape == "thoughts in two turns" and not all_turns else set()  # the template decides
        for word in words(messages, columns) - history:
            assert word in whole, shape
        parts = trained_texts(tokenizer, text.ids, text.trained)
        trained = "".join(parts)
        for message in messages if all_turns else messages[-1:]:
            for word in words([message], {}):
                assert (word in trained) == (message["role"] == "assistant"), shape
        assert not re.search(r"11|12|13|14", trained), shape

        # The turn ends as the template ends it: with a token, if it writes one after the last word.
        last = max(whole.rfind(word) + len(word) for word in words(messages[-1:], {}))
        assert whole.endswith(parts[-1].rstrip())
        assert len(parts[-1].rstrip()) >= len(whole) - last, shape

    if name not in IMAGES_ONLY:
        assert {"plain", "two turns"} <= accepted
    assert not any("\n" in refusal for refusal in refusals)
    if supports_tool_calling(tokenizer):
        assert {"call without tools"} <= accepted
    if not all_turns:  # what a template writes as a whole, after its own prompt, is never refused
        for shape, (messages, columns) in SHAPES.items():
            one = rendered(name, messages, columns)
            if one is not None and all(word in one for word in words(messages, columns)):
                assert shape in accepted, shape


@pytest.mark.parametrize("name", NAMES)
def test_all_turns_are_what_trl_trains_on(name):
    """The mask of Transformers with TRL's variant of the template; whitespace at the end of a turn is left out."""
    tokenizer, template = tokenizer_of(name), variant(name)
    if template is None or name in IMAGES_ONLY:
        pytest.skip("TRL has no variant for training")
    messages, columns = SHAPES["two turns"]
    text = encode_turns(messages, tokenizer, "the answer", columns, all_turns=True)
    given = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
    theirs = tokenizer.apply_chat_template(messages, **given)
    count = len(text.ids) - 1
    assert text.ids[:count] == theirs["input_ids"][:count]
    masks = zip(text.ids, text.trained, theirs["assistant_masks"], strict=False)
    others = [token for token, own, their in [*masks][:count] if own != bool(their)]
    assert not tokenizer.decode(others).strip()
    assert any(text.trained[:count])


@pytest.mark.parametrize("name", ["llama3", "llama3_1"])
def test_a_conversation_may_begin_with_the_assistant(name):
    """As many of ShareGPT's do. Where the template marks no turns, only later ones can be found."""
    tokenizer = tokenizer_of(name)
    messages = [said("Hello17."), USER, said("Me15.")]
    if variant(name) is None:
        with pytest.raises(ValueError, match=r"begins with a turn of the assistant, .* give this turn the weight 0"):
            encode_turns(messages, tokenizer, "the answer", all_turns=True)
        messages[0]["weight"] = 0
    text = encode_turns(messages, tokenizer, "the answer", all_turns=True)
    trained = "".join(trained_texts(tokenizer, text.ids, text.trained))
    assert ("Hello17." in trained) == (variant(name) is not None)
    assert "Me15." in trained
