"""A flag or a command that another program has is answered with the one that is meant here."""

from __future__ import annotations

import pytest

from d1 import __main__ as tools
from d1.distill import train as distillation
from d1.eval import evaluate, harness
from d1.eval import run as evaluation
from d1.preference import train as preference
from d1.rl import train as rl
from d1.runs.cli import SettingsParser
from d1.runs.flag_names import COMMANDS, FLAGS
from d1.sft import train as sft

PARSERS = {
    "eval": evaluation.make_parser,
    "sft": sft.make_parser,
    "prefer": preference.make_parser,
    "distill": distillation.make_parser,
    "rl": rl.make_parser,
}
MEANT = {  # written by hand: what users of d1, TRL and lm-eval type, and the flag or argument of this library
    "eval": {
        "--task": "--dataset",
        "--tasks": "--dataset",
        "--model": "--model_path",
        "--model_name_or_path": "--model_path",
        "--pretrained": "--model_path",
        "--output": "--output_dir",  # a prefix is no abbreviation: there is a flag --output with choices
        "--output_path": "--output_dir",
        "--num_fewshot": "--few_shot",
        "--max_new_tokens": "--gen_length",
        "--data": "--data_file",
        "--dataset_path": "--data_file",
        "--adapter": "--checkpoint_path or --model_path",
        "--temp": "--temperature",
        "--model-path": "--model_path",
    },
    "sft": {
        "--model": "--model_name",
        "--model_name_or_path": "--model_name",
        "--lr": "--learning_rate",
        "--epochs": "--num_epochs",
        "--num_train_epochs": "--num_epochs",
        "--output": "--output_dir",
        "--data": "--train_data",
        "--dataset": "--train_data",
        "--dataset_name": "--train_data",
        "--data_file": "--train_data",
        "--per_device_train_batch_size": "--batch_size",
        "--gradient_accumulation_steps": "--grad_accum_steps",
        "--lora_rank": "--lora_r",
        "--max_seq_length": "--max_length",
        "--run_name": "--job_name",
        "--save_steps": "--eval_steps",
    },
    "prefer": {"--model": "--model_name", "--dataset": "--train_data", "--lr": "--learning_rate"},
    "distill": {"--task": "--train_data", "--gen_length": "--max_completion_length", "--bs": "--batch_size"},
    "rl": {
        "--model": "--model_path",
        "--lr": "--learning_rate",
        "--epochs": "--num_train_epochs",
        "--data": "--data_file",
        "--train_data": "--data_file",
        "--batch_size": "--per_device_train_batch_size",
        "--grad_accum_steps": "--gradient_accumulation_steps",
        "--gen_length": "--max_completion_length",
        "--group_size": "--num_generations",
        "--reward_fn": "--reward_file",
        "--full_finetune": None,
    },
    "chat": {"--model": "MODEL, without a flag", "--max_tokens": "--gen_length"},
    "fill": {"--model_path": "MODEL, without a flag"},
    "serve": {"--model": "MODEL, without a flag"},
    "watch": {"--model": "--model_path", "--task": "--dataset"},
    "merge": {"--output": "OUT, without a flag", "--base_model": "BASE, without a flag"},
    "export": {"--output_dir": "OUT, without a flag"},
    "a2d": {"--out_dir": "OUT, without a flag"},
    "fit": {"--model": "--model_path", "--num_gpus": "--gpus"},
}


def parse(command: str, typed: str) -> None:
    if command == "rl":
        PARSERS[command]().parse_args_and_config([typed, "x"])
    elif command in PARSERS:
        PARSERS[command]().parse_args([typed, "x"])
    else:
        tools.make_parser().parse_args([command, typed, "x"])


@pytest.mark.parametrize(
    ("command", "typed", "meant"), [(command, *pair) for command, rows in MEANT.items() for pair in rows.items()]
)
def test_the_flag_that_is_meant_is_named(command: str, typed: str, meant: str | None, capsys: object) -> None:
    with pytest.raises((SystemExit, ValueError)) as found:
        parse(command, typed)
    said = capsys.readouterr().err + str(found.value)  # type: ignore[attr-defined]
    if meant is None:
        assert "the nearest is" not in said
    elif typed == "--output" and command == "eval":
        assert "(another flag is --output_dir)" in said
    else:
        assert f"(the nearest is {meant})" in said, said


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        ("rl", "--log_places"),
        ("eval", "--order_temperature"),
        ("rl", "--order_temperature"),
        ("distill", "--path_weight"),
    ],
)
def test_a_removed_flag_names_the_commit_that_has_it(command: str, typed: str, capsys: object) -> None:
    with pytest.raises((SystemExit, ValueError)) as found:
        parse(command, typed)
    said = capsys.readouterr().err + str(found.value)  # type: ignore[attr-defined]
    assert typed in said
    assert "(removed, because it did not help; the code is at commit 6fbae12b)" in said, said


def test_several_hints_name_their_flags_and_files_and_calls_have_them_too(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        sft.make_parser().parse_args(["--lr", "1", "--epochs", "2", "--temperature", "1"])
    said = capsys.readouterr().err
    assert "(--lr: the nearest is --learning_rate) (--epochs: the nearest is --num_epochs) (--help" in said
    (tmp_path / "own.yaml").write_text("lr: 1e-4\n")
    with pytest.raises(ValueError, match=r"no such setting: lr \(the nearest is learning_rate\)"):
        sft.make_parser().parse_args(["--config", str(tmp_path / "own.yaml")])
    (tmp_path / "own.yaml").write_text("lr: 1e-4\nmodel: x\n")
    with pytest.raises(
        ValueError, match=r"\(--lr: the nearest is --learning_rate\) \(--model: the nearest is --model_path\)"
    ):
        rl.make_parser().parse_args_and_config(["--config", str(tmp_path / "own.yaml")])
    with pytest.raises(TypeError, match=r"\(the nearest is --few_shot\)"):
        evaluate("x", "sudoku", num_fewshot=3)


def test_flags_of_another_program_are_passed_on_without_a_hint(capsys) -> None:
    with pytest.raises(SystemExit):
        harness.make_parser().parse_args(["--tasks", "gsm8k"])
    assert "unrecognized" not in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "meant"), [("train", "sft or rl"), ("grpo", "rl"), ("evaluate", "eval")])
def test_the_command_that_is_meant_is_named(typed: str, meant: str, capsys) -> None:
    with pytest.raises(SystemExit):
        tools.make_parser().parse_args([typed])
    assert f"(the nearest is {meant})" in capsys.readouterr().err


def test_the_tables_name_only_what_exists_and_no_word_stands_in_two_rows() -> None:
    flags = {flag.lstrip("-") for make in PARSERS.values() for flag in make()._option_string_actions}
    for name, command in tools.COMMANDS.items():
        parser = SettingsParser(command.flags, name)
        flags |= {flag.lstrip("-") for flag in parser._option_string_actions} | {one.dest for one in parser._actions}
    for table, known in ((FLAGS, flags), (COMMANDS, {*tools.STAGES, *tools.COMMANDS})):
        words = [word for row, _ in table for word in row]
        assert sorted(words) == sorted({*words})
        assert {flag for _, row in table for flag in row} <= known
