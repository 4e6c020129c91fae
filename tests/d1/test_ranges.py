"""Ranges: a range means what its text says, every number of every command has one, and every command refuses other
values."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl import ModelConfig, TrlParser

from d1 import __main__ as tools
from d1.distill import DistillConfig
from d1.distill import train as distill_train
from d1.eval import evaluate, harness
from d1.eval import run as evaluation
from d1.preference import train as preference_train
from d1.preference.config import PreferenceConfig
from d1.ranges import COUNT, NATURAL, NUMBER, SHARE, Range, ranges_of
from d1.rl import train as rl_train
from d1.rl.checks import UNSUPPORTED
from d1.rl.config import INHERITED, DiffuGRPOConfig
from d1.runs.cli import SettingsParser
from d1.sft import SFTConfig
from d1.sft import train as sft_train
from d1.show import report

NAN, INF = math.nan, math.inf
CANDIDATES = [-INF, -1e9, -7, -2, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 2, 3, 4, 2**32 - 1, 2**32, 1e12, INF, NAN]


def allowed(value: float, text: str) -> bool:
    """An independent reading of a range, from the text between its brackets."""
    return any(lies_in(value, part) for part in text.split(" or "))


def lies_in(value: float, part: str) -> bool:
    if not part.endswith(("]", ")")):
        return part == str(value)
    low, high = (float(end) for end in part.partition("in ")[2].strip("[]()").split(", "))
    at_open_end = (value == low and "(" in part) or (value == high and ")" in part)
    whole = not part.startswith("an integer") or (math.isfinite(value) and value == int(value))
    return math.isfinite(value) and low <= value <= high and not at_open_end and whole


ENDS = st.integers(-3, 3)
RANGES = st.builds(Range, ENDS | st.just(-INF), ENDS | st.just(INF), st.booleans(), st.booleans(), st.booleans())
VALUES = st.integers(-4, 4) | st.floats(-4, 4) | st.sampled_from([*CANDIDATES, None, "max"])


@given(RANGES, st.lists(RANGES | st.sampled_from([None, "max", -1]), max_size=3), VALUES)
def test_a_range_contains_what_its_text_says(row: Range, others: list[Any], value: Any) -> None:
    for other in others:
        row = row | other
    parts = str(row).split(" or ")
    numeric = isinstance(value, (int, float))
    assert (value in row) == (allowed(value, str(row)) if numeric else str(value) in parts)


def test_what_is_no_number_lies_in_no_range_and_lists_only_where_it_says_so() -> None:
    for value in (True, False, "batch", "", [1], [], {}, 1j, 10**400, object()):
        assert value not in NUMBER
        assert value not in COUNT | None | -1
    shares = Range(0, 1, many=True) | None
    assert all(value in shares for value in (None, [], [0, 0.5], (1,)))
    assert not any(value in shares for value in (0.5, [0.5, 2], [NAN], [None], ["x"], [[0.5]]))


def test_words_of_a_command_line_become_numbers() -> None:
    assert [(COUNT | "max")(text) for text in ("7", "-7", "max")] == [7, -7, "max"]
    assert [SHARE(text) for text in ("7", "1e-3")] == [7.0, 0.001]
    for row, text in ((COUNT, "2.5"), (COUNT, "x"), (SHARE, ""), (NATURAL | "max", "min")):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"must be {row}, got {text!r}")):
            row(text)


# ---- the commands


@dataclass
class Command:
    """A command of the library: its parser, the words it requires, and its ranges."""

    parser: Any
    required: list[str]
    ranges: dict[str, Range]

    def start(self, flags: list[str]) -> None:
        parsed = getattr(self.parser, "parse_args_and_config", self.parser.parse_args)([*self.required, *flags])
        if isinstance(self.parser, TrlParser):
            rl_train.main(*parsed)

    def parsed(self, name: str, text: str) -> Any:
        """The value of `--name=text`; None if it is refused as not a number, or if the flag is another flag's alias or
        another program's."""
        if name not in {action.dest for action in self.parser._actions}:
            return None
        try:
            value = vars(self.parser.parse_args([*self.required, f"--{name}={text}"])).get(name)
        except SystemExit:
            return None
        except ValueError as error:
            return float(text) if f"out of range: --{name} " in str(error) else None
        return value[0] if isinstance(value, list) else value

    @functools.cached_property
    def numbers(self) -> list[str]:
        """All flags in the help that read 7 as a number."""
        text = io.StringIO()
        every = "--help_all" if isinstance(self.parser, TrlParser) else "--help"
        with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
            self.parser.parse_args([*self.required, every])
        names = sorted({*re.findall(r"--([a-z]\w*)", text.getvalue())} - {"config"})  # which names a file
        return [name for name in names if type(self.parsed(name, "7")) in (int, float)]


MODEL = ["--model_path", "none"]
RL = ["--output_dir", "/dev/null/no", "--report_to", "none", "--per_device_train_batch_size", "6", "--bf16", "false"]
REQUIRED = {  # of the tools
    "eval": [*MODEL, "--dataset", "sudoku"],
    "harness": MODEL,
    "curves": ["none"],
    "a2d": ["SRC", "OUT"],
    "merge": ["BASE", "ADAPTER", "OUT"],
    "export": ["SRC", "OUT", "--format", "llada"],
    "fit": [*MODEL, "--stage", "rl"],
    "methods": [],
    "task": ["new", "mine.py"],
    "sandbox": ["check"],
    "chat": ["none"],
    "watch": [*MODEL, "--prompt", "a"],
    "fill": ["none", "[MASK]"],
    "serve": ["none"],
}
WITHOUT_NUMBERS = {"merge", "export", "methods", "sandbox", "curves", "task"}


CONFIGS = {"sft": SFTConfig, "prefer": PreferenceConfig, "distill": DistillConfig}


def commands() -> dict[str, Command]:
    found = {"rl": Command(rl_train.make_parser(), RL, INHERITED | ranges_of(DiffuGRPOConfig))}
    for name, stage in (("sft", sft_train), ("prefer", preference_train), ("distill", distill_train)):
        found[name] = Command(stage.make_parser(), [], ranges_of(CONFIGS[name]))
    parsers: dict[str, SettingsParser[Any]] = {
        "eval": evaluation.make_parser(),
        "harness": harness.make_parser(),
        "curves": report.make_parser(),
    }
    for name, command in tools.COMMANDS.items():
        parsers[name] = SettingsParser(command.flags)
    return found | {name: Command(parser, REQUIRED[name], parser.ranges()) for name, parser in parsers.items()}


COMMANDS = commands()
WITH_NUMBERS = sorted(COMMANDS.keys() - WITHOUT_NUMBERS)


def test_rl_settings_that_may_be_numbers_are_all_seen() -> None:
    """Compares the result of the search above, by parsing, with the types in the dataclasses."""
    fields = {**DiffuGRPOConfig.__dataclass_fields__, **ModelConfig.__dataclass_fields__}
    kinds = {name: str(field.type) for name, field in fields.items()}
    numeric = {name for name, kind in kinds.items() if "int" in kind or "float" in kind}
    assert numeric - set(COMMANDS["rl"].numbers) <= {"pad_to_multiple_of"}  # a word or a number, so a text
    assert COMMANDS["rl"].ranges.keys() <= fields.keys()


def test_every_number_of_a_command_has_a_range_or_is_refused_with_the_reason() -> None:
    missing = {name: [*{*command.numbers} - command.ranges.keys()] for name, command in COMMANDS.items()}
    refused = missing.pop("rl")
    assert missing == {name: [] for name in missing}
    assert {name for name, command in COMMANDS.items() if not command.numbers} == WITHOUT_NUMBERS
    for name in refused:
        assert name in UNSUPPORTED
        with pytest.raises(ValueError, match="would be ignored here"):
            COMMANDS["rl"].start([f"--{name}=2"])


@pytest.mark.parametrize("name", WITH_NUMBERS)
@pytest.mark.parametrize("end", [0, -1])
def test_every_command_refuses_every_number_outside_its_range(name: str, end: int) -> None:
    """The error names the flag and comes from the command's own parser, before it reads folders or a model."""
    command, texts = COMMANDS[name], {}
    for flag in command.ranges.keys() & {*command.numbers}:
        outside = [v for v in CANDIDATES if not allowed(v, str(command.ranges[flag]))]
        shown = [str(int(v) if math.isfinite(v) and v == int(v) else v) for v in outside]
        texts[flag] = [text for text in shown if command.parsed(flag, text) is not None][end]
    while texts:  # settings that are checked together are named together
        with pytest.raises(ValueError, match=r"^out of range: ") as caught:
            command.start([f"--{flag}={text}" for flag, text in texts.items()])
        named = set(re.findall(r"--(\w+) \S+ \(must be", str(caught.value)))
        assert named
        assert named <= texts.keys()
        texts = {flag: text for flag, text in texts.items() if flag not in named}


def test_settings_of_a_yaml_or_given_in_python_are_held_to_the_same_ranges(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("beta: .nan\nnum_iterations: 2.5\n")
    with pytest.raises(ValueError, match=r"--beta nan .*; --num_iterations 2\.5 \(must be an integer in \[1, inf"):
        COMMANDS["rl"].start(["--config", str(settings)])
    with pytest.raises(ValueError, match=r"--limit 0 \(must be .* or None\); --gen_length 8 0 \(must be integers in"):
        evaluate("none", "sudoku", limit=0, gen_length=[8, 0])
    with pytest.raises(ValueError, match=r"--num_epochs nan .*; --max_steps 0 \(must be an integer in"):
        SFTConfig(num_epochs=NAN, max_steps=0)
    with pytest.raises(ValueError, match=r"--max_grad_norm nan .*; --top_p 0.0 \(must be in \(0, 1\]\); --top_k -1 "):
        DiffuGRPOConfig(output_dir="unused", top_k=-1, top_p=0.0, max_grad_norm=NAN)
    with pytest.raises(ValueError, match="--overlong must be one of truncate, drop, refuse, got 'cut'"):
        SFTConfig(overlong="cut")


def test_other_parsers_take_the_settings_of_rl(tmp_path: Path) -> None:
    """Scripts written for d1 create the configs with TRL's parser."""
    words = ["--output_dir", str(tmp_path), "--per_device_train_batch_size", "6", "--use_cpu", "true", "--segments=2"]
    (config,) = TrlParser((DiffuGRPOConfig,)).parse_args_and_config([*words, "--estimator=segments"])
    assert (config.segments, config.num_views, config.right_share) == (2, None, None)


def test_the_settings_of_sft_are_its_flags() -> None:
    assert COMMANDS["sft"].parser.parse_args([]) == SFTConfig()
    words = ["--template", "{a}", "{b}", "--lora_target_modules", "x", "y", "--eos_padding", "8", "--packing"]
    given = SFTConfig(template=["{a}", "{b}"], lora_target_modules=["x", "y"], eos_padding=8, packing=True)
    assert COMMANDS["sft"].parser.parse_args(words) == given
    assert SFTConfig().lora_target_modules is not SFTConfig().lora_target_modules


@pytest.mark.parametrize(
    ("limits", "value", "expected"),
    [
        (COUNT, 2.0, "2"),
        (COUNT, "1e2", "100"),
        (COUNT, 2.5, "2.5"),
        (COUNT | None, None, "None"),
        (COUNT | "auto", "auto", "'auto'"),
        (COUNT, True, "True"),
        (COUNT, "nan", "nan"),
        (SHARE, 1, "1"),
        (SHARE, "1e-1", "0.1"),
        (replace(COUNT, many=True), [2.0, "3", "x"], "[2, 3, 'x']"),
        (replace(SHARE, many=True), "x", "'x'"),
    ],
)
def test_numbers_of_a_yaml_file_get_the_type_of_their_range(limits: Range, value: Any, expected: str) -> None:
    assert repr(limits.convert(value)) == expected
