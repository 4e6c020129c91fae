"""`d1 task new FILE` writes a task that runs; `d1` alone prints its help."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import d1.eval
from d1 import __main__ as tools
from d1.rl import train
from d1.tasks import load_task
from tests.commands import ROOT

MODEL = str(ROOT / "pocket" / "arithmetic_base")


def new(*words: str) -> None:
    tools.main(tools.make_parser().parse_args(["task", "new", *words]))


def test_a_new_task_runs_in_evaluation_and_in_rl_at_once(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    new("mine.py")
    assert "python -m d1 eval --model_path MODEL --dataset mine.py" in capsys.readouterr().err
    assert "--dataset mine.py --max_steps 20" in Path("mine.py").read_text()
    (row,) = d1.eval.evaluate(MODEL, "mine.py")
    assert (row.task, row.gen_length, row.expected) == ("mine", 32, 5)
    words = "--use_cpu true --report_to none --max_steps 1 --num_iterations 1 --per_device_train_batch_size 6"
    parsed = train.make_parser().parse_args_and_config(["--model_path", MODEL, "--dataset", "mine.py", *words.split()])
    trainer = train.main(*parsed)
    rewards = {name for log in trainer.state.log_history for name in log if name.startswith("rewards/")}
    assert {"rewards/correct_reward/mean", "rewards/number_reward/mean", "rewards/accuracy/mean"} <= rewards


def test_a_new_task_judges_and_rewards_and_reads_a_file(tmp_path: Path) -> None:
    new(str(tmp_path / "mine.py"))
    task = load_task(str(tmp_path / "mine.py"))
    row = task.load_rows("test")[0]
    assert (row["ground_truth"], 16 + 8 - 5 + 9) == ("28", 28)
    assert task.score("<answer>28</answer>", row) == {"accuracy": 1.0}
    assert task.score("<answer>29</answer>", row) == {"accuracy": 0.0}
    texts = ["<answer>28</answer>", "<answer>7</answer>", "none"]
    columns = {"ground_truth": ["28"] * 3}
    assert [reward(texts, **columns) for reward in task.REWARDS] == [[1, 0, 0], [0.1, 0.1, 0]]
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    assert task.load_rows("train", str(tmp_path / "rows.jsonl"))["ground_truth"] == ["2"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("mine", "a task is a Python file: name it .*mine.py"),
        ("none/mine.py", "there is no folder .*none to write mine.py into"),
        ("there.py", "there.py is already there: choose another name"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("kept")
    with pytest.raises((ValueError, OSError), match=message):
        new(str(tmp_path / file))
    assert (tmp_path / "there.py").read_text() == "kept"
    with pytest.raises(ValueError, match="FILE is empty"):
        new("")


@pytest.mark.parametrize("name", ["data.jsonl", "folder/data.csv"])
def test_a_file_of_problems_is_no_task_and_the_right_flag_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is a file of problems, not a task: pass it as --data_file"):
        load_task(name)
    with pytest.raises(ValueError, match=r"unknown task 'openai/gsm8k' \(the nearest is gsm8k\)"):
        load_task("openai/gsm8k")


def test_d1_without_a_command_prints_the_help_with_status_0(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["d1"])
    with pytest.raises(SystemExit) as end:
        tools.cli()
    said = capsys.readouterr()
    assert (end.value.code, said.err) == (0, "")
    assert "python -m d1 rl --model_path X" in said.out
    assert "task new FILE" in said.out
