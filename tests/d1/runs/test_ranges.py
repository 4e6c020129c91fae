"""The table of ranges: it knows every number of every command, and every command refuses what lies outside."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import ModelConfig

from d1 import __main__ as tools
from d1.eval import run as evaluation
from d1.rl import train as diffu_grpo_train
from d1.rl.config import DiffuGRPOConfig
from d1.runs.ranges import RANGES, check_ranges
from d1.sft import train as sft_train

NAN, INF = math.nan, math.inf
CANDIDATES = [
    -INF,
    -1e9,
    -7,
    -2,
    -1,
    -0.5,
    0,
    0.25,
    0.5,
    1,
    1.5,
    2,
    3,
    4,
    65535,
    65536,
    2**32 - 1,
    2**32,
    1e12,
    INF,
    NAN,
]


def allowed(value: float, row: str) -> bool:
    """A second reading of a row, by comparison with what stands between its brackets."""
    return any(lies_in(value, part) for part in row.removeprefix("list of ").split(" or "))


def lies_in(value: float, part: str) -> bool:
    if not part.endswith(("]", ")")):
        return part == str(value)
    low, high = (float(end) for end in re.findall(r"-?[\d.]+|-?inf", part))
    at_open_end = (value == low and "(" in part) or (value == high and ")" in part)
    whole = not part.startswith("integer") or (math.isfinite(value) and value == int(value))
    return math.isfinite(value) and low <= value <= high and not at_open_end and whole


ROWS = [
    (command, name.removeprefix(f"{command}."), row)
    for name, row in RANGES.items()
    for command in ([name.partition(".")[0]] if "." in name else [""])
]


@pytest.mark.parametrize(("command", "name", "row"), ROWS)
def test_a_row_takes_what_is_inside_and_refuses_the_rest(command: str, name: str, row: str) -> None:
    verdicts = [allowed(value, row) for value in CANDIDATES]
    assert any(verdicts)
    assert not all(verdicts)
    for value, inside in zip(CANDIDATES, verdicts, strict=True):
        setting: Any = [0.5, value] if row.startswith("list of") else value
        if inside:
            check_ranges({name: setting}, command)
        else:
            with pytest.raises(ValueError, match=rf"^out of range: --{name} .*{re.escape(str(value))}"):
                check_ranges({name: setting}, command)


@pytest.mark.parametrize("name", [name for name in RANGES if "." not in name])
def test_none_and_words_are_taken_only_where_the_row_says_so(name: str) -> None:
    words = re.split(r" or ", RANGES[name])
    for value in (None, "batch", "auto"):
        if str(value) in words:
            check_ranges({name: value})
        else:
            with pytest.raises(ValueError, match=f"--{name} {value}"):
                check_ranges({name: value})
    with pytest.raises(ValueError, match=f"--{name} True"):
        check_ranges({name: True})


def test_the_message_names_every_setting_with_value_and_range() -> None:
    with pytest.raises(ValueError, match="out of range") as caught:
        check_ranges({"beta": -1.0, "epsilon": 0.5, "reward_weights": [1.0, NAN], "max_steps": 0, "p_mask_prompt": 1.0})
    assert str(caught.value) == (
        "out of range: --beta -1.0 (must be in [0, inf)); --reward_weights 1.0 nan (must be numbers in (-inf, inf) or "
        "None); --max_steps 0 (must be an integer in [1, inf) or -1); --p_mask_prompt 1.0 (must be in [0, 1))"
    )


# ---- the commands


BARE = ["--output_dir", "/dev/null/no"]  # no folder can be made there
RL = [*BARE, "--report_to", "none", "--per_device_train_batch_size", "6", "--bf16", "false"]
COMMANDS: dict[str, tuple[Any, list[str], Callable[[Any], object]]] = {  # parser, what it requires, and its main
    "sft": (sft_train.make_parser(), BARE, sft_train.main),
    "rl": (diffu_grpo_train.make_parser(), RL, lambda both: diffu_grpo_train.main(*both)),
    "eval": (evaluation.make_parser(), ["--model_path", "none", "--dataset", "sudoku", *BARE], evaluation.main),
    "fit": (tools.make_parser(), ["fit", "--model_path", "none", "--stage", "rl"], tools.main),
    "chat": (tools.make_parser(), ["chat", "none"], tools.main),
    "watch": (tools.make_parser(), ["watch", "--model_path", "none", "--prompt", "a"], tools.main),
    "fill": (tools.make_parser(), ["fill", "none", "[MASK]"], tools.main),
}


def start(command: str, flags: list[str]) -> None:
    parser, required, main = COMMANDS[command]
    parse = parser.parse_args_and_config if command == "rl" else parser.parse_args
    main(parse([*required, *flags]))


def parsed(command: str, name: str, text: str) -> Any:
    """What a command's parser makes of `--name=text`; None where it refuses, or the flag is another's second name."""
    parser, required, _ = COMMANDS[command]
    try:
        value = vars(parser.parse_args([*required, f"--{name}={text}"])).get(name)
    except SystemExit:
        return None
    return value[0] if isinstance(value, list) else value


@functools.cache
def numbers_of(command: str) -> tuple[str, ...]:
    """All flags in a command's help that take 7 for a number."""
    parser, required, _ = COMMANDS[command]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        parser.parse_args([*required, "--help"])
    names = sorted(set(re.findall(r"--([a-z]\w*)", text.getvalue())))
    return tuple(name for name in names if type(parsed(command, name, "7")) in (int, float))


def test_rl_settings_that_may_be_numbers_are_all_seen() -> None:
    """What the search above finds by parsing, checked against the types in the dataclasses."""
    fields = {**DiffuGRPOConfig.__dataclass_fields__, **ModelConfig.__dataclass_fields__}
    kinds = {name: str(field.type) for name, field in fields.items()}
    numeric = {name for name, kind in kinds.items() if "int" in kind or "float" in kind}
    assert numeric - set(numbers_of("rl")) <= {"pad_to_multiple_of"}  # a word or a number, so a text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_of_a_command_has_a_row(command: str) -> None:
    names = numbers_of(command)
    assert len(names) >= 6
    assert [name for name in names if name not in RANGES and f"{command}.{name}" not in RANGES] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_every_number_outside_its_range(command: str) -> None:
    """By its flag, through its own parser, before it looks at its folders or its model."""
    for name in numbers_of(command):
        row = RANGES.get(f"{command}.{name}", RANGES.get(name, ""))
        outside = [str(int(v) if math.isfinite(v) and v == int(v) else v) for v in CANDIDATES if not allowed(v, row)]
        typed = [text for text in outside if parsed(command, name, text) is not None]  # else the parser refuses it
        for text in {*typed[:1], *typed[-1:]}:
            with pytest.raises(ValueError, match=rf"out of range: .*--{name} "):
                start(command, [f"--{name}={text}"])


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        *(("rl", [flag]) for flag in ("--beta=-1", "--epsilon=-1", "--delta=-1", "--temperature=nan", "--beta=nan")),
        *(
            ("rl", [flag])
            for flag in ("--temperature=inf", "--cfg_scale=nan", "--reward_weights=nan", "--lora_alpha=-4")
        ),
        *(("rl", [flag]) for flag in ("--weight_decay=-1", "--eval_limit=-1", "--eval_limit=0", "--max_steps=0")),
        *(("rl", [flag]) for flag in ("--num_train_epochs=-1", "--rollout_batch_size=-1", "--num_iterations=0")),
        *(("rl", [flag]) for flag in ("--num_iterations=-1", "--steps_per_generation=-1", "--block_length=0")),
        *(("rl", [flag]) for flag in ("--num_generations=0", "--gradient_accumulation_steps=0")),
        *(("rl", [flag]) for flag in ("--per_device_train_batch_size=0", "--ref_model_sync_steps=0")),
        *(("eval", [flag]) for flag in ("--temperature=nan", "--temperature=inf", "--cfg_scale=nan", "--limit=0")),
        *(("sft", [flag]) for flag in ("--max_steps=0", "--num_epochs=-1", "--learning_rate=nan", "--lora_alpha=-4")),
    ],
)
def test_nonsense_that_used_to_train_or_to_crash(command: str, flags: list[str]) -> None:
    name = flags[0].partition("=")[0]
    with pytest.raises(ValueError, match=rf"out of range: {name} "):
        start(command, flags)


def test_a_yaml_is_held_to_the_same_ranges(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("beta: .nan\nnum_iterations: 2.5\n")
    with pytest.raises(ValueError, match=r"--beta nan .*; --num_iterations 2\.5 \(must be an integer in \[1, inf"):
        start("rl", ["--config", str(settings)])


def test_the_table_needs_no_torch() -> None:
    module = sys.modules["d1.runs.ranges"]
    assert not {"torch", "transformers"} & set(vars(module))
