"""How a model writes a call of a tool and reads the result, one entry per format.

A call is a text between two marks. Sampling stops after the closing mark, and the result comes in the user's next
message. A new format is an entry of `FORMATS`. This module imports no torch.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Functions = Mapping[str, Callable[..., Any]]
Call = tuple[str, dict[str, Any]]  # the name of a function and its arguments
Message = dict[str, Any]
MAX_DEPTH = 64  # lists and objects within each other in an argument


@dataclass(frozen=True)
class CallFormat:
    """An entry of the table.

    Attributes:
        opens, closes: the marks of a call.
        read: the call in the text between the marks; ValueError, with the text for the model, if there is none.
        write: a call as the text between the marks.
        result: what the user's message has for each result, with {result} in it.
        known_by: a text that a chat template or a vocabulary of this format contains; "": any.
    """

    opens: str
    closes: str
    read: Callable[[str, Functions], Call]
    write: Callable[[str, dict[str, Any], Functions], str]
    result: str
    known_by: str = ""

    @property
    def marks(self) -> list[str]:
        """The marks of a call, and those around a result."""
        result_parts = [part.strip() for part in self.result.split("{result}")]
        result_marks = [part for part in result_parts if is_mark(part)]
        return [self.opens, self.closes, *result_marks]

    @property
    def pattern(self) -> re.Pattern[str]:
        """A whole call, whose group is the text between the marks."""
        return re.compile(f"{re.escape(self.opens)}(.*?){re.escape(self.closes)}", re.DOTALL)

    def write_call(self, name: str, arguments: dict[str, Any], functions: Functions) -> str:
        """A call with its marks."""
        return f"{self.opens}{self.write(name, arguments, functions)}{self.closes}"


def is_mark(text: str) -> bool:
    """Whether a text is a mark, such as <result> or [RESULT], not a word or a sign."""
    first_and_last = text[:1] + text[-1:]
    return len(text) > 2 and not any(map(str.isalnum, first_and_last)) and any(map(str.isalnum, text))


def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a function and their types."""
    hints = get_type_hints(function)
    return {name: hints.get(name, str) for name in inspect.signature(function).parameters}


def parse_argument(text: str, kind: Any) -> Any:
    """The value of an argument that was written as text. A parameter of type `str` gets the text, any other parameter
    its JSON value. A parameter that may also be a string gets the text, unless the text is a JSON value of one of its
    other types."""
    if kind is str:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if accepts_string(kind, text):
            return text
        raise ValueError(f"{text!r:.80} is not a JSON value") from None
    if accepts_string(kind, text) and type(value) not in non_string_types(kind):
        return text
    check_depth(value)
    return value


def non_string_types(kind: Any) -> set[Any]:
    """The types that the JSON value of a parameter of this type may have, other than a string."""
    types = {get_origin(part) or part for part in get_args(kind)} - {str}
    if float in types:
        types.add(int)
    return types


def accepts_string(kind: Any, text: str) -> bool:
    """Whether a parameter of this type may be this string: `str`, a union with it, or a `Literal` that has it."""
    if get_origin(kind) is Literal:
        return text in get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(accepts_string(part, text) for part in get_args(kind))
    return kind is str


def check_depth(value: Any) -> None:
    """Raise ValueError for a JSON value whose lists and objects are nested more than `MAX_DEPTH` deep: what is read
    here could be too deep to be written again."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = [part for part in level if isinstance(part, list)]
        objects = [list(part.values()) for part in level if isinstance(part, dict)]
        if not lists and not objects:
            return
        level = [child for children in (*lists, *objects) for child in children]
    raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")


def function_of(name: str, functions: Functions) -> Callable[..., Any]:
    if name not in functions:
        raise ValueError(f"there is no tool {name!r:.80}: use {', '.join(functions)}")
    return functions[name]


def read_json(text: str, functions: Functions) -> Call:
    """{"name": ..., "arguments": {...}} (Qwen 2.5 and 3, SDAR)."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError('a call must be JSON: {"name": NAME, "arguments": {NAME: VALUE}}') from None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError('"name" must be a text and "arguments" an object')
    check_depth(arguments)
    function_of(name, functions)
    return name, arguments


def write_json(name: str, arguments: dict[str, Any], functions: Functions) -> str:
    return f"\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n"


XML_FUNCTION = re.compile(r"\s*<function=([^>\s]*)>(.*?)</function>\s*", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^>\s]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_xml(text: str, functions: Functions) -> Call:
    """<function=NAME> <parameter=NAME> value </parameter> </function> (Nemotron, Qwen3-Coder)."""
    match = XML_FUNCTION.fullmatch(text)
    if not match:
        raise ValueError("a call must be <function=NAME><parameter=NAME>VALUE</parameter></function>")
    name, parameters = match.groups()
    kinds = parameter_types(function_of(name, functions))
    return name, {key: parse_argument(value, kinds.get(key, str)) for key, value in XML_PARAMETER.findall(parameters)}


def write_xml(name: str, arguments: dict[str, Any], functions: Functions) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    lines = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items()]
    return "\n".join(["", f"<function={name}>", *lines, "</function>", ""])


def read_plain(text: str, functions: Functions) -> Call:
    """NAME: ARGUMENT for a function of one parameter, else NAME: {"NAME": VALUE, ...}; without NAME if there is one
    function."""
    name, colon, argument = (part.strip() for part in text.partition(":"))
    has_name = colon and name in functions
    if not has_name and len(functions) == 1:
        name = next(iter(functions))
        argument = text.strip()
    kinds = parameter_types(function_of(name, functions))
    if len(kinds) == 1:
        ((parameter, kind),) = kinds.items()
        return name, {parameter: parse_argument(argument, kind)}
    arguments = parse_argument(argument or "{}", dict)
    if not isinstance(arguments, dict):
        raise ValueError(f"{name} takes a JSON object with {', '.join(kinds)}")
    return name, arguments


def write_plain(name: str, arguments: dict[str, Any], functions: Functions) -> str:
    values = [value if isinstance(value, str) else json.dumps(value) for value in arguments.values()]
    argument = values[0] if len(parameter_types(functions[name])) == 1 else json.dumps(arguments)
    return argument if len(functions) == 1 else f"{name}: {argument}"


# The first entry that fits a tokenizer is its format.
RESPONSE = "<tool_response>\n{result}\n</tool_response>"
FORMATS: dict[str, CallFormat] = {
    "xml": CallFormat("<tool_call>", "</tool_call>", read_xml, write_xml, RESPONSE, known_by="<function="),
    "json": CallFormat("<tool_call>", "</tool_call>", read_json, write_json, RESPONSE, known_by="<tool_call>"),
    "plain": CallFormat("<call>", "</call>", read_plain, write_plain, "<result>{result}</result>"),
}


def format_of(tokenizer: Any) -> str:
    """The name of the format of a tokenizer, by its chat template and its vocabulary."""
    template = str(tokenizer.chat_template or "")
    vocabulary = tokenizer.get_vocab()
    return next(name for name, form in FORMATS.items() if form.known_by in template or form.known_by in vocabulary)


EXAMPLES: dict[Any, Any] = {str: "", int: 0, float: 0, bool: True, list: [], dict: {}}


def example_call(name: str, functions: Functions, form: CallFormat) -> str:
    """A call with its marks, whose arguments are as short as their types allow."""
    arguments = {}
    for key, kind in parameter_types(functions[name]).items():
        arguments[key] = EXAMPLES.get(get_origin(kind) or kind, "")
    return form.write_call(name, arguments, functions)


def summary(function: Callable[..., Any]) -> str:
    """The first paragraph of a function's docstring, as one line."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


def instructions(functions: Functions, form: CallFormat) -> str:
    """What tells a model about its tools where the chat template does not."""
    lines = ["You can call these tools:"]
    for name, function in functions.items():
        lines.append(f"- {name}({', '.join(parameter_types(function))}): {summary(function)}")
    name = next(iter(functions))
    example = form.write_call(name, {key: "..." for key in parameter_types(functions[name])}, functions)
    lines.append(f"To call one, write {example} and stop. You then get its result.")
    return "\n".join(lines)


def renders_tools(tokenizer: Any, messages: Sequence[Message], functions: Functions) -> bool:
    """Whether the chat template writes the tools that are passed to it into the prompt. ValueError, with the template's
    reason, if it refuses the messages."""
    from d1.models.tokenizer import render_prompt  # imports torch

    with_tools = render_prompt(tokenizer, messages, add_generation_prompt=False, tools=[*functions.values()])
    if not all(name in with_tools for name in functions):
        return False
    return with_tools != render_prompt(tokenizer, messages, add_generation_prompt=False)
